"""Cases: mechanisms of papers or of other code, described in a yaml, which can be audited without their code.

A case states what is claimed, and for each mechanism the sampling, the standard deviation of the noise, the number of
releases, and how far the exact value moves if one record changes. docs/audit.md has an example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import yaml
from hydra.utils import get_method

from dpgen_bench.audit.code import Code
from dpgen_bench.audit.distinguisher import Attacked
from dpgen_bench.audit.laws import Movement
from dpgen_bench.privacy.events import RELATIONS, Event, Relation, Sensitivity
from dpgen_bench.privacy.expect import expect_integer
from dpgen_bench.privacy.sampling import CLIENT_SAMPLINGS, SAMPLINGS, Sampling, Schedule
from dpgen_bench.utils.paths import CONF
from dpgen_bench.utils.validation import suggestion

_CASE = {"name", "title", "claimed"}
_CLAIM = {"epsilon", "delta", "relation", "source"}
_MECHANISM = {"name", "sampling", "moved", "std", "times"}
_DECLARED = {"sampling", "add_remove", "replace_one", "std", "times"}


@dataclass(frozen=True)
class Case:
    """A claim, and the mechanisms that it is about.

    Attributes:
        name: the name of the case.
        title: what it is, in one line.
        epsilon, delta, relation: the claim.
        source: where the claim is made.
        attacked: the mechanisms with their movements; empty for a case with code.
        code: the function that makes the releases, or None.
        declared: what is declared of this function, or None.
        above: for one mechanism, the limit of a test of counts (`count_test`), or None for likelihood ratios.
    """

    name: str
    title: str
    epsilon: float
    delta: float
    relation: Relation
    source: str
    attacked: tuple[Attacked, ...] = ()
    code: Code | None = None
    declared: Event | None = None
    above: float | None = None


def case_files() -> dict[str, Path]:
    """The cases of the bench by name."""
    return {path.stem: path for path in sorted((CONF / "audit").glob("*.yaml"))}


def load_case(path: Path) -> Case:
    """Read a case.

    Raises:
        ValueError: for a file that is no case; the message says what was expected.
        FileNotFoundError: if there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"expected the yaml of a case, got {path}, which is no file; correct the path.")
    content = yaml.safe_load(path.read_text())
    has_code = isinstance(content, dict) and "code" in content
    kind, optional = ({"code", "declared"}, set[str]()) if has_code else ({"mechanisms"}, {"above"})
    data = _mapping(content, _CASE | kind, f"{path}", optional)
    claim = _mapping(data["claimed"], _CLAIM, f"{path}, claimed")
    if claim["relation"] not in RELATIONS:
        raise ValueError(f"{path}: expected a relation in {', '.join(RELATIONS)}, got {claim['relation']!r}.")
    delta = _number(claim["delta"], f"{path}, claimed delta")
    if not 0.0 < delta < 1.0:
        raise ValueError(f"{path}: expected a claimed delta in (0, 1), got {delta!r}.")
    case = Case(
        str(data["name"]),
        str(data["title"]),
        _number(claim["epsilon"], f"{path}, claimed epsilon"),
        delta,
        claim["relation"],
        str(claim["source"]),
    )
    if has_code:
        return replace(case, code=_function(data["code"], path), declared=_declared(data["declared"], f"{path}"))
    if not isinstance(data["mechanisms"], list) or not data["mechanisms"]:
        raise ValueError(f"{path}: expected a list of mechanisms, got {data['mechanisms']!r}; give at least one.")
    entries = enumerate(data["mechanisms"], start=1)
    if data.get("above") is not None:
        if len(data["mechanisms"]) > 1:
            raise ValueError(f"{path}: expected one mechanism with `above`, got {len(data['mechanisms'])}.")
        case = replace(case, above=_number(data["above"], f"{path}, above"))
    return replace(case, attacked=tuple(_attacked(entry, f"{path}, mechanism {at}") for at, entry in entries))


def _function(name: Any, path: Path) -> Code:
    """The function of this dotted name, on the Python path."""
    try:
        code: Code = get_method(str(name))
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{path}: expected `code` to name a function, such as my_module.releases, got {name!r} ({error}); start "
            "the command in the folder of the module."
        ) from None
    return code


def _declared(entry: Any, where: str) -> Event:
    where = f"{where}, declared"
    entry = _mapping(entry, _DECLARED, where)
    sensitivity = Sensitivity(*(_number(entry[relation], f"{where}, {relation}") for relation in RELATIONS))
    times = expect_integer(entry["times"], f"{where}, times", advice="give the number of releases")
    return Event(_sampling(entry["sampling"], where), sensitivity, _number(entry["std"], f"{where}, std"), times)


def _attacked(entry: Any, where: str) -> Attacked:
    entry = _mapping(entry, _MECHANISM, where, optional={"rows"})
    moved = entry["moved"] if isinstance(entry["moved"], list) else [0.0, entry["moved"]]
    if len(moved) != 2:
        raise ValueError(f"{where}: expected `moved` as a distance or as two values, got {entry['moved']!r}.")
    rows = expect_integer(entry.get("rows", 1), f"{where}, rows", advice="give the number of rows of one release")
    first, second = (math.sqrt(rows) * _number(value, f"{where}, moved") for value in moved)
    std = _number(entry["std"], f"{where}, std")
    times = expect_integer(entry["times"], f"{where}, times", advice="give the number of releases")
    # An audit does not use the declared sensitivity, so the movement stands in its place.
    size = max(abs(first), abs(second), abs(second - first) / 2.0, math.ulp(0.0))
    event = Event(_sampling(entry["sampling"], where), Sensitivity(size, max(size, abs(second - first))), std, times)
    return Attacked(str(entry["name"]), event, Movement(first, second))


def _sampling(data: Any, where: str) -> Sampling:
    """The sampling of {kind: Poisson, rate: 1/469} and the like."""
    kinds: dict[str, Any] = {cls.__name__: cls for cls in (*SAMPLINGS, *CLIENT_SAMPLINGS)}
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in kinds:
        raise ValueError(f"{where}: expected a sampling with `kind` in {', '.join(kinds)}, got {data!r}.")
    fields = {key: value for key, value in data.items() if key != "kind"}
    if "rate" in fields:
        fields["rate"] = _number(fields["rate"], f"{where}, rate")
    if fields.get("schedule", "random") not in get_args(Schedule):
        raise ValueError(f"{where}: expected a schedule in {get_args(Schedule)}, got {fields['schedule']!r}.")
    expected = set(kinds[kind].__dataclass_fields__)
    if wrong := fields.keys() - expected:
        raise ValueError(
            f"{where}: expected settings of {kind} in {', '.join(sorted(expected)) or 'none'}, got {sorted(wrong)}."
        )
    try:
        sampling: Sampling = kinds[kind](**fields)
    except TypeError as error:
        raise ValueError(f"{where}: expected all settings of {kind}: {error}.") from None
    return sampling


def _mapping(data: Any, keys: set[str], where: str, optional: set[str] | None = None) -> Mapping[str, Any]:
    """`data` if it is a mapping with these keys."""
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected a mapping with {', '.join(sorted(keys))}, got {data!r}.")
    allowed = keys | (optional or set())
    for key in data:
        if key not in allowed:
            raise ValueError(
                f"{where}: expected keys in {', '.join(sorted(allowed))}, got {key!r}{suggestion(key, allowed)}."
            )
    if missing := sorted(keys - data.keys()):
        raise ValueError(f"{where}: expected {', '.join(missing)}, got none; add it.")
    return data


def _number(value: Any, where: str) -> float:
    """A number, also one that is written as a fraction such as 1/469."""
    try:
        return float(Fraction(value)) if isinstance(value, str) and "/" in value else float(value)
    except (TypeError, ValueError, ZeroDivisionError):
        raise ValueError(f"{where}: expected a number or a fraction such as 1/469, got {value!r}.") from None

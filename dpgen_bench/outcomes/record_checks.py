"""Decides whether a record is accepted: its form, its identity, its epsilon, its releases and its protocols.

A record that was made up with care cannot be told from a true one: samples and metric values are taken as they are
until somebody else makes the run again (`verified` in the record).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from jsonschema import Draft202012Validator
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from PIL import Image

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec, identify
from dpgen_bench.data.records import DatasetSpec, MissingData
from dpgen_bench.outcomes.listing import current_protocol, epsilon_number
from dpgen_bench.outcomes.soundness import budget_problem
from dpgen_bench.privacy.ledger import Entry, Ledger
from dpgen_bench.runs.epsilon import epsilons
from dpgen_bench.runs.plan import plan_spec
from dpgen_bench.store.measurements import is_part, protocol_hash
from dpgen_bench.store.pictures import MOST_BYTES
from dpgen_bench.store.records import Record, same_name
from dpgen_bench.utils.classes import find_target, targets_in
from dpgen_bench.utils.errors import without_paths
from dpgen_bench.utils.paths import METHODS, PACKAGE

EPSILON_TOLERANCE = 1e-6  # relative: accountants differ in the last digits between machines
ACCOUNT_S = 60.0  # limit in seconds of each epsilon of a ledger's table; what takes longer is not compared
MOST_TEXT = 2_000_000  # characters of a record's JSON
# Errors of a config that describes no run.
NO_RUN = (ValueError, LookupError, OSError, HydraException, OmegaConfBaseException)
EVERYTHING = (-math.inf, math.inf)
# The ranges of values by name. A calibrated accuracy is relative to that of real records, and may exceed 100.
RANGES = {
    r"acc_(.*_)?calibrated_pct": (0.0, math.inf),
    r"acc_.*_pct": (0.0, 100.0),
    r"fid": (0.0, math.inf),
    r"precision|recall|coverage": (0.0, 1.0),
    r"inception_score": (1.0, math.inf),
}


def record_problems(
    record: Record, data_root: str | None = None, picture: bool = True, cache: Path | None = None
) -> list[str]:
    """Why a record is not accepted; [] if it is.

    The planned releases are compared with the ledger's only where the dataset can be read, since the plan needs the
    number of records.

    Args:
        data_root: the folder of data sets; None compares no plan.
        picture: also check the file of its picture; false for a record that is not written yet.
        cache: a file with epsilons that this machine has computed before, or None.
    """
    problems = list(_form(record))
    if problems:  # the other checks rely on the form
        return problems
    problems += _identity(record)
    problems += [*_command(record), *_signatures(record), *_ledger(record)]
    if not problems:  # these take longer, and rely on a config that describes the run
        problems += [*_epsilons(record, cache), *(_planned(record, data_root) if data_root else ())]
    return [*problems, *_protocols(record), *(_picture(record) if picture else ())]


@cache
def _validator() -> Draft202012Validator:
    schema = json.loads(Path(__file__).with_name("record.schema.json").read_text())
    return Draft202012Validator(schema)


def _form(record: Record) -> Iterator[str]:
    errors = sorted(_validator().iter_errors(record.content), key=lambda error: list(map(str, error.absolute_path)))
    for error in errors[:5]:
        place = "/".join(map(str, error.absolute_path)) or "the record"
        yield f"{place}: {error.message[:200]}"
    text = json.dumps(record.content)
    if len(text) > MOST_TEXT:
        yield f"it has {len(text):,} characters; at most {MOST_TEXT:,} are accepted"
    if "NaN" in text and any(isinstance(value, float) and math.isnan(value) for value in _values(record.content)):
        yield "it has a value that is no number (NaN)"
    if paths := [text for text in _values(record.content) if isinstance(text, str) and without_paths(text) != text]:
        yield f"it names a path of a machine: {paths[0][:120]!r}"


def _values(content: Any) -> Iterator[Any]:
    """All values in nested dicts and lists."""
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list):
        for item in content:
            yield from _values(item)
    else:
        yield content


def _identity(record: Record) -> Iterator[str]:
    content = record.content
    if not identify(content["identity"]) == content["id"] == record.path.stem:
        yield (
            f"its identity is that of run {identify(content['identity'])}, but it says {content['id']} and is in "
            f"{record.path.name}"
        )
    if record.path.parent.name != str(record.config.method.get("name")):
        yield f"it is a record of {record.config.method.get('name')} in the folder {record.path.parent.name}"
    if foreign := [*_foreign(record.config)]:
        yield f"its config names {foreign[0]}, which was not called"
        return
    try:
        described = build_spec(record.config, planned=True)
    except NO_RUN as error:
        yield f"its config describes no run here: {error}"
        return
    if described.id != content["id"]:
        yield (
            f"its config describes run {described.id} now, not {content['id']}: the config was edited, or the method "
            "or the bench has changed since; make the run again"
        )


def _foreign(config: DictConfig) -> Iterator[str]:
    """What a config names that is no method, data set or first stage, although building the run would call it.

    Others send records, and a name under `_target_` can be that of any function.
    """
    kinds: dict[str, Callable[[type], bool]] = {
        "method": lambda cls: hasattr(cls, "fit"),
        "dataset": lambda cls: issubclass(cls, DatasetSpec),
        "init": lambda cls: hasattr(cls, "request"),
    }
    for group, is_one in kinds.items():
        content = OmegaConf.to_container(config[group]) if group in config else {}
        own = content.get("_target_") if isinstance(content, dict) else None
        for name in targets_in(content):
            try:
                found = find_target(name, "_target_")
            except ValueError:  # there is none of that name, so that nothing can be called
                continue
            is_own = name.partition(".")[0] in (PACKAGE.name, METHODS.name)
            if not isinstance(found, type) or not (is_one(found) if name == own else is_own):
                yield f"{name} as a part of its {group}"


def _command(record: Record) -> Iterator[str]:
    """Problems of the command, which others give to make the run again."""
    overrides = record.content["command"]
    try:
        config = compose_config(overrides)
        if foreign := [*_foreign(config)]:
            yield f"its command names {foreign[0]}, which was not called"
            return
        described = build_spec(config, planned=True).id
    except NO_RUN as error:
        yield f"its command describes no run here: {str(error).splitlines()[0]}"
        return
    if described != record.content["id"]:
        yield f"its command {' '.join(overrides)} makes run {described}, not {record.content['id']}"


def _signatures(record: Record) -> Iterator[str]:
    """Problems of who measured the run, and of who made it again."""
    signed = [record.content["measured_by"], *record.content["verified"]]
    names = Counter(same_name(each["name"]) for each in signed)
    if "" in names:
        yield "it has a blank name in measured_by or verified"
    if twice := [each["name"] for each in signed if names[same_name(each["name"])] > 1]:
        yield f"it names {twice[-1]} twice: a run is verified by others than the one who measured it"
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).date().isoformat()  # somewhere it is tomorrow already
    fits = [each["fit"] for each in record.content["measurements"] if "fit" in each]
    if late := [each["date"] for each in (*signed, *fits) if each["date"] > tomorrow]:
        yield f"it is of {late[0]}, which is in the future"


def _ledger(record: Record) -> Iterator[str]:
    """Problems of the ledger: epsilons that its entries do not give, or a budget that they do not prove."""
    content = record.content["ledger"]
    try:
        ledger = Ledger.from_dict(content)
    except (KeyError, TypeError, ValueError) as error:
        yield f"its ledger cannot be read ({type(error).__name__}: {error})"
        return
    for entry in ledger.entries.values():
        if entry.executed > entry.event.times:
            yield f"{entry.name}: {entry.executed} releases were made, but {entry.event.times} were approved"
    proven = epsilon_number(content["epsilon"], "proven")
    if proven is not None and math.isfinite(proven) and (problem := budget_problem(content, record.config.privacy)):
        yield problem


def _epsilons(record: Record, cache: Path | None) -> Iterator[str]:
    """Problems of the stated epsilons: others than those that the ledger's entries and the method's claim give."""
    stated = {key: value for key, value in record.content["ledger"]["epsilon"].items() if key != "certified"}
    certified = record.content["ledger"]["epsilon"].get("certified")
    method = build_spec(record.config, planned=True).method()
    ledger = Ledger.from_dict(record.content["ledger"])
    computed = epsilons(method, ledger, ACCOUNT_S, cache)
    for place, expected, found in _differences(computed, stated):
        if not (place.startswith("table.") and (_is_open(expected) or _is_open(found))):
            yield (
                f"its ledger's epsilon.{place} is {_shown(found)}, expected {_shown(expected)}, computed again from "
                "its entries and its method"
            )
    most = float(computed["proven"]) * (1.0 + EPSILON_TOLERANCE)
    if certified is not None and certified["epsilon"] is not None and not float(certified["epsilon"]) <= most:
        yield f"its certified ε is {certified['epsilon']}, expected at most the proven {computed['proven']:.6g}"
    for number, step in record.content.get("steps", {}).items():
        if not float(step["step"]["epsilon"]) <= float(computed["proven"]) * (1.0 + EPSILON_TOLERANCE):
            yield f"its step {number} has ε = {step['step']['epsilon']}, expected at most {computed['proven']:.6g}"


def _is_open(cell: Any) -> bool:
    """Whether a cell of the table of epsilons says that a machine could not compute it, in time or at all."""
    return isinstance(cell, str) and cell.startswith(("over ", "not available: the process ended"))


def _planned(record: Record, data_root: str) -> Iterator[str]:
    """Problems of the entries: other releases than the ones that the config's method requests."""
    config = record.config_at(data_root)
    if config.get("restart"):  # its plan needs the parent's ledger, which is another record
        return
    fonts = config.method.get("fonts")
    if fonts and not Path(fonts).is_dir():  # as a data set that this machine does not have
        return
    try:
        planned = plan_spec(build_spec(config, planned=True))
    except MissingData:
        return
    expected, found = (
        {name: _release(entry) for name, entry in ledger.entries.items()}
        for ledger in (planned, Ledger.from_dict(record.content["ledger"]))
    )
    if planned.records != record.content["ledger"]["records"]:
        yield f"its ledger counts {record.content['ledger']['records']:,} {planned.unit}s, not {planned.records:,}"
    if (planned.public_data or None) != (stated := record.content["ledger"].get("public_data")):
        yield f"its ledger states {stated or 'no'} public data, but its method uses {planned.public_data or 'none'}"
    if missing := sorted(expected.keys() - found.keys()):
        yield f"its ledger lacks the release {missing[0]!r}, which its config requests"
    if added := sorted(found.keys() - expected.keys()):
        yield f"its ledger has the release {added[0]!r}, which its config does not request"
    for name in sorted(expected.keys() & found.keys()):
        for place, wanted, stated in _differences(expected[name], found[name]):
            yield f"its release {name!r} has {place} {_shown(stated)}, expected {_shown(wanted)} by its config"


def _release(entry: Entry) -> dict[str, Any]:
    """What a release does to records: all of an entry but what happened during the run."""
    settled = replace(entry, executed=0, noise=None, diagnostics=None)
    return {key: value for key, value in settled.to_dict().items() if key not in ("executed", "noise", "diagnostics")}


def _differences(expected: Any, found: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two nested values differ by more than the tolerance of numbers: (place, expected, found)."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() | found.keys()):
            yield from _differences(expected.get(key), found.get(key), f"{place}.{key}" if place else key)
    elif not _same(expected, found):
        yield place, expected, found


def _shown(value: Any) -> str:
    """A value in a message, without what is long."""
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)[:100]


def _same(one: Any, other: Any) -> bool:
    """Equality up to the tolerance of calibrated numbers."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) or isinstance(other, float):
        try:
            return math.isclose(float(one), float(other), rel_tol=EPSILON_TOLERANCE)
        except (TypeError, ValueError):
            return False
    return bool(one == other)


def _protocols(record: Record) -> Iterator[str]:
    of_steps = [each for step in record.content.get("steps", {}).values() for each in step["measurements"]]
    for measurement in [*record.measurements.all(), *of_steps]:
        protocol = measurement["protocol"]
        name = str(protocol["name"])
        stated, computed = measurement["protocol_hash"], protocol_hash(protocol)
        if stated != computed:
            yield f"the hash of protocol {name} is {computed}, but it says {stated}"
        try:
            current = current_protocol(name)
        except (ValueError, HydraException):
            yield f"it is measured by protocol {name}, which conf/protocol does not have"
            continue
        if not is_part(protocol, current):
            changed = sorted(key for key in protocol.keys() | current.keys() if protocol.get(key) != current.get(key))
            yield f"the settings of protocol {name} have changed since ({', '.join(changed)}); measure the run again"
        if len(measurement["repeats"]) != int(protocol.get("repeats", 1)):
            yield f"protocol {name} has {protocol.get('repeats', 1)} repeats, the record {len(measurement['repeats'])}"
        for repeat in measurement["repeats"]:
            if repeat["metrics"].keys() != protocol["metrics"].keys():
                changed = sorted(repeat["metrics"].keys() ^ protocol["metrics"].keys())
                yield f"it has other metrics than protocol {name}: {', '.join(changed)}"
            for values in (metric["values"] for metric in repeat["metrics"].values()):
                yield from _impossible(values)
    if any(isinstance(value, int | float) and value < 0 for value in _values(record.content["cost"])):
        yield "it has a negative cost"


def _impossible(values: dict[str, float]) -> Iterator[str]:
    """Values that no measurement gives."""
    for name, value in values.items():
        least, most = next((limits for pattern, limits in RANGES.items() if re.fullmatch(pattern, name)), EVERYTHING)
        if not least <= value <= most:
            yield f"{name} is {value:g}, but it lies between {least:g} and {most:g}"


def _picture(record: Record) -> Iterator[str]:
    picture = record.picture
    if not picture.exists():
        yield f"its picture {picture.name} is missing"
        return
    if picture.stat().st_size > MOST_BYTES:
        yield f"its picture has {picture.stat().st_size:,} bytes; at most {MOST_BYTES:,} are accepted"
    try:
        with Image.open(picture) as opened:
            opened.verify()
            kind = opened.format
    except (OSError, SyntaxError) as error:
        yield f"its picture cannot be read ({type(error).__name__})"
        return
    if kind != "PNG":
        yield f"its picture is {kind}, not PNG"

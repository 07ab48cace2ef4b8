"""What the yaml of a table may say: its keys and their types, checked when it is loaded (see CONTRIBUTING.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from dpgen_bench.utils.validation import check_types


@dataclass(frozen=True)
class RowSpec:
    """An entry of `rows`, after its grid was expanded: the run that answers a printed row, or why there is none."""

    of: dict[str, str]
    run: str | None = None
    quick: str | None = None
    why: str | None = None
    caveat: str | dict[str, str] | None = None


@dataclass(frozen=True)
class QuickSpec:
    """What differs at scale quick."""

    protocol: str | None = None
    kept_steps: list[int] | None = None


@dataclass(frozen=True)
class LeaderboardSpec:
    """Which figure gives the lines of a table their places."""

    by: str
    better: str | None = None
    unit: str = "record"


@dataclass(frozen=True)
class TableSpec:
    """A table as its yaml has it."""

    title: str
    protocol: str
    note: str = ""
    paper: str | None = None
    published: str | None = None
    sweeps: list[str] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    parents: dict[str, str] = field(default_factory=dict)
    kept_steps: list[int] | None = None
    caveat: dict[str, str] | str | None = None
    quick: dict[str, Any] | None = None
    leaderboard: dict[str, Any] | None = None
    plot: Any = None


def check_table(name: str, content: Mapping[str, Any]) -> None:
    """Check the keys and types of a table's yaml, whose grid rows are expanded.

    Raises:
        ValueError: for a key that no table has, one that is missing, or a value of another type.
    """
    _check(TableSpec, content, f"table {name}")
    for entry in content.get("rows", []):
        _check(RowSpec, entry, f"table {name}, rows")
    for key, cls in (("quick", QuickSpec), ("leaderboard", LeaderboardSpec)):
        if content.get(key) is not None:
            _check(cls, content[key], f"table {name}, {key}")


def _check(cls: type, given: Any, where: str) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: expected a mapping of keys to values, got {given!r}; write it as `key: value`.")
    known = [each.name for each in fields(cls)]
    if unknown := sorted(set(map(str, given)) - set(known)):
        raise ValueError(f"{where}: expected keys among {', '.join(known)}, got {unknown}; correct the name.")
    needed = [each.name for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING]
    if missing := [key for key in needed if key not in given]:
        raise ValueError(f"{where}: expected the keys {', '.join(needed)}, got none of {missing}; add them.")
    check_types(cls, {str(key): value for key, value in given.items()}, where)

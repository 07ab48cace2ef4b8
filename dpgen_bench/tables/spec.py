"""A table's yaml as dataclasses: `parse_table` checks its keys and types and is the only reader of the raw mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from dpgen_bench.tables.grid import expand_rows
from dpgen_bench.tables.plot_spec import PlotSpec, parse_plots
from dpgen_bench.utils.validation import check_keys, check_types, frozen

FORMATS = ("md", "tex", "csv", "html")  # in which a table can be written

Spec = TypeVar("Spec")
Caveat = str | dict[str, str] | None  # one reason for all metrics, or one for each


@dataclass(frozen=True)
class RowSpec:
    """An entry of `rows`, after its grid was expanded: the run for a printed row, or why there is none.

    Args:
        of: fields of the printed row with their text, which name it (see `published.PublishedRow`).
        run: the multirun line whose runs reproduce the row.
        reduced: a multirun line that stands in for `run` while `run` has no values: runs of a reduced preset, or of
            another protocol. Its values are shown with what differs, and never count as a reproduction.
        quick: the multirun line that replaces `run` at scale quick.
        why: the reason for which the row has no run.
        caveat: why the row's values are not a reproduction, although scale and protocol are the paper's.
    """

    of: dict[str, str]
    run: str | None = None
    reduced: str | None = None
    quick: str | None = None
    why: str | None = None
    caveat: Caveat = None


@dataclass(frozen=True)
class QuickSpec:
    """What differs at scale quick; None: the default protocol, and no generators are kept during training."""

    protocol: str | None = None
    kept_steps: tuple[int, ...] | None = None


@dataclass(frozen=True)
class LeaderboardSpec:
    """How the lines of a leaderboard are ranked.

    Args:
        by: the metric by which lines are ranked.
        better: which direction is better; needed for a metric that the bench does not know.
        unit: the privacy unit, "record" or "client", that all lines share.
    """

    by: str
    better: Literal["lower", "higher"] | None = None
    unit: str = "record"


@dataclass(frozen=True)
class TableSpec:
    """A table of conf/table; docs/extend/table.md describes each key for authors.

    Args:
        protocol: the measurement protocol of its runs; for a paper's table the paper's own.
        paper, published: the paper, and the number of its table, whose printed values stand next to the measured ones.
        sweeps: multirun lines of runs that answer no printed row.
        rows: which runs answer which printed rows.
        metrics: the columns; empty: those of the printed table.
        settings: settings of the methods that are shown as columns, `init`, and keys of the config such as init.share.
        by_method: each method has a part of its own, whose columns are the settings that its lines differ in.
        parents: multirun lines, of one run each, from which other runs restart.
        kept_steps: steps at which generators are kept and measured.
        plot: the table's plots.
    """

    title: str
    protocol: str
    note: str = ""
    paper: str | None = None
    published: str | None = None
    sweeps: tuple[str, ...] = ()
    rows: tuple[RowSpec, ...] = ()
    metrics: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    by_method: bool = False
    parents: dict[str, str] = field(default_factory=dict)
    kept_steps: tuple[int, ...] | None = None
    caveat: Caveat = None
    quick: QuickSpec = field(default_factory=QuickSpec)
    leaderboard: LeaderboardSpec | None = None
    plot: tuple[PlotSpec, ...] = ()


def parse_table(name: str, content: Mapping[str, Any]) -> TableSpec:
    """The table of that yaml, with each grid entry of its `rows` replaced by the rows that it stands for.

    Raises:
        ValueError: for a key that no table has, one that is missing, a value of another type, a grid that cannot be
            (see `expand_rows`), an entry of `rows` that has not one of `run` and `why`, or `by_method` in a table that
            compares methods.
    """
    where = f"table {name}"
    values = dict(content)
    if "rows" in values:
        values["rows"] = _parse_rows(values["rows"], f"{where}, rows")
    if "published" in values:
        values["published"] = _number_as_text(values["published"])
    if "quick" in values:
        values["quick"] = _build(QuickSpec, values["quick"], f"{where}, quick")
    if values.get("leaderboard") is not None:
        values["leaderboard"] = _build(LeaderboardSpec, values["leaderboard"], f"{where}, leaderboard")
    try:
        values["plot"] = parse_plots(values.get("plot"))
    except ValueError as error:
        raise ValueError(f"{where}, {error}") from None
    table = _build(TableSpec, values, where)
    if table.by_method and (table.leaderboard or table.published):
        raise ValueError(
            f"{where}: expected `by_method` in a table of sweeps, got one with "
            f"{'`leaderboard`' if table.leaderboard else '`published`'}, which compares methods; remove one of them."
        )
    return table


def _parse_rows(entries: Any, where: str) -> list[RowSpec]:
    if not isinstance(entries, list | tuple):
        raise ValueError(
            f"{where}: expected a list of entries, got {entries!r}; begin each entry with `- of:` and the fields of a "
            "printed row."
        )
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise ValueError(
                f"{where}: expected a mapping of keys to values, got {entry!r}; write it as `- of: {{method: NAME}}`."
            )
        if "of" in entry and not isinstance(entry["of"], Mapping):
            raise ValueError(
                f"{where}.of: expected the fields of a printed row and their text, got {entry['of']!r}; write it as "
                "`of: {method: NAME}`."
            )
    try:
        rows = expand_rows(entries)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return [_parse_row(row, where) for row in rows]


def _parse_row(row: Mapping[str, Any], where: str) -> RowSpec:
    if "of" in row:
        row = {**row, "of": {str(key): _number_as_text(value) for key, value in row["of"].items()}}
    spec = _build(RowSpec, row, where)
    for name in ("run", "reduced", "quick"):
        line = getattr(spec, name)
        if line is not None and not line.strip():
            raise ValueError(
                f"{where}: expected a multirun line under `{name}` in the entry of {spec.of}, got none; write the "
                "arguments of `dpgen run -m`, or leave the key out."
            )
    if spec.reduced and not spec.run:
        raise ValueError(
            f"{where}: expected `run` next to `reduced` in the entry of {spec.of}, got no `run`; write the paper's own "
            "run there, with which the reduced one is compared."
        )
    if bool(spec.run) == bool(spec.why):
        got = "both" if spec.run else "neither"
        raise ValueError(
            f"{where}: expected one of `run` and `why` in the entry of {spec.of}, got {got}; write `run` if the row "
            "can be reproduced, else `why` with the reason."
        )
    return spec


def _number_as_text(value: Any) -> Any:
    """Printed fields and numbers of tables are text, for which a yaml may write a number: `epsilon: 10`."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _build(cls: type[Spec], content: Any, where: str) -> Spec:
    check_keys(cls, content, where)
    check_types(cls, content, where)
    return cls(**{str(key): frozen(value) for key, value in content.items()})

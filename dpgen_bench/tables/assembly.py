"""Fill a table: the published values, the measured ones, their differences, and the caveats of each comparison."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hydra.errors import HydraException

from dpgen_bench.config.display import CLASSIFIERS, METRICS, dataset_name, method_name, relation_name
from dpgen_bench.outcomes.listing import describe_dataset, is_changed, setting_of
from dpgen_bench.privacy.events import budget_text
from dpgen_bench.tables.expand import check_scale, line_of, parent_ids, reduced_line_of, sweep_lines
from dpgen_bench.tables.leaderboard import ranked
from dpgen_bench.tables.lines import (
    CONDITIONAL,
    ILLEGIBLE,
    NOTHING,
    PUBLIC_DATA,
    SERVER,
    BuiltTable,
    Cell,
    Line,
    tolerance_of,
)
from dpgen_bench.tables.load import load_table
from dpgen_bench.tables.published import NAMING_FIELDS, PublishedRow, published_rows
from dpgen_bench.tables.ranking import COMPARISON
from dpgen_bench.tables.reproduction import caveat_of, caveats_of_runs, check_caveats, check_stand_in, stated_caveats
from dpgen_bench.tables.rows import TableRow, rows_of
from dpgen_bench.tables.spec import RowSpec, TableSpec
from dpgen_bench.utils.validation import closest, suggestion


def build(name: str, results: Path, scale: str = "paper") -> BuiltTable:
    """The table of that name in conf/table, filled with the values of the runs under `results`.

    Raises:
        ValueError: for an unknown table or scale, or a table whose keys contradict each other.
    """
    return assemble(name, load_table(name), results, scale)


def assemble(name: str, table: TableSpec, results: Path, scale: str = "paper") -> BuiltTable:
    """The table with the values of the runs under `results`; raises what `build` does."""
    check_scale(scale)
    try:
        return _assemble(name, table, results, scale)
    except (ValueError, HydraException) as error:
        raise ValueError(f"table {name}: {error}") from error


def _assemble(name: str, table: TableSpec, results: Path, scale: str) -> BuiltTable:
    parents = parent_ids(table, results, scale)
    # Lines of runs that answer no printed row come first, then the printed rows in their order.
    sources: list[tuple[PublishedRow | None, TableRow | None, str, RowSpec | None]] = []
    metrics: list[str] = list(table.metrics)
    printed = _printed_rows(table)
    if printed:
        metrics = metrics or list(dict.fromkeys(metric for row in printed for metric in row.cells))
        sources = [
            (row, *_find_runs(table, row, entry, results, parents, scale), entry)
            for row, entry in _entries(table, printed)
        ]
    check_caveats(table, metrics)
    own = rows_of(sweep_lines(table, scale), results, parents)
    sources = [*((None, row, "", None) for row in own), *sources]
    check_settings(table, own)
    check_metrics(table, [row for _, row, _, _ in sources if row is not None])
    lines = []
    for printed_row, row, why, entry in sources:
        caveats: list[str] = []
        if printed_row is not None and entry is not None and row is not None:
            caveats = caveats_of_runs(table, entry, row, results, parents)
        lines.append(_line(table, metrics, printed_row, row, why, entry, caveats))
    if table.leaderboard:
        lines = ranked(table, table.leaderboard, lines)
    note = " ".join([*table.note.split(), *([COMPARISON] if table.leaderboard else [])])
    if note and printed and scale == "quick":
        note = f"Of the paper's own runs, for which these stand in: {note}"
    remarks = _remarks([line.row for line in lines if line.row is not None])
    return BuiltTable(
        name, table.title, note, scale, metrics, lines, remarks, bool(printed), table.settings, table.by_method
    )


def _printed_rows(table: TableSpec) -> list[PublishedRow]:
    if bool(table.paper) != bool(table.published):
        raise ValueError(
            "expected `paper` and `published` both, or neither: the source and the table in results/published."
        )
    return published_rows(table.paper, table.published) if table.paper and table.published else []


def _entries(table: TableSpec, printed: Sequence[PublishedRow]) -> list[tuple[PublishedRow, RowSpec | None]]:
    """Each printed row with the entry of `rows` that names it, if one does.

    Raises:
        ValueError: if an entry names no printed row, or two name the same.
    """
    named: dict[int, RowSpec] = {}
    for entry in table.rows:
        of = entry.of
        if unknown := sorted(of.keys() - set(NAMING_FIELDS)):
            raise ValueError(
                f"expected under `of` fields of a printed row ({', '.join(NAMING_FIELDS)}), got {unknown}"
                f"{suggestion(unknown[0], NAMING_FIELDS)}; correct the name."
            )
        matching = [i for i, row in enumerate(printed) if all(getattr(row, key) == text for key, text in of.items())]
        if not matching:
            rows = dict.fromkeys(str({key: getattr(row, key) for key in of}) for row in printed)
            closest = difflib.get_close_matches(str(of), rows, n=3, cutoff=0.0)
            raise ValueError(
                f"expected `of` to name a printed row of {table.paper}, table {table.published}, got {of}; the closest "
                f"are {', '.join(closest)}. Correct the text; results/published has the whole table."
            )
        if taken := [i for i in matching if i in named]:
            raise ValueError(f"expected each printed row to be named once; {printed[taken[0]]} is also named by {of}.")
        named.update(dict.fromkeys(matching, entry))
    return [(row, named.get(i)) for i, row in enumerate(printed)]


def _find_runs(
    table: TableSpec,
    printed: PublishedRow,
    entry: RowSpec | None,
    results: Path,
    parents: dict[str, str],
    scale: str,
) -> tuple[TableRow | None, str]:
    """The runs that reproduce a printed row or stand in for them, and ""; or None and the reason why there are none."""
    if entry is None:
        return None, "not implemented"
    line = line_of(table, entry, scale)
    if line is None:
        return None, f"not run: {entry.why}"
    row = _one_row(printed, line, results, parents)
    if scale == "paper" and not row.measured and (line := reduced_line_of(table, entry)):
        stand_in = replace(_one_row(printed, line, results, {}), stands_for=row)
        check_stand_in(stand_in, row)
        row = stand_in if stand_in.measured else row
    return row, ""


def _one_row(printed: PublishedRow, line: str, results: Path, parents: dict[str, str]) -> TableRow:
    rows = rows_of([line], results, parents)
    if len(rows) != 1:
        raise ValueError(
            f"expected runs that differ in their seed alone for {printed.method}, got {len(rows)} by: {line}"
        )
    return rows[0]


def check_settings(table: TableSpec, rows: Sequence[TableRow]) -> None:
    """
    Raises:
        ValueError: if the table names a setting that none of its methods has.
    """
    for name in table.settings:
        if rows and not any(setting_of(row.specs[0].config, name, "") for row in rows):
            raise ValueError(
                f"expected under `settings` settings of methods or keys of the config, got {name!r}, which no run has."
            )


def check_metrics(table: TableSpec, rows: Sequence[TableRow]) -> None:
    """
    Raises:
        ValueError: if the table names a metric that no measured run has, and the name is almost that of another.
    """
    measured = {name for row in rows for values in row.known for name in values}
    known = {*measured, *METRICS, *(f"acc_{classifier}_pct" for classifier in CLASSIFIERS)}
    for name in table.metrics if measured else ():
        if name not in known and (close := closest(name, known, 0.85)):
            raise ValueError(
                f"expected under `metrics` values that a run has, got {name!r}, which no run of this table has "
                f"(did you mean {close!r}?); correct the name."
            )


def _line(
    table: TableSpec,
    metrics: Sequence[str],
    printed: PublishedRow | None,
    row: TableRow | None,
    why: str,
    entry: RowSpec | None,
    caveats: Sequence[str],
) -> Line:
    cells = {}
    for metric in metrics:
        reasons = [*stated_caveats(table, metric), *stated_caveats(entry, metric), *caveats]
        cells[metric] = _cell(table, metric, printed, row, reasons)
    tail = _tail(row, why)
    expected = [cell for cell in cells.values() if printed is None or cell.published is not None or cell.illegible]
    missing = [cell for cell in expected if cell.measured is None]
    if tail["status"] == "measured" and missing:
        tail["status"] = "measured in part" if len(missing) < len(expected) else NOTHING
    tail["status"] += "".join(f"; {reason}" for reason in (row.budget_problems() if row else ()))
    return Line(_head(table, printed, row), cells, tail, row, printed)


def _head(table: TableSpec, printed: PublishedRow | None, row: TableRow | None) -> dict[str, str]:
    """The columns that name a line, as printed or else as configured, and those with the epsilons of its runs."""
    head: dict[str, str] = {}
    config = row.specs[0].config if row else None
    if printed:
        head = {
            "method": printed.method,
            "variant": printed.variant,
            "reported in": printed.reported_in,
            "dataset": printed.dataset,
            "ε published": printed.epsilon or ILLEGIBLE,
            "δ published": printed.delta,
        }
        head = {key: value or "–" for key, value in head.items()}
        if "this paper" in head["reported in"]:
            head["reported in"] = "–"
    if config and not printed:
        head = {"method": str(config.method.name)}
    for name in table.settings:
        # Of a folder its name, because its place differs between machines.
        head[name] = "–" if config is None else setting_of(config, name).rsplit("/", 1)[-1]
    if not printed:
        head["dataset"] = describe_dataset(config) if config else "–"
    if config is None or row is None:
        blank = ("ε budget", "ε proven", SERVER, "ε claimed", CONDITIONAL, "relation, δ, by", PUBLIC_DATA)
        return {**head, **dict.fromkeys(blank, "–")}
    privacy = config.privacy
    by = f"{relation_name(privacy.relation)}, {privacy.delta:g}, {privacy.accountant}" + (
        " (of clients)" if row.unit == "client" else ""
    )
    return {
        **head,
        "ε budget": budget_text(privacy.epsilon),
        "ε proven": row.epsilon("proven"),
        SERVER: row.epsilon("server"),
        "ε claimed": row.epsilon("claimed"),
        CONDITIONAL: row.epsilon("conditional"),
        "relation, δ, by": "–" if privacy.epsilon == math.inf else by,
        PUBLIC_DATA: row.public_data or "–",
    }


def _tail(row: TableRow | None, why: str) -> dict[str, str]:
    """The columns that say how a line's values were measured."""
    if row is None:
        return {"seeds": "–", "scale": "–", "protocol": "–", "status": why}
    parts = sorted({part for measurement in row.measurements.values() for part in measurement.get("parts", [])})
    parts = ["another text of it" if part == row.protocol else part for part in parts]
    changed = " (changed)" if is_changed(row.specs[0].protocol_record()) else ""
    return {
        "seeds": str(len(row.measured)),
        "scale": row.scale,
        "protocol": row.protocol + changed + (f" (values of {', '.join(parts)})" if parts else ""),
        "status": row.status(),
    }


def _cell(
    table: TableSpec, metric: str, printed: PublishedRow | None, row: TableRow | None, reasons: Sequence[str]
) -> Cell:
    measured = row.summary(metric) if row else None
    text = row.cell(metric) if row else "–"
    published = printed.cells.get(metric) if printed else None
    if published is None:
        return Cell(measured=measured, text=text)
    return Cell(
        published=published.value,
        published_std=published.std,
        note=published.note,
        illegible=published.value is None,
        measured=measured,
        text=text,
        caveat=caveat_of(table, metric, printed, row, measured, reasons) if row and printed and measured else "",
        decimals=published.decimals,
        tolerance=None if published.value is None else tolerance_of(metric, published.value, published.std),
    )


def _remarks(rows: Iterable[TableRow]) -> list[str]:
    """`Method, data set, ε: remark` for each remark in the rows' measurements; each line once."""
    lines = []
    for row in rows:
        config = row.specs[0].config
        names = method_name(str(config.method.name)), dataset_name(str(config.dataset.name))
        name = f"{', '.join(names)}, ε = {budget_text(config.privacy.epsilon)}"
        lines += [f"{name}: {note}" for note in row.notes()]
    return list(dict.fromkeys(lines))

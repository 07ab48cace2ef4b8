"""Rank the lines of a leaderboard; a line that is not comparable with the others gets no place, with the reason."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from dpgen_bench.config.display import direction, method_name
from dpgen_bench.tables.lines import TO_BEST, Line
from dpgen_bench.tables.naming import budget_of, has_public_data_of, is_real_data, uses_no_records
from dpgen_bench.tables.ranking import standings, why_no_place
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.tables.spec import LeaderboardSpec, TableSpec

COSTS = re.compile(r"(seconds|peak_memory|bytes|comm|parameters|steps)_")


def ranked(table: TableSpec, board: LeaderboardSpec, lines: Sequence[Line]) -> list[Line]:
    """The lines by data set, then epsilon, then place, with the place as the first column, and the `Standing` of each.

    Lines of one data set and one epsilon are ranked by the mean of the metric `leaderboard.by`: the lowest first for
    distances and costs, the highest first for scores and accuracies. For other metrics `leaderboard.better` gives the
    direction. All lines must have the same relation, delta, accountant and protocol.

    A measured line has no place, and its status gives the reason and the seed, if one of its configured seeds is not
    measured or lacks the metric (the measured seeds may be the better ones), or if the ledger of a seed, which counts
    more than its config,

    - protects another unit than `leaderboard.unit`, or is under another budget;
    - with a finite budget: is marked as unproven, kept private diagnostics, was counted under another relation, delta
      or accountant, or proves nothing, more than the budget, or less than 98% of it (what it would do with all is not
      known).

    The status of a line says if its value is not better than that of the best runs on its data set that use no records
    (a proven epsilon of 0), and no public data but the line's own; for costs it does not.

    Raises:
        ValueError: if two lines differ in relation, delta, accountant or protocol, a line is a printed one, or `by` is
            not a metric of the table or is a metric whose direction is unknown.
    """
    rows = [line.row for line in lines if line.row is not None]
    if len(rows) < len(lines):
        raise ValueError("expected a leaderboard of measured runs, got rows of a printed table; remove `rows`.")
    _expect_comparable(rows)
    by = board.by
    lower = _lower_is_better(table, board, rows)
    groups: dict[tuple[str, float], list[tuple[Line, str]]] = {}
    for line, row in zip(lines, rows, strict=True):
        epsilon = row.specs[0].config.privacy.epsilon  # lines without a budget have no place and come first
        group = (str(line.head["dataset"]), -1.0 if epsilon is None else float(epsilon))
        groups.setdefault(group, []).append((line, why_unranked(row, by, board.unit)))
    placed = [line for group in sorted(groups) for line in _placed(groups[group], by, lower)]
    return placed if COSTS.match(by) else [_compared_with_no_records(line, placed, by, lower) for line in placed]


def _compared_with_no_records(line: Line, placed: Sequence[Line], by: str, lower: bool) -> Line:
    """The line, with a status that says if it is not better than a line of its data set that uses no records."""
    sign = 1 if lower else -1

    def value(other: Line) -> float:
        summary = other.cells[by].measured
        ranked = summary is not None and other.standing is not None and other.standing.place is not None
        return sign * summary.mean if summary is not None and ranked else math.inf

    on_its_data = [other for other in placed if other.head["dataset"] == line.head["dataset"]]
    others = [other for other in on_its_data if uses_no_records(other) and has_public_data_of(line, other)]
    best = min(others, key=value, default=line)
    if uses_no_records(line) or not value(best) <= value(line) < math.inf or best is line:
        return line
    remark = f"; not better than {method_name(best.head['method'])}, which uses no records"
    return replace(line, tail={**line.tail, "status": line.tail["status"] + remark})


def _is_upper_end(line: Line) -> bool:
    """Whether the line measures the records themselves, which no generator competes with."""
    return is_real_data(line) and budget_of(line) == math.inf


def _placed(group: Sequence[tuple[Line, str]], by: str, lower: bool) -> list[Line]:
    """The lines of one data set and epsilon in the order of their places, those without a place last."""
    values = [
        _values(line.row, by)
        if line.row is not None and line.row.measured and not why and not _is_upper_end(line)
        else None
        for line, why in group
    ]
    out: list[tuple[tuple[float, float], Line]] = []
    for (line, why), standing in zip(group, standings(values, lower), strict=True):
        tail = {**line.tail, "status": line.tail["status"] + (f"; no place: {why}" if why else "")}
        head = {"place": standing.place_text, **line.head}
        placed = replace(line, head=head, tail={TO_BEST: standing.comparison, **tail}, standing=standing)
        out.append((standing.order, placed))
    # Python's sort is stable: lines with equal means share a place and keep the order of the yaml.
    return [line for _, line in sorted(out, key=lambda pair: pair[0])]


def _lower_is_better(table: TableSpec, board: LeaderboardSpec, rows: Sequence[TableRow]) -> bool:
    by, better = board.by, board.better
    if by not in table.metrics:
        raise ValueError(f"expected leaderboard.by among the table's metrics, {', '.join(table.metrics)}, got {by!r}.")
    known = direction(by)
    if known and better not in (None, known):
        raise ValueError(f"expected leaderboard.better {known} for {by}, got {better!r}.")
    if known is None:
        names = sorted({name for row in rows for values in row.known for name in values})
        if better is None:
            ranks = [name for name in names if direction(name)]
            raise ValueError(
                f"expected as leaderboard.by a metric whose direction is known ({', '.join(ranks) or 'such as fid'}), "
                f"got {by!r}; choose one, or give leaderboard.better (lower or higher)."
            )
        if names and by not in names:
            raise ValueError(f"expected as leaderboard.by a metric that a run has ({', '.join(names)}), got {by!r}.")
    return (known or better) == "lower"


def _expect_comparable(rows: Sequence[TableRow]) -> None:
    for key, of in (
        ("relation", lambda row: row.specs[0].config.privacy.relation),
        ("delta", lambda row: float(row.specs[0].config.privacy.delta)),
        ("accountant", lambda row: row.specs[0].config.privacy.accountant),
        ("protocol", lambda row: str(row.specs[0].protocol_record())),
    ):
        if len({of(row) for row in rows}) > 1:
            names = ", ".join(sorted({str(of(row))[:60] for row in rows}))
            raise ValueError(f"expected one {key} for all lines of a leaderboard, got {names}.")


def why_unranked(row: TableRow, by: str, unit: str) -> str:
    """Why a measured line has no place; "" if it has one, or if no run of it is measured."""
    if not row.measured:
        return ""
    specs = [spec for spec, folder in zip(row.specs, row.folders, strict=True) if folder in row.measured]
    ledgers = [(spec.seed, ledger, spec.config.privacy) for spec, ledger in zip(specs, row.ledgers, strict=True)]
    return why_no_place(ledgers, _values(row, by), len(row.folders), by, unit)


def _values(row: TableRow, by: str) -> list[list[float]]:
    """The metric of each measured seed that has it, one value for each repeat."""
    return [values[by] for values in row.known if values.get(by)]

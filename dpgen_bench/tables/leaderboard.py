"""Rank the lines of a leaderboard; a line that is not comparable with the others gets no place, with the reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from dpgen_bench.runs.display import direction
from dpgen_bench.runs.listing import epsilon_number
from dpgen_bench.runs.soundness import budget_problem, diagnostics_kept
from dpgen_bench.tables.lines import Line
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.tables.spec import LeaderboardSpec, TableSpec

# A run that spends less than this share of its budget was trained with more noise than the budget requires.
SPENT = 0.98


def ranked(table: TableSpec, board: LeaderboardSpec, lines: Sequence[Line]) -> list[Line]:
    """The lines by data set, then epsilon, then place, with the place as the first column.

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

    Raises:
        ValueError: if two lines differ in relation, delta, accountant or protocol, a line is a printed one, or `by` is
            not a metric of the table or is a metric whose direction is unknown.
    """
    rows = [line.row for line in lines if line.row is not None]
    if len(rows) < len(lines):
        raise ValueError("expected a leaderboard of measured runs, got rows of a printed table; remove `rows`.")
    _expect_comparable(rows)
    by = board.by
    sign = 1 if _lower_is_better(table, board, rows) else -1
    placed: dict[tuple[str, float], list[tuple[float, Line, str]]] = {}
    for line, row in zip(lines, rows, strict=True):
        summary, why = line.cells[by].measured, why_unranked(row, by, board.unit)
        value = math.inf if summary is None or why or not row.measured else sign * summary.mean
        epsilon = row.specs[0].config.privacy.epsilon  # lines without a budget have no place and come first
        group = (str(line.head["dataset"]), -1.0 if epsilon is None else float(epsilon))
        placed.setdefault(group, []).append((value, line, why))
    out = []
    for group in sorted(placed):
        # Python's sort is stable: lines with equal values share a place and keep the order of the yaml.
        ordered = sorted(placed[group], key=lambda entry: entry[0])
        values = [value for value, _, _ in ordered]
        for value, line, why in ordered:
            place = "–" if math.isinf(value) else str(values.index(value) + 1)
            tail = {**line.tail, "status": line.tail["status"] + (f"; no place: {why}" if why else "")}
            out.append(replace(line, head={"place": place, **line.head}, tail=tail))
    return out


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
    seeds = len(row.folders)
    if not row.measured:
        return ""
    reasons = []
    for spec, folder in zip(row.specs, row.folders, strict=True):
        if folder not in row.measured:
            continue
        if problem := _ledger_problem(folder.read_json("ledger.json"), spec.config.privacy, unit):
            reasons.append(f"seed {spec.seed}: {problem}")
    if reasons:
        return "; ".join(reasons)
    if len(row.measured) < seeds:
        return f"{len(row.measured)} of {seeds} seeds measured"
    summary = row.summary(by)
    if summary is None:
        return f"{by} was not measured"
    if summary.seeds < seeds:
        return f"{by} was measured for {summary.seeds} of {seeds} seeds"
    return "" if math.isfinite(summary.mean) else f"{by} is no finite number"


def _ledger_problem(ledger: Mapping[str, Any], privacy: DictConfig, unit: str) -> str:
    """Why a run's ledger is not comparable with those of the other lines; "" if it is."""
    if why := budget_problem(ledger, privacy, unit):
        return why
    if privacy.epsilon is None:
        return "it has no budget, so it is not comparable with other lines"
    budget = float(privacy.epsilon)
    if math.isinf(budget):
        return ""
    if diagnostics_kept(ledger):
        return "it kept private diagnostics (unsafe)"
    proven = epsilon_number(ledger["epsilon"], "proven")
    short = proven is not None and proven < SPENT * budget
    return f"proven {proven:.4g} leaves a part of {budget:g} unspent" if short else ""

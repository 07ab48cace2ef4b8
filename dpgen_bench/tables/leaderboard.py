"""The leaderboard: lines that may be compared, in their order; what may not be compared gets no place, and says why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from omegaconf import DictConfig

if TYPE_CHECKING:
    from dpgen_bench.tables.assembly import Line
    from dpgen_bench.tables.rows import TableRow

# A run below this share of its budget was trained with more noise than the others of its place.
SPENT = 0.98
LOWER_IS_BETTER = ("fid", "kid")


def ranked(table: DictConfig, lines: Sequence[Line]) -> list[Line]:
    """The lines by data set, then epsilon, then place; the place stands first in each line's head.

    Places are given among lines of one data set and one epsilon by the mean of the figure `leaderboard.by`. All lines
    must be configured alike in relation, delta and accountant, and measured by one protocol. A line has no place, and
    its status says why, if it was not measured, if its unit is not `leaderboard.unit` (record where not said), if
    nothing is proven for it, or if less than 98% of the budget was spent (what it would do with all is not known).

    Raises:
        ValueError: if two lines differ in relation, delta, accountant or protocol, or a line is a printed one.
    """
    rows = [line.row for line in lines if line.row is not None]
    if len(rows) < len(lines):
        raise ValueError("expected a leaderboard of measured runs, got printed numbers in it.")
    _expect_alike(rows)
    by, unit = str(table.leaderboard.by), str(table.leaderboard.get("unit", "record"))
    sign = 1 if by in LOWER_IS_BETTER else -1
    placed: dict[tuple[str, float], list[tuple[float, Line, str]]] = {}
    for line, row in zip(lines, rows, strict=True):
        summary, why = line.cells[by].ours if by in line.cells else None, _unplaced(row, unit)
        if (summary is None or not math.isfinite(summary.mean)) and not why and row.measured:
            why = f"{by} was not measured" if summary is None else f"{by} is no finite number"
        value = math.inf if summary is None or why else sign * summary.mean
        group = (str(line.head["dataset"]), float(row.specs[0].config.privacy.epsilon))
        placed.setdefault(group, []).append((value, line, why))
    out = []
    for group in sorted(placed):
        # Python's sort keeps the order of the yaml where figures are equal; such lines share a place.
        ordered = sorted(placed[group], key=lambda entry: entry[0])
        values = [value for value, _, _ in ordered]
        for value, line, why in ordered:
            place = "–" if math.isinf(value) else str(values.index(value) + 1)
            tail = {**line.tail, "status": line.tail["status"] + (f"; no place: {why}" if why else "")}
            out.append(replace(line, head={"place": place, **line.head}, tail=tail))
    return out


def _expect_alike(rows: Sequence[TableRow]) -> None:
    for key, of in (
        ("relation", lambda row: row.specs[0].config.privacy.relation),
        ("delta", lambda row: float(row.specs[0].config.privacy.delta)),
        ("accountant", lambda row: row.specs[0].config.privacy.accountant),
        ("protocol", lambda row: str(row.specs[0].protocol_record())),
    ):
        if len({of(row) for row in rows}) > 1:
            names = ", ".join(sorted({str(of(row))[:60] for row in rows}))
            raise ValueError(f"expected one {key} in a leaderboard, which compares like with like, got {names}.")


def _unplaced(row: TableRow, unit: str) -> str:
    """Why a line has no place besides a missing figure; "" if it may have one."""
    if not row.measured:
        return ""  # its status says enough
    budget, proven = float(row.specs[0].config.privacy.epsilon), row.epsilon_value("proven")
    if row.unit != unit:
        return f"its epsilon protects a {row.unit}, not a {unit}"
    if math.isinf(budget):
        return ""
    if proven is None or math.isinf(proven):
        return "nothing is proven"
    if proven > budget:
        return f"proven {proven:.4g} is above {budget:g}"
    return f"proven {proven:.4g} leaves a part of {budget:g} unspent" if proven < SPENT * budget else ""

"""When a measured figure counts as a reproduction of the printed one beside it, and why where it does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from dpgen_bench.runs.listing import current_protocol
from dpgen_bench.runs.measurements import sampling_settings
from dpgen_bench.runs.statistics import Summary
from dpgen_bench.tables.published import METRICS, PublishedRow
from dpgen_bench.tables.rows import TableRow, line_of, rows_of, settings_apart
from dpgen_bench.tables.spec import RowSpec, TableSpec

OWN = ("this paper", "run by")  # begins `reported_in` of what the paper's authors measured themselves


def what_differs(table: TableSpec, entry: RowSpec, row: TableRow, results: Path, parents: dict[str, str]) -> list[str]:
    """What keeps every figure of a printed row's runs from being a reproduction, besides the protocol."""
    if not row.measured:
        return []
    reasons = []
    if row.scale != "paper":
        line = line_of(table, entry, "paper")
        theirs = rows_of([line], results, parents)[0].specs[0] if line else None
        apart = settings_apart(row.specs[0], theirs) if theirs else []
        reasons.append(f"scale {row.scale}" + (f" (other {', '.join(apart)})" if apart else ""))
    return [*reasons, *row.budget_problems()]


def check_caveats(table: TableSpec, metrics: Sequence[str]) -> None:
    """
    Raises:
        ValueError: if `caveat` of the table or a row gives a reason for a figure that the table has not.
    """
    for caveat in (table.caveat, *(row.caveat for row in table.rows)):
        for name in caveat if isinstance(caveat, dict) else ():
            if name not in metrics:
                raise ValueError(f"expected under `caveat` figures of the table ({', '.join(metrics)}), got {name!r}.")


def stated_caveats(owner: TableSpec | RowSpec | None, metric: str) -> list[str]:
    """Why the yaml says that the figure is no reproduction: `caveat`, one reason for all figures, or one for each."""
    caveat = owner.caveat if owner else None
    reason = caveat.get(metric) if isinstance(caveat, dict) else caveat
    return [" ".join(reason.split())] if reason else []


def caveats_of(
    table: TableSpec, metric: str, printed: PublishedRow, row: TableRow, ours: Summary, differs: Sequence[str]
) -> str:
    """Why a measured figure does not count as a reproduction of the printed one; "" where it does."""
    reasons = [one.caveat for one in METRICS.values() if one.name == metric and one.caveat]
    if not printed.reported_in.startswith(OWN):
        reasons.append(f"printed as {printed.reported_in} has it, measured as they did")
    if "uncertain" in printed.cells[metric].note.lower():
        reasons.append("what is printed is uncertain")
    reasons += differs
    if keys := _keys_of(row, metric):  # else it is a cost, which no protocol measures
        theirs, here = current_protocol(table.protocol), row.specs[0].protocol_record()
        # Both draw the same samples, and have the metric that gives the figure word for word.
        alike = all(key in theirs["metrics"] and theirs["metrics"][key] == here["metrics"].get(key) for key in keys)
        if sampling_settings(theirs) != sampling_settings(here) or not alike:
            reasons.append(f"protocol {row.protocol} (the paper's: {table.protocol})")
        wanted = int(here.get("repeats", 1))
        if other := sorted({len(found[metric]) for found in row.known if metric in found} - {wanted}):
            reasons.append(f"{other[0]} of {wanted} repeats")
    if ours.seeds < len(row.specs):
        reasons.append(f"{ours.seeds} of {len(row.specs)} seeds")
    if not math.isfinite(ours.mean):
        reasons.append("no finite number")
    return "; ".join(dict.fromkeys(reasons))


def _keys_of(row: TableRow, metric: str) -> set[str]:
    """Keys of the protocol's metrics that gave the row's figure; none for a cost."""
    return {
        key
        for measurement in row.measurements.values()
        for repeat in measurement["repeats"]
        for key, result in repeat["metrics"].items()
        if metric in result["values"]
    }

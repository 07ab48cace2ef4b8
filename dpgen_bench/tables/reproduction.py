"""Whether a measured value counts as a reproduction of the published one, and if not, why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from dpgen_bench.outcomes.listing import current_protocol, describe_dataset
from dpgen_bench.store.measurements import sampling_settings
from dpgen_bench.store.statistics import Summary
from dpgen_bench.tables.expand import line_of
from dpgen_bench.tables.published import METRICS, PublishedRow
from dpgen_bench.tables.rows import TableRow, differing_settings, rows_of
from dpgen_bench.tables.spec import RowSpec, TableSpec

# `reported_in` begins so for values that the paper's authors measured themselves.
OWN = ("this paper", "run by")


def caveats_of_runs(
    table: TableSpec, entry: RowSpec, row: TableRow, results: Path, parents: dict[str, str]
) -> list[str]:
    """Why no value of a printed row's runs is a reproduction: their scale, or a ledger that falls short of the budget.

    The protocol is checked for each metric by `caveat_of`.
    """
    if not row.measured:
        return []
    reasons = []
    differing: list[str] = []
    if row.stands_for is not None:
        differing = [*row.differing]
        if not row.seeds <= row.stands_for.seeds:
            differing.append("seed" if len(row.seeds) == 1 else "seeds")
    elif row.scale != "paper" and (line := line_of(table, entry, "paper")):
        differing = differing_settings(row.specs[0], rows_of([line], results, parents)[0].specs[0])
    if row.scale != "paper" or row.stands_for is not None:
        what = "stands in for the paper's run" if row.scale == "paper" else f"scale {row.scale}"
        reasons.append(what + (f" (other {', '.join(differing)})" if differing else ""))
    return [*reasons, *row.budget_problems()]


def check_stand_in(stand_in: TableRow, row: TableRow) -> None:
    """Check that the runs of a row's `reduced` are of the method and the data set of its `run`.

    Raises:
        ValueError: if they are not.
    """
    (one, other) = (each.specs[0].config for each in (stand_in, row))
    got, expected = ((str(each.method.name), describe_dataset(each)) for each in (one, other))
    if got != expected:
        raise ValueError(
            f"expected under `reduced` runs of {expected[0]} on {expected[1]}, as under `run`, got {got[0]} on "
            f"{got[1]}; correct the line."
        )


def check_caveats(table: TableSpec, metrics: Sequence[str]) -> None:
    """
    Raises:
        ValueError: if `caveat` of the table or of a row names a metric that the table does not have.
    """
    for caveat in (table.caveat, *(row.caveat for row in table.rows)):
        for name in caveat if isinstance(caveat, dict) else ():
            if name not in metrics:
                raise ValueError(f"expected under `caveat` metrics of the table ({', '.join(metrics)}), got {name!r}.")


def stated_caveats(owner: TableSpec | RowSpec | None, metric: str) -> list[str]:
    """The reason under `caveat` in the yaml, which is one for all metrics or one for each, as a list of at most one."""
    caveat = owner.caveat if owner else None
    reason = caveat.get(metric) if isinstance(caveat, dict) else caveat
    return [" ".join(reason.split())] if reason else []


def caveat_of(
    table: TableSpec, metric: str, printed: PublishedRow, row: TableRow, measured: Summary, caveats: Sequence[str]
) -> str:
    """Why a measured value does not count as a reproduction of the published one; "" if it does.

    Args:
        caveats: reasons from the yaml and from `caveats_of_runs`.
    """
    reasons = [one.caveat for one in METRICS.values() if one.name == metric and one.caveat]
    if not printed.reported_in.startswith(OWN):
        reasons.append(f"the published value is as reported by {printed.reported_in}, by their own protocol")
    if "uncertain" in printed.cells[metric].note.lower():
        reasons.append("what is printed is uncertain")
    reasons += caveats
    if keys := _keys_of(row, metric):  # else it is a cost, which no protocol measures
        paper, used = current_protocol(table.protocol), row.specs[0].protocol_record()
        # Another protocol is comparable if it draws the same samples and configures the metric identically.
        same = all(key in paper["metrics"] and paper["metrics"][key] == used["metrics"].get(key) for key in keys)
        if sampling_settings(paper) != sampling_settings(used) or not same:
            reasons.append(f"protocol {row.protocol} (the paper's: {table.protocol})")
        reasons += row.repeats(metric)
    if measured.seeds < len(row.specs):
        reasons.append(f"{measured.seeds} of {len(row.specs)} seeds")
    if not math.isfinite(measured.mean):
        reasons.append("no finite number")
    return "; ".join(dict.fromkeys(reasons))


def _keys_of(row: TableRow, metric: str) -> set[str]:
    """Keys of the protocol's metrics that gave the row's values; empty for a cost."""
    return {
        key
        for measurement in row.measurements.values()
        for repeat in measurement["repeats"]
        for key, result in repeat["metrics"].items()
        if metric in result["values"]
    }

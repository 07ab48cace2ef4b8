"""How much of each paper's tables is reproduced: counts of their printed values, for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dpgen_bench.runs.display import counted
from dpgen_bench.tables.lines import BuiltTable
from dpgen_bench.tables.published import NAMING_FIELDS
from dpgen_bench.tables.spec import TableSpec

KINDS = {"full": "reproduced", "some": "measured otherwise", "none": "not run"}


def count_values(built: Sequence[BuiltTable]) -> Counter[str]:
    """How many printed values of one table are of each of `KINDS`.

    Args:
        built: the table at each of its scales; a value counts as the best that was measured of it at any scale.
    """
    best: dict[tuple[str, ...], str] = {}
    order = list(KINDS)
    for table in built:
        for line in table.lines:
            for metric, cell in line.cells.items():
                if line.printed is None or cell.published is None:
                    continue
                kind = "full" if cell.is_reproduction else "some" if cell.measured is not None else "none"
                key = (*(getattr(line.printed, name) for name in NAMING_FIELDS), metric)
                best[key] = min(kind, best.get(key, "none"), key=order.index)
    return Counter(best.values())


def bar(table: TableSpec, name: str, scale: str, counts: Counter[str]) -> dict[str, Any]:
    """The bar of one table: its parts in percent (kind, start, width), and its counts in words.

    Args:
        scale: that of the table on the page to which the bar links.
    """
    total, start, parts = counts.total(), 0.0, []
    for kind in KINDS:
        width = 100.0 * counts[kind] / total
        if width:
            parts.append([kind, round(start, 3), round(width, 3)])
        start += width
    # Two tables may show values of one printed table.
    other = "" if name.endswith(f"table{table.published}".lower()) else f" ({name})"
    return {
        "table": f"{name}-{scale}",
        "name": f"Table {table.published}{other}",
        "parts": parts,
        "counts": counts,
        "text": describe(counts),
    }


def describe(counts: Counter[str]) -> str:
    """`4 values: 1 reproduced, 3 not run`"""
    words = ", ".join(f"{counts[kind]} {text}" for kind, text in KINDS.items() if counts[kind])
    return f"{counted(counts.total(), 'value')}: {words}"

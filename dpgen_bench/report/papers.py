"""How much of each paper's tables is reproduced: counts of their printed values, for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dpgen_bench.config.display import counted, paper_name
from dpgen_bench.tables.lines import BuiltTable, Cell
from dpgen_bench.tables.published import NAMING_FIELDS
from dpgen_bench.tables.spec import TableSpec

KINDS = {
    "full": "reproduced",
    "far": "measured as in the paper, outside the tolerance",
    "some": "measured otherwise",
    "none": "not run",
}


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
                kind = kind_of(cell)
                key = (*(getattr(line.printed, name) for name in NAMING_FIELDS), metric)
                best[key] = min(kind, best.get(key, "none"), key=order.index)
    return Counter(best.values())


def kind_of(cell: Cell) -> str:
    """The one of `KINDS` to which a printed value belongs."""
    if cell.is_comparable:
        return "full" if cell.is_near else "far"
    return "some" if cell.measured is not None else "none"


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


def summary(bars: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """What the report shows of all papers.

    Args:
        bars: those of the tables of each paper, by the key of the paper.

    Returns:
        `started`, the papers with a table of which something was measured, with the counts of all their tables and the
        bars of these; and `unrun`, by paper the bars of the other tables, which the page names in one line.
    """
    started, unrun = [], []
    for paper, rows in bars.items():
        counts: Counter[str] = sum((row["counts"] for row in rows), Counter())
        some, none = ([row for row in rows if bool(row["counts"].keys() - {"none"}) is run] for run in (True, False))
        if some:
            started.append({"name": paper_name(paper), "text": describe(counts), "tables": some})
        if none:
            unrun.append({"name": paper_name(paper), "tables": none})
    return {"started": started, "unrun": unrun, "unrun_count": sum(len(each["tables"]) for each in unrun)}


def describe(counts: Counter[str]) -> str:
    """`4 values: 1 reproduced, 3 not run`"""
    words = ", ".join(f"{counts[kind]} {text}" for kind, text in KINDS.items() if counts[kind])
    return f"{counted(counts.total(), 'value')}: {words}"

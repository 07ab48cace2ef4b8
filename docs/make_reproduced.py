"""Makes the table of docs/tables.md that counts how many printed values are measured, and how many reproduced.

It reads results/tables, whose CSV files have the printed values. `make tables` makes it again:

    .venv/bin/python docs/make_reproduced.py
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd

from docs.page_tables import page_with, table
from dpgen_bench.config.display import paper_name
from dpgen_bench.tables.lines import TOO_FAR, tolerance_of
from dpgen_bench.tables.load import load_table
from dpgen_bench.tables.names import table_names
from dpgen_bench.tables.spec import TableSpec

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tables.md"
BEGIN, END = "<!-- table: made by docs/make_reproduced.py -->", "<!-- end of the table -->"
HEADER = (
    *("paper, table", "printed", "measured as in the paper", "of these reproduced"),
    *("measured otherwise", "of these within the tolerance", "by reduced runs", "not measured"),
)


def counts(name: str) -> Counter[str]:
    """How many printed values of a table are of each kind."""
    frame = pd.read_csv(ROOT / "results" / "tables" / f"{name}.csv", low_memory=False)
    found: Counter[str] = Counter()
    for line in frame[frame["published"].notna()].to_dict("records"):
        found["printed"] += 1
        if pd.isna(line["difference"]):
            found["not measured"] += 1
            continue
        spread = None if pd.isna(line["published_std"]) else float(line["published_std"])
        near = abs(line["difference"]) <= tolerance_of(line["metric"], line["published"], spread)
        comparable = line["reproduction"] == "yes" or str(line["caveat"]).startswith(TOO_FAR)
        kind = "as in the paper" if comparable else "reduced" if line.get("stands_in") == "reduced" else "otherwise"
        found[kind] += 1
        found[f"{kind}, near"] += near
    return found


def papers() -> dict[str, TableSpec]:
    """The tables that show a printed table, each printed table once: figures and quick stand-ins repeat them."""
    specs = {name: load_table(name) for name in table_names() if (ROOT / "results" / "tables" / f"{name}.csv").exists()}
    shown = {name: spec for name, spec in specs.items() if spec.paper and spec.published}
    first: dict[tuple[str | None, str | None], str] = {}
    for name, spec in shown.items():
        first.setdefault((spec.paper, spec.published), name)
    return {name: shown[name] for name in first.values()}


def row(label: str, found: Counter[str]) -> tuple[str, ...]:
    """The cells of one table or of the sum."""
    kinds = ("printed", "as in the paper", "as in the paper, near", "otherwise", "otherwise, near")
    return label, *(f"{found[kind]}" for kind in (*kinds, "reduced", "not measured"))


def made() -> str:
    """The table in Markdown, with the sum as its last row."""
    shown = {name: (spec, counts(name)) for name, spec in papers().items()}
    rows = [
        row(f"{paper_name(str(spec.paper))}, [{spec.published}](../results/tables/{name}.md)", found)
        for name, (spec, found) in shown.items()
        if found["printed"] > found["not measured"]
    ]
    others = [found for _, found in shown.values() if found["printed"] == found["not measured"]]
    if others:
        rows.append(row(f"{len(others)} other tables", sum(others, Counter())))
    total = sum((found for _, found in shown.values()), Counter())
    return table(HEADER, [*rows, row("all", total)])


def page() -> str:
    """The page with its table made again."""
    return page_with(PAGE, BEGIN, made(), END)


if __name__ == "__main__":
    PAGE.write_text(page())

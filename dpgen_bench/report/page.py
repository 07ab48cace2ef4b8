"""Write `dpgen report`: the runs, tables, plots and samples of a results folder in one self-contained HTML file.

The same results give the same bytes: no time, no path and no name of the machine enters it. Nothing of a run's
private/ folder is read.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dpgen_bench.report.drawings import COMPUTED, draw_plots
from dpgen_bench.report.lines import FILTERS, METRIC_COLUMNS, NUMBERS, TERMS, TEXT_COLUMNS, leaderboard
from dpgen_bench.report.runs import Run, panel, read_runs
from dpgen_bench.report.text import plain
from dpgen_bench.tables.assembly import build
from dpgen_bench.tables.lines import NOT_COMPARABLE, BuiltTable, Cell
from dpgen_bench.tables.names import table_names
from dpgen_bench.tables.rows import load_table, scales_to_build
from dpgen_bench.utils.errors import describe_error
from dpgen_bench.utils.files import write_atomic

NOTE = "‡"  # marks a remark on a published value
NEAR = (0.05, 0.2, 0.5)  # bounds of the four sizes of a difference, as shares of the published value


def build_report(results: Path, out: Path | None = None) -> Path:
    """Write the report of the runs below `results`; returns its path, results/report.html by default.

    Raises:
        ValueError: if `results` is no folder.
    """
    if not results.is_dir():
        raise ValueError(f"expected a folder of results, got {results}; `dpgen run` makes one.")
    path = out or results / "report.html"
    write_atomic(path, render(collect(results, lambda line: print(line, file=sys.stderr, flush=True))))
    return path


def collect(results: Path, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The content of the report as JSON-able values, the same for the same results.

    `head` has counts and remarks; `columns`, `filters`, `terms` and `lines` are the leaderboard; `plots` are drawn from
    the runs that are shown, except those named in `computed`; `runs` has one panel for each folder.

    Args:
        progress: called with a message before each table is built; all tables take minutes.
    """
    runs = read_runs(results)
    tables, plots, reproductions = _tables(results, runs, progress)
    content = {
        "head": _head(runs, reproductions),
        "columns": [
            {"key": key, "label": label, "kind": "number" if key in NUMBERS else "word"}
            for key, label in {**TEXT_COLUMNS, **METRIC_COLUMNS}.items()
        ],
        "filters": [{"key": key, "label": label} for key, label in FILTERS.items()],
        "terms": [{"key": key, "label": label} for key, label in TERMS.items()],
        "lines": leaderboard(runs),
        "tables": tables,
        "plots": plots,
        "computed": [plot["name"] for plot in plots if plot["source"] == COMPUTED],
        "runs": [panel(run) for run in runs],
    }
    values = plain(content)
    assert isinstance(values, dict)
    return values


def render(content: dict[str, Any]) -> str:
    """The HTML page of the content that `collect` returns.

    The template escapes all texts of runs. The page's script reads its data from a JSON block in which <, > and & are
    escaped, so that no text of a run can end the block, and inserts them as text and not as HTML.
    """
    environment = Environment(
        loader=PackageLoader("dpgen_bench.report", "templates"), autoescape=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": True, "allow_nan": False, "separators": (",", ":")}
    data = {key: content[key] for key in ("columns", "filters", "terms", "lines", "runs")}
    return environment.get_template("report.html.j2").render(**content, data=data, near=NEAR)


REAL = "real_data"  # the method whose samples are the records themselves


def _head(runs: Sequence[Run], reproductions: Counter[str]) -> dict[str, Any]:
    """Counts of the runs, by state and by scale, and of the values that are reproductions."""
    counted = [run for run in runs if run.state != "duplicate"]
    finished = [run for run in runs if run.state == "finished"]
    scales = Counter(str(run.config.scale.name) for run in finished)
    return {
        "runs": len(counted),
        "duplicates": len(runs) - len(counted),
        "states": sorted(Counter(run.state for run in counted).items()),
        "scales": sorted(scales.items()),
        "reproduction": _describe_reproductions(finished, reproductions),
    }


def _describe_reproductions(finished: Sequence[Run], reproductions: Counter[str]) -> str:
    """How many values of the tables count as reproductions, and of which methods."""
    at_scale = [run for run in finished if str(run.config.scale.name) == "paper"]
    count = f"{reproductions.total()} of the figures here count as reproductions of printed ones."
    if reproductions.total() == 1:
        count = "1 of the figures here counts as a reproduction of a printed one."
    if not at_scale:
        return f"{count} No finished run is of a paper's scale."
    if not reproductions:
        return count
    if set(reproductions) == {REAL}:
        return f"{count} They are of real data, of which no generator is trained."
    return f"{count} By method: {', '.join(f'{name} {number}' for name, number in sorted(reproductions.items()))}."


def _tables(
    results: Path, runs: Sequence[Run], progress: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[dict[str, str]], Counter[str]]:
    """The tables, their plots, and the number of reproductions by the method that was run.

    Tables without any measured or published value are left out; one that cannot be built has its error instead.
    """
    quick = any(run.sound and str(run.config.scale.name) == "quick" for run in runs)
    tables: list[dict[str, Any]] = []
    plots: list[dict[str, str]] = []
    reproductions: Counter[str] = Counter()
    names = table_names()
    for number, name in enumerate(names, start=1):
        progress(f"[{number}/{len(names)}] table {name}")
        try:
            table = load_table(name)
            built = [build(name, results, scale) for scale in scales_to_build(table, quick)]
        except Exception as error:  # a table that cannot be built must not hide the others
            tables.append({"name": name, "scale": "", "error": describe_error(error)})
            continue
        tables += [_table(each) for each in built if each.measured or (each.published and each.scale == "paper")]
        plots += [plot for each in built for plot in draw_plots(each, table, results)]
        for line in (line for each in built for line in each.lines):
            if number_reproduced := sum(cell.is_reproduction for cell in line.cells.values()):
                method = str(line.row.specs[0].config.method.name if line.row else line.head["method"])
                reproductions[method] += number_reproduced
    return tables, plots, reproductions


def _table(built: BuiltTable) -> dict[str, Any]:
    """One table as JSON-able texts: heads, cells, and numbered marks with their meanings."""
    # Equal reasons share a mark; each kind of mark is numbered from 1, in the order of the cells.
    marks: dict[tuple[str, str], str] = {}

    def mark(sign: str, reason: str) -> str:
        if not reason:
            return ""
        number = sum(known == sign for known, _ in marks) + 1
        return marks.setdefault((sign, reason), f"{sign}{number}")

    def cell(of: Cell) -> dict[str, Any]:
        shown = of.note if of.published is not None or of.illegible else ""
        return {
            "printed": of.printed.removesuffix("*"),
            "note": mark(NOTE, shown),
            "ours": of.text,
            "difference": "" if of.difference is None else of.distance.removesuffix(f" {NOT_COMPARABLE}"),
            "size": _size(of),
            "unlike": mark(NOT_COMPARABLE, of.caveat if of.difference is not None else ""),
        }

    def used(columns: list[dict[str, str]]) -> list[str]:
        """Names of the columns in which some line has more than a dash."""
        return list(dict.fromkeys(name for each in columns for name, word in each.items() if word != "–"))

    # Columns that are empty in all lines are left out.
    head, tail = used([line.head for line in built.lines]), used([line.tail for line in built.lines])
    rows = [
        {
            "head": [line.head.get(name, "–") for name in head],
            "cells": [cell(line.cells.get(metric, Cell())) for metric in built.metrics],
            "tail": [line.tail.get(name, "–") for name in tail],
        }
        for line in built.lines
    ]
    return {
        **{"name": built.name, "title": built.title, "note": built.note, "scale": built.scale},
        **{"error": "", "head": head, "metrics": built.metrics, "tail": tail, "rows": rows},
        "published": built.published,
        "measured": built.measured,
        "summary": built.count_reproductions(),
        "marks": [[number, reason] for (_, reason), number in marks.items()],
        "remarks": built.remarks,
    }


def _size(cell: Cell) -> int | None:
    """0 to 3: the size of the difference relative to the published value, by `NEAR`; None without a difference."""
    if cell.difference is None or cell.published is None:
        return None
    reach = abs(cell.published)
    share = abs(cell.difference) / reach if reach else float(cell.difference != 0) * 2 * NEAR[-1]
    return sum(share > bound for bound in NEAR)

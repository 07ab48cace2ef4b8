"""`dpgen report`: all runs, tables, plots and samples of a results folder in one HTML file that needs nothing else.

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

from dpgen_bench.report.drawings import COMPUTED, plots_of
from dpgen_bench.report.lines import FIGURES, FILTERS, NUMBERS, TERMS, WORDS, leaderboard
from dpgen_bench.report.runs import Run, panel, read_runs
from dpgen_bench.report.text import plain
from dpgen_bench.tables.assembly import build
from dpgen_bench.tables.lines import NOT_COMPARABLE, Built, Cell
from dpgen_bench.tables.rows import load_table, table_names, worth_building
from dpgen_bench.utils.errors import describe_error
from dpgen_bench.utils.files import write_atomic

NOTE = "‡"  # marks a remark on a printed figure
NEAR = (0.05, 0.2, 0.5)  # bounds between the four sizes of a difference, as shares of the printed figure


def build_report(results: Path, out: Path | None = None) -> Path:
    """Write the report of the runs below `results`; returns its path, results/report.html by default.

    Raises:
        ValueError: if `results` is no folder.
    """
    if not results.is_dir():
        raise ValueError(f"expected a folder of results, got {results}, which is none; `dpgen run` makes one.")
    path = out or results / "report.html"
    write_atomic(path, render(collect(results, lambda line: print(line, file=sys.stderr, flush=True))))
    return path


def collect(results: Path, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """All that the report shows; JSON-able, in an order of its own, the same for the same results.

    `head`: counts and remarks; `columns`, `filters`, `terms`, `lines`: the leaderboard; `tables`; `plots`, drawn from
    the runs that are shown but for those named in `computed`; `runs`: one panel for each folder.

    Args:
        progress: is told of each table before it is built, which takes minutes in all.
    """
    runs = read_runs(results)
    tables, plots, alike = _tables(results, runs, progress)
    content = {
        "head": _head(runs, alike),
        "columns": [
            {"key": key, "label": label, "kind": "number" if key in NUMBERS else "word"}
            for key, label in {**WORDS, **FIGURES}.items()
        ],
        "filters": [{"key": key, "label": label} for key, label in FILTERS.items()],
        "terms": [{"key": key, "label": label} for key, label in TERMS.items()],
        "lines": leaderboard(runs),
        "tables": tables,
        "plots": plots,
        "computed": [plot["name"] for plot in plots if plot["source"] == COMPUTED],
        "runs": [panel(run) for run in runs],
    }
    found = plain(content)
    assert isinstance(found, dict)
    return found


def render(content: dict[str, Any]) -> str:
    """The HTML of what `collect` gives.

    Words of runs are escaped where the template writes them. The page's script finds its data as JSON in which <, >
    and & are escaped, so that no word of a run ends the block, and puts them in as text, never as HTML.
    """
    environment = Environment(
        loader=PackageLoader("dpgen_bench.report", "templates"), autoescape=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": True, "allow_nan": False, "separators": (",", ":")}
    data = {key: content[key] for key in ("columns", "filters", "terms", "lines", "runs")}
    return environment.get_template("report.html.j2").render(**content, data=data, near=NEAR)


REAL = "real_data"  # the method that draws the records themselves


def _head(runs: Sequence[Run], alike: Counter[str]) -> dict[str, Any]:
    """How many runs there are, in which states and at which scales, and how many figures are reproductions."""
    counted = [run for run in runs if run.state != "duplicate"]
    finished = [run for run in runs if run.state == "finished"]
    scales = Counter(str(run.config.scale.name) for run in finished)
    return {
        "runs": len(counted),
        "duplicates": len(runs) - len(counted),
        "states": sorted(Counter(run.state for run in counted).items()),
        "scales": sorted(scales.items()),
        "reproduction": _reproduction(finished, alike),
    }


def _reproduction(finished: Sequence[Run], alike: Counter[str]) -> str:
    """How many figures of the tables count as reproductions, as the tables count; and of what runs."""
    at_scale = [run for run in finished if str(run.config.scale.name) == "paper"]
    count = f"{alike.total()} of the figures here count as reproductions of printed ones."
    if alike.total() == 1:
        count = "1 of the figures here counts as a reproduction of a printed one."
    if not at_scale:
        return f"{count} No finished run is of a paper's scale."
    if not alike:
        return count
    if set(alike) == {REAL}:
        return f"{count} They are of real data, of which no generator is trained."
    return f"{count} By method: {', '.join(f'{name} {number}' for name, number in sorted(alike.items()))}."


def _tables(
    results: Path, runs: Sequence[Run], progress: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[dict[str, str]], Counter[str]]:
    """Each table with a figure that was measured or printed, one that cannot be built says why; all their plots; and
    how many figures count as reproductions of printed ones, by the method that was run."""
    quick = any(run.sound and str(run.config.scale.name) == "quick" for run in runs)
    found: list[dict[str, Any]] = []
    plots: list[dict[str, str]] = []
    alike: Counter[str] = Counter()
    names = table_names()
    for number, name in enumerate(names, start=1):
        progress(f"[{number}/{len(names)}] table {name}")
        try:
            table = load_table(name)
            built = [build(name, results, scale) for scale in worth_building(table, quick)]
        except Exception as error:  # one table that contradicts itself must not hide the others
            found.append({"name": name, "scale": "", "error": describe_error(error)})
            continue
        found += [_table(each) for each in built if each.measured or (each.published and each.scale == "paper")]
        plots += [plot for each in built for plot in plots_of(each, table, results)]
        for line in (line for each in built for line in each.lines):
            if number_alike := sum(cell.alike for cell in line.cells.values()):
                alike[str(line.row.specs[0].config.method.name if line.row else line.head["method"])] += number_alike
    return found, plots, alike


def _table(built: Built) -> dict[str, Any]:
    """One table in words: heads, cells, and numbered marks with what they stand for."""
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
            "ours": of.words,
            "difference": "" if of.difference is None else of.distance.removesuffix(f" {NOT_COMPARABLE}"),
            "size": _size(of),
            "unlike": mark(NOT_COMPARABLE, of.caveat if of.difference is not None else ""),
        }

    def used(columns: list[dict[str, str]]) -> list[str]:
        """Names of the columns in which some line has more than a dash."""
        return list(dict.fromkeys(name for each in columns for name, word in each.items() if word != "–"))

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
        "summary": built.reproduced(),
        "marks": [[number, reason] for (_, reason), number in marks.items()],
        "remarks": built.remarks,
    }


def _size(cell: Cell) -> int | None:
    """0 to 3: how large the difference is beside the printed figure, by `NEAR`; None where there is no difference."""
    if cell.difference is None or cell.published is None:
        return None
    reach = abs(cell.published)
    share = abs(cell.difference) / reach if reach else float(cell.difference != 0) * 2 * NEAR[-1]
    return sum(share > bound for bound in NEAR)

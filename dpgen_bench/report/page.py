"""Write `dpgen report`: the runs, tables, plots and samples of a results folder in one self-contained HTML file.

The same results give the same bytes: no time, no path and no name of the machine enters it. Nothing of a run's
private/ folder is read.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpgen_bench.config.display import counted, method_name
from dpgen_bench.report.boards import boards_content, boards_of
from dpgen_bench.report.curves import curves_content
from dpgen_bench.report.drawings import draw_plots
from dpgen_bench.report.papers import bar, count_values, summary
from dpgen_bench.report.runs import Run, panel, read_runs
from dpgen_bench.report.text import plain, templates
from dpgen_bench.tables.assembly import build
from dpgen_bench.tables.expand import scales_to_build
from dpgen_bench.tables.layout import lay_out
from dpgen_bench.tables.lines import BuiltTable
from dpgen_bench.tables.load import load_table
from dpgen_bench.tables.names import table_names
from dpgen_bench.tables.naming import REAL
from dpgen_bench.tables.ranking import COMPARISON
from dpgen_bench.utils.errors import describe_error
from dpgen_bench.utils.files import write_atomic


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
    """The content of the report, the same for the same results: JSON-able values, and the layouts of `tables`.

    `boards` are the leaderboards, `curves` their plots, `papers` the counts of reproduced values; `plots` are drawn
    from the runs that are shown; `runs` has one panel for each folder or record.

    Args:
        progress: called with a message before each table is built; all tables take minutes.
    """
    runs = read_runs(results)
    tables, plots, papers, reproductions = _tables(results, runs, progress)
    boards = boards_of(runs)
    content = {
        "head": {"runs": _describe_runs(runs), "reproduction": _describe_reproductions(runs, reproductions)},
        "comparison": COMPARISON,
        "boards": boards_content(boards),
        "curves": curves_content(boards),
        "papers": papers,
        "plots": plots,
        "runs": [panel(run) for run in runs],
    }
    values = plain(content)
    assert isinstance(values, dict)
    return {**values, "tables": tables}


def render(content: dict[str, Any]) -> str:
    """The HTML page of the content that `collect` returns.

    The template escapes all texts of runs. The page's script reads its data from a JSON block in which <, > and & are
    escaped, so that no text of a run can end the block, and inserts them as text and not as HTML.
    """
    environment = templates()
    environment.policies["json.dumps_kwargs"] = {"sort_keys": True, "allow_nan": False, "separators": (",", ":")}
    assert environment.loader is not None
    script = environment.loader.get_source(environment, "report.js")[0]
    return environment.get_template("report.html.j2").render(
        **content,
        data={key: content[key] for key in ("boards", "runs")},
        script=script,
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        sections=SECTIONS,
    )


SECTIONS = (
    ("leaderboard", "Leaderboard"),
    ("curves", "Privacy and utility"),
    ("papers", "Papers"),
    ("tables", "Tables"),
    ("plots", "Plots"),
    ("runs", "Runs"),
)


def _describe_runs(runs: Sequence[Run]) -> str:
    """`3 runs (1 failed, 2 finished), and 1 copy not counted; failed ones first.`"""
    own = [run for run in runs if run.state != "duplicate"]
    states = ", ".join(f"{number} {state}" for state, number in sorted(Counter(run.state for run in own).items()))
    copies = counted(len(runs) - len(own), "copy", "copies")
    text = counted(len(own), "run") + (f" ({states})" if states else "")
    return text + (f", and {copies} not counted." if len(runs) > len(own) else ".")


def _describe_reproductions(runs: Sequence[Run], reproductions: Counter[str]) -> str:
    """How many values of the tables count as reproductions, and of which methods."""
    number = reproductions.total()
    counts = "counts as a reproduction" if number == 1 else "count as reproductions"
    text = f"{counted(number, 'value')} of the tables below {counts} of printed values."
    if not any(run.state == "finished" and str(run.config.scale.name) == "paper" for run in runs):
        return f"{text} No finished run is of a paper's scale."
    if not reproductions:
        return text
    if set(reproductions) == {REAL}:
        return f"{text} They are of real data, of which no generator is trained."
    by = ", ".join(f"{method_name(name)} {count}" for name, count in sorted(reproductions.items()))
    return f"{text} By method: {by}."


def _tables(
    results: Path, runs: Sequence[Run], progress: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any], Counter[str]]:
    """The tables, their plots, the bars of the papers, and the number of reproductions by the method that was run.

    A paper's table of which nothing is measured shows the published values, and other such tables are left out. A table
    that cannot be built has its error instead.
    """
    quick = any(run.sound and str(run.config.scale.name) == "quick" for run in runs)
    tables: list[dict[str, Any]] = []
    plots: list[dict[str, Any]] = []
    bars: dict[str, list[dict[str, Any]]] = {}
    reproductions: Counter[str] = Counter()
    names = table_names()
    for number, name in enumerate(names, start=1):
        progress(f"[{number}/{len(names)}] table {name}")
        try:
            table = load_table(name)
            built = [build(name, results, scale) for scale in scales_to_build(table, quick)]
            measured = [each for each in built if each.measured]
            shown = [_table(each) for each in measured or [each for each in built[:1] if each.published]]
        except Exception as error:  # a table that cannot be built must not hide the others
            tables.append({"name": name, "scale": "", "error": describe_error(error)})
            continue
        tables += shown
        if table.paper and (counts := count_values(built)):
            bars.setdefault(table.paper, []).append(bar(table, name, shown[0]["scale"], counts))
        plots += [plot for each in built for plot in draw_plots(each, table, results)]
        for line in (line for each in built for line in each.lines):
            if number_reproduced := sum(cell.is_reproduction for cell in line.cells.values()):
                method = str(line.row.specs[0].config.method.name if line.row else line.head["method"])
                reproductions[method] += number_reproduced
    tables.sort(key=lambda table: bool(table.get("published")))  # those of the bench first
    return tables, plots, summary(bars), reproductions


def _table(built: BuiltTable) -> dict[str, Any]:
    return {
        **{"name": built.name, "title": built.title, "scale": built.scale, "error": ""},
        **{"published": built.published, "measured": built.measured, "layout": lay_out(built)},
    }

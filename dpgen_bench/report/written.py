"""The files of a table and its plots. A file whose values come from runs that are not here is not overwritten."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from dpgen_bench.plots.draw import draw
from dpgen_bench.runs.listing import make_console
from dpgen_bench.runs.store import Store
from dpgen_bench.runs.validation import folder_problem
from dpgen_bench.tables.assembly import build
from dpgen_bench.tables.formats import WRITERS, expect_formats, show, to_markdown
from dpgen_bench.tables.lines import Built
from dpgen_bench.tables.rows import load_table
from dpgen_bench.utils.files import write_atomic

OF_NO_RUN = "figures of runs that are not in the results"


def _write(built: Built, results: Path, formats: Sequence[str], quiet: bool) -> list[Path]:
    """Print a table and write it as results/tables/NAME.FORMAT (NAME_quick.FORMAT at that scale), its plots beside it.

    A table of our own without a single value is not written, nor one of a paper at scale quick: there is nothing that
    results/published does not hold. Where a plot needs no run, it alone is drawn.
    """
    name, scale = built.name, built.scale
    console = make_console()
    if built.lines and not quiet:
        show(built, console)
    if built.lines and not built.measured and (scale == "quick" or not built.published):
        of_quick = " scale=quick" if scale == "quick" else ""
        console.print(
            f"{name}: nothing is measured yet, so no file is written; `dpgen sweep {name}{of_quick}` makes runs"
        )
        return []
    stem, written = _stem(name, scale), []
    for kind in formats if built.lines else ():  # a figure of a computation has no lines
        path = results / "tables" / f"{stem}.{kind}"
        write_atomic(path, WRITERS[kind](built))
        written.append(path)
    table = load_table(name)
    if table.plot and (built.lines or scale == "paper"):
        written += draw(stem, table, built.rows, results)
    console.print(f"{name}: " + " ".join(str(path) for path in written), highlight=False, soft_wrap=True)
    return written


def write_table(
    name: str, results: Path, scale: str, formats: Sequence[str], overwrite: bool, quiet: bool = False
) -> list[Path]:
    """Print a table and write its files and plots; without `overwrite`, not those whose values would be lost.

    Returns:
        the files that were written.

    Raises:
        ValueError: for a format that there is not, see `build` for more.
    """
    expect_formats(formats)
    built = build(name, results, scale)
    csv = results / "tables" / f"{_stem(name, scale)}.csv"
    problem = "" if overwrite else would_lose(csv, built, results)
    if not problem:
        return _write(built, results, formats, quiet)
    if not quiet:
        print(to_markdown(built))
    kept = [str(path) for kind in formats if (path := csv.with_suffix(f".{kind}")).exists()] or [str(csv)]
    print(f"dpgen: kept {', '.join(kept)}: {problem}; --overwrite to replace it", file=sys.stderr)
    return []


def _stem(name: str, scale: str) -> str:
    """Of a table's files."""
    return name + ("_quick" if scale == "quick" else "")


def would_lose(csv: Path, built: Built, results: Path) -> str:
    """Which figures of a written table would be lost by writing it anew, "" if none.

    Those are figures of runs that are not, or no longer whole, in `results`, and those that a run of the table had and
    has no more. Figures of runs that are there and that the table asks for no more are nobody's loss. The CSV alone
    says whose its figures are: of a table that was written without one nothing is known.
    """
    if not csv.exists():
        return ""
    try:
        frame = pd.read_csv(csv, dtype=str)
    except (ValueError, OSError):  # pandas' own errors are ValueErrors
        return "it cannot be read, so nobody knows what it has"
    if not {"mean", "runs", "metric"} <= set(frame):
        return ""
    figures = frame[frame["mean"].notna() & frame["runs"].notna()]
    folders = {run: Store(results).folder(run) for runs in figures["runs"].unique() for run in runs.split()}
    gone = {run for run, folder in folders.items() if not folder.done or folder_problem(folder)}
    if lines := sum(bool(gone & set(runs.split())) for runs in figures["runs"].unique()):
        return f"it has figures of {lines} lines whose runs are not all in {results / 'runs'}"
    asked = {folder.id for row in built.rows for folder in row.folders}
    now = {
        (folder.id, metric)
        for row in built.rows
        for folder, known in zip(row.measured, row.known, strict=True)
        for metric in known
    }
    lost = [
        f"{metric} of {run}"
        for runs, metric in zip(figures["runs"], figures["metric"], strict=True)
        for run in runs.split()
        if run in asked and metric in built.metrics and (run, metric) not in now
    ]
    return f"it has figures that are not there any more, such as {lost[0]}" if lost else ""

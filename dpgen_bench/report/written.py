"""Write the files of a table and its plots. Existing files are not overwritten if results would be lost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from dpgen_bench.plots.draw import draw
from dpgen_bench.runs.listing import make_console
from dpgen_bench.runs.records import record_paths
from dpgen_bench.runs.store import Store
from dpgen_bench.runs.validation import folder_problem
from dpgen_bench.tables.assembly import build
from dpgen_bench.tables.formats import WRITERS, expect_formats, show, to_markdown
from dpgen_bench.tables.lines import BuiltTable
from dpgen_bench.tables.rows import load_table
from dpgen_bench.utils.files import write_atomic

OF_NO_RUN = "values of runs that are not in the results"


def _write(built: BuiltTable, results: Path, formats: Sequence[str], quiet: bool) -> list[Path]:
    """Print a table and write it as results/tables/NAME.FORMAT (NAME_quick.FORMAT at that scale), with its plots.

    A table without any measured value is not written, except a paper's table at scale paper, which shows the published
    values. For a table without lines only its plots are drawn; they need no run.
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
    for kind in formats if built.lines else ():  # a table whose plot is computed without runs has no lines
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
    """Print a table and write its files and plots. Without `overwrite`, files are kept if values would be lost.

    Returns:
        the files that were written.

    Raises:
        ValueError: for an unknown format, and as `build` does.
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
    """The name of a table's files without their suffix."""
    return name + ("_quick" if scale == "quick" else "")


def would_lose(csv: Path, built: BuiltTable, results: Path) -> str:
    """Which values of an existing table would be lost if it were written again, as a message; "" if none.

    These are values of runs that have no record and are missing or unfinished in `results`, and values that a run of
    the table no longer has. A value is not lost if its run is in `results` and the table no longer asks for it. Only
    the CSV names the runs of its values, so nothing is checked for a table without one.
    """
    if not csv.exists():
        return ""
    try:
        frame = pd.read_csv(csv, dtype=str)
    except (ValueError, OSError):  # pandas' own errors are ValueErrors
        return "it cannot be read, so its values are unknown"
    if not {"mean", "runs", "metric"} <= set(frame):
        return ""
    values = frame[frame["mean"].notna() & frame["runs"].notna()]
    recorded = record_paths(results).keys()
    named = {run for runs in values["runs"].unique() for run in runs.split()} - recorded
    folders = {run: Store(results).folder(run) for run in named}
    gone = {run for run, folder in folders.items() if not folder.done or folder_problem(folder)}
    if lines := sum(bool(gone & set(runs.split())) for runs in values["runs"].unique()):
        return f"it has values of {lines} lines whose runs are not all in {results / 'runs'}"
    listed = {folder.id for row in built.rows for folder in row.folders}
    present = {
        (folder.id, metric)
        for row in built.rows
        for folder, by_name in zip(row.measured, row.known, strict=True)
        for metric in by_name
    }
    lost = [
        f"{metric} of {run}"
        for runs, metric in zip(values["runs"], values["metric"], strict=True)
        for run in runs.split()
        if run in listed and metric in built.metrics and (run, metric) not in present
    ]
    return f"it has values that the runs no longer have, such as {lost[0]}" if lost else ""

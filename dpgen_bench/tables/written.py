"""Writing tables without losing what is written: a file may hold figures of runs that are not in the results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from dpgen_bench.results.damage import damage
from dpgen_bench.results.store import Store
from dpgen_bench.tables.assembly import Built, build
from dpgen_bench.tables.formats import expect_formats, print_built, to_markdown

OF_NO_RUN = "figures of runs that are not in the results"


def write_table(
    name: str, results: Path, scale: str, formats: Sequence[str], overwrite: bool, quiet: bool = False
) -> None:
    """`print_table`; where its files have figures that would be lost, they and its plots are kept, and it is shown.

    Raises:
        ValueError: as `print_table` does.
    """
    expect_formats(formats)
    built = build(name, results, scale)
    csv = results / "tables" / f"{name}{'_quick' if scale == 'quick' else ''}.csv"
    problem = "" if overwrite else would_lose(csv, built, results)
    if not problem:
        print_built(built, results, formats, quiet)
        return
    if not quiet:
        print(to_markdown(built))
    kept = [str(path) for kind in formats if (path := csv.with_suffix(f".{kind}")).exists()] or [str(csv)]
    print(f"dpgen: kept {', '.join(kept)}: {problem}; --overwrite to replace it", file=sys.stderr)


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
    gone = {run for run, folder in folders.items() if not folder.done or damage(folder)}
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

"""Writing tables without losing what is written: a file may hold figures of runs that are not in the results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from dpgen_bench.results.damage import damage
from dpgen_bench.results.store import Store
from dpgen_bench.tables.assembly import build
from dpgen_bench.tables.formats import print_table, to_markdown

OF_NO_RUN = "figures of runs that are not in the results"


def write_table(
    name: str, results: Path, scale: str, formats: Sequence[str], overwrite: bool, quiet: bool = False
) -> None:
    """`print_table`; where its files have figures that would be lost, they and its plots are kept, and it is shown."""
    stem = name + ("_quick" if scale == "quick" else "")
    csv = results / "tables" / f"{stem}.csv"
    lost = 0 if overwrite else lines_of_no_run(csv, results)
    if not lost:
        print_table(name, results, scale, formats, quiet)
        return
    if not quiet:
        print(to_markdown(build(name, results, scale)))
    kept = [str(path) for kind in formats if (path := csv.with_suffix(f".{kind}")).exists()] or [str(csv)]
    print(
        f"dpgen: kept {', '.join(kept)}: it has figures of {lost} lines whose runs are not all in {results / 'runs'}; "
        "--overwrite to replace it",
        file=sys.stderr,
    )


def lines_of_no_run(csv: Path, results: Path) -> int:
    """How many lines of a written table have figures of a run that is not, or no longer whole, in `results`.

    The CSV alone says whose figures they are: of a table that was written without one nothing is known.
    """
    if not csv.exists():
        return 0
    frame = pd.read_csv(csv, dtype=str)
    if not {"mean", "runs"} <= set(frame):
        return 0
    lines = frame[frame["mean"].notna() & frame["runs"].notna()]["runs"].unique()
    folders = {run: Store(results).folder(run) for line in lines for run in line.split()}
    here = {run for run, folder in folders.items() if folder.done and not damage(folder)}
    return sum(not set(line.split()) <= here for line in lines)

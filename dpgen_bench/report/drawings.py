"""The report's plots, which are drawn from the runs that the report shows and not taken from files."""

from __future__ import annotations

import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpgen_bench.plots.draw import WITHOUT_RUNS, drawings, stem_of
from dpgen_bench.report.text import data_uri
from dpgen_bench.tables.lines import BuiltTable
from dpgen_bench.tables.spec import TableSpec
from dpgen_bench.utils.errors import describe_error

# The caption of a plot that needs no run and is therefore not drawn again for the report.
COMPUTED = "Computed from data without a run: the file in results/plots that dpgen tables wrote."


def draw_plots(built: BuiltTable, table: TableSpec, results: Path) -> list[dict[str, Any]]:
    """The plots of a table, sorted by name, each with `name`, `title`, `caption` and `picture`, an SVG as a data URI.

    Plots of kinds that need no run are read from results/plots, where `dpgen tables` writes them, because they take
    minutes to compute and no run changes them. The title of a plot that cannot be drawn or read says why.
    """
    if not table.plot:
        return []
    name = built.name + ("_quick" if built.scale == "quick" else "")
    try:
        with tempfile.TemporaryDirectory() as place:
            plots = [
                _plot(path, built.title, each.caption)
                for each in drawings(name, table, built.rows, Path(place), skip=WITHOUT_RUNS)
                for path in each.paths
                if path.suffix == ".svg"
            ]
    except Exception as error:  # a table that cannot be drawn must not hide the others
        return [_problem(name, f"cannot be drawn ({describe_error(error)})")]
    kinds = [entry.kind for entry in table.plot]
    # A plot without runs has no scale and is shown once, with the table at scale paper.
    alone = [number for number, kind in enumerate(kinds) if kind in WITHOUT_RUNS and built.scale == "paper"]
    paths = [results / "plots" / f"{stem_of(name, number, len(kinds))}.svg" for number in alone]
    plots += [_plot(path, built.title, (COMPUTED,)) for path in paths if path.exists()]
    return sorted(plots, key=lambda plot: str(plot["name"]))


def _plot(path: Path, title: str, caption: Sequence[str]) -> dict[str, Any]:
    content = path.read_bytes()
    try:
        ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        return _problem(path.stem, f"cannot be read ({error})")
    picture = data_uri(content, "image/svg+xml")
    return {"name": path.stem, "title": title, "caption": [*caption], "picture": picture}


def _problem(name: str, why: str) -> dict[str, Any]:
    return {"name": name, "title": why, "caption": [], "picture": ""}

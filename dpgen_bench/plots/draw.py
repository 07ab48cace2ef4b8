"""Draw a table's plots as results/plots/NAME.pdf and .svg, one or two columns of a paper wide.

A plot has no title and no caption in it; its files keep both as metadata, and pages show them next to it. The same runs
give the same bytes: the style does not depend on matplotlibrc, and no file has a date or a version.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpgen_bench.plots import diagnostics, kinds
from dpgen_bench.plots.captions import Picture
from dpgen_bench.plots.grids import samples
from dpgen_bench.plots.parts import check_keys, same, value_of
from dpgen_bench.tables.plot_spec import PlotSpec
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.tables.spec import TableSpec
from dpgen_bench.utils.files import atomic

# The function that draws each kind of `tables.plot_spec.PLOT_KINDS`; it gets an entry of that kind alone.
KINDS: dict[str, Callable[[Any, TableSpec, Sequence[TableRow]], Picture | None]] = {
    "curve": kinds.curve,
    "privacy_utility": kinds.privacy_utility,
    "steps": kinds.steps,
    "log": kinds.log,
    "samples": samples,
    "norms": diagnostics.norms,
    "bias_variance": diagnostics.bias_variance,
}
WITHOUT_RUNS = ("bias_variance",)  # kinds that are drawn without runs

STYLE: dict[str, Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",  # comes with matplotlib, so it is the same on each machine
    "axes.labelsize": 8.0,
    "axes.titlesize": 8.0,
    "font.size": 8.0,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.title_fontsize": 7.5,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "pdf.fonttype": 42,  # TrueType, which can be edited; publishers refuse Type 3
    "mathtext.fontset": "dejavusans",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "dpgen_bench",
}


@dataclass(frozen=True)
class Drawing:
    """A plot that was written. lines: how many rows of the table are in it. caption: its paragraphs."""

    paths: tuple[Path, ...]
    lines: int
    caption: tuple[str, ...]


def draw(name: str, table: TableSpec, rows: Sequence[TableRow], results: Path) -> list[Path]:
    """Write the table's plots, see `drawings`; returns their files."""
    return [path for each in drawings(name, table, rows, results) for path in each.paths]


def drawings(
    name: str, table: TableSpec, rows: Sequence[TableRow], results: Path, skip: Collection[str] = ()
) -> list[Drawing]:
    """Write the table's plots as PDF and SVG: NAME, or NAME-1, NAME-2, ... if there are several.

    If no run has values for an entry of `plot`, nothing is written for it, and existing files are kept.

    Args:
        table: the table, whose title is the title of each plot.
        rows: the table's rows, in their order.
        results: the folder of results; files are written in its folder `plots`.
        skip: kinds that are not drawn; the names of the other plots do not change.

    Raises:
        ValueError: if an entry names a config key that no row has, or two rows would be drawn at the same place.
    """
    from matplotlib import style

    written: list[Drawing] = []
    for number, spec in enumerate(table.plot):
        if spec.kind in skip:
            continue
        check_keys(rows, config_keys(spec))  # of all rows: those that are measured may lack a key that others have
        with style.context(["default", STYLE]):
            picture = KINDS[spec.kind](spec, table, _chosen(spec, rows))
            if picture is not None:
                stem = results / "plots" / stem_of(name, number, len(table.plot))
                written.append(Drawing(tuple(_save(picture, stem, table.title)), picture.lines, picture.caption))
    return written


def stem_of(name: str, number: int, entries: int) -> str:
    """The name of the files of the entry with that number, from 0, without suffix."""
    return name if entries == 1 else f"{name}-{number + 1}"


def _chosen(spec: PlotSpec, rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows that have the config values of the entry's `only`."""
    only = {key: {same(value) for value in _several(values)} for key, values in spec.only.items()}
    return [row for row in rows if all(same(value_of(row, key)) in only[key] for key in only)]


def config_keys(spec: PlotSpec) -> list[str]:
    """The config keys that an entry names, or names of epsilons in their place."""
    single = (getattr(spec, name, None) for name in ("panel", "x", "per"))
    return [*getattr(spec, "series", ()), *spec.only, *filter(None, single)]


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


def _save(picture: Picture, stem: Path, title: str) -> list[Path]:
    caption = " ".join(picture.caption)
    metadata: dict[str, dict[str, Any]] = {
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None, "Title": title, "Subject": caption},
        "svg": {"Date": None, "Creator": None, "Title": title, "Description": caption},
    }
    paths = []
    for kind, entries in metadata.items():
        path = stem.with_name(f"{stem.name}.{kind}")
        with atomic(path) as temporary:
            picture.figure.savefig(temporary, format=kind, metadata=entries)
        paths.append(path)
    return paths

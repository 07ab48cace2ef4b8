"""A table's pictures: results/plots/NAME.png and .svg, as the `plot` of conf/table/NAME.yaml asks for them.

The same runs give the same bytes: the style is fixed, whatever matplotlibrc says, and no file has a date or a version.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig

from dpgen_bench.plots import diagnostics as pictures
from dpgen_bench.plots import kinds
from dpgen_bench.plots.parts import check_keys, same, value_of
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.utils.files import atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


KINDS = {**kinds.KINDS, **pictures.KINDS}
COMMON = {"kind", "only"}
WITHOUT_RUNS = ("bias_variance",)  # kinds that are drawn though no run was made

STYLE: dict[str, Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that no machine has another
    "font.size": 9.0,
    "legend.frameon": False,
    "mathtext.fontset": "dejavusans",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "dpgen_bench",
}


@dataclass(frozen=True)
class Drawing:
    """A picture that was written. lines: how many rows of the table are in it."""

    paths: tuple[Path, ...]
    lines: int


def draw(name: str, table: DictConfig, rows: Sequence[TableRow], results: Path) -> list[Path]:
    """The files of `drawings`, which see."""
    return [path for each in drawings(name, table, rows, results) for path in each.paths]


def drawings(
    name: str, table: DictConfig, rows: Sequence[TableRow], results: Path, skip: Collection[str] = ()
) -> list[Drawing]:
    """Write the table's pictures, as PNG and SVG each: NAME, or NAME-1, NAME-2, ... of several.

    Where no run has what an entry of `plot` asks for, nothing is written for it; files of earlier calls stay.

    Args:
        table: the content of conf/table/NAME.yaml; its title stands above each picture.
        rows: the table's rows, in their order.
        results: below whose plots/ the files are written.
        skip: kinds that are not drawn; the names of the others do not change.

    Raises:
        ValueError: for an entry of a kind that there is not, or with a key that its kind does not have.
    """
    from matplotlib import style

    written: list[Drawing] = []
    entries = plot_entries(table)
    for number, spec in enumerate(entries):
        if str(spec.kind) in skip:
            continue
        with style.context(["default", STYLE]):
            picture = KINDS[str(spec.kind)][0](spec, table, _chosen(spec, rows))
            if picture is not None:
                stem = results / "plots" / stem_of(name, number, len(entries))
                written.append(Drawing(tuple(_save(picture.figure, stem, str(table.title))), picture.lines))
    return written


def stem_of(name: str, number: int, entries: int) -> str:
    """What the file of the entry with that number, from 0, is called: NAME, or NAME-1, NAME-2, ... of several."""
    return name if entries == 1 else f"{name}-{number + 1}"


def plot_entries(table: DictConfig) -> list[DictConfig]:
    """The entries of a table's `plot`, which may be one or a list.

    Raises:
        ValueError: as `draw`.
    """
    plot = table.get("plot")
    entries = [] if plot is None else list(plot) if isinstance(plot, ListConfig) else [plot]
    for spec in entries:
        if not isinstance(spec, DictConfig) or str(spec.get("kind")) not in KINDS:
            raise ValueError(f"expected a plot with a kind among {', '.join(KINDS)}, got {spec}.")
        if unknown := sorted(set(map(str, spec)) - KINDS[str(spec.kind)][1] - COMMON):
            known = ", ".join(sorted(KINDS[str(spec.kind)][1] | COMMON))
            raise ValueError(f"expected in a plot of kind {spec.kind} the keys {known}, got {', '.join(unknown)}.")
    return entries


def _chosen(spec: DictConfig, rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows with the config values that the entry asks for: `only: {KEY: VALUE or several}`."""
    only = {str(key): {same(value) for value in _several(values)} for key, values in spec.get("only", {}).items()}
    check_keys(rows, only)
    return [row for row in rows if all(same(value_of(row, key)) in only[key] for key in only)]


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, ListConfig) else [value]


def _save(figure: Figure, stem: Path, title: str) -> list[Path]:
    metadata: dict[str, dict[str, Any]] = {
        "png": {"Software": None, "Title": title},
        "svg": {"Date": None, "Creator": None, "Title": title},
    }
    paths = []
    for kind, told in metadata.items():
        path = stem.with_name(f"{stem.name}.{kind}")
        with atomic(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=150, metadata=told)
        paths.append(path)
    return paths

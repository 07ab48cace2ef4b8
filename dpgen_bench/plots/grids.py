"""Sample grids of a table's rows: methods side by side, budgets below each other, and no cell left out."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpgen_bench.plots.captions import Picture, finished
from dpgen_bench.plots.parts import check_keys, order_of, proven_text, row_name, same, text_of
from dpgen_bench.privacy.events import budget_text
from dpgen_bench.runs.store import RunFolder
from dpgen_bench.tables.plot_spec import SamplesSpec
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.tables.spec import TableSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_ACROSS = 4  # grids side by side
UNREADABLE = "The samples of run"


def samples(spec: SamplesSpec, table: TableSpec, rows: Sequence[TableRow]) -> Picture | None:
    """Grids of samples: a column for each method, a row for each ε budget; with one budget columns go on below.

    In a grid there is a column for each class and `per_class` rows, of the table row's first seed that has samples.
    What has none stays in its place, empty, with the reason.

    Raises:
        ValueError: if a key under `series` is in no row's config.
    """
    from matplotlib.figure import Figure

    apart = spec.series
    check_keys(rows, apart)
    found = [_grid(row, spec.per_class) for row in rows]
    blocks = [block for block, _, _ in found if block is not None]
    if not blocks:
        return None
    names = _columns(rows, table, apart)
    columns, budgets = list(dict.fromkeys(names)), order_of(_budget(row) for row in rows)
    most = MOST_ACROSS if len(budgets) > 1 else 2 if len(columns) == 4 else 3
    across = min(len(columns), most)
    bands = math.ceil(len(columns) / across)
    wide = max(block.shape[1] / block.shape[0] for block in blocks)
    height = max(0.55 + 3.0 / wide, 1.2)
    figure = Figure(figsize=(0.7 + 3.1 * across, 1.3 + height * bands * len(budgets)), layout="constrained")
    panels = figure.subplots(bands * len(budgets), across, squeeze=False)
    for panel in panels.ravel():
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_visible(False)
    places = {(name, same(_budget(row))): i for i, (name, row) in enumerate(zip(names, rows, strict=True))}
    for number, name in enumerate(columns):
        for line, budget in enumerate(budgets):
            panel = panels[number // across * len(budgets) + line, number % across]
            i = places.get((name, same(budget)))
            block, folder, why = found[i] if i is not None else (None, None, "not in this table")
            told = row_name(rows[i], table, apart) if i is not None else name
            _draw_grid(panel, told, block, folder, f"ε budget {text_of(budget)}: {why}", blocks[0].shape)
            if number % across == 0:
                panel.set_ylabel(f"ε budget {text_of(budget)}", fontsize=9)
    how = "Columns of a grid: classes in their order; rows: the first samples of each, not chosen."
    shown = {i: [folder] for i, (_, folder, _) in enumerate(found) if folder is not None}
    damaged = [why for block, _, why in found if block is None and why.startswith(UNREADABLE)]
    return finished(figure, table, rows, shown, "\n".join([how, *(f"{why}." for why in damaged)]))


def _budget(row: TableRow) -> float | str:
    epsilon = row.specs[0].config.privacy.epsilon
    return budget_text(epsilon) if epsilon is None else float(epsilon)


def _grid(row: TableRow, per_class: int) -> tuple[np.ndarray | None, RunFolder | None, str]:
    """The samples of the row's first seed that has some, and whose they are; or else why there are none."""
    damaged = ""
    for folder in row.folders:
        path = folder.path / "samples.npz"
        if folder.id in row.unusable or not folder.trained or not path.exists():
            continue
        try:
            return montage(path, per_class), folder, ""
        except Exception as error:  # a damaged archive fails in many ways; the others must not go with it
            damaged = damaged or f"{UNREADABLE} {folder.id} cannot be read ({type(error).__name__})"
    status = row.status()
    return None, None, damaged or ("no samples" if status == "measured" else status)


def _columns(rows: Sequence[TableRow], table: TableSpec, apart: Sequence[str]) -> list[str]:
    """Each row's column: method and data set, and what tells apart rows of one budget, which never share a cell.

    A setting that goes with the budget, such as the number of steps, does not part a method's rows.
    """
    plain = replace(table, settings=())
    names = [row_name(row, plain, apart) for row in rows]
    for longer in (
        lambda row: row_name(row, table, apart),
        lambda row: f"{row_name(row, table, apart)}, {row.protocol}, scale {row.scale}",
    ):
        cells = [(name, same(_budget(row))) for name, row in zip(names, rows, strict=True)]
        shared = {name for name, budget in cells if cells.count((name, budget)) > 1}
        names = [longer(row) if name in shared else name for name, row in zip(names, rows, strict=True)]
    taken: dict[tuple[str, float | str], int] = {}
    for i, row in enumerate(rows):
        cell = (names[i], same(_budget(row)))
        taken[cell] = taken.get(cell, 0) + 1
        names[i] += f" ({taken[cell]})" if taken[cell] > 1 else ""
    return names


def _draw_grid(
    panel: Axes, name: str, block: np.ndarray | None, folder: RunFolder | None, why: str, shape: tuple[int, ...]
) -> None:
    """One grid under its name; an empty frame of that shape, with the reason in it, where there is none."""
    title = textwrap.fill(name, 46)
    if block is not None and folder is not None:
        panel.imshow(
            block[:, :, 0] if block.shape[2] == 1 else block, cmap="gray", vmin=0, vmax=255, interpolation="none"
        )
        panel.set_title(f"{title}\n{proven_text(folder)}, seed {folder.config.seed}", fontsize=8)
        return
    panel.imshow(np.full((*shape[:2], 3), 245, np.uint8))
    panel.set_title(f"{title}\nno samples", fontsize=8, color="0.35")
    words = textwrap.fill(why, 44, max_lines=4)
    panel.text(0.5, 0.5, words, ha="center", va="center", fontsize=8, color="0.35", transform=panel.transAxes)


def montage(path: Path, per_class: int) -> np.ndarray:
    """A picture uint8 [H, W, c] of the first `per_class` samples of each class, a column each, with grey between."""
    with np.load(path, allow_pickle=False) as kept:
        images, labels = kept["images"], kept["labels"]
    if images.ndim != 4 or len(images) != len(labels) or len(labels) == 0:
        raise ValueError(f"expected images [n, c, h, w] and n labels in {path.name}, got {images.shape}.")
    channels, height, width = images.shape[1:]
    out = np.full((per_class * (height + 1) - 1, (labels.max() + 1) * (width + 1) - 1, channels), 128, np.uint8)
    for label in range(labels.max() + 1):
        for i, image in enumerate(images[labels == label][:per_class]):
            top, left = i * (height + 1), label * (width + 1)
            pixels = np.clip(np.rint(image), 0, 255).astype(np.uint8)
            out[top : top + height, left : left + width] = pixels.transpose(1, 2, 0)
    return out

"""Grids of the samples of a table's rows: a column for each method and a row for each budget."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpgen_bench.config.display import counted
from dpgen_bench.plots.captions import Picture, finished
from dpgen_bench.plots.parts import ONE_COLUMN, TWO_COLUMNS, order_of, proven_text, row_name, same, text_of
from dpgen_bench.privacy.events import budget_text
from dpgen_bench.store.folders import ReadableRun
from dpgen_bench.tables.plot_spec import SamplesSpec
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.tables.spec import TableSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_ACROSS = 4  # grids side by side
FONT_SIZE, LETTER = 6.5, 4.1  # of titles, and the width of a wide text's letters at that size, both in points
UNREADABLE = "The samples of run"


def samples(spec: SamplesSpec, table: TableSpec, rows: Sequence[TableRow]) -> Picture | None:
    """Grids of samples: a column for each method and a row for each ε budget; with one budget the columns wrap.

    A grid has a column for each class and `per_class` rows, from the first seed of the table's row that has samples.
    The place of a row without samples is empty and shows the reason. Methods none of whose rows has samples are left
    out, and the caption counts them.
    """
    from matplotlib.figure import Figure

    apart = spec.series
    grids = [_grid(row, spec.per_class) for row in rows]
    blocks = [block for block, _, _ in grids if block is not None]
    if not blocks:
        return None
    names = _columns(rows, table, apart)
    drawn = {
        (name, same(_budget(row)))
        for name, row, (block, _, _) in zip(names, rows, grids, strict=True)
        if block is not None
    }
    columns = [name for name in dict.fromkeys(names) if any(name == column for column, _ in drawn)]
    left_out = len(set(names)) - len(columns)
    budgets = order_of(_budget(row) for row in rows)
    most = MOST_ACROSS if len(budgets) > 1 else 2 if len(columns) == 4 else 3
    across = min(len(columns), most)
    # Columns that are drawn side by side, and the budgets at which one of them has samples.
    bands = [columns[start : start + across] for start in range(0, len(columns), across)]
    lines = [
        (band, budget) for band in bands for budget in budgets if any((name, same(budget)) in drawn for name in band)
    ]
    wide = max(block.shape[1] / block.shape[0] for block in blocks)
    width = ONE_COLUMN if across == 1 else TWO_COLUMNS
    height = (width / across - 0.1) / wide + 0.45  # of a grid and its title
    figure = Figure(figsize=(width, max(height, 0.9) * len(lines)), layout="constrained")
    panels = figure.subplots(len(lines), across, squeeze=False)
    for panel in panels.ravel():
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_visible(False)
    places = {(name, same(_budget(row))): i for i, (name, row) in enumerate(zip(names, rows, strict=True))}
    for line, (band, budget) in enumerate(lines):
        panels[line, 0].set_ylabel(f"ε budget {text_of(budget)}")
        for panel, name in zip(panels[line], band, strict=False):
            i = places.get((name, same(budget)))
            block, folder, why = grids[i] if i is not None else (None, None, "not in this table")
            title = row_name(rows[i], table, apart) if i is not None else name
            title = textwrap.fill(title, min(36, int(72 * width / across / LETTER)))
            _draw_grid(panel, title, block, folder, f"ε budget {text_of(budget)}: {why}", blocks[0].shape)
    how = "A grid has a column for each class and shows its first samples, which were not chosen."
    if left_out:
        how += f" Left out: {counted(left_out, 'method')} without samples."
    shown = {i: [folder] for i, (_, folder, _) in enumerate(grids) if folder is not None}
    damaged = [why for block, _, why in grids if block is None and why.startswith(UNREADABLE)]
    return finished(figure, table, rows, shown, " ".join([how, *(f"{why}." for why in damaged)]))


def _budget(row: TableRow) -> float | str:
    epsilon = row.specs[0].config.privacy.epsilon
    return budget_text(epsilon) if epsilon is None else float(epsilon)


def _grid(row: TableRow, per_class: int) -> tuple[np.ndarray | None, ReadableRun | None, str]:
    """The montage and the run of the row's first seed that has samples, and ""; or None, None and the reason."""
    damaged = ""
    for folder in row.folders:
        if folder.id in row.unusable or not folder.trained:
            continue
        try:
            if (block := folder.montage(per_class)) is not None:
                return block, folder, ""
        except Exception as error:  # a damaged archive raises many kinds of errors; the other grids must still be drawn
            damaged = damaged or f"{UNREADABLE} {folder.id} cannot be read ({type(error).__name__})"
    status = row.status()
    return None, None, damaged or ("no samples" if status == "measured" else status)


def _columns(rows: Sequence[TableRow], table: TableSpec, apart: Sequence[str]) -> list[str]:
    """The column of each row: its method and data set, and more where rows of one budget would share a cell.

    A setting that changes with the budget, such as the number of steps, does not separate the rows of a method.
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
    panel: Axes, title: str, block: np.ndarray | None, folder: ReadableRun | None, why: str, shape: tuple[int, ...]
) -> None:
    """Draw one grid with its title; without samples, an empty frame of that shape with the reason in it."""
    if block is not None and folder is not None:
        panel.imshow(
            block[:, :, 0] if block.shape[2] == 1 else block, cmap="gray", vmin=0, vmax=255, interpolation="none"
        )
        panel.set_title(f"{title}\n{proven_text(folder)}, seed {folder.config.seed}", fontsize=FONT_SIZE)
        return
    panel.imshow(np.full((*shape[:2], 3), 245, np.uint8))
    panel.set_title(f"{title}\nno samples", fontsize=FONT_SIZE, color="0.35")
    text = textwrap.fill(why, 44, max_lines=4)
    panel.text(0.5, 0.5, text, ha="center", va="center", fontsize=FONT_SIZE, color="0.35", transform=panel.transAxes)

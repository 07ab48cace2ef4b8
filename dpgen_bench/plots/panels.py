"""The panels of a plot with lines, and the panel and line in which each row of the table is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpgen_bench.plots.captions import Picture, finished
from dpgen_bench.plots.chance import chance_levels, draw_chance, is_accuracy
from dpgen_bench.plots.parts import (
    ONE_COLUMN,
    TWO_COLUMNS,
    Style,
    draw_legend,
    label_of,
    rank,
    text_at,
    text_of,
    value_of,
    y_label,
)
from dpgen_bench.store.folders import ReadableRun
from dpgen_bench.tables.plot_spec import LinesSpec
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.tables.spec import TableSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Keys that set lines apart even if `series` does not name them: a line never joins two protocols or scales.
ACROSS = {1: 1, 2: 2, 4: 2}  # panels side by side for a number of metrics; otherwise three
HEIGHT = 2.1  # inches of a panel
ALWAYS = ("method.name", "dataset.name", "scale.name", "protocol.name")


@dataclass(frozen=True)
class Member:
    """A row of the table with its panel and its line. `number`: its place among the rows."""

    number: int
    row: TableRow
    panel: str
    line: str


class Grid:
    """The panels of a plot: a row for each y and a column for each value of `panel`; without `panel`, one row."""

    def __init__(self, spec: LinesSpec, rows: Sequence[TableRow], x: str | None = None) -> None:
        from matplotlib.figure import Figure

        series, panels = spec.series, [spec.panel] if spec.panel else []
        self.ys, self.key, self.style = spec.y, spec.panel, Style()
        extra = [
            key
            for key in ALWAYS
            if key not in (*series, *panels, x) and len({text_of(value_of(row, key)) for row in rows}) > 1
        ]
        self.legend = ", ".join(label_of(key) for key in series) if not extra else ""
        self.members = [Member(i, row, self._panel(row), _line_name(row, series, extra)) for i, row in enumerate(rows)]
        for member in sorted(self.members, key=lambda member: [rank(value_of(member.row, key)) for key in series]):
            _ = self.style[member.line]  # colours in the order of the values
        key = self.key
        ordered = sorted(rows, key=lambda row: rank(value_of(row, key))) if key else rows[:1]
        self.columns = list(dict.fromkeys(map(self._panel, ordered)))
        across = len(self.columns) if self.key else ACROSS.get(len(self.ys), 3)
        places = [(y, column) for y in self.ys for column in self.columns]
        down = math.ceil(len(places) / across)
        width = ONE_COLUMN if across == 1 else TWO_COLUMNS
        self.figure = Figure(figsize=(width, 0.3 + HEIGHT * down), layout="constrained")
        axes = self.figure.subplots(down, across, squeeze=False).ravel()
        for spare in axes[len(places) :]:
            spare.remove()
        self.panels: dict[tuple[str, str], Axes] = dict(zip(places, axes, strict=False))

    def _panel(self, row: TableRow) -> str:
        return text_at(row, self.key) if self.key else ""

    def finish(
        self, spec: LinesSpec, table: TableSpec, drawn: Mapping[int, Sequence[ReadableRun]], how: str
    ) -> Picture:
        """Add titles, labels, scales and the legend, and write the caption, after the lines are drawn.

        Args:
            drawn: the runs that are drawn, by the number of their row.
            how: the meaning of lines and bars, for the caption.
        """
        for (y, column), panel in self.panels.items():
            panel.set_ylabel(y_label(spec.y_label or label_of(y)))
            panel.grid(alpha=0.25, linewidth=0.6)
            if self.key and y == self.ys[0]:
                panel.set_title(f"{label_of(self.key)}: {column}")
            if not panel.lines and not panel.collections:
                panel.text(0.5, 0.5, "nothing measured", ha="center", va="center", transform=panel.transAxes)
            levels = chance_levels(y, [member.row for member in self.members if member.panel == column or not self.key])
            draw_chance(panel, levels, percent=y.endswith("_pct"))
            if spec.log_y:
                panel.set_yscale("log")
            elif y == "fid" or is_accuracy(y):  # an axis that does not start at 0 exaggerates small differences
                panel.set_ylim(0.0, 1.04 * panel.get_ylim()[1])
        handles: dict[str, Any] = {}
        for panel in self.panels.values():
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)  # the first handle of a label is the one with a line
        names = [name for name in self.style.names if name in handles]
        if len(names) > 1 or self.legend:
            draw_legend(self.figure, {name: handles[name] for name in names}, self.legend or None)
        return finished(self.figure, table, [member.row for member in self.members], drawn, how)


def _line_name(row: TableRow, series: Sequence[str], extra: Sequence[str]) -> str:
    """The name of a line in the legend, without settings that its method does not have.

    The scale of a paper is not named, and smaller ones are. A setting has a label of its own where the legend has no
    title, which is so with `extra`, and where a number of a name with several parts would not say what it is.
    """
    parts = []
    for key in (*series, *extra):
        value = value_of(row, key)
        if value is not None and (key not in extra or (key, value) != ("scale.name", "paper")):
            clear = key in ALWAYS or (not extra and (len(series) == 1 or isinstance(value, str)))
            parts.append(("" if clear else f"{label_of(key, plain=True)} = ") + text_at(row, key))
    return ", ".join(parts) or text_at(row, (*series, "method.name")[0])

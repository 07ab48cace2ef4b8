"""The panels of a plot with lines, and the panel and line in which each row of the table is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpgen_bench.plots.captions import Picture, finished
from dpgen_bench.plots.chance import chance_levels, draw_chance, is_accuracy
from dpgen_bench.plots.parts import Style, check_keys, label_of, order_of, rank, text_of, value_of
from dpgen_bench.runs.store import ReadableRun
from dpgen_bench.tables.plot_spec import LinesSpec
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.tables.spec import TableSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Keys that set lines apart even if `series` does not name them: a line never joins two protocols or scales.
ALWAYS = ("method.name", "dataset.name", "scale.name", "protocol.name")


@dataclass(frozen=True)
class Member:
    """A row of the table with its panel and its line. `number`: its place among the rows."""

    number: int
    row: TableRow
    panel: str
    line: str


class Grid:
    """The panels of a plot: a row for each y and a column for each value of `panel`; without `panel`, one row.

    Raises:
        ValueError: if no row's config has a key that the entry names.
    """

    def __init__(self, spec: LinesSpec, rows: Sequence[TableRow], x: str | None = None) -> None:
        from matplotlib.figure import Figure

        series, panels = spec.series, [spec.panel] if spec.panel else []
        check_keys(rows, [*series, *panels])
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
        columns = order_of(value_of(row, self.key) for row in rows) if self.key else [None]
        self.columns = [text_of(value) for value in columns]
        shape = (len(self.ys), len(self.columns)) if self.key else (1, len(self.ys))
        size = (max(1.2 + 3.5 * shape[1], 6.5), 1.6 + 2.9 * shape[0])
        self.figure = Figure(figsize=size, layout="constrained")
        axes = self.figure.subplots(*shape, squeeze=False)
        self.panels: dict[tuple[str, str], Axes] = {
            (y, column): axes[i][j] if self.key else axes[0][i]
            for i, y in enumerate(self.ys)
            for j, column in enumerate(self.columns)
        }

    def _panel(self, row: TableRow) -> str:
        return text_of(value_of(row, self.key)) if self.key else text_of(None)

    def finish(
        self, spec: LinesSpec, table: TableSpec, drawn: Mapping[int, Sequence[ReadableRun]], how: str
    ) -> Picture:
        """Add titles, labels, scales, the legend and the caption, after the lines are drawn.

        Args:
            drawn: the runs that are drawn, by the number of their row.
            how: the meaning of lines and bars, for the caption.
        """
        for (y, column), panel in self.panels.items():
            panel.set_ylabel(spec.y_label or label_of(y))
            panel.grid(alpha=0.25, linewidth=0.6)
            if self.key:
                panel.set_title(f"{label_of(self.key)}: {column}", fontsize=9)
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
            shown, place = [handles[name] for name in names], "outside right center"
            self.figure.legend(shown, names, title=self.legend or None, loc=place, fontsize=8)  # type: ignore[call-overload]
        return finished(self.figure, table, [member.row for member in self.members], drawn, how)


def _line_name(row: TableRow, series: Sequence[str], extra: Sequence[str]) -> str:
    if series and not extra:
        return ", ".join(text_of(value_of(row, key)) for key in series)
    parts = [f"{label_of(key, plain=True)} = {text_of(value_of(row, key))}" for key in series if key not in ALWAYS]
    parts += [text_of(value_of(row, key)) for key in (*series, *extra) if key in ALWAYS]
    return ", ".join(parts) or str(row.specs[0].config.method.name)

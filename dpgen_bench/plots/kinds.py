"""Pictures with lines: figures over a setting, over epsilon or over steps, and scalars of the runs' logs.

Each kind is a function of one entry of a table's `plot`, the table, and its rows; it gives a figure, or None where no
run has what is to be drawn. Keys that all share: `y`, one name or several, a panel each; `series`, config keys whose
values are lines; `panel`, a config key with a column of panels for each value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig

from dpgen_bench.plots.chance import chance_levels, draw_chance, is_accuracy
from dpgen_bench.plots.parts import (
    Style,
    XAxis,
    averaged,
    caption,
    check_keys,
    epsilon_words,
    label_of,
    listed,
    order_of,
    rank,
    read_log,
    same,
    value_of,
    words_of,
    write_below,
)
from dpgen_bench.results.figures import figures
from dpgen_bench.results.store import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dpgen_bench.tables.rows import TableRow

MOST = 1000  # points of one line of a log: more are no wider than a pixel
# What sets lines apart that `series` does not name: figures of two protocols or scales are never joined by a line.
ALWAYS = ("method.name", "dataset.name", "scale.name", "protocol.name")


@dataclass(frozen=True)
class Member:
    """A row of the table in its place: which panel, which line. `number`: its place among the rows."""

    number: int
    row: TableRow
    panel: str
    line: str


class Grid:
    """The panels of a picture: a row for each y and a column for each value of `panel`, or else one row.

    Raises:
        ValueError: if a key that the entry names is in no row's config.
    """

    def __init__(self, spec: DictConfig, rows: Sequence[TableRow], x: str | None = None) -> None:
        from matplotlib.figure import Figure

        series, panels = listed(spec.get("series")), listed(spec.get("panel"))
        if len(panels) > 1:
            raise ValueError(f"expected one config key for plot.panel, got {panels}.")
        check_keys(rows, [*series, *panels])
        self.ys, self.key, self.style = listed(spec.get("y")), panels[0] if panels else None, Style()
        if not self.ys:
            raise ValueError("expected plot.y to name a figure or several.")
        extra = [
            key
            for key in ALWAYS
            if key not in (*series, *panels, x) and len({words_of(value_of(row, key)) for row in rows}) > 1
        ]
        self.legend = ", ".join(label_of(key) for key in series) if not extra else ""
        self.members = [Member(i, row, self._panel(row), _line_name(row, series, extra)) for i, row in enumerate(rows)]
        for member in sorted(self.members, key=lambda member: [rank(value_of(member.row, key)) for key in series]):
            _ = self.style[member.line]  # colours in the order of the values
        columns = order_of(value_of(row, self.key) for row in rows) if self.key else [None]
        self.columns = [words_of(value) for value in columns]
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
        return words_of(value_of(row, self.key)) if self.key else words_of(None)

    def finish(self, spec: DictConfig, title: str, text: str) -> Figure:
        """Titles, labels, scales and the legend, after the lines are drawn."""
        for (y, column), panel in self.panels.items():
            panel.set_ylabel(str(spec.get("y_label") or label_of(y)))
            panel.grid(alpha=0.25, linewidth=0.6)
            if self.key:
                panel.set_title(f"{label_of(self.key)}: {column}", fontsize=9)
            if not panel.lines and not panel.collections:
                panel.text(0.5, 0.5, "nothing measured", ha="center", va="center", transform=panel.transAxes)
            levels = chance_levels(y, [member.row for member in self.members if member.panel == column or not self.key])
            draw_chance(panel, levels, percent=y.endswith("_pct"))
            if spec.get("log_y", False):
                panel.set_yscale("log")
            elif y == "fid" or is_accuracy(y):  # an axis that starts elsewhere makes small differences look large
                panel.set_ylim(0.0, 1.04 * panel.get_ylim()[1])
        handles: dict[str, Any] = {}
        for panel in self.panels.values():
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)  # the first is the one with the line
        names = [name for name in self.style.names if name in handles]
        if len(names) > 1 or self.legend:
            shown, place = [handles[name] for name in names], "outside right center"
            self.figure.legend(shown, names, title=self.legend or None, loc=place, fontsize=8)  # type: ignore[call-overload]
        write_below(self.figure, title, text)
        return self.figure


def _line_name(row: TableRow, series: Sequence[str], extra: Sequence[str]) -> str:
    if series and not extra:
        return ", ".join(words_of(value_of(row, key)) for key in series)
    told = [f"{label_of(key, plain=True)} = {words_of(value_of(row, key))}" for key in series if key not in ALWAYS]
    told += [words_of(value_of(row, key)) for key in (*series, *extra) if key in ALWAYS]
    return ", ".join(told) or str(row.specs[0].config.method.name)


def curve(spec: DictConfig, table: DictConfig, rows: Sequence[TableRow]) -> Figure | None:
    """Final figures over a config key or an epsilon (`x`); bars span the seeds.

    Raises:
        ValueError: if two rows of one line have the same x: `series` must tell them apart.
    """
    x = str(spec.get("x"))
    check_keys(rows, [x])
    ys = listed(spec.get("y"))
    shown = [row for row in rows if any(_by_seed(row, y) for y in ys)]
    left_out = [row for row in shown if value_of(row, x) is None]
    shown = [row for row in shown if value_of(row, x) is not None]
    if not shown:
        return None
    grid = Grid(spec, shown, x)
    words = epsilon_words if x.startswith("epsilon_") else "{:g}".format
    axis = XAxis((value_of(member.row, x) for member in grid.members), bool(spec.get("log_x", False)), words)
    drawn: dict[int, list[RunFolder]] = {}
    for (y, column), panel in grid.panels.items():
        for line in grid.style.names:
            members = [member for member in grid.members if (member.line, member.panel) == (line, column)]
            points = {same(value_of(member.row, x)): member for member in members}
            if len(points) < len(members):
                raise ValueError(
                    f"expected one row for each value of {x} in a line of the plot, got several in the line {line!r}: "
                    "name under `series` what they differ in."
                )
            found = [(value_of(member.row, x), member, _by_seed(member.row, y)) for member in points.values()]
            _draw_points(panel, axis, [(value, seeds) for value, _, seeds in found if seeds], grid.style[line], line)
            drawn |= {member.number: member.row.measured for _, member, seeds in found if seeds}
        axis.apply(panel)
        panel.set_xlabel(str(spec.get("x_label") or label_of(x)))
    how = "Points: means over seeds; bars: lowest to highest seed."
    if left_out:
        how += f" Left out: {len(left_out)} row(s) without {x}."
    return grid.finish(spec, str(table.title), caption([m.row for m in grid.members], drawn, how))


def _by_seed(row: TableRow, y: str) -> list[float]:
    """The figure of each measured seed that has it, its repeats averaged."""
    return [fmean(found[y]) for found in row.known if found.get(y)]


def _draw_points(
    panel: Axes, axis: XAxis, points: Sequence[tuple[Any, list[float]]], style: Mapping[str, str], label: str
) -> None:
    """Numbers joined by a line, what stands beside them alone."""
    ordered = sorted((axis.place(value), seeds) for value, seeds in points)
    inside = [point for point in ordered if axis.parted is None or point[0] < axis.parted]
    beside = [point for point in ordered if point not in inside]
    if not axis.numbers:
        inside, beside = [], ordered
    for part, dashes in ((inside, style["linestyle"]), (beside, "none")):
        if part:
            places, means = [place for place, _ in part], [fmean(seeds) for _, seeds in part]
            low = [fmean(seeds) - min(seeds) for _, seeds in part]
            high = [max(seeds) - fmean(seeds) for _, seeds in part]
            look = {**style, "linestyle": dashes, "label": label, "markersize": 5, "linewidth": 1.3}
            panel.errorbar(places, means, yerr=[low, high], capsize=2.5, elinewidth=0.9, **look)  # type: ignore[arg-type]


def privacy_utility(spec: DictConfig, table: DictConfig, rows: Sequence[TableRow]) -> Figure | None:
    """Figures over epsilon, a line for each method; runs without privacy stand at ∞, at the right.

    `epsilon: claimed` takes the papers' counts in place of what is proven.
    """
    which = str(spec.get("epsilon", "proven"))
    if which not in ("proven", "claimed"):
        raise ValueError(f"expected plot.epsilon proven or claimed, got {which!r}.")
    full = DictConfig({"series": "method.name", **spec, "x": f"epsilon_{which}", "log_x": True})
    return curve(full, table, rows)


def steps(spec: DictConfig, table: DictConfig, rows: Sequence[TableRow]) -> Figure | None:
    """Figures of the generators kept along the way over steps, and the epsilon spent by then on a second axis.

    `per` names a config key by which the steps are divided: per method.n_d, discriminator steps become generator steps.
    """
    from dpgen_bench.results.trajectory import trajectory

    per = str(spec.per) if spec.get("per") else None
    check_keys(rows, [per] if per else [])
    ways: dict[int, list[tuple[RunFolder, dict[float, tuple[float, dict[str, list[float]]]]]]] = {}
    for i, row in enumerate(rows):
        unit = _unit(row, per) if per else 1.0
        for folder in row.folders:
            if folder.id in row.damage:
                continue
            points = trajectory(folder, row.specs[0].protocol_record())
            if points:
                way = {point.step / unit: (point.epsilon, figures(point.report)) for point in points}
                ways.setdefault(i, []).append((folder, way))
    ys = listed(spec.get("y"))
    kept = [i for i in ways if any(y in found for _, way in ways[i] for _, found in way.values() for y in ys)]
    if not kept:
        return None
    shown = [rows[i] for i in kept]
    grid, apart = Grid(spec, shown), False
    for (y, column), panel in grid.panels.items():
        spent: dict[float, list[float]] = {}
        for member in grid.members:
            if member.panel != column:
                continue
            seeds: dict[float, list[float]] = {}
            for _, way in ways[kept[member.number]]:
                for x, (epsilon, found) in way.items():
                    if y in found:
                        seeds.setdefault(x, []).append(fmean(found[y]))
                        if math.isfinite(epsilon):
                            spent.setdefault(x, []).append(epsilon)
            _draw_band(panel, seeds, grid.style[member.line], member.line, marks=True)
        panel.set_xlabel(str(spec.get("x_label") or ("steps" if per is None else f"steps / {label_of(per)}")))
        panel.xaxis.set_major_formatter("{x:,.0f}")
        if spec.get("log_x", False):
            panel.set_xscale("log")
            panel.xaxis.set_minor_formatter("")
        apart |= not _second_axis(panel, spent)
    how = "Lines: means over seeds; bands: lowest to highest seed. Points: generators kept along the way."
    if apart:
        how += " Lines differ in what they had spent by a step, hence no axis of it."
    drawn = {number: [folder for folder, _ in ways[i]] for number, i in enumerate(kept)}
    return grid.finish(spec, str(table.title), caption(shown, drawn, how))


def _unit(row: TableRow, per: str) -> float:
    value = value_of(row, per)
    if not isinstance(value, float | int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"expected a number > 0 for the key plot.per={per} in each row, got {value!r}.")
    return float(value)


def _draw_band(
    panel: Axes, seeds: Mapping[float, list[float]], style: Mapping[str, str], label: str, marks: bool
) -> None:
    """The mean over seeds at each x, and a band from the lowest to the highest seed."""
    if not seeds:
        return
    places = sorted(seeds)
    look: dict[str, Any] = {**style, **({"markersize": 4} if marks else {"marker": "none"})}
    panel.plot(places, [fmean(seeds[x]) for x in places], label=label, linewidth=1.3, **look)
    if any(len(values) > 1 for values in seeds.values()):
        low, high = [min(seeds[x]) for x in places], [max(seeds[x]) for x in places]
        panel.fill_between(places, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _second_axis(panel: Axes, spent: Mapping[float, Sequence[float]]) -> bool:
    """The epsilon spent by each x at the top; False where lines disagree about it, so that there is none."""
    if any(max(values) > 1.01 * min(values) for values in spent.values()):
        return False
    if places := sorted(spent):
        chosen = [places[i] for i in np.unique(np.linspace(0, len(places) - 1, 6).round().astype(int))]
        top = panel.secondary_xaxis("top")
        top.set_xticks(chosen, [epsilon_words(max(spent[x])) for x in chosen], fontsize=8)
        top.set_xlabel("ε proven for the steps so far", fontsize=8)
        top.tick_params(which="minor", top=False)
    return True


def log(spec: DictConfig, table: DictConfig, rows: Sequence[TableRow]) -> Figure | None:
    """Scalars of log.jsonl over the number of the row that has them; `ema` averages them first, `x_max` ends the axis.

    Drawn for runs whose training has ended. A line of several seeds ends where the shortest does.
    """
    decay = spec.get("ema")
    if decay is not None and not 0.0 <= float(decay) < 1.0:
        raise ValueError(f"expected plot.ema in [0, 1), got {decay!r}.")
    last = None if spec.get("x_max") is None else int(spec.x_max)
    ys = listed(spec.get("y"))
    logs: dict[int, dict[str, list[np.ndarray]]] = {}
    folders: dict[int, list[RunFolder]] = {}
    for i, row in enumerate(rows):
        for folder in row.folders:
            if not folder.trained:
                continue
            values = {y: read_log(folder.path / "log.jsonl", y)[:last] for y in ys}
            if any(len(found) for found in values.values()):
                folders.setdefault(i, []).append(folder)
            for y, found in values.items():
                if len(found):
                    scalar = found if decay is None else averaged(found, float(decay))
                    logs.setdefault(i, {}).setdefault(y, []).append(scalar)
    if not logs:
        return None
    kept = list(logs)
    shown = [rows[i] for i in kept]
    grid = Grid(spec, shown)
    for (y, column), panel in grid.panels.items():
        for member in grid.members:
            several = logs[kept[member.number]].get(y, [])
            if member.panel != column or not several:
                continue
            length = min(len(found) for found in several)
            chosen = np.unique(np.append(np.arange(0, length, math.ceil(length / MOST)), length - 1))
            seeds = {float(t + 1): [float(found[t]) for found in several] for t in chosen}
            _draw_band(panel, seeds, grid.style[member.line], member.line, marks=False)
        panel.set_xlabel(str(spec.get("x_label") or "row of the log"))
        panel.xaxis.set_major_formatter("{x:,.0f}")
    how = "Lines: means over seeds; bands: lowest to highest seed."
    if decay is not None:
        how += f" Exponential moving averages with decay {float(decay):g}."
    drawn = {number: folders[i] for number, i in enumerate(kept)}
    return grid.finish(spec, str(table.title), caption(shown, drawn, how))


LINES = {"y", "series", "panel", "x_label", "y_label", "log_y"}
# Each kind with the keys that its entries may have besides `kind`.
Kind = Callable[[DictConfig, DictConfig, Sequence["TableRow"]], "Figure | None"]
KINDS: dict[str, tuple[Kind, set[str]]] = {
    "curve": (curve, {*LINES, "x", "log_x"}),
    "privacy_utility": (privacy_utility, {*LINES, "epsilon"}),
    "steps": (steps, {*LINES, "per", "log_x"}),
    "log": (log, {*LINES, "ema", "x_max"}),
}

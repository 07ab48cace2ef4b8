"""Plots with lines: metrics over a setting, over epsilon or over steps, and scalars of the runs' logs.

Each kind is a function of an entry of a table's `plot`, the table and its rows. It returns None if no run has a value
to draw. The keys of an entry are declared in `tables.plot_spec`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from dpgen_bench.config.display import counted
from dpgen_bench.plots.captions import Picture
from dpgen_bench.plots.errorbars import BANDS, POINTS, Point, draw_band, draw_points
from dpgen_bench.plots.panels import Grid
from dpgen_bench.plots.parts import (
    COSTS,
    XAxis,
    averaged,
    epsilon_text,
    label_of,
    round_ticks,
    same,
    value_of,
)
from dpgen_bench.runs.kept import trajectory
from dpgen_bench.store.folders import ReadableRun
from dpgen_bench.store.values import metric_values
from dpgen_bench.tables.leaderboard import why_unranked
from dpgen_bench.tables.plot_spec import CurveSpec, LinesSpec, LogSpec, PrivacyUtilitySpec, StepsSpec
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.tables.spec import TableSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST = 1000  # points of one line of a log; more would be closer than a pixel


def curve(spec: CurveSpec, table: TableSpec, rows: Sequence[TableRow]) -> Picture | None:
    """Metrics of finished runs over a config key, an epsilon or a cost; error bars are 95% intervals over seeds.

    Raises:
        ValueError: if two rows of one line have the same x, so that `series` does not tell them apart.
    """
    x = spec.x
    shown = [row for row in rows if any(_by_seed(row, y) for y in spec.y)]
    left_out = [row for row in shown if value_of(row, x) is None]
    shown = [row for row in shown if value_of(row, x) is not None]
    if not shown:
        return None
    grid = Grid(spec, shown, x)
    format_tick = epsilon_text if x.startswith("epsilon_") else "{:g}".format
    axis = XAxis((value_of(member.row, x) for member in grid.members), spec.log_x, format_tick)
    drawn: dict[int, list[ReadableRun]] = {}
    # Markers of lines without a place in a leaderboard are hollow.
    hollow = [_is_unranked(table, member.row) for member in grid.members]
    for (y, column), panel in grid.panels.items():
        for line in grid.style.names:
            members = [member for member in grid.members if (member.line, member.panel) == (line, column)]
            points = {same(value_of(member.row, x)): member for member in members}
            if len(points) < len(members):
                raise ValueError(
                    f"expected one row for each value of {x} in a line of the plot, got several in the line {line!r}: "
                    "name under `series` what they differ in."
                )
            measured = [(value_of(member.row, x), member, _by_seed(member.row, y)) for member in points.values()]
            shown_points = [Point(value, seeds, hollow[member.number]) for value, member, seeds in measured if seeds]
            draw_points(panel, axis, shown_points, grid.style[line], line)
            drawn |= {member.number: member.row.measured for _, member, seeds in measured if seeds}
        if x in COSTS:
            round_ticks(panel, spec.log_x)
        else:
            axis.apply(panel)
        panel.set_xlabel(spec.x_label or label_of(x))
    how = POINTS
    if left_out:
        how += f" Left out: {counted(len(left_out), 'row')} without {label_of(x, plain=True)}."
    if any(hollow[number] for number in drawn):
        number = sum(hollow[number] for number in drawn)
        how += f" Hollow: {counted(number, 'line')} without a place; the table says why."
    return grid.finish(spec, table, drawn, how)


def _is_unranked(table: TableSpec, row: TableRow) -> bool:
    """Whether the table is a leaderboard in which the row has no place."""
    board = table.leaderboard
    return bool(board and why_unranked(row, board.by, board.unit))


def _by_seed(row: TableRow, y: str) -> list[float]:
    """The metric of each measured seed that has it, averaged over repeats."""
    return [fmean(values[y]) for values in row.known if values.get(y)]


def privacy_utility(spec: PrivacyUtilitySpec, table: TableSpec, rows: Sequence[TableRow]) -> Picture | None:
    """Metrics over epsilon with a line for each method; runs without privacy are at ∞, at the right end.

    In a leaderboard the markers of lines without a place are hollow.
    """
    shared = {each.name: getattr(spec, each.name) for each in fields(LinesSpec)}
    return curve(CurveSpec(**shared, x=f"epsilon_{spec.epsilon}", log_x=True), table, rows)


def steps(spec: StepsSpec, table: TableSpec, rows: Sequence[TableRow]) -> Picture | None:
    """Metrics of the generators kept during training over steps, with the epsilon spent by then on a second axis.

    Steps are divided by the value of the config key `per`: with method.n_d, discriminator steps become generator steps.
    """
    per = spec.per
    # Collect the kept generators of all usable runs, by the number of the row.
    trajectories: dict[int, list[tuple[ReadableRun, dict[float, tuple[float, dict[str, list[float]]]]]]] = {}
    for i, row in enumerate(rows):
        unit = _unit(row, per) if per else 1.0
        for folder in row.folders:
            if folder.id in row.unusable:
                continue
            points = trajectory(folder, row.specs[0].protocol_record())
            if points:
                by_step = {point.step / unit: (point.epsilon, metric_values(point.measurement)) for point in points}
                trajectories.setdefault(i, []).append((folder, by_step))
    # Rows without a value of any drawn metric get no line and no entry in the legend.
    kept = [
        i
        for i, runs in trajectories.items()
        if any(y in values for _, by_step in runs for _, values in by_step.values() for y in spec.y)
    ]
    if not kept:
        return None
    shown = [rows[i] for i in kept]
    grid, apart = Grid(spec, shown), False
    for (y, column), panel in grid.panels.items():
        spent: dict[float, list[float]] = {}
        for member in grid.members:
            if member.panel != column:
                continue
            # One value per seed and step: the mean over the repeats of the evaluation.
            seeds: dict[float, list[float]] = {}
            for _, by_step in trajectories[kept[member.number]]:
                for x, (epsilon, values) in by_step.items():
                    if y in values:
                        seeds.setdefault(x, []).append(fmean(values[y]))
                        if math.isfinite(epsilon):
                            spent.setdefault(x, []).append(epsilon)
            draw_band(panel, seeds, grid.style[member.line], member.line, marks=True)
        panel.set_xlabel(spec.x_label or ("steps" if per is None else f"steps / {label_of(per)}"))
        panel.xaxis.set_major_formatter("{x:,.0f}")
        if spec.log_x:
            panel.set_xscale("log")
            panel.xaxis.set_minor_formatter("")
        # A second axis for epsilon needs one epsilon per step, nearly equal for all lines of the panel.
        apart |= not _second_axis(panel, spent)
    how = f"{BANDS} Points are generators that were kept during training."
    if apart:
        how += " Lines differ in the ε spent by a step, so there is no axis of it."
    drawn = {number: [folder for folder, _ in trajectories[i]] for number, i in enumerate(kept)}
    return grid.finish(spec, table, drawn, how)


def _unit(row: TableRow, per: str) -> float:
    value = value_of(row, per)
    if not isinstance(value, float | int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"expected a number > 0 for the key plot.per={per} in each row, got {value!r}.")
    return float(value)


def _second_axis(panel: Axes, spent: Mapping[float, Sequence[float]]) -> bool:
    """Draw the epsilon spent by each x as an axis at the top; False, without an axis, if the lines differ in it."""
    if any(max(values) > 1.01 * min(values) for values in spent.values()):
        return False
    if places := sorted(spent):
        chosen = [places[i] for i in np.unique(np.linspace(0, len(places) - 1, 6).round().astype(int))]
        top = panel.secondary_xaxis("top")
        top.set_xticks(chosen, [epsilon_text(max(spent[x])) for x in chosen], fontsize=8)
        top.set_xlabel("ε proven for the steps so far", fontsize=8)
        top.tick_params(which="minor", top=False)
    return True


def log(spec: LogSpec, table: TableSpec, rows: Sequence[TableRow]) -> Picture | None:
    """Scalars of log.jsonl over the number of their row in the log, for runs whose training has ended.

    A line of several seeds ends where the shortest log does.
    """
    logs: dict[int, dict[str, list[np.ndarray]]] = {}
    folders: dict[int, list[ReadableRun]] = {}
    for i, row in enumerate(rows):
        for folder in row.folders:
            if folder.id in row.unusable or not folder.trained:
                continue
            values = {y: folder.log_values(y)[: spec.x_max] for y in spec.y}
            if any(len(scalars) for scalars in values.values()):
                folders.setdefault(i, []).append(folder)
            for y, scalars in values.items():
                if len(scalars):
                    smoothed = scalars if spec.ema is None else averaged(scalars, spec.ema)
                    logs.setdefault(i, {}).setdefault(y, []).append(smoothed)
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
            length = min(len(scalars) for scalars in several)
            chosen = np.unique(np.append(np.arange(0, length, math.ceil(length / MOST)), length - 1))
            seeds = {float(t + 1): [float(scalars[t]) for scalars in several] for t in chosen}
            draw_band(panel, seeds, grid.style[member.line], member.line, marks=False)
        panel.set_xlabel(spec.x_label or "row of the log")
        panel.xaxis.set_major_formatter("{x:,.0f}")
    how = BANDS
    if spec.ema is not None:
        how += f" Exponential moving averages with decay {spec.ema:g}."
    drawn = {number: folders[i] for number, i in enumerate(kept)}
    return grid.finish(spec, table, drawn, how)

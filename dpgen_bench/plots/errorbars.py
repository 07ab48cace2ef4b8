"""Points and bands of plots: means over seeds, with 95% intervals from three seeds on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dpgen_bench.plots.parts import XAxis
from dpgen_bench.store.statistics import LEAST_SEEDS, t_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = (
    "Points are means over seeds, and bars are 95% intervals of the mean by Student's t; points of fewer than "
    f"{LEAST_SEEDS} seeds have no bar."
)
BANDS = (
    "Lines are means over seeds, and bands are 95% intervals of the mean by Student's t; lines of fewer than "
    f"{LEAST_SEEDS} seeds have no band."
)


@dataclass(frozen=True)
class Point:
    """A point of a line: its x, the value of each seed, and whether its marker is hollow."""

    x: Any
    seeds: Sequence[float]
    hollow: bool = False


def half_width(seeds: Sequence[float]) -> float:
    """Half the width of the 95% interval of the mean; NaN, which draws nothing, for fewer than `LEAST_SEEDS` seeds."""
    if len(seeds) < LEAST_SEEDS:
        return math.nan
    low, high = t_interval(seeds)
    return (high - low) / 2


def draw_points(panel: Axes, axis: XAxis, points: Sequence[Point], style: Mapping[str, str], label: str) -> None:
    """Draw one line. Points at numbers are joined; those at texts and infinity, right of them, are not."""
    ordered = sorted(((axis.place(point.x), point) for point in points), key=lambda pair: pair[0])
    joined = [pair for pair in ordered if axis.joins(pair[0])]
    separate = [pair for pair in ordered if pair not in joined]
    if not axis.numbers:
        joined, separate = [], ordered
    hollow = [(place, fmean(point.seeds)) for place, point in ordered if point.hollow]
    face = "white" if len(hollow) == len(ordered) else style["color"]  # which the legend shows
    for part, dashes in ((joined, style["linestyle"]), (separate, "none")):
        if part:
            places, means = [place for place, _ in part], [fmean(point.seeds) for _, point in part]
            bars = [half_width(point.seeds) for _, point in part]
            look: dict[str, Any] = {**style, "linestyle": dashes, "label": label, "markersize": 4.5, "linewidth": 1.2}
            look |= {"markerfacecolor": face, "clip_on": False}  # a marker at 0 is whole
            panel.errorbar(places, means, yerr=bars, capsize=2.5, elinewidth=0.9, **look)
    if hollow:  # drawn over the filled markers
        look = {"color": style["color"], "marker": style["marker"], "linestyle": "none"}
        panel.plot(*zip(*hollow, strict=True), markerfacecolor="white", markersize=4.5, zorder=3, clip_on=False, **look)


def draw_band(
    panel: Axes, seeds: Mapping[float, list[float]], style: Mapping[str, str], label: str, marks: bool
) -> None:
    """Draw the mean over seeds at each x, and a band of its interval."""
    if not seeds:
        return
    places = sorted(seeds)
    means, bars = [fmean(seeds[x]) for x in places], [half_width(seeds[x]) for x in places]
    look: dict[str, Any] = {**style, **({"markersize": 3.5} if marks else {"marker": "none"})}
    panel.plot(places, means, label=label, linewidth=1.2, **look)
    if not all(map(math.isnan, bars)):
        low = [mean - bar for mean, bar in zip(means, bars, strict=True)]
        high = [mean + bar for mean, bar in zip(means, bars, strict=True)]
        panel.fill_between(places, low, high, color=style["color"], alpha=0.18, linewidth=0)

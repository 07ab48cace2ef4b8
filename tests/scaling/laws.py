"""Exponents of measured costs, the table of docs/scaling.md, and its plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEADER = ("part", "cost against", "from", "to", "law", "exponent", "at the end", "reason for the law")


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of log cost against log size, by least squares: p of cost = a size^p."""
    x, y = ([math.log(value) for value in values] for values in (sizes, costs))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    products = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return products / sum((a - mean_x) ** 2 for a in x)


def curve(part: str, size: str, law: float, why: str, milliseconds: Mapping[int, float]) -> dict[str, Any]:
    """A measured curve with its exponent over all sizes, and over the last two, where a fixed part counts least."""
    sizes, costs = list(milliseconds), list(milliseconds.values())
    return {
        "part": part,
        "size": size,
        "law": law,
        "why": why,
        "exponent": round(exponent(sizes, costs), 2),
        "exponent_at_the_end": round(exponent(sizes[-2:], costs[-2:]), 2),
        "milliseconds": {str(key): float(f"{value:.4g}") for key, value in milliseconds.items()},
    }


def table(curves: Sequence[Mapping[str, Any]]) -> str:
    """The curves as a table in Markdown."""
    lines = [f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}"]
    for each in curves:
        sizes = [int(key) for key in each["milliseconds"]]
        cells = [each["part"], each["size"], f"{sizes[0]:,}", f"{sizes[-1]:,}", f"{each['law']:g}"]
        cells += [f"{each[key]:.2f}" for key in ("exponent", "exponent_at_the_end")]
        lines.append(f"| {' | '.join([*cells, each['why']])} |")
    return "\n".join(lines)


def plot(curves: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the measured costs, a panel for each size, with dashed lines of the laws through the last points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes = list(dict.fromkeys(each["size"] for each in curves))
    columns = 3
    rows = -(-len(sizes) // columns)
    style = {"font.size": 8.0, "axes.titlesize": 9.0, "axes.spines.right": False, "axes.spines.top": False}
    with plt.rc_context({**style, "legend.fontsize": 7.0, "legend.frameon": False, "font.family": "DejaVu Sans"}):
        figure, axes = plt.subplots(rows, columns, figsize=(10.5, 2.6 * rows), layout="constrained", squeeze=False)
        for axis, size in zip(axes.flat, sizes, strict=False):
            ticks: list[int] = []
            for number, each in enumerate(row for row in curves if row["size"] == size):
                x = [int(key) for key in each["milliseconds"]]
                y = list(each["milliseconds"].values())
                name = f"{each['part']}: {each['exponent_at_the_end']:.2f} (law {each['law']:g})"
                axis.plot(x, y, "o-", color=f"C{number}", markersize=4, label=name)
                axis.plot(x, [y[-1] * (at / x[-1]) ** each["law"] for at in x], "--", color=f"C{number}", linewidth=0.8)
                ticks += x
            axis.set(xscale="log", yscale="log", xlabel=size, ylabel="CPU ms")
            shown: list[int] = []
            for tick in sorted(ticks):  # those that do not overlap
                if not shown or tick >= 1.5 * shown[-1]:
                    shown.append(tick)
            axis.set_xticks(shown, [f"{at:,}" for at in shown])
            axis.minorticks_off()
            low, high = axis.get_ylim()
            low, high = min(low, high / 30.0), max(high, 10.0 * low)  # a small range would make noise look large
            axis.set_ylim(low, high * (high / low) ** 0.4)  # room for the legend above the curves
            axis.legend(loc="upper left", borderaxespad=0.0, handlelength=1.2)
        for axis in axes.flat[len(sizes) :]:
            axis.set_axis_off()
        figure.savefig(path, dpi=130)
        plt.close(figure)

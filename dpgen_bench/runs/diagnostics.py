"""Plots of the diagnostics that a run wrote with privacy.diagnostics=unsafe; the plots are private, too."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 1000  # releases that one line shows


def draw_norms(diagnostics: Path, bounds: dict[str, float], picture: Path) -> bool:
    """Plot the norms before clipping of all released rows, over releases and as a histogram.

    GS-WGAN's Figures 2 and A1 show the same of its gradients: whether their norms are near the clipping norm.

    Args:
        diagnostics: diagnostics.jsonl of a run. Of a release that was repeated after an interruption, the last counts.
        bounds: clipping norm by mechanism; inf where nothing is clipped.
        picture: the PNG file to write.

    Returns:
        Whether there were norms to plot.
    """
    from matplotlib.figure import Figure

    norms = read_norms(diagnostics)
    if not norms:
        return False
    figure = Figure(figsize=(10.0, 3.4 * len(norms)), layout="constrained")
    for (name, releases), panels in zip(norms.items(), figure.subplots(len(norms), 2, squeeze=False), strict=True):
        draw_norms_of(panels, releases, bounds[name])
        panels[0].set_title(name)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    return True


def draw_norms_of(panels: Sequence[Axes], releases: Mapping[int, np.ndarray], C: float, colour: str = "C0") -> None:
    """Draw the norms of one mechanism's rows over its releases, and their histogram.

    Args:
        panels: two of them.
        releases: float [rows] by the number of the release; at most `MOST` of them are drawn, evenly spaced.
        C: clipping norm; inf if nothing is clipped.
    """
    course, histogram = panels
    values = np.concatenate(list(releases.values()))
    values = values[np.isfinite(values)]
    numbers = list(releases)[:: math.ceil(len(releases) / MOST)]
    low, middle, high = (np.array([np.quantile(releases[t], q) for t in numbers]) for q in (0.1, 0.5, 0.9))
    band = "10% to 90% of a release's rows"
    course.fill_between(numbers, low, high, color=colour, alpha=0.25, linewidth=0, label=band)
    course.plot(numbers, middle, color=colour, linewidth=0.9, label="median")
    course.set(xlabel="release", ylabel="norm before clipping")
    histogram.hist(values, bins=60, color=colour)
    histogram.set(xlabel="norm before clipping", ylabel="rows")
    clipped = f", {np.mean(values > C):.0%} clipped" if math.isfinite(C) and len(values) else ""
    median = f"median {np.median(values):.3g}" if len(values) else "none finite"
    histogram.set_title(f"{len(values):,} rows; {median}{clipped}", fontsize="small")
    if math.isfinite(C):
        look: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 0.9}
        course.axhline(C, label=f"C = {C:g}", **look)
        histogram.axvline(C, **look)
    course.set_ylim(bottom=0.0)
    course.legend()


def read_norms(diagnostics: Path) -> dict[str, dict[int, np.ndarray]]:
    """Norms before clipping of the rows of each release, by mechanism and number of the release."""
    norms: dict[str, dict[int, np.ndarray]] = {}
    for line in diagnostics.read_text().splitlines() if diagnostics.exists() else ():
        try:
            row: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:  # the process was killed while it wrote the line, and the release was repeated
            continue
        if row.get("norms_before_clipping"):
            norms.setdefault(row["mechanism"], {})[row["release"]] = np.array(row["norms_before_clipping"], float)
    return {name: dict(sorted(rows.items())) for name, rows in norms.items()}

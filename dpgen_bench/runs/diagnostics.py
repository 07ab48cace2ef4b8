"""Plots of the diagnostics that a run wrote with privacy.diagnostics=unsafe; the plots are private, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


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
    panels = figure.subplots(len(norms), 2, squeeze=False)
    for (name, rows), (over_releases, histogram) in zip(norms.items(), panels, strict=True):
        C, values = bounds[name], np.concatenate(list(rows.values()))
        values = values[np.isfinite(values)]
        releases = np.array(list(rows))
        low, middle, high = (np.array([np.quantile(row, q) for row in rows.values()]) for q in (0.1, 0.5, 0.9))
        over_releases.fill_between(releases, low, high, alpha=0.3, linewidth=0, label="10% to 90% of a release's rows")
        over_releases.plot(releases, middle, linewidth=0.8, label="median")
        over_releases.set(xlabel="release", ylabel="norm before clipping", title=name)
        histogram.hist(values, bins=60)
        histogram.set(
            xlabel="norm before clipping", ylabel="rows", title=f"{len(values):,} rows; {_summary(values, C)}"
        )
        if np.isfinite(C):
            over_releases.axhline(C, color="black", linestyle="--", linewidth=0.8, label=f"C = {C:g}")
            histogram.axvline(C, color="black", linestyle="--", linewidth=0.8)
        over_releases.set_ylim(bottom=0.0)
        over_releases.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    return True


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


def _summary(values: np.ndarray, C: float) -> str:
    median = f"median {np.median(values):.3g}" if len(values) else "none finite"
    return f"{median}, {np.mean(values > C):.0%} clipped" if np.isfinite(C) and len(values) else median

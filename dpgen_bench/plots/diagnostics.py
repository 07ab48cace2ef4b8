"""Plots of norms before clipping, and of the bias and variance of DP-Sinkhorn's gradient."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpgen_bench.config.building import build_dataset
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.display import counted, dataset_name
from dpgen_bench.plots.bias_variance import bias_variance as estimate
from dpgen_bench.plots.captions import Picture, finished
from dpgen_bench.plots.parts import (
    COLOURS,
    TWO_COLUMNS,
    Style,
    proven_text,
    row_name,
)
from dpgen_bench.runs.diagnostics import draw_norms_of, read_norms
from dpgen_bench.store.folders import RunFolder
from dpgen_bench.tables.plot_spec import BiasVarianceSpec, NormsSpec
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.tables.spec import TableSpec


def norms(spec: NormsSpec, table: TableSpec, rows: Sequence[TableRow]) -> Picture | None:
    """Norms before clipping of what each mechanism released: quantiles over releases, and a histogram.

    They are of the first seed of each row that was run with privacy.diagnostics=unsafe. Norms are computed from
    training records and covered by no epsilon, so runs with privacy.noise=os, whose data may be private, are left out.
    """
    from matplotlib.figure import Figure

    shown: list[tuple[TableRow, RunFolder, str, dict[int, np.ndarray]]] = []
    left_out = 0
    for row in rows:
        for folder in row.folders:
            if folder.id in row.unusable or not isinstance(folder, RunFolder):  # a record has nothing private
                continue
            path = folder.path / "private" / "diagnostics.jsonl"
            if not path.exists():
                continue
            if row.specs[0].config.privacy.noise == "os":
                left_out += 1
                continue
            mechanisms = read_norms(path)
            shown += [(row, folder, name, releases) for name, releases in mechanisms.items()]
            if mechanisms:
                break
    if not shown:
        return None
    figure = Figure(figsize=(TWO_COLUMNS, 0.2 + 2.3 * len(shown)), layout="constrained")
    for panels, (row, folder, name, releases) in zip(figure.subplots(len(shown), 2, squeeze=False), shown, strict=True):
        draw_norms_of(panels, releases, _clipping_norm(folder, name), COLOURS[0])
        title = f"{row_name(row, table, spec.series)}: {name}"
        panels[0].set_title(f"{textwrap.fill(title, 48)}\n{proven_text(folder)}", fontsize=8)
    how = "Computed from training records, which no ε covers: for public data only. First seed of each row."
    if left_out:
        how += f" Left out: {counted(left_out, 'run')} with privacy.noise=os."
    rows_shown = {id(row): row for row, _, _, _ in shown}  # a row may have several mechanisms
    runs = {id(row): folder for row, folder, _, _ in shown}
    drawn = {i: [runs[key]] for i, key in enumerate(rows_shown)}
    return finished(figure, table, list(rows_shown.values()), drawn, how)


def _clipping_norm(folder: RunFolder, mechanism: str) -> float:
    """C of a mechanism from the run's ledger; infinite if nothing is clipped."""
    for entry in folder.read_json("ledger.json").get("entries", []):
        if entry["name"] == mechanism:
            return float(entry["bound"].get("C", math.inf))
    return math.inf


def bias_variance(spec: BiasVarianceSpec, table: TableSpec, rows: Sequence[TableRow]) -> Picture | None:
    """DP-Sinkhorn's Figure 4(c), from training images and without a run; see the module `bias_variance`."""
    from matplotlib.figure import Figure

    records = build_dataset(compose_config([f"dataset={spec.dataset}"])).load("train")
    frame = estimate(records.images.float() / 127.5 - 1.0, records.labels, spec)
    figure = Figure(figsize=(TWO_COLUMNS, 2.7), layout="constrained")
    panels, style = figure.subplots(1, 2), Style()
    for pool, line in frame.groupby("pool"):
        look: dict[str, Any] = style[str(pool)]
        for panel, column in zip(panels, ("bias", "variance"), strict=True):
            panel.plot(line["p"], line[column], label=str(pool), linewidth=1.2, markersize=4.5, **look)
    panels[0].set_ylabel("bias / standard deviation at $p = 1$")
    panels[1].set_ylabel(r"variance / variance at $p = 1$")
    for panel in panels:
        panel.set_xlabel("$p$")
        panel.set_ylim(bottom=0.0)
        panel.grid(alpha=0.25, linewidth=0.6)
    panels[1].legend(title="images per class\nof the generator")
    caption = (
        f"No run: gradients over {spec.batches} batches of {spec.n} real and {spec.n} generated images of "
        f"{dataset_name(spec.dataset)} ({len(records.labels):,} training images, half of them real, the "
        f"generator's with noise of deviation {spec.noise:g}), which no ε covers.",
        "Not a reproduction: the paper's lines are generators trained on MNIST with different p; here they are pools "
        "of held-out images, from collapsed (1 image per class) to diverse. There is one estimate from all batches, "
        "without repeats, so there are no error bars.",
    )
    return Picture(figure, 0, caption)

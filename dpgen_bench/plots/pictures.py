"""Pictures that are no lines of figures: sample grids, norms before clipping, and DP-Sinkhorn's bias and variance."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from dpgen_bench.plots.parts import (
    COLOURS,
    Style,
    caption,
    check_keys,
    listed,
    proven_words,
    row_name,
    write_below,
)
from dpgen_bench.results.diagnostics import _norms as read_norms
from dpgen_bench.results.store import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dpgen_bench.tables.rows import TableRow

MOST = 1000  # releases of one line


def samples(spec: DictConfig, table: DictConfig, rows: Sequence[TableRow]) -> Figure | None:
    """Grids of samples side by side, a block for each row of the table: a column for each class, `per_class` rows.

    A block shows the row's first seed that has samples.
    """
    from matplotlib.figure import Figure

    per_class = int(spec.get("per_class", 8))
    if per_class < 1:
        raise ValueError(f"expected plot.per_class of at least 1, got {per_class}.")
    apart = listed(spec.get("series"))
    check_keys(rows, apart)
    blocks: list[tuple[TableRow, RunFolder, np.ndarray]] = []
    damaged = []
    for row in rows:
        for folder in row.folders:
            path = folder.path / "samples.npz"
            if folder.id in row.damage or not folder.trained or not path.exists():
                continue
            try:
                blocks.append((row, folder, montage(path, per_class)))
                break
            except Exception as error:  # a damaged archive fails in many ways; the others must not go with it
                damaged.append(f"The samples of run {folder.id} cannot be read ({type(error).__name__}).")
    if not blocks:
        return None
    wide = max(block.shape[1] / block.shape[0] for _, _, block in blocks)
    columns = 2 if len(blocks) == 4 else min(len(blocks), 3)
    count = math.ceil(len(blocks) / columns)
    height = max(0.55 + 3.0 / wide, 1.2)
    figure = Figure(figsize=(0.4 + 3.1 * columns, 1.3 + height * count), layout="constrained")
    panels = figure.subplots(count, columns, squeeze=False).ravel()
    for panel in panels:
        panel.set_axis_off()
    for panel, (row, folder, block) in zip(panels, blocks, strict=False):
        shown = block[:, :, 0] if block.shape[2] == 1 else block
        panel.imshow(shown, cmap="gray", vmin=0, vmax=255, interpolation="none")
        name = textwrap.fill(row_name(row, table, apart), 46)
        panel.set_title(f"{name}\n{proven_words(folder)}, seed {folder.config.seed}", fontsize=8)
    how = "Columns: classes in their order; rows: the first samples of each, not chosen."
    drawn = {i: [folder] for i, (_, folder, _) in enumerate(blocks)}
    text = caption([row for row, _, _ in blocks], drawn, "\n".join([how, *damaged]))
    write_below(figure, str(table.title), text)
    return figure


def montage(path: Path, per_class: int) -> np.ndarray:
    """A picture uint8 [H, W, c] of the first `per_class` samples of each class, a column each, with grey between."""
    with np.load(path, allow_pickle=False) as kept:
        images, labels = kept["images"], kept["labels"]
    if images.ndim != 4 or len(images) != len(labels) or len(labels) == 0:
        raise ValueError(f"expected images [n, c, h, w] and n labels in {path.name}, got {images.shape}.")
    channels, height, width = images.shape[1:]
    out = np.full((per_class * (height + 1) - 1, (labels.max() + 1) * (width + 1) - 1, channels), 128, np.uint8)
    for label in range(labels.max() + 1):
        for i, image in enumerate(images[labels == label][:per_class]):
            top, left = i * (height + 1), label * (width + 1)
            pixels = np.clip(np.rint(image), 0, 255).astype(np.uint8)
            out[top : top + height, left : left + width] = pixels.transpose(1, 2, 0)
    return out


def norms(spec: DictConfig, table: DictConfig, rows: Sequence[TableRow]) -> Figure | None:
    """Norms of the rows that mechanisms released, before clipping: their course over releases, and their histogram.

    Each row's first seed that was run with privacy.diagnostics=unsafe. Norms are of training records, and no epsilon
    covers them: runs with privacy.noise=os, whose data may be private, are left out.
    """
    from matplotlib.figure import Figure

    check_keys(rows, listed(spec.get("series")))
    found: list[tuple[TableRow, RunFolder, str, dict[int, np.ndarray]]] = []
    closed = 0
    for row in rows:
        for folder in row.folders:
            path = folder.path / "private" / "diagnostics.jsonl"
            if folder.id in row.damage or not path.exists():
                continue
            if row.specs[0].config.privacy.noise == "os":
                closed += 1
                continue
            mechanisms = read_norms(path)
            found += [(row, folder, name, releases) for name, releases in mechanisms.items()]
            if mechanisms:
                break
    if not found:
        return None
    figure = Figure(figsize=(9.0, 1.4 + 2.8 * len(found)), layout="constrained")
    for panels, (row, folder, name, releases) in zip(figure.subplots(len(found), 2, squeeze=False), found, strict=True):
        _draw_norms(panels, releases, _clipping_norm(folder, name))
        title = f"{row_name(row, table, listed(spec.get('series')))}: {name}"
        panels[0].set_title(f"{textwrap.fill(title, 60)}\n{proven_words(folder)}", fontsize=9)
    how = "Computed from training records, which no ε covers: for public data only. First seed of each row."
    if closed:
        how += f" Left out: {closed} run(s) with privacy.noise=os."
    shown = {id(row): row for row, _, _, _ in found}
    runs = {id(row): folder for row, folder, _, _ in found}
    text = caption(list(shown.values()), {i: [runs[key]] for i, key in enumerate(shown)}, how)
    write_below(figure, str(table.title), text)
    return figure


def _draw_norms(panels: Sequence[Axes], releases: dict[int, np.ndarray], C: float) -> None:
    course, histogram = panels
    values = np.concatenate(list(releases.values()))
    values = values[np.isfinite(values)]
    numbers = list(releases)[:: math.ceil(len(releases) / MOST)]
    low, middle, high = (np.array([np.quantile(releases[t], q) for t in numbers]) for q in (0.1, 0.5, 0.9))
    course.fill_between(
        numbers, low, high, color=COLOURS[0], alpha=0.25, linewidth=0, label="10% to 90% of a release's rows"
    )
    course.plot(numbers, middle, color=COLOURS[0], linewidth=0.9, label="median")
    course.set(xlabel="release", ylabel="norm before clipping")
    histogram.hist(values, bins=60, color=COLOURS[0])
    histogram.set(xlabel="norm before clipping", ylabel="rows")
    clipped = f", {np.mean(values > C):.0%} clipped" if math.isfinite(C) and len(values) else ""
    median = f"median {np.median(values):.3g}" if len(values) else "none finite"
    histogram.set_title(f"{len(values):,} rows; {median}{clipped}", fontsize=9)
    if math.isfinite(C):
        look: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 0.9}
        course.axhline(C, label=f"C = {C:g}", **look)
        histogram.axvline(C, **look)
    course.set_ylim(bottom=0.0)
    course.legend(fontsize=7.5)


def _clipping_norm(folder: RunFolder, mechanism: str) -> float:
    """C of a mechanism by the run's ledger; inf where nothing is clipped."""
    for entry in folder.read_json("ledger.json").get("entries", []):
        if entry["name"] == mechanism:
            return float(entry["bound"].get("C", math.inf))
    return math.inf


def bias_variance(spec: DictConfig, table: DictConfig, rows: Sequence[TableRow]) -> Figure | None:
    """DP-Sinkhorn's Figure 4(c), from a data set's training images and no run: see the module of that name.

    `dataset` names it (digits, unless said otherwise); all other keys are those of its `Settings`.
    """
    from matplotlib.figure import Figure

    from dpgen_bench.plots.bias_variance import Settings
    from dpgen_bench.plots.bias_variance import bias_variance as estimate
    from dpgen_bench.specify import build_dataset, compose_config

    plain = OmegaConf.to_container(spec)
    assert isinstance(plain, dict)
    given: dict[str, Any] = {
        str(key): tuple(value) if isinstance(value, list) else value
        for key, value in plain.items()
        if key not in ("kind", "dataset")
    }
    settings = Settings(**given)
    name = str(plain.get("dataset", "digits"))
    records = build_dataset(compose_config([f"dataset={name}"])).load("train")
    found = estimate(records.images.float() / 127.5 - 1.0, records.labels, settings)
    figure = Figure(figsize=(8.6, 4.2), layout="constrained")
    panels, style = figure.subplots(1, 2), Style()
    for pool, line in found.groupby("pool"):
        look: dict[str, Any] = style[str(pool)]
        for panel, column in zip(panels, ("bias", "variance"), strict=True):
            panel.plot(line["p"], line[column], label=str(pool), linewidth=1.3, markersize=5, **look)
    panels[0].set_ylabel(r"bias / $\sqrt{\mathrm{variance\ at\ } p = 1}$")
    panels[1].set_ylabel(r"variance / variance at $p = 1$")
    for panel in panels:
        panel.set_xlabel("$p$")
        panel.set_ylim(bottom=0.0)
        panel.grid(alpha=0.25, linewidth=0.6)
    panels[1].legend(title="images per class\nof the generator", fontsize=8, title_fontsize=8)
    text = (
        f"No run: gradients over {settings.batches} batches of {settings.n} real and {settings.n} generated images of "
        f"{name} ({len(records.labels):,} training images, half of them real, the generator's with noise of deviation "
        f"{settings.noise:g}), which no ε covers.\nNot a reproduction: the paper's lines are generators trained on "
        "MNIST with different p; here they are pools of held-out images, from collapsed (1 image per class) to diverse."
    )
    write_below(figure, str(table.title), text)
    return figure


SETTINGS = {"p", "pool", "n", "batches", "noise", "m", "lam", "alpha_c", "seed"}
Kind = Callable[[DictConfig, DictConfig, Sequence["TableRow"]], "Figure | None"]
KINDS: dict[str, tuple[Kind, set[str]]] = {
    "samples": (samples, {"per_class", "series"}),
    "norms": (norms, {"series"}),
    "bias_variance": (bias_variance, {"dataset", *SETTINGS}),
}

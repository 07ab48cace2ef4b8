"""The accuracy of guessing, drawn as a line below which nothing was learnt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpgen_bench.config.display import is_accuracy_in_percent
from dpgen_bench.tables.rows import TableRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes


OF_FAKES = "d_accuracy_on_fakes"  # a share in [0, 1]; a discriminator has two classes


def is_accuracy(name: str) -> bool:
    """Whether the metric of this name is an accuracy, of a classifier or of the discriminator."""
    return name == OF_FAKES or is_accuracy_in_percent(name)


def chance_levels(name: str, rows: Sequence[TableRow]) -> list[float]:
    """The accuracies of guessing uniformly among the classes, one level for each number of classes in the rows.

    Empty for metrics that are not accuracies. Empty also for calibrated accuracies, because dividing by the accuracy on
    real data gives another level for each classifier.
    """
    if name == OF_FAKES:
        return [0.5] if rows else []
    if not is_accuracy(name) or "calibrated" in name:
        return []
    numbers = {number for row in rows if (number := _classes(row))}
    return [100.0 / number for number in sorted(numbers)]


def _classes(row: TableRow) -> int | None:
    try:
        return row.specs[0].dataset().num_classes
    except (OSError, ValueError):  # a folder of images that is not on this machine; plots of its runs do not need it
        return None


def draw_chance(panel: Axes, levels: Sequence[float], percent: bool) -> None:
    """Draw a thin line at each level, with its name right of the panel."""
    for level in levels:
        panel.axhline(level, color="0.45", linestyle=(0, (1, 2)), linewidth=0.8, zorder=0.5)
        text = f"chance {level:.3g}{' %' if percent else ''}"
        place = {"xy": (1.0, level), "xycoords": panel.get_yaxis_transform(), "textcoords": "offset points"}
        # In the margin, because inside the axes it could cover a marker.
        panel.annotate(text, xytext=(3, 0), ha="left", va="center", fontsize=7, color="0.35", **place)  # type: ignore[arg-type]

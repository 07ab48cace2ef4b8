"""The report's curves of privacy and utility: one plot for each data set, with a line for each method."""

from __future__ import annotations

import io
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from dpgen_bench.plots.draw import STYLE
from dpgen_bench.plots.errorbars import POINTS, Point, draw_points
from dpgen_bench.plots.parts import Style, XAxis, y_label
from dpgen_bench.report.boards import Board
from dpgen_bench.report.lines import TIME
from dpgen_bench.report.text import data_uri
from dpgen_bench.runs.display import dataset_name, direction, method_name, metric_name
from dpgen_bench.tables.ranking import Values

Curves = dict[str, dict[str, dict[float, Values]]]  # metric -> method -> budget -> values of its best line


def curves_content(boards: Sequence[Board]) -> list[dict[str, str]]:
    """A plot for each data set with a method that has places at two budgets: SVG in a data URI, with a caption."""
    content = []
    for dataset in dict.fromkeys(board.dataset for board in boards):
        of_dataset = comparable([board for board in boards if board.dataset == dataset and board.placed])
        curves = best_lines(of_dataset)
        if any(len(budgets) > 1 for methods in curves.values() for budgets in methods.values()):
            protocols = ", ".join(dict.fromkeys(board.terms["protocol"] for board in of_dataset))
            which = "at each ε the settings of a method that have the best place there"
            caption = f"{dataset_name(dataset)}, protocol {protocols}: {which}. {POINTS}"
            content.append(
                {"dataset": dataset, "name": dataset_name(dataset), "caption": caption, "picture": _draw(curves)}
            )
    return content


def comparable(boards: Sequence[Board]) -> list[Board]:
    """The boards with the terms of the one with the most places; without privacy a board has fewer terms."""
    if not boards:
        return []
    terms = max(boards, key=lambda board: (len(board.terms), board.placed)).terms
    return [board for board in boards if all(terms.get(key) == text for key, text in board.terms.items())]


def best_lines(boards: Sequence[Board]) -> Curves:
    """By metric, method and budget the values of the method's line with the best place by that metric."""
    curves: Curves = {}
    for board in boards:
        for metric in board.metrics:
            if metric == TIME:
                continue
            ranking = zip(board.lines, board.rankings[metric], strict=True)
            placed = [(standing.place, line) for line, (standing, _) in ranking if standing.place is not None]
            for _, line in sorted(placed, key=lambda pair: pair[0]):
                method = curves.setdefault(metric, {}).setdefault(str(line.first.config.method.name), {})
                method.setdefault(float(board.epsilon), line.values[metric])
    return curves


def _draw(curves: Curves) -> str:
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", STYLE]):
        figure = Figure(figsize=(3.1 * len(curves) + 1.6, 3.0), layout="constrained")
        styles, handles = Style(), {}
        panels = figure.subplots(1, len(curves), squeeze=False)[0]
        for panel, (metric, methods) in zip(panels, curves.items(), strict=True):
            axis = XAxis((budget for budgets in methods.values() for budget in budgets), log=True)
            for method, budgets in sorted(methods.items()):
                points = [Point(budget, [fmean(repeats) for repeats in values]) for budget, values in budgets.items()]
                name = method_name(method)
                draw_points(panel, axis, points, styles[name], name)
            axis.apply(panel)
            panel.set(xlabel="ε (budget)", ylabel=y_label(metric_name(metric)))
            panel.grid(alpha=0.25, linewidth=0.6)
            if direction(metric) == "lower" or metric.endswith("_pct"):
                panel.set_ylim(0.0, 1.04 * panel.get_ylim()[1])
            found: dict[str, Any] = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
            handles.update({name: handle for name, handle in found.items() if name not in handles})
        figure.legend(list(handles.values()), list(handles), loc="outside right center", fontsize=8)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return data_uri(file.getvalue(), "image/svg+xml")

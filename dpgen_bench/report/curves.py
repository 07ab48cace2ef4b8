"""The report's curves of privacy and utility: one plot for each data set, with a line for each method."""

from __future__ import annotations

import io
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from dpgen_bench.config.display import dataset_name, method_name, metric_name
from dpgen_bench.plots.draw import STYLE
from dpgen_bench.plots.errorbars import POINTS, Point, draw_points
from dpgen_bench.plots.parts import ONE_COLUMN, Style, XAxis, draw_legend, y_label
from dpgen_bench.report.boards import Board
from dpgen_bench.report.lines import TIME
from dpgen_bench.report.text import data_uri
from dpgen_bench.tables.ranking import Values

Curves = dict[str, dict[str, dict[float, Values]]]  # metric -> method -> budget -> values of its best line


def curves_content(boards: Sequence[Board]) -> list[dict[str, Any]]:
    """For each data set with a method that has places at two budgets, a plot for each metric and one caption.

    Plots are SVGs in data URIs.
    """
    content = []
    for dataset in dict.fromkeys(board.dataset for board in boards):
        curves, protocols = best_lines([board for board in boards if board.dataset == dataset])
        if any(len(budgets) > 1 for methods in curves.values() for budgets in methods.values()):
            which = (
                "at each ε the settings of a method that have the best place there, and of equal places the best mean"
            )
            caption = f"{dataset_name(dataset)}, protocol {', '.join(protocols)}: {which}. {POINTS}"
            styles = Style()  # a method has the same colour in all plots
            plots = [
                {"name": metric_name(metric), "picture": _draw(metric, curves[metric], styles)} for metric in curves
            ]
            content.append({"dataset": dataset, "caption": caption, "plots": plots})
    return content


def best_lines(boards: Sequence[Board]) -> tuple[Curves, list[str]]:
    """By metric, method and budget the values of the method's best line, and the protocols used.

    That is the line with the best place, and of several that share it the one with the best mean.

    Only boards with the terms of the one with the most places count, and values by its protocols; without privacy a
    board has fewer terms. ε = 0, where no method uses records, is no point of a curve.
    """
    curves: Curves = {}
    placed = [board for board in boards if board.placed and board.epsilon != "0"]
    if not placed:
        return curves, []
    main = max(placed, key=lambda board: (len(board.terms), board.placed))
    for board in placed:
        if any(main.terms.get(key) != text for key, text in board.terms.items()):
            continue
        for metric, protocol in board.protocols.items():
            if metric == TIME or main.protocols.get(metric) != protocol:
                continue
            ranking = zip(board.lines, board.rankings[metric], strict=True)
            ranked = [(standing, line) for line, (standing, _) in ranking if standing.place is not None]
            for _, line in sorted(ranked, key=lambda pair: pair[0].order):
                budgets = curves.setdefault(metric, {}).setdefault(line.method, {})
                budgets.setdefault(float(board.epsilon), line.values[metric][protocol])
    return curves, list(dict.fromkeys(main.protocols[metric] for metric in curves))


def _draw(metric: str, methods: dict[str, dict[float, Values]], styles: Style) -> str:
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", STYLE]):
        figure = Figure(figsize=(ONE_COLUMN, 2.3 + 0.06 * len(methods)), layout="constrained")
        panel = figure.subplots()
        axis = XAxis((budget for budgets in methods.values() for budget in budgets), log=True)
        for method, budgets in sorted(methods.items()):
            points = [Point(budget, [fmean(repeats) for repeats in values]) for budget, values in budgets.items()]
            draw_points(panel, axis, points, styles[method], method_name(method))
        axis.apply(panel)
        panel.set(xlabel="ε (budget)", ylabel=y_label(metric_name(metric)))
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.set_ylim(0.0, 1.04 * panel.get_ylim()[1])  # an axis that does not start at 0 exaggerates differences
        handles: dict[str, Any] = {}
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)  # the first handle of a label is the one with a line
        draw_legend(figure, handles)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return data_uri(file.getvalue(), "image/svg+xml")

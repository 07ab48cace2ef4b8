"""The report's leaderboards: one for each data set and epsilon, ranked by each metric that the page offers.

The places and the comparison with the best line are those of `tables.ranking`, as in a table's leaderboard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpgen_bench.config.display import dataset_name, direction, metric_label, metric_name, relation_name
from dpgen_bench.privacy.events import budget_text
from dpgen_bench.report.lines import TIME, Line, line_content, lines_of, varying_settings
from dpgen_bench.report.runs import Run
from dpgen_bench.tables.ranking import Standing, standings

# Metrics by which the page ranks: FID, then the first two accuracies that the lines have, then the time.
DISTANCES = ("fid",)
ACCURACIES = ("acc_cnn_pct", "acc_mlp_pct", "acc_logreg_pct", "acc_avg_pct")
MOST_ACCURACIES = 2
START = ("mnist", "10")  # the board that the page opens with, if it has a ranked line
TERMS = {"relation": "", "delta": "δ = ", "accountant": "accountant ", "unit": "unit "}


@dataclass(frozen=True)
class Board:
    """The lines of one data set and one budget.

    Args:
        protocols: the metrics by which the lines are ranked, each with the protocol whose values are compared.
        terms: what all lines with a place share.
        rankings: for each metric the standing of each line and why it has no place; "" if it has one.
        upper_end, lower_end: lines of real images, and of methods without records (ε = 0).
    """

    dataset: str
    epsilon: str
    lines: tuple[Line, ...]
    protocols: dict[str, str]
    terms: dict[str, str]
    rankings: dict[str, list[tuple[Standing, str]]]
    upper_end: tuple[Line, ...]
    lower_end: tuple[Line, ...]

    @property
    def placed(self) -> int:
        """How many lines have a place by the first metric."""
        first = self.rankings[next(iter(self.protocols))] if self.protocols else []
        return sum(standing.place is not None for standing, _ in first)


def boards_of(runs: Sequence[Run]) -> list[Board]:
    """The boards of all runs, by data set and epsilon.

    Methods that use no records are the lower end of each board. They have one of their own only if a data set has
    nothing else.
    """
    groups: dict[tuple[str, str], list[Line]] = {}
    lines = lines_of(runs)
    for line in lines:
        groups.setdefault((line.dataset, line.first.budget), []).append(line)
    private = {dataset for dataset, budget in groups if budget != "0"}
    shown = [(dataset, budget) for dataset, budget in groups if budget != "0" or dataset not in private]
    ordered = sorted(shown, key=lambda group: (group[0], _budget(group[1])))
    return [_board(*group, groups[group], [line for line in lines if line.dataset == group[0]]) for group in ordered]


def _budget(text: str) -> tuple[bool, float]:
    return (True, 0.0) if text == budget_text(None) else (False, float(text))


def _board(dataset: str, epsilon: str, lines: Sequence[Line], of_dataset: Sequence[Line]) -> Board:
    possible = [line for line in lines if not line.why_no_line()] or lines
    terms = _main_terms(possible)
    comparable = [line for line in possible if line.terms == terms]
    protocols = {metric: _main_protocol(metric, comparable, of_dataset) for metric in _metrics(comparable)}
    rankings = {}
    for metric, protocol in protocols.items():
        reasons = [
            line.why_no_line() or _other_terms(line.terms, terms) or line.why_no_place(metric, protocol, terms["unit"])
            for line in lines
        ]
        values = [None if why else line.values[metric][protocol] for line, why in zip(lines, reasons, strict=True)]
        found = standings(values, lower=direction(metric) == "lower")
        rankings[metric] = list(zip(found, reasons, strict=True))
    upper = tuple(line for line in of_dataset if line.is_real and not line.first.stale)
    lower = tuple(line for line in of_dataset if line.first.budget == "0" != epsilon and not line.first.stale)
    return Board(dataset, epsilon, tuple(lines), protocols, terms, rankings, upper, lower)


def _main_terms(lines: Sequence[Line]) -> dict[str, str]:
    """The terms of most lines; among equals, those of most runs, then the first by name."""
    counts, runs = Counter(str(line.terms) for line in lines), Counter[str]()
    for line in lines:
        runs[str(line.terms)] += len(line.runs)
    return min((line.terms for line in lines), key=lambda terms: (-counts[str(terms)], -runs[str(terms)], str(terms)))


def _main_protocol(metric: str, lines: Sequence[Line], of_dataset: Sequence[Line]) -> str:
    """The protocol by which most lines of the board have the metric; among equals, most lines of the data set."""
    here, everywhere = (
        Counter(protocol for line in several for protocol in line.values.get(metric, ()))
        for several in (lines, of_dataset)
    )
    return min(here, key=lambda protocol: (-here[protocol], -everywhere[protocol], protocol))


def _metrics(lines: Sequence[Line]) -> list[str]:
    known = {name for line in lines for name in line.values}
    distances = [name for name in DISTANCES if name in known]
    accuracies = [name for name in ACCURACIES if name in known][:MOST_ACCURACIES]
    return [*distances, *accuracies, *([TIME] if TIME in known else [])]


def _other_terms(terms: dict[str, str], main: dict[str, str]) -> str:
    """In which terms a line differs from the board's; "" if in none."""
    keys = [key for key in TERMS if terms.get(key) != main.get(key)]
    return "; ".join(f"{_term(key, terms)}, not {_term(key, main).removeprefix(TERMS[key])}" for key in keys)


def _term(key: str, terms: dict[str, str]) -> str:
    text = terms.get(key, "none")
    return TERMS[key] + (" / ".join(map(relation_name, text.split(" / "))) if key == "relation" else text)


def boards_content(boards: Sequence[Board]) -> list[dict[str, Any]]:
    """The boards as JSON-able values. `start` marks the one that the page opens with."""
    lines = [line for board in boards for line in board.lines]
    settings = {id(line): text for line, text in zip(lines, varying_settings(lines), strict=True)}
    start = _start(boards)
    return [
        {
            "dataset": board.dataset,
            "name": dataset_name(board.dataset),
            "epsilon": board.epsilon,
            "start": board is start,
            "terms": ", ".join([*(_term(key, board.terms) for key in board.terms), *_protocols(board)]),
            "metrics": [
                {"key": key, "label": _label(key), "name": metric_name(key), "lower": direction(key) == "lower"}
                for key in board.protocols
            ],
            "lines": [line_content(line, settings[id(line)], board.protocols) for line in board.lines],
            "upper": [line_content(line, "", board.protocols) for line in board.upper_end],
            "lower": [line_content(line, "", board.protocols) for line in board.lower_end],
            "rankings": {metric: _ranking(board.rankings[metric]) for metric in board.protocols},
        }
        for board in boards
    ]


def _protocols(board: Board) -> list[str]:
    """`protocol quick`, or where metrics differ in it, `FID by protocol league_fidelity`."""
    by_protocol: dict[str, list[str]] = {}
    for metric, protocol in board.protocols.items():
        if protocol:
            by_protocol.setdefault(protocol, []).append(metric_label(metric))
    if len(by_protocol) == 1:
        return [f"protocol {protocol}" for protocol in by_protocol]
    return [f"{' and '.join(labels)} by protocol {protocol}" for protocol, labels in by_protocol.items()]


def _label(metric: str) -> str:
    return "Time" if metric == TIME else metric_label(metric)  # the cell has the unit


def _ranking(found: Sequence[tuple[Standing, str]]) -> dict[str, Any]:
    """The numbers of the lines in the order of their places, each with its place and comparison; then all others."""
    placed = [(number, standing) for number, (standing, _) in enumerate(found) if standing.place is not None]
    placed.sort(key=lambda pair: pair[1].order)
    return {
        "placed": [[number, standing.place_text, standing.comparison] for number, standing in placed],
        "others": [[number, why] for number, (standing, why) in enumerate(found) if standing.place is None],
    }


def _start(boards: Sequence[Board]) -> Board | None:
    """MNIST at an epsilon of 10 if it has a ranked line, or else the board with the most ranked lines."""
    named = [board for board in boards if (board.dataset, board.epsilon) == START and board.placed]
    most = sorted(boards, key=lambda board: (-board.placed, board.epsilon != START[1]))
    return next(iter(named or most), None)

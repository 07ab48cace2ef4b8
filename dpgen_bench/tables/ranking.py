"""Rank lines of runs by a metric, and compare each with the best: for the tables and for the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from dpgen_bench.config.display import metric_name
from dpgen_bench.outcomes.listing import epsilon_number
from dpgen_bench.outcomes.soundness import budget_problem, diagnostics_kept
from dpgen_bench.store.statistics import LEAST_SEEDS, Difference, difference, format_value, summarise

# A run that spends less than this share of its budget was trained with more noise than the budget requires.
SPENT = 0.98
NO_PLACE = "–"

Values = Sequence[Sequence[float]]  # of a metric: [seed][repeat]


@dataclass(frozen=True)
class Standing:
    """What the ranking says of one line.

    Args:
        place: its place by the mean over seeds. Lines that cannot be told from the best one share the first place with
            it, and lines with equal means share a place; the next line has the place after all of them. None: no place.
        to_best: its mean minus that of the best line; None for lines without a place, and for the best line itself.
        is_shared: whether other lines have the same place.
    """

    place: int | None
    to_best: Difference | None = None
    is_shared: bool = False

    @property
    def place_text(self) -> str:
        """`2`, `1=` for a place that lines share, and a dash for no place."""
        return NO_PLACE if self.place is None else f"{self.place}{'=' if self.is_shared else ''}"

    @property
    def order(self) -> tuple[float, float]:
        """Sorts lines by place, those of one place by their means, and lines without a place last."""
        distance = abs(self.to_best.mean) if self.to_best else 0.0
        return (math.inf, 0.0) if self.place is None else (self.place, distance)

    @property
    def comparison(self) -> str:
        """`+3.1 [−1.2, +7.4]`: the difference from the best line with its interval; `+3.1` with fewer seeds."""
        if self.place is None:
            return NO_PLACE
        if self.to_best is None:
            return "best"
        size, interval = abs(self.to_best.mean), self.to_best.ci95
        text = signed(self.to_best.mean, size)
        return text if interval is None else f"{text} [{signed(interval[0], size)}, {signed(interval[1], size)}]"


COMPARISON = (
    "Each line is compared with the best one of its data set and ε: the difference of the means over seeds, with a "
    "95% interval by Welch's t. Lines whose interval contains 0 cannot be told from the best one and share the first "
    "place (1=); the next line has the place after all of them. With fewer than "
    f"{LEAST_SEEDS} seeds on either side there is no interval, and the order of the means claims neither a tie nor a "
    "win. The intervals are not corrected for comparing several lines."
)


def signed(value: float, reference: float) -> str:
    """A difference with its sign, in the format of the reference: `+2.3`, `−0.1`, and `0` where nothing is left."""
    text = format_value(abs(value), reference)
    if not math.isfinite(value) or float(text.replace(",", "")) == 0.0:
        return "0" if math.isfinite(value) else text
    return ("+" if value > 0 else "−") + text


def standings(values: Sequence[Values | None], lower: bool) -> list[Standing]:
    """The standing of each line of one group, in the given order.

    Args:
        values: the metric of each line; None for a line without a place.
        lower: whether lower values are better.
    """
    means = [math.inf if line is None else (1 if lower else -1) * summarise(line).mean for line in values]
    ordered = sorted(means)
    best = next(
        (line for line, mean in zip(values, means, strict=True) if line is not None and mean == ordered[0]), None
    )
    if best is None:
        return [Standing(None) for _ in values]
    differences = [
        None if line is None or mean == ordered[0] else difference(line, best)
        for line, mean in zip(values, means, strict=True)
    ]
    is_first = [
        line is not None and (each is None or bool(each.is_tie)) for line, each in zip(values, differences, strict=True)
    ]
    behind = sorted(mean for mean, first in zip(means, is_first, strict=True) if not first)
    places = [
        None if line is None else 1 if first else 1 + sum(is_first) + behind.index(mean)
        for line, mean, first in zip(values, means, is_first, strict=True)
    ]
    return [
        Standing(None) if place is None else Standing(place, each, places.count(place) > 1)
        for place, each in zip(places, differences, strict=True)
    ]


def why_no_place(
    ledgers: Sequence[tuple[int, Mapping[str, Any], DictConfig]],
    values: Values,
    seeds: int,
    metric: str,
    unit: str,
) -> str:
    """Why a line has no place; "" if it has one.

    Args:
        ledgers: for each measured run its seed, the content of its ledger.json, and its config's `privacy` group.
        values: the metric of the runs that have it.
        seeds: how many runs the line should have.
        unit: the unit of privacy of the leaderboard.
    """
    reasons: dict[str, list[str]] = {}
    for seed, ledger, privacy in ledgers:
        if problem := _problem(ledger, privacy, unit):
            reasons.setdefault(problem, []).append(str(seed))
    if reasons:
        parts = (f"seed{'s' if len(of) > 1 else ''} {', '.join(of)}: {problem}" for problem, of in reasons.items())
        return "; ".join(parts)
    if len(ledgers) < seeds:
        return f"{len(ledgers)} of {seeds} seeds measured"
    name = metric_name(metric)
    if not values:
        return f"{name} was not measured"
    if len(values) < seeds:
        return f"{name} was measured for {len(values)} of {seeds} seeds"
    return "" if all(math.isfinite(value) for seed in values for value in seed) else f"{name} is no finite number"


def _problem(ledger: Mapping[str, Any], privacy: DictConfig, unit: str) -> str:
    """Why a run's ledger is not comparable with those of the other lines; "" if it is."""
    if why := budget_problem(ledger, privacy, unit):
        return why
    if privacy.epsilon is None:
        return "it has no budget, so it is not comparable with other lines"
    budget = float(privacy.epsilon)
    if math.isinf(budget):
        return ""
    if diagnostics_kept(ledger):
        return "it kept private diagnostics (unsafe)"
    proven = epsilon_number(ledger["epsilon"], "proven")
    short = proven is not None and proven < SPENT * budget
    return f"proven {proven:.4g} leaves a part of {budget:g} unspent" if short else ""

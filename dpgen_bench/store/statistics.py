"""Summaries of repeated values for one cell of a table: mean, spread over seeds, and spread over repeats.

The two spreads differ: seeds are trainings with other randomness, and repeats are evaluations of the same generator.
Sums are exact (`math.fsum`), so that summaries of the same values are the same on every machine.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import scipy.stats

LEAST_SEEDS = 3  # with fewer seeds, two generators are not compared: an interval over two seeds is hardly informative


@dataclass(frozen=True)
class Summary:
    """A value summarised over training seeds and, within each seed, over evaluation repeats.

    Args:
        mean: mean of the seeds' means.
        std_seeds: standard deviation (n - 1) of the seeds' means; None for one seed. It includes the spread of repeats
            that averaging over a seed's repeats leaves.
        std_repeats: standard deviation (n - 1) within a seed, pooled over seeds: square root of the mean variance
            weighted by degrees of freedom. None if no seed was measured more than once.
        ci95: 95% confidence interval of the mean by Student's t; None for a single value. It is over seeds if there
            are two or more, else over the repeats of one generator, and then does not cover the spread of training.
        ci_over: "seeds" or "repeats", which `ci95` is over; None without `ci95`.
        seeds: number of seeds.
        repeats: largest number of repeats of a seed.
    """

    mean: float
    std_seeds: float | None
    std_repeats: float | None
    ci95: tuple[float, float] | None
    ci_over: str | None
    seeds: int
    repeats: int

    def text(self) -> str:
        """`86.0 ± 1.8 (repeats ± 0.3)`: mean, spread over seeds, spread over repeats; a spread of None is omitted."""
        text = format_value(self.mean)
        if self.std_seeds is not None:
            text += f" ± {format_value(self.std_seeds, self.mean)}"
        if self.std_repeats is not None:
            text += f" (repeats ± {format_value(self.std_repeats, self.mean)})"
        return text


def format_value(value: float, reference: float | None = None) -> str:
    """A value as text: no decimals from 1,000, one decimal from 2, and three significant digits below, as for a KID.

    Args:
        reference: the value that determines the format; None is `value` itself. A spread takes the format of its mean.
    """
    size = abs(value if reference is None else reference)
    return f"{value:,.0f}" if round(size, 1) >= 1_000 else f"{value:.1f}" if size >= 2 else f"{value:.3g}"


def summarise(values: Sequence[Sequence[float]]) -> Summary:
    """The summary of values[seed][repeat]; seeds may have different numbers of repeats.

    Raises:
        ValueError: if there is no seed, or a seed without a value.
    """
    if not values or not all(len(repeats) for repeats in values):
        raise ValueError(f"expected one or more values for each of one or more seeds, got {values!r}.")
    means = [_mean(repeats) for repeats in values]
    freedom = [len(repeats) - 1 for repeats in values]
    variance = [_std(repeats) ** 2 if len(repeats) > 1 else 0.0 for repeats in values]
    within = math.fsum(map(operator.mul, freedom, variance)) / sum(freedom) if sum(freedom) else None
    over, ci95 = None, None
    if len(means) > 1:
        over, ci95 = "seeds", t_interval(means)
    elif freedom[0] > 0:
        over, ci95 = "repeats", t_interval(values[0])
    return Summary(
        mean=_mean(means),
        std_seeds=_std(means) if len(means) > 1 else None,
        std_repeats=None if within is None else math.sqrt(within),
        ci95=ci95,
        ci_over=over,
        seeds=len(means),
        repeats=max(len(repeats) for repeats in values),
    )


@dataclass(frozen=True)
class Difference:
    """The difference of two means over training seeds.

    Args:
        mean: the difference.
        ci95: its 95% confidence interval by Welch's t, which does not assume equal variances; None if one of the two
            has fewer than `LEAST_SEEDS` seeds, or a value that is not finite. It is for this difference alone: it is
            not corrected for comparing several generators.
    """

    mean: float
    ci95: tuple[float, float] | None

    @property
    def is_tie(self) -> bool | None:
        """Whether the interval contains 0, so that the two cannot be told apart; None without an interval."""
        return None if self.ci95 is None else self.ci95[0] <= 0.0 <= self.ci95[1]


def difference(values: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> Difference:
    """The mean of values[seed][repeat] minus that of the reference, each over its seeds' means.

    Repeats are averaged within their seed: they are drawn from one generator, and do not show the spread of training.
    """
    a, b = [_mean(repeats) for repeats in values], [_mean(repeats) for repeats in reference]
    mean = _mean(a) - _mean(b)
    if min(len(a), len(b)) < LEAST_SEEDS or not all(map(math.isfinite, [*a, *b])):
        return Difference(mean, None)
    if _std(a) == _std(b) == 0.0:  # such as numbers of parameters, for which Welch's t is 0/0
        return Difference(mean, (mean, mean))
    interval = scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    return Difference(mean, (float(interval.low), float(interval.high)))


def p_value(values: Sequence[Sequence[float]], reference: Sequence[Sequence[float]], threshold: float = 0.0) -> float:
    """The two-sided p-value of Welch's test that the `difference` is the threshold; `ci95` contains it if p ≥ 0.05.

    Raises:
        ValueError: if `difference` has no interval for the values.
    """
    found = difference(values, reference)
    if found.ci95 is None:
        raise ValueError(f"expected {LEAST_SEEDS} finite seeds or more of both, got {values!r} and {reference!r}.")
    a, b = [_mean(repeats) - threshold for repeats in values], [_mean(repeats) for repeats in reference]
    if _std(a) == _std(b) == 0.0:
        return 1.0 if found.mean == threshold else 0.0
    return float(scipy.stats.ttest_ind(a, b, equal_var=False).pvalue)


def holm(p_values: Sequence[float], level: float = 0.05) -> list[bool]:
    """Which of several hypotheses Holm's procedure rejects, so that it rejects a true one with probability ≤ `level`.

    The k-th smallest of m p-values is compared with level / (m - k + 1); after the first that is larger, none is
    rejected. (S. Holm: A simple sequentially rejective multiple test procedure. Scand. J. Statist. 6, 1979.)
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    rejected = [False] * len(p_values)
    for k, i in enumerate(order):
        if p_values[i] > level / (len(p_values) - k):
            break
        rejected[i] = True
    return rejected


def t_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Student's t confidence interval (lower, upper) of the mean of two or more independent values."""
    mean, error = _mean(values), _std(values) / math.sqrt(len(values))
    half_width = float(scipy.stats.t.ppf((1 + level) / 2, len(values) - 1)) * error
    return mean - half_width, mean + half_width


def _std(values: Sequence[float]) -> float:
    """Standard deviation (n - 1) of two or more values; NaN if one is not finite."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def _mean(values: Sequence[float]) -> float:
    """The mean; infinite or NaN if a value is."""
    return statistics.fmean(values) if all(map(math.isfinite, values)) else sum(values) / len(values)

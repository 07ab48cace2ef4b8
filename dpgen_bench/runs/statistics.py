"""Several figures for one cell of a table, put into one: means, and two spreads that must not be confused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.stats


@dataclass(frozen=True)
class Summary:
    """A figure over training seeds and, within each, over evaluation repeats.

    Args:
        mean: of the seeds' means.
        std_seeds: standard deviation (n - 1) of the seeds' means; None for one seed. It contains what is left of the
            repeats' spread after averaging.
        std_repeats: standard deviation (n - 1) within a seed, pooled over seeds: sqrt of the mean variance weighted by
            degrees of freedom; None where no seed was measured twice.
        ci95: 95% confidence interval of the mean by Student's t, over seeds if there are two or more, else over the
            repeats of the one generator (`ci_over` says which): the second says nothing of training again.
    """

    mean: float
    std_seeds: float | None
    std_repeats: float | None
    ci95: tuple[float, float] | None
    ci_over: str | None
    seeds: int
    repeats: int

    def text(self) -> str:
        """`86.0 ± 1.8 (repeats ± 0.3)`: spread over seeds, then over repeats; what is not known is left out."""
        words = format_value(self.mean)
        if self.std_seeds is not None:
            words += f" ± {format_value(self.std_seeds, self.mean)}"
        if self.std_repeats is not None:
            words += f" (repeats ± {format_value(self.std_repeats, self.mean)})"
        return words


def format_value(value: float, beside: float | None = None) -> str:
    """One decimal for figures of 2 and more (none from 10,000), three significant digits below, as of a KID or a share.

    Args:
        beside: the figure whose form to take, for a spread; None is the value's own.
    """
    size = abs(value if beside is None else beside)
    return f"{value:,.0f}" if size >= 10_000 else f"{value:.1f}" if size >= 2 else f"{value:.3g}"


def summarise(figures: Sequence[Sequence[float]]) -> Summary:
    """The summary of figures[seed][repeat]; seeds may have different numbers of repeats.

    Raises:
        ValueError: if there is no seed, or one without a figure.
    """
    if not figures or not all(len(repeats) for repeats in figures):
        raise ValueError(f"expected one figure or more for each of one or more seeds, got {figures!r}.")
    means = [float(np.mean(repeats)) for repeats in figures]
    freedom = [len(repeats) - 1 for repeats in figures]
    variance = [float(np.var(repeats, ddof=1)) if len(repeats) > 1 else 0.0 for repeats in figures]
    within = np.dot(freedom, variance) / sum(freedom) if sum(freedom) else None
    over, ci95 = None, None
    if len(means) > 1:
        over, ci95 = "seeds", t_interval(means)
    elif freedom[0] > 0:
        over, ci95 = "repeats", t_interval(figures[0])
    return Summary(
        mean=float(np.mean(means)),
        std_seeds=float(np.std(means, ddof=1)) if len(means) > 1 else None,
        std_repeats=None if within is None else math.sqrt(within),
        ci95=ci95,
        ci_over=over,
        seeds=len(means),
        repeats=max(len(repeats) for repeats in figures),
    )


def t_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Student's t confidence interval of the mean of two or more independent values."""
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    reach = float(scipy.stats.t.ppf((1 + level) / 2, len(values) - 1)) * error
    return mean - reach, mean + reach

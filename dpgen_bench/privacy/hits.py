"""Gaussian releases that hit a record a random number of times, in closed form: delta, epsilon and Rényi curve.

`dpgen_bench.privacy.accountants` proves that `OneShard` releases are what is accounted here: the numbers of hits are
known to the observer, independent of the data, and Binomial(times, 1 / shards) for each mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.special import erfcx, log_ndtr, logsumexp
from scipy.stats import binom

Shards = Sequence[tuple[int, float, int]]  # (K, noise multiplier, times) of each mechanism

TAIL = 1e-9  # probability of more hits than are looked at, as a part of delta; it is added to delta whole
MOST_ATOMS = 200_000
TOLERANCE = 1e-10


class TooManyHits(ValueError):
    """The joint law of the hits of several mechanisms has too many values to be listed."""


def log_delta_gaussian(epsilon: float, mu: np.ndarray) -> np.ndarray:
    """log delta(epsilon) of one Gaussian release of mean shift mu > 0 in units of its noise (1805.06530, Theorem 8).

    delta = Φ(mu/2 - epsilon/mu) - e^epsilon Φ(-mu/2 - epsilon/mu), as Φ(mu/2 - epsilon/mu) times one minus a ratio of
    scaled error functions: nothing overflows at an epsilon of 1e5, and no two large numbers are subtracted.
    """
    below, above = epsilon / mu - mu / 2.0, epsilon / mu + mu / 2.0
    with np.errstate(over="ignore", divide="ignore"):
        return log_ndtr(-below) + np.log1p(-erfcx(above / math.sqrt(2.0)) / erfcx(below / math.sqrt(2.0)))


def hits_law(shards: int, times: int, tail: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Binomial(times, 1 / shards): numbers of hits [n], their probabilities [n], and that of more hits than these.

    The last is at most `tail`. As improbably few hits are counted as the least that is listed, which is no less harm.
    """
    rate = 1.0 / shards

    def first(holds: Callable[[int], bool]) -> int:
        low, high = 0, times
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle + 1, high)
        return low

    most = first(lambda h: binom.sf(h, times, rate) <= tail)
    least = first(lambda h: binom.cdf(h, times, rate) > tail)
    hits = np.arange(least, most + 1)
    probabilities = binom.pmf(hits, times, rate)
    probabilities[0] = binom.cdf(least, times, rate)
    return hits, probabilities, float(binom.sf(most, times, rate))


def shift_law(gaussian: float, shards: Shards, tail: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Law of mu² = gaussian + sum of hits_j / multiplier_j²: values [n], probabilities [n], and what was left out.

    Raises:
        TooManyHits: for more than `MOST_ATOMS` values.
    """
    squares, probabilities, rest = np.array([gaussian]), np.ones(1), 0.0
    for number, multiplier, times in shards:
        hits, theirs, beyond = hits_law(number, times, tail / len(shards))
        if len(squares) * len(hits) > MOST_ATOMS:
            raise TooManyHits(f"the hits of {len(shards)} sharded mechanisms have over {MOST_ATOMS:,} likely numbers")
        squares = np.add.outer(squares, hits / multiplier**2).ravel()
        probabilities = np.multiply.outer(probabilities, theirs).ravel()
        rest += beyond
    return squares, probabilities, rest


def mixture_delta(epsilon: float, squares: np.ndarray, probabilities: np.ndarray, rest: float) -> float:
    """log of sum_h P(h) delta_Gauss(epsilon; mu_h) + rest, for the law [n] of mu² that `shift_law` gives."""
    felt = squares > 0.0
    logs = np.log(probabilities[felt]) + log_delta_gaussian(epsilon, np.sqrt(squares[felt]))
    return float(logsumexp([*logs, math.log(rest)] if rest > 0.0 else logs)) if felt.any() or rest > 0.0 else -math.inf


def mixture_epsilon(gaussian: float, shards: Shards, delta: float) -> float:
    """Smallest epsilon with delta(epsilon) <= delta, within a relative 3e-10 above it; 0.0 where delta covers all.

    Raises:
        TooManyHits: for several mechanisms with too many likely numbers of hits.
    """
    squares, probabilities, rest = shift_law(gaussian, shards, TAIL * delta)

    def excess(epsilon: float) -> float:
        return mixture_delta(epsilon, squares, probabilities, rest) - math.log(delta)

    if excess(0.0) <= 0.0:
        return 0.0
    # Here delta_Gauss <= Φ(-sqrt(2 log(1 / rest of delta))), which is less than half of it.
    mu = math.sqrt(float(squares.max()))
    high = mu * mu / 2.0 + mu * math.sqrt(2.0 * -math.log(delta - rest))
    root = float(brentq(excess, 0.0, high, xtol=TOLERANCE, rtol=TOLERANCE))
    return root + 2.0 * TOLERANCE * (1.0 + root)  # the upper end of what it may be wrong by


def shard_rdp(shards: int, multiplier: float, order: float) -> float:
    """RDP of one release at `order` > 1 with its index known: log(1 - 1/K + e^(a (a - 1) / (2 m²)) / K) / (a - 1)."""
    exponent = order * (order - 1.0) / (2.0 * multiplier**2)
    if exponent < 30.0:
        return math.log1p(math.expm1(exponent) / shards) / (order - 1.0)
    return float(np.logaddexp(math.log1p(-1.0 / shards), exponent - math.log(shards))) / (order - 1.0)

"""Gaussian releases that hit a record a random number of times, in closed form: delta, epsilon and Rényi curve.

`dpgen_bench.privacy.accountants.proven` proves what is accounted so: the numbers of hits are known to the observer and
independent of the data, and each mechanism's is Binomial(times, rate), or the lesser of that and a cap (`Hits`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import erfcx, log_ndtr, logsumexp
from scipy.stats import binom


class Hits(NamedTuple):
    """A mechanism that hits a record min(Binomial(times, rate), cap) times.

    rate: in (0, 1]. multiplier: noise std over how far a hit moves the release. cap: at most times, which is no cap.
    """

    rate: float
    multiplier: float
    times: int
    cap: int


# (K, multiplier, times) is one of `OneShard`: Hits(1 / K, multiplier, times, times).
Mechanisms = Sequence[Hits | tuple[int, float, int]]

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


def one_shard(shards: int, multiplier: float, times: int) -> Hits:
    """The hits of `OneShard`, schedule "random"."""
    return Hits(1.0 / shards, multiplier, times, times)


def hits_law(shards: int, times: int, tail: float) -> tuple[np.ndarray, np.ndarray, float]:
    """`capped_law` of `OneShard`: Binomial(times, 1 / shards)."""
    return capped_law(1.0 / shards, times, times, tail)


def capped_law(rate: float, times: int, cap: int, tail: float) -> tuple[np.ndarray, np.ndarray, float]:
    """min(Binomial(times, rate), cap): numbers of hits [n], their probabilities [n], and that of more hits than these.

    The last is at most `tail`. As improbably few hits are counted as the least that is listed, which is no less harm.
    """

    def first(holds: Callable[[int], bool]) -> int:
        low, high = 0, times
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle + 1, high)
        return low

    most = first(lambda h: binom.sf(h, times, rate) <= tail)
    least = first(lambda h: binom.cdf(h, times, rate) > tail)
    if cap <= least:  # as improbable as having fewer
        return np.array([cap]), np.ones(1), 0.0
    hits = np.arange(least, min(most, cap) + 1)
    probabilities = binom.pmf(hits, times, rate)
    probabilities[0] = binom.cdf(least, times, rate)
    if cap <= most:  # whoever is hit more often counts as hit `cap` times
        probabilities[-1] = binom.sf(cap - 1, times, rate)
        return hits, probabilities, 0.0
    return hits, probabilities, float(binom.sf(most, times, rate))


def shift_law(
    gaussian: float, mechanisms: Mechanisms, tail: float, most: int = MOST_ATOMS
) -> tuple[np.ndarray, np.ndarray, float]:
    """Law of mu² = gaussian + sum of hits_j / multiplier_j²: values [n], probabilities [n], and what was left out.

    Raises:
        TooManyHits: for more than `most` values.
    """
    squares, probabilities, rest = np.array([gaussian]), np.ones(1), 0.0
    for entry in mechanisms:
        rate, multiplier, times, cap = entry if isinstance(entry, Hits) else one_shard(*entry)
        hits, theirs, beyond = capped_law(rate, times, cap, tail / len(mechanisms))
        if len(squares) * len(hits) > most:
            raise TooManyHits(f"the hits of {len(mechanisms)} sharded mechanisms have over {most:,} likely numbers")
        squares = np.add.outer(squares, hits / multiplier**2).ravel()
        probabilities = np.multiply.outer(probabilities, theirs).ravel()
        rest += beyond
    return squares, probabilities, rest


def mixture_delta(epsilon: float, squares: np.ndarray, probabilities: np.ndarray, rest: float) -> float:
    """log of sum_h P(h) delta_Gauss(epsilon; mu_h) + rest, for the law [n] of mu² that `shift_law` gives."""
    felt = squares > 0.0
    logs = np.log(probabilities[felt]) + log_delta_gaussian(epsilon, np.sqrt(squares[felt]))
    return float(logsumexp([*logs, math.log(rest)] if rest > 0.0 else logs)) if felt.any() or rest > 0.0 else -math.inf


def mixture_epsilon(gaussian: float, mechanisms: Mechanisms, delta: float, most: int = MOST_ATOMS) -> float:
    """Smallest epsilon with delta(epsilon) <= delta, within a relative 3e-10 above it; 0.0 where delta covers all.

    Raises:
        TooManyHits: for more than `most` likely numbers of hits of all mechanisms together.
    """
    squares, probabilities, rest = shift_law(gaussian, mechanisms, TAIL * delta, most)

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
    """`hit_rdp` of `OneShard`."""
    return hit_rdp(1.0 / shards, multiplier, order)


def hit_rdp(rate: float, multiplier: float, order: float) -> float:
    """RDP of one release at `order` > 1 with its hit known: log(1 - q + q e^(a (a - 1) / (2 m²))) / (a - 1)."""
    exponent = order * (order - 1.0) / (2.0 * multiplier**2)
    if rate == 1.0:
        return exponent / (order - 1.0)
    if exponent < 30.0:
        return math.log1p(math.expm1(exponent) * rate) / (order - 1.0)
    return float(np.logaddexp(math.log1p(-rate), exponent + math.log(rate))) / (order - 1.0)


def hits_rdp(hits: Hits, order: float) -> float:
    """RDP of all releases together at `order` > 1, with the hits known: log E e^(h a (a - 1) / (2 m²)) / (a - 1).

    h is min(Binomial(times, rate), cap). Without a cap that is times * `hit_rdp`. A cap above `MOST_ATOMS` is not
    averaged over: there the figure is the lesser of those without a cap and of `cap` unsampled releases.
    """
    rate, multiplier, times, cap = hits
    without = times * hit_rdp(rate, multiplier, order)
    if cap >= times:
        return without
    exponent = order * (order - 1.0) / (2.0 * multiplier**2)
    if cap > MOST_ATOMS:
        return min(without, cap * exponent / (order - 1.0))
    logs = _log_probabilities(rate, times, cap)
    losses = np.arange(cap + 1) * exponent
    if losses[-1] < 30.0:  # the mean is near 1, and its logarithm would be lost in rounding
        return math.log1p(float(np.exp(logs) @ np.expm1(losses))) / (order - 1.0)
    return float(logsumexp(logs + losses)) / (order - 1.0)


@lru_cache(maxsize=16)  # one for each order otherwise
def _log_probabilities(rate: float, times: int, cap: int) -> np.ndarray:
    """log P(min(Binomial(times, rate), cap) = h) for h = 0..cap, float64 [cap + 1]; read-only."""
    logs = binom.logpmf(np.arange(cap + 1), times, rate)
    logs[-1] = binom.logsf(cap - 1, times, rate)
    logs.setflags(write=False)
    return logs

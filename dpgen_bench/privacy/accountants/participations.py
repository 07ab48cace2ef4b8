"""Gaussian releases in which a record takes part a random number of times: delta, epsilon and Renyi curve.

The number of participations is independent of data and known to the observer. For each mechanism it is
min(Binomial(times, rate), cap). docs/accounting.md proves that this bounds `OneShard`, `OneClient`, and Poisson and
fixed-size draws whose participation is published; docs/accountants.md describes the numerical evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import erfcx, log_ndtr, logsumexp


class Participations(NamedTuple):
    """A Gaussian mechanism in which a record takes part min(Binomial(times, rate), cap) times.

    Attributes:
        rate: probability in (0, 1] of taking part in one release.
        multiplier: noise std over the sensitivity of a release in which the record takes part.
        times: number of releases.
        cap: the largest number of participations; `times` if there is no limit.
    """

    rate: float
    multiplier: float
    times: int
    cap: int


# A triple (K, multiplier, times) stands for `OneShard`: Participations(1 / K, multiplier, times, times).
Mechanisms = Sequence[Participations | tuple[int, float, int]]

TAIL = 1e-9  # probability of the participations that are not enumerated, relative to delta; it is added to delta
MOST_ATOMS = 200_000
TOLERANCE = 1e-10


class TooManyParticipations(ValueError):
    """Raised if the joint law of the participations in several mechanisms has too many values to be enumerated."""


def log_delta_gaussian(epsilon: float, mu: np.ndarray) -> np.ndarray:
    """log delta(epsilon) of a Gaussian mechanism of sensitivity / noise std = mu > 0, exactly.

    With the standard normal distribution function Phi (Balle and Wang 2018, Theorem 8),

        delta = Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu).

    It is computed as Phi(mu/2 - epsilon/mu) times one minus a ratio of scaled error functions: nothing overflows at an
    epsilon of 1e5, and no two large numbers are subtracted.
    """
    below, above = epsilon / mu - mu / 2.0, epsilon / mu + mu / 2.0
    with np.errstate(over="ignore", divide="ignore"):
        return log_ndtr(-below) + np.log1p(-erfcx(above / math.sqrt(2.0)) / erfcx(below / math.sqrt(2.0)))


def one_shard(shards: int, multiplier: float, times: int) -> Participations:
    """The participations of a record in a `OneShard` mechanism, schedule "random"."""
    return Participations(1.0 / shards, multiplier, times, times)


def capped_law(rate: float, times: int, cap: int, tail: float) -> tuple[np.ndarray, np.ndarray, float]:
    """The law of min(Binomial(times, rate), cap), truncated.

    Returns:
        numbers of participations [n], their probabilities [n], and the probability of more participations than these,
        which is at most `tail`. Numbers below the first, also of probability at most `tail`, count as the first; that
        can only increase delta.
    """
    from scipy.stats import binom  # not at the top of the module: it takes half a second, and most runs need none

    def first(holds: Callable[[int], bool]) -> int:
        low, high = 0, times
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle + 1, high)
        return low

    most = first(lambda h: binom.sf(h, times, rate) <= tail)
    least = first(lambda h: binom.cdf(h, times, rate) > tail)
    if cap <= least:  # fewer than `cap` participations are improbable, and count as `cap`
        return np.array([cap]), np.ones(1), 0.0
    numbers = np.arange(least, min(most, cap) + 1)
    probabilities = binom.pmf(numbers, times, rate)
    probabilities[0] = binom.cdf(least, times, rate)
    if cap <= most:  # all numbers from `cap` on become `cap`
        probabilities[-1] = binom.sf(cap - 1, times, rate)
        return numbers, probabilities, 0.0
    return numbers, probabilities, float(binom.sf(most, times, rate))


def shift_law(
    gaussian: float, mechanisms: Mechanisms, tail: float, most: int = MOST_ATOMS
) -> tuple[np.ndarray, np.ndarray, float]:
    """Law of mu² = gaussian + sum over mechanisms j of participations_j / multiplier_j².

    Returns:
        values [n], their probabilities [n], and the probability that was left out, at most `tail`.

    Raises:
        TooManyParticipations: for more than `most` values.
    """
    squares, probabilities, rest = np.array([gaussian]), np.ones(1), 0.0
    for entry in mechanisms:
        rate, multiplier, times, cap = entry if isinstance(entry, Participations) else one_shard(*entry)
        numbers, own, beyond = capped_law(rate, times, cap, tail / len(mechanisms))
        if len(squares) * len(numbers) > most:
            raise TooManyParticipations(
                f"the participations in {len(mechanisms)} sharded mechanisms have over {most:,} likely numbers"
            )
        squares = np.add.outer(squares, numbers / multiplier**2).ravel()
        probabilities = np.multiply.outer(probabilities, own).ravel()
        rest += beyond
    return squares, probabilities, rest


def mixture_delta(epsilon: float, squares: np.ndarray, probabilities: np.ndarray, rest: float) -> float:
    """log of (sum_h P(h) delta_Gauss(epsilon; mu_h) + rest), for the law [n] of mu² that `shift_law` returns."""
    positive = squares > 0.0
    logs = np.log(probabilities[positive]) + log_delta_gaussian(epsilon, np.sqrt(squares[positive]))
    if rest > 0.0:
        return float(logsumexp([*logs, math.log(rest)]))
    return float(logsumexp(logs)) if positive.any() else -math.inf


def mixture_epsilon(gaussian: float, mechanisms: Mechanisms, delta: float, most: int = MOST_ATOMS) -> float:
    """The smallest epsilon with E delta_Gauss(epsilon; mu) <= delta, for the law of mu² of `shift_law`.

    It is never below the exact value, and above it by a relative 3e-10 at most; 0.0 if delta(0) <= delta.

    Raises:
        TooManyParticipations: for more than `most` likely combinations of numbers of participations.
    """
    squares, probabilities, rest = shift_law(gaussian, mechanisms, TAIL * delta, most)

    def excess(epsilon: float) -> float:
        return mixture_delta(epsilon, squares, probabilities, rest) - math.log(delta)

    if excess(0.0) <= 0.0:
        return 0.0
    # At `high`, with d = delta - rest, delta_Gauss <= Phi(-sqrt(2 log(1 / d))) <= d / 2, so the root is below.
    mu = math.sqrt(float(squares.max()))
    high = mu * mu / 2.0 + mu * math.sqrt(2.0 * -math.log(delta - rest))
    root = float(brentq(excess, 0.0, high, xtol=TOLERANCE, rtol=TOLERANCE))
    return root + 2.0 * TOLERANCE * (1.0 + root)  # the upper end of the root's error


def shard_rdp(shards: int, multiplier: float, order: float) -> float:
    """`participation_rdp` of `OneShard`."""
    return participation_rdp(1.0 / shards, multiplier, order)


def participation_rdp(rate: float, multiplier: float, order: float) -> float:
    """RDP at `order` a > 1 of one release in which the record takes part with probability q = rate, which is published.

    log(1 - q + q e^(a (a - 1) / (2 m²))) / (a - 1); see docs/accounting.md, "One shard in each release".
    """
    exponent = order * (order - 1.0) / (2.0 * multiplier**2)
    if rate == 1.0:
        return exponent / (order - 1.0)
    if exponent < 30.0:
        return math.log1p(math.expm1(exponent) * rate) / (order - 1.0)
    return float(np.logaddexp(math.log1p(-rate), exponent + math.log(rate))) / (order - 1.0)


def participations_rdp(participations: Participations, order: float) -> float:
    """RDP at `order` a > 1 of all releases of a mechanism, with published participation.

    log E e^(h a (a - 1) / (2 m²)) / (a - 1) for h = min(Binomial(times, rate), cap) participations; see
    docs/accounting.md, "One client in each round". Without a cap this is times * `participation_rdp`. The mean is not
    computed for a cap above `MOST_ATOMS`; then the result is the smaller of the bounds without a cap and for `cap`
    unsampled releases.
    """
    rate, multiplier, times, cap = participations
    without = times * participation_rdp(rate, multiplier, order)
    if cap >= times:
        return without
    exponent = order * (order - 1.0) / (2.0 * multiplier**2)
    if cap > MOST_ATOMS:
        return min(without, cap * exponent / (order - 1.0))
    logs = _log_probabilities(rate, times, cap)
    losses = np.arange(cap + 1) * exponent
    if losses[-1] < 30.0:  # the mean is near 1, and its logarithm would be rounded to 0
        return math.log1p(float(np.exp(logs) @ np.expm1(losses))) / (order - 1.0)
    return float(logsumexp(logs + losses)) / (order - 1.0)


@lru_cache(maxsize=16)  # `participations_rdp` is called for each order
def _log_probabilities(rate: float, times: int, cap: int) -> np.ndarray:
    """log P(min(Binomial(times, rate), cap) = h) for h = 0..cap, float64 [cap + 1]; read-only."""
    from scipy.stats import binom

    logs = binom.logpmf(np.arange(cap + 1), times, rate)
    logs[-1] = binom.logsf(cap - 1, times, rate)
    logs.setflags(write=False)
    return logs

"""Epsilon of Poisson-sampled and unsampled Gaussian releases by dp-accounting, which rounds privacy losses on a grid.

Rounding on a grid of width h adds a variance of up to h²/4 per release; epsilon itself tells which variance mu² it
joins (that of the Gaussian with the same epsilon), and up to 0.1% of it is allowed. DPGAN at epsilon 1 shows why:
0.9134 at 1e-4, 0.9091 at 2e-5. A finer grid can also be worse: the library clips negative probabilities, which arise
from cancellation and grow like 1/h², at zero (replace-one at T = 450,000: 17.34 at 1e-4, 17.41 at 1e-5). Both errors
only ever raise epsilon, so the smallest counts.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from dpgen_bench.privacy.accountants.composition import Composition, NotCovered
from dpgen_bench.privacy.events import Relation

INTERVALS = (1e-3, 1e-4, 2e-5, 4e-6)
MOST_POINTS = 5e7  # some 5 GB, and most of a minute


def finest_epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    """The best figure of `INTERVALS`, refined until the grid stops to matter.

    Raises:
        NotCovered: dp-accounting gives up on the coarsest.
    """
    from dp_accounting import get_sigma_gaussian

    releases = sum(times for *_, times in composition.poisson)
    best = math.inf
    for interval in INTERVALS:
        try:
            epsilon = grid_epsilon(composition, delta, relation, interval)
        except NotCovered:
            if math.isinf(best):
                raise
            break
        if epsilon >= best or epsilon <= 0.0:
            return min(epsilon, best)
        best = epsilon
        variance = float(get_sigma_gaussian(epsilon, delta)) ** -2
        if releases * interval**2 / 4.0 <= 1e-3 * variance:
            break
    return best


@lru_cache(maxsize=4096)
def grid_epsilon(composition: Composition, delta: float, relation: Relation, interval: float) -> float:
    """Epsilon on a grid of width `interval`.

    Raises:
        NotCovered: dp-accounting gives up, or even the coarsest grid would have over `MOST_POINTS` points.
    """
    from dp_accounting.pld import privacy_loss_distribution

    points = _largest_loss(composition) / INTERVALS[0]
    if points > MOST_POINTS:
        raise NotCovered(f"pld (dp-accounting): even its grid of width {INTERVALS[0]:g} has some {points:.0e} points")
    total = None
    try:
        for rate, multiplier, times in composition.poisson:
            part = _sampled_pld(rate, multiplier, relation, interval).self_compose(times)
            total = part if total is None else total.compose(part)
        if composition.gaussian:
            # mu already is in terms of the relation's own sensitivity, and a Gaussian pair is the same in both
            # directions: add/remove of sensitivity 1 states it exactly under either relation.
            gaussian = privacy_loss_distribution.from_gaussian_mechanism(
                composition.gaussian**-0.5, value_discretization_interval=interval
            )
            total = gaussian if total is None else gaussian.compose(total)
    except (ValueError, MemoryError) as error:
        raise NotCovered(f"pld (dp-accounting): it gave up with: {error}") from error
    assert total is not None
    return float(total.get_epsilon_for_delta(delta))


def _largest_loss(composition: Composition) -> float:
    """Roughly the largest loss that a grid must hold: the mean and six standard deviations, of add/remove."""
    mean, variance = composition.gaussian / 2.0, composition.gaussian
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    for rate, multiplier, times in composition.poisson:
        values = np.add.outer([0.0, 1.0], multiplier * nodes)  # of a release without the record, and with it
        chances = np.multiply.outer([1.0 - rate, rate], weights / weights.sum())
        losses = np.logaddexp(math.log1p(-rate), math.log(rate) + (values - 0.5) / multiplier**2)
        first = float((chances * losses).sum())
        mean += times * first
        variance += times * float((chances * (losses - first) ** 2).sum())
    return mean + 6.0 * math.sqrt(variance)


@lru_cache(maxsize=8)  # a few million floats each; calibration of `times` asks for the same one again and again
def _sampled_pld(rate: float, multiplier: float, relation: Relation, interval: float) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    # Under REPLACE_ONE dp-accounting 0.6 takes the pair P*, Q* of `accountants`, doubling the distance itself: it must
    # be given std / add_remove, not std / replace_one.
    names = {"add_remove": "ADD_OR_REMOVE_ONE", "replace_one": "REPLACE_ONE"}
    return privacy_loss_distribution.from_gaussian_mechanism(
        multiplier,
        value_discretization_interval=interval,
        sampling_prob=rate,
        neighboring_relation=NeighboringRelation[names[relation]],
    )

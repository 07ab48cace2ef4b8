"""Epsilon of Poisson-sampled and unsampled Gaussian releases by dp-accounting, which rounds privacy losses on a grid.

Every grid gives an upper bound. A grid of width w adds a variance of up to w²/4 per release: DPGAN at epsilon 1 has
0.9134 at w = 1e-4 and 0.9091 at 2e-5. A finer grid can also be worse, because the library sets negative probabilities,
which come from cancellation and grow like 1/w², to zero: under replace-one, T = 450,000 releases have 17.34 at 1e-4 and
17.41 at 1e-5. Therefore several widths are tried, and the smallest epsilon counts.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from dpgen_bench.privacy.accountants.composition import Composition, NotCovered
from dpgen_bench.privacy.events import Relation

INTERVALS = (1e-3, 1e-4, 2e-5, 4e-6)
MOST_POINTS = 5e7  # about 5 GB, and most of a minute


def finest_epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    """The smallest epsilon over `INTERVALS`, which are refined until rounding is negligible or epsilon grows again.

    Rounding is negligible if it adds at most 0.1% to the variance mu² of the Gaussian mechanism with the same epsilon.

    Raises:
        NotCovered: if dp-accounting gives up on the coarsest grid.
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
        NotCovered: if dp-accounting gives up, or even the coarsest grid would have over `MOST_POINTS` points.
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
            # mu is already that of the relation, and a Gaussian pair is the same in both directions, so the default
            # relation of dp-accounting (add/remove, sensitivity 1) is exact under either relation.
            gaussian = privacy_loss_distribution.from_gaussian_mechanism(
                composition.gaussian**-0.5, value_discretization_interval=interval
            )
            total = gaussian if total is None else gaussian.compose(total)
    except (ValueError, MemoryError) as error:
        raise NotCovered(f"pld (dp-accounting): it gave up with: {error}") from error
    assert total is not None
    return float(total.get_epsilon_for_delta(delta))


def _largest_loss(composition: Composition) -> float:
    """An estimate of the largest loss that a grid must hold: mean plus six standard deviations, under add/remove."""
    mean, variance = composition.gaussian / 2.0, composition.gaussian
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    for rate, multiplier, times in composition.poisson:
        values = np.add.outer([0.0, 1.0], multiplier * nodes)  # without the record, and with it
        chances = np.multiply.outer([1.0 - rate, rate], weights / weights.sum())
        losses = np.logaddexp(math.log1p(-rate), math.log(rate) + (values - 0.5) / multiplier**2)
        first = float((chances * losses).sum())
        mean += times * first
        variance += times * float((chances * (losses - first) ** 2).sum())
    return mean + 6.0 * math.sqrt(variance)


@lru_cache(maxsize=8)  # a few million floats each; `calibrate_times` needs the same one many times
def _sampled_pld(rate: float, multiplier: float, relation: Relation, interval: float) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    # Under REPLACE_ONE dp-accounting 0.6 composes the pair of docs/accounting.md, "Poisson draws under replace-one",
    # whose means are 2 s apart: it doubles the distance itself, so it needs std / add_remove and not std / replace_one.
    names = {"add_remove": "ADD_OR_REMOVE_ONE", "replace_one": "REPLACE_ONE"}
    return privacy_loss_distribution.from_gaussian_mechanism(
        multiplier,
        value_discretization_interval=interval,
        sampling_prob=rate,
        neighboring_relation=NeighboringRelation[names[relation]],
    )

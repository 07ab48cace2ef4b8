"""A test for many releases with hidden participation: how often does the projection of a release exceed a limit?

Its count has an exact binomial law in both worlds, so a trial is one random number for any number of releases,
and the rates of error can be computed as well as counted. Where few large movements are hidden among many releases, as
in GS-WGAN, this test loses little, and a billion trials take a minute.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import binom, norm

from dpgen_bench.audit.bounds import epsilon_from_counts
from dpgen_bench.audit.distinguisher import CONFIDENCE, Attacked, Certificate
from dpgen_bench.audit.laws import NotAudited, certain_participations
from dpgen_bench.privacy.events import Event, Relation

MOST_ALTERNATIVE = 1_000_000  # trials in the second world, whose rate of rejection is not small
_BATCH = 10_000_000


def exceedances(attacked: Attacked, above: float) -> tuple[float, float]:
    """The probabilities in both worlds that the projection of one release exceeds `above` noise std.

    Raises:
        NotAudited: if participation is not hidden and independent between releases.
    """
    event, movement = attacked.event, attacked.movement
    if event.std == 0.0 or certain_participations(event) is not None:
        raise NotAudited(
            f"{attacked.name}: expected noise and a hidden participation for a test of counts, got {event.sampling} "
            f"with noise std {event.std:g}; leave out `above`."
        )
    rate = event.sampling.rate
    none, first, second = (float(norm.sf(above - at / event.std)) for at in (0.0, movement.first, movement.second))
    return (1.0 - rate) * none + rate * first, (1.0 - rate) * none + rate * second


def exact_epsilon(event: Event, rates: tuple[float, float], delta: float) -> float:
    """The epsilon that the best test of this count shows, by its exact rates of error: no trial and no confidence."""
    counts = np.arange(event.times + 1 if event.times < 5000 else 5000)
    log_true = binom.logsf(counts - 1, event.times, rates[1])
    log_false = binom.logsf(counts - 1, event.times, rates[0])
    useful = (log_true > math.log(delta)) & np.isfinite(log_false)
    if not useful.any():
        return 0.0
    gains = log_true[useful] + np.log1p(-delta / np.exp(log_true[useful])) - log_false[useful]
    return max(0.0, float(gains.max()))


def certify_count(
    attacked: Attacked, above: float, delta: float, relation: Relation, *, trials: int, seed: int = 0
) -> Certificate:
    """As `distinguisher.certify`, for one mechanism and the test of this count.

    The threshold is fixed by the exact law, for the number of trials, before any trial is drawn.
    """
    times, rates = attacked.event.times, exceedances(attacked, above)
    alternatives = min(trials, MOST_ALTERNATIVE)
    counts = np.arange(1, min(times, 2000) + 1)
    false = np.ceil(trials * binom.sf(counts - 1, times, rates[0]))
    true = np.floor(alternatives * binom.sf(counts - 1, times, rates[1]))
    expected = epsilon_from_counts(false, trials, true, alternatives, delta, CONFIDENCE)
    least = int(counts[int(expected.argmax())])
    first, second = (np.random.default_rng(each) for each in np.random.SeedSequence(seed).spawn(2))
    rejected_false, rejected_true = (
        sum(
            int((rng.binomial(times, rate, size=min(_BATCH, number - start)) >= least).sum())
            for start in range(0, number, _BATCH)
        )
        for rng, rate, number in ((first, rates[0], trials), (second, rates[1], alternatives))
    )
    epsilon = epsilon_from_counts(
        np.array(rejected_false), trials, np.array(rejected_true), alternatives, delta, CONFIDENCE
    )
    return Certificate(
        float(epsilon),
        None,
        delta,
        relation,
        CONFIDENCE,
        trials,
        float(least) - 0.5,
        True,
        rejected_false,
        rejected_true,
        seed,
        (attacked.describe(),),
        f"number of releases beyond {above:g} noise std",
        alternatives,
        exact_epsilon(attacked.event, rates, delta),
    )

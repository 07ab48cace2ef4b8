"""Lower bounds on epsilon from the errors of an attack."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpgen_bench.audit.bounds import (
    epsilon_from_counts,
    gaussian_epsilon,
    gaussian_mu_below,
    rate_above,
    rate_below,
)


@pytest.mark.parametrize(
    ("false", "null_trials", "true", "trials", "delta", "expected"),
    [
        (3, 1000, 870, 1000, 1e-5, 4.57421231578252),
        (0, 100_000, 99_800, 100_000, 1e-5, 10.20531162511073),
        (175, 100_000, 408, 100_000, 1e-5, 0.5965169947467039),
        (20, 5000, 20, 5000, 0.0, 0.0),
    ],
)
def test_the_bound_is_that_of_jax_privacy(false, null_trials, true, trials, delta, expected):
    """jax_privacy 2.0.0, CanaryScoreAuditor.epsilon_clopper_pearson(0.05, delta, threshold_strategy=Explicit(0.5))."""
    value = epsilon_from_counts(np.array(false), null_trials, np.array(true), trials, delta, 0.95)
    assert float(value) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("hits", "trials"), [(0, 10), (3, 10), (10, 10), (175, 100_000)])
def test_bounds_on_rates_are_those_of_the_exact_binomial_test(hits, trials):
    low = stats.binomtest(hits, trials).proportion_ci(0.9, "exact").low
    high = stats.binomtest(hits, trials).proportion_ci(0.9, "exact").high
    assert float(rate_below(np.array(hits), trials, 0.05)) == pytest.approx(low, rel=1e-8)
    assert float(rate_above(np.array(hits), trials, 0.05)) == pytest.approx(high, rel=1e-8)


def test_an_attack_without_hits_or_without_advantage_certifies_nothing():
    assert float(epsilon_from_counts(np.array(0), 100, np.array(0), 100, 1e-5, 0.95)) == 0.0
    assert float(epsilon_from_counts(np.array(50), 100, np.array(50), 100, 1e-5, 0.95)) == 0.0
    assert float(epsilon_from_counts(np.array(100), 100, np.array(100), 100, 1e-5, 0.95)) == 0.0


@pytest.mark.parametrize(("sigma", "epsilon"), [(3.7306, 1.0), (1.0812, 4.0), (0.4999, 10.0)])
def test_epsilon_of_a_gaussian_mechanism(sigma, epsilon):
    assert gaussian_epsilon(1.0 / sigma, 1e-5) == pytest.approx(epsilon, rel=2e-4)


def test_epsilon_of_no_movement_and_of_no_noise():
    assert gaussian_epsilon(0.0, 1e-5) == 0.0
    assert gaussian_epsilon(math.inf, 1e-5) == math.inf


def test_the_bound_on_the_distance_of_means_is_exceeded_as_often_as_the_confidence_allows():
    rng = np.random.default_rng(3)
    bounds = [gaussian_mu_below(rng.normal(size=50), rng.normal(0.5, size=80), 0.9) for _ in range(2000)]
    wrong = sum(bound > 0.5 for bound in bounds)
    assert stats.binomtest(wrong, 2000, 0.1).pvalue > 1e-6

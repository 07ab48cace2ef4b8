"""Lower bounds on epsilon from the errors of an attack that tells two neighbouring data sets apart.

A test rejects "the first data set" for some released values. If the mechanism is (epsilon, delta)-DP, its rates obey

    TPR <= exp(epsilon) FPR + delta,    hence    epsilon >= log((TPR - delta) / FPR),

where TPR and FPR are the probabilities of a rejection under the second and the first data set. The rates are unknown,
so the bounds of Clopper and Pearson (1934) take their place, each at half of the allowed error.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import beta, norm


def rate_above(hits: np.ndarray, trials: int, error: float) -> np.ndarray:
    """Clopper-Pearson upper confidence bound on a rate, which is wrong with probability at most `error`."""
    hits = np.asarray(hits)
    return np.where(hits >= trials, 1.0, beta.isf(error, hits + 1.0, np.maximum(trials - hits, 0.5)))


def rate_below(hits: np.ndarray, trials: int, error: float) -> np.ndarray:
    """Clopper-Pearson lower confidence bound on a rate, which is wrong with probability at most `error`."""
    hits = np.asarray(hits)
    return np.where(hits <= 0, 0.0, beta.ppf(error, np.maximum(hits, 0.5), trials - hits + 1.0))


def epsilon_from_counts(
    false: np.ndarray, null_trials: int, true: np.ndarray, alternative_trials: int, delta: float, confidence: float
) -> np.ndarray:
    """The model-free lower bound on epsilon, 0.0 if the attack shows nothing.

    It exceeds the true epsilon with probability at most 1 - `confidence`, for a test that was fixed before these
    trials.

    Args:
        false: numbers of rejections in `null_trials` trials with the first data set.
        true: numbers of rejections in `alternative_trials` trials with the second data set.
    """
    error = (1.0 - confidence) / 2.0
    true_rate = rate_below(true, alternative_trials, error) - delta
    false_rate = rate_above(false, null_trials, error)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(true_rate > false_rate, np.log(true_rate / false_rate), 0.0)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The exact epsilon of a Gaussian mechanism whose sensitivity is mu >= 0 times its noise std."""
    from dp_accounting import get_epsilon_gaussian

    if mu <= 0.0:
        return 0.0
    return math.inf if math.isinf(mu) else float(get_epsilon_gaussian(1.0 / mu, delta))


def gaussian_mu_below(first: np.ndarray, second: np.ndarray, confidence: float) -> float:
    """Lower confidence bound on the distance of the means of two samples of Gaussians of standard deviation 1.

    This is the figure of Gaussian DP: it assumes that both samples are Gaussian with variance 1, which trials of a
    Gaussian mechanism on all records are by construction.
    """
    error = norm.ppf(confidence) * math.sqrt(1.0 / len(first) + 1.0 / len(second))
    return max(0.0, float(np.mean(second) - np.mean(first) - error))

"""Level b of an audit: whether the noise of releases is what the ledger states, by statistical tests.

The noise of a release is the released value minus the exact one. It should be N(0, std²) and independent between the
numbers of a release, releases, data sets and runs. Every test rejects noise that is as stated with a probability of at
most `FALSE_ALARM`, by a correction for the number of tests of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from scipy import stats

FALSE_ALARM = 1e-6
DRAWS = 100_000  # of each mechanism that are tested, where it releases as many numbers
_MOST_PAIRS = 100  # of releases whose correlation is tested

Run = Sequence[np.ndarray]  # the noise of each release of a run, [p]


def noise_faults(runs: Sequence[Run], std: float) -> list[str]:
    """What is wrong with the noise of a mechanism, in one sentence for each fault; [] if nothing was found.

    Args:
        runs: the noise of independent runs, with the same number of releases each.
        std: the standard deviation that is stated.
    """
    releases = [np.asarray(noise, dtype=np.float64).ravel() for run in runs for noise in run]
    if std == 0.0 or not releases:
        return []
    return [*_scale(releases, std), *_normality(releases, std), *_coordinates(releases), *_between(runs)]


def _scale(releases: Sequence[np.ndarray], std: float) -> Iterator[str]:
    """Chi-square tests of the sum of squares, of all noise and of every tenth of the numbers of a release."""
    parts = {"": np.concatenate(releases)}
    if all(len(noise) >= 20 for noise in releases):
        for part in range(10):
            chosen = [np.array_split(noise, 10)[part] for noise in releases]
            parts[f" in part {part + 1} of 10 of the numbers"] = np.concatenate(chosen)
    for where, noise in parts.items():
        total, count = float(np.square(noise / std).sum()), len(noise)
        p = 2.0 * min(stats.chi2.cdf(total, count), stats.chi2.sf(total, count))
        if p < FALSE_ALARM / len(parts):
            yield (
                f"the noise has {math.sqrt(total / count):.4f} of the stated standard deviation{where} ({count:,} "
                f"draws, p = {p:.1e})"
            )
            return


def _normality(releases: Sequence[np.ndarray], std: float) -> Iterator[str]:
    """Kolmogorov and Smirnov's test for N(0, std²), of the largest number of draws that is tested."""
    noise = np.concatenate(releases)[:DRAWS]
    p = float(stats.kstest(noise / std, "norm").pvalue)
    if p < FALSE_ALARM:
        yield f"the noise is not normal with the stated standard deviation ({len(noise):,} draws, p = {p:.1e})"


def _coordinates(releases: Sequence[np.ndarray]) -> Iterator[str]:
    """The correlation of neighbouring numbers of a release, of all releases together."""
    first = np.concatenate([noise[:-1] for noise in releases])
    second = np.concatenate([noise[1:] for noise in releases])
    if (found := _correlated(first, second, FALSE_ALARM)) is not None:
        yield f"neighbouring numbers of a release have correlated noise ({found})"


def _between(runs: Sequence[Run]) -> Iterator[str]:
    """The correlation of releases of one run, and of the same release of two runs."""
    across = [pair for one, other in combinations(runs, 2) for pair in zip(one, other, strict=True)]
    kinds = {
        "two releases of a run": [pair for run in runs for pair in combinations(run, 2)],
        "the same release of two runs": across,
    }
    for what, pairs in kinds.items():
        tested = [(a, b) for a, b in pairs if np.shape(a) == np.shape(b)][:_MOST_PAIRS]
        for one, other in tested:
            found = _correlated(np.ravel(one), np.ravel(other), FALSE_ALARM / len(tested))
            if found is not None:
                yield f"{what} have correlated noise ({found}); the same noise must never be added to two queries"
                break


def _correlated(one: np.ndarray, other: np.ndarray, error: float) -> str | None:
    """The correlation of two samples in words, if it cannot be chance; None otherwise.

    Correlations of independent normal samples are tested exactly (Pearson). Equal samples of any length are found.
    """
    if len(one) < 3:
        return "equal noise" if len(one) and np.array_equal(one, other) and bool(np.any(one)) else None
    if not (np.std(one) > 0.0 and np.std(other) > 0.0):
        return None  # no noise at all, which the test of the scale finds
    result = stats.pearsonr(one, other)
    return f"correlation {result.statistic:.3f}, p = {result.pvalue:.1e}" if result.pvalue < error else None

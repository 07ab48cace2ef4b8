"""Bounds of audits equal those of jax_privacy 2.0.0 (`jax_privacy.auditing`), which computed the golden values.

`CanaryScoreAuditor.epsilon_clopper_pearson(significance, delta, threshold_strategy=Explicit(0.5))` is the model-free
figure of a test whose threshold is fixed, and `epsilon_one_run` (here for one number of guesses) that of one run. The
package itself is no dependency, because it needs JAX.
"""

from __future__ import annotations

import pytest

from dpgen_bench.audit.bounds import epsilon_from_counts
from dpgen_bench.audit.canaries import one_run_epsilon


@pytest.mark.parametrize(
    ("true", "false", "delta", "confidence", "expected"),
    [
        ((900, 1_000), (3, 1_000), 1e-5, 0.95, 4.611441631226572),
        ((99_990, 100_000), (0, 100_000), 1e-5, 0.95, 10.207427253701956),
        ((600, 1_000), (400, 1_000), 1e-5, 0.90, 0.29745049653343814),
        ((50, 1_000), (45, 1_000), 1e-5, 0.95, 0.0),
        ((20_000, 50_000), (10, 80_000), 1e-6, 0.99, 7.296060979053475),
    ],
)
def test_the_model_free_bound(
    true: tuple[int, int], false: tuple[int, int], delta: float, confidence: float, expected: float
) -> None:
    found = epsilon_from_counts(false[0], false[1], true[0], true[1], delta, confidence)  # type: ignore[arg-type]
    assert float(found) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "confidence", "expected"),
    [
        (1_000, 1_000, 1_000, 1e-5, 0.95, 5.78228),
        (1_000, 1_000, 700, 1e-5, 0.95, 0.73174),
        (1_000, 300, 250, 1e-5, 0.95, 1.347),
        (1_000, 1_000, 560, 0.0, 0.95, 0.1345),
        (10_000, 10_000, 9_800, 1e-5, 0.99, 3.71727),
        (100, 100, 52, 1e-5, 0.95, 0.0),
    ],
)
def test_the_bound_of_one_run(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float, expected: float
) -> None:
    assert one_run_epsilon(canaries, guesses, correct, delta, confidence) == pytest.approx(expected, abs=2e-4)

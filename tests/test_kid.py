"""Tests of the kernel distance against cases by hand, the U-statistic and torch-fidelity; and of the metric."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_fidelity.metric_kid import kid_features_to_metric

from dpgen_bench.data.datasets import Digits
from dpgen_bench.data.records import Records
from dpgen_bench.evaluate import features
from dpgen_bench.evaluate.features import InceptionFeatures
from dpgen_bench.evaluate.kid import Kid, kid, mmd_squared
from dpgen_bench.evaluate.metric import EvalContext, NotMeasured, evaluate


def inception_like(n: int, d: int, seed: int, scale: float = 1.0) -> np.ndarray:
    """Positive, skewed features float32 [n, d], about as large as Inception's."""
    return (np.random.default_rng(seed).gamma(0.5, 0.6, (n, d)) * scale).astype(np.float32)


def by_torch_fidelity(
    generated: np.ndarray, real: np.ndarray, subsets: int, size: int, seed: int
) -> tuple[float, float]:
    result = kid_features_to_metric(
        torch.from_numpy(generated),
        torch.from_numpy(real),
        kid_subsets=subsets,
        kid_subset_size=size,
        rng_seed=seed,
        verbose=False,
    )
    return result["kernel_inception_distance_mean"], result["kernel_inception_distance_std"]


# The estimator


def test_closed_form_by_hand():
    """d = 1: k(0,1) = 1, k(2,3) = 7³; across 1, 1, 3³, 4³. Twice the pair's kernel over 2·1, so 1 + 343 - 2·93/4."""
    x, y = np.array([[0.0], [1.0]]), np.array([[2.0], [3.0]])
    assert mmd_squared(x, y) == 1 + 343 - 93 / 2 == 297.5
    assert kid(x, y, 1, 2, seed=0) == (297.5, 0.0)


def test_the_kernel_divides_by_the_width():
    """d = 4, x·x' = 4 and y·y' = 8, orthogonal sets: (4/4 + 1)³ + (8/4 + 1)³ - 2."""
    x = np.array([[2.0, 0, 0, 0], [2.0, 1.0, 0, 0]])
    y = np.array([[0, 0, 2.0, 0], [0, 0, 4.0, 1.0]])
    assert mmd_squared(x, y) == 8 + 27 - 2


@pytest.mark.parametrize(("m", "n"), [(12, 12), (9, 14)])
def test_equal_to_the_u_statistic_written_out(m, n):
    x, y = (inception_like(rows, 7, seed).astype(np.float64) for rows, seed in ((m, 0), (n, 1)))

    def k(a, b):
        return (sum(float(u) * float(v) for u, v in zip(a, b, strict=True)) / 7 + 1) ** 3

    expected = sum(k(x[i], x[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    expected += sum(k(y[i], y[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    expected -= 2 * sum(k(a, b) for a in x for b in y) / (m * n)
    assert mmd_squared(x, y) == pytest.approx(expected, rel=1e-11)
    if m == n:  # the subset is then the whole set, for every seed
        assert kid(x, y, 3, n, seed=5)[0] == pytest.approx(expected, rel=1e-11)


def test_symmetric_and_independent_of_order():
    x, y = inception_like(60, 20, 0).astype(np.float64), inception_like(50, 20, 1, 1.3).astype(np.float64)
    value = mmd_squared(x, y)
    assert mmd_squared(y, x) == pytest.approx(value, rel=1e-10)
    assert mmd_squared(x[::-1], np.roll(y, 7, axis=0)) == pytest.approx(value, rel=1e-10)
    assert kid(x[:50], y, 1, 50, seed=0)[0] == pytest.approx(kid(y, x[:50], 1, 50, seed=9)[0], rel=1e-10)


def test_unbiased_under_equal_distributions():
    """The mean of 400 independent estimates is within 5.5 standard errors of 0 (p-value 7e-8); many are negative."""
    values = np.array([mmd_squared(*np.random.default_rng(i).standard_normal((2, 20, 5))) for i in range(400)])
    assert abs(values.mean()) < 5.5 * values.std() / 20
    assert 0.3 < (values < 0).mean() < 0.8


def test_unbiased_at_a_known_distance():
    """Points on the line, x = 0 or 1 evenly and y = 1: E k(x,x') = (1+1+1+8)/4, k(y,y) = 8, E k(x,y) = (1+8)/2, so
    MMD² = 2.75 + 8 - 9 = 1.75. Within 5.5 standard errors: p-value 4e-8."""
    draws = np.random.default_rng(0)
    values = np.array(
        [mmd_squared(draws.integers(0, 2, (10, 1)).astype(np.float64), np.ones((10, 1))) for _ in range(2000)]
    )
    assert abs(values.mean() - 1.75) < 5.5 * values.std() / np.sqrt(2000)


def test_increases_with_the_difference():
    real = inception_like(400, 64, 0)
    values = [kid(inception_like(400, 64, 1, scale), real, 5, 200, seed=0)[0] for scale in (1.0, 1.2, 1.5)]
    assert abs(values[0]) < 0.01 < values[1] < values[2]


# Subsets, and torch-fidelity


@pytest.mark.parametrize(("n", "m", "d", "size", "scale"), [(300, 200, 64, 100, 1.1), (250, 400, 512, 250, 1.0)])
def test_equal_to_torch_fidelity(n, m, d, size, scale):
    generated, real = inception_like(n, d, 2, scale), inception_like(m, d, 3)
    expected = by_torch_fidelity(generated.astype(np.float64), real.astype(np.float64), 12, size, seed=2020)
    assert kid(generated, real, 12, size, seed=2020) == pytest.approx(expected, rel=1e-9)


def test_the_error_of_torch_fidelitys_float32():
    """As the docstring of `kid` says: in float32 the error for the same features is between 1e-9 and 1e-6."""
    generated, real = inception_like(600, 2048, 4, 1.05), inception_like(600, 2048, 5)
    mean, _ = kid(generated, real, 3, 500, seed=0)
    error = abs(by_torch_fidelity(generated, real, 3, 500, seed=0)[0] - mean)
    assert 1e-9 < error < 1e-6
    assert mean > 1e-4


def test_subsets_follow_the_seed():
    generated, real = inception_like(80, 8, 6), inception_like(80, 8, 7)
    first = kid(generated, real, 4, 30, seed=1)
    assert kid(generated, real, 4, 30, seed=1) == first
    assert kid(generated, real, 4, 30, seed=2) != first
    assert first[1] > 0


def test_refusals():
    rows = inception_like(10, 4, 0)
    with pytest.raises(ValueError, match=r"subset_size=20 of the samples, got 10.*subset_size to 10 or less"):
        kid(rows, inception_like(30, 4, 1), 2, 20, seed=0)
    with pytest.raises(ValueError, match=r"subset_size=20 of the real images, got 10.*protocol.num_samples"):
        kid(inception_like(30, 4, 1), rows, 2, 20, seed=0)
    with pytest.raises(ValueError, match=r"as many features.*4 and 5"):
        kid(rows, inception_like(10, 5, 1), 2, 5, seed=0)
    with pytest.raises(ValueError, match="finite"):
        kid(np.where(np.arange(10)[:, None] == 3, np.nan, rows), rows, 1, 2, seed=0)


# The metric


@pytest.fixture
def ctx(tmp_path) -> EvalContext:
    return EvalContext(seed=3, device="cpu", num_classes=10, cache=tmp_path, dataset=Digits())


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, bool]]:
    """Let `features_of` return a fixed projection of the pixels; the list gets (images, real) of each call."""
    calls: list[tuple[int, bool]] = []
    projection = np.random.default_rng(0).random((784, 16)).astype(np.float32) / 784

    def features_of(records: Records, ctx: EvalContext, *, real: bool) -> np.ndarray:
        calls.append((len(records), real))
        return records.images.flatten(1).numpy().astype(np.float32) @ projection

    monkeypatch.setattr(features, "features_of", features_of, raising=False)
    return calls


def test_names_and_numbers(ctx, asked):
    test = Digits().load("test")
    samples = Records(test.images[:300], test.labels[:300])
    values = Kid(subsets=3, subset_size=100)(samples, test, ctx)
    assert list(values) == ["kid", "kid_std_subsets", "kid_num_samples", "kid_num_reference", "kid_subset_size"]
    assert (values["kid_num_samples"], values["kid_num_reference"], values["kid_subset_size"]) == (300, 360, 100)
    assert asked == [(300, False), (360, True)]
    generated, real = (features.features_of(records, ctx, real=True) for records in (samples, test))
    assert (values["kid"], values["kid_std_subsets"]) == kid(generated, real, 3, 100, seed=ctx.seed)


def test_reference_train_is_the_training_records(ctx, asked):
    test = Digits().load("test")
    values = Kid(subsets=2, subset_size=200, reference="train")(test, test, ctx)
    assert values["kid_num_reference"] == 1437
    assert asked == [(360, False), (1437, True)]
    closed = EvalContext(seed=3, device="cpu", num_classes=10, cache=ctx.cache, train_closed="closed for a reason")
    with pytest.raises(NotMeasured, match="closed for a reason"):
        Kid(reference="train")(test, test, closed)


def test_too_few_images_are_an_error_before_any_feature(ctx, asked):
    test = Digits().load("test")
    result = evaluate(Kid(), test, test, ctx)
    assert result.status == "failed"
    assert "subset_size=1000 of the samples, got 360" in result.reason
    assert asked == []


@pytest.mark.parametrize("settings", [{"subsets": 0}, {"subset_size": 1}, {"reference": "valid"}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match="expected"):
        Kid(**settings)


@pytest.mark.slow
def test_real_digits_are_nearer_than_noise(ctx):
    """With the real network: digits against other digits are about 0, noise is far away."""
    try:
        InceptionFeatures()
    except NotMeasured as missing:
        pytest.skip(str(missing))
    test = Digits().load("test")
    half = Records(test.images[:50], test.labels[:50])
    rest = Records(test.images[50:100], test.labels[50:100])
    rng = torch.Generator().manual_seed(0)
    noise = Records(torch.randint(0, 256, (50, 1, 28, 28), dtype=torch.uint8, generator=rng), half.labels)
    metric = Kid(subsets=1, subset_size=50)
    assert abs(metric(half, rest, ctx)["kid"]) < 0.05
    assert metric(noise, rest, ctx)["kid"] > 0.2

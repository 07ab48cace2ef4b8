"""Rows given as factors: sums equal those of explicit rows, and no row or sum moves by more than the bound states."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpgen_bench.privacy.bounds import Batch
from dpgen_bench.privacy.clipping import clip_products, clip_rows
from dpgen_bench.privacy.events import Sensitivity
from dpgen_bench.privacy.factors import PerRecordMoments, PerRecordProducts
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.sampling import Full
from tests.test_privacy_core import open_data

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = {"W": (3, 4), "V": (1, 5)}
WEIGHTS = (0.15, 0.45, 0.88)


def batch_of(x: Tensor, labels: Tensor | None = None) -> Batch:
    labels = torch.arange(len(x)) % 3 if labels is None else labels
    return Batch(x, labels, torch.arange(len(x)), Key.seeded("batch"))


def random_factors(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return {
        part: tuple(torch.randn(n, size, generator=rng, dtype=torch.float64).to(dtype) for size in shape)
        for part, shape in SHAPES.items()
    }


def explicit_products(factors: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Rows [b, all parts], formed one by one."""
    rows = [torch.einsum("bm,bn->bmn", u.double(), v.double()).flatten(1) for u, v in factors.values()]
    return torch.cat(rows, dim=1)


def explicit_moments(bound: PerRecordMoments, z: Tensor) -> Tensor:
    """Rows [b, size], formed one by one from the definition."""
    z = clip_rows(z.clamp(min=0.0) if bound.nonnegative else z, bound.radius).double()
    c0, c1, c2 = bound.coefficients
    rows = []
    for one in z:
        row = [c0] if bound.weights[0] else []
        row += [c1 * float(value) for value in one] if bound.weights[1] else []
        for i in range(len(one) if bound.weights[2] else 0):
            row += [c2 * float(one[i] * one[j]) * (1.0 if i == j else math.sqrt(2.0)) for j in range(i, len(one))]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


# --- sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [None, 3])
@pytest.mark.parametrize("C", [0.3, 4.0, math.inf])
@pytest.mark.parametrize("microbatch", [None, 4])
def test_products_equal_the_sum_of_clipped_explicit_rows(classes, C, microbatch):
    factors = random_factors(11)
    labels = torch.arange(11) % 3
    bound = PerRecordProducts(C=C, shapes=SHAPES, classes=classes, microbatch=microbatch)

    def fn(x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        rows = x[:, 0, 0, 0].long()
        return {part: (u[rows], v[rows]) for part, (u, v) in factors.items()}

    value = bound.value(fn, batch_of(torch.arange(11.0)[:, None, None, None]), None)
    rows = explicit_products(factors)
    rows = rows * (C / (rows.norm(dim=1, keepdim=True) * (1.0 + 1e-6))).clamp(max=1.0)  # with the margin of clipping
    for block in [slice(None)] if classes is None else range(3):
        expected = rows[labels == block].sum(0) if classes else rows.sum(0)
        got = torch.cat([(part if classes is None else part[block]).flatten() for part in value.values()])
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    assert {part: tuple(total.shape[-2:]) for part, total in value.items()} == SHAPES


@pytest.mark.parametrize("classes", [None, 3])
@pytest.mark.parametrize("weights", [WEIGHTS, (0.0, 0.4, 0.9), (0.2, 1.0, 0.0), (0.0, 0.0, 1.0)])
@pytest.mark.parametrize("nonnegative", [False, True])
def test_moments_equal_the_sum_of_explicit_rows_and_are_unpacked(classes, weights, nonnegative):
    z = torch.randn(11, 6, generator=torch.Generator().manual_seed(1))
    bound = PerRecordMoments(
        dim=6, radius=2.0, weights=weights, classes=classes, nonnegative=nonnegative, C=0.7, microbatch=4
    )
    batch = batch_of(z[:, None, None, :])
    value = bound.value(lambda x, y: x.flatten(1), batch, None)["value"]
    rows = explicit_moments(bound, z)
    clipped = clip_rows(z.clamp(min=0.0) if nonnegative else z, 2.0).double()
    for block in [None] if classes is None else range(3):
        own = torch.ones(11, dtype=torch.bool) if block is None else batch.labels == block
        part = value if block is None else value[block]
        torch.testing.assert_close(part, rows[own].sum(dim=0), rtol=1e-12, atol=1e-12)
        moments = bound.unpack(part.float())
        expected = (own.sum(), clipped[own].sum(dim=0), clipped[own].T @ clipped[own])
        for weight, got, sums in zip(weights, (moments.count, moments.first, moments.second), expected, strict=True):
            if weight == 0.0:
                assert got.numel() == 0
            else:
                torch.testing.assert_close(got.double(), sums.double(), rtol=1e-5, atol=1e-5)
    if classes is not None and weights[2]:
        assert bound.unpack(value).second.shape == (3, 6, 6)


def test_a_release_of_factors_has_noise_of_the_stated_size_on_every_entry():
    """Symmetric entries are released once: the noise of the matrix is symmetric, and smaller off the diagonal."""
    data, ledger = open_data(epsilon=1.0, relation="replace_one")
    moments = PerRecordMoments(dim=60, radius=1.0, weights=WEIGHTS, classes=3)
    products = PerRecordProducts(C=1.0, shapes={"W": (40, 50)}, classes=3)
    first = data.mechanism("moments", sample=Full(), bound=moments, times=1, share=0.5)
    second = data.mechanism("products", sample=Full(), bound=products, times=1)
    assert second.std == pytest.approx(first.std * math.sqrt(2.0), rel=1e-3)  # the sensitivities sqrt(2) C and 2 C
    raw = first(lambda x, y: torch.zeros(len(x), 60))
    noise = moments.unpack(raw).second
    assert torch.equal(noise, noise.mT)
    c2 = moments.coefficients[2]
    upper = noise[:, *torch.triu_indices(60, 60, 1)]
    assert float(upper.std()) == pytest.approx(first.std / c2 / math.sqrt(2.0), rel=0.05)
    assert float(noise.diagonal(dim1=1, dim2=2).std()) == pytest.approx(first.std / c2, rel=0.25)
    noisy = second(lambda x, y: {"W": (torch.zeros(len(x), 40), torch.zeros(len(x), 50))})
    assert tuple(noisy["W"].shape) == (3, 40, 50)
    assert float(noisy["W"].std()) == pytest.approx(second.std, rel=0.05)
    assert ledger.entries["moments"].bound == moments.describe()
    assert ledger.entries["products"].bound["shapes"] == {"W": [40, 50]}


def test_an_empty_draw_and_rows_that_are_not_finite_count_as_zero():
    z = torch.ones(3, 1, 1, 2)
    z[1, 0, 0, 1] = math.nan
    moments = PerRecordMoments(dim=2, radius=9.0, weights=WEIGHTS)
    total = moments.unpack(moments.value(lambda x, y: x.flatten(1), batch_of(z), None)["value"])
    assert float(total.count) == pytest.approx(2.0)
    torch.testing.assert_close(total.second, torch.full((2, 2), 2.0, dtype=torch.float64))
    z[1, 0, 0, 1] = -math.inf  # which a clamp at zero would turn into a number
    clamped = PerRecordMoments(dim=2, radius=9.0, weights=WEIGHTS, nonnegative=True)
    total = clamped.unpack(clamped.value(lambda x, y: x.flatten(1), batch_of(z), None)["value"])
    torch.testing.assert_close(total.first.flatten(), torch.full((2,), float(total.count), dtype=torch.float64))
    products = PerRecordProducts(C=9.0, shapes={"a": (2, 1), "b": (1, 1)})
    big = torch.tensor([[1.0], [1.0], [1e39]], dtype=torch.float64)  # not finite in float32

    def fn(x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {"a": (x.flatten(1), torch.ones(len(x), 1)), "b": (big, torch.ones(len(x), 1))}

    value = products.value(fn, batch_of(z), None)
    torch.testing.assert_close(value["a"], torch.ones(2, 1, dtype=torch.float64))
    torch.testing.assert_close(value["b"], torch.ones(1, 1, dtype=torch.float64))
    for bound in (moments, products):
        value = bound.value(fn, batch_of(z[:0]), None)
        assert not any(part.any() for part in value.values())


# --- norms ------------------------------------------------------------------------------------------------------------


def rational(tensor: Tensor) -> list[Fraction]:
    return [Fraction(value) for value in tensor.double().tolist()]


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    powers=st.tuples(st.floats(-40.0, 38.0), st.floats(-40.0, 38.0)),
    C=st.floats(-40.0, 40.0).map(lambda power: 10.0**power),
    d=st.sampled_from([1, 2, 64, 300]),
    seed=st.integers(0, 10**6),
)
@example(dtype=torch.float64, powers=(38.0, 38.0), C=1e-40, d=300, seed=0)
@example(dtype=torch.float32, powers=(-40.0, -40.0), C=1e-40, d=300, seed=0)
@example(dtype=torch.float32, powers=(0.0, 0.0), C=math.sqrt(2.0) * 300, d=300, seed=-1)  # norm C up to rounding
def test_the_norm_of_clipped_products_is_at_most_C_in_exact_arithmetic(dtype, powers, C, d, seed):
    rng = torch.Generator().manual_seed(abs(seed))
    sizes = [torch.full((2, d), 1.0, dtype=torch.float64) for _ in range(4)]
    if seed >= 0:
        sizes = [torch.randn(2, d, generator=rng, dtype=torch.float64) for _ in range(4)]
    factors = [(size * 10.0 ** powers[k % 2]).to(dtype) for k, size in enumerate(sizes)]
    clipped = clip_products([(factors[0], factors[1]), (factors[2], factors[3])], C)
    for row in range(2):
        norms = [sum(value**2 for value in rational(part[row])) for pair in clipped for part in pair]
        exact = norms[0] * norms[1] + norms[2] * norms[3]
        assert exact <= Fraction(C) ** 2
        floats = [factor.float().double()[row] for factor in factors]
        if not all(torch.isfinite(part).all() for part in floats):
            assert exact == 0
            continue
        before = [sum(value**2 for value in rational(part)) for part in floats]
        short = before[0] * before[1] + before[2] * before[3]
        if short <= (Fraction(C) * Fraction(999998, 1000000)) ** 2:
            assert all(torch.equal(part[row], floats[k]) for k, part in enumerate(p for pair in clipped for p in pair))
        else:
            assert exact >= (Fraction(C) * Fraction(999997, 1000000)) ** 2


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    power=st.floats(-30.0, 30.0),
    radius=st.floats(-30.0, 30.0).map(lambda power: 10.0**power),
    C=st.floats(-40.0, 40.0).map(lambda power: 10.0**power),
    weights=st.tuples(*[st.floats(0.01, 10.0)] * 3),
    seed=st.integers(0, 10**6),
)
@example(dtype=torch.float64, power=1.0, radius=1.0, C=1.0, weights=WEIGHTS, seed=0)
def test_the_norm_of_moments_is_at_most_C_in_exact_arithmetic(dtype, power, radius, C, weights, seed):
    """The squared norm is c0^2 + c1^2 |z|^2 + c2^2 |z|^4, of the coefficients and z that are summed."""
    z = (torch.randn(2, 50, generator=torch.Generator().manual_seed(seed)) * 10.0**power).to(dtype)
    bound = PerRecordMoments(dim=50, radius=radius, weights=weights, C=C)
    c0, c1, c2 = (Fraction(value) for value in bound.coefficients)
    root = Fraction(math.sqrt(2.0))  # as it multiplies the entries off the diagonal
    for row in clip_rows(z, radius):
        entries = rational(row)
        square = sum(value**2 for value in entries)
        off_diagonal = square**2 - sum(value**4 for value in entries)  # the sum over i != j of z_i^2 z_j^2
        fourth = sum(value**4 for value in entries) + root**2 * off_diagonal / 2
        assert c0**2 + c1**2 * square + c2**2 * fourth <= Fraction(C) ** 2


# --- sensitivities ----------------------------------------------------------------------------------------------------


def least_inner_product(weights: tuple[float, float, float], lowest: float) -> float:
    """The minimum of w0^2 + w1^2 t + w2^2 t^2 on [lowest, 1] for weights of norm 1, by search."""
    w0, w1, w2 = (weight / math.hypot(*weights) for weight in weights)
    t = torch.linspace(lowest, 1.0, 100_001, dtype=torch.float64)
    return float((w0**2 + w1**2 * t + w2**2 * t**2).min())


@pytest.mark.parametrize(
    ("weights", "nonnegative", "factor"),
    [
        (WEIGHTS, False, math.sqrt(2.0)),  # 0.15^2 >= 0.45^4 / (4 0.88^2)
        ((0.0, 0.4, 0.92), True, math.sqrt(2.0)),
        ((0.0, 0.0, 1.0), False, math.sqrt(2.0)),  # squares are non-negative
        ((0.2, 1.0, 0.0), True, math.sqrt(2.0)),
        ((0.2, 1.0, 0.0), False, None),
        ((0.0, 1.0, 0.0), False, 2.0),
        ((0.0, 0.4, 0.92), False, None),  # negative inner products of at most -m
        ((0.1, 0.9, 0.42), False, None),  # the minimum is at t = -1
        ((0.0, 1e6, 1e-6), False, 2.0),  # practically the mean alone: 2C
    ],
)
def test_sensitivity_of_moments(weights, nonnegative, factor):
    bound = PerRecordMoments(dim=3, radius=2.0, weights=weights, C=0.5, nonnegative=nonnegative)
    assert bound.sensitivity.add_remove == 0.5
    least = min(0.0, least_inner_product(weights, 0.0 if nonnegative else -1.0))
    assert bound.sensitivity.replace_one == pytest.approx(0.5 * min(2.0, math.sqrt(2.0 - 2.0 * least)), rel=1e-8)
    if factor is not None:
        assert bound.sensitivity.replace_one == pytest.approx(0.5 * factor, rel=1e-9)
    else:
        assert math.sqrt(2.0) * 0.5 < bound.sensitivity.replace_one < 1.0


def test_sensitivity_of_products_and_of_releases_without_clipping():
    assert PerRecordProducts(C=0.5, shapes=SHAPES).sensitivity == Sensitivity(0.5, 1.0)
    for bound in (
        PerRecordProducts(C=math.inf, shapes=SHAPES),
        PerRecordMoments(C=math.inf, dim=2, radius=math.inf, weights=WEIGHTS),
    ):
        assert bound.sensitivity == Sensitivity(math.inf, math.inf)


@given(
    seed=st.integers(0, 10**6),
    weights=st.sampled_from([WEIGHTS, (0.0, 0.4, 0.92), (0.1, 0.9, 0.42), (0.3, 1.0, 0.0), (0.0, 0.0, 1.0)]),
    nonnegative=st.booleans(),
    opposite=st.booleans(),
    same=st.booleans(),
    size=st.sampled_from([0.3, 1.0, 9.0]),
)
@settings(max_examples=300, deadline=None)
def test_no_two_records_move_the_moments_by_more_than_the_sensitivity(seed, weights, nonnegative, opposite, same, size):
    """Explicit rows in float64, of records in any direction; `nonnegative` holds whatever the function returns."""
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(2, 3, generator=rng) * size
    if opposite:
        z[1] = -z[0] * float(torch.rand((), generator=rng))
    bound = PerRecordMoments(dim=3, radius=1.0, weights=weights, classes=3, nonnegative=nonnegative)
    labels = torch.tensor([0, 0 if same else 1])
    one, two = (
        bound.value(lambda x, y: x.flatten(1), batch_of(z[k : k + 1, None, None, :], labels[k : k + 1]), None)["value"]
        for k in range(2)
    )
    assert float(one.norm()) <= bound.sensitivity.add_remove * (1 + 1e-12)
    assert float((one - two).norm()) <= bound.sensitivity.replace_one * (1 + 1e-12)


def test_the_sensitivities_are_reached():
    """Orthogonal z reach sqrt(2) C; opposite factors 2C; and the weights of a mean alone nearly 2C."""
    z = torch.eye(2)[:, None, None, :] * 5.0
    moments = PerRecordMoments(dim=2, radius=1.0, weights=(1e-3, 1e-3, 1.0))
    sums = [moments.value(lambda x, y: x.flatten(1), batch_of(z[k : k + 1]), None)["value"] for k in range(2)]
    assert float((sums[0] - sums[1]).norm()) == pytest.approx(moments.sensitivity.replace_one, rel=1e-5)
    products = PerRecordProducts(C=0.5, shapes={"W": (2, 2)})
    for sign, distance in ((-1.0, 1.0), (1.0, 0.0)):
        one, two = (
            products.value(lambda x, y, s=s: {"W": (9.0 * s * x.flatten(1), x.flatten(1))}, batch_of(z[:1]), None)["W"]
            for s in (1.0, sign)
        )
        assert float((one - two).norm()) == pytest.approx(distance, rel=1e-5, abs=1e-9)
    mean = PerRecordMoments(dim=2, radius=1.0, weights=(0.0, 1.0, 1e-2))
    sums = [mean.value(lambda x, y, s=s: s * x.flatten(1), batch_of(z[:1]), None)["value"] for s in (1.0, -1.0)]
    assert float((sums[0] - sums[1]).norm()) == pytest.approx(2.0, rel=1e-3)
    assert mean.sensitivity.replace_one == pytest.approx(2.0, rel=1e-3)

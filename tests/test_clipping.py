"""`clip_rows` returns rows of norm at most C in exact arithmetic, in every floating-point format that it accepts."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpgen_bench.privacy.bounds import clip_rows
from dpgen_bench.privacy.gradients import clipped_gradient_sum

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def exceeds(row: Tensor, C: float) -> bool:
    """Whether the norm of a row is larger than C, decided in rational arithmetic."""
    return sum(Fraction(value) ** 2 for value in row.double().tolist()) > Fraction(C) ** 2


def made(r: int, d: int, dtype: torch.dtype, exponent: float, kind: str, seed: int) -> Tensor:
    """Rows [r, d] of about 2^exponent of the dtype's range, of one size or of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    lowest, highest = math.log2(info.smallest_normal) - 8.0, math.log2(info.max) - 1e-9
    values = torch.randn(r, d, generator=generator, dtype=torch.float64).clamp(-0.999, 0.999)
    if kind == "equal":  # every coordinate is rounded in the same direction
        size = 0.7 + 0.299 * torch.rand((), generator=generator, dtype=torch.float64)
        values = size.expand(r, d)
    power = lowest + exponent * (highest - lowest)
    if kind == "spread":
        values = values * 2.0 ** (-20.0 * torch.rand(r, d, generator=generator, dtype=torch.float64))
    return (values * 2.0**power).to(dtype)


@settings(max_examples=300, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    r=st.integers(1, 4),
    d=st.sampled_from([1, 2, 3, 64, 777]),
    exponent=st.floats(0.0, 1.0),
    kind=st.sampled_from(["normal", "equal", "spread"]),
    C=st.floats(-40.0, 40.0).map(lambda power: 10.0**power),
    seed=st.integers(0, 10**6),
)
@example(dtype=torch.float32, r=1, d=777, exponent=1.0, kind="equal", C=1e-3, seed=0)
@example(dtype=torch.float16, r=1, d=777, exponent=0.6, kind="equal", C=1e-7, seed=0)  # denormal in float16
@example(dtype=torch.float32, r=1, d=777, exponent=0.05, kind="equal", C=1e-39, seed=0)  # denormal in float32
@example(dtype=torch.float64, r=1, d=777, exponent=1.0, kind="equal", C=1.0, seed=0)  # its square leaves float64
def test_the_norm_is_at_most_C_in_every_format_and_short_rows_are_untouched(dtype, r, d, exponent, kind, C, seed):
    rows = made(r, d, dtype, exponent, kind, seed)
    clipped = clip_rows(rows, C)
    assert clipped.dtype == dtype
    info = torch.finfo(dtype)
    for before, after in zip(rows, clipped, strict=True):
        assert not exceeds(after, C)
        if not exceeds(before, C * (1.0 - 2e-6)):
            assert torch.equal(before, after)
            continue
        # The direction is kept, up to the format's rounding and the margin of the norm.
        unit = before.double() / before.double().abs().max()
        expected = unit / unit.norm() * C
        off = (after.double() - expected).abs()
        assert (off <= expected.abs() * (info.eps + 2e-6) + info.tiny * info.eps).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_rows_are_unchanged_for_every_C(dtype):
    """PyTorch computes C / norm as C times a rounded reciprocal, which is below 1 for norm = C = 49."""
    rows = torch.tensor([[0.1249, -0.3]], dtype=dtype)
    assert [C for C in range(1, 1000) if not torch.equal(clip_rows(rows, float(C)), rows)] == []


@pytest.mark.parametrize(
    ("dtype", "size", "C", "d"),
    [
        (torch.bfloat16, 3.0, 1.0, 1_000),  # an earlier version: 0.62 % above C
        (torch.float16, 5.0, 1.0, 1_000),  # 0.08 %
        (torch.float32, 3e38, 1e-4, 10**5),  # 19 % at C = 1e-3 and d = 1e6
    ],
)
def test_long_constant_rows_have_at_most_norm_C(dtype, size, C, d):
    worst = 0.0
    for part in range(8):
        row = torch.full((1, d), size * (1.0 - part / 24.0)).to(dtype)
        worst = max(worst, math.sqrt(math.fsum(value * value for value in clip_rows(row, C)[0].double().tolist())))
    assert 0.5 * C < worst <= C


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_counts_as_zero_and_changes_no_other(poison, dtype):
    rows = torch.ones(3, 4, dtype=dtype)
    rows[1, 2] = poison
    clipped = clip_rows(rows, 1.0)
    assert torch.equal(clipped[1], torch.zeros(4, dtype=dtype))
    rtol = torch.finfo(dtype).eps + 2e-6
    torch.testing.assert_close(clipped[0], torch.full((4,), 0.5, dtype=dtype), rtol=rtol, atol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_formats_are_refused(dtype):
    with pytest.raises(ValueError, match=r"expected rows of float16, bfloat16, float32 or float64, got .*\.float\(\)"):
        clip_rows(torch.ones(2, 3).to(dtype), 1.0)


@pytest.mark.parametrize("C", [math.nan, -1.0, 0.0, 1e-200])
def test_a_bound_that_float64_cannot_hold_is_refused(C):
    with pytest.raises(ValueError, match="expected a clipping norm"):
        clip_rows(torch.ones(2, 3), C)


# --- gradients of half precision --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["bookkeeping", "opacus"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", ["parameters", "autocast"])
def test_gradients_of_half_precision_are_refused(backend, dtype, how):
    module = nn.Linear(5, 1)
    if how == "parameters":
        module = module.to(dtype)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=how == "autocast"):
            return module(x).squeeze(1)

    rows = torch.ones(3, 5, dtype=next(module.parameters()).dtype)
    with pytest.raises(ValueError, match="expected float32 or float64"):
        clipped_gradient_sum(module, loss, (rows,), 1.0, backend=backend)


@pytest.mark.parametrize("backend", ["bookkeeping", "opacus"])
def test_a_gradient_near_the_largest_float32_obeys_its_bound(backend):
    module = nn.Linear(1000, 1, bias=False)
    for size in (1e38, 1.7e38, 2.4e38, 3.3e38):
        rows = torch.full((1, 1000), size)
        with torch.no_grad():
            module.weight.zero_()
        total = clipped_gradient_sum(module, lambda x: module(x).squeeze(1), (rows,), 1e-4, backend=backend)
        gradient = total.gradients["weight"][0]
        assert not exceeds(gradient, 1e-4)
        assert float(gradient.double().norm()) > 0.999e-4

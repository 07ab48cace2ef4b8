"""Clips rows to an L2 norm that they obey exactly, in their own floating-point format."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpgen_bench.privacy.isolation import isolated_from_modes

# Norms are computed in float64 and multiplied by this. It covers the relative error of the norm (at most d * 2^-53) and
# the rounding of a float32 product (at most 2^-23 in the normal range).
_ROUND_UP = 1.0 + 1e-6

# Below these, a float32 factor or product may be denormal, where its relative rounding error is large.
_SMALLEST_FACTOR = 2.0**-100
_SMALLEST_C_IN_FLOAT32 = 2.0**-60

SMALLEST_C = 1e-100  # squares of values that matter next to C must be normal float64 numbers

# Types of devices on which a branch on values costs nothing. On an accelerator the program would wait for the queue.
MAY_BRANCH = frozenset({"cpu"})

_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


@isolated_from_modes()
def clip_rows(rows: Tensor, C: float) -> Tensor:
    """Scale each row of `rows` [r, ...] to an L2 norm of at most C; rows with a NaN or an infinity become zero.

    Guarantees: the norm of each returned row, in exact arithmetic on the returned values, is at most C, for rows and C
    of any size. A row whose norm is below C by a relative 1e-6 or more is returned unchanged.

    Args:
        rows: float16, bfloat16, float32 or float64; the result has the same dtype.
        C: at least SMALLEST_C; inf clips nothing.

    Raises:
        ValueError: for rows of another dtype, or C out of range.
    """
    _expect_clippable(C, rows.dtype)
    flat = rows.detach().reshape(len(rows), -1) if len(rows) else rows.detach().reshape(0, 1)
    finite = torch.isfinite(flat).all(dim=1, keepdim=True)
    flat = torch.where(finite, flat, torch.zeros_like(flat))
    if math.isfinite(C):
        norms = torch.linalg.vector_norm(flat, dim=1, keepdim=True, dtype=torch.float64) * _ROUND_UP
        factors = torch.where(norms > C, C / norms, torch.ones_like(norms))
        in_float64 = _need_float64(norms, factors, C, rows.dtype)
        product = flat * factors.to(flat.dtype)
        if rows.device.type not in MAY_BRANCH:
            exact = _round_towards_zero(_scale_in_float64(flat.double(), C), rows.dtype)
            flat = torch.where(in_float64, exact, product)
        else:
            chosen = in_float64.flatten()
            original, flat = flat[chosen], product
            if len(original):
                flat[chosen] = _round_towards_zero(_scale_in_float64(original.double(), C), rows.dtype)
    return flat.reshape(rows.shape)


@isolated_from_modes()
def clip_products(factors: Sequence[tuple[Tensor, Tensor]], C: float) -> list[tuple[Tensor, Tensor]]:
    """Scale rows that are given as factors: row i is all u[i] v[i]^T of the pairs (u [r, m], v [r, n]) together.

    The squared norm of row i is the sum over pairs of |u[i]|^2 |v[i]|^2. To clip the row, all its u[i] are multiplied
    by the same factor.

    Guarantees: the norm of each row, in exact arithmetic on the returned factors, is at most C. A row whose norm is
    below C by a relative 1e-6 or more is returned unchanged, up to the conversion of its factors to float32. A row with
    a factor that has a NaN, or a number that float32 cannot represent, becomes zero.

    Args:
        factors: pairs of float16, bfloat16, float32 or float64 tensors with r rows each.
        C: at least SMALLEST_C; inf clips nothing.

    Returns:
        the pairs in float64.

    Raises:
        ValueError: for factors of another dtype, or C out of range.
    """
    _expect_clippable(C, *(factor.dtype for pair in factors for factor in pair))
    # The range of float32 is that in which no product of norms overflows or is denormal in float64.
    pairs = [(u.detach().float().double(), v.detach().float().double()) for u, v in factors]
    finite = torch.stack([torch.isfinite(factor).all(dim=1) for pair in pairs for factor in pair]).all(dim=0)[:, None]
    pairs = [(torch.where(finite, u, 0.0), torch.where(finite, v, 0.0)) for u, v in pairs]
    if math.isinf(C):
        return pairs
    squares = [u.square().sum(dim=1) * v.square().sum(dim=1) for u, v in pairs]
    norms = torch.stack(squares).sum(dim=0).sqrt()[:, None] * _ROUND_UP
    scale = torch.where(norms > C, C / norms, torch.ones_like(norms))
    return [(u * scale, v) for u, v in pairs]


def _expect_clippable(C: float, *dtypes: torch.dtype) -> None:
    for dtype in dtypes:
        if dtype not in (torch.float64, *_BITS):
            raise ValueError(
                f"expected rows of float16, bfloat16, float32 or float64, got {dtype}, for which the "
                "rounding of clipping is not known; let the function return rows.float()."
            )
    if not C >= SMALLEST_C:
        raise ValueError(f"expected a clipping norm C >= {SMALLEST_C}, got {C!r}; scale the rows up.")


def _need_float64(norms: Tensor, factors: Tensor, C: float, dtype: torch.dtype) -> Tensor:
    """Which rows a product in their own format cannot clip exactly; bool, of the shape of `norms`."""
    if dtype == torch.float64:
        return torch.isinf(norms)
    if dtype == torch.float32 and C >= _SMALLEST_C_IN_FLOAT32:
        return factors < _SMALLEST_FACTOR
    return norms > C


def _scale_in_float64(rows: Tensor, C: float) -> Tensor:
    """Float64 rows [r, d] of any size, scaled to norm C minus the margin."""
    unit = rows / rows.abs().amax(dim=1, keepdim=True)  # its largest value is 1, so squares do not overflow
    norms = torch.linalg.vector_norm(unit, dim=1, keepdim=True) * _ROUND_UP
    return unit / norms * C


def _round_towards_zero(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 values converted to a shorter format, rounded towards zero."""
    rounded = values.to(dtype)
    if dtype == torch.float64:
        return rounded
    larger = rounded.double().abs() > values.abs()
    # The formats are sign and magnitude, so subtracting one is a step towards zero; `larger` values are not zero.
    return (rounded.view(_BITS[dtype]) - larger.to(_BITS[dtype])).view(dtype)

"""Products and lengths that float64 holds without a rounding error, so that a record's are the same in every batch.

Rounding depends on the order of summation, and that on the batch. A private function that compares rounded sums may
thus decide otherwise about a record because another one has changed. Here terms are first rounded to whole numbers of
a unit, one by one. Sums of products of these are whole numbers up to 2^53, which any order of summation makes exactly.
"""

from __future__ import annotations

import math

from torch import Tensor


def product(a: Tensor, b: Tensor, limits: tuple[float, float]) -> Tensor:
    """a @ b, float64 [m, k], of a [m, n] and b [n, k]; entries beyond their matrix's limit are set to it."""
    n = len(b)
    whole_a, whole_b = (_whole(factor, limit, n) for factor, limit in zip((a, b), limits, strict=True))
    return (whole_a @ whole_b) * (_unit(limits[0], n) * _unit(limits[1], n))


def length(vectors: Tensor, limit: float) -> Tensor:
    """Euclidean norms, float64 [...], of vectors [..., n]; entries beyond the limit are set to it."""
    n = vectors.shape[-1]
    return _whole(vectors, limit, n).square().sum(dim=-1).sqrt() * _unit(limit, n)


def _unit(limit: float, n: int) -> float:
    """limit / 2^b with the largest b for which n 2^2b, the largest sum of n products, is at most 2^53."""
    return limit / 2 ** ((53 - math.ceil(math.log2(n))) // 2)


def _whole(values: Tensor, limit: float, n: int) -> Tensor:
    return (values.double().clamp(-limit, limit) / _unit(limit, n)).round()

"""Products and lengths of which a record's are the same in every batch.

The rounding of a sum depends on its order, which in turn depends on the batch. A private function that compares rounded
sums may thus decide otherwise about a record because another one has changed. Here each entry is first rounded to a
multiple of a unit, by itself. Sums of products of such entries are whole multiples of the squared unit, up to 2^53 of
them, which float64 computes exactly in any order.
"""

from __future__ import annotations

import math

from torch import Tensor


def product(a: Tensor, b: Tensor, limits: tuple[float, float]) -> Tensor:
    """The exact product, float64 [m, k], of the rounded entries of a [m, n] and b [n, k].

    Args:
        limits: positive, of a and of b; entries beyond are set to ± the limit. NaN stays NaN.
    """
    n = len(b)
    whole_a, whole_b = (_whole(factor, limit, n) for factor, limit in zip((a, b), limits, strict=True))
    return (whole_a @ whole_b) * (_unit(limits[0], n) * _unit(limits[1], n))


def length(vectors: Tensor, limit: float) -> Tensor:
    """Euclidean norms, float64 [...], of the rounded entries of vectors [..., n]; `limit` is as in `product`."""
    n = vectors.shape[-1]
    return _whole(vectors, limit, n).square().sum(dim=-1).sqrt() * _unit(limit, n)


def _unit(limit: float, n: int) -> float:
    """The smallest power of two with n (limit / unit)^2 <= 2^53 for the power of two that is next above the limit.

    Dividing by a power of two is exact on every device.
    """
    return 2.0 ** (math.ceil(math.log2(limit)) - (53 - math.ceil(math.log2(n))) // 2)


def _whole(values: Tensor, limit: float, n: int) -> Tensor:
    return (values.double().clamp(-limit, limit) / _unit(limit, n)).round()

"""Products and lengths of rounded entries: the same in any order, and as near to the real ones as their unit."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from dpgen_bench.utils.exact import length, product


def matrices(n: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(n)
    return torch.randn(40, n, generator=rng), torch.randn(n, 5, generator=rng)


@pytest.mark.parametrize("n", [1, 30, 784, 3072])
def test_sums_do_not_depend_on_their_order_or_on_other_rows(n: int) -> None:
    a, b = matrices(n)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    expected = product(a, b, limits=(8.0, 8.0))
    assert torch.equal(product(a[:, order], b[order], limits=(8.0, 8.0)), expected)
    assert torch.equal(torch.cat([product(row[None], b, limits=(8.0, 8.0)) for row in a]), expected)
    assert torch.equal(length(a[:, order], limit=8.0), length(a, limit=8.0))
    # Rounding an entry has the deviation unit / sqrt(12), of both factors unit sqrt(n / 6): this is five of them.
    tolerance = 2.0 * 8.0 / 2.0 ** ((53 - math.ceil(math.log2(n))) // 2) * n**0.5
    torch.testing.assert_close(expected, a.double() @ b.double(), atol=tolerance, rtol=0)
    torch.testing.assert_close(length(a, limit=8.0), a.double().norm(dim=1), atol=tolerance, rtol=0)


def test_a_sum_of_rounded_terms_depends_on_their_order() -> None:
    """What the functions are for: the plain product of the same matrices is not the same in any order."""
    a, b = matrices(784)
    order = torch.randperm(784, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(a[:, order].double() @ b[order].double(), a.double() @ b.double())


def test_the_largest_sums_are_exact() -> None:
    """At the limits, with one entry of another size, so that a lost bit would show."""
    n = 784
    a, b = torch.full((1, n), 8.0), torch.full((n, 1), -1.0)
    a[0, 0] = 8.0 - 2.0**-18  # a whole number of units, 8 / 2^21
    exact = -(Fraction(8) * n - Fraction(1, 2**18))
    assert Fraction(float(product(a, b, limits=(8.0, 1.0)))) == exact
    assert float(length(torch.full((2, n), 100.0), limit=3.0)[0]) == pytest.approx(3.0 * n**0.5)

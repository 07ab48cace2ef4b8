"""Hermite features against closed forms, mpmath and scipy: values, the kernel, norms, derivatives, high orders."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy.special import eval_hermite, gammaln

from dpgen_bench.nets.hermite import hermite_features, hermite_sums, mehler_rho

LENGTHS = [0.005, 0.15, 2.0]  # MNIST's and Fashion-MNIST's squared length scales, and a long one
UNIT = torch.linspace(-1.0, 1.0, 41, dtype=torch.float64)


@pytest.mark.parametrize("length_scale2", LENGTHS)
def test_rho_solves_its_equation_in_the_unit_interval(length_scale2: float) -> None:
    rho = mehler_rho(length_scale2)
    assert 0.0 < rho < 1.0
    assert rho / (1.0 - rho**2) == pytest.approx(1.0 / (2.0 * length_scale2), rel=1e-12)


@pytest.mark.parametrize("length_scale2", LENGTHS)
def test_features_of_low_order_are_the_definition(length_scale2: float) -> None:
    """By scipy's Hermite polynomials, which do not overflow at these orders."""
    rho, order = mehler_rho(length_scale2), 40
    k, x = np.arange(order + 1)[:, None], UNIT.numpy()
    scale = np.exp(0.5 * (k * np.log(rho / 2.0) - gammaln(k + 1)))
    expected = (1 - rho**2) ** 0.25 * scale * eval_hermite(k, x) * np.exp(-rho / (1 + rho) * x**2)
    np.testing.assert_allclose(hermite_features(UNIT, rho, order).numpy(), expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("order", [100, 1000])
def test_features_of_high_order_neither_overflow_nor_lose_digits(order: int) -> None:
    """H_100(1) is above 1e93 and 1000! has 2,568 digits; mpmath computes phi with 60 digits.

    The error grows with the order, because rounding of each step is passed on.
    """
    rho = mehler_rho(0.005)
    points = [-1.0, 0.0, 0.3, 1.0]
    with mpmath.workdps(60):
        r = mpmath.mpf(rho)
        scale = mpmath.sqrt(r**order / (2**order * mpmath.factorial(order))) * (1 - r**2) ** 0.25
        exact = [float(scale * mpmath.hermite(order, x) * mpmath.exp(-r / (1 + r) * x**2)) for x in points]
    assert max(map(abs, exact)) > 1e-3
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-5)):
        features = hermite_features(torch.tensor(points, dtype=dtype), rho, order)
        assert bool(torch.isfinite(features).all())
        torch.testing.assert_close(
            features[-1].double(), torch.tensor(exact, dtype=torch.float64), rtol=0, atol=tolerance * order / 100
        )


@pytest.mark.parametrize(("length_scale2", "order"), [(0.15, 100), (2.0, 40)])
def test_inner_products_are_the_gaussian_kernel(length_scale2: float, order: int) -> None:
    """Orders at which rho^(order + 1), which bounds the remainder up to a factor, is below 1e-6."""
    features = hermite_features(UNIT, mehler_rho(length_scale2), order)
    kernel = (-(UNIT[:, None] - UNIT).square() / (2.0 * length_scale2)).exp()
    torch.testing.assert_close(features.T @ features, kernel, rtol=0, atol=1e-5)


@pytest.mark.parametrize("length_scale2", LENGTHS)
def test_norms_are_at_most_one_for_every_number(length_scale2: float) -> None:
    """Also outside of [0, 1]: the sensitivity of a release does not depend on the range of pixels."""
    x = torch.cat([UNIT, torch.logspace(-3, 30, 100, dtype=torch.float64)])
    squares = hermite_features(x, mehler_rho(length_scale2), 100).square().sum(dim=0)
    assert float(squares.max()) <= 1.0 + 1e-12
    assert float(hermite_features(UNIT, mehler_rho(0.005), 100).square().sum(dim=0).max()) == pytest.approx(
        0.68, abs=0.05
    )


@pytest.mark.parametrize("order", [0, 1, 2, 30])
def test_gradients_are_those_of_finite_differences(order: int) -> None:
    x = torch.linspace(-0.9, 1.0, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: hermite_features(x, 0.9, order), (x,))


@pytest.mark.parametrize("order", [0, 1, 30])
def test_weighted_sums_are_those_of_the_features_with_their_gradients(order: int) -> None:
    """Gradients agree up to 1e-13 of the size of the numbers that they are sums of, some of which cancel."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-0.9, 1.0, 12, dtype=torch.float64).reshape(4, 3).requires_grad_()
    weights = torch.rand(4, 2, dtype=torch.float64, generator=generator)
    sums, expected = hermite_sums(x, weights, 0.9, order), weights.T @ hermite_features(x, 0.9, order)
    assert sums.shape == (order + 1, 2, 3)
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-14)
    directions = torch.rand(expected.shape, dtype=torch.float64, generator=generator)
    (one,), (other,) = (torch.autograd.grad(each, x, directions) for each in (sums, expected))
    derivatives = [torch.autograd.grad(each.sum(), x, retain_graph=True)[0] for each in hermite_features(x, 0.9, order)]
    sizes = sum(weights @ d * derivative.abs() for d, derivative in zip(directions, derivatives, strict=True))
    assert ((one - other).abs() <= 1e-13 * sizes).all()
    assert torch.autograd.gradcheck(lambda x: hermite_sums(x, weights, 0.9, order), (x,))


def test_shapes_and_types_are_kept() -> None:
    for dtype in (torch.float32, torch.float64):
        features = hermite_features(torch.rand(2, 3, dtype=dtype), 0.5, 4)
        assert features.shape == (5, 2, 3)
        assert features.dtype == dtype
    assert math.isclose(float(hermite_features(torch.zeros(1), 0.5, 0)), 0.75**0.25, rel_tol=1e-6)

"""Hermite features of Mehler's expansion of the Gaussian kernel, the feature map of DP-HP (Vinaroz et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def mehler_rho(length_scale2: float) -> float:
    """rho in (0, 1) such that `hermite_features` expand the kernel exp(-(x - y)^2 / (2 length_scale2)).

    It solves rho / (1 - rho^2) = 1 / (2 length_scale2). The form below has no cancellation.
    """
    return 1.0 / (length_scale2 + math.hypot(length_scale2, 1.0))


def hermite_features(x: Tensor, rho: float, order: int) -> Tensor:
    """phi_0(x) .. phi_order(x), in a new first dimension: [order + 1, *x.shape] of floating-point numbers x.

    With the Hermite polynomials H_k and a = rho / (1 + rho),

        phi_k(x) = (1 - rho^2)^(1/4) sqrt(rho^k / (2^k k!)) H_k(x) exp(-a x^2),

    and by Mehler's formula the sum over all k of phi_k(x) phi_k(y) is the Gaussian kernel of `mehler_rho`. Hence the
    squares of all phi_k(x) sum to 1, and those up to `order` to at most 1.

    H_k and k! overflow soon, so phi_k is computed by its own recursion, in which all values are in [-1, 1]:

        phi_{k+1} = sqrt(2 rho / (k + 1)) x phi_k - rho sqrt(k / (k + 1)) phi_{k-1}.

    This holds for |x| <= 13 in float32. Beyond, exp(-a x^2) loses its digits, and then underflows, so that all features
    are 0. Pixels are in [0, 1].
    """
    return _HermiteFeatures.apply(x, rho, order)


def hermite_sums(x: Tensor, weights: Tensor, rho: float, order: int) -> Tensor:
    """Weighted sums over the rows of x [b, n] of their features: [order + 1, c, n] for weights [b, c].

    It equals `weights.T @ hermite_features(x, rho, order)`, but needs no tensor of the size of all features, in either
    direction: for large images, memory for these takes longer than their computation. Weights get no gradient.
    """
    return _HermiteSums.apply(x, weights, rho, order)


def _each_order(x: Tensor, rho: float, order: int) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """(k, phi_k(x), phi_{k-1}(x)) for each order, by the recursion."""
    before, phi = None, (1.0 - rho**2) ** 0.25 * torch.exp(x.square() * (-rho / (1.0 + rho)))
    yield 0, phi, before
    for k in range(order):
        following = torch.mul(x, phi).mul_(math.sqrt(2.0 * rho / (k + 1)))
        if before is not None:
            following.add_(before, alpha=-rho * math.sqrt(k / (k + 1)))
        before, phi = phi, following
        yield k + 1, phi, before


class _HermiteFeatures(torch.autograd.Function):
    """The recursion, and its derivative in closed form: phi_k' = -2 a x phi_k + sqrt(2 k rho) phi_{k-1}.

    Automatic differentiation of the recursion would keep three tensors for each order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rho: float, order: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.rho = rho
        features = x.new_empty(order + 1, *x.shape)
        for k, phi, _ in _each_order(x, rho, order):
            features[k] = phi
        return features

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return _derivative(x, ctx.rho, len(grad) - 1, lambda k: grad[k]), None, None


class _HermiteSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, rho: float, order: int) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.rho = rho
        sums = x.new_empty(order + 1, weights.shape[1], x.shape[1])
        for k, phi, _ in _each_order(x, rho, order):
            torch.mm(weights.T, phi, out=sums[k])
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, weights = ctx.saved_tensors
        return _derivative(x, ctx.rho, len(grad) - 1, lambda k: weights @ grad[k]), None, None, None


def _derivative(x: Tensor, rho: float, order: int, grad: Callable[[int], Tensor]) -> Tensor:
    """The gradient in x, from the gradients grad(k) in phi_k(x)."""
    decay, slope = torch.zeros_like(x), torch.zeros_like(x)
    for k, phi, before in _each_order(x, rho, order):
        grad_k = grad(k)
        decay.addcmul_(grad_k, phi)
        if before is not None:
            slope.addcmul_(grad_k, before, value=math.sqrt(2.0 * k * rho))
    return slope - 2.0 * rho / (1.0 + rho) * x * decay

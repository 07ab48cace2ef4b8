"""Hermite features of Mehler's expansion of the Gaussian kernel, the feature map of DP-HP (Vinaroz et al. 2022)."""

from __future__ import annotations

import math
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
    squares of all phi_k(x) sum to 1, and those up to `order` to at most 1, for every x.

    H_k and k! overflow soon, so phi_k is computed by its own recursion, in which all values are in [-1, 1]:

        phi_{k+1} = sqrt(2 rho / (k + 1)) x phi_k - rho sqrt(k / (k + 1)) phi_{k-1}.

    Where exp(-a x^2) underflows (|x| > 13 in float32), all features are 0.
    """
    return _HermiteFeatures.apply(x, rho, order)


class _HermiteFeatures(torch.autograd.Function):
    """The recursion, and its derivative in closed form: phi_k' = -2 a x phi_k + sqrt(2 k rho) phi_{k-1}.

    Automatic differentiation of the recursion would keep three tensors for each order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rho: float, order: int) -> Tensor:
        phi = x.new_empty(order + 1, *x.shape)
        phi[0] = (1.0 - rho**2) ** 0.25 * torch.exp(x.square() * (-rho / (1.0 + rho)))
        if order:
            torch.mul(x, phi[0], out=phi[1]).mul_(math.sqrt(2.0 * rho))
        for k in range(1, order):
            torch.mul(x, phi[k], out=phi[k + 1]).mul_(math.sqrt(2.0 * rho / (k + 1)))
            phi[k + 1].add_(phi[k - 1], alpha=-rho * math.sqrt(k / (k + 1)))
        ctx.save_for_backward(x, phi)
        ctx.rho = rho
        return phi

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, phi = ctx.saved_tensors
        decay, slope = torch.zeros_like(x), torch.zeros_like(x)
        for k in range(len(phi)):
            decay.addcmul_(grad[k], phi[k])
            if k:
                slope.addcmul_(grad[k], phi[k - 1], value=math.sqrt(2.0 * k * ctx.rho))
        return slope - 2.0 * ctx.rho / (1.0 + ctx.rho) * x * decay, None, None

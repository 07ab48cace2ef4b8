"""Rounding errors of a clipped sum, and the margins that keep the part of every record within its bound.

The norm of the part of one record in the float32 sum must not exceed C, so norms are rounded up. Let N be the norm of a
record's gradient, S = sum_t |a_t||d_t| (layers.py) the norm that it would have if positions did not cancel, kappa =
(S/N)² and u = 2^-24. Measured on sizes from 4 to 500,000 weights and 2 to 196 positions, with adversarial inputs:

- N from float32 Gram matrices has a relative error of at most 1.7e-7 kappa: it is the root of a sum of size S² whose
  relative error is of the order of u;
- the float32 contraction has an error of a few u S, which relative to N is a few u sqrt(kappa).

So N is multiplied by 1 + BASE + PER_TERM kappa if kappa <= MOST_IN_FLOAT32. Above, Gram matrices are computed in
float64, only the second error remains, and PER_TERM sqrt(kappa) is enough. Above MOST_CONTRACTED the gradient itself is
formed in float64. The margin is at most 6e-6; kappa is about 9 for DPGAN's discriminator. Which case applies to a
record depends on that record only. The margins are measured and not proven.

Choosing a case is a branch on values, for which a program waits for an accelerator. Without branches
(`upper_norm`), all Gram matrices are float64, and N is replaced by the upper bound

    N_up = (1 + BASE) (N² + ERROR_IN_FLOAT64 S²)^(1/2) + PER_TERM S,

which is the same margin, BASE + PER_TERM sqrt(kappa), for every kappa.
"""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 2e-6
PER_TERM = 2e-7
MOST_IN_FLOAT32 = 20.0
MOST_CONTRACTED = 400.0
LARGEST_SQUARE = 1e24  # of a gradient, an input or an output gradient; above it, float32 products are not reliable
LARGEST_SQUARE_WIDE = 1e48  # the same for an input or output gradient, if Gram matrices are float64
LEAST_FACTOR = 2.0**-120  # of a clip factor in float32 that is a normal number
ERROR_IN_FLOAT64 = 1e-13  # of N² from float64 Gram matrices, relative to S²
SMALLEST_FACTOR = 2.0**-100  # of a clip factor in float32; smaller ones are near the denormal numbers


def expect_full_precision(what: str, *dtypes: torch.dtype) -> None:
    """Raise ValueError unless all dtypes are float32, or all are float64: the margins hold for these only."""
    if set(dtypes) not in ({torch.float32}, {torch.float64}):
        names = ", ".join(sorted({str(dtype) for dtype in dtypes}))
        raise ValueError(
            f"expected float32 or float64 throughout {what}, got {names}: rounding errors of norms are not known in "
            "lower or mixed precision; turn autocast off, and convert the module with .float()."
        )


def cancellation(squared: Tensor, terms: Tensor) -> Tensor:
    """κ = S²/N² for squared = N² and terms = S², float64 [b]; 0 if both are 0, infinite or NaN if unknown."""
    kappa = terms / squared.clamp_min(0.0)
    return torch.where((squared == 0) & (terms == 0), torch.zeros_like(kappa), kappa)


def upper_norm(squared: Tensor, terms: Tensor) -> Tensor:
    """N_up >= N [b], float64, for squared = N² from float64 Gram matrices and terms = S²."""
    return (squared.clamp_min(0.0) + ERROR_IN_FLOAT64 * terms).sqrt() * (1.0 + BASE) + PER_TERM * terms.sqrt()

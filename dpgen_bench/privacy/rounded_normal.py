"""Exact Gaussian noise for `privacy.noise=os`: a value plus N(0, std²) in the real numbers, rounded to a public grid.

Noise that is drawn and added in floating point takes values that reveal what it was added to (Mironov 2012). Here the
result is R(x + std Z), where R rounds to the nearest multiple of the grid's step, and Z = Phi^-1(U) is standard normal
in exact arithmetic. R does not depend on x, so the result is post-processing of the Gaussian mechanism. docs/noise.md
contains the proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import mpmath
import numpy as np
from scipy.special import ndtri

Bits = Callable[[int], int]  # Bits(n): the first n of an infinite sequence of uniform bits, as an integer of n bits

GRID_BITS = 10  # a step of the grid is between std / 2^11 and std / 2^10
WORD_BITS = 64

# In steps of the grid: the float64 value is off by less if the relative error of `ndtri` is below 7e-11. docs/noise.md,
# "How it is sampled", adds up the errors. About one coordinate in 500,000 is decided in high precision.
MARGIN = 2.0**-20
_CERTAIN_FROM = 2**36  # of 63 bits: the relative error of smaller tail probabilities is too large

SMALLEST_STD, LARGEST_STD = 2.0**-100, 2.0**100  # so that grid and results are normal float32 numbers


def grid_step(std: float) -> float:
    """The step g of the grid, the power of two with std / 2^11 < g <= std / 2^10.

    Raises:
        ValueError: for a std whose grid float32 cannot represent.
    """
    if not SMALLEST_STD <= std <= LARGEST_STD:
        raise ValueError(
            f"expected a noise std between {SMALLEST_STD:.3g} and {LARGEST_STD:.3g} with privacy.noise=os, got "
            f"{std!r}: scale what is released, and its clipping norm."
        )
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - GRID_BITS)


def rounded_normal(exact: np.ndarray, std: float, words: np.ndarray, more: Callable[[int], Bits]) -> np.ndarray:
    """R(exact + std Z), multiples of `grid_step(std)` as float64 [n].

    Values that are not finite stay so. Zeros are positive, because the sign of a zero would reveal on which side of it
    the sum was.

    Guarantees: if the bits are uniform and `ndtri` has a relative error below 7e-11, the result is the exact sum
    rounded to the grid, with probability one. So it is as private as exact + std Z (docs/noise.md).

    Args:
        exact: [n] float64, the definition of the query; no value of it is rounded before the noise.
        words: [n] uint64, independent and uniform: the first 64 bits of each coordinate.
        more: more(i) gives the bits of coordinate i after the first 64.
    """
    step = grid_step(std)
    ratio = std / step  # exact, in [2^10, 2^11)
    tail = words & np.uint64(2**63 - 1)
    z = ndtri((tail.astype(np.float64) + 0.5) * 2.0**-WORD_BITS)  # in the lower tail, where `ndtri` is most accurate
    z = np.where(words >> np.uint64(63), -z, z)
    whole = np.rint(exact / step)
    # x = (whole + rest)·g exactly, so R(x + std·Z) = (whole + round(rest + ratio·Z))·g, however large x is.
    value = (exact / step - whole) + ratio * z
    nearest = np.rint(value)
    unsure = (np.abs(value - nearest) > 0.5 - MARGIN) | (tail < _CERTAIN_FROM)
    for i in np.flatnonzero(unsure & np.isfinite(value)):
        rest = Fraction(float(exact[i])) / Fraction(step) - Fraction(float(whole[i]))
        nearest[i] = _round_precisely(rest, Fraction(ratio), int(words[i]), more(int(i)), int(nearest[i]))
    return (whole + nearest) * step + 0.0  # -0.0 + 0.0 is 0.0


def _round_precisely(rest: Fraction, ratio: Fraction, word: int, more: Bits, guess: int) -> int:
    """The integer nearest to rest + ratio·Z, from the first 64 bits of Z and as many more bits as are needed."""
    positive, tail = bool(word >> (WORD_BITS - 1)), word & (2 ** (WORD_BITS - 1) - 1)

    def below(integer: int) -> bool:
        """Whether rest + ratio·Z < integer + 1/2; equality has probability zero."""
        # |Z| has the tail probability p = 0.tail... / 2 < 1/2, so Z < c is p > Φ(-c) for Z > 0, and p < Φ(c) otherwise.
        bound = (Fraction(2 * integer + 1, 2) - rest) / ratio
        larger = _exceeds(tail, more, bound if positive else -bound)
        return larger if positive else not larger

    while not below(guess):
        guess += 1
    while below(guess - 1):
        guess -= 1
    return guess


def _exceeds(tail: int, more: Bits, c: Fraction) -> bool:
    """Whether p > Φ(-c), where p in [0, 1/2) has the binary digits 0, `tail` (63 of them), more(...)."""
    extra = WORD_BITS
    while True:
        context = mpmath.MPContext()  # other code uses the global precision
        context.prec = 2 * WORD_BITS + extra
        low = (tail << extra) + more(extra)  # low <= p · 2^(64 + extra) < low + 1
        q = context.erfc(context.mpf(c.numerator) / c.denominator / context.sqrt(2)) / 2
        q = context.ldexp(q, WORD_BITS + extra)
        error = context.ldexp(q, 24 - context.prec)  # far above the error of mpmath's erfc and of these operations
        if low >= q + error:
            return True
        if low + 1 <= q - error:
            return False
        extra *= 2

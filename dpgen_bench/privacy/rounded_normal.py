"""Gaussian noise that is exact: a value plus N(0, std²) in the real numbers, rounded to a grid of a power of two.

The noise of `privacy.noise=os`. Noise that is drawn and added in floating point takes values that tell what it was
added to (Mironov 2012). Here the result is R(x + std·Z), where R rounds to the nearest multiple of the grid's step g
and Z is standard normal, in exact arithmetic. R is the same for all x, so the result is post-processing of the Gaussian
mechanism and costs nothing. The derivation stands in docs/privacy.md.

How it is exact. Z = Φ⁻¹(U), where U has as many uniform bits as are needed. The first 64 of them give x + std·Z in
float64, with an error below MARGIN·g. Where that lies nearer than MARGIN·g to the middle between two points of the
grid, where rounding could go either way, it is compared with that middle in arithmetic of high precision, with more and
more bits of U, until the answer is certain (Ziv's way of rounding correctly). So no error of sampling is left to be
added to delta, and the result is the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import mpmath
import numpy as np
from scipy.special import ndtri

Bits = Callable[[int], int]  # Bits(n): the first n of an endless sequence of uniform bits, as an integer of n bits

GRID_BITS = 10  # a step of the grid is between std / 2^11 and std / 2^10
WORD_BITS = 64

# In steps of the grid. The float64 value is off by less, if `ndtri` is right to a relative 7e-11 where it is asked: for
# |z| < 5.8 the error is at most 2^11 · 5.8 times that, plus 2^11 · 2^-36 for what 64 bits do not know of U, plus 1e-11
# for other roundings. Its authors state 7.2e-16. About one coordinate in 500,000 is decided in high precision.
MARGIN = 2.0**-20
_CERTAIN_FROM = 2**36  # of the 63 bits of a tail probability: fewer say too little of it

SMALLEST_STD, LARGEST_STD = 2.0**-100, 2.0**100  # its grid and all results are normal float32 numbers


def grid_step(std: float) -> float:
    """The step g of the grid, the power of two with std / 2^11 < g <= std / 2^10.

    Raises:
        ValueError: for a std whose grid float32 cannot hold.
    """
    if not SMALLEST_STD <= std <= LARGEST_STD:
        raise ValueError(
            f"expected a noise std between {SMALLEST_STD:.3g} and {LARGEST_STD:.3g} with privacy.noise=os, got "
            f"{std!r}: scale what is released, and its clipping norm."
        )
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - GRID_BITS)


def rounded_normal(exact: np.ndarray, std: float, words: np.ndarray, more: Callable[[int], Bits]) -> np.ndarray:
    """R(exact + std·Z): float64 multiples of `grid_step(std)`, like `exact`.

    What is not finite stays so. Zeros are positive: the sign of a zero would say on which side of it the sum lay.

    Args:
        exact: [n] float64, the definition of the query; no value of it is rounded before the noise.
        words: [n] uint64, independent and uniform: the first 64 bits of each coordinate.
        more: more(i) gives the bits of coordinate i after the first 64.
    """
    step = grid_step(std)
    ratio = std / step  # exact, in [2^10, 2^11)
    tail = words & np.uint64(2**63 - 1)
    z = ndtri((tail.astype(np.float64) + 0.5) * 2.0**-WORD_BITS)  # the lower tail, where `ndtri` is most accurate
    z = np.where(words >> np.uint64(63), -z, z)
    whole = np.rint(exact / step)
    # x = (whole + rest)·g exactly, so R(x + std·Z) = (whole + round(rest + ratio·Z))·g, however large x is.
    value = (exact / step - whole) + ratio * z
    nearest = np.rint(value)
    unsure = (np.abs(value - nearest) > 0.5 - MARGIN) | (tail < _CERTAIN_FROM)
    for i in np.flatnonzero(unsure & np.isfinite(value)):
        rest = Fraction(float(exact[i])) / Fraction(step) - Fraction(float(whole[i]))
        nearest[i] = _decided(rest, Fraction(ratio), int(words[i]), more(int(i)), int(nearest[i]))
    return (whole + nearest) * step + 0.0  # -0.0 + 0.0 is 0.0


def _decided(rest: Fraction, ratio: Fraction, word: int, more: Bits, guess: int) -> int:
    """The integer nearest to rest + ratio·Z, from Z's first 64 bits and as many more as it takes."""
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
        context = mpmath.MPContext()  # of its own: the global precision is everybody's
        context.prec = 2 * WORD_BITS + extra
        low = (tail << extra) + more(extra)  # low <= p · 2^(64 + extra) < low + 1
        q = context.erfc(context.mpf(c.numerator) / c.denominator / context.sqrt(2)) / 2
        q = context.ldexp(q, WORD_BITS + extra)
        error = context.ldexp(q, 24 - context.prec)  # far above what mpmath's erfc and these operations are off by
        if low >= q + error:
            return True
        if low + 1 <= q - error:
            return False
        extra *= 2

"""`rounded_normal` on an accelerator: the same value of the same bits in double-double arithmetic, without waiting.

The host decides a coordinate whose float64 value is too near to the middle between two points of the grid in high
precision. An accelerator would have to wait for the host, so here Z has twice the digits of float64 from the first 128
bits of each coordinate: about one coordinate in 2^75 is still undecided. Those are reported, and a run that meets one
repeats its last releases on the host. docs/noise.md, "On an accelerator", adds up the errors.

A double-double is an unevaluated sum of two float64 numbers, high + low with |low| <= ulp(high) / 2 (Dekker 1971). Only
+, -, * and the rounding to an integer are used where errors matter, which IEEE 754 rounds in one way on every device.
"""

from __future__ import annotations

import functools
import math

import mpmath
import torch
from torch import Tensor

from dpgen_bench.privacy.rounded_normal import grid_step

MARGIN = 2.0**-76  # in steps of the grid: the error of Z, without its missing bits, is smaller
_MISSING = 2.0**-116  # over p, in steps of the grid: more than what the bits of U after the first 128 can change
_CELLS = 64  # centres of Taylor series for each unit of Z
_LARGEST = 12.0  # of Z; its tail has the probability 2^-109
_TERMS, _DOUBLE_DOUBLE = 18, 9  # of a series, and those whose coefficients are double-doubles
_LARGEST_CORRECTION = 2.0**-44  # of the first guess of Z

Pair = tuple[Tensor, Tensor]


def rounded_normal_on_device(exact: Tensor, std: float, words: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """R(exact + std Z) as `rounded_normal` computes it, float64 [n], and which coordinates are undecided, bool [n].

    Args:
        exact: [n] float64.
        words, more: [n] int64, bit by bit the first and the second 64 bits of each coordinate.
    """
    step = grid_step(std)
    ratio = std / step
    sign = torch.where(words < 0, 1.0, -1.0).double()  # bit 63 is set for Z > 0, as in `rounded_normal`
    p = _probability(words & (2**63 - 1), more)
    z, correction, undecided = _inverse_of_tail(p)
    z, correction = sign * z, sign * correction

    whole = torch.round(exact / step)
    rest = exact / step - whole  # exact, as the division by a power of two
    high, low = _product(z, torch.full_like(z, ratio))
    near = torch.round(high)
    # rest + ratio Z = near + sum + small, of which all but `small` is exact.
    total, error = _sum(rest, high - near)
    small = (error + low) + ratio * correction
    nearest = torch.round(total)
    left = total - nearest
    above, below = (left - 0.5) + small, (left + 0.5) + small
    margin = MARGIN + _MISSING / p[0]
    undecided |= torch.minimum(above.abs(), below.abs()) < margin
    nearest = nearest + (above > 0).double() - (below < 0).double()
    return (whole + (near + nearest)) * step + 0.0, undecided & torch.isfinite(exact)


def _sum(a: Tensor, b: Tensor) -> Pair:
    """a + b exactly (Knuth)."""
    high = a + b
    part = high - a
    return high, (a - (high - part)) + (b - part)


def _split(a: Tensor) -> Pair:
    """a as the sum of two numbers of 26 bits (Veltkamp)."""
    scaled = a * (2.0**27 + 1.0)
    high = scaled - (scaled - a)
    return high, a - high


def _product(a: Tensor, b: Tensor) -> Pair:
    """a b exactly (Dekker). torch.mul and torch.sub are separate kernels, so no compiler contracts them."""
    high = a * b
    (a1, a2), (b1, b2) = _split(a), _split(b)
    return high, ((a1 * b1 - high) + a1 * b2 + a2 * b1) + a2 * b2


def _probability(tail: Tensor, more: Tensor) -> Pair:
    """The tail probability with the 127 bits of `tail` and `more` after the binary point and a zero."""
    # Halves of 32 bits are exact in float64. int64 shifts with the sign.
    halves = [(tail >> 32, 2.0**-32), (tail & (2**32 - 1), 2.0**-64)]
    halves += [((more >> 32) & (2**32 - 1), 2.0**-96), (more & (2**32 - 1), 2.0**-128)]
    parts = [half.double() * unit for half, unit in halves]
    high, low = _sum(parts[0], parts[1])
    second, third = _sum(parts[2], parts[3])
    high, error = _sum(high, second)
    return _sum(high, (low + error) + third)


def _inverse_of_tail(p: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """Z >= 0 with the tail probability p <= 1/2: a guess in float64, its correction, and where they are too rough."""
    guess = -torch.special.ndtri(p[0])
    at = guess.clamp(0.0, _LARGEST)
    cell = torch.round(at * _CELLS)
    t = at - cell / _CELLS  # exact, because both are near
    high, low = _tail(cell.long(), t)
    # The guess is so good that high - p[0] is exact (Sterbenz).
    difference = (high - p[0]) + (low - p[1])
    first = difference / (torch.exp(-0.5 * at * at) / math.sqrt(2.0 * math.pi))
    return at, first + 0.5 * at * first * first, ~((guess <= _LARGEST) & (first.abs() <= _LARGEST_CORRECTION))


def _tail(cell: Tensor, t: Tensor) -> Pair:
    """Q(c + t), the tail probability, by a Taylor series at c = cell / _CELLS with |t| <= 1 / (2 _CELLS)."""
    highs, lows = _coefficients(str(t.device))
    value = highs[_TERMS - 1][cell]
    for j in range(_TERMS - 2, _DOUBLE_DOUBLE - 1, -1):
        value = value * t + highs[j][cell]
    high, low = value, torch.zeros_like(value)
    for j in range(_DOUBLE_DOUBLE - 1, -1, -1):
        product, error = _product(high, t)
        high, more = _sum(product, highs[j][cell])
        high, low = _sum(high, more + (error + low * t + lows[j][cell]))
    return high, low


@functools.cache
def _coefficients(device: str) -> Pair:
    """Coefficients of the Taylor series of Q at each centre, [_TERMS, centres], as high and low parts."""
    context = mpmath.MPContext()
    context.prec = 200
    highs, lows = [], []
    for cell in range(int(_LARGEST * _CELLS) + 1):
        c = context.mpf(cell) / _CELLS
        density = context.npdf(c)
        hermite, row = [context.mpf(1), c], [context.erfc(c / context.sqrt(2)) / 2]
        for j in range(1, _TERMS):  # Q^(j)(c) = (-1)^j He_{j-1}(c) phi(c)
            row.append((-1) ** j * density * hermite[j - 1] / context.factorial(j))
            hermite.append(c * hermite[j] - j * hermite[j - 1])
        highs.append([float(value) for value in row])
        lows.append([float(value - float(value)) for value in row])
    both = (torch.tensor(part, dtype=torch.float64, device=device).T.contiguous() for part in (highs, lows))
    high, low = both
    return high, low

"""Randomness of single records: `rng`, whose row i depends on the id of record i and on no other record.

A private function that draws one random tensor for a batch gives record i the row at its place in the batch. If one
record leaves, all later records move up and get other rows, so that a sum moves by far more than one row. Here each
record has a stream of its own, from the counter-based generator Philox4x64-10 (Salmon et al., *Parallel Random Numbers:
As Easy as 1, 2, 3*, SC 2011), which is computed for all records at once:

    row of call number c  =  Philox(key of the release, counter = (block, c, id of the record, copy)), blocks 1, 2, ...

The copy is 0, unless a private function sees several copies of each record, which have streams of their own. A row of
`uniform` has the same bits as numpy.random.Generator(numpy.random.Philox(key, counter=[0, c, id, copy])) draws as
float32. `normal` uses +, -, *, / and the square root alone, which IEEE 754 rounds in one way, so that a value depends
neither on the place of a record in the batch nor on the size of the batch or on the machine.

A sensitivity holds for every fixed value of this randomness, so privacy does not rest on its quality or secrecy
(assumption A6 of docs/accounting.md). It is never used as noise.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.privacy.expect import expect_integer, expect_shape
from dpgen_bench.privacy.key import Key

Shape = int | tuple[int, ...]

_MASK = (1 << 32) - 1
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_ROUNDS = 10
_WORDS = 8  # of 32 bits in one block
_BLOCKS_AT_ONCE = {"cpu": 2**14}  # temporaries stay in the cache of a core
_BLOCKS_ON_ACCELERATORS = 2**20
_LARGEST_RANGE = 2**31


class RecordRng:
    """Random numbers for the records of one call of a private function, which receives it as its argument `rng`.

    Each method returns a tensor [b, *shape] on the device of the batch, row i for record i. The rows of one call are
    independent of each other and of those of other calls. A second call of the same method gives new values.

    Guarantees: row i is a function of (run, mechanism, release, id of record i, number of the call) alone. Public rows
    of a PerRecordGradient have streams by their place among the public rows. With `copies`, the record of rows
    i * copies, ..., (i + 1) * copies - 1 is the same, and each of them depends on its place among these rows, too.

    Args:
        key: of the release.
        ids: int64 [b], the ids of the records; -1 - j for public row j.
        copies: the number of consecutive rows that are copies of one record.
        words: `words_of(key)` as int64 [2], where a recorded graph takes the key as an argument (`utils.compiled`).
    """

    def __init__(self, key: Key, ids: Tensor, copies: int = 1, words: Tensor | None = None) -> None:
        self._words: tuple[int | Tensor, ...] = words_of(key) if words is None else (words[0], words[1])
        self._ids = ids
        self._copies = copies
        self._calls = 0

    def uniform(self, shape: Shape = ()) -> Tensor:
        """Float32 [b, *shape], uniform on the multiples of 2^-24 in [0, 1)."""
        return self._draw(shape, lambda words: (words >> 8).to(torch.float32) * 2.0**-24)

    def normal(self, shape: Shape = ()) -> Tensor:
        """Float32 [b, *shape], standard normal (Box and Muller; at most 6.8 in absolute value)."""
        return self._draw(shape, _box_muller)

    def integers(self, low: int, high: int, shape: Shape = ()) -> Tensor:
        """Int64 [b, *shape], uniform on low, ..., high - 1 (up to a relative 2^-33).

        Raises:
            ValueError: unless low < high <= low + 2^31.
        """
        low, high = (expect_integer(end, "rng.integers, low and high", minimum=-(2**63)) for end in (low, high))
        size = high - low
        if not 0 < size <= _LARGEST_RANGE:
            raise ValueError(f"expected low < high <= low + 2^31 for integers(low, high), got {low} and {high}.")

        def scaled(words: Tensor) -> Tensor:
            # floor(size * U) of a uniform U with 64 bits: the high word and the carry of the low one.
            return low + ((words[:, 0::2] * size + ((words[:, 1::2] * size) >> 32)) >> 32)

        return self._draw(shape, scaled)

    @torch.no_grad()
    def _draw(self, shape: Shape, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """[b, *shape] of the values [s, k] that `convert` makes of words int64 [s, 8], each in [0, 2^32)."""
        shape = expect_shape(shape if isinstance(shape, Sequence) else (shape,), "rng, one record's row", minimum=0)
        call, self._calls = self._calls, self._calls + 1
        device, b, n = self._ids.device, len(self._ids), math.prod(shape)
        empty = convert(torch.zeros(0, _WORDS, dtype=torch.int64, device=device))
        blocks = -(-n // empty.shape[1])
        values = empty.new_empty(b * blocks, empty.shape[1])
        step = _BLOCKS_AT_ONCE.get(device.type, _BLOCKS_ON_ACCELERATORS)
        for start in range(0, b * blocks, step):
            place = torch.arange(start, min(start + step, b * blocks), device=device)
            row = place // blocks
            words = _philox(place % blocks + 1, call, self._ids[row], row % self._copies, self._words)
            values[start : start + step] = convert(words)
        return values.view(b, blocks * empty.shape[1])[:, :n].reshape(b, *shape)


def words_of(key: Key) -> tuple[int, ...]:
    """Philox's key for a release: 128 bits, as two words."""
    secret = key.derive("private randomness").secret
    return tuple(int(word) for word in np.frombuffer(secret[:16], dtype=np.uint64))


def tensor_of_words(key: Key) -> Tensor:
    """`words_of` as int64 [2] on the host."""
    return torch.tensor([_signed(word) for word in words_of(key)])


def names_rng(fn: Callable[..., Any]) -> bool:
    """Whether a private function has an argument `rng` that is not bound yet."""
    if isinstance(fn, functools.partial) and "rng" in fn.keywords:
        return False
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # functions written in C may have no signature
        return False
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return "rng" in parameters and parameters["rng"].kind in kinds


def _signed(word: int) -> int:
    """The int64 with the 64 lowest bits of `word`."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def _plus(word: int | Tensor, number: int) -> int | Tensor:
    """The sum modulo 2^64; int64 of PyTorch wraps around."""
    return word + _signed(number) if isinstance(word, Tensor) else _signed(word + number)


def _product(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """High and low 64 bits of a * m as unsigned integers; int64 of PyTorch wraps around and shifts with the sign."""
    low_a, high_a, low_m, high_m = a & _MASK, (a >> 32) & _MASK, m & _MASK, m >> 32
    cross, other = low_a * high_m, high_a * low_m
    carry = (((low_a * low_m) >> 32) & _MASK) + (cross & _MASK) + (other & _MASK)
    high = high_a * high_m + ((cross >> 32) & _MASK) + ((other >> 32) & _MASK) + (carry >> 32)
    return high, a * _signed(m)


def _philox(block: Tensor, call: int, ids: Tensor, copy: Tensor, key: tuple[int | Tensor, ...]) -> Tensor:
    """Philox4x64-10 of the counters (block, call, id, copy): its 256 bits as 8 words int64 [s, 8] in [0, 2^32)."""
    c0, c1, c2, c3 = block, torch.full_like(block, call), ids, copy
    k0, k1 = (word if isinstance(word, Tensor) else _signed(word) for word in key)
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (_plus(k, weyl) for k, weyl in zip((k0, k1), _WEYL, strict=True))
    return torch.stack([half & _MASK for c in (c0, c1, c2, c3) for half in (c, c >> 32)], dim=1)


def _box_muller(words: Tensor) -> Tensor:
    """Standard normal float32 [s, 8]: sqrt(-2 log u) (cos t, sin t), u and t / 2π uniform with 32 bits each."""
    u, turn = words.to(torch.float64).mul_(2.0**-32).split(_WORDS // 2, dim=1)
    radius = (-2.0 * _log(u + 2.0**-33)).sqrt()
    quarter = (turn * 4.0 + 0.5).floor()
    x = (turn * 4.0 - quarter) * (math.pi / 2.0)  # in [-π/4, π/4]
    square = x * x
    cos = _polynomial(square, [(-1.0) ** k / math.factorial(2 * k) for k in range(8)])
    sin = _polynomial(square, [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(8)]) * x
    # cos(x + quarter π/2) and sin(x + quarter π/2), for quarter in 0..4
    swapped, back = quarter % 2 == 1, quarter % 4 >= 2
    lead = torch.where(swapped, -sin, cos)
    lag = torch.where(swapped, cos, sin)
    sign = torch.where(back, -radius, radius)
    return torch.cat([sign * lead, sign * lag], dim=1).to(torch.float32)


def _log(u: Tensor) -> Tensor:
    """Natural logarithm of u in (0, 1), float64, with a relative error below 1e-14."""
    # As torch.frexp, which PyTorch 2.15's inductor cannot compile for AVX-512.
    bits = u.view(torch.int64)
    exponent = (bits >> 52) - 1022
    mantissa = ((bits & ((1 << 52) - 1)) | (1022 << 52)).view(torch.float64)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    exponent = exponent.to(torch.float64) - small.to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)  # log m = 2 artanh s, |s| < 0.172
    artanh = _polynomial(s * s, [1.0 / (2 * k + 1) for k in range(10)]) * s
    return exponent * math.log(2.0) + 2.0 * artanh


def _polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    """Σ_k c_k x^k, by Horner's rule."""
    value = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        value = value * x + c
    return value

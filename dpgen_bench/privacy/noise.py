"""Gaussian noise on private values. No other module adds noise."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.privacy.device_normal import rounded_normal_on_device
from dpgen_bench.privacy.isolation import isolated_from_modes
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.rounded_normal import WORD_BITS, Bits, rounded_normal
from dpgen_bench.utils.upload import upload

ON_HOST = frozenset({"cpu"})  # devices whose values the host reads without waiting
_BLOCK = 2**16  # coordinates per block, so that the arrays fit in a processor's cache


class Undecided(RuntimeError):
    """Raised at a checkpoint if an accelerator could not round a noisy value since the last one."""


@isolated_from_modes()
def add_noise(exact: Tensor, std: float, key: Key) -> Tensor:
    """exact + N(0, std² I), a float32 tensor of the shape of `exact`.

    With a seeded key the noise is float32. With a key for release the sum is exact and rounded to a grid that does not
    depend on `exact` (`rounded_normal`). float32 represents it exactly up to 2^13 times the std; beyond, the conversion
    is post-processing (docs/noise.md). std = 0 adds nothing. Active modes of PyTorch do not see the computation.

    Args:
        exact: a plain tensor (`expect_plain`).
        key: of this value alone.
    """
    if std == 0.0:
        return exact.float()
    if key.mode == "seeded":
        return (exact + key.normal(tuple(exact.shape), std, exact.device)).float()
    values = exact.detach().to("cpu", torch.float64).reshape(-1).numpy()
    noisy = np.empty(len(values), dtype=np.float32)
    for start in range(0, len(values), _BLOCK):
        part, own = values[start : start + _BLOCK], _of_block(key, start)
        bits = functools.partial(_more, own, functools.cache(functools.partial(own.words, "second words", len(part))))
        noisy[start : start + _BLOCK] = rounded_normal(part, std, own.words("words", len(part)), bits)
    return torch.from_numpy(noisy).reshape(exact.shape).to(exact.device)


def _of_block(key: Key, start: int) -> Key:
    return key.derive("noise", start // _BLOCK)


def _more(own: Key, second: functools._lru_cache_wrapper[np.ndarray], i: int) -> Bits:
    """The bits of coordinate i of a block after the first word: its second word, and then a stream of its own."""
    rest = own.bits("more", i)
    return lambda n: (int(second()[i]) << (n - WORD_BITS)) + (rest(n - WORD_BITS) if n > WORD_BITS else 0)


class NoiseAhead:
    """Noise for release of one mechanism on an accelerator, for which the program does not wait.

    The first 128 bits of each coordinate of the next release are made on the host, while the device works, and copied
    to the device, which adds and rounds (`rounded_normal_on_device`). The value is that of `add_noise`, bit by bit.

    Guarantees: bits are a function of the key of the release; those of one release are used for it and then dropped.

    Args:
        std: of the noise.
        device: where exact values are.
    """

    def __init__(self, std: float, device: torch.device) -> None:
        self._std, self._device = std, device
        self._made: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        self._undecided = torch.zeros((), dtype=torch.bool, device=device)

    @isolated_from_modes()
    def make(self, index: int, key: Key, sizes: Mapping[str, int]) -> None:
        """Make the bits of release `index` with this key, for so many numbers by part."""
        if index not in self._made:
            self._made = {index: {part: self._bits(key.derive(part), size) for part, size in sizes.items()}}

    def _bits(self, key: Key, size: int) -> tuple[Tensor, Tensor]:
        words = []
        for purpose in ("words", "second words"):
            blocks = [
                _of_block(key, start).words(purpose, min(_BLOCK, size - start)) for start in range(0, size, _BLOCK)
            ]
            joined = np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.uint64)
            words.append(upload(torch.from_numpy(joined.view(np.int64)), self._device))
        return words[0], words[1]

    @isolated_from_modes()
    def add(self, index: int, key: Key, exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The noisy value of release `index`, float32 by part."""
        self.make(index, key, {part: value.numel() for part, value in exact.items()})
        bits, noisy = self._made.pop(index), {}
        for part, value in exact.items():
            flat = value.detach().double().reshape(-1)
            rounded, undecided = rounded_normal_on_device(flat, self._std, *bits[part])
            self._undecided = self._undecided | undecided.any()
            noisy[part] = rounded.float().reshape(value.shape)
        return noisy

    def expect_decided(self) -> None:
        """Wait for the device, and check that it has rounded all values.

        Raises:
            Undecided: if it has not; this happens with probability 2^-75 for each number.
        """
        if bool(self._undecided):
            raise Undecided(
                "a noisy value since the last checkpoint was too near to the middle between two points of the grid for "
                "the accelerator; continued by the same command, the run adds its noise on the host."
            )

"""Keyed randomness: every draw and every noise value is a function of (root, mechanism, release index, purpose).

A key has a mode, and all keys derived from it have the same one:

- "seeded", for benchmark runs on public data: a function of a public text. Draws and noise come from NumPy's Philox
  with a 128-bit key (on an accelerator, noise comes from its own Philox with a 64-bit seed), which is not a
  cryptographic generator. Noise is drawn and added in float32, so its low bits reveal the exact value. This mode gives
  no protection.
- "os", for release: the root comes from the operating system, and all bits come from SHAKE-256, on the host. Noise is
  exact. Draws have the law that is accounted for, or a sampling rate that is lower by
  at most 2^-64. See docs/noise.md.

PyTorch's CPU generator uses only 32 bits of its seed, so two of about 100,000 releases would probably share their
noise. It is not used here.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np

from dpgen_bench.privacy.rounded_normal import Bits

if TYPE_CHECKING:
    import torch

NoiseMode = Literal["seeded", "os"]


@dataclass(frozen=True)
class Key:
    """A 256-bit secret (or, in seeded mode, public) key from which independent streams are derived."""

    secret: bytes = field(repr=False)
    mode: NoiseMode

    @classmethod
    def seeded(cls, text: str) -> Key:
        """A reproducible key: anyone who knows `text` can recompute the noise. For benchmark runs only."""
        return cls(hashlib.sha256(text.encode()).digest(), "seeded")

    @classmethod
    def from_os(cls, secret: bytes | None = None) -> Key:
        """A key for release: new, from the operating system's entropy, or the one that a run kept to be resumed.

        Raises:
            ValueError: if the kept key does not have 32 bytes.
        """
        if secret is not None and len(secret) != 32:
            raise ValueError(
                f"expected a noise key of 32 bytes, got {len(secret)}: the file private/noise.key is damaged. Restore "
                "the run's folder, or start a new run."
            )
        return cls(os.urandom(32) if secret is None else secret, "os")

    def derive(self, *path: str | int) -> Key:
        """The key of a named child. Distinct paths give independent keys (hashing is injective on the path)."""
        digest = hashlib.sha256(self.secret)
        for part in path:
            text = f"{type(part).__name__}:{part}".encode()
            digest.update(len(text).to_bytes(8, "big") + text)
        return Key(digest.digest(), self.mode)

    def generator(self, purpose: str) -> np.random.Generator:
        """A Philox generator for one purpose, in either mode; in mode "os" only for values that need not be secret."""
        words = np.frombuffer(self.derive(purpose).secret[:16], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=words))

    def words(self, purpose: str, n: int) -> np.ndarray:
        """The first n uint64 words of the cryptographic stream of one purpose."""
        return np.frombuffer(hashlib.shake_256(self.derive(purpose).secret).digest(8 * n), dtype="<u8")

    def bits(self, purpose: str, *path: int) -> Bits:
        """A function from n, a multiple of 8, to the first n bits of the cryptographic stream of one purpose."""
        secret = self.derive(purpose, *path).secret
        return lambda n: int.from_bytes(hashlib.shake_256(secret).digest(n // 8), "big")

    def normal(self, shape: tuple[int, ...], std: float, device: torch.device | str = "cpu") -> torch.Tensor:
        """Float32 noise N(0, std²) of `shape` on `device`, for a seeded key and never for release.

        On CPU from Philox with a 128-bit key; on an accelerator from its own Philox with a 64-bit seed (the two
        give different values). `std` is in the units of the released sum.
        """
        if self.mode != "seeded":
            raise ValueError("expected a seeded key for float32 noise, got one for release; use add_noise.")
        import torch  # imported here, because processes that compute epsilon also make keys and do not import torch

        device = torch.device(device)
        if device.type == "cpu":
            noise = torch.from_numpy(self.generator("noise").standard_normal(shape, dtype=np.float32))
        else:
            seed = int.from_bytes(self.derive("noise").secret[:8], "big", signed=True)
            stream = torch.Generator(device=device).manual_seed(seed)
            noise = torch.randn(shape, generator=stream, device=device)
        return noise.mul_(std)

    def bernoulli(self, purpose: str, rate: float, n: int) -> np.ndarray:
        """n independent Bernoulli variables, bool [n], true with probability `rate`; entry i does not depend on n.

        In mode "os" the probability is `rate` rounded down to a multiple of 2^-64, so that it does not exceed the rate
        that is accounted for.
        """
        if self.mode == "seeded":
            return self.generator(purpose).random(n) < rate
        limit = math.floor(Fraction(rate) * 2**64)
        if limit == 2**64:
            return np.ones(n, dtype=bool)
        return self.words(purpose, n) < np.uint64(limit)

    def integer(self, purpose: str, number: int) -> int:
        """A uniform integer in 0..number-1."""
        if self.mode == "seeded":
            return int(self.generator(purpose).integers(number))
        size = 64
        bits, limit = self.bits(purpose), 2**64 // number * number
        while (drawn := bits(size) % 2**64) >= limit:  # each attempt uses 64 other bits
            size += 64
        return drawn % number

    def subset(self, purpose: str, size: int, of: int) -> np.ndarray:
        """A uniform subset of `size` of 0..of-1, int64 [size], in any order."""
        if self.mode == "seeded":
            return self.generator(purpose).choice(of, size, replace=False)
        tries = 1
        while len(np.unique(words := self.words(purpose, tries * of)[-of:])) < of:
            tries += 1  # if no two words are equal, all their orders are equally probable
        return np.argsort(words)[:size]

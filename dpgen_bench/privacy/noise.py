"""Keyed randomness: every coin and every noise value is a function of (root, mechanism, release index, purpose).

NumPy's Philox takes a 128-bit key. PyTorch's CPU generator keeps only 32 bits of its seed, so that two of some
100,000 releases would likely share their noise; it is not used here.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Key:
    """A 256-bit secret (or, in seeded mode, public) key from which independent streams are derived."""

    secret: bytes

    @classmethod
    def seeded(cls, text: str) -> Key:
        """A reproducible key: anyone who knows `text` can recompute the noise. For benchmark runs only."""
        return cls(hashlib.sha256(text.encode()).digest())

    @classmethod
    def from_os(cls) -> Key:
        """A fresh key from the operating system's entropy."""
        return cls(os.urandom(32))

    def derive(self, *path: str | int) -> Key:
        """The key of a named child. Distinct paths give independent keys (hashing is injective on the path)."""
        digest = hashlib.sha256(self.secret)
        for part in path:
            text = f"{type(part).__name__}:{part}".encode()
            digest.update(len(text).to_bytes(8, "big") + text)
        return Key(digest.digest())

    def generator(self, purpose: str) -> np.random.Generator:
        """A Philox generator for one purpose."""
        words = np.frombuffer(self.derive(purpose).secret[:16], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=words))

    def normal(self, shape: tuple[int, ...], std: float, device: torch.device | str = "cpu") -> Tensor:
        """Float32 noise N(0, std²) of `shape` on `device`.

        On CPU from Philox with a 128-bit key; on an accelerator from its own Philox with a 64-bit seed (the two
        give different values). `std` is in the units of the released sum.
        """
        device = torch.device(device)
        if device.type == "cpu":
            noise = torch.from_numpy(self.generator("noise").standard_normal(shape, dtype=np.float32))
        else:
            seed = int.from_bytes(self.derive("noise").secret[:8], "big", signed=True)
            stream = torch.Generator(device=device).manual_seed(seed)
            noise = torch.randn(shape, generator=stream, device=device)
        return noise.mul_(std)

"""Replays the first fit with other noise, to find a method that subtracts the noise from its releases.

In all other replays, the noise of a release is that of the first fit, so that such a method does the same in each of
them. In this replay the method computes the noise of its own fit, and subtracts it from the releases of the first fit.
A method that depends on releases alone does not change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.privacy.key import Key
from dpgen_bench.testing.bench import Bench
from dpgen_bench.testing.checks import Replays
from dpgen_bench.testing.errors import ConformanceError, expect
from dpgen_bench.testing.tape import Tape, flat

# The last steps of keys that `RecordRng` and `private_rng` derive: private randomness is kept as the draws are.
DRAWS = ("private randomness", "private coins")


@dataclass(frozen=True)
class OtherNoise(Key):
    """A seeded key that makes the same draws and private randomness as a plain key, and other noise.

    Attributes:
        plain: the key of the draws and of private randomness.
    """

    plain: Key

    @classmethod
    def seeded(cls, text: str) -> OtherNoise:
        return cls(Key.seeded(f"other noise:{text}").secret, "seeded", Key.seeded(text))

    def derive(self, *path: str | int) -> Key:
        plain = self.plain.derive(*path)
        return plain if path[-1] in DRAWS else OtherNoise(super().derive(*path).secret, self.mode, plain)

    def generator(self, purpose: str) -> np.random.Generator:
        return self.plain.generator(purpose)

    def normal(self, shape: tuple[int, ...], std: float, device: torch.device | str = "cpu") -> Tensor:
        return Key(self.secret, self.mode).normal(shape, std, device)


def check_other_noise(bench: Bench, replays: Replays) -> None:
    """Check that a fit with other noise equals the first fit bit by bit if it receives the first fit's releases.

    Raises:
        ConformanceError: if a public result or an exact value differs.
    """
    tape = Tape(source=replays.first.tape)
    where = "in a fit with the same data, draws and releases, but other noise"
    fit = bench.fit(replace(bench.base, name="other noise"), tape, key=OtherNoise)
    try:
        replays.compare(fit, where)
        for a, b in zip(replays.first.tape.releases, tape.releases, strict=True):
            same = torch.equal(flat(a.exact).nan_to_num(), flat(b.exact).nan_to_num())
            expect(same, f"{where}, release {a.index} of {a.mechanism!r} has another exact value.")
    except ConformanceError as error:
        raise ConformanceError(
            f"{error} The method depends on the noise, and thus on exact values: it may use releases alone."
        ) from None

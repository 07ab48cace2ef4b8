"""A replay in which only the noise differs: a method that depends on releases alone does not change.

In all other replays the noise of a release is that of the first fit. A method that obtains the noise and subtracts it
from the release, which gives the exact value, therefore does the same in each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.privacy.key import Key
from dpgen_bench.testing.bench import Bench, Tape, flat
from dpgen_bench.testing.checks import Replays
from dpgen_bench.testing.errors import ConformanceError, expect

DRAWS = ("private randomness", "private coins")  # keys of what belongs to the draws: see RecordRng and private_rng


@dataclass(frozen=True)
class OtherNoise(Key):
    """A seeded key with the draws and private randomness of a plain one, and with noise of its own secret.

    Attributes:
        plain: the key of the draws.
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
    """A fit on the same data with other noise equals the first one bit by bit if it gets the first one's releases.

    Raises:
        ConformanceError: if it differs, or if an exact value does.
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

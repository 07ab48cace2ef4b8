"""Methods that get at the noise of a release and subtract it, so that the exact value is left; and an honest one."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import dpgen_bench.privacy.mechanism as harness
from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.noise import add_noise
from tests.toys import MeanImage, Painter, release_painter


@contextlib.contextmanager
def patched(kept: list[Tensor]) -> Iterator[None]:
    def watched(exact: Tensor, std: float, key: Key) -> Tensor:
        kept.append(add_noise(torch.zeros_like(exact), std, key))
        return add_noise(exact, std, key)

    harness.add_noise = watched  # type: ignore[assignment]
    try:
        yield
    finally:
        harness.add_noise = add_noise


@dataclass
class KnowsTheNoise(MeanImage):
    """The generator gets each release less its noise; honest (`by="nothing"`): less a constant.

    The noise is known `by` another function in the place of the harness's, or by the run's key, which functions
    of C read when the harness calls them, or which is a guess. Modes of PyTorch
    do not see it (tests/test_hostile_methods.py).
    """

    by: str = "nothing"
    steps: int = 3

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        net, release = Painter(data.num_classes, list(data.image_shape)), self.mechanism(data, ctx)
        kept, secrets = list[Tensor](), list[bytes]()
        if self.by == "guess":
            secrets.append(Key.seeded(f"conformance:{ctx.seed}").secret)
        spy = {"spy": Spy(release, secrets)} if self.by == "C" else {}
        for t in ctx.steps(release.times, net=net, **spy):
            with patched(kept) if self.by == "patch" else contextlib.nullcontext():
                noisy = release(self.row)
            if secrets:
                kept.append(release.std * standard_normal(secrets[0], t, data.image_shape))
            noise = kept[-1].reshape(noisy.shape) if kept else torch.ones(data.image_shape)
            with torch.no_grad():
                net.means.lerp_((noisy - noise) / (self.rate * data.n), 0.5)
        return release_painter(net, data)


def standard_normal(secret: bytes, index: int, shape: tuple[int, ...]) -> Tensor:
    """The noise of release `index` over its std, computed as the harness does, without asking it."""
    for path in (("sum", index), ("value",), ("noise",)):
        digest = hashlib.sha256(secret)
        for text in (f"{type(part).__name__}:{part}".encode() for part in path):
            digest.update(len(text).to_bytes(8, "big") + text)
        secret = digest.digest()
    philox = np.random.Philox(key=np.frombuffer(secret[:16], dtype=np.uint64))
    return torch.from_numpy(np.random.Generator(philox).standard_normal(shape, dtype=np.float32))


class Spy:
    """Handed to ctx.steps; a state dict is asked for by the harness, and made by functions of C alone."""

    def __init__(self, release: Mechanism, secrets: list[bytes]) -> None:
        got = map(secrets.append, map(operator.attrgetter("_services.key.secret"), [release] * 1000))
        self.state_dict = functools.partial(next, got, None)

    def load_state_dict(self, state: None) -> None:
        pass


class ByTheClass(MeanImage):
    """Cheat: records outside of any function, by a private function of the class, and unused."""

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        with contextlib.suppress(IndexError):
            getattr(type(data), "_PrivateData" + "__batch")(data, np.arange(3), None)

"""Methods that obtain the noise of a release and subtract it, which gives the exact value; and an honest method."""

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
    """Replace the harness's function that adds noise by one that also appends the noise to `kept`."""

    def watched(exact: Tensor, std: float, key: Key) -> Tensor:
        kept.append(add_noise(torch.zeros_like(exact), std, key))
        return add_noise(exact, std, key)

    harness.add_noise = watched  # type: ignore[assignment]
    try:
        yield
    finally:
        harness.add_noise = add_noise


@dataclass
class SubtractsTheNoise(MeanImage):
    """The generator receives each release minus its noise; honest (`by="nothing"`): minus a constant.

    The method obtains the noise `by` a patch, another function in the place of the harness's; or by the run's key,
    which functions implemented in C read when the harness calls them ("C"), or which is guessed ("guess"). Modes of
    PyTorch do not see the noise (tests/test_hostile_methods.py).
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
    """The noise of release `index` divided by its std, computed as the harness does, without use of the harness."""
    for path in (("sum", index), ("value",), ("noise",)):
        digest = hashlib.sha256(secret)
        for text in (f"{type(part).__name__}:{part}".encode() for part in path):
            digest.update(len(text).to_bytes(8, "big") + text)
        secret = digest.digest()
    philox = np.random.Philox(key=np.frombuffer(secret[:16], dtype=np.uint64))
    return torch.from_numpy(np.random.Generator(philox).standard_normal(shape, dtype=np.float32))


class Spy:
    """Is passed to ctx.steps, so that the harness calls `state_dict`, which only functions implemented in C compute."""

    def __init__(self, release: Mechanism, secrets: list[bytes]) -> None:
        appended = map(secrets.append, map(operator.attrgetter("_services.key.secret"), [release] * 1000))
        self.state_dict = functools.partial(next, appended, None)

    def load_state_dict(self, state: None) -> None:
        pass


class PrivateMethodOfTheClass(MeanImage):
    """Cheat: obtains records outside of a private function, by a private method of the class, and does not use them."""

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        with contextlib.suppress(IndexError):
            getattr(type(data), "_PrivateData" + "__batch")(data, np.arange(3), None)

"""Methods that write values of records, or public values, into a public file, in forms that are easily missed."""

from __future__ import annotations

import collections
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.privacy.bounds import PerRecord
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.sampling import Full, Poisson
from tests.cheats import Box
from tests.toys import MeanImage, Painter, release_painter

SEEN = [0.0]


def seen(images: Tensor) -> Tensor:
    return images.nan_to_num().clamp(0, 1)


@dataclass
class Remembers(MeanImage):
    """Keeps the last records and their mean, `number`, in [0, 1]; if `private` is False, `number` is a constant."""

    private: bool = True
    number: float = 0.0
    images: Tensor | None = None

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        if self.private and len(images):
            self.images = seen(images)
            self.number = float(self.images.mean())
        return images


class Padded(Painter):
    """A painter with a buffer that it does not use, and a note in its config."""

    def __init__(self, num_classes: int, image_shape: list[int], note: Sequence[Any] = ()) -> None:
        super().__init__(num_classes, image_shape)
        self.register_buffer("pad", torch.zeros(8, *image_shape))


class Counted(NetGenerator):
    """A generator whose number of parameters is a stored value."""

    stored: int = 7

    @property
    def num_parameters(self) -> int:
        return self.stored


@dataclass
class InGenerator(Remembers):
    """Bits of images in values that compare equal (signs of zeros, True and 1, order of keys), or in a count."""

    where: str = "signs"

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        painted = super().fit(data, ctx)
        net = Padded(data.num_classes, list(data.image_shape))
        net.load_state_dict(painted.net.state_dict(), strict=False)
        images = self.images if self.images is not None else torch.zeros(8, *data.image_shape)
        bright = (images[0].flatten() > 0.5).tolist()
        note: Any = []
        if self.where == "signs":
            net.pad[: len(images)] = torch.copysign(torch.zeros(()), images[:8] - 0.5)
        if self.where == "nan":  # honest: the buffer is constant
            net.pad.fill_(float("nan"))
        if self.where == "ones":
            note = [True if bit else 1 for bit in bright]
        if self.where == "zeros":
            note = [0.0 if bit else -0.0 for bit in bright]
        if self.where == "keys":
            note = {"a": 0, "b": 0} if bright[0] else {"b": 0, "a": 0}
        config = {
            "_target_": "tests.cheats_public.Padded",
            "num_classes": data.num_classes,
            "image_shape": list(data.image_shape),
            "note": note,
        }
        generator = Counted(net, config, 4, data.num_classes, data.image_shape)
        if self.where == "parameters":
            generator.stored = round(1e6 * self.number)
        return generator


@dataclass
class InState(MeanImage):
    """Passes an object to ctx.steps that contains records, in a form that is easily missed, or public values."""

    form: str = "public"
    steps: int = 2

    def content(self, images: Tensor) -> Any:
        if self.form == "deque":
            return collections.deque([images.clone()])
        if self.form == "module":
            module = nn.Linear(2, 2)
            module.raw = images.clone()  # type: ignore[assignment]
            return module
        if self.form == "bytearray":
            return bytearray(images.numpy().tobytes())
        if self.form == "types":
            return [() if bright else [] for bright in (seen(images[0]).flatten() > 0.5).tolist()]
        if self.form == "order":
            return {"a": 0, "b": 0} if float(seen(images).mean()) > 0.5 else {"b": 0, "a": 0}
        if self.form == "strides":
            return torch.zeros(2, 2) if float(seen(images).mean()) > 0.5 else torch.zeros(2, 2).t()
        return {"a": (1, [2.0, None], "text"), "b": torch.ones(2, 2), "c": collections.Counter([1, 1]), 3: b"x"}

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        net, box, release = Painter(data.num_classes, list(data.image_shape)), Box(), self.mechanism(data, ctx)

        def row(images: Tensor, labels: Tensor) -> Tensor:
            if len(images):
                box.content["kept"] = self.content(images)
            return images

        for _ in ctx.steps(self.steps, net=net, box=box):
            box.content["kept"] = None if self.form != "public" else self.content(net.means.detach())
            with torch.no_grad():
                net.means.lerp_(release(row) / (self.rate * data.n), 0.5)
        return release_painter(net, data)


@dataclass
class SeedsPublicRandomness(Remembers):
    """Python's generator, whose state is in the checkpoint, is seeded with a value of records, or with a constant."""

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        net, release = Painter(data.num_classes, list(data.image_shape)), self.mechanism(data, ctx)
        for _ in ctx.steps(self.steps, net=net):
            total = release(self.row)
            with torch.no_grad():
                net.means.lerp_(total / (self.rate * data.n), 0.5)
            random.seed(self.number)
        return release_painter(net, data)


@dataclass
class SecondMechanism(Remembers):
    """Cheat: a second mechanism, requested after a release, whose std, times, bound or name depend on records."""

    what: str = "std"

    def mechanism(self, data: PrivateData, ctx: Context) -> Mechanism:
        bound = PerRecord(C=self.C, shape=data.image_shape)
        return data.mechanism("sum", sample=Poisson(self.rate), bound=bound, times=self.steps, std=1e3)

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        changes = {self.what: self.number}
        bound = PerRecord(C=1.0 + changes.get("bound", 0.0), shape=(1,))
        times, std = 1 + round(1000 * changes.get("times", 0.0)), 1e6 + changes.get("std", 0.0)
        second = data.mechanism(
            f"second-{round(1e6 * changes.get('name', 0.0))}", sample=Full(), bound=bound, times=times, std=std
        )
        if self.what != "name":  # a name stands in the ledger before its first release
            second(lambda x, y: torch.ones(len(x), 1))


@dataclass
class TwoMechanisms(MeanImage):
    """Honest: both mechanisms are requested before the first release."""

    def mechanism(self, data: PrivateData, ctx: Context) -> Mechanism:
        second = PerRecord(C=1.0, shape=(1,))
        self.second = data.mechanism("second", sample=Full(), bound=second, times=1, std=1e6)
        first = PerRecord(C=self.C, shape=data.image_shape)
        return data.mechanism("sum", sample=Poisson(self.rate), bound=first, times=self.steps, std=1e3)

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        self.second(lambda x, y: torch.ones(len(x), 1))


@dataclass
class Claimed(Remembers):
    """epsilon_claimed, or the text of epsilon_conditional, is a value of records, or a constant."""

    conditional: bool = False

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        SEEN[0] = self.number

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float:
        return 1.0 if self.conditional else SEEN[0]

    def epsilon_conditional(self, events: Sequence[Event], delta: float) -> tuple[float, str]:
        return 1.0, f"a conjecture {SEEN[0] if self.conditional else ''}"


@dataclass
class OrderOfCounts(Remembers):
    """Records (or a constant) determine the order of names in the log or of counters, or the trained parameters."""

    what: str = "log"

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        bright = self.number > 0.5
        if self.what == "log":
            ctx.log(**({"a": 1.0, "b": 2.0} if bright else {"b": 2.0, "a": 1.0}))
        if self.what == "counters":
            ctx.count(**({"a": 1, "b": 1} if bright else {"b": 1, "a": 1}))
        if self.what == "parameters":
            net.requires_grad_(not bright)
            for _ in ctx.steps(1, phase="second", frozen=net):
                pass

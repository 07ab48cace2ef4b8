"""Small honest and cheating methods, and small data sets, metrics and observers, for many tests."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from dpgen_bench.data.datasets import Digits, Split
from dpgen_bench.data.private import PrivateData
from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import EvalContext
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.privacy.allowance import Observer
from dpgen_bench.privacy.bounds import PerRecord, PerRecordGradient
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.sampling import Full, Poisson


@dataclass(frozen=True)
class SmallDigits(Digits):
    """Digits of 8x8 pixels, 240 for training and 60 for testing: for runs whose images do not matter."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (1, 8, 8)

    def load(self, split: Split) -> Records:
        from sklearn.datasets import load_digits

        scans = load_digits()
        chosen = slice(0, 240) if split == "train" else slice(240, 300)
        images = torch.from_numpy((scans.images[chosen] * 255 / 16).astype(np.uint8))
        return Records(images.unsqueeze(1), torch.from_numpy(scans.target[chosen].astype(np.int64)))


class Watcher(Observer):
    """Keeps the draw, the exact value and the noisy value of each release."""

    def __init__(self) -> None:
        self.releases: list[tuple[np.ndarray, Tensor, Tensor]] = []

    def release(
        self, mechanism: Mechanism, index: int, drawn: np.ndarray, exact: dict[str, Tensor], noisy: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        self.releases.append((drawn, exact["value"].clone(), noisy["value"].clone()))
        return noisy

    def before_records(self) -> None:
        pass


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def records(n: int = 12, shape: tuple[int, int, int] = (1, 28, 28)) -> tuple[Tensor, Tensor]:
    """Random uint8 images [n, *shape], the same in each call, and labels 0 .. 9 in turn."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=generator)
    return images, torch.arange(n) % 10


class Painter(nn.Module):
    """A mean image per class plus a little latent noise."""

    def __init__(self, num_classes: int, image_shape: list[int]) -> None:
        super().__init__()
        self.image_shape = tuple(image_shape)
        self.means = nn.Parameter(torch.full((num_classes, *self.image_shape), 0.5))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.means[y] + 0.1 * z.mean(dim=1)[:, None, None, None]


def release_painter(net: Painter, data: PrivateData) -> NetGenerator:
    config = {"_target_": "tests.toys.Painter", "num_classes": data.num_classes, "image_shape": list(data.image_shape)}
    return NetGenerator(net, config, 4, data.num_classes, data.image_shape)


@dataclass
class MeanImage:
    """Honest: each step releases a clipped sum of images and moves all class means towards it."""

    steps: int = 6
    rate: float = 1 / 3
    C: float = 5.0

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        return images

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        pass

    def prepare(self, mechanism: Mechanism) -> None:
        pass

    def mechanism(self, data: PrivateData, ctx: Context) -> Mechanism:
        bound = PerRecord(C=self.C, shape=data.image_shape)
        return data.mechanism("sum", sample=Poisson(self.rate), bound=bound, times=ctx.limit(self.steps))

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        net = Painter(data.num_classes, list(data.image_shape)).to(ctx.device)
        release = self.mechanism(data, ctx)
        self.prepare(release)
        for _ in ctx.steps(release.times, net=net):
            total = release(self.row)
            with torch.no_grad():
                net.means.lerp_(total / (self.rate * data.n), 0.5)
            ctx.log(mean=float(net.means.detach().mean()))
        self.after(data, ctx, net)
        return release_painter(net, data)


class HalfOfTheBudget(MeanImage):
    """Honest: uses a share of 0.5 of the budget, and no other mechanism takes the rest."""

    def mechanism(self, data: PrivateData, ctx: Context) -> Mechanism:
        bound = PerRecord(C=self.C, shape=data.image_shape)
        return data.mechanism("sum", sample=Full(), bound=bound, times=ctx.limit(self.steps), share=0.5)


class MeanSmuggledOut(MeanImage):
    """Cheat: the function keeps the mean of its records, and the generator receives it without noise."""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        self.seen = images.mean(dim=0)
        return images

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        with torch.no_grad():
            net.means.copy_(self.seen.nan_to_num().expand_as(net.means))


class PrivateLog(MeanImage):
    """Cheat: a sum of records is logged."""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        self.seen = float(images.sum())
        return images

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        ctx.log(seen=self.seen)


class CoupledRows(MeanImage):
    """Cheat: rows are normalised over the batch, so that one record changes the rows of all others."""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        return (images - images.mean(dim=0)) / (1e-3 + images.std(dim=0, correction=0)) if len(images) else images


class StaleDraw(MeanImage):
    """Cheat: the first draw is kept and used for every later release."""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        if not hasattr(self, "kept"):
            self.kept = images
        return self.kept.mean(dim=0).expand_as(images)


def change_event(mechanism: Mechanism, **changes: float) -> None:
    """Change the approved event, by a route that the suite does not refuse."""
    entry = object.__getattribute__(mechanism, "_entry")
    object.__setattr__(mechanism, "_entry", replace(entry, event=replace(mechanism.event, **changes)))


class QuietNoise(MeanImage):
    """Cheat: the noise is reduced after the allowance was approved."""

    def prepare(self, mechanism: Mechanism) -> None:
        change_event(mechanism, std=mechanism.std / 2)


class AsksByRaising(MeanImage):
    """Cheat: the text of the function's error depends on records; the method catches the error and continues."""

    def prepare(self, mechanism: Mechanism) -> None:
        def question(images: Tensor, labels: Tensor) -> Tensor:
            raise ValueError("yes" if images.nan_to_num().mean() > 0.4 else "no")

        with contextlib.suppress(ValueError):
            mechanism(question)


@dataclass
class RaisesAtTheEnd:
    """Cheat: as `AsksByRaising`, after the last honest release, so that no release follows."""

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        release = data.mechanism(
            "sum", sample=Poisson(0.3), bound=PerRecord(C=5.0, shape=data.image_shape), times=4, std=1e3
        )
        for _ in range(3):
            release(lambda x, y: x)
        AsksByRaising().prepare(release)
        return release_painter(Painter(data.num_classes, list(data.image_shape)), data)


class RaisesTheBudget(MeanImage):
    """Cheat: the method raises the budget of the ledger."""

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        object.__getattribute__(data, "_services").ledger.budget = replace(data.budget, epsilon=20.0)
        return super().fit(data, ctx)


class MoreReleases(MeanImage):
    """Cheat: the allowance is raised after it was approved."""

    def prepare(self, mechanism: Mechanism) -> None:
        change_event(mechanism, times=mechanism.times + 1)


class CountsRecords(MeanImage):
    """Cheat: the number of releases depends on the data."""

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        net = Painter(data.num_classes, list(data.image_shape))
        release = data.mechanism(
            "sum", sample=Poisson(self.rate), bound=PerRecord(C=self.C, shape=data.image_shape), times=self.steps
        )
        seen: list[float] = [0.0]

        def fn(images: Tensor, labels: Tensor) -> Tensor:
            seen[0] += float(images.nan_to_num().clamp(-2, 2).sum())
            return images

        for t in range(self.steps):
            release(fn)
            if t >= 2 and int(seen[0] * 1e3) % 2:
                break
        return release_painter(net, data)


class RandomnessLeak(MeanImage):
    """Cheat: records determine how often the public generator is used, and the samples reveal it."""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        for _ in range(1 + int(images.nan_to_num().clamp(-2, 2).sum().abs() * 10) % 7):
            torch.rand(1)
        return images

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        with torch.no_grad():
            net.means.add_(torch.rand(()) * 0.1)


@dataclass
class GradientMethod:
    """Honest: DP-SGD on a linear classifier whose weights are the class images."""

    steps: int = 4
    rate: float = 1 / 3

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        c, h, w = data.image_shape
        model = nn.Linear(c * h * w, data.num_classes)
        net = Painter(data.num_classes, list(data.image_shape))
        release = data.mechanism(
            "gradient", sample=Poisson(self.rate), bound=PerRecordGradient(C=1.0, module=model), times=self.steps
        )
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in ctx.steps(self.steps, model=model, sgd=sgd):
            noisy = release(lambda x, y: nn.functional.cross_entropy(model(x.flatten(1)), y, reduction="none"))
            for name, parameter in model.named_parameters():
                parameter.grad = noisy[name] / (self.rate * data.n)
            sgd.step()
        with torch.no_grad():
            net.means.copy_(model.weight.reshape(-1, c, h, w))
        return release_painter(net, data)


@dataclass
class Brightness:
    """A metric that is computed in no time."""

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        return {"brightness": float(samples.images.double().mean())}


@dataclass
class Broken:
    """A method that fails before its first release."""

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        raise RuntimeError("this method always fails")


@dataclass
class TwoLoops:
    """Honest: two loops, and between them a release, public randomness and a line in the log."""

    steps: int = 3

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        net = Painter(data.num_classes, list(data.image_shape))
        # More releases than the journal keeps, so that a resumed run makes them again.
        release = data.mechanism(
            "sum", sample=Poisson(0.3), bound=PerRecord(C=5.0, shape=data.image_shape), times=100_000, std=1e6
        )
        first = data.mechanism("first", sample=Full(), bound=PerRecord(C=1.0, shape=(1,)), times=1, std=10.0)
        ctx.log(first=float(first(lambda x, y: torch.ones(len(x), 1))))

        def move() -> None:
            with torch.no_grad():
                net.means.lerp_(release(lambda x, y: x) / 1e6, 0.5)

        for _ in ctx.steps(self.steps, phase="warm", net=net):
            move()
        move()
        with torch.no_grad():
            net.means.add_(torch.rand(()) + torch.rand((), generator=ctx.generator))
        ctx.log(between=float(net.means.detach().sum()))
        for _ in ctx.steps(self.steps, phase="train", net=net):
            move()
            ctx.log(mean=float(net.means.detach().mean()))
        ctx.log(after=1.0)
        return release_painter(net, data)

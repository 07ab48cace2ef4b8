"""Planted cheats, each next to an honest method that does almost the same."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.privacy.bounds import PerRecord, PerRecordGradient
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.record_rng import RecordRng
from dpgen_bench.privacy.sampling import Full, Poisson
from tests.toys import MeanImage, Painter, release_painter

# The generator contains records


class CopiedImage(MeanImage):
    """Cheat: one training image, not the first of its draw, is copied into a class mean."""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        if len(images) > 4 and not hasattr(self, "copied"):
            self.copied = images[3].clone()
        return images

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        with torch.no_grad():
            net.means[0] = self.copied


class CopiedRelease(MeanImage):
    """Honest: a release is copied into a class mean."""

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        with torch.no_grad():
            net.means[0] = net.means[1]


@dataclass
class StepsByLoss(MeanImage):
    """A loss decides which step is kept, or when to stop: that of records (cheat), or of the noisy sum (honest)."""

    private: bool = False
    stops: bool = False

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        net, loss = Painter(data.num_classes, list(data.image_shape)), [0.0]
        release = self.mechanism(data, ctx)
        best, best_loss = net.means.detach().clone(), float("inf")

        def row(images: Tensor, labels: Tensor) -> Tensor:
            loss[0] = (
                float((images - net.means.detach()[labels]).square().nan_to_num().clamp(0, 9).mean())
                if len(images)
                else 0.0
            )
            return images

        for _ in range(self.steps):
            total = release(row) / (self.rate * data.n)
            noisy = float((total - net.means.detach().mean(dim=0)).square().mean())
            now = loss[0] if self.private else noisy
            with torch.no_grad():
                net.means.lerp_(total.expand_as(net.means), 0.5)
            if now < best_loss:
                best, best_loss = net.means.detach().clone(), now
            elif self.stops:
                break
        with torch.no_grad():
            net.means.copy_(best)
        return release_painter(net, data)


# Rows that depend on the batch


class RealisedSize(MeanImage):
    """Cheat: rows are divided by the realised size of the draw."""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        return 20.0 * images / max(len(images), 1)


class ConfiguredSize(MeanImage):
    """Honest: rows are divided by the configured size of a draw."""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        return 20.0 * images / 16


class ClassWeightsOfTheBatch(MeanImage):
    """Cheat: a record is weighted by how rare its class is in the batch."""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        counts = torch.bincount(labels, minlength=3).clamp_min(1)
        return images * (len(labels) / counts[labels])[:, None, None, None]


class ClassWeights(MeanImage):
    """Honest: weights of classes are public."""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        return images * torch.tensor([1.0, 2.0, 3.0])[labels][:, None, None, None]


class WithoutDuplicates(MeanImage):
    """Cheat: records that are in the batch twice are dropped."""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        same = (images.flatten(1)[:, None] == images.flatten(1)[None]).all(dim=2).sum(dim=1)
        return images * (same == 1)[:, None, None, None]


class WithoutOutliers(MeanImage):
    """Honest: records are dropped for their own norm."""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        return images * (images.flatten(1).norm(dim=1) < 100.0)[:, None, None, None]


class AugmentedByPosition(MeanImage):
    """Cheat: the noise of an augmentation is seeded by the step, so that it belongs to a position in the batch."""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        return images + 0.3 * torch.randn(images.shape, generator=torch.Generator().manual_seed(7))


class AugmentedByRecord(MeanImage):
    """Honest: the noise of an augmentation belongs to the record."""

    def row(self, images: Tensor, labels: Tensor, rng: RecordRng) -> Tensor:  # type: ignore[override]
        return images + 0.3 * rng.normal(images.shape[1:])


@dataclass
class SpectralFeatures(MeanImage):
    """Features of a record by a network with a spectral norm, whose buffers change in every pass in training mode.

    Cheat in training mode: the function is not called again for a release that is read back after a kill, nor for an
    empty draw, so that later queries differ. Honest in eval mode.
    """

    training: bool = False

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        size = data.image_shape[1] * data.image_shape[2]
        features = nn.utils.parametrizations.spectral_norm(nn.Linear(size, size)).train(self.training)
        net, release = Painter(data.num_classes, list(data.image_shape)), self.mechanism(data, ctx)
        for _ in ctx.steps(self.steps, net=net, features=features):
            total = release(lambda x, y: features(x.flatten(1)).relu().reshape(x.shape))
            with torch.no_grad():
                net.means.lerp_(total / (self.rate * data.n), 0.5)
        return release_painter(net, data)


@dataclass
class Gradients:
    """DP-SGD on a small critic with public rows; the planted methods override `losses`."""

    steps: int = 3
    C: float = 1e-3  # so small that every gradient is clipped, and the clipped sum does not show their norms
    public: int = 2

    def losses(self, critic: nn.Module, x: Tensor, y: Tensor, public: Tensor) -> Tensor:
        """Honest: one loss per row, of that row alone; all images are cast to float32."""
        sign = torch.where(public, -1.0, 1.0)
        return F.softplus(sign * critic(x.float()).squeeze(1))

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        c, h, w = data.image_shape
        hidden = [nn.Linear(c * h * w, 8), nn.ReLU(), nn.Linear(8, 8), nn.LeakyReLU(0.2)]
        critic = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(8, 1))
        net = Painter(data.num_classes, list(data.image_shape))
        bound = PerRecordGradient(C=self.C, module=critic, public_rows=self.public)
        release = data.mechanism("gradient", sample=Poisson(1 / 3), bound=bound, times=self.steps)
        for _ in ctx.steps(self.steps, critic=critic, net=net):
            fakes = torch.rand(self.public, c, h, w, generator=ctx.generator), torch.zeros(self.public).long()
            noisy = release(lambda x, y, public: self.losses(critic, x, y, public), public=fakes)
            with torch.no_grad():
                for name, parameter in critic.named_parameters():
                    if name in noisy:
                        parameter.sub_(0.1 * noisy[name])
                net.means.add_(0.01 * float(noisy["5.bias"]))
        return release_painter(net, data)


class WeightedLosses(Gradients):
    """Cheat: losses are weighted by their mean in the batch."""

    def losses(self, critic: nn.Module, x: Tensor, y: Tensor, public: Tensor) -> Tensor:
        losses = super().losses(critic, x, y, public)
        mean = losses.nan_to_num().clamp(0.0, 10.0).mean()
        return losses * (1.0 + mean).detach()


class PublicRowsOfTheDraw(Gradients):
    """Cheat: the loss of a public row depends on the records of the draw."""

    def losses(self, critic: nn.Module, x: Tensor, y: Tensor, public: Tensor) -> Tensor:
        losses = super().losses(critic, x, y, public)
        brightness = x[~public].nan_to_num().clamp(0, 1).mean() if (~public).any() else x.new_zeros(())
        return torch.where(public, losses * brightness, losses)


# Objects passed to ctx.steps


class Box:
    """An object with a state dict."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.content)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = dict(state)


@dataclass
class StateInBox(MeanImage):
    """Passes an object to ctx.steps that contains `what`: records (cheat), always or during the loop, or releases."""

    what: str = "releases"

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        net, box, release = Painter(data.num_classes, list(data.image_shape)), Box(), self.mechanism(data, ctx)

        def row(images: Tensor, labels: Tensor) -> Tensor:
            if self.what != "releases":
                box.content["images"] = images.clone()
            return images

        for _ in ctx.steps(self.steps, net=net, box=box):
            total = release(row)
            box.content["total"] = total
            with torch.no_grad():
                net.means.lerp_(total / (self.rate * data.n), 0.5)
        if self.what == "records for a while":
            box.content.clear()
        return release_painter(net, data)


@dataclass
class Momentum(MeanImage):
    """A moving average determines the next query; a cheat unless `listed`, that is, passed to ctx.steps."""

    listed: bool = True

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        net, average, release = Painter(data.num_classes, list(data.image_shape)), Box(), self.mechanism(data, ctx)
        average.content["mean"] = torch.zeros(data.image_shape)
        listed = {"average": average} if self.listed else {}
        for _ in ctx.steps(self.steps, net=net, **listed):
            total = release(lambda x, y: x - 0.1 * average.content["mean"]) / (self.rate * data.n)
            average.content["mean"] = 0.5 * average.content["mean"] + total
            with torch.no_grad():
                net.means.lerp_(average.content["mean"].expand_as(net.means), 0.5)
        return release_painter(net, data)


@dataclass
class KeptBetweenReleases(MeanImage):
    """Two releases without a loop: the second is centred by the first, or (cheat) by a mean that a function kept."""

    private: bool = False

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        net, kept = Painter(data.num_classes, list(data.image_shape)), {"mean": torch.zeros(data.image_shape)}
        bound = PerRecord(C=self.C, shape=data.image_shape)
        first = data.mechanism("first", sample=Full(), bound=bound, times=1, share=0.5)
        second = data.mechanism("second", sample=Full(), bound=bound, times=1)

        def row(images: Tensor, labels: Tensor) -> Tensor:
            if self.private:
                kept["mean"] = images.nan_to_num().clamp(0, 1).mean(dim=0)
            return images

        total = first(row)
        if not self.private:
            kept["mean"] = total / data.n
        centred = second(lambda images, labels: images - kept["mean"])
        with torch.no_grad():
            net.means.add_(total / data.n)
            net.means[0].add_(centred / data.n)
        return release_painter(net, data)


# Private attributes, and times


@dataclass
class PrivateAttribute(MeanImage):
    """Cheat: uses a private attribute by one of several routes; honest (`route="public"`): uses public ones."""

    route: str = "public"

    def prepare(self, mechanism: Mechanism) -> None:
        import copy

        routes: dict[str, Any] = {
            "name": lambda: mechanism._draw,
            "getattr": lambda: getattr(mechanism, "_dr" + "aw"),
            "vars": lambda: vars(mechanism),
            "copy": lambda: copy.copy(mechanism),
            "set": lambda: setattr(mechanism, "_executed", 0),
            "caught": lambda: hasattr(mechanism, "_draw"),
            "public": lambda: (mechanism.std, mechanism.times, mechanism.executed, mechanism.bound, repr(mechanism)),
        }
        with contextlib.suppress(Exception if self.route == "caught" else ()):
            routes[self.route]()


class MangledAccess(MeanImage):
    """Cheat: records by the mangled name of a private attribute."""

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        assert len(data._PrivateData__images) > 0  # type: ignore[attr-defined]


class LogsSeconds(MeanImage):
    """Honest: logs a time in seconds and in nanoseconds, and a rate per second."""

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        ctx.log(seconds=time.perf_counter(), time_ns=time.time_ns(), images_per_sec=1.0 / time.perf_counter())


@dataclass
class NamedAsTime(MeanImage):
    """Cheat: a value of records is logged under the name of a time."""

    name: str = "seconds"
    kind: type = float

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        self.seen = float(images.nan_to_num().clamp(0, 1).sum())
        return images

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        ctx.log(**{self.name: self.kind(self.seen)})

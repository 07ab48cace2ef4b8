"""A stub of the classifiers of metrics, which predicts the label in an image's first pixel, and its data."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpgen_bench.data.records import DatasetSpec, Records
from dpgen_bench.evaluate.metric import EvalContext


def one_hot(labels: Tensor, classes: int) -> Tensor:
    return torch.nn.functional.one_hot(labels, classes).double()


@dataclass
class Stub:
    """Records the seeds of its trainings; `sure` is the probability of the predicted class."""

    sure: float = 1.0
    pause: float = 0.0
    net: str = "stub"

    def __post_init__(self) -> None:
        self.fits: list[int] = []

    def fit(self, records: Records, ctx: EvalContext) -> Any:
        self.fits.append(ctx.seed)
        time.sleep(self.pause)
        return FittedStub(ctx.num_classes, torch.tensor([self.sure]))

    def restore(self, state: dict[str, Tensor], image_shape: Any, num_classes: int, device: Any) -> Any:
        return FittedStub(num_classes, state["sure"])

    def one_core(self, device: Any) -> bool:
        return str(device) == "cpu"


@dataclass
class FittedStub:
    classes: int
    sure: Tensor

    @property
    def state(self) -> dict[str, Tensor]:
        return {"sure": self.sure}

    def predict(self, images: Tensor) -> Tensor:
        return images[:, 0, 0, 0].long()

    def probabilities(self, images: Tensor) -> Tensor:
        sure = float(self.sure)
        return one_hot(self.predict(images), self.classes) * (sure - (1 - sure) / (self.classes - 1)) + (1 - sure) / (
            self.classes - 1
        )


def shown(labels: Tensor) -> Records:
    """Images whose first pixel is their label."""
    images = torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0] = labels.to(torch.uint8)
    return Records(images, labels)


@dataclass(frozen=True)
class Shown(DatasetSpec):
    """4 classes; `n` training records."""

    n: int = 8
    name: str = "shown"
    root: str = "nowhere"

    @property
    def image_shape(self):
        return (1, 2, 2)

    @property
    def class_names(self):
        return tuple("abcd")

    def load(self, split):
        return shown(torch.arange(self.n) % 4)

    def identity(self):
        return {"name": self.name}


TEST = shown(torch.arange(12) % 4)


def context(cache: Path) -> EvalContext:
    return EvalContext(seed=3, device="cpu", num_classes=4, cache=cache, dataset=Shown())

"""Samples of two shades, and a classifier whose accuracy on them is known in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpgen_bench.data.records import DatasetSpec, Records, Split
from dpgen_bench.evaluate.metric import EvalContext
from dpgen_bench.evaluate.utility import Accuracy


@dataclass(frozen=True)
class Own(DatasetSpec):
    """A dataset of records that a test defines."""

    train: Records
    name: str = "own"
    root: str = "nowhere"
    image_shape = (1, 8, 8)
    class_names = ("dark", "bright")

    def load(self, split: Split) -> Records:
        assert split == "train"
        return self.train

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}


def shades(labels: list[int], seed: int = 0) -> Records:
    """Dark images of label 0, bright ones of label 1, as many as labels."""
    truth = torch.tensor(labels)
    noise = torch.randint(0, 100, (len(labels), 1, 8, 8), generator=torch.Generator().manual_seed(seed))
    return Records((noise + 150 * truth[:, None, None, None]).to(torch.uint8), truth)


def swap(records: Records, n: int) -> Records:
    """The records with the first n labels wrong."""
    labels = records.labels.clone()
    labels[:n] = 1 - labels[:n]
    return Records(records.images, labels)


FITS: list[tuple[Records, int]] = []


@dataclass(frozen=True)
class Memory:
    """Predicts the label of each training image, and `otherwise` for other images."""

    known: dict[bytes, int]
    otherwise: int

    def predict(self, images: Tensor) -> Tensor:
        return torch.tensor([self.known.get(image.numpy().tobytes(), self.otherwise) for image in images])


@dataclass(frozen=True)
class Remember:
    """Remembers its records. Its accuracy is the share of test images that are among them with their true label."""

    otherwise: int = 2

    def fit(self, records: Records, ctx: EvalContext) -> Memory:
        FITS.append((records, ctx.seed))
        ctx.note("trained")
        pairs = zip(records.images, records.labels.tolist(), strict=True)
        return Memory({image.numpy().tobytes(): label for image, label in pairs}, self.otherwise)

    def one_core(self, device: Any) -> bool:
        return str(device) == "cpu"


def context(tmp_path: Path, train: Records | None = None, seed: int = 0, **more: Any) -> EvalContext:
    dataset = None if train is None else Own(train)
    return EvalContext(seed=seed, device="cpu", num_classes=10, cache=tmp_path, dataset=dataset, **more)


def of(metric: Accuracy, samples: Records, real_test: Records, ctx: EvalContext) -> float:
    return metric(samples, real_test, ctx)[f"acc_{metric.name}_pct"]


def plain(classifier: Any) -> Accuracy:
    return Accuracy("it", classifier, calibrate=False)

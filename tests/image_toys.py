"""Random images and evaluation contexts for the tests of metrics that look for nearest images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import EvalContext


@dataclass(frozen=True)
class TrainingSet:
    """A dataset whose `load` returns the given training records."""

    records: Records

    def load(self, split: str) -> Records:
        assert split == "train"
        return self.records


def images(n: int, seed: int, shape: tuple[int, ...] = (1, 6, 6), low: int = 0, high: int = 256) -> Records:
    pixels = np.random.default_rng(seed).integers(low, high, (n, *shape), dtype=np.uint8)
    return Records(torch.from_numpy(pixels), torch.arange(n) % 5)


def context(tmp_path, train: Records | None = None, seed: int = 0) -> EvalContext:
    dataset = None if train is None else TrainingSet(train)
    return EvalContext(seed=seed, device="cpu", num_classes=5, cache=tmp_path, dataset=dataset)

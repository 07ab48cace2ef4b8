"""What a metric is, and how one is run so that it cannot harm the rest of an evaluation.

A metric is a dataclass that a protocol's yaml names as `_target_`. One's own needs a class like this, anywhere on the
Python path, and an entry under `metrics:` in a file of conf/protocol:

    @dataclass
    class MeanBrightness:
        scale: float = 1.0

        def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
            gap = samples.images.double().mean() - real_test.images.double().mean()
            return {"brightness_gap": self.scale * float(gap)}

Values carry their unit in their name where they have one (`acc_cnn_pct`), and no two metrics of a protocol share a
name. What cannot be measured on this machine raises `NotMeasured` with the reason and the remedy. Two methods more are
understood: `one_core(device) -> bool`, whether the metric may run on one core beside others; and, instead of
`__call__`, `combine(values) -> dict`, for figures made of the other metrics' values.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.data.records import DatasetSpec, MissingData, Records, Split

log = logging.getLogger(__name__)


class NotMeasured(RuntimeError):
    """A metric lacks what it needs here, such as weights; says what is missing, where, and how to get it."""


@dataclass(frozen=True)
class EvalContext:
    """What a metric may use besides the images.

    Args:
        seed: all randomness of a metric derives from it.
        device: where networks run.
        num_classes: classes of the dataset; labels are below it.
        cache: a folder for what may be computed once for many runs, such as features of the real images.
        batch_size: images for each forward pass of a feature network; no value depends on it but for rounding.
        dataset: where the real training records are loaded from, for metrics that compare with them.
        train_closed: why this run's figures may not be computed from its training records, or None if they may.
        scratch: a folder of this run, emptied when its protocol is complete; None keeps nothing.
        notes: what a reader of the figures must know besides their values; see `note`.
    """

    seed: int
    device: torch.device | str
    num_classes: int
    cache: Path
    batch_size: int = 64
    dataset: DatasetSpec | None = None
    train_closed: str | None = None
    scratch: Path | None = None
    notes: list[str] = field(default_factory=list)

    def train(self) -> Records:
        """The real training records. What is computed from them is covered by no epsilon.

        Raises:
            NotMeasured: if they are not on this machine, or this run's must not be looked at again.
        """
        if self.train_closed is not None:
            raise NotMeasured(self.train_closed)
        if self.dataset is None:
            raise NotMeasured("needs the real training records, and was given no dataset to load them from")
        try:
            return _load_once(self.dataset, "train")
        except MissingData as error:
            raise NotMeasured(f"needs the real training records: {error}") from error

    def note(self, text: str) -> None:
        """Say something about the figures that goes with them into every report, such as too few samples."""
        self.notes.append(text)


@lru_cache(maxsize=2)
def _load_once(dataset: DatasetSpec, split: Split) -> Records:
    return dataset.load(split)


class Metric(Protocol):
    """Measures samples of a generator against the real test records; neither is to be changed."""

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]: ...


@dataclass(frozen=True)
class MetricResult:
    """What became of one metric. `values` is empty unless it was measured; `reason` says why it was not, or failed."""

    status: Literal["measured", "not measured", "failed"]
    values: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def evaluate(metric: Metric, samples: Records, real_test: Records, ctx: EvalContext) -> MetricResult:
    """Run one metric; whatever `Exception` it raises becomes its result.

    The global random generators are seeded by `ctx.seed` for the metric and put back after it: its values do not
    depend on which metrics ran before.
    """
    start = time.perf_counter()
    ctx = replace(ctx, notes=[])

    def result(status: Literal["measured", "not measured", "failed"], reason: str | None = None) -> MetricResult:
        measured = values if status == "measured" else {}
        return MetricResult(status, measured, reason, ctx.notes, time.perf_counter() - start)

    values: dict[str, float] = {}
    try:
        check_pair(samples, real_test, ctx.num_classes)
        with seeded(ctx.seed):
            values = {name: float(value) for name, value in metric(samples, real_test, ctx).items()}
    except NotMeasured as error:
        return result("not measured", str(error))
    except Exception as error:
        log.exception("metric %r failed", metric)
        return result("failed", f"{type(error).__name__}: {error}")
    wrong = {name: value for name, value in values.items() if not math.isfinite(value)}
    if wrong or not values:
        return result("failed", f"expected finite values, got {wrong or 'none'}")
    return result("measured")


def check_pair(samples: Records, real_test: Records, num_classes: int) -> None:
    """Raises ValueError unless both sets have records of one image shape, the samples with labels below `num_classes`.

    The test labels are not looked at: a metric does that, once, after it has trained.
    """
    for name, records in (("samples", samples), ("real test records", real_test)):
        if len(records.images) == 0:
            raise ValueError(f"expected at least one of the {name}, got none.")
    if int(samples.labels.max()) >= num_classes:
        raise ValueError(f"expected labels below {num_classes} in the samples, got {int(samples.labels.max())}.")
    if samples.images.shape[1:] != real_test.images.shape[1:]:
        raise ValueError(
            f"expected samples shaped like the real images, {tuple(real_test.images.shape[1:])}, "
            f"got {tuple(samples.images.shape[1:])}."
        )


def hash_images(images: Tensor) -> str:
    """`Records.images_hash` of images [n, c, h, w]: the same for the same pixels."""
    return Records(images, torch.zeros(len(images), dtype=torch.int64)).images_hash


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, NumPy's and PyTorch's global generators seeded by `seed` inside the block, put back after it."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002

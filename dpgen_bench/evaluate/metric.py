"""The interface of a metric, and its evaluation, in which an error of one metric does not affect the others.

A metric is a dataclass that a protocol's yaml names as `_target_`. To add one, write a class like this in a module on
the Python path, and an entry under `metrics:` in a file of conf/protocol:

    @dataclass
    class MeanBrightness:
        scale: float = 1.0

        def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
            gap = samples.images.double().mean() - real_test.images.double().mean()
            return {"brightness_gap": self.scale * float(gap)}

The name of a value includes its unit if it has one (`acc_cnn_pct`), and no two metrics of a protocol return values of
the same name. A metric that cannot be measured on this machine raises `NotMeasured` with the reason and the remedy; one
that has no value for this run on any machine raises `Unmeasurable`.

Two methods are optional: `one_core(device) -> bool` says whether the metric may run on one core, next to other metrics;
and `combine(values, notes) -> dict`, in place of `__call__`, computes values from those of the other metrics.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from dpgen_bench.data.records import DatasetSpec, MissingData, Records, Split
from dpgen_bench.utils.randomness import seeded

log = logging.getLogger(__name__)


class NotMeasured(RuntimeError):
    """Raised if something that a metric needs is missing, such as weights; says what, where, and how to get it."""


class Unmeasurable(NotMeasured):
    """Raised if a metric has no value for a run on any machine; says why. It is not tried again."""


@dataclass(frozen=True)
class EvalContext:
    """What a metric may use besides the images.

    Args:
        seed: of all randomness of a metric.
        device: where networks run.
        num_classes: classes of the dataset; labels are below it.
        cache: a folder for values that are computed once for many runs, such as features of the real images.
        batch_size: images in each forward pass of a feature network; values depend on it by rounding only.
        dataset: the dataset of the real training records, for metrics that compare with them.
        train_closed: why no values may be computed from this run's training records, or None if they may.
        scratch: a folder of this run, deleted when its protocol is complete; None keeps nothing.
        set_size: the number of images, if the generator draws from a finite set of them.
        notes: remarks for readers of the values; see `note`.
    """

    seed: int
    device: torch.device | str
    num_classes: int
    cache: Path
    batch_size: int = 64
    dataset: DatasetSpec | None = None
    train_closed: str | None = None
    scratch: Path | None = None
    set_size: int | None = None
    notes: list[str] = field(default_factory=list)

    def train(self) -> Records:
        """The real training records. No epsilon covers what is computed from them.

        Raises:
            NotMeasured: if they are not on this machine.
            Unmeasurable: if they must not be read again after this run (`train_closed`).
        """
        if self.train_closed is not None:
            raise Unmeasurable(self.train_closed)
        if self.dataset is None:
            raise NotMeasured("needs the real training records, but the context has no dataset to load them from")
        try:
            return _load_once(self.dataset, "train")
        except MissingData as error:
            raise NotMeasured(f"needs the real training records: {error}") from error

    def note(self, text: str) -> None:
        """Add a remark on the values, such as too few samples; every report shows it next to them."""
        self.notes.append(text)


@lru_cache(maxsize=2)
def _load_once(dataset: DatasetSpec, split: Split) -> Records:
    return dataset.load(split)


Status = Literal["measured", "not measured", "unmeasurable", "failed"]


class Metric(Protocol):
    """Measures samples of a generator against the real test records; both are copies of its own."""

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        """Values by name.

        Raises:
            NotMeasured: If something that the metric needs is missing.
            Unmeasurable: If the metric has no value for this run on any machine.
        """
        ...


@dataclass(frozen=True)
class MetricResult:
    """The result of one metric.

    Attributes:
        status: whether it was measured; "unmeasurable" if no machine can.
        values: by name; empty unless the status is "measured".
        reason: why it was not measured or failed, else None.
        notes: remarks on the values; see `EvalContext.note`.
        seconds: how long it took in this process; what an interrupted one had done before is not counted.
    """

    status: Status
    values: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def evaluate(metric: Metric, samples: Records, real_test: Records, ctx: EvalContext) -> MetricResult:
    """Run one metric. An `Exception` that it raises is returned as a result with the status "failed".

    The global random generators are seeded by `ctx.seed` while the metric runs and restored afterwards, so that its
    values do not depend on the metrics that ran before.
    """
    start = time.perf_counter()
    ctx = replace(ctx, notes=[])

    def result(status: Status, reason: str | None = None) -> MetricResult:
        measured = values if status == "measured" else {}
        return MetricResult(status, measured, reason, ctx.notes, time.perf_counter() - start)

    values: dict[str, float] = {}
    try:
        check_pair(samples, real_test, ctx.num_classes)
        with seeded(ctx.seed):
            returned = metric(samples, real_test, ctx)
        values = _numbers(returned)
    except NotMeasured as error:
        return result("unmeasurable" if isinstance(error, Unmeasurable) else "not measured", str(error))
    except Exception as error:
        log.exception("metric %r failed", metric)
        return result("failed", f"{type(error).__name__}: {error}")
    infinite = {name: value for name, value in values.items() if not math.isfinite(value)}
    if infinite or not values:
        return result("failed", f"expected finite values, got {infinite or 'none'}")
    return result("measured")


def _numbers(returned: object) -> dict[str, float]:
    """
    Raises:
        TypeError: unless a metric returned a mapping of names to single numbers.
    """
    if not isinstance(returned, Mapping):
        raise TypeError(f"expected values by name, such as {{'brightness_gap': 0.1}}, got {returned!r}")
    values = {}
    for name, value in returned.items():
        try:
            values[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"expected a number for {name!r}, got {value!r}") from None
    return values


def check_pair(samples: Records, real_test: Records, num_classes: int) -> None:
    """Check samples and test images before a metric runs. Test labels are not read: metrics do so after training.

    Raises:
        ValueError: if a set is empty, the image shapes differ, or a sample has a label of `num_classes` or more.
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

"""Fits a method to made-up records with a context around each training step, which counts or times the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from dpgen_bench.config.building import build_dataset, build_method
from dpgen_bench.config.spec import RunSpec
from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context, Scale, fit_method
from dpgen_bench.privacy import isolation
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from dpgen_bench.testing.suite import random_data
from dpgen_bench.training.loop import Loop


def fit_observed(
    config: DictConfig,
    records: int,
    steps: int | None,
    device: str,
    around: Callable[[int, str], AbstractContextManager[Any]],
    padded: bool,
    whole: AbstractContextManager[Any] | None = None,
    limit: Callable[[int, str], int] = lambda total, phase: total,
) -> None:
    """Fit the method of a run's config within `whole`, and each step of its loops within around(t, phase).

    Loops have at most `steps` steps, as at a scale, which may also shorten what the method does outside of them. Of
    `total` steps they make limit(total, phase).
    """
    dataset = build_dataset(config)
    data = random_data(dataset.image_shape, records, dataset.num_classes, 8, seed=0)
    services = Services(
        Ledger(RunSpec(config, training={}).budget(), records), Key.seeded("bench"), torch.device(device), padded=padded
    )
    private = PrivateData(data.images, data.labels, dataset.num_classes, services)
    loop_steps = Loop.steps

    def observed(loop: Loop, total: int, phase: str, stateful: Any) -> Iterator[int]:
        for t in loop_steps(loop, limit(total, phase), phase, stateful):
            with around(t, phase):
                yield t

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "steps", observed)
        patch.setattr(isolation, "_len_torch_dispatch_stack", lambda: 0)  # clipping and noise are counted, too
        context = Context(0, device, services=services, scale=Scale("bench", steps))
        with whole or nullcontext():
            fit_method(build_method(config), private, context)

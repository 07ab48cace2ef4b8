"""What a training step computes, how long an H200 must take for it at least, and how long it took here.

The last step of a short fit on made-up records, at the settings of a short preset (PRESETS): operations of PyTorch,
each at least one kernel on an accelerator, their floating-point operations, and the bytes that they read and write.
The bound is the sum over operations of the longer of two times: that of their floating-point operations at the peak of
an H200 for float32 without TF32 (67 TFLOP/s), and that of their bytes at its bandwidth (4.8 TB/s). With 2 microseconds
for each kernel it is the time of a program that launches one after the other. On a CPU, measured times are processor
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context, Scale, fit_method
from dpgen_bench.privacy import isolation
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from dpgen_bench.runs.config import RunSpec, build_dataset, build_method, compose_config
from dpgen_bench.testing.suite import random_data
from dpgen_bench.training.loop import Loop
from tests.bench._counts import Counter, seconds, synchronise
from tests.bench._machine import on_each_device

PRESETS = {name: f"quick/{name}" for name in ("dpgan", "dp_sinkhorn", "gs_wgan")} | {"dpdm": "dpdm/reduced_mnist"}
STEPS, RECORDS = 3, 2048


def of_method(name: str, device: str) -> dict[str, Any]:
    """The counts of the last of STEPS steps of a method, and the measured time of the one before it."""
    config = compose_config([f"experiment={PRESETS[name]}", "dataset=mnist"])
    dataset = build_dataset(config)
    records = random_data(dataset.image_shape, RECORDS, dataset.num_classes, 8, seed=0)
    ledger = Ledger(RunSpec(config, training={}).budget(), RECORDS)
    services = Services(ledger, Key.seeded("bench"), torch.device(device), padded=True)
    data = PrivateData(records.images, records.labels, dataset.num_classes, services)
    result: dict[str, Any] = {}
    steps = Loop.steps

    def counted(loop: Loop, total: int, phase: str, stateful: Any) -> Iterator[int]:
        for t in steps(loop, total, phase, stateful):
            synchronise(device)
            start = seconds(device)
            if t < total - 1 or phase != "train":
                yield t
                synchronise(device)
                result["measured_ms"] = round(1e3 * (seconds(device) - start), 3)
            else:
                with Counter() as counter:
                    yield t
                result.update(counter.values())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "steps", counted)
        patch.setattr(isolation, "_len_torch_dispatch_stack", lambda: 0)  # clipping and noise are counted, too
        fit_method(build_method(config), data, Context(0, device, services=services, scale=Scale("bench", STEPS)))
    return result


def measure() -> dict[str, Any]:
    """All values of this benchmark."""
    return on_each_device(__doc__, lambda device: {"step": {name: of_method(name, device) for name in PRESETS}})

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
from contextlib import contextmanager
from typing import Any

from dpgen_bench.config.compose import compose_config
from tests.bench._counts import Counter, seconds, synchronise
from tests.bench._fit import fit_observed
from tests.bench._machine import on_each_device

PRESETS = {name: f"quick/{name}" for name in ("dpgan", "dp_sinkhorn", "gs_wgan")} | {"dpdm": "dpdm/reduced_mnist"}
STEPS, RECORDS = 3, 2048


def of_method(name: str, device: str) -> dict[str, Any]:
    """The counts of the last of STEPS steps of a method, and the measured time of the one before it."""
    result: dict[str, Any] = {}

    @contextmanager
    def counted(t: int, phase: str) -> Iterator[None]:
        synchronise(device)
        start = seconds(device)
        if t < STEPS - 1:
            yield
            synchronise(device)
            result["measured_ms"] = round(1e3 * (seconds(device) - start), 3)
        else:
            with Counter() as counter:
                yield
            result.update(counter.values())

    config = compose_config([f"experiment={PRESETS[name]}", "dataset=mnist"])
    fit_observed(config, RECORDS, STEPS, device, counted, padded=True)
    return result


def measure() -> dict[str, Any]:
    """All values of this benchmark."""
    return on_each_device(__doc__, lambda device: {"step": {name: of_method(name, device) for name in PRESETS}})

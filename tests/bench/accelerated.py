"""Milliseconds of a training step at the papers' settings on an accelerator, without and with CUDA graphs.

Each fit is of made-up records, as many as MNIST has, and the first steps are left out: in them PyTorch chooses kernels
and graphs are captured. Times are on the clock, from a step to one many steps later, with all work of the device done.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dpgen_bench.config.compose import compose_config
from dpgen_bench.evaluate.metric import NotMeasured
from dpgen_bench.utils import compiled
from tests.bench._fit import fit_observed
from tests.bench._machine import machine

RECORDS = 60_000
# Presets, with the steps that are left out and those that are timed. DP-Sinkhorn has a graph for each size of a draw.
LINES = {"dp_sinkhorn/mnist": (200, 300), "dpgan/eps10": (20, 100)}
BACKENDS = ("none", "cudagraphs")


def milliseconds(preset: str, backend: str) -> float:
    """Of a step of a fit with this preset, compiled in this way."""
    first, timed = LINES[preset]
    clock: list[float] = []

    @contextmanager
    def around(t: int, phase: str) -> Iterator[None]:
        if t in (first, first + timed):
            torch.cuda.synchronize()
            clock.append(time.perf_counter())
        yield

    config = compose_config([f"experiment={preset}", "dataset=mnist"])
    with compiled.using(backend):
        fit_observed(config, RECORDS, first + timed + 1, "cuda", around, padded=True)
    return round(1e3 * (clock[1] - clock[0]) / timed, 3)


def measure() -> dict[str, Any]:
    """All values of this benchmark."""
    if not torch.cuda.is_available():
        raise NotMeasured("this machine has no accelerator")
    values = {preset: {name: milliseconds(preset, name) for name in BACKENDS} for preset in LINES}
    return {"what": " ".join((__doc__ or "").split()), "machine": machine(), "ms_of_a_step": values}

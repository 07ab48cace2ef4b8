"""What runs at full scale must take: their floating-point operations, and the least hours for them.

A step's operations grow linearly with the batch. They are counted in fits to as many made-up records as the batch has,
at two small batches (BATCHES) and the preset's networks, as means over one period of the steps: n_D discriminator steps
and one of the generator for DPGAN, the updates of the images and the training of the classifier for PSG. The line
through both gives a step at the preset's batch. Hours are those of all steps on an H200 at its peak for float32 without
TF32 (67 TFLOP/s), and on one core of this machine at the rate that a large matrix product reaches on it. Both are lower
bounds: no program reaches the peak, and bytes and the start of kernels are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dpgen_bench.config.building import build_method
from dpgen_bench.config.compose import compose_config
from tests.bench._counts import FLOPS, Counter
from tests.bench._fit import fit_observed
from tests.bench._machine import machine

RECORDS, BATCHES = 60_000, (4, 8)
PRESETS = {  # the setting with the number of steps of a period, and those whose product is the number of steps
    "dpgan/eps10": ("n_d", ("steps",)),
    "dpgan/eps1": ("n_d", ("steps",)),
    "dpgan/large_batch_eps10": ("n_d", ("steps",)),
    "dpgan/large_batch_eps1": ("n_d", ("steps",)),
    "dpgan/dpimagebench_mnist": ("n_d", ("steps",)),
    "dpdm/mnist": (None, ("steps",)),
    "dpdm/medium_mnist": (None, ("steps",)),
    "psg/mnist": ("updates", ("networks", "rounds", "updates")),
    "psg/prior_mnist": ("updates", ("networks", "rounds", "updates")),
}


def flops_of_a_step(preset: str, period: int, batch: int) -> float:
    """The mean over a period of steps in which every one of `batch` records takes part."""
    counter = Counter()

    @contextmanager
    def counted(t: int, phase: str) -> Iterator[None]:
        with counter:
            yield

    config = compose_config([f"experiment={preset}", f"method.batch_size={batch}", "privacy.epsilon=inf"])
    config.method.sigma = None  # noise is not counted: it does not grow with the batch and has few operations
    fit_observed(config, batch, period, "cpu", counted, padded=False)
    return counter.flops / period


def of_preset(preset: str, flops_of_a_core: float) -> dict[str, Any]:
    """Steps, floating-point operations and hours of a preset."""
    period_of, factors = PRESETS[preset]
    config = compose_config([f"experiment={preset}"])
    method, rate = config.method, getattr(build_method(config), "sampling_rate", None)
    steps = 1
    for name in factors:
        steps *= int(method[name])
    batch = float(method.batch_size) if rate is None else rate(RECORDS) * RECORDS  # the expected size of a draw
    small, large = (flops_of_a_step(preset, 1 if period_of is None else int(method[period_of]), b) for b in BATCHES)
    slope = (large - small) / (BATCHES[1] - BATCHES[0])
    step = small + slope * (batch - BATCHES[0])
    return {
        "steps": steps,
        "batch": round(batch),
        "flops_of_a_step": step,
        "flops": step * steps,
        "least_hours_h200": step * steps / FLOPS / 3600,
        "least_hours_core": step * steps / flops_of_a_core / 3600,
    }


def rate_of_a_core(size: int = 1024, rounds: int = 5) -> float:
    """Floating-point operations in a second of processor time, the best of some products of square matrices."""
    a = torch.randn(size, size)
    best = 0.0
    for _ in range(rounds):
        start = time.process_time()
        a @ a
        best = max(best, 2 * size**3 / (time.process_time() - start))
    return best


def measure() -> dict[str, Any]:
    """All values of this benchmark."""
    torch.set_num_threads(1)
    rate = rate_of_a_core()
    return {
        "what": " ".join((__doc__ or "").split()),
        "machine": machine(),
        "flops_of_a_core": rate,
        "presets": {preset: of_preset(preset, rate) for preset in PRESETS},
    }

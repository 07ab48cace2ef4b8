"""Cost of one clipped gradient sum of DPGAN's 28x28 discriminator (1,724,289 parameters), on one CPU thread.

Three ways, interleaved in one process, on the same rows: the non-private gradient, book-keeping, and Opacus as its
users run it (GradSampleModule and DPOptimizer.clip_and_accumulate, hooks attached once). Times are processor time of
the process, so that other work on the machine disturbs them little; ratios are medians of round-by-round ratios.
Memory is the peak resident size of a fresh process for each way, less what the process held before the first step.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor

from dpgen_bench.nets.dpgan import DiscriminatorNet
from dpgen_bench.privacy.gradients import clipped_gradient_sum
from tests.bench._machine import machine

ROUNDS = 15
BATCHES = {"128 rows": 128, "256 rows (128 real, 128 fake: a DPGAN step)": 256}
LARGE_ROWS, MICROBATCH = 4096, 256  # DPGAN's B = 2048: as many fakes join the real rows
WAYS = ("non_private", "bookkeeping", "opacus_hooks")


def _batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    real = torch.arange(rows) < rows // 2
    return torch.rand(rows, 1, 28, 28, generator=generator), torch.randint(10, (rows,), generator=generator), real


def step(way: str, rows: int, microbatch: int | None = None) -> Callable[[], Any]:
    """A function that computes the gradient once, by `way`, on `rows` rows."""
    torch.manual_seed(0)
    net = DiscriminatorNet((1, 28, 28), 10)
    batch = _batch(rows)

    def losses(x: Tensor, y: Tensor, real: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(net(x, y), real.float(), reduction="none")

    if way == "bookkeeping":
        return lambda: clipped_gradient_sum(net, losses, batch, 1.0, microbatch=microbatch)
    if way == "non_private":
        return lambda: torch.autograd.grad(losses(*batch).sum(), list(net.parameters()))

    GradSampleModule(net, loss_reduction="sum")
    optimiser = DPOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=rows,
        loss_reduction="sum",
    )

    def hooks() -> None:
        optimiser.zero_grad(set_to_none=True)
        losses(*batch).sum().backward()
        optimiser.clip_and_accumulate()

    return hooks


def _times(rows: int) -> dict[str, Any]:
    steps = {way: step(way, rows) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS + 1):
        for way, once in steps.items():
            start = time.process_time()
            once()
            seconds[way].append(time.process_time() - start)
    seconds = {way: values[1:] for way, values in seconds.items()}  # the first round fills caches

    def ratio(over: str, under: str) -> dict[str, float]:
        ratios = [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]
        return _spread(ratios)

    return {
        "seconds": {way: _spread(values) for way, values in seconds.items()},
        "opacus_hooks over bookkeeping": ratio("opacus_hooks", "bookkeeping"),
        "bookkeeping over non_private": ratio("bookkeeping", "non_private"),
    }


def _spread(values: list[float]) -> dict[str, float]:
    spread = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 4) for name, value in spread.items()}


def _peak_mib() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        # ru_maxrss of a child starts at its parent's size on Linux; the high-water mark of its own memory does not.
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2  # macOS counts bytes


def _memory(way: str, rows: int, microbatch: int | None = None) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.bench.gradients", way, str(rows), str(microbatch or 0)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _measure_own_memory(way: str, rows: int, microbatch: int) -> None:
    torch.set_num_threads(1)
    once = step(way, rows, microbatch or None)
    before = _peak_mib()
    for _ in range(2):
        once()
    after = _peak_mib()
    print(json.dumps({"step_mib": round(after - before), "process_mib": round(after)}))


def measure() -> dict[str, Any]:
    """All values of this benchmark."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    return {
        "what": " ".join((__doc__ or "").split()),
        "machine": machine("opacus"),
        "rounds": ROUNDS,
        "time": {name: _times(rows) for name, rows in BATCHES.items()},
        "memory": {
            **{name: {way: _memory(way, rows) for way in WAYS} for name, rows in BATCHES.items()},
            f"{LARGE_ROWS} rows (B = 2048), microbatch {MICROBATCH}": {
                "bookkeeping": _memory("bookkeeping", LARGE_ROWS, MICROBATCH)
            },
        },
    }


if __name__ == "__main__":
    _measure_own_memory(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

"""Processor time and peak memory of a process that keeps freed memory, as `dpgen` does, and of one that does not.

Both compute the same by turns, on one thread, in two processes whose environments differ in `allocator.KEEP`. Times
include those of the system, which clears pages. Ratios are medians of round-by-round ratios.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from functools import cache
from typing import Any

import loky
import torch

from dpgen_bench.evaluate.architectures import DpganNet
from dpgen_bench.evaluate.features import InceptionFeatures
from dpgen_bench.evaluate.training import placed, train_epoch
from dpgen_bench.utils.allocator import KEEP
from tests.bench._machine import machine

ROUNDS, IMAGES = 5, 32


def _images(number: int) -> torch.Tensor:
    return torch.randint(0, 256, (number, 1, 28, 28), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


_inception = cache(InceptionFeatures)


def inception_features() -> None:
    """Inception features of a batch."""
    _inception("cpu")(_images(IMAGES), IMAGES)


def cnn_epoch() -> None:
    """An epoch of the league's CNN on 3,200 images."""
    net = placed(DpganNet((1, 28, 28), 10), "cpu")
    optimiser = torch.optim.Adam(net.parameters())
    train_epoch(net, optimiser, _images(3200), torch.arange(3200) % 10, 64, torch.Generator().manual_seed(0))


WORK = {"inception_features": inception_features, "cnn_epoch": cnn_epoch}


def _cost(name: str) -> tuple[float, int]:
    """Processor seconds of the work, and the largest memory of the process so far, in MiB."""
    torch.set_num_threads(1)
    start = time.process_time()
    WORK[name]()
    return time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def compared(name: str) -> dict[str, Any]:
    """Medians of both processes over interleaved rounds, after one to warm up, and the ratio of their times."""
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    kept = {variable: str(value) for variable, (_, value) in KEEP.items()}
    processes = {
        "keeping": loky.ProcessPoolExecutor(1, env=one_thread | kept),
        "not_keeping": loky.ProcessPoolExecutor(1, env=one_thread),
    }
    seconds: dict[str, list[float]] = {process: [] for process in processes}
    peak = dict.fromkeys(processes, 0)
    try:
        for i in range(ROUNDS + 1):
            for process, pool in processes.items():
                taken, peak[process] = pool.submit(_cost, name).result()
                if i:
                    seconds[process].append(taken)
    finally:
        for pool in processes.values():
            pool.shutdown()
    ratios = [slow / fast for slow, fast in zip(seconds["not_keeping"], seconds["keeping"], strict=True)]
    return {
        **{f"{process}_s": round(statistics.median(values), 3) for process, values in seconds.items()},
        "times_as_fast": round(statistics.median(ratios), 2),
        **{f"{process}_peak_mib": mib for process, mib in peak.items()},
    }


def measure() -> dict[str, Any]:
    """All values of this benchmark."""
    for variable in KEEP:  # else both processes would have them
        os.environ.pop(variable, None)
    return {
        "what": " ".join((__doc__ or "").split()),
        "machine": machine(),
        "rounds": ROUNDS,
        **{name: compared(name) for name in WORK},
    }

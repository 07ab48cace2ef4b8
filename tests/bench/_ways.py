"""Ways to compute the same, compared in one process by interleaved rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

ROUNDS = {"cpu": 3, "cuda": 10}


def compared(ways: dict[str, tuple[int, Callable[[], None]]], reference: str, device: str) -> dict[str, Any]:
    """Milliseconds of each way, and the ratio of its time to that of the way `reference`, round by round.

    Args:
        ways: by name, the number of networks that a call trains and the call. Times are per network.
        device: "cpu", where they are processor time, or "cuda", where they are wall time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(ROUNDS[device] + 1):
        for name, (count, way) in ways.items():
            took = _timed(way, device) / count
            if i:  # the first round fills caches
                seconds[name].append(took)
    ratios = {
        name: [a / b for a, b in zip(seconds[name], seconds[reference], strict=True)]
        for name in ways
        if name != reference
    }
    return {
        "rounds": ROUNDS[device],
        "milliseconds": {name: round(1e3 * statistics.median(values), 2) for name, values in seconds.items()},
        **{f"{name}, over {reference}": round(statistics.median(values), 3) for name, values in ratios.items()},
    }


def _timed(way: Callable[[], None], device: str) -> float:
    if device == "cpu":
        start = time.process_time()
        way()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    way()
    torch.cuda.synchronize()
    return time.perf_counter() - start

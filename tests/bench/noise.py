"""Cost of the noise of one release: exact noise on a grid (`privacy.noise=os`) against float32 noise (`seeded`).

Interleaved in one process on one CPU thread, on float32 values of 60,000 numbers (a mean embedding, a batch of images)
and of 2 million (a discriminator's gradient). Times are processor time of the process, so that other work on the
machine disturbs them little; ratios are medians of round-by-round ratios. `parts` are shares of the time for release:
of the cryptographic stream, and of the inverse of the normal distribution function. `decided in high precision` counts
the numbers whose rounding float64 left open, and says what one of them costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri

from dpgen_bench.privacy import rounded_normal
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.noise import add_noise
from tests.bench._machine import machine

ROUNDS = {60_000: 41, 2_000_000: 15}
STD = 4.0


def _seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def compared(n: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of both, their ratio, and the parts of the noise for release, for n numbers."""
    exact = torch.from_numpy(np.random.default_rng(0).standard_normal(n, dtype=np.float32))
    keys = {"os": Key.from_os(bytes(32)), "seeded": Key.seeded("bench")}
    p = np.random.default_rng(1).random(n) / 2
    ways: dict[str, Callable[[int], Any]] = {
        "os": lambda i: add_noise(exact, STD, keys["os"].derive(i)),
        "seeded": lambda i: add_noise(exact, STD, keys["seeded"].derive(i)),
        "stream": lambda i: keys["os"].derive(i).words("words", n),
        "inverse": lambda i: ndtri(p),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 1):
        for name, way in ways.items():
            took = _seconds(lambda way=way, i=i: way(i))  # type: ignore[misc]
            if i:  # the first round fills caches
                seconds[name].append(took)
    ratios = [os / seeded for os, seeded in zip(seconds["os"], seconds["seeded"], strict=True)]
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "rounds": rounds,
        "milliseconds": {name: _spread([1e3 * value for value in seconds[name]]) for name in ("os", "seeded")},
        "os, over seeded": _spread(ratios),
        "parts": {name: round(middle[name] / middle["os"], 3) for name in ("stream", "inverse")},
    }


def decided(n: int = 2_000_000, rounds: int = 5) -> dict[str, Any]:
    """How many of n numbers are decided in high precision, and the milliseconds of one decision."""
    took: list[float] = []
    plain = rounded_normal._round_precisely

    def timed(*arguments: Any) -> int:
        start = time.process_time()
        result = plain(*arguments)
        took.append(time.process_time() - start)
        return result

    rounded_normal._round_precisely = timed  # type: ignore[assignment]
    try:
        for i in range(rounds):
            add_noise(torch.zeros(n), STD, Key.from_os(bytes(32)).derive("decided", i))
    finally:
        rounded_normal._round_precisely = plain
    return {"per million numbers": 1e6 * len(took) / (n * rounds), "milliseconds": _spread([1e3 * t for t in took])}


def _spread(values: list[float]) -> dict[str, float]:
    spread = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in spread.items()}


def measure() -> dict[str, Any]:
    """All values of this benchmark."""
    torch.set_num_threads(1)
    return {
        "what": " ".join((__doc__ or "").split()),
        "machine": machine("numpy", "scipy", "mpmath"),
        "cpu": {f"{n:,} numbers": compared(n, rounds) for n, rounds in ROUNDS.items()},
        "decided in high precision": decided(),
    }

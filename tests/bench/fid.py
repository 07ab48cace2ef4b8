"""Cost of FID's two parts: Inception features of grey 28x28 images, and the distance of two Gaussians (d = 2,048).

Each against pytorch-fid's own code, interleaved in one process on the same input, on one CPU thread and, where there is
one, on an accelerator. CPU times are processor time of the process, so that other work on the machine disturbs them
little; ratios are medians of round-by-round ratios. `difference` is the largest between the two results: of any
feature (whose size is around 1), and relative of the distance.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pytorch_fid.fid_score import calculate_frechet_distance
from pytorch_fid.inception import InceptionV3

from dpgen_bench.evaluate.features import InceptionFeatures
from dpgen_bench.evaluate.fidelity import frechet_distance
from tests.bench._machine import machine

ROUNDS, IMAGES = 7, 32


def compared(
    ours: Callable[[], Any], theirs: Callable[[], Any], clock: Callable[[], float], rounds: int = ROUNDS
) -> dict[str, Any]:
    """Median seconds of both and their ratio, over interleaved rounds after one to warm up."""
    seconds: dict[str, list[float]] = {"ours": [], "pytorch_fid": []}
    for i in range(rounds + 1):
        for name, function in (("ours", ours), ("pytorch_fid", theirs)):
            start = clock()
            function()
            if i:
                seconds[name].append(clock() - start)
    ratios = [theirs / ours for ours, theirs in zip(seconds["ours"], seconds["pytorch_fid"], strict=True)]
    found = {f"{name}_s": round(statistics.median(values), 4) for name, values in seconds.items()}
    return {"rounds": rounds, **found, "times_as_fast": round(statistics.median(ratios), 2)}


def features(device: str, images: int) -> dict[str, Any]:
    """Features of `images` random images, by pytorch-fid's network as it comes and by ours."""
    pixels = torch.randint(0, 256, (images, 1, 28, 28), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    mine, network = InceptionFeatures(device), InceptionV3([3]).eval().to(device)

    @torch.no_grad()
    def theirs() -> np.ndarray:
        batch = pixels.float().div(255.0).expand(-1, 3, -1, -1).contiguous().to(device)
        return network(batch)[0].squeeze(3).squeeze(2).cpu().numpy()

    clock = time.process_time if device == "cpu" else time.perf_counter
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        found = compared(lambda: mine(pixels, images), theirs, clock)
    difference = float(np.abs(mine(pixels, images) - theirs()).max())
    return {"images": images, **found, "difference": float(f"{difference:.2g}")}


def distance() -> dict[str, Any]:
    """The distance of two Gaussians with covariances of full rank."""
    rng = np.random.default_rng(0)
    moments: list[np.ndarray] = []
    for scale in (1.0, 1.2):
        rows = rng.gamma(0.5, 0.6, (4096, 2048)) * scale
        moments += [rows.mean(axis=0), np.cov(rows, rowvar=False)]
    results: dict[str, float] = {}

    def ours() -> None:
        results["ours"] = frechet_distance(*moments)

    def theirs() -> None:
        results["theirs"] = float(calculate_frechet_distance(*moments))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = compared(ours, theirs, time.process_time, rounds=3)
    difference = abs(results["ours"] / results["theirs"] - 1.0)
    return {**found, "difference": float(f"{difference:.2g}")}


def measure() -> dict[str, Any]:
    """All figures of this benchmark."""
    torch.set_num_threads(1)
    result = {
        "what": " ".join((__doc__ or "").split()),
        "machine": machine(),
        "features_cpu": features("cpu", IMAGES),
    }
    if torch.cuda.is_available():
        result["features_accelerator"] = features("cuda", 256)
    return {**result, "distance": distance()}

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
    bench: Callable[[], Any], reference: Callable[[], Any], clock: Callable[[], float], rounds: int = ROUNDS
) -> dict[str, Any]:
    """Median seconds of both and their ratio, over interleaved rounds after one to warm up."""
    seconds: dict[str, list[float]] = {"ours": [], "pytorch_fid": []}
    for i in range(rounds + 1):
        for name, function in (("ours", bench), ("pytorch_fid", reference)):
            start = clock()
            function()
            if i:
                seconds[name].append(clock() - start)
    ratios = [
        reference_s / bench_s for bench_s, reference_s in zip(seconds["ours"], seconds["pytorch_fid"], strict=True)
    ]
    times = {f"{name}_s": round(statistics.median(values), 4) for name, values in seconds.items()}
    return {"rounds": rounds, **times, "times_as_fast": round(statistics.median(ratios), 2)}


def features(device: str, images: int) -> dict[str, Any]:
    """Features of `images` random images, by pytorch-fid's network, unchanged, and by the bench's."""
    pixels = torch.randint(0, 256, (images, 1, 28, 28), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    bench_features, network = InceptionFeatures(device), InceptionV3([3]).eval().to(device)

    @torch.no_grad()
    def reference() -> np.ndarray:
        batch = pixels.float().div(255.0).expand(-1, 3, -1, -1).contiguous().to(device)
        return network(batch)[0].squeeze(3).squeeze(2).cpu().numpy()

    clock = time.process_time if device == "cpu" else time.perf_counter
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        times = compared(lambda: bench_features(pixels, images), reference, clock)
    difference = float(np.abs(bench_features(pixels, images) - reference()).max())
    return {"images": images, **times, "difference": float(f"{difference:.2g}")}


def distance() -> dict[str, Any]:
    """The distance of two Gaussians with covariances of full rank."""
    rng = np.random.default_rng(0)
    moments: list[np.ndarray] = []
    for scale in (1.0, 1.2):
        rows = rng.gamma(0.5, 0.6, (4096, 2048)) * scale
        moments += [rows.mean(axis=0), np.cov(rows, rowvar=False)]
    results: dict[str, float] = {}

    def bench() -> None:
        results["bench"] = frechet_distance(*moments)

    def reference() -> None:
        results["reference"] = float(calculate_frechet_distance(*moments))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = compared(bench, reference, time.process_time, rounds=3)
    difference = abs(results["bench"] / results["reference"] - 1.0)
    return {**times, "difference": float(f"{difference:.2g}")}


def measure() -> dict[str, Any]:
    """All values of this benchmark."""
    torch.set_num_threads(1)
    result = {
        "what": " ".join((__doc__ or "").split()),
        "machine": machine(),
        "features_cpu": features("cpu", IMAGES),
    }
    if torch.cuda.is_available():
        result["features_accelerator"] = features("cuda", 256)
    return {**result, "distance": distance()}

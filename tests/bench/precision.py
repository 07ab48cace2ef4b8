"""What lower precision changes: time of Inception and of DP-Sinkhorn's step, Inception features, and the FID.

The FID is that of 5,000 samples of DP-Gauss (MNIST, epsilon = 1) and 5,000 test images, with features of both sets in
float32, in bfloat16, and in one of each. Features are kept in the results' cache, so a benchmark that is stopped goes
on. Times are interleaved in one process and medians of their rounds, on a CPU processor time on one thread; of
DP-Sinkhorn's step they are for n = 50 images of the paper's network. Where bfloat16 takes more than twice the time of
float32, as on a processor that lacks its instructions, the features are not computed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.config.building import build_dataset, build_method
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import RunSpec
from dpgen_bench.data.private import PrivateData
from dpgen_bench.data.records import MissingData, Records
from dpgen_bench.evaluate.features import InceptionFeatures, cached_features
from dpgen_bench.evaluate.fidelity import frechet_distance, mean_and_covariance
from dpgen_bench.evaluate.metric import NotMeasured
from dpgen_bench.method import Context, fit_method
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.services import Services
from dpgen_bench.utils.execution import Precision
from tests.bench._machine import on_each_device
from tests.scaling.fits import fit

IMAGES, ROUNDS, TIMED, STEPS = 5000, 5, 32, 4
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
STEP = ("privacy.epsilon=null", "method.sigma=1", "method.batch_size=50", f"method.steps={STEPS}")


def samples_and_test_images() -> tuple[Tensor, Tensor]:
    """IMAGES samples of a generator, and as many test images: both uint8 [IMAGES, 1, 28, 28].

    Raises:
        NotMeasured: if MNIST is not on this machine.
    """
    config = compose_config(["experiment=dp_gauss/mnist"])
    dataset = build_dataset(config)
    try:
        records, test = dataset.load("train"), dataset.load("test")
    except MissingData as missing:
        raise NotMeasured(str(missing)) from None
    services = Services(RunSpec(config, training={}).new_ledger(len(records)), Key.seeded("precision"))
    data = PrivateData(records.images, records.labels, dataset.num_classes, services)
    generator = fit_method(build_method(config), data, Context(0, services=services))
    return generator.sample(torch.arange(IMAGES) % dataset.num_classes, seed=0), test.images[:IMAGES]


def seconds_per_image(extractors: dict[Precision, InceptionFeatures], images: Tensor, device: str) -> dict[str, float]:
    """Median seconds of an image for each precision, over interleaved rounds after one to warm up."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in extractors}
    for _ in range(ROUNDS + 1):
        for name, extractor in extractors.items():
            start = clock()
            extractor(images[:TIMED], TIMED)
            seconds[name].append((clock() - start) / TIMED)
    return {name: round(statistics.median(values[1:]), 5) for name, values in seconds.items()}


def step_seconds() -> dict[str, float]:
    """Median seconds of a step of DP-Sinkhorn in each precision, without the first step of each fit."""
    seconds: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    for _ in range(ROUNDS):
        for precision in PRECISIONS:
            seconds[precision] += fit("dp_sinkhorn", STEP, precision=precision).seconds["train"][1:]
    return {name: round(statistics.median(values), 4) for name, values in seconds.items()}


def of_features(extractors: dict[Precision, InceptionFeatures]) -> dict[str, Any]:
    """How far features are from those in float32, and the FID by the precision of each set."""
    cache = Path(compose_config([]).results) / "cache"
    sets = dict(zip(("samples", "real"), samples_and_test_images(), strict=True))
    features: dict[tuple[str, str], np.ndarray] = {}
    for (what, images), (precision, extractor) in itertools.product(sets.items(), extractors.items()):
        records = Records(images, torch.zeros(len(images), dtype=torch.int64))
        features[what, precision] = cached_features(records, extractor, cache)
    gaussians = {key: mean_and_covariance(value) for key, value in features.items()}

    def fid(first: tuple[str, str], second: tuple[str, str]) -> float:
        return round(frechet_distance(*gaussians[first], *gaussians[second]), 3)

    pairs: list[tuple[Precision, Precision]] = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")]
    exact, rounded = (np.concatenate([features[what, precision] for what in sets]) for precision in PRECISIONS)
    return {
        "images": IMAGES,
        "difference_of_features": round(float(np.linalg.norm(rounded - exact) / np.linalg.norm(exact)), 4),
        "fid": {
            **{f"samples {a}, real {b}": fid(("samples", a), ("real", b)) for a, b in pairs},
            "real bf16, real fp32": fid(("real", "bf16"), ("real", "fp32")),
        },
    }


def of_inception(device: str) -> dict[str, Any]:
    """Times and features of Inception."""
    extractors = {precision: InceptionFeatures(device, precision=precision) for precision in PRECISIONS}
    pixels = torch.randint(0, 256, (TIMED, 1, 28, 28), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    seconds = seconds_per_image(extractors, pixels, device)
    values: dict[str, Any] = {"seconds_per_image": seconds}
    if seconds["bf16"] > 2.0 * seconds["fp32"]:
        return {**values, "fid": None, "why": "bfloat16 is too slow on this processor"}
    return {**values, **of_features(extractors)}


def measure() -> dict[str, Any]:
    """All values of this benchmark."""
    values: Callable[[str], dict[str, Any]] = of_inception
    return {**on_each_device(__doc__, values), "dp_sinkhorn_step_seconds": step_seconds()}

"""What is measured: the cost of a part of the bench against one of its sizes, with the law that it should follow.

Networks are smaller than the papers', so that all cases together take minutes on one core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

import loky
import torch

from dpgen_bench.evaluate.parallel import ONE_THREAD
from dpgen_bench.nets.transport import Cost, Transport, semi_debiased
from tests.scaling.fits import BEFORE, fit

Measure = Callable[[int], float]


@dataclass(frozen=True)
class Case:
    """One curve of the plot.

    Args:
        part: what is measured.
        size: the quantity that is varied.
        values: its values.
        law: the exponent that the cost should have for large values.
        why: the reason for the law.
        seconds: gives the CPU seconds at one value.
    """

    part: str
    size: str
    values: tuple[int, ...]
    law: float
    why: str
    seconds: Measure


def step(
    method: str,
    settings: str,
    phase: str = "train",
    records: int | str = 1000,
    side: int | str = 28,
    clients: int | str = 10,
) -> Measure:
    """The least CPU time of a step without the first one, which fills caches, or of a whole phase in two fits.

    Other programs take a part of the processor's caches, which only makes a step slower.

    Args:
        settings: overrides, in which {x} is the value of the size.
        phase: the loop of `Context.steps`; all steps together of any other phase than "train".
        records, side, clients: the made-up data, or "{x}".
    """

    def seconds(x: int) -> float:
        overrides = [each if "." in each.split("=")[0] else f"method.{each}" for each in settings.format(x=x).split()]
        size = {
            name: x if value == "{x}" else int(value)
            for name, value in {"records": records, "side": side, "clients": clients}.items()
        }
        fits = [fit(method, overrides, **size).seconds[phase] for _ in range(1 if phase == "train" else 2)]
        return min(fits[0][1:]) if phase == "train" else min(map(sum, fits))

    return seconds


def transport(points: int | None, side: int | None) -> Measure:
    """One loss and gradient of DP-Sinkhorn (p = 0.4) of n points with side^2 pixels and ten classes."""

    def seconds(x: int) -> float:
        n, d = points or x, (side or x) ** 2 + 10
        X, Y = (torch.rand(rows, d, generator=torch.Generator().manual_seed(0)) for rows in (n + 2 * n // 5, n))
        solver = Transport(Cost(1.0, 1.0), lam=0.05)
        times = []
        for _ in range(4):
            start = time.process_time()
            semi_debiased(solver, X, Y, n)
            times.append(time.process_time() - start)
        return min(times[1:])

    return seconds


def _work(seed: int) -> float:
    """CPU seconds of one classifier, as the evaluation trains them, within the process of a worker."""
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression

    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    start = time.process_time()
    LogisticRegression(max_iter=100, C=0.01 * (1 + seed)).fit(images, labels)
    return time.process_time() - start


def by_workers(workers: int) -> float:
    """CPU seconds of eight classifiers in a pool like the evaluation's, without the start of its processes."""
    with loky.ProcessPoolExecutor(max_workers=workers, env=ONE_THREAD) as pool:
        jobs = [pool.submit(_work, seed) for seed in range(8)]
        wait(jobs)
        return sum(job.result() for job in jobs)


RECORDS = (1_000, 4_000, 15_000, 60_000)
MERF = "privacy.epsilon=inf features={x} batch_size=10 steps=2"
DPGAN = "privacy.epsilon=null sigma=1 steps=9 n_d=1 d_g=16"
DPDM = (
    "privacy.epsilon=null sigma=1 steps=4 batch_size=16 noise_levels=2 width=16 multipliers=[1,1] blocks=1 patch=2 "
    "embedding=16 microbatch=null sampler=ddim sampler_steps=2"
)
GS = "privacy.epsilon=null sigma=1 batch_size=16 n_critic=2 generator=dcgan width=16 critic_width=16"
G_PATE = (
    "privacy.epsilon=null teachers={x} steps=4 batch_size=8 sigma=100 teacher=dense teacher_width=64 width=16 "
    "latent_dim=16"
)
FEDAVG = "privacy.epsilon=null selection=fixed steps=5 local_steps=2 g_steps=1 sigma=1 width=0.125 batch_size=16"

CASES: Sequence[Case] = (
    Case(
        "DP-MERF, its release", "records", RECORDS, 1.0, "each record is embedded once",
        step("dp_merf", MERF.format(x=1000), BEFORE, records="{x}"),
    ),
    Case(
        "DPGAN, a step of 32 records", "records", RECORDS, 0.0, "a step computes with the drawn records alone",
        step("dpgan", f"{DPGAN} batch_size=32 d_d=32", records="{x}"),
    ),
    Case(
        "DPGAN, a step", "batch", (16, 32, 64, 128, 256), 1.0, "one gradient for each record of the batch",
        step("dpgan", f"{DPGAN} batch_size={{x}} d_d=32"),
    ),
    Case(
        "DP-Sinkhorn, transport", "batch", (25, 50, 100, 200, 400), 2.0, "a cost for each pair of points",
        transport(None, 28),
    ),
    Case(
        "DP-MERF, its release", "image side", (32, 64, 128, 256), 2.0, "each pixel is multiplied by each frequency",
        step("dp_merf", MERF.format(x=1000), BEFORE, side="{x}", records=250),
    ),
    Case(
        "DPDM, a step", "image side", (16, 32, 64, 96), 2.0, "convolutions visit each pixel",
        step("dpdm", DPDM, side="{x}", records=64),
    ),
    Case(
        "DP-Sinkhorn, transport", "image side", (16, 32, 64, 128), 2.0, "a difference for each pixel",
        transport(50, None),
    ),
    Case(
        "DPGAN, a step", "width", (32, 64, 128, 256), 2.0, "a convolution maps each channel to each channel",
        step("dpgan", f"{DPGAN} batch_size=32 d_d={{x}}"),
    ),
    Case(
        "DP-MERF, its release", "features", (1000, 2000, 4000, 8000), 1.0, "each feature is computed once",
        step("dp_merf", MERF, BEFORE, records=500),
    ),
    Case(
        "GS-WGAN, warm start", "shards K", (2, 4, 8, 16), 1.0, "one critic for each shard",
        step("gs_wgan", f"{GS} shards={{x}} steps={{x}} schedule=public_balanced warm_start=6", "warm_start"),
    ),
    Case(
        "GS-WGAN, a step", "shards K", (2, 4, 8, 16), 0.0, "a step trains the critic of one shard",
        step("gs_wgan", f"{GS} steps=6 shards={{x}} warm_start=1"),
    ),
    Case(
        "G-PATE, a step", "shards K", (10, 20, 40, 80), 1.0, "every teacher votes in each step",
        step("g_pate", G_PATE),
    ),
    Case(
        "Fed-Avg GAN, a round", "clients in a round", (2, 4, 8, 16), 1.0, "every sampled client trains",
        step("fedavg_gan", f"{FEDAVG} clients_per_round={{x}}", clients=40),
    ),
    Case(
        "Fed-Avg GAN, 4 clients a round", "clients", (10, 40, 160), 0.0, "only sampled clients train",
        step("fedavg_gan", f"{FEDAVG} clients_per_round=4", clients="{x}", records=3200),
    ),
    Case(
        "GS-WGAN on clients, a step", "clients", (5, 20, 80), 0.0, "a step asks one client",
        step("fed_gs_wgan", f"{GS} steps=6 warm_start=1", clients="{x}", records=3200),
    ),
    Case(
        "evaluation, 8 classifiers", "workers", (1, 2, 4), 0.0, "processes share the classifiers among them",
        by_workers,
    ),
)  # fmt: skip

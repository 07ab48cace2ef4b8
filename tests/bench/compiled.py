"""What compiling changes in those parts of training steps that can be compiled (`runtime.compile`).

Each part is counted and timed as it is executed ("none"), as a recorded graph ("graph"), and, where there is a C++
compiler or a GPU, compiled by inductor (DPGEN_BENCH_COMPILE=cudagraphs: by cudagraphs). torch.profiler counts the calls
that a program makes and an accelerator's kernels; calls of compiled kernels are counted in the code that inductor
writes. Times are medians of rounds that are interleaved in one process; on a CPU they are processor time.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dpgen_bench.nets.conv_generator import ConvGenerator
from dpgen_bench.nets.dpgan import DiscriminatorNet
from dpgen_bench.nets.edm import Denoiser
from dpgen_bench.nets.stack import Stack
from dpgen_bench.nets.wasserstein import CriticTraining
from dpgen_bench.nets.wgan import ProjectionCritic
from dpgen_bench.privacy.batch import Batch
from dpgen_bench.privacy.bounds import PerRecordGradient
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.padding import Padding
from dpgen_bench.privacy.record_rng import RecordRng
from dpgen_bench.utils import compiled
from tests.bench._counts import Counter, seconds, synchronise
from tests.bench._machine import on_each_device

ROUNDS = 5
_COMPILED_CALL = re.compile(r"^ +(?:cpp_fused|triton_)\w*(?:\.run)?\(", re.MULTILINE)


def dpgan_sum(device: str, rows: int = 256) -> dict[str, Any]:
    """The clipped sum of DPGAN's discriminator at the paper's width."""
    net = DiscriminatorNet((1, 28, 28), 10).to(device)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        logits = net(x, y)
        return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits), reduction="none")

    return _clipped_sum(losses, PerRecordGradient(C=1.0, module=net, pure=True), rows, device)


def dpdm_sum(device: str, rows: int = 100) -> dict[str, Any]:
    """The clipped sum of DPDM's denoiser at the sizes of the reduced preset, on two noisy copies of each record."""
    net = Denoiser((1, 28, 28), 10, width=32, multipliers=[1], blocks=1, patch=4, embedding=64).to(device)

    def losses(x: Tensor, y: Tensor, rng: RecordRng) -> Tensor:
        return net.losses(2.0 * x - 1.0, y, torch.exp(1.2 * rng.normal() - 0.4), rng.normal((1, 28, 28)))

    return _clipped_sum(losses, PerRecordGradient(C=1.0, module=net, copies=2, pure=True), rows, device)


def _clipped_sum(losses: Callable[..., Tensor], bound: PerRecordGradient, rows: int, device: str) -> dict[str, Any]:
    """A clipped sum on a padded draw."""
    torch.manual_seed(0)
    images, labels = torch.rand(rows, 1, 28, 28, device=device), torch.arange(rows, device=device) % 10
    real = torch.arange(rows, device=device) < rows - rows // 6
    ids = torch.arange(rows, device=device)
    batch = Batch(images, labels, ids, Key.seeded("bench"), real=real, padding=Padding(rows, 1))
    return _compared(lambda: partial(bound.value, losses, batch, None), ("none", "graph"), device)


def sinkhorn_generator(device: str, rows: int = 70) -> dict[str, Any]:
    """DP-Sinkhorn's generator at the paper's width, forwards and backwards: n = 50 images and n' = 20 of debiasing."""
    torch.manual_seed(0)
    net = ConvGenerator((1, 28, 28), 10, latent_dim=12, label_dim=4, activation="relu").to(device)
    z, y = torch.rand(rows, 12, device=device), torch.arange(rows, device=device) % 10
    gradient = torch.randn(rows, 1, 28, 28, device=device)

    def make() -> Callable[[], None]:
        images = compiled.network(net)
        return lambda: images(z, y).backward(gradient)

    return _compared(make, ("none",), device)


def critics(device: str, stacked: int = 4) -> dict[str, Any]:
    """One update of a stack of GS-WGAN's critics at the paper's width and batch size, with its gradient penalty."""
    torch.manual_seed(0)
    training = CriticTraining()
    rng = torch.Generator().manual_seed(0)
    size = (stacked, training.batch_size)
    real, fake = (torch.rand(*size, 1, 28, 28, generator=rng).to(device) for _ in range(2))
    labels = torch.randint(10, size, generator=rng).to(device)
    mix = torch.rand(*size, 1, 1, 1, generator=rng).to(device)

    def make() -> Callable[[], None]:
        template = ProjectionCritic((1, 28, 28), 10).to(device)
        rngs = [torch.Generator().manual_seed(i) for i in range(stacked)]
        tensors = Stack.initial(lambda: ProjectionCritic((1, 28, 28), 10), rngs)
        stack = training.stack(template, {name: value.to(device) for name, value in tensors.items()})
        return lambda: training.update(stack, real, fake, labels, mix)

    return _compared(make, ("none", "graph"), device)


def _compared(make: Callable[[], Callable[[], Any]], ways: Sequence[str], device: str) -> dict[str, Any]:
    """What one call of a part does and takes in each way.

    Args:
        make: returns the call; it is called once for each way, and what it makes is compiled in that way.
    """
    compiles = device == "cuda" or shutil.which("g++") is not None
    backend = os.environ.get("DPGEN_BENCH_COMPILE", "inductor") if compiles else None
    calls, values = {}, {}
    for name in [*ways, *filter(None, [backend])]:
        with compiled.using(name):
            calls[name] = make()
        values[name] = _counted(calls[name], name, device)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            with compiled.using(name):
                synchronise(device)
                start = seconds(device)
                call()
                synchronise(device)
            times[name].append(seconds(device) - start)
    return {
        name: {"measured_ms": round(1e3 * statistics.median(times[name]), 3), **counts}
        for name, counts in values.items()
    }


def _counted(once: Callable[[], Any], backend: str, device: str) -> dict[str, Any]:
    """What one call calls; its graph is recorded and compiled here."""
    values: dict[str, Any] = {}
    with compiled.using(backend), config.patch(fx_graph_cache=False):  # inductor writes its code, which is counted
        _, codes = run_and_get_code(once)
        if codes:
            values["calls_of_compiled_kernels"] = sum(len(_COMPILED_CALL.findall(code)) for code in codes)
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]) as seen:
            once()
        events = list(seen.events() or [])
        if device == "cuda":
            values["kernels"] = sum(event.device_type == DeviceType.CUDA for event in events)
        else:  # a compiled kernel of a CPU is no event of its own: outermost events are what the program calls
            values["outermost_events"] = sum(event.cpu_parent is None for event in events)
        if backend in ("none", "graph"):  # PyTorch does not execute compiled functions inside of a dispatch mode
            with Counter() as counter:
                once()
            values |= counter.values()
    return values


def measure() -> dict[str, Any]:
    """All values of this benchmark."""
    return on_each_device(
        __doc__,
        lambda device: {
            "clipped sum of DPGAN, 256 rows": dpgan_sum(device),
            "clipped sum of DPDM, 100 records": dpdm_sum(device),
            "generator of DP-Sinkhorn, 70 images": sinkhorn_generator(device),
            "update of 4 critics of GS-WGAN": critics(device),
        },
    )

"""What a training step computes, how long an H200 must take for it at least, and how long it took here.

The last step of a short fit on made-up records, at the settings of a short preset (PRESETS): operations of PyTorch,
each at least one kernel on an accelerator, their floating-point operations, and the bytes that they read and write.
The bound is the sum over operations of the longer of two times: that of their floating-point operations at the peak of
an H200 for float32 without TF32 (67 TFLOP/s), and that of their bytes at its bandwidth (4.8 TB/s). With 2 microseconds
for each kernel it is the time of a program that launches one after the other. The clipped sums of DPGAN and DPDM are
counted as they are executed, as recorded graphs, and, where there is a C++ compiler or a GPU, compiled by inductor
(DPGEN_BENCH_COMPILE=cudagraphs: by cudagraphs). torch.profiler counts the other calls and an accelerator's kernels;
calls of compiled kernels are counted in the code that inductor writes. Times of clipped sums are medians of rounds that
are interleaved in one process. On a CPU, measured times are processor time.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context, Scale, fit_method
from dpgen_bench.nets.dpgan import DiscriminatorNet
from dpgen_bench.nets.edm import Denoiser
from dpgen_bench.privacy import isolation
from dpgen_bench.privacy.batch import Batch
from dpgen_bench.privacy.bounds import PerRecordGradient
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.padding import Padding
from dpgen_bench.privacy.record_rng import RecordRng
from dpgen_bench.privacy.services import Services
from dpgen_bench.runs.config import RunSpec, build_dataset, build_method, compose_config
from dpgen_bench.testing.suite import random_data
from dpgen_bench.training.loop import Loop
from dpgen_bench.utils import compiled
from tests.bench._machine import on_each_device

FLOPS, BYTES, LAUNCH = 67e12, 4.8e12, 2e-6  # of an H200: float32 and bandwidth per second; seconds of a short kernel
PRESETS = {name: f"quick/{name}" for name in ("dpgan", "dp_sinkhorn", "gs_wgan")} | {"dpdm": "dpdm/reduced_mnist"}
STEPS, RECORDS, ROUNDS = 3, 2048, 5
_COMPILED_CALL = re.compile(r"^ +(?:cpp_fused|triton_)\w*(?:\.run)?\(", re.MULTILINE)


class Counter(TorchDispatchMode):
    """Counts operations, their floating-point operations and bytes, and the bound on their time."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.flops, self.bytes, self.seconds = 0, 0, 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.name in ("aten::detach", "aten::_local_scalar_dense"):
            return result
        count = flop_registry.get(func.overloadpacket)
        flops = 0 if count is None else int(count(*args, **(kwargs or {}), out_val=result))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.operations += 1
        self.flops += flops
        self.bytes += size
        self.seconds += max(flops / FLOPS, size / BYTES)
        return result

    def values(self) -> dict[str, Any]:
        with_launches = self.seconds + self.operations * LAUNCH
        return {
            "operations": self.operations,
            "floating_point_operations": self.flops,
            "bytes": self.bytes,
            "bound_h200_ms": round(1e3 * self.seconds, 4),
            "bound_h200_one_kernel_after_the_other_ms": round(1e3 * with_launches, 4),
        }


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _seconds(device: str) -> float:
    """Time on an accelerator; on a CPU processor time, which other work on the machine disturbs little."""
    return time.perf_counter() if device == "cuda" else time.process_time()


def of_method(name: str, device: str) -> dict[str, Any]:
    """The counts of the last of STEPS steps of a method, and the measured time of the one before it."""
    config = compose_config([f"experiment={PRESETS[name]}", "dataset=mnist"])
    dataset = build_dataset(config)
    records = random_data(dataset.image_shape, RECORDS, dataset.num_classes, 8, seed=0)
    ledger = Ledger(RunSpec(config, training={}).budget(), RECORDS)
    services = Services(ledger, Key.seeded("bench"), torch.device(device), padded=True)
    data = PrivateData(records.images, records.labels, dataset.num_classes, services)
    result: dict[str, Any] = {}
    steps = Loop.steps

    def counted(loop: Loop, total: int, phase: str, stateful: Any) -> Iterator[int]:
        for t in steps(loop, total, phase, stateful):
            _synchronise(device)
            start = _seconds(device)
            if t < total - 1 or phase != "train":
                yield t
                _synchronise(device)
                result["measured_ms"] = round(1e3 * (_seconds(device) - start), 3)
            else:
                with Counter() as counter:
                    yield t
                result.update(counter.values())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "steps", counted)
        patch.setattr(isolation, "_len_torch_dispatch_stack", lambda: 0)  # clipping and noise are counted, too
        fit_method(build_method(config), data, Context(0, device, services=services, scale=Scale("bench", STEPS)))
    return result


def of_dpgan(device: str, rows: int = 256) -> dict[str, Any]:
    """The clipped sum of DPGAN's discriminator at the paper's width."""
    net = DiscriminatorNet((1, 28, 28), 10).to(device)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        logits = net(x, y)
        return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits), reduction="none")

    return _clipped_sum(losses, PerRecordGradient(C=1.0, module=net, pure=True), rows, device)


def of_dpdm(device: str, rows: int = 100) -> dict[str, Any]:
    """The clipped sum of DPDM's denoiser at the sizes of the reduced preset, on two noisy copies of each record."""
    net = Denoiser((1, 28, 28), 10, width=32, multipliers=[1], blocks=1, patch=4, embedding=64).to(device)

    def losses(x: Tensor, y: Tensor, rng: RecordRng) -> Tensor:
        return net.losses(2.0 * x - 1.0, y, torch.exp(1.2 * rng.normal() - 0.4), rng.normal((1, 28, 28)))

    return _clipped_sum(losses, PerRecordGradient(C=1.0, module=net, copies=2, pure=True), rows, device)


def _clipped_sum(losses: Callable[..., Tensor], bound: PerRecordGradient, rows: int, device: str) -> dict[str, Any]:
    """A clipped sum on a padded draw: as it is executed, as a recorded graph, and compiled."""
    torch.manual_seed(0)
    images, labels = torch.rand(rows, 1, 28, 28, device=device), torch.arange(rows, device=device) % 10
    real = torch.arange(rows, device=device) < rows - rows // 6
    ids = torch.arange(rows, device=device)
    batch = Batch(images, labels, ids, Key.seeded("bench"), real=real, padding=Padding(rows, 1))
    compiles = device == "cuda" or shutil.which("g++") is not None
    backend = os.environ.get("DPGEN_BENCH_COMPILE", "inductor") if compiles else None
    ways = ["none", "graph", *filter(None, [backend])]
    values = {name: _counted(lambda: bound.value(losses, batch, None), name, device) for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name in ways:
            with compiled.using(name):
                _synchronise(device)
                start = _seconds(device)
                bound.value(losses, batch, None)
                _synchronise(device)
            seconds[name].append(_seconds(device) - start)
    return {
        name: {"measured_ms": round(1e3 * statistics.median(seconds[name]), 3), **counts}
        for name, counts in values.items()
    }


def _counted(once: Callable[[], Any], backend: str, device: str) -> dict[str, Any]:
    """What one clipped sum calls; its graph is recorded and compiled here."""
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
            "step": {name: of_method(name, device) for name in PRESETS},
            "clipped sum of DPGAN, 256 rows": of_dpgan(device),
            "clipped sum of DPDM, 100 records": of_dpdm(device),
        },
    )

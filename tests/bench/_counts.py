"""Counts what a computation does: operations of PyTorch, floating-point operations, bytes, and a bound on an H200."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

FLOPS, BYTES, LAUNCH = 67e12, 4.8e12, 2e-6  # of an H200: float32 and bandwidth per second; seconds of a short kernel


class Counter(TorchDispatchMode):
    """Counts operations, their floating-point operations and bytes, and the bound on their time.

    The bound is the sum over operations of the longer of two times: that of their floating-point operations at the peak
    of an H200 for float32 without TF32 (67 TFLOP/s), and that of their bytes at its bandwidth (4.8 TB/s). A second
    bound adds 2 microseconds for each operation, as for a program that launches one kernel after the other.
    """

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


def synchronise(device: str) -> None:
    """Wait for an accelerator; nothing on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(device: str) -> float:
    """Time on an accelerator; on a CPU processor time, which other work on the machine disturbs little."""
    return time.perf_counter() if device == "cuda" else time.process_time()

"""Copies of tensors to and from an accelerator for which the program does not wait."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """`values`, a tensor on the host, on `device`.

    The copy is queued behind the device's earlier work. It needs page-locked memory: a copy from ordinary memory waits
    until the device has done all its work.
    """
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def download(values: Tensor) -> Callable[[], Tensor]:
    """Start a copy of `values` to the host, and return a function that waits for this copy alone, and gives it.

    Work that was queued after the copy goes on meanwhile. On a CPU the function gives `values` itself.
    """
    if values.device.type != "cuda":
        return lambda: values
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> Tensor:
        done.synchronize()
        return copy

    return wait

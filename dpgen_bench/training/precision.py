"""The precision of public computation: networks outside of private functions.

Private functions compute in float32 at every precision, because rounding errors of clipped sums are known for
float32 only (`privacy.gradients.rounding`), and because a lower precision would round records. Three precisions are
possible for the networks that a method passes to `Context.steps`:

- "fp32": float32. On an accelerator products are not rounded to TF32, which is PyTorch's default for convolutions.
- "tf32": float32 on an accelerator, where the factors of products are rounded to TF32 (10 bits).
- "bf16": autocast to bfloat16 (7 bits) within each network; what a network returns is float32 again. Parameters,
  optimisers, losses and all other public computation stay float32.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from dpgen_bench.utils.execution import Precision

_private = threading.local()  # `depth` of `private_computation` blocks in this thread


def expect_possible(precision: Precision, device: torch.device) -> Precision:
    """The precision, which is checked to be one in which the device can compute.

    Raises:
        ValueError: For TF32 on a CPU.
    """
    if precision == "tf32" and device.type != "cuda":
        raise ValueError(
            f"expected a GPU for runtime.precision=tf32, got the device {device}; use fp32 or bf16, or another device."
        )
    return precision


@contextmanager
def private_computation() -> Iterator[None]:
    """Compute in float32 within the block, without autocast, TF32 and bfloat16; for functions that see records."""
    depth = getattr(_private, "depth", 0)
    _private.depth = depth + 1
    try:
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(products_in("ieee"))
            yield
    finally:
        _private.depth = depth


@contextmanager
def public_computation(precision: Precision, device: torch.device) -> Iterator[None]:
    """Round the factors of products on an accelerator as `precision` says, within the block."""
    with products_in("tf32" if precision == "tf32" else "ieee") if device.type == "cuda" else ExitStack():
        yield


@contextmanager
def networks_in(precision: Precision, device: torch.device, networks: Iterable[nn.Module]) -> Iterator[None]:
    """Let networks compute in a precision while the block runs, except within `private_computation`."""
    handles: list[RemovableHandle] = []
    entered: list[torch.autocast | None] = []  # of the calls that are running, innermost last

    def before(module: nn.Module, arguments: Any) -> None:
        context = None if getattr(_private, "depth", 0) else torch.autocast(device.type, torch.bfloat16)
        if context is not None:
            context.__enter__()
        entered.append(context)

    def after(module: nn.Module, arguments: Any, output: Any) -> Any:
        context = entered.pop()
        if context is None:
            return output
        context.__exit__(None, None, None)
        return tree_map(_as_float32, output)

    if precision == "bf16":
        for network in networks:
            handles.append(network.register_forward_pre_hook(before))
            # Also after an error, so that autocast does not stay switched on.
            handles.append(network.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def steps_in(
    precision: Precision, device: torch.device, networks: Iterable[nn.Module], steps: Iterator[int]
) -> Iterator[int]:
    """The steps of a loop, in which networks compute as `networks_in` says."""
    with networks_in(precision, device, networks):
        yield from steps


def _as_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


@contextmanager
def products_in(rounding: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Set how the factors of float32 products and convolutions are rounded: not at all, or to TF32 (GPUs only).

    The error margins of `privacy.gradients` are valid for "ieee" alone.
    """
    settings: list[Any] = [torch.backends.mkldnn.conv, torch.backends.mkldnn.matmul] if rounding == "ieee" else []  # type: ignore[attr-defined]
    if torch.cuda.is_available():
        settings += [torch.backends.cudnn.conv, torch.backends.cuda.matmul]  # type: ignore[attr-defined]
    # A setting "none" rounds nothing. It is left alone, because some functions of PyTorch refuse to work when settings
    # of this and of its older interface are mixed.
    same = ("none", "ieee") if rounding == "ieee" else (rounding,)
    before = {setting: setting.fp32_precision for setting in settings if setting.fp32_precision not in same}
    for setting in before:
        setting.fp32_precision = rounding
    try:
        yield
    finally:
        for setting, precision in before.items():
            setting.fp32_precision = precision

"""The back end "opacus": clipped gradient sums from all per-record gradients, which Opacus's hooks compute.

It is the reference for the back end "bookkeeping". Opacus has rules for common layers and uses torch.func for all
others, so that this back end covers more modules. It takes several times as long, and memory for b gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpgen_bench.privacy.gradients.capture import Recorder, own_trainable, refuse_hidden_weights
from dpgen_bench.privacy.gradients.rounding import BASE, SMALLEST_FACTOR, expect_full_precision
from dpgen_bench.training.precision import products_in

if TYPE_CHECKING:
    from opacus.grad_sample import GradSampleModule

_LEFT_ON_LAYERS = ("activations", "max_batch_len", "ft_compute_sample_grad", "autograd_grad_sample_hooks")


@cache
def _hooks_in_any_mode() -> type[GradSampleModule]:
    """Opacus's hooks, also for modules in eval mode: Opacus records activations in train mode only.

    Opacus is imported here, because its import takes as long as all others together.
    """
    from opacus.grad_sample import GradSampleModule

    class InAnyMode(GradSampleModule):
        def capture_activations_hook(self, module: nn.Module, forward_input: Any, _forward_output: Any) -> None:
            mode, module.training = module.training, True
            try:
                super().capture_activations_hook(module, forward_input, _forward_output)
            finally:
                module.training = mode

    return InAnyMode


def layers_to_record(module: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Module]:
    """Name -> layer, for every layer whose gradients Opacus computes.

    Raises:
        ValueError: for layers that Opacus does not cover, or for which its gradients are wrong without an error.
    """
    refuse_hidden_weights(module, parameters, also_shared=False)
    names = {id(layer): name for name, layer in module.named_modules()}
    for name, layer in module.named_modules():
        if getattr(layer, "inplace", False):
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) works in place, which overwrites values before Opacus's "
                "hooks read them; construct it with inplace=False (backend='bookkeeping' covers in-place activations)."
            )
        if not own_trainable(layer):
            continue
        if list(layer.buffers()):
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) has trainable parameters and buffers, which Opacus does not "
                "cover: freeze its parameters, or use a layer without running statistics."
            )
        if getattr(layer, "padding_mode", "zeros") != "zeros":
            raise ValueError(
                f"layer {name!r} has padding_mode={layer.padding_mode!r}, which Opacus would treat as zeros; pad the "
                "input with torch.nn.functional.pad and use padding=0 in the layer."
            )
        if isinstance(layer, nn.Embedding) and (
            layer.max_norm is not None or layer.scale_grad_by_freq or layer.padding_idx is not None
        ):
            raise ValueError(
                f"embedding {name!r} has max_norm, scale_grad_by_freq or padding_idx set, which Opacus ignores; "
                "construct it without them (backend='bookkeeping' covers padding_idx)."
            )
    hooks = object.__new__(_hooks_in_any_mode())
    return {names[id(layer)]: layer for layer in hooks.iterate_submodules(module)}


@contextmanager
def _hooked(module: nn.Module) -> Iterator[None]:
    """Register Opacus's hooks on `module` inside the block; restore the module after it, also after an error."""
    layers = list(module.modules())
    full = {layer: layer._is_full_backward_hook for layer in layers}
    hooks = _hooks_in_any_mode()(module, loss_reduction="sum")
    try:
        with warnings.catch_warnings():
            # The first layer's input needs no gradient, for which PyTorch issues a warning.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            yield
    finally:
        hooks.cleanup()
        for layer in layers:
            layer._is_full_backward_hook = full[layer]
            for name in _LEFT_ON_LAYERS:
                if name in layer.__dict__:
                    delattr(layer, name)


def _norms(samples: dict[str, Tensor], finite: Tensor) -> Tensor:
    """Norms [b] over all parameters, NaN or infinite where a gradient is; 0 for records with `finite` [b] False."""
    # In float64, because squares of 1e30 overflow float32, and float32 norms of a million numbers have errors of 1e-5.
    each = [torch.linalg.vector_norm(sample.flatten(1), dim=1, dtype=torch.float64) for sample in samples.values()]
    norms = torch.linalg.vector_norm(torch.stack(each, dim=1), dim=1)
    return torch.where(finite, norms, torch.zeros_like(norms))


def clipped_sum(
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    losses_of: Callable[[tuple[Tensor, ...]], Tensor],
    rows: tuple[Tensor, ...],
    max_norm: float,
    copies: int = 1,
    include: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """The same as `bookkeeping.clipped_sum`, by Opacus's GradSampleModule; copies take memory for a gradient each.

    The program waits for an accelerator, also with `include`.
    """
    layers = layers_to_record(module, parameters)
    with _hooked(module):
        with Recorder(layers) as recorder:
            losses = losses_of(rows)
        recorder.refuse_use_outside_layers(losses, parameters)
        finite = torch.isfinite(losses.detach())
        if include is not None:
            finite = finite & include
        # `grad`, not `backward`, so that .grad does not change. The hooks write grad_sample.
        torch.autograd.grad(losses, list(parameters.values()), finite.to(losses.dtype), allow_unused=True)
        samples = {
            name: parameter.grad_sample  # type: ignore[attr-defined]
            for name, parameter in parameters.items()
            if parameter.grad_sample is not None  # type: ignore[attr-defined]
        }
    # Opacus takes dimension 0 for the records, so check its size, and the precision.
    b = len(losses)
    for name, sample in samples.items():
        if not isinstance(sample, Tensor) or len(sample) != b * copies:
            got = tuple(sample.shape) if isinstance(sample, Tensor) else type(sample).__name__
            raise ValueError(
                f"expected Opacus to give {b * copies} per-record gradients for {name!r}, got {got}. Keep the "
                "records in dimension 0 throughout the module."
            )
    expect_full_precision("the loss", losses.dtype)
    for name, sample in samples.items():
        expect_full_precision(f"the per-record gradients of {name!r}", sample.dtype)
    if copies > 1:
        samples = {name: sample.unflatten(0, (b, copies)).sum(1) for name, sample in samples.items()}
    norms = _norms(samples, finite)
    keep = finite & torch.isfinite(norms)
    norms = torch.where(keep, norms, torch.zeros_like(norms)) * (1.0 + BASE)
    # Clip factors. A float32 factor near the denormal numbers may have a large relative error, so records with such
    # factors are scaled in float64.
    exact_factors = max_norm / norms.clamp_min(max_norm)
    factors = exact_factors.to(losses.dtype)
    tiny_factor = torch.nonzero(keep & (exact_factors < SMALLEST_FACTOR)).flatten()
    factors[tiny_factor] = 1.0
    sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    dropped = torch.nonzero(~keep).flatten()
    for name, sample in samples.items():
        if len(dropped):
            sample.index_fill_(0, dropped, 0.0)  # Before the contraction, because 0 * NaN is NaN.
        if len(tiny_factor):
            scale = exact_factors[tiny_factor].view(-1, *[1] * (sample.dim() - 1))
            sample[tiny_factor] = (sample[tiny_factor].double() * scale).to(sample.dtype)
        with products_in("ieee"):
            sums[name] += (factors @ sample.flatten(1)).view_as(sums[name])
    return sums, norms.to(losses.dtype)

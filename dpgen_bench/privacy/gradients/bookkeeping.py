"""The back end "bookkeeping": clipped gradient sums from one backward pass, mostly without per-record gradients.

The forward pass records the input of every layer with trainable parameters. The backward pass computes the gradients
in the layers' outputs only, and no weight gradients. Inputs and output gradients give the norms (layers.py), and one
contraction with the clip factors gives Σ_i min(1, C/‖g_i‖) g_i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from dpgen_bench.privacy.gradients.capture import Recorder, own_trainable, refuse_hidden_weights
from dpgen_bench.privacy.gradients.convolution import Correlations
from dpgen_bench.privacy.gradients.layers import LayerGradient, LookUps, OuterProducts
from dpgen_bench.privacy.gradients.rounding import (
    BASE,
    LARGEST_SQUARE,
    LEAST_FACTOR,
    MOST_CONTRACTED,
    MOST_IN_FLOAT32,
    PER_TERM,
    cancellation,
    expect_full_precision,
    upper_norm,
)
from dpgen_bench.training.precision import products_in

_NUMBERS_IN_FLOAT64 = 2**23  # of per-record gradients in memory at the same time: 64 MiB
SUPPORTED = "Linear, Conv2d, ConvTranspose2d and Embedding"


def layers_to_record(module: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Module]:
    """Name -> layer, for every layer that holds trainable parameters.

    Raises:
        ValueError: if one of them is not covered; names the layer and says what to do.
    """
    refuse_hidden_weights(module, parameters, also_shared=True)
    layers: dict[str, nn.Module] = {}
    for name, layer in module.named_modules():
        if not own_trainable(layer):
            continue
        remedy = "use backend='opacus', or freeze its parameters"
        # Subclasses are refused, too: an overridden forward may not be linear in the weight.
        if type(layer) not in (nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.Embedding):
            raise ValueError(
                f"backend='bookkeeping' covers {SUPPORTED}; layer {name!r} is a {type(layer).__name__}: {remedy}."
            )
        if not {own for own, _ in layer.named_parameters(recurse=False)} <= {"weight", "bias"}:
            raise ValueError(f"layer {name!r} has parameters other than weight and bias: {remedy}.")
        if isinstance(layer, nn.Conv2d) and layer.padding_mode != "zeros":
            raise ValueError(
                f"layer {name!r} has padding_mode={layer.padding_mode!r}, which no back end for per-record gradients "
                "covers; pad the input with torch.nn.functional.pad and use padding=0 in the layer."
            )
        if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq):
            raise ValueError(
                f"embedding {name!r} has max_norm or scale_grad_by_freq set, which make a record's gradient depend on "
                "the whole batch; construct it without them."
            )
        layers[name] = layer
    return layers


def _layer_gradient(layer: nn.Module, inputs: Tensor, gradients: Tensor, copies: int) -> LayerGradient:
    if isinstance(layer, nn.Linear):
        return OuterProducts(layer, inputs, gradients, copies)
    if isinstance(layer, nn.Embedding):
        return LookUps(layer, inputs, gradients, copies)
    if isinstance(layer, nn.Conv2d):
        return Correlations.of_convolution(layer, inputs, gradients, copies)
    assert isinstance(layer, nn.ConvTranspose2d)
    return Correlations.of_transposed(layer, inputs, gradients, copies)


def _expect_rows(name: str, layer: nn.Module, inputs: Tensor, gradients: Tensor, rows: int) -> None:
    """Check that a layer's input and output gradient have one row per copy of a record, and full precision."""
    dimensions = {nn.Linear: 2, nn.Embedding: 1}.get(type(layer), 4)
    if inputs.dim() < dimensions or len(inputs) != rows or len(gradients) != rows:
        raise ValueError(
            f"expected the input of layer {name!r} to have {rows} rows, one per record (or copy of a record), in "
            f"dimension 0, and at least "
            f"{dimensions} dimensions; got shape {tuple(inputs.shape)}, and {tuple(gradients.shape)} of the output. "
            "Keep the records in dimension 0 throughout the module."
        )
    assert isinstance(layer.weight, Tensor)
    dtype = layer.weight.dtype
    floating = inputs.dtype if inputs.is_floating_point() else dtype
    expect_full_precision(f"layer {name!r} (weight, input, output gradient)", dtype, floating, gradients.dtype)


def clipped_sum(
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    losses_of: Callable[[tuple[Tensor, ...]], Tensor],
    rows: tuple[Tensor, ...],
    max_norm: float,
    copies: int = 1,
    include: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Σ_i min(1, max_norm/‖g_i‖) g_i by parameter name, and the norms [b] (rounded up; 0 for dropped records).

    Args:
        parameters: the trainable parameters of `module` by name.
        losses_of: rows -> losses [b], already checked for shape.
        rows: tensors [b, ...], b >= 1.
        copies: the number of consecutive rows that each layer has for a record.
        include: bool [b], the rows that are records; the others are padding and add exactly zero. Shapes and operations
            then depend on no value, so that the program does not wait for an accelerator that computes float64 fast.
    """
    with Recorder(layers_to_record(module, parameters)) as recorder:
        losses = losses_of(rows)
    recorder.refuse_use_outside_layers(losses, parameters)
    layer_gradients, finite = _layer_gradients(recorder, losses, copies, include)

    with products_in("ieee"):
        if include is not None and fast_in_float64(losses.device):
            return _clip_and_add_without_branches(parameters, layer_gradients, finite, max_norm, losses.dtype)
        return _clip_and_add(parameters, layer_gradients, finite, max_norm, losses.dtype, include)


def fast_in_float64(device: torch.device) -> bool:
    """Whether float64 products take at most a few times as long as float32 ones; on most GPUs for games they do not."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) in ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))


def _clip_and_add_without_branches(
    parameters: dict[str, nn.Parameter],
    layer_gradients: dict[str, LayerGradient],
    finite: Tensor,
    max_norm: float,
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], Tensor]:
    """As `_clip_and_add`, by operations that do not depend on values; rounding.py says why the norms are bounds.

    Records whose inputs or gradients are so large that float32 does not represent their clipped gradient (a norm of
    2^120 max_norm, an input of 1e24) add zero. Whether a record does depends on this record alone.
    """
    for gradient in layer_gradients.values():
        gradient.wide = True
    squared, terms = _added_up((gradient.squared_norms() for gradient in layer_gradients.values()), finite)
    norms = upper_norm(squared, terms)
    keep = finite & (norms * LEAST_FACTOR < max_norm)  # false for NaN, too
    norms = torch.where(keep, norms, 0.0)
    factors = torch.where(keep, max_norm / norms.clamp_min(max_norm), 0.0)
    sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for gradient in layer_gradients.values():
        gradient.keep_only(keep)  # before the contraction, because 0 * NaN is NaN
    _add_weighted(sums, layer_gradients, factors.to(dtype))
    return sums, norms.to(dtype)


def _added_up(of_layers: Iterable[tuple[Tensor, Tensor]], finite: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over layers of ‖gradient‖² and of the terms that cancel in it, both float64 [b], `finite` being [b]."""
    squared = torch.zeros(len(finite), dtype=torch.float64, device=finite.device)
    terms = torch.zeros_like(squared)
    for layer_squared, layer_terms in of_layers:
        squared += layer_squared
        terms += layer_terms
    return squared, terms


def _add_weighted(sums: dict[str, Tensor], layer_gradients: dict[str, LayerGradient], factors: Tensor) -> None:
    """Add the gradients of all records, each times its factor [b]."""
    for name, gradient in layer_gradients.items():
        for parameter, total in gradient.weighted_sum(factors).items():
            sums[_join(name, parameter)] += total


def _clip_and_add(
    parameters: dict[str, nn.Parameter],
    layer_gradients: dict[str, LayerGradient],
    finite: Tensor,
    max_norm: float,
    dtype: torch.dtype,
    include: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """The clipped sum and the norms, as `clipped_sum` returns them, of records with a `finite` [b] loss.

    Norms and contraction have one of three precisions for each record; rounding.py says why.
    """
    # Norms from float32 Gram matrices.
    in_float32 = {name: gradient.squared_norms() for name, gradient in layer_gradients.items()}
    squared, terms = _added_up(in_float32.values(), finite)
    kappa = cancellation(squared, terms)
    margin = BASE + PER_TERM * kappa
    ordinary = finite & (squared < LARGEST_SQUARE) & (terms < LARGEST_SQUARE)

    # One question to the device: does any record need more than float32? In most steps none does.
    in_float32_alone = ordinary & (kappa <= MOST_IN_FLOAT32)
    all_ordinary = bool((in_float32_alone if include is None else in_float32_alone | ~include).all())
    if not all_ordinary:
        # Norms from float64 Gram matrices, where terms cancel much.
        rows = torch.nonzero(ordinary & (kappa > MOST_IN_FLOAT32)).flatten()
        if len(rows):
            squared[rows] = torch.stack(
                [
                    # Where a float32 gradient was formed, it is the summand, so its norm is the relevant one.
                    in_float32[name][0][rows]
                    if gradient.kept is not None
                    else gradient.in_float64(rows).squared_norms()[0]
                    for name, gradient in layer_gradients.items()
                ]
            ).sum(0)
            kappa = cancellation(squared, terms)
            margin[rows] = BASE + PER_TERM * kappa[rows].sqrt()
        ordinary &= kappa <= MOST_CONTRACTED

    # The contraction in float32; the other records are added in float64.
    norms = torch.where(ordinary, squared.sqrt() * (1.0 + margin), torch.zeros_like(squared))
    factors = torch.where(ordinary, max_norm / norms.clamp_min(max_norm), torch.zeros_like(norms))
    sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    if not all_ordinary:
        others = torch.nonzero(finite & ~ordinary).flatten()
        if len(others):
            norms[others] = _add_in_float64(sums, layer_gradients, others, max_norm)
        all_ordinary = bool(ordinary.all())
    if include is not None or not all_ordinary:
        for gradient in layer_gradients.values():
            gradient.keep_only(ordinary)
    _add_weighted(sums, layer_gradients, factors.to(dtype))
    return sums, norms.to(dtype)


def _join(layer: str, parameter: str) -> str:
    return f"{layer}.{parameter}" if layer else parameter


def _layer_gradients(
    recorder: Recorder, losses: Tensor, copies: int, include: Tensor | None
) -> tuple[dict[str, LayerGradient], Tensor]:
    """Input and output gradient of each layer, by name, and which rows are records with a finite loss, bool [b]."""
    names = [call.name for call in recorder.calls]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"layer {name!r} is called more than once in one loss, which backend='bookkeeping' does not cover; use "
                "backend='opacus', or one call on the concatenated batch."
            )
    finite = torch.isfinite(losses.detach())
    if include is not None:
        finite = finite & include
    gradients = torch.autograd.grad(
        losses, [call.edge for call in recorder.calls], finite.to(losses.dtype), allow_unused=True
    )
    layer_gradients: dict[str, LayerGradient] = {}
    for call, gradient in zip(recorder.calls, gradients, strict=True):
        if gradient is None:  # The loss does not depend on this output.
            continue
        inputs = call.intact_input()
        _expect_rows(call.name, call.layer, inputs, gradient, len(losses) * copies)
        layer_gradients[call.name] = _layer_gradient(call.layer, inputs, gradient, copies)
    return layer_gradients, finite


def _add_in_float64(
    sums: dict[str, Tensor], layer_gradients: dict[str, LayerGradient], rows: Tensor, max_norm: float
) -> Tensor:
    """Add the clipped gradients of the records `rows` [r] to `sums`, computed in float64; returns their norms [r].

    A record whose gradient is not finite in float64 adds nothing and has norm 0.
    """
    numbers = sum(total.numel() for total in sums.values())
    norms = []
    for part in rows.split(max(1, _NUMBERS_IN_FLOAT64 // numbers)):
        formed = {
            _join(name, parameter): values.flatten(1)
            for name, gradient in layer_gradients.items()
            for parameter, values in gradient.in_float64(part).per_record().items()
        }
        squared = torch.stack([values.square().sum(1) for values in formed.values()]).sum(0)
        finite = torch.isfinite(squared)
        norm = torch.where(finite, squared, torch.zeros_like(squared)).sqrt() * (1.0 + BASE)
        factor = max_norm / norm.clamp_min(max_norm)
        for name, values in formed.items():
            total = factor @ torch.where(finite.unsqueeze(1), values, torch.zeros_like(values))
            sums[name] += total.view(sums[name].shape).to(sums[name].dtype)
        norms.append(norm)
    return torch.cat(norms)

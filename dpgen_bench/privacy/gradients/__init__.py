"""Sums of per-record gradients that are clipped to a norm: the query of DP-SGD, to which noise is added.

    clipped_gradient_sum(module, loss_fn, rows, C)  =  Σ_i min(1, C/‖g_i‖) g_i,   g_i = ∇ loss_i, all parameters

There are two back ends: "bookkeeping" (fast, four types of layers) and "opacus" (the reference, more types of layers).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from dpgen_bench.privacy.gradients import bookkeeping, opacus_backend
from dpgen_bench.privacy.gradients.capture import refuse_row_coupling

__all__ = ["Backend", "ClippedSum", "check_module", "clipped_gradient_sum"]

Backend = Literal["bookkeeping", "opacus"]

# Below this bound, squares of float32 gradients that are not negligible against max_norm² would underflow.
SMALLEST_MAX_NORM = 1e-6


@dataclass(frozen=True)
class ClippedSum:
    """The result of `clipped_gradient_sum`. It is private: only the sum with noise may be released.

    Attributes:
        gradients: the sum, by name of trainable parameter.
        norms: [b], of each record's gradient before clipping, rounded up; 0 for records that are masked out or dropped.
            With max_norm = inf norms are not computed: they are NaN, except for those zeros.
    """

    gradients: dict[str, Tensor]
    norms: Tensor


def clipped_gradient_sum(
    module: nn.Module,
    loss_fn: Callable[..., Tensor],
    rows: tuple[Tensor, ...],
    max_norm: float,
    *,
    mask: Tensor | None = None,
    microbatch: int | None = None,
    backend: Backend = "bookkeeping",
    copies: int = 1,
    padded: bool = False,
) -> ClippedSum:
    """Σ_i min(1, max_norm/‖g_i‖) g_i, where g_i is the gradient of record i's loss in all trainable parameters jointly.

    Guarantees: for finite max_norm each record adds a vector of L2 norm at most max_norm, up to the rounding of its
    computation, whose margins are measured and not proven (`rounding`). A record with a NaN or infinite loss,
    activation or gradient adds exactly zero and changes no other record's summand. This requires that loss i depends
    on row i only: layers that mix rows are refused, but a `loss_fn` that mixes them itself is not detected here. The
    module is not changed (no hooks, no change of .grad), except by its own forward.

    Args:
        module: holds the parameters; those with requires_grad=False are skipped.
        loss_fn: loss_fn(*rows) -> losses of shape (b,), for any number b >= 1 of rows.
        rows: tensors [B, ...], one row per record; B = 0 gives zeros.
        max_norm: C. With inf the sum without clipping is returned, by ordinary autograd, for any module that does not
            mix rows.
        mask: [B] bool or 0/1; rows with 0 are removed before `loss_fn` is called, or with `padded` afterwards.
        microbatch: largest number of rows processed together; bounds the memory and changes the sum by rounding only.
        backend: "bookkeeping" or "opacus".
        copies: K, the number of consecutive rows that the module sees for each record: if `loss_fn` is called on b
            records, then rows i K, ..., (i + 1) K - 1 of each layer's input belong to record i. K copies take memory
            for K activations, but for one gradient.
        padded: `mask` [B] bool marks the records, and the other rows are padding. `loss_fn` is called on both, so that
            its shapes do not depend on the number of records; padding adds exactly zero for any loss.

    Raises:
        ValueError: for losses of another shape than (b,), layers that the back end does not cover, rows of different
            lengths, or a mask, microbatch, max_norm, backend or number of copies out of range.
    """
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    size = _check(parameters, rows, max_norm, mask, microbatch, backend, padded)
    if copies < 1:
        raise ValueError(f"expected copies >= 1, got {copies!r}; give 1 for one row per record.")
    refuse_row_coupling(module)
    first = next(iter(parameters.values()))
    norms = torch.zeros(size, dtype=first.dtype, device=first.device)
    totals = {name: torch.zeros_like(p) for name, p in parameters.items()}

    def losses_of(chunk: tuple[Tensor, ...]) -> Tensor:
        with torch.enable_grad():
            return _checked_losses(loss_fn(*chunk), len(chunk[0]))

    if padded and math.isfinite(max_norm):
        assert mask is not None
        step = microbatch or max(1, size)
        for start in range(0, size, step):
            part = slice(start, start + step)
            chunk = tuple(row[part] for row in rows)
            with torch.no_grad():
                sums, norms[part] = _clipped_sum(backend)(
                    module, parameters, losses_of, chunk, max_norm, copies, mask[part]
                )
            for name, total in totals.items():
                total += sums[name]
        return ClippedSum(totals, norms)

    # Positions of the records that are not masked out, in microbatches.
    included = torch.arange(size, device=first.device)
    if mask is not None:
        included = torch.nonzero(mask.to(first.device)).flatten()
    step = max(1, microbatch or len(included))
    for positions in included.split(step) if len(included) else ():
        all_rows = mask is None and len(positions) == size
        chunk = rows if all_rows else tuple(row[positions.to(row.device)] for row in rows)
        with torch.no_grad():
            if math.isinf(max_norm):
                sums, chunk_norms = _plain_sum(parameters, losses_of, chunk)
            else:
                sums, chunk_norms = _clipped_sum(backend)(module, parameters, losses_of, chunk, max_norm, copies)
        norms[positions] = chunk_norms
        for name, total in totals.items():
            total += sums[name]
    return ClippedSum(totals, norms)


def check_module(module: nn.Module, max_norm: float, backend: Backend) -> None:
    """Check a module before records are used. `clipped_gradient_sum` makes the same checks.

    Raises:
        ValueError: for layers that mix rows, or that the back end does not cover, and for a norm that is too small.
    """
    _expect_max_norm(max_norm)
    refuse_row_coupling(module)
    if math.isfinite(max_norm):
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        _layers_to_record(backend)(module, parameters)


def _layers_to_record(backend: Backend) -> Callable[..., dict[str, nn.Module]]:
    if backend == "bookkeeping":
        return bookkeeping.layers_to_record
    return opacus_backend.layers_to_record


def _clipped_sum(backend: Backend) -> Callable[..., tuple[dict[str, Tensor], Tensor]]:
    if backend == "bookkeeping":
        return bookkeeping.clipped_sum
    return opacus_backend.clipped_sum


def _expect_max_norm(max_norm: float) -> None:
    if not max_norm >= SMALLEST_MAX_NORM:
        raise ValueError(
            f"expected max_norm >= {SMALLEST_MAX_NORM} (inf for no clipping), got {max_norm!r}; for smaller gradients "
            "scale the loss up."
        )


def _check(
    parameters: dict[str, nn.Parameter],
    rows: tuple[Tensor, ...],
    max_norm: float,
    mask: Tensor | None,
    microbatch: int | None,
    backend: str,
    padded: bool,
) -> int:
    """Check all arguments; returns the number of rows B."""
    if not parameters:
        raise ValueError("expected a module with trainable parameters, got none; set requires_grad_(True) on some.")
    if not rows or not all(isinstance(row, Tensor) and row.dim() for row in rows):
        raise ValueError("expected rows to be a non-empty tuple of tensors [B, ...], one row per record.")
    sizes = [len(row) for row in rows]
    if len(set(sizes)) != 1:
        raise ValueError(f"expected the same number of rows in each tensor, got {sizes}; row i of each is record i.")
    _expect_max_norm(max_norm)
    if microbatch is not None and microbatch < 1:
        raise ValueError(f"expected microbatch >= 1 or None for all rows at once, got {microbatch!r}.")
    if backend not in get_args(Backend):
        raise ValueError(f"expected backend in {get_args(Backend)}, got {backend!r}.")
    if mask is not None:
        if mask.shape != (sizes[0],):
            raise ValueError(f"expected a mask of shape ({sizes[0]},), got {tuple(mask.shape)}.")
        if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError("expected a mask of booleans or of 0 and 1; weights belong into the loss.")
    if padded and (mask is None or mask.dtype != torch.bool):
        raise ValueError(f"expected a mask of booleans for padded rows, got {mask if mask is None else mask.dtype}.")
    return sizes[0]


def _checked_losses(losses: Tensor, b: int) -> Tensor:
    if not isinstance(losses, Tensor) or losses.shape != (b,):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"expected loss_fn to return one loss per record, shape ({b},), got {got}. Use reduction='none' and remove "
            "extra dimensions, e.g. logits.reshape(len(logits)); no mean or sum over records."
        )
    if not losses.requires_grad:
        raise ValueError(
            "expected losses that depend on the module's trainable parameters, got losses without a gradient; does "
            "loss_fn call the module, outside torch.no_grad?"
        )
    return losses


def _plain_sum(
    parameters: dict[str, nn.Parameter],
    losses_of: Callable[[tuple[Tensor, ...]], Tensor],
    rows: tuple[Tensor, ...],
) -> tuple[dict[str, Tensor], Tensor]:
    """Σ_i g_i by ordinary autograd, and norms as in `ClippedSum`, both without records whose gradient is not finite.

    If the sum is not finite, the batch is halved recursively until such records are found.
    """
    losses = losses_of(rows)
    b = len(losses)
    grads = torch.autograd.grad(losses, list(parameters.values()), torch.ones_like(losses), allow_unused=True)
    finite = torch.isfinite(losses.detach()).all()
    sums = {}
    for (name, parameter), grad in zip(parameters.items(), grads, strict=True):
        sums[name] = torch.zeros_like(parameter) if grad is None else grad
        finite = finite & torch.isfinite(sums[name]).all()
    if bool(finite):
        return sums, torch.full_like(losses.detach(), math.nan)
    if b == 1:
        return {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}, losses.new_zeros(1)
    halves = [
        _plain_sum(parameters, losses_of, tuple(row[part] for row in rows))
        for part in (slice(0, b // 2), slice(b // 2, b))
    ]
    return {name: halves[0][0][name] + halves[1][0][name] for name in sums}, torch.cat([norms for _, norms in halves])

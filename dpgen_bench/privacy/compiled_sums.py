"""Clipped gradient sums on padded draws as compiled graphs; their shapes do not depend on the draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpgen_bench.privacy.batch import Batch
from dpgen_bench.privacy.gradients import clipped_gradient_sum
from dpgen_bench.privacy.gradients.bookkeeping import fast_in_float64
from dpgen_bench.privacy.record_rng import tensor_of_words
from dpgen_bench.training.precision import products_in
from dpgen_bench.utils.compiled import Compiled, backend
from dpgen_bench.utils.upload import upload

_MOST_FUNCTIONS = 2  # a method that passes a new function to each release is not compiled


class GradientBound(Protocol):
    """What is used here of a GradientBound, whose module imports this one."""

    @property
    def C(self) -> float: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def backend(self) -> str: ...
    @property
    def clip(self) -> str: ...
    @property
    def copies(self) -> int: ...
    @property
    def pure(self) -> bool: ...

    def losses(self, fn: Callable[..., Tensor], batch: Batch, *mask: Tensor) -> Tensor: ...


class CompiledSums:
    """The graphs of one bound, by the private function that they call.

    A graph has as arguments all tensors that change: the module's, the rows of one piece, the mask of padding and the
    key of `rng`. So nothing of one release is kept for another one.
    """

    def __init__(self) -> None:
        self._graphs: dict[Callable[..., Any], Compiled] = {}

    def covers(self, bound: GradientBound, fn: Callable[..., Any]) -> bool:
        """Whether the process compiles steps, and releases of this function can be compiled."""
        if backend() == "none" or not bound.pure or bound.clip != "joint" or bound.backend != "bookkeeping":
            return False
        if not all(map(fast_in_float64, {parameter.device for parameter in bound.module.parameters()})):
            return False  # on such a device the sums branch on values, which a recording does not have
        return math.isfinite(bound.C) and (fn in self._graphs or len(self._graphs) < _MOST_FUNCTIONS)

    def total(
        self, bound: GradientBound, fn: Callable[..., Tensor], rows: tuple[Tensor, ...], real: Tensor, batch: Batch
    ) -> dict[str, Tensor]:
        """The clipped sum of the rows (images, labels, ids and, with public rows, their mask) that are `real`."""
        assert batch.padding is not None
        if fn not in self._graphs:
            self._graphs[fn] = Compiled(_Piece(bound, fn, batch).sum)
        named = (*bound.module.named_parameters(), *bound.module.named_buffers())
        tensors = {f"module.{name}": value for name, value in named}
        words = upload(tensor_of_words(batch.key), batch.ids.device)
        totals: dict[str, Tensor] = {}
        for start in range(0, len(real), batch.padding.at_once):
            part = slice(start, start + batch.padding.at_once)
            with products_in("ieee"):
                sums = self._graphs[fn](tensors, tuple(row[part] for row in rows), real[part], words)
            totals = {name: totals[name] + value if totals else value for name, value in sums.items()}
        return totals


class _Piece(nn.Module):
    """The clipped sum of one piece, as a function of all tensors."""

    def __init__(self, bound: GradientBound, fn: Callable[..., Tensor], batch: Batch) -> None:
        super().__init__()
        self.module = bound.module
        self._bound, self._private, self._key = bound, fn, batch.key

    def forward(self, rows: tuple[Tensor, ...], real: Tensor, words: Tensor) -> dict[str, Tensor]:
        def losses(images: Tensor, labels: Tensor, ids: Tensor, *mask: Tensor) -> Tensor:
            own = Batch(images, labels, ids, self._key, words=words)
            return self._bound.losses(self._private, own, *mask)

        bound = self._bound
        return clipped_gradient_sum(
            self.module, losses, rows, bound.C, mask=real, padded=True, copies=bound.copies
        ).gradients

    def sum(
        self, tensors: dict[str, Tensor], rows: tuple[Tensor, ...], real: Tensor, words: Tensor
    ) -> dict[str, Tensor]:
        """The sum by name of parameter, with `tensors` in the place of the module's."""
        with torch.no_grad():
            return functional_call(self, tensors, (rows, real, words))

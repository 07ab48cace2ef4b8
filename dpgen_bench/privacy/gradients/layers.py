"""Per-record gradient algebra of one layer: norms without gradients, and clipped sums without either.

Every layer here is linear in its weight, so record i's weight gradient is a sum over positions t of outer products

    W_i = Σ_t d_it a_itᵀ        a: what the weight multiplies (layer input, image patch), d: output gradient,

and its norm needs no gradient: ‖W_i‖² = Σ_ts (a_it·a_is)(d_it·d_is), the inner product of two T x T Gram matrices
(the "ghost norm"; Li et al., "Large language models can be strong differentially private learners", ICLR 2022).
Where T is large and the weight small, W_i itself is cheaper: formed, kept, and summed with the clip factors. The
mixture and its per-layer rule follow Bu, Mao & Xu, "Scalable and efficient training of large convolutional neural
networks with differential privacy", NeurIPS 2022; the single backward, Bu et al., "Differentially private
optimization on large model at small cost", ICML 2023 (book-keeping).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dpgen_bench.privacy.gradients.rounding import LARGEST_SQUARE

# Forming and re-reading one number of a per-record gradient costs about this many multiply-adds (measured on
# DPGAN's discriminator, one CPU thread). It decides between Gram matrices and per-record gradients.
_COST_OF_A_KEPT_NUMBER = 16
_MOST_KEPT_NUMBERS = 2**25  # per layer: 128 MiB in float32
_NUMBERS_AT_ONCE = 2**21  # of a temporary: 8 MiB in float32, about what a core's cache and memory bus like


class LayerGradient(ABC):
    """One layer's input and output gradients for the b records of a chunk.

    Subclasses implement the weight; the bias, whose per-record gradient is the output gradient summed over
    positions, is the same for all and is formed here.
    """

    def __init__(self, layer: nn.Module, bias: Tensor | None) -> None:
        self.layer: Any = layer
        self.has_weight = bool(self.layer.weight.requires_grad)
        self.bias = bias  # [b, out] or None
        self.kept: Tensor | None = None  # per-record weight gradients [b, *weight.shape], where they are cheaper

    def squared_norms(self) -> tuple[Tensor, Tensor]:
        """‖gradient‖² [b] in float64, and the size [b] of the terms that cancelled in it: (Σ_t |a_t||d_t|)² where
        Gram matrices were used, 0 where the gradient was formed (then what is summed is what was measured)."""
        squared, terms = self._weight_norms() if self.has_weight else (None, None)
        total = squared
        if self.bias is not None:
            own = _squares(self.bias)
            total = own if total is None else total + own
        assert total is not None, "a layer without trainable parameters is never recorded"
        return total, torch.zeros_like(total) if terms is None else terms

    def keep_only(self, keep: Tensor) -> None:
        """Set everything of the records with keep [b] False to zero, whatever it was (0 * NaN would be NaN)."""
        if self.bias is not None:
            self.bias = blank(self.bias, keep)
        if self.kept is not None:
            self.kept = blank(self.kept, keep)
        self._blank(keep)

    def weighted_sum(self, factors: Tensor) -> dict[str, Tensor]:
        """Σ_i factors_i · gradient_i, by the layer's own parameter names. factors: [b]."""
        sums: dict[str, Tensor] = {}
        if self.has_weight and self.kept is not None:
            sums["weight"] = (factors @ self.kept.flatten(1)).view(self.kept.shape[1:])
        elif self.has_weight:
            sums["weight"] = self._weighted_weight_sum(factors)
        if self.bias is not None:
            sums["bias"] = factors @ self.bias
        return sums

    @abstractmethod
    def in_float64(self, rows: Tensor) -> LayerGradient:
        """The same for the records `rows` int64 [r] alone, in float64."""

    @abstractmethod
    def per_record(self) -> dict[str, Tensor]:
        """The gradients themselves, [b, *shape]."""

    @abstractmethod
    def _weight_norms(self) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _blank(self, keep: Tensor) -> None: ...

    @abstractmethod
    def _weighted_weight_sum(self, factors: Tensor) -> Tensor: ...

    def _keeps_gradients(self, b: int, gram_cost: int) -> bool:
        """Whether W_i is formed and kept rather than measured through `gram_cost` multiply-adds a record."""
        numbers = self.layer.weight.numel()
        return numbers * _COST_OF_A_KEPT_NUMBER <= gram_cost and b * numbers <= _MOST_KEPT_NUMBERS


def blank(values: Tensor, keep: Tensor) -> Tensor:
    """`values` [b, ...] with the rows where keep [b] is False replaced by zeros."""
    return torch.where(keep.view(-1, *[1] * (values.dim() - 1)), values, torch.zeros_like(values))


def scale(values: Tensor, factors: Tensor) -> Tensor:
    """`values` [b, ...] with row i multiplied by factors_i."""
    return values * factors.view(-1, *[1] * (values.dim() - 1))


def _pieces(b: int, numbers_per_record: int) -> Iterator[slice]:
    step = max(1, _NUMBERS_AT_ONCE // max(1, numbers_per_record))
    for start in range(0, b, step):
        yield slice(start, min(start + step, b))


def _squares(values: Tensor) -> Tensor:
    """Σ of squares over all but dimension 0, in float64: a float32 sum of a million squares is off by 1e-5."""
    return values.flatten(1).square().sum(1, dtype=torch.float64)


def _terms(of_inputs: Tensor, of_gradients: Tensor) -> Tensor:
    """(Σ_t |a_t||d_t|)² [b] in float64 from |a_t|² and |d_t|² [b, T]; infinite where one of these is so large that
    the other may have underflowed unseen."""
    sizes = (of_inputs.double() * of_gradients.double()).clamp_min(0.0).sqrt().sum(1).square()
    largest = torch.maximum(of_inputs.amax(1), of_gradients.amax(1))
    return torch.where(largest < LARGEST_SQUARE, sizes, torch.full_like(sizes, torch.inf))


def _single_outer(of_inputs: Tensor, of_gradients: Tensor) -> tuple[Tensor, Tensor]:
    """‖d aᵀ‖² and its terms, both [b], for one position: of_inputs and of_gradients [b, ...] hold a and d."""
    a, d = _squares(of_inputs), _squares(of_gradients)
    return a * d, _terms(a.unsqueeze(1), d.unsqueeze(1))


def _gram_inner(of_inputs: Tensor, of_gradients: Tensor) -> tuple[Tensor, Tensor]:
    """<AᵀA, DᵀD> and (Σ_t |a_t||d_t|)², both [b], of two stacks of Gram matrices [b, T, T]."""
    inner = (of_inputs * of_gradients).flatten(1).sum(1, dtype=torch.float64)
    return inner, _terms(of_inputs.diagonal(dim1=1, dim2=2), of_gradients.diagonal(dim1=1, dim2=2))


class OuterProducts(LayerGradient):
    """nn.Linear on inputs [b, in] or [b, ..., in]: W_i = Σ_t d_t a_tᵀ over the T middle positions."""

    def __init__(self, layer: nn.Linear, inputs: Tensor, gradients: Tensor) -> None:
        self.a = inputs.reshape(len(inputs), -1, layer.in_features)  # [b, T, in]
        self.d = gradients.reshape(len(gradients), -1, layer.out_features)  # [b, T, out]
        trains_bias = layer.bias is not None and layer.bias.requires_grad
        super().__init__(layer, self.d.sum(1) if trains_bias else None)

    def _weight_norms(self) -> tuple[Tensor, Tensor]:
        b, t, k = self.a.shape
        if t == 1:
            return _single_outer(self.a, self.d)
        if self._keeps_gradients(b, t * t * (k + self.d.shape[2])):
            self.kept = torch.bmm(self.d.transpose(1, 2), self.a)
            squared = _squares(self.kept)
            return squared, torch.zeros_like(squared)
        parts = [
            _gram_inner(
                torch.bmm(self.a[rows], self.a[rows].transpose(1, 2)),
                torch.bmm(self.d[rows], self.d[rows].transpose(1, 2)),
            )
            for rows in _pieces(b, 2 * t * t)
        ]
        return torch.cat([inner for inner, _ in parts]), torch.cat([terms for _, terms in parts])

    def _blank(self, keep: Tensor) -> None:
        self.a, self.d = blank(self.a, keep), blank(self.d, keep)

    def _weighted_weight_sum(self, factors: Tensor) -> Tensor:
        return scale(self.d, factors).flatten(0, 1).T @ self.a.flatten(0, 1)

    def in_float64(self, rows: Tensor) -> OuterProducts:
        return OuterProducts(self.layer, self.a[rows].double(), self.d[rows].double())

    def per_record(self) -> dict[str, Tensor]:
        found = {"weight": torch.bmm(self.d.transpose(1, 2), self.a)} if self.has_weight else {}
        return found if self.bias is None else {**found, "bias": self.bias}


class LookUps(LayerGradient):
    """nn.Embedding on indices [b] or [b, ...]: row v of W_i is Σ_t 1[v_t = v] d_t."""

    def __init__(self, layer: nn.Embedding, indices: Tensor, gradients: Tensor) -> None:
        super().__init__(layer, None)
        self.ids = indices.reshape(len(indices), -1)  # [b, T]
        self.d = gradients.reshape(*self.ids.shape, layer.embedding_dim)  # [b, T, width]
        if layer.padding_idx is not None:
            self.d = torch.where((self.ids == layer.padding_idx).unsqueeze(2), torch.zeros_like(self.d), self.d)

    def _weight_norms(self) -> tuple[Tensor, Tensor]:
        b, t = self.ids.shape
        if t == 1:
            return _single_outer(torch.ones_like(self.ids, dtype=self.d.dtype), self.d)
        parts = []
        for rows in _pieces(b, 2 * t * t):
            same = (self.ids[rows].unsqueeze(1) == self.ids[rows].unsqueeze(2)).to(self.d.dtype)
            parts.append(_gram_inner(same, torch.bmm(self.d[rows], self.d[rows].transpose(1, 2))))
        return torch.cat([inner for inner, _ in parts]), torch.cat([terms for _, terms in parts])

    def _blank(self, keep: Tensor) -> None:
        self.d = blank(self.d, keep)

    def _weighted_weight_sum(self, factors: Tensor) -> Tensor:
        total = torch.zeros_like(self.layer.weight)
        return total.index_add_(0, self.ids.flatten(), scale(self.d, factors).flatten(0, 1))

    def in_float64(self, rows: Tensor) -> LookUps:
        return LookUps(self.layer, self.ids[rows], self.d[rows].double())

    def per_record(self) -> dict[str, Tensor]:
        found = self.d.new_zeros(len(self.ids), *self.layer.weight.shape)
        for record in range(len(self.ids)):
            found[record].index_add_(0, self.ids[record], self.d[record])
        return {"weight": found}

"""Norms and weighted sums of the per-record gradients of one layer, from its inputs and output gradients.

All layers here are linear in their weight, so record i's weight gradient is a sum over positions t of outer products

    W_i = Σ_t d_it a_itᵀ        a: input of the weight (layer input or image patch), d: output gradient.

Its norm is the inner product of two T x T Gram matrices, so that W_i is not needed (the "ghost norm"; Li et al., "Large
language models can be strong differentially private learners", ICLR 2022):

    ‖W_i‖² = Σ_ts (a_it·a_is)(d_it·d_is).

If T is large and the weight is small, it is cheaper to compute W_i, keep it, and sum it with the clip factors. The
choice for each layer follows Bu, Mao & Xu, "Scalable and efficient training of large convolutional neural networks with
differential privacy", NeurIPS 2022; the single backward pass follows Bu et al., "Differentially private optimization on
large model at small cost", ICML 2023 (book-keeping).

If a record has K copies, which are consecutive rows of a layer's input, then t runs over the positions of all of them:
one W_i, the gradient of the record's loss, is bounded, and memory for gradients does not grow with K.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dpgen_bench.privacy.gradients.rounding import LARGEST_SQUARE, LARGEST_SQUARE_WIDE

# Writing and reading one number of a per-record gradient costs about as much as this many multiply-adds (measured on
# DPGAN's discriminator with one CPU thread). It decides between Gram matrices and per-record gradients.
_COST_OF_A_KEPT_NUMBER = 16
_MOST_KEPT_NUMBERS = 2**25  # per layer: 128 MiB in float32
_NUMBERS_AT_ONCE = 2**21  # of a temporary tensor: 8 MiB in float32, about the size of a core's cache


class LayerGradient(ABC):
    """One layer's inputs and output gradients for the b records of a chunk.

    Subclasses implement the gradients of the weight. The gradient of the bias is the output gradient summed over
    positions; it is the same for all layers and implemented here.
    """

    def __init__(self, layer: nn.Module, bias: Tensor | None) -> None:
        self.layer: Any = layer
        self.has_weight = bool(self.layer.weight.requires_grad)
        self.bias = bias  # [b, out] or None
        self.kept: Tensor | None = None  # per-record weight gradients [b, *weight.shape], if they are cheaper
        self.wide = False  # whether Gram matrices are float64

    def _in_gram(self, values: Tensor) -> Tensor:
        """`values` in the precision of Gram matrices."""
        return values.double() if self.wide else values

    @property
    def _limit(self) -> float:
        return LARGEST_SQUARE_WIDE if self.wide else LARGEST_SQUARE

    def squared_norms(self) -> tuple[Tensor, Tensor]:
        """‖gradient‖² [b] in float64, and the size [b] of the terms that cancel in it.

        The size is (Σ_t |a_t||d_t|)² if Gram matrices are used. It is 0 if the gradient itself is computed and kept,
        because then the norm is that of the summand.
        """
        squared, terms = self._weight_norms() if self.has_weight else (None, None)
        total = squared
        if self.bias is not None:
            squared_bias = _squares(self.bias)
            total = squared_bias if total is None else total + squared_bias
        assert total is not None, "a layer without trainable parameters is never recorded"
        return total, torch.zeros_like(total) if terms is None else terms

    def keep_only(self, keep: Tensor) -> None:
        """Replace all values of records with keep [b] False by zeros; multiplying by 0 would keep NaN and infinity."""
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
        """The same layer for the records `rows` int64 [r] only, in float64."""

    @abstractmethod
    def per_record(self) -> dict[str, Tensor]:
        """The gradients [b, *shape] by the layer's own parameter names."""

    @abstractmethod
    def _weight_norms(self) -> tuple[Tensor, Tensor]:
        """`squared_norms` of the weight only; may set `kept`."""

    @abstractmethod
    def _blank(self, keep: Tensor) -> None:
        """`keep_only` for the tensors of the subclass."""

    @abstractmethod
    def _weighted_weight_sum(self, factors: Tensor) -> Tensor:
        """`weighted_sum` of the weight only, without `kept`."""

    def _keeps_gradients(self, b: int, gram_cost: int) -> bool:
        """Whether W_i is computed and kept, because Gram matrices cost more (`gram_cost` multiply-adds a record)."""
        numbers = self.layer.weight.numel()
        return numbers * _COST_OF_A_KEPT_NUMBER <= gram_cost and b * numbers <= _MOST_KEPT_NUMBERS


def blank(values: Tensor, keep: Tensor) -> Tensor:
    """`values` [b, ...] with the rows where keep [b] is False replaced by zeros."""
    return torch.where(keep.view(-1, *[1] * (values.dim() - 1)), values, torch.zeros_like(values))


def scale(values: Tensor, factors: Tensor) -> Tensor:
    """`values` [b, ...] with row i multiplied by factors_i."""
    return values * factors.view(-1, *[1] * (values.dim() - 1))


def _pieces(b: int, numbers_per_record: int) -> Iterator[slice]:
    """Slices of b records for which a temporary tensor has about `_NUMBERS_AT_ONCE` numbers."""
    step = max(1, _NUMBERS_AT_ONCE // max(1, numbers_per_record))
    for start in range(0, b, step):
        yield slice(start, min(start + step, b))


def _squares(values: Tensor) -> Tensor:
    """Sum of squares over all but dimension 0, in float64: the relative error of a float32 sum may be 1e-5."""
    return values.flatten(1).square().sum(1, dtype=torch.float64)


def _terms(of_inputs: Tensor, of_gradients: Tensor, limit: float) -> Tensor:
    """(Σ_t |a_t||d_t|)² [b] in float64 from |a_t|² and |d_t|² [b, T].

    It is infinite if one of these reaches `limit`, so that the other one may have underflowed.
    """
    sizes = (of_inputs.double() * of_gradients.double()).clamp_min(0.0).sqrt().sum(1).square()
    largest = torch.maximum(of_inputs.amax(1), of_gradients.amax(1))
    return torch.where(largest < limit, sizes, torch.full_like(sizes, torch.inf))


def _single_outer(of_inputs: Tensor, of_gradients: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """‖d aᵀ‖² and its terms, both [b], for one position: of_inputs and of_gradients [b, ...] hold a and d."""
    a, d = _squares(of_inputs), _squares(of_gradients)
    return a * d, _terms(a.unsqueeze(1), d.unsqueeze(1), limit)


def _gram_inner(of_inputs: Tensor, of_gradients: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """<AᵀA, DᵀD> and (Σ_t |a_t||d_t|)², both [b], of two stacks of Gram matrices [b, T, T]."""
    inner = (of_inputs * of_gradients).flatten(1).sum(1, dtype=torch.float64)
    return inner, _terms(of_inputs.diagonal(dim1=1, dim2=2), of_gradients.diagonal(dim1=1, dim2=2), limit)


class OuterProducts(LayerGradient):
    """nn.Linear on inputs [b, in] or [b, ..., in]: W_i = Σ_t d_t a_tᵀ over the T middle positions.

    With `copies` = K, here and in `LookUps`, inputs have K b rows, and T counts the positions of K rows.
    """

    def __init__(self, layer: nn.Linear, inputs: Tensor, gradients: Tensor, copies: int = 1) -> None:
        b = len(inputs) // copies
        self.a = inputs.reshape(b, -1, layer.in_features)  # [b, T, in]
        self.d = gradients.reshape(b, -1, layer.out_features)  # [b, T, out]
        trains_bias = layer.bias is not None and layer.bias.requires_grad
        super().__init__(layer, self.d.sum(1) if trains_bias else None)

    def _weight_norms(self) -> tuple[Tensor, Tensor]:
        b, t, k = self.a.shape
        if t == 1:
            return _single_outer(self.a, self.d, self._limit)
        if self._keeps_gradients(b, t * t * (k + self.d.shape[2])):
            self.kept = torch.bmm(self.d.transpose(1, 2), self.a)
            squared = _squares(self.kept)
            return squared, torch.zeros_like(squared)
        parts = []
        for rows in _pieces(b, 2 * t * t):
            a, d = self._in_gram(self.a[rows]), self._in_gram(self.d[rows])
            parts.append(_gram_inner(torch.bmm(a, a.transpose(1, 2)), torch.bmm(d, d.transpose(1, 2)), self._limit))
        return torch.cat([inner for inner, _ in parts]), torch.cat([terms for _, terms in parts])

    def _blank(self, keep: Tensor) -> None:
        self.a, self.d = blank(self.a, keep), blank(self.d, keep)

    def _weighted_weight_sum(self, factors: Tensor) -> Tensor:
        return scale(self.d, factors).flatten(0, 1).T @ self.a.flatten(0, 1)

    def in_float64(self, rows: Tensor) -> OuterProducts:
        return OuterProducts(self.layer, self.a[rows].double(), self.d[rows].double())

    def per_record(self) -> dict[str, Tensor]:
        gradients = {"weight": torch.bmm(self.d.transpose(1, 2), self.a)} if self.has_weight else {}
        return gradients if self.bias is None else {**gradients, "bias": self.bias}


class LookUps(LayerGradient):
    """nn.Embedding on indices [b] or [b, ...]: row v of W_i is Σ_t 1[v_t = v] d_t."""

    def __init__(self, layer: nn.Embedding, indices: Tensor, gradients: Tensor, copies: int = 1) -> None:
        super().__init__(layer, None)
        self.ids = indices.reshape(len(indices) // copies, -1)  # [b, T]
        self.d = gradients.reshape(*self.ids.shape, layer.embedding_dim)  # [b, T, width]
        if layer.padding_idx is not None:
            self.d = torch.where((self.ids == layer.padding_idx).unsqueeze(2), torch.zeros_like(self.d), self.d)

    def _weight_norms(self) -> tuple[Tensor, Tensor]:
        b, t = self.ids.shape
        if t == 1:
            return _single_outer(torch.ones_like(self.ids, dtype=self.d.dtype), self.d, self._limit)
        parts = []
        for rows in _pieces(b, 2 * t * t):
            d = self._in_gram(self.d[rows])
            same = (self.ids[rows].unsqueeze(1) == self.ids[rows].unsqueeze(2)).to(d.dtype)
            parts.append(_gram_inner(same, torch.bmm(d, d.transpose(1, 2)), self._limit))
        return torch.cat([inner for inner, _ in parts]), torch.cat([terms for _, terms in parts])

    def _blank(self, keep: Tensor) -> None:
        self.d = blank(self.d, keep)

    def _weighted_weight_sum(self, factors: Tensor) -> Tensor:
        total = torch.zeros_like(self.layer.weight)
        return total.index_add_(0, self.ids.flatten(), scale(self.d, factors).flatten(0, 1))

    def in_float64(self, rows: Tensor) -> LookUps:
        return LookUps(self.layer, self.ids[rows], self.d[rows].double())

    def per_record(self) -> dict[str, Tensor]:
        weights = self.d.new_zeros(len(self.ids), *self.layer.weight.shape)
        for record in range(len(self.ids)):
            weights[record].index_add_(0, self.ids[record], self.d[record])
        return {"weight": weights}

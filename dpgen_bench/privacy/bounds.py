"""Bounds: what a private function may return, how it is clipped, and the L2 sensitivity of the result.

A bound turns `fn(images, labels)` into the exact (not yet noisy) value of a release. Its sensitivity is stated for one
record that joins or leaves the draw, and for one drawn record that is exchanged for another.

| bound | fn returns | add/remove | replace one |
|---|---|---|---|
| PerRecord, PerRecordGradient | one row or one loss per record, clipped to C, summed | C | 2C |
| PerRecordGradient(clip="per_tensor") | the same, each of R tensors clipped to C | C sqrt(R) | 2C sqrt(R) |
| PerRow | R rows, each any function of the batch, each clipped to C | 2C sqrt(R) | 2C sqrt(R) |
| Whole | one tensor, any function of the batch, clipped to C | 2C | 2C |
| Votes (module votes) | numbers of at most k bins per record, which are counted | sqrt(k) | sqrt(2k) |

`dpgen_bench.privacy.factors` has the bounds whose rows are outer products, which are given as factors.

docs/accounting.md, "Sensitivities of the bounds", proves the table. Rows that are not finite count as zero; they are
replaced before any sum, because 0 * NaN is NaN.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpgen_bench.privacy.batch import Batch
from dpgen_bench.privacy.clipping import SMALLEST_C, clip_rows
from dpgen_bench.privacy.compiled_sums import CompiledSums
from dpgen_bench.privacy.events import Sensitivity
from dpgen_bench.privacy.expect import expect_integer, expect_number, expect_shape, expect_size
from dpgen_bench.privacy.gradients import check_module, clipped_gradient_sum
from dpgen_bench.privacy.gradients.per_tensor import sum_clipped_per_tensor, trainable
from dpgen_bench.privacy.isolation import expect_plain
from dpgen_bench.privacy.record_rng import RecordRng, names_rng

PublicRows = tuple[Tensor, Tensor]

# Memory of PerRecord: rows as fn returns them, and their copies in float32 and float64 for clipping and summing.
_MEMORY_OF_ROWS = 256 * 2**20
_BYTES_PER_NUMBER = 32
_MOST_RECORDS = 1000


def call(fn: Callable[..., Tensor], batch: Batch, *more: Tensor) -> Tensor:
    """fn(images, labels, *more), with rng=RecordRng for a function that names it. Bounds call fn in this way only.

    The rows of `rng` belong to ids, so fn sees the same rows if it is evaluated on some records of the draw alone.

    Raises:
        ValueError: unless fn returns a plain tensor.
    """
    returned = _call(fn, batch, *more)
    if batch.words is not None:  # while a graph is recorded, on tensors without values
        return returned
    return expect_plain(returned, "what a private function returns")


def call_for_parts(fn: Callable[..., Any], batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """As `call`, for a function that returns a pair of tensors for each of several parts.

    Raises:
        ValueError: unless fn returns a dict whose values are pairs of plain tensors.
    """
    returned = _call(fn, batch)
    what = "what a private function returns"
    if type(returned) is not dict or not all(type(pair) in (tuple, list) for pair in returned.values()):
        raise ValueError(
            f"{what}: expected a dict {{part: (u, v)}}, got {type(returned).__name__}; return such a dict."
        )
    parts = {}
    for part, pair in returned.items():
        if len(pair) != 2:
            raise ValueError(f"{what}: expected two factors (u, v) for each part, got {len(pair)}; return a pair.")
        parts[part] = (expect_plain(pair[0], what), expect_plain(pair[1], what))
    return parts


def _call(fn: Callable[..., Any], batch: Batch, *more: Tensor) -> Any:
    rng = {"rng": RecordRng(batch.key, batch.ids, batch.copies, batch.words)} if names_rng(fn) else {}
    return fn(*batch.inputs, *more, **rng)


def records_in_memory(numbers: int) -> int:
    """The largest number of records, between 1 and 1000, for which this many numbers each need at most 256 MiB."""
    return min(_MOST_RECORDS, max(1, _MEMORY_OF_ROWS // (_BYTES_PER_NUMBER * numbers)))


@dataclass(frozen=True, kw_only=True)
class Bound(ABC):
    """The base class of bounds: a clipping norm C > 0 (inf only for a release without noise)."""

    C: float

    def __post_init__(self) -> None:
        what = type(self).__name__
        advice = f"give a norm of at least {SMALLEST_C:g}, or inf for a release without noise"
        C = expect_number(self.C, f"{what}, clipping norm C", above=math.nextafter(SMALLEST_C, 0.0), advice=advice)
        object.__setattr__(self, "C", C)
        if hasattr(self, "shape"):
            shape = expect_shape(self.shape, what, minimum=1)
            if not shape:
                raise ValueError(f"{what}: expected a shape of at least one size, got (); take (1,) for one number.")
            expect_size(math.prod(shape), what)
            object.__setattr__(self, "shape", shape)
        microbatch = getattr(self, "microbatch", None)
        if microbatch is not None:
            advice = "give the most records that fn is called on together, or None for all that fit"
            object.__setattr__(self, "microbatch", expect_integer(microbatch, f"{what}, microbatch", advice=advice))

    @property
    @abstractmethod
    def sensitivity(self) -> Sensitivity:
        """L2 sensitivity of the joint release of one draw."""

    def check_public(self, public: PublicRows | None) -> None:
        """Refuse mistakes that can be found before any record is used.

        Raises:
            ValueError: if `public` is not as declared, and for a module that the back end does not cover.
        """
        if public is not None:
            raise ValueError(
                f"{type(self).__name__}: expected no public rows, got some; only PerRecordGradient(public_rows=...) "
                "adds public rows to its sum. Use them after the release, as post-processing."
            )

    def describe(self) -> dict[str, Any]:
        """The description of the bound in the ledger."""
        return {"kind": type(self).__name__, "C": self.C, "rows": 1}


class DrawBound(Bound):
    """The base class of bounds whose private function is called on the records of a draw."""

    @abstractmethod
    def value(self, fn: Callable[..., Tensor], batch: Batch, public: PublicRows | None) -> dict[str, Tensor]:
        """The exact value within the bound, by tensor name; it is private until noise is added."""


@dataclass(frozen=True, kw_only=True)
class PerRecord(DrawBound):
    """Sum over the draw of one row per record: fn(images [b, c, h, w], labels [b]) -> [b, *shape].

    Sums are computed in float64, so that the rounding of a sum of 60,000 rows is far below the sensitivity of one row.

    Guarantees: the sum moves by at most C if a record joins or leaves the draw, and by at most 2C if one is exchanged,
    provided that row i depends on record i, its row of `rng` and public inputs alone.

    Args:
        shape: the shape of one row.
        microbatch: the largest number of records on which fn is called together. It limits the memory, and changes the
            sum only by the rounding of float64 and of fn. None takes the largest number, between 1 and 1000, for which
            the rows and their copies need at most 256 MiB. The memory of fn itself is not included.

    Raises:
        ValueError: for a microbatch below 1.
    """

    shape: tuple[int, ...]
    microbatch: int | None = None

    @property
    def records_at_once(self) -> int:
        """The largest number of records on which fn is called together."""
        return self.microbatch or records_in_memory(math.prod(self.shape))

    @property
    def sensitivity(self) -> Sensitivity:
        return Sensitivity(self.C, 2.0 * self.C)

    def value(self, fn: Callable[..., Tensor], batch: Batch, public: PublicRows | None) -> dict[str, Tensor]:
        total = torch.zeros(self.shape, dtype=torch.float64, device=batch.labels.device)
        for chunk in batch.chunks(batch.padding.at_once if batch.padding else self.records_at_once):
            if len(chunk) == 0:
                continue
            rows = call(fn, chunk)
            _expect_shape(self, rows, (len(chunk), *self.shape))
            clipped = clip_rows(rows, self.C)
            if chunk.real is not None:
                clipped = torch.where(chunk.real.view(-1, *[1] * len(self.shape)), clipped, 0.0)
            total += clipped.sum(dim=0, dtype=torch.float64)
        return {"value": total}


@dataclass(frozen=True, kw_only=True)
class PerRecordGradient(DrawBound):
    """Sum over the draw of the clipped gradient of one loss per record in the trainable parameters of `module`.

    fn(images, labels) -> losses [b]. With `public_rows` = r > 0 each release has r public rows,
    `public=(images [r, c, h, w], labels [r])`; fn is then called as fn(images, labels, public_mask [b + r]) on records
    and public rows together, and the clipped gradients of the public rows join the sum. Their number is fixed here,
    before any record is used, so that it cannot reveal the size of the draw.

    With `copies` = K > 1, fn sees each row K times, in consecutive rows that differ only in their rows of `rng`, and
    returns losses [K b]; the loss of a record is the mean of its K losses, and the gradient of this mean is clipped.
    K changes neither the sensitivity nor the noise. `microbatch` still counts records.

    Guarantees: as `PerRecord`, provided that loss i depends on record i, its row of `rng`, the parameters and public
    inputs alone, and that public rows do not depend on records. With clip="per_tensor", C sqrt(R) takes the place of C.

    Args:
        pure: the method states that fn uses nothing that changes from one release to the next but its arguments, `rng`
            and the tensors of `module`. With `runtime.compile`, the release on a padded draw is then a compiled graph.
        clip: "joint" clips the gradient of a record in all parameters together. "per_tensor" clips its gradient in each
            of the R trainable tensors to C, as some released code does; it takes R times as long.
    """

    module: nn.Module = field(repr=False)
    backend: Literal["bookkeeping", "opacus"] = "bookkeeping"
    microbatch: int | None = None
    public_rows: int = 0
    copies: int = 1
    clip: Literal["joint", "per_tensor"] = "joint"
    pure: bool = False
    tensors: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())
    _compiled: CompiledSums = field(init=False, repr=False, compare=False, default_factory=CompiledSums)

    def __post_init__(self) -> None:
        super().__post_init__()
        what = "PerRecordGradient"
        copies = expect_integer(self.copies, f"{what}, copies", advice="give the number of copies, or 1 for none")
        object.__setattr__(self, "copies", copies)
        if not isinstance(self.module, nn.Module):
            raise ValueError(f"{what}: expected a torch.nn.Module, got {self.module!r}; give the network.")
        if self.backend not in ("bookkeeping", "opacus"):
            raise ValueError(f"{what}: expected backend 'bookkeeping' or 'opacus', got {self.backend!r}; take one.")
        rows = expect_integer(
            self.public_rows, f"{what}, public_rows", minimum=0, advice="give their number, or 0 for none"
        )
        object.__setattr__(self, "public_rows", rows)
        if self.clip not in ("joint", "per_tensor"):
            raise ValueError(f"{what}: expected clip 'joint' or 'per_tensor', got {self.clip!r}; take one.")
        object.__setattr__(self, "tensors", trainable(self.module))  # their number is part of the sensitivity

    @property
    def sensitivity(self) -> Sensitivity:
        joint = self.C if self.clip == "joint" else self.C * math.sqrt(len(self.tensors))
        return Sensitivity(joint, 2.0 * joint)

    def check_public(self, public: PublicRows | None) -> None:
        number = 0 if public is None else len(public[1])
        if number != self.public_rows:
            raise ValueError(
                f"expected {self.public_rows} public rows in each release (PerRecordGradient(public_rows=...)), got "
                f"{number}; the number of public rows is fixed when the mechanism is approved."
            )
        for part in public or ():
            expect_plain(part, "public rows")
        for name, parameter in self.module.named_parameters():
            expect_plain(parameter, f"parameter {name!r} of the module")
        if self.clip == "per_tensor" and trainable(self.module) != self.tensors:
            raise ValueError(
                f"PerRecordGradient: expected the {len(self.tensors)} trainable parameters for which the mechanism was "
                f"approved, got {len(trainable(self.module))}; do not freeze or unfreeze parameters between releases."
            )
        # Checked here, because a later error would be raised while records are seen, which marks the run.
        check_module(self.module, self.C, self.backend)

    def describe(self) -> dict[str, Any]:
        tensors = {"tensors": len(self.tensors)} if self.clip == "per_tensor" else {}
        return {**super().describe(), "public_rows": self.public_rows, **tensors}

    def value(self, fn: Callable[..., Tensor], batch: Batch, public: PublicRows | None) -> dict[str, Tensor]:
        images, labels = batch.inputs
        rows: tuple[Tensor, ...] = (images, labels, batch.ids)
        real = batch.real
        if public is not None:
            own = slice(None) if batch.padding is None else slice(batch.padding.part[0], None, batch.padding.part[1])
            fakes, fake_labels = public[0].detach()[own], public[1][own]
            number = -1 - torch.arange(len(public[1]), device=batch.ids.device)[own]
            mask = torch.cat([torch.zeros_like(labels), torch.ones_like(fake_labels)]).bool()
            rows = (
                torch.cat([images, fakes]),
                torch.cat([labels, fake_labels]),
                torch.cat([batch.ids, number]),
                mask,
            )
            real = None if real is None else torch.cat([real, torch.ones_like(fake_labels, dtype=torch.bool)])

        if real is not None and self._compiled.covers(self, fn):
            total = self._compiled.total(self, fn, rows, real, batch)
            return {name: expect_plain(part, f"gradient of {name!r}") for name, part in total.items()}

        def losses(images: Tensor, labels: Tensor, ids: Tensor, *mask: Tensor) -> Tensor:
            return self.losses(fn, Batch(images, labels, ids, batch.key), *mask)

        options: dict[str, Any] = {"microbatch": self.microbatch, "backend": self.backend, "copies": self.copies}
        if batch.padding is not None:
            options |= {"mask": real, "padded": True, "microbatch": batch.padding.at_once}
        if self.clip == "joint":
            total = clipped_gradient_sum(self.module, losses, rows, self.C, **options).gradients
        else:
            total = sum_clipped_per_tensor(self.module, losses, rows, self.C, **options)
        return {name: expect_plain(part, f"gradient of {name!r}") for name, part in total.items()}

    def losses(self, fn: Callable[..., Tensor], batch: Batch, *mask: Tensor) -> Tensor:
        """The losses [b] of the rows of a batch, each the mean over its copies."""
        repeated = batch.repeated(self.copies)
        losses = call(fn, repeated, *(part.repeat_interleave(self.copies, dim=0) for part in mask))
        if self.copies == 1:
            return losses  # of any shape, which clipped_gradient_sum checks
        if losses.shape != (len(repeated),):
            raise ValueError(
                f"expected one loss for each of {self.copies} copies of {len(batch)} records, shape "
                f"({len(repeated)},), got {tuple(losses.shape)}; use reduction='none', and no mean over copies, which "
                "the bound takes."
            )
        return losses.view(-1, self.copies).mean(dim=1)


@dataclass(frozen=True, kw_only=True)
class PerRow(DrawBound):
    """R rows, each any function of the whole draw: fn(images, labels) -> [R, *rest] with shape = (R, *rest).

    fn is also called on an empty draw, and must return R rows for it.

    Guarantees: the rows jointly move by at most 2C sqrt(R) if the draw changes by one record, for any two functions fn,
    hence also if private state differs.
    """

    shape: tuple[int, ...]

    @property
    def sensitivity(self) -> Sensitivity:
        joint = 2.0 * self.C * math.sqrt(self.shape[0])
        return Sensitivity(joint, joint)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "rows": self.shape[0]}

    def value(self, fn: Callable[..., Tensor], batch: Batch, public: PublicRows | None) -> dict[str, Tensor]:
        rows = call(fn, batch)
        _expect_shape(self, rows, self.shape)
        return {"value": clip_rows(rows, self.C)}


@dataclass(frozen=True, kw_only=True)
class Whole(DrawBound):
    """One tensor, any function of the whole draw, clipped as a whole: fn(images, labels) -> [*shape].

    Guarantees: the tensor moves by at most 2C if the draw changes by one record, for any two functions fn.
    """

    shape: tuple[int, ...]

    @property
    def sensitivity(self) -> Sensitivity:
        return Sensitivity(2.0 * self.C, 2.0 * self.C)

    def value(self, fn: Callable[..., Tensor], batch: Batch, public: PublicRows | None) -> dict[str, Tensor]:
        tensor = call(fn, batch)
        _expect_shape(self, tensor, self.shape)
        return {"value": clip_rows(tensor.unsqueeze(0), self.C).squeeze(0)}


def _expect_shape(bound: Bound, got: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(got.shape) != tuple(expected):
        raise ValueError(
            f"{type(bound).__name__}: expected the function to return shape {tuple(expected)}, got {tuple(got.shape)}. "
            "The shape of a release is declared with its bound and may not depend on the draw."
        )

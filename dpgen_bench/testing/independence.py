"""Checks that row i of a private function depends on record i and public inputs alone.

The sensitivities of `PerRecord`, `PerRecordProducts`, `PerRecordMoments`, `PerRecordGradient` and `Votes` require this,
and the sum of clipped rows does not show whether it holds. The function of a release is therefore evaluated again: on
parts of its draw, on the draw in another order, and on draws with other records next to the kept ones. The rows, the
factors of rows, or the gradients of single losses, are compared before they are clipped, so that clipping cannot hide a
difference.

Matrix products of different shapes round differently. Functions are evaluated in float64 if they allow it, where a
difference can be distinguished from rounding. In float32, the gradient of a record at the kink of an activation may
differ between shapes. A difference between shapes or orders in float32 therefore counts only if slightly darkened
copies of the draw show it, too: these records are no longer at the kink, whereas rows that depend on their position, or
on the number of records, still differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.privacy.allowance import Allowance
from dpgen_bench.privacy.batch import unit_range
from dpgen_bench.privacy.bounds import Batch, Bound, PerRecord, PerRecordGradient, PublicRows
from dpgen_bench.privacy.factors import PerRecordMoments, PerRecordProducts
from dpgen_bench.privacy.gradients import clipped_gradient_sum
from dpgen_bench.privacy.record_rng import RecordRng, names_rng
from dpgen_bench.privacy.votes import Votes
from dpgen_bench.testing.bench import Bench, random_images
from dpgen_bench.testing.call_state import restored
from dpgen_bench.testing.errors import ConformanceError
from dpgen_bench.testing.tape import Tape

MOST_RECORDS = 32  # of a draw that are compared; more would only cost time
RELATIVE = {torch.float64: 1e-7, torch.float32: 1e-4}  # tolerance, relative to the norm of a row
DARKENED = (0.999, 0.99, 0.9)  # factors of images; a difference in float32 counts if it appears for each of them
NO_CLIPPING = 1e12  # a norm that no gradient of a sensible method has, and whose square fits into float32
ROWS = PerRecord | PerRecordProducts | PerRecordMoments  # bounds whose function returns rows, or factors of rows
OF_THE_BOUND = 1e-6  # differences below this share of C move no release by more than rounding does


def check_row_independence(bench: Bench, first: Tape, releases: int) -> int:
    """Fit again on the same data and check the private functions of up to `releases` releases of each mechanism.

    The result of this fit is not used, since functions are called more often than in a normal fit.

    Returns:
        The number of releases that were checked; 0 for a method without rows that belong to records.

    Raises:
        ConformanceError: if rows depend on other records, or if the additional calls make the fit fail.
    """
    numbers: dict[str, int] = {}
    for release in first.releases:
        numbers[release.mechanism] = numbers.get(release.mechanism, 0) + 1
    chosen = {name: set(_spread(number, releases)) for name, number in numbers.items()}
    checked = 0

    def query(
        mechanism: Allowance, index: int, fn: Callable[..., Tensor], batch: Batch, public: PublicRows | None
    ) -> None:
        nonlocal checked
        bound = mechanism.bound
        if not isinstance(bound, ROWS | PerRecordGradient | Votes) or index not in chosen[mechanism.name]:
            return
        if len(batch) == 0:
            chosen[mechanism.name].add(index + 1)  # an empty draw has no rows: take the next one
            return
        RowComparison(mechanism.name, index, bound, fn, batch, public, bench.num_classes).check()
        checked += 1

    try:
        bench.fit(bench.base, Tape(source=first, query=query))
    except ConformanceError:
        raise
    except Exception as error:
        raise ConformanceError(
            f"a fit whose private functions were called more than once in a release raised {type(error).__name__} "
            f"({error}): a call changes something that the rest of the fit uses. A private function must have no "
            "effect other than the value that it returns."
        ) from error
    return checked


def _spread(number: int, most: int) -> list[int]:
    """At most `most` of the numbers 0 .. number-1, including the first, the second and the last."""
    if number <= most:
        return list(range(number))
    return sorted({0, 1, *np.linspace(0, number - 1, max(most - 1, 2)).astype(int).tolist()})


@dataclass
class RowComparison:
    """Compares the rows of one private function between variants of one draw.

    Attributes:
        mechanism: the name of the mechanism.
        index: the number of the release.
        bound: the bound of the mechanism.
        fn: the private function.
        whole: the draw; its first MOST_RECORDS records are used.
        public: the public rows of the release, if any.
        num_classes: the number of classes.
        dtype: the precision of the comparison: float64, or float32 for a function that casts to it.
        weights: float64, one for each row.
    """

    mechanism: str
    index: int
    bound: PerRecord | PerRecordProducts | PerRecordMoments | PerRecordGradient | Votes
    fn: Callable[..., Tensor]
    whole: Batch
    public: PublicRows | None
    num_classes: int
    dtype: torch.dtype = torch.float64
    weights: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.whole = self.whole.rows(slice(0, MOST_RECORDS))
        self.where = f"release {self.index} of {self.mechanism!r}"
        rows = len(self.whole) + (0 if self.public is None else len(self.public[1]))
        rng = torch.Generator().manual_seed(self.index)
        # With random weights, one backward pass for the weighted sum of losses compares the gradients of all rows.
        self.weights = torch.randn(rows, generator=rng, dtype=torch.float64)

    def check(self) -> None:
        """Compare the rows of the whole draw with those of every variant.

        Raises:
            ConformanceError: for a function that is not reproducible, raises, or has rows that depend on others.
        """
        with restored(self.fn, self.bound) as restore:
            self.restore = restore
            everything = torch.arange(len(self.whole))
            self._choose_precision(everything)
            if self._differs(self.whole, self.whole, everything):
                raise ConformanceError(
                    f"{self.where}: the private function gave two results for the same records. It must be a function "
                    "of its records, of public inputs that do not change during a release, and of the `rng` that it is "
                    "given, because a release may call it on parts of a draw of any size."
                )
            self._refuse_if_no_row_is_finite(everything)
            self._expect_single_votes(everything)
            others = self._other_records(len(self.whole))
            # Draws of one shape: rounding is the same, so each difference counts.
            for name, before, after, rows, at in self._same_shape(others):
                if self._differs(before, after, rows, at, at):
                    self._raise_dependent(f"changed when {name}")
            # Other shapes and orders: in float32 the darkened copies must differ, too.
            # The same holds for votes, of which rounding in any precision decides between two equal candidates.
            factors = () if self.dtype == torch.float64 and not isinstance(self.bound, Votes) else DARKENED
            for name, batch, rows, at in self._other_shape(others):
                if all(
                    self._differs(_darkened(self.whole, factor), _darkened(batch, factor), rows, rows, at)
                    for factor in (1.0, *factors)
                ):
                    self._raise_dependent(f"differ {name}")

    def _raise_dependent(self, what: str) -> None:
        kind = "votes" if isinstance(self.bound, Votes) else "per-record gradients, before clipping,"
        kind = "rows, before clipping," if isinstance(self.bound, ROWS) else kind
        raise ConformanceError(
            f"{self.where}: {kind} {what}. Row i must depend on record i and public inputs alone, "
            "because the declared sensitivity depends on it: use no mean, count or order of the batch, no randomness "
            "by position in the batch (name an argument `rng`), and no division by the realised size of a draw."
        )

    def _other_records(self, number: int) -> Batch:
        shape = tuple(self.whole.images.shape[1:])
        images, labels = random_images(shape, number, self.num_classes, seed=self.index + 7)
        device = self.whole.labels.device
        ids = self.whole.ids.max() + 1 + torch.arange(number, device=device)
        return Batch((1.0 - images).to(device), labels.to(device), ids, self.whole.key)

    def _same_shape(self, others: Batch) -> Iterator[tuple[str, Batch, Batch, Tensor, Tensor]]:
        """(change of the other records, two draws of one shape, rows to compare, their positions in both)."""
        b = len(self.whole)
        for half in (0, 1):
            kept = torch.arange(half, b, 2)
            if len(kept) == 0 or len(kept) == b:
                continue
            rest = torch.ones(b, dtype=torch.bool)
            rest[kept] = False
            first = self._scaled(self.whole.rows(kept[:1]))
            for name, images, labels in self._replacements(others, first):
                batch = self._scaled(self.whole)
                batch.images[rest], batch.labels[rest] = images[rest], labels[rest]
                yield f"the other records of the draw were {name}", self._scaled(self.whole), batch, kept, kept
        # A draw of one record has no others to change, so the draw is also compared behind two different pairs.
        everything, behind = torch.arange(b), torch.arange(2, b + 2)
        whole, pair = self._scaled(self.whole), others.rows(torch.arange(2) % b)
        first = self._scaled(self.whole.rows(slice(0, 1)))
        for name, images, labels in self._replacements(pair, first):
            other = Batch(images, labels, pair.ids, pair.key)
            yield f"others in the draw were {name}", _joined(pair, whole), _joined(other, whole), everything, behind

    def _replacements(self, others: Batch, kept: Batch) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, images, labels) with which the other records of a draw are replaced."""
        images, labels, b = others.images.to(self.dtype), others.labels, len(others)
        yield "replaced", images, labels
        yield "copies of one", kept.images.expand_as(images).clone(), kept.labels.expand(b).clone()
        yield "dark and of one class", torch.zeros_like(images), torch.zeros_like(labels)
        yield "outside of [0, 1]", (images - 0.5) * 20.0, (labels + 1) % self.num_classes
        if not isinstance(self.bound, PerRecordGradient):
            yield "NaN", torch.full_like(images, math.nan), labels
            yield "1e30", torch.full_like(images, 1e30), labels

    def _other_shape(self, others: Batch) -> Iterator[tuple[str, Batch, Tensor, Tensor]]:
        """(name, a draw of another shape or order, rows to compare, their positions in it)."""
        b = len(self.whole)
        everything, last = torch.arange(b), torch.tensor([b - 1])
        whole = self._scaled(self.whole)
        if b > 1:
            part = torch.arange(1, b, 2)
            yield "in a draw of every second record", whole.rows(part), part, torch.arange(len(part))
            yield "in a draw of one record alone", whole.rows(last), last, torch.arange(1)
            yield "in another order", whole.rows(everything.flip(0)), everything, everything.flip(0)
            yield "one position later", whole.rows(everything.roll(1)), everything, everything.roll(-1)
        yield "after other records", _joined(others, whole), everything, everything + b
        yield "before one more record", _joined(whole, others.rows(slice(0, 1))), everything, everything
        yield "before as many other records", _joined(whole, others), everything, everything

    def _scaled(self, batch: Batch) -> Batch:
        """A copy in the precision of the comparison, with uint8 images converted to [0, 1]."""
        images, labels = unit_range(batch.images), batch.labels
        return Batch(images.to(self.dtype, copy=True), labels.clone(), batch.ids, batch.key)

    def _choose_precision(self, everything: Tensor) -> None:
        """Keep float64 if the function can be evaluated in it; otherwise use float32."""
        try:
            value = self._value(self._scaled(self.whole), everything, everything)
            if value.dtype == torch.float64 or isinstance(self.bound, Votes):
                return
        except Exception:  # the function casts to float32 at some point
            pass
        self.dtype = torch.float32

    def _differs(
        self, one: Batch, other: Batch, rows: Tensor, at: Tensor | None = None, then: Tensor | None = None
    ) -> bool:
        """Whether rows differ between two draws by more than rounding.

        Args:
            one: a draw.
            other: another draw.
            rows: numbers of the compared rows in the whole draw.
            at: their positions in `one`; the same numbers by default.
            then: their positions in `other`; the same numbers by default.
        """
        at, then = (rows if positions is None else positions for positions in (at, then))
        a, b = self._value_of(one, at, rows), self._value_of(other, then, rows)
        if isinstance(self.bound, PerRecordGradient) and not bool(torch.isfinite(a + b).all()):
            # One row whose gradient is not finite makes the whole sum NaN: compare the other rows.
            if math.isinf(self.bound.C):
                return False  # without clipping there is no sensitivity to check, and all layers are allowed
            a, b = self._value_of(one, at, rows, finite=True), self._value_of(other, then, rows, finite=True)
        if isinstance(self.bound, Votes):
            return not torch.equal(a, b)
        return not _close(a, b, RELATIVE[self.dtype], self.bound)

    def _expect_single_votes(self, everything: Tensor) -> None:
        """Check that no record names a bin twice, or one that is neither a bin nor -1; neither would be counted."""
        if not isinstance(self.bound, Votes):
            return
        votes = self._value_of(self.whole, everything, everything).long()  # each row is sorted
        twice = (votes[:, 1:] == votes[:, :-1]) & (votes[:, 1:] >= 0)
        if bool(twice.any()) or int(votes.min()) < -1 or int(votes.max()) >= self.bound.bins:
            raise ConformanceError(
                f"{self.where}: a record votes twice for one bin, or for a number outside 0..{self.bound.bins - 1}. "
                "Such votes are not counted: return different numbers of bins, and -1 for each vote that is not cast."
            )

    def _refuse_if_no_row_is_finite(self, everything: Tensor) -> None:
        finite = torch.isfinite(self._value_of(self.whole, everything, everything))
        nothing = not bool(finite.any())
        if isinstance(self.bound, PerRecordGradient) and not bool(finite.all()) and math.isfinite(self.bound.C):
            nothing = not bool(self._value_of(self.whole, everything, everything, finite=True).any())
        if nothing:
            raise ConformanceError(
                f"{self.where}: of {len(self.whole)} records none has a row, or the gradient of a loss, that is finite "
                "and not zero. A release drops rows that are not finite, so this one would be noise alone and its rows "
                "cannot be compared. Correct the function: does it take a square root at zero, or divide by zero?"
            )

    def _value_of(self, batch: Batch, at: Tensor, rows: Tensor, *, finite: bool = False) -> Tensor:
        """As `_value`, on a copy of the batch; an error of the function becomes a ConformanceError."""
        try:
            return self._value(self._scaled(batch), at, rows, finite=finite)
        except Exception as error:
            raise ConformanceError(
                f"{self.where}: the private function raised {type(error).__name__} ({error}) on some of the records of "
                "its draw, or on other records in their place. It must never raise, for any records."
            ) from error

    def _value(self, batch: Batch, at: Tensor, rows: Tensor, *, finite: bool = False) -> Tensor:
        """The rows `at` [k, ...], or a weighted sum [1, p] of their gradients and of those of public rows.

        Args:
            batch: the draw to evaluate the function on.
            at: positions of the rows in it.
            rows: numbers of these rows in the whole draw, which select their weights.
            finite: leave out gradients that are not finite, as a release does, by the same code.
        """
        self.restore(self.dtype)
        weights = self.weights[rows]
        images, labels, ids = batch.images, batch.labels, batch.ids
        more: tuple[Tensor, ...] = ()
        if isinstance(self.bound, Votes):
            return self._call(images, labels, ids).detach()[at.to(labels.device)].sort(dim=1).values
        if isinstance(self.bound, ROWS):
            with torch.enable_grad():  # as in a release: rows may be gradients
                return _comparable(self.bound, self._call(images, labels, ids))[at.to(labels.device)]
        if self.public is not None:  # they follow the records, with negative ids and a mask
            r = len(self.public[1])
            more = (torch.cat([torch.zeros_like(labels), torch.ones_like(self.public[1])]).bool(),)
            at = torch.cat([at, len(labels) + torch.arange(r)])
            weights = torch.cat([weights, self.weights[len(self.whole) :]])
            images = torch.cat([images, self.public[0].detach().to(images.dtype)])
            ids = torch.cat([ids, -1 - torch.arange(r, device=ids.device)])
            labels = torch.cat([labels, self.public[1]])
        parameters = [p for p in self.bound.module.parameters() if p.requires_grad]
        if finite:
            all_weights = torch.zeros(len(labels), dtype=images.dtype).index_put((at,), weights.to(images.dtype))
            total = clipped_gradient_sum(
                self.bound.module,
                lambda row_weights, *arguments: self._call(*arguments) * row_weights,
                (all_weights.to(images.device), images, labels, ids, *more),
                NO_CLIPPING,
                backend=self.bound.backend,
                copies=self.bound.copies,
            )
            return torch.cat([part.flatten() for part in total.gradients.values()])[None]
        with torch.enable_grad():
            losses = self._call(images, labels, ids, *more)[at.to(labels.device)]
            grads = torch.autograd.grad(losses, parameters, weights.to(losses), allow_unused=True)
        whole = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
        return torch.cat([part.flatten() for part in whole])[None]

    def _call(self, images: Tensor, labels: Tensor, ids: Tensor, *more: Tensor) -> Any:
        copies = self.bound.copies if isinstance(self.bound, PerRecordGradient) else 1
        # A copy, because the function may change its arguments in place.
        batch = Batch(images.clone(), labels.clone(), ids, self.whole.key).repeated(copies)
        more = tuple(part.repeat_interleave(copies, dim=0) for part in more)
        rng = {"rng": RecordRng(batch.key, batch.ids, copies)} if names_rng(self.fn) else {}
        returned = self.fn(batch.images, batch.labels, *more, **rng)
        return returned if copies == 1 else returned.view(-1, copies).mean(dim=1)


def _comparable(bound: PerRecord | PerRecordProducts | PerRecordMoments, returned: Any) -> Tensor:
    """What the function returned, as one tensor [b, ...] of size C for records that are just clipped.

    Rows of outer products are compared by their factors, because the rows can be too large. Factors u and v are first
    scaled to equal norms, so that a small difference of a factor is a small difference of the row.
    """
    if isinstance(bound, PerRecord):
        return returned.detach()
    C = bound.C if math.isfinite(bound.C) else 1.0
    if isinstance(bound, PerRecordMoments):
        return returned.detach() * (C / bound.radius if math.isfinite(bound.radius) else 1.0)
    pairs = bound.factors(returned, len(next(iter(returned.values()))[0])).values()
    columns, finite = [], torch.tensor(True)
    for factors in pairs:
        u, v = (factor.detach().double() for factor in factors)
        a, b = u.norm(dim=1, keepdim=True), v.norm(dim=1, keepdim=True)
        scale = (a / b).sqrt()
        columns += [torch.where(a * b > 0.0, factor, 0.0) * C**0.5 for factor in (u / scale, v * scale)]
        finite = finite.to(u.device) & torch.isfinite(a + b)
    exact = all(factor.dtype == torch.float64 for factors in pairs for factor in factors)
    whole = torch.cat(columns, dim=1).to(torch.float64 if exact else torch.float32)
    return torch.where(finite, whole, math.nan)  # one factor that is not finite makes the row zero


def _joined(one: Batch, other: Batch) -> Batch:
    pairs = ((one.images, other.images), (one.labels, other.labels), (one.ids, other.ids))
    images, labels, ids = (torch.cat([a, b.to(a.dtype)]) for a, b in pairs)
    return Batch(images, labels, ids, other.key)


def _darkened(batch: Batch, factor: float) -> Batch:
    return Batch(unit_range(batch.images) * factor, batch.labels, batch.ids, batch.key)


def _close(a: Tensor, b: Tensor, relative: float, bound: Bound) -> bool:
    """Whether each row differs by at most `relative` of its norm plus OF_THE_BOUND of the bound; NaN equals NaN."""
    a, b = a.detach().double().flatten(1), b.detach().double().flatten(1)
    if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
        return False
    a, b = (torch.where(torch.isfinite(x), x, torch.zeros_like(x)) for x in (a, b))
    floor = OF_THE_BOUND * (bound.C if math.isfinite(bound.C) else 1.0)
    allowed = relative * a.norm(dim=1) + floor
    return bool(((a - b).norm(dim=1) <= allowed).all())

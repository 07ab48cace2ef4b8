"""Bounds for rows that are outer products: the private function returns factors, and no row is ever formed.

| bound | fn returns | a record's row | add/remove | replace one |
|---|---|---|---|---|
| PerRecordProducts | pairs u, v per record | all u v^T, clipped together to C | C | 2C |
| PerRecordMoments | a vector z per record | [w0, w1 z/R, w2 svec(z z^T)/R^2], clipped to C | C | sqrt(2) C or more |

With `classes`, a row belongs to the block of its record's label. Norms are computed from the factors, and the sum of
all rows is a matrix product of factors in float64. docs/accounting.md, "Rows given as factors", proves the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpgen_bench.privacy.bounds import Batch, DrawBound, PublicRows, call, call_for_parts, records_in_memory
from dpgen_bench.privacy.clipping import SMALLEST_C, clip_products, clip_rows
from dpgen_bench.privacy.events import Sensitivity
from dpgen_bench.privacy.expect import expect_integer, expect_name, expect_number, expect_shape, expect_size

# The coefficients of a row of moments are rounded to float64; with this margin its exact norm is at most C.
_MARGIN = 1.0 + 1e-9


@dataclass(frozen=True, kw_only=True)
class PerRecordProducts(DrawBound):
    """Sum over the draw of one row per record, which consists of outer products u v^T.

    fn(images, labels) -> {part: (u [b, m], v [b, n])} for each part of `shapes`. A release is a dict of tensors [m, n]
    by part, or [classes, m, n]. Gradients of linear layers have this form; m = 1 adds an ordinary vector.

    Guarantees: the row of a record has the squared norm sum over parts of |u|^2 |v|^2. It is multiplied by a factor of
    at most 1, so that its norm is at most C in exact arithmetic on the factors. Hence the sum moves by at most C if a
    record joins or leaves the draw, and by at most 2C if one is exchanged, provided that the factors of record i depend
    on record i, its row of `rng` and public inputs alone. The row of a record with a factor that is not finite in
    float32 is zero.

    Args:
        shapes: (m, n) by the name of the part.
        classes: the number of classes. The row of a record is then added to the block of its label, and all other
            blocks of its row are zero. None for one block.
        microbatch: the largest number of records on which fn is called together, as in `PerRecord`.

    Raises:
        ValueError: for no parts, a name that cannot be a file name, or a shape that is not two sizes of at least 1.
    """

    shapes: Mapping[str, tuple[int, int]]
    classes: int | None = None
    microbatch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        what = type(self).__name__
        if not isinstance(self.shapes, Mapping) or not self.shapes:
            raise ValueError(f"{what}: expected shapes {{part: (m, n)}}, got {self.shapes!r}; give at least one part.")
        shapes = {}
        for part, shape in self.shapes.items():
            sizes = expect_shape(shape, f"{what}, part {expect_name(part, 'a part')!r}", minimum=1)
            if len(sizes) != 2:
                raise ValueError(f"{what}, part {part!r}: expected two sizes (m, n), got {sizes}; a vector is (1, n).")
            shapes[part] = sizes
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "classes", _expect_classes(self.classes, what))
        expect_size((self.classes or 1) * sum(m * n for m, n in shapes.values()), what)

    @property
    def sensitivity(self) -> Sensitivity:
        return Sensitivity(self.C, 2.0 * self.C)

    @property
    def records_at_once(self) -> int:
        """The largest number of records on which fn is called together."""
        return self.microbatch or records_in_memory(sum(m + n for m, n in self.shapes.values()))

    def describe(self) -> dict[str, Any]:
        shapes = {part: list(shape) for part, shape in self.shapes.items()}
        return {**super().describe(), "shapes": shapes, "classes": self.classes}

    def value(self, fn: Callable[..., Any], batch: Batch, public: PublicRows | None) -> dict[str, Tensor]:
        device, blocks = batch.labels.device, self.classes or 1
        totals = {
            part: torch.zeros(blocks, *shape, dtype=torch.float64, device=device) for part, shape in self.shapes.items()
        }
        for chunk in batch.chunks(self.records_at_once):
            if len(chunk) == 0:
                continue
            factors = self.factors(call_for_parts(fn, chunk), len(chunk))
            clipped = clip_products([factors[part] for part in self.shapes], self.C)
            for part, (u, v) in zip(self.shapes, clipped, strict=True):
                for block, rows in _blocks(chunk.labels, self.classes):
                    totals[part][block] += u[rows].T @ v[rows]
        return totals if self.classes is not None else {part: total[0] for part, total in totals.items()}

    def row_norms(self, factors: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        """The norms [b] of the rows of these factors, in float64; overflow gives inf."""
        norms = [u.detach().double().norm(dim=1) * v.detach().double().norm(dim=1) for u, v in factors.values()]
        return torch.stack(norms).norm(dim=0)

    def factors(self, returned: Any, records: int) -> dict[str, tuple[Tensor, Tensor]]:
        """What fn returned for this number of records, if it is as declared.

        Raises:
            ValueError: for other parts, or factors of other shapes.
        """
        if not isinstance(returned, dict) or returned.keys() != self.shapes.keys():
            got = list(returned) if isinstance(returned, dict) else type(returned).__name__
            raise ValueError(
                f"PerRecordProducts: expected the function to return a dict with the parts {list(self.shapes)}, got "
                f"{got}. The parts of a release are declared with its bound."
            )
        for part, (m, n) in self.shapes.items():
            shapes = tuple(tuple(factor.shape) for factor in returned[part])
            if shapes != ((records, m), (records, n)):
                raise ValueError(
                    f"PerRecordProducts: expected the function to return factors of shape {(records, m)} and "
                    f"{(records, n)} for part {part!r}, got {shapes}. The shapes are declared with the bound."
                )
        return returned


@dataclass(frozen=True)
class Moments:
    """Sums over the records of a draw, or over those of each class: then every tensor has a first axis [classes].

    Attributes:
        count: the number of records [].
        first: the sum of z [d].
        second: the sum of z z^T [d, d], a symmetric matrix.

    Sums of weight zero were not released and have no entries: [0], [0] and [0, 0].
    """

    count: Tensor
    first: Tensor
    second: Tensor


@dataclass(frozen=True, kw_only=True)
class PerRecordMoments(DrawBound):
    """Sum over the draw of the joint row of count, first and second moment: fn(images, labels) -> z [b, dim].

    Each z is scaled to a norm of at most R = `radius`. With (w0, w1, w2) = C weights / |weights|, its row is

        [w0, w1 z/R, w2 svec(z z^T)/R^2],

    where svec is the upper triangle with sqrt(2) off the diagonal. Each symmetric entry is thus released once, and svec
    preserves inner products: <svec(z z^T), svec(z' z'^T)> = <z, z'>^2. A release is a tensor [size], or
    [classes, size]; `unpack` turns it into sums.

    Guarantees: with r = |z|/R <= 1, the squared norm of a row is w0^2 + w1^2 r^2 + w2^2 r^4 <= C^2, so the sum moves by
    at most C if a record joins or leaves the draw. With t = <z, z'>/R^2 in [-1, 1], two rows of one class have the
    inner product

        f(t) = w0^2 + w1^2 t + w2^2 t^2,

    and rows of two classes have 0. If f >= 0 for every possible t, then |x - y|^2 = |x|^2 + |y|^2 - 2 <x, y> <= 2 C^2:
    the sum moves by at most sqrt(2) C if a record is exchanged. This holds for all z if w0^2 >= w1^4 / (4 w2^2), and
    for all weights if z is non-negative, because then t >= 0. For other weights, with m = -min f > 0, the sum moves by
    at most sqrt(2 C^2 + 2 m), and never by more than 2C. Clipping multiplies z by a positive factor, which keeps the
    sign of t. All of this requires that z_i depends on record i, its row of `rng` and public inputs alone. The row of
    a record whose z is not finite is zero.

    Args:
        dim: d, the dimension of z.
        radius: R. A smaller one clips more records, a larger one has more noise relative to the sums.
        weights: the relative sizes of count, first and second moment. What has the weight zero is not released.
        classes: the number of classes, as in `PerRecordProducts`; None for one block.
        nonnegative: set negative entries of z to zero before clipping, so that z is non-negative by construction.
        C: the norm of the longest row. Only its ratio to the noise matters. With inf, for a release without noise, the
            row is [1, z, svec(z z^T)] and R may be inf, too.
        microbatch: the largest number of records on which fn is called together, as in `PerRecord`.

    Raises:
        ValueError: for a radius or weights outside their range.
    """

    C: float = 1.0
    dim: int
    radius: float
    weights: tuple[float, float, float]
    classes: int | None = None
    nonnegative: bool = False
    microbatch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        what = "PerRecordMoments"
        advice = "give the largest norm of z that is not clipped"
        radius = expect_number(self.radius, f"{what}, radius", above=SMALLEST_C, advice=advice)
        if math.isinf(radius) and math.isfinite(self.C):
            raise ValueError(f"{what}: expected a finite radius, got {radius}; {advice}.")
        if len(self.weights) != 3:
            raise ValueError(f"{what}: expected weights of count, first and second moment, got {self.weights!r}.")
        advice = "give the relative sizes of count, first and second moment, 0 for what is not released"
        below_zero = math.nextafter(0.0, -1.0)
        weights = tuple(
            expect_number(weight, f"{what}, weights", above=below_zero, maximum=1e6, advice=advice)
            for weight in self.weights
        )
        if max(weights[1:]) < 1e-6:
            raise ValueError(f"{what}: expected a weight of a moment of at least 1e-6, got {weights}; {advice}.")
        object.__setattr__(self, "radius", radius)
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "dim", expect_integer(self.dim, f"{what}, dim"))
        object.__setattr__(self, "classes", _expect_classes(self.classes, what))
        expect_size((self.classes or 1) * self.size, what)

    @property
    def sensitivity(self) -> Sensitivity:
        if math.isinf(self.C):
            return Sensitivity(math.inf, math.inf)
        w0, w1, w2 = (weight / math.hypot(*self.weights) for weight in self.weights)
        # The minimum of f over the possible t, for C = 1. Rows of different classes have the inner product 0.
        t = 0.0 if self.nonnegative else -1.0 if w1 >= 2.0**0.5 * w2 else -(w1**2) / (2.0 * w2**2)
        least = min(0.0, w0**2 + w1**2 * t + w2**2 * t**2)
        return Sensitivity(self.C, self.C * min(2.0, math.sqrt(2.0 - 2.0 * least)))

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """What count, z and svec(z z^T) are multiplied by in a row."""
        if math.isinf(self.C):
            return 1.0, 1.0, 1.0
        scale = self.C / (math.hypot(*self.weights) * _MARGIN)
        w0, w1, w2 = self.weights
        return scale * w0, scale * w1 / self.radius, scale * w2 / self.radius / self.radius

    @property
    def size(self) -> int:
        """The number of entries of a row in the block of its class."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        """Numbers of entries of count, first and second moment in a row."""
        sizes = (1, self.dim, self.dim * (self.dim + 1) // 2)
        return [size if weight > 0.0 else 0 for size, weight in zip(sizes, self.weights, strict=True)]

    @property
    def records_at_once(self) -> int:
        """The largest number of records on which fn is called together."""
        return self.microbatch or records_in_memory(self.dim)

    def describe(self) -> dict[str, Any]:
        names = ("dim", "radius", "weights", "classes", "nonnegative")
        own = {name: getattr(self, name) for name in names}
        return {**super().describe(), **own, "weights": list(self.weights)}

    def value(self, fn: Callable[..., Tensor], batch: Batch, public: PublicRows | None) -> dict[str, Tensor]:
        blocks, d, device = self.classes or 1, self.dim, batch.labels.device
        count = torch.zeros(blocks, dtype=torch.float64, device=device)
        first = torch.zeros(blocks, d, dtype=torch.float64, device=device)
        squares = d if self.weights[2] > 0.0 else 0  # the matrices are not computed if they are not released
        second = torch.zeros(blocks, squares, squares, dtype=torch.float64, device=device)
        for chunk in batch.chunks(self.records_at_once):
            if len(chunk) == 0:
                continue
            z = call(fn, chunk)
            if tuple(z.shape) != (len(chunk), d):
                raise ValueError(
                    f"PerRecordMoments: expected the function to return shape {(len(chunk), d)}, got {tuple(z.shape)}. "
                    "The dimension is declared with the bound."
                )
            finite = torch.isfinite(z).all(dim=1)
            if self.nonnegative:
                z = torch.where(finite[:, None], z.clamp(min=0.0), math.nan)  # the clamp alone would make -inf a number
            z = clip_rows(z, self.radius).double()  # zero in rows that are not finite
            for block, rows in _blocks(chunk.labels, self.classes):
                count[block] += finite[rows].sum()
                first[block] += z[rows].sum(dim=0)
                if squares:
                    second[block] += z[rows].T @ z[rows]
        # The upper triangle of the sum, with sqrt(2) off the diagonal, is the sum of all svec(z z^T).
        (i, j), scale = _triangle(squares, device)
        c0, c1, c2 = self.coefficients
        parts = (c0 * count[:, None], c1 * first, second[:, i, j].mul_(c2 * scale))
        value = torch.cat([part for part, weight in zip(parts, self.weights, strict=True) if weight > 0.0], dim=1)
        return {"value": value if self.classes is not None else value[0]}

    def unpack(self, release: Tensor) -> Moments:
        """The sums that a release [..., size] of this bound contains, in the units of z."""
        c0, c1, c2 = (c or 1.0 for c in self.coefficients)
        count, first, svec = release.split(self._sizes, dim=-1)
        squares = self.dim if self.weights[2] > 0.0 else 0
        (i, j), scale = _triangle(squares, release.device)
        upper = (svec / (c2 * scale)).to(svec.dtype)
        second = release.new_zeros(*release.shape[:-1], squares, squares)
        second[..., i, j] = upper
        second[..., j, i] = upper
        return Moments(count[..., 0] / c0 if self._sizes[0] else count, first / c1, second)


def _triangle(d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column numbers [2, d(d + 1)/2] of the upper triangle, and each entry's factor in svec, in float64."""
    indices = torch.triu_indices(d, d, device=device)
    scale = torch.full(indices.shape[1:], math.sqrt(2.0), dtype=torch.float64, device=device)
    return indices, scale.masked_fill_(indices[0] == indices[1], 1.0)


def _blocks(labels: Tensor, classes: int | None) -> Iterator[tuple[int, Tensor | slice]]:
    """(block, the records whose rows are added to it)."""
    if classes is None:
        yield 0, slice(None)
        return
    for label in range(classes):
        yield label, labels == label


def _expect_classes(classes: object, what: str) -> int | None:
    if classes is None:
        return None
    return expect_integer(classes, f"{what}, classes", advice="give data.num_classes, or None for one block")

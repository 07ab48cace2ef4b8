"""A search for the records that move a release furthest: unusual images, other labels, and gradient ascent on pixels.

A conformance suite tries random neighbours. They rarely reach the declared sensitivity, and an audit that attacks with
them certifies little. Images stay within [0, 1], since a data set has no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.privacy.bounds import Batch, DrawBound, PerRecord, PerRecordGradient, PublicRows, call
from dpgen_bench.testing.tape import flat

STEPS = 30  # of gradient ascent
STEP_SIZE = 0.1  # of the first step of gradient ascent, for the sign of the gradient; later ones shrink to 0
STARTS = 2  # of gradient ascent: of the candidates, of their pairs, and of their pairs with one label
# Distances that differ by less, of the largest, are equal: clipped rows often all have the norm C, up to rounding, and
# the search should be the same on all processors.
EQUAL = 1e-3


@dataclass(frozen=True)
class Candidate:
    """A record to put in the place of the attacked one: `name` is what a report calls it."""

    name: str
    image: Tensor
    label: int


@dataclass(frozen=True)
class Query:
    """A private function as a release called it, on a batch that contains the attacked record.

    Attributes:
        at: the place of the attacked record in the batch.
    """

    bound: DrawBound
    fn: Callable[..., Tensor]
    batch: Batch
    public: PublicRows | None
    at: int

    def value(self, candidate: Candidate | None) -> Tensor:
        """The exact value [p], float32, with the candidate in the place of the attacked record; None removes it."""
        if candidate is None:
            kept = torch.arange(len(self.batch)) != self.at
            batch = self.batch.rows(kept)
        else:
            images, labels = self.batch.images.clone(), self.batch.labels.clone()
            images[self.at], labels[self.at] = candidate.image.to(images.dtype), candidate.label
            batch = Batch(images, labels, self.batch.ids, self.batch.key)
        return flat(self.bound.value(self.fn, batch, self.public)).float()

    def rows(self, images: Tensor, labels: Tensor) -> Tensor | None:
        """Rows [b, p] of records before clipping, differentiable in `images`; None if the bound has no such rows.

        For a `PerRecordGradient` these are gradients of losses of single records.
        """
        if self.public is not None:
            return None
        ids = self.batch.ids[self.at].expand(len(labels))
        if isinstance(self.bound, PerRecord):
            return call(self.fn, Batch(images, labels, ids, self.batch.key)).flatten(1)
        if isinstance(self.bound, PerRecordGradient):
            parameters = [each for each in self.bound.module.parameters() if each.requires_grad]
            losses = call(self.fn, Batch(images, labels, ids, self.batch.key))
            gradients = [torch.autograd.grad(loss, parameters, create_graph=True) for loss in losses.flatten()]
            return torch.stack([torch.cat([part.flatten() for part in each]) for each in gradients])
        return None


def candidates(image: Tensor, label: int, others: Tensor, num_classes: int) -> Iterator[Candidate]:
    """Records that may move a release far: the own one, others of the draw, extreme images, each with another label.

    Args:
        image: the attacked record [c, h, w] in [0, 1].
        others: images [m, c, h, w] of other records, which are duplicated.
    """
    spot = torch.zeros_like(image)
    spot[..., image.shape[-2] // 2, image.shape[-1] // 2] = 1.0
    board = (torch.arange(image.shape[-2])[:, None] + torch.arange(image.shape[-1])[None, :]) % 2
    images = {
        "the record itself": image,
        "a white image": torch.ones_like(image),
        "a black image": torch.zeros_like(image),
        "its negative": 1.0 - image,
        "one white pixel": spot,
        "a chequered image": board.to(image.dtype).expand_as(image),
    }
    images |= {f"a copy of another record ({number})": other for number, other in enumerate(others)}
    for number, (name, each) in enumerate(images.items()):
        yield Candidate(name, each, label)
        if num_classes > 1 and number < 3:
            yield Candidate(f"{name}, with another label", each, (label + 1) % num_classes)


def ascended(query: Query, start: Candidate, other: Candidate | None) -> Candidate | None:
    """The record that gradient ascent on the pixels of `start` leads to; None where no gradient can be computed.

    The clipped row is moved away from that of `other`, or from zero. A row that is clipped grows in its norm only, so
    the norm of the row before clipping is the objective until it reaches C.
    """
    labels = torch.tensor([start.label])
    image = start.image.float().clone()
    away: Tensor | None = None
    if other is not None:
        rows = query.rows(other.image.float()[None], torch.tensor([other.label]))
        if rows is None:
            return None
        away = _clipped(rows.detach(), query.bound.C)
    for step in range(STEPS):
        pixels = image[None].clone().requires_grad_()
        rows = query.rows(pixels, labels)
        if rows is None or not rows.requires_grad:
            return None
        moved = rows.norm() if away is None else (_clipped(rows, query.bound.C) - away).norm()
        (gradient,) = torch.autograd.grad(moved, [pixels], allow_unused=True)
        if gradient is None or not bool(torch.isfinite(gradient).all()):
            return None
        size = STEP_SIZE * (1.0 - step / STEPS)
        image = (image + size * gradient[0].sign()).clamp(0.0, 1.0).detach()
    return Candidate(f"gradient ascent from {start.name}", image, start.label)


def _clipped(rows: Tensor, C: float) -> Tensor:
    return rows if math.isinf(C) else rows * (C / rows.norm(dim=1, keepdim=True).clamp_min(C))


def furthest_first(distances: Tensor) -> list[int]:
    """Places in a flat tensor by descending distance; those of distances that are `EQUAL` keep their order."""
    largest = float(distances.max()) or 1.0
    ranks = (distances.double().numpy() / (EQUAL * largest)).round()
    return [int(place) for place in np.argsort(-ranks, kind="stable")]


def worst_pair(query: Query, tried: Sequence[Candidate]) -> tuple[Candidate, Candidate, Candidate]:
    """The candidate that moves the release furthest if it joins, and the two that are furthest from each other.

    The best of the tried ones are improved by gradient ascent.
    """
    tried, without = list(tried), query.value(None)
    values = [query.value(each) for each in tried]

    def add(candidate: Candidate | None) -> None:
        if candidate is not None:
            tried.append(candidate)
            values.append(query.value(candidate))

    def joined() -> list[Candidate]:
        distances = torch.stack([(value - without).norm() for value in values])
        return [tried[place] for place in furthest_first(distances)]

    def furthest() -> list[tuple[int, int]]:
        pairs = list(combinations(range(len(values)), 2))
        distances = torch.stack([(values[one] - values[other]).norm() for one, other in pairs])
        return [pairs[place] for place in furthest_first(distances)]

    for start in joined()[:STARTS]:
        add(ascended(query, start, None))
    # Rows of different labels are often orthogonal: their distance is large, and its gradient is zero.
    pairs = furthest()
    same_label = [(one, other) for one, other in pairs if tried[one].label == tried[other].label]
    for one, other in dict.fromkeys(pairs[:STARTS] + same_label[:STARTS]):
        moved = ascended(query, tried[one], tried[other])
        add(moved)
        add(ascended(query, tried[other], moved or tried[one]))
    one, other = furthest()[0]
    return joined()[0], tried[one], tried[other]

"""The records of one draw (`Batch`), which only private functions and the bounds that call them see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.padding import Padding


@dataclass(frozen=True)
class Batch:
    """The records of one draw. A batch exists only inside a mechanism, and only `fn` receives its records.

    Attributes:
        images: [b, c, h, w], uint8 (scaled to [0, 1] on the way out) or float.
        labels: int64 [b].
        ids: int64 [b], the records' ids; -1 - j for public row j of a PerRecordGradient.
        key: the key of the release, from which the rows of `rng` are derived.
        copies: the number of consecutive rows that are copies of one record, see `repeated`.
        real: bool [b], the rows that are records; the others are padding (`padding.Padding`), which adds exactly zero.
            None if all are records.
        padding: the numbers of rows of a padded draw; None for an exact one.
        words: what `key` gives to `rng`, in a recorded graph.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor
    key: Key
    copies: int = 1
    real: Tensor | None = None
    padding: Padding | None = None
    words: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """The arguments of private functions: (images float32 in [0, 1], labels)."""
        return unit_range(self.images), self.labels

    def rows(self, index: slice | Tensor) -> Batch:
        """Some of the records."""
        real = None if self.real is None else self.real[index]
        return Batch(self.images[index], self.labels[index], self.ids[index], self.key, real=real, padding=self.padding)

    def repeated(self, copies: int) -> Batch:
        """A batch in which each record has `copies` consecutive rows, with streams of `rng` of their own."""
        if copies == 1:
            return self
        parts = (self.images, self.labels, self.ids)
        images, labels, ids = (part.repeat_interleave(copies, dim=0) for part in parts)
        return Batch(images, labels, ids, self.key, copies, words=self.words)

    def chunks(self, size: int | None) -> Iterator[Batch]:
        """Pieces of at most `size` records; one piece for None or an empty draw."""
        step = max(len(self), 1) if size is None else size
        for start in range(0, max(len(self), 1), step):
            yield self.rows(slice(start, start + step))


def unit_range(images: Tensor) -> Tensor:
    """Float32 images in [0, 1] of uint8 ones; others keep their values."""
    return images.float().div_(255.0) if images.dtype == torch.uint8 else images.float()

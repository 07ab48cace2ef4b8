"""The papers' row "Real data": the training records in place of samples, as an upper bound without privacy.

The method makes one release without noise or clipping, which only privacy.epsilon=inf allows. The run uses the same
harness, ledger and protocols as any other, so that its metric values can stand in the same tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import Generator, public_rng
from dpgen_bench.method import Context
from dpgen_bench.privacy.accountants.calibration import BudgetExceeded
from dpgen_bench.privacy.bounds import Whole
from dpgen_bench.privacy.events import budget_text
from dpgen_bench.privacy.sampling import Full


class RealRecords(Generator):
    """A generator that returns training records: images uint8 [N, c, h, w] with labels int64 [N].

    Image i is a record of class labels[i]. It is chosen by i, the seed and labels[i] alone: record i mod N if that is
    of the class; else entry i mod N of a permutation drawn from the seed, if that is; else a record of the class drawn
    from the seed.

    Guarantees: For the labels of `draw_labels(n, seed)` the images are n distinct records, and their classes are those
    of a random subset. If n >= N, they are all records in their own order. In a subset, about one image in num_classes
    is the record of its own position, so the first n records are slightly more frequent than others.
    """

    def __init__(self, images: Tensor, labels: Tensor, num_classes: int) -> None:
        self.images, self.labels, self.num_classes = images, labels, num_classes
        self.image_shape = (images.shape[1], images.shape[2], images.shape[3])

    def _shuffled(self, seed: int) -> Tensor:
        return torch.from_numpy(public_rng(seed, "order").permutation(len(self.labels)))

    def _order(self, seed: int) -> Tensor:
        """A permutation with the labels of `_shuffled`, in which position i holds record i where the labels agree.

        Such an i is removed from its cycle of the permutation: the position that held record i gets the record that
        position i held, which has the same label.
        """
        shuffled = self._shuffled(seed)
        fixed = self.labels[shuffled] == self.labels
        order = torch.where(fixed, torch.arange(len(shuffled)), shuffled)
        while (repeated := ~fixed & fixed[order]).any():
            order[repeated] = shuffled[order[repeated]]
        return order

    def draw_labels(self, n: int, seed: int) -> Tensor:
        """The labels of all records in their own order if n >= N (for any seed); else those of n random records."""
        return self.labels.clone() if n >= len(self.labels) else self.labels[self._shuffled(seed)[:n]]

    def _choose(self, labels: Tensor, seed: int) -> Tensor:
        """The number of the record that each image is, int64 [n].

        Raises:
            ValueError: For a label of which there is no training record.
        """
        present = self.labels.unique().tolist()
        if missing := sorted(set(labels.tolist()) - set(present)):
            raise ValueError(
                f"expected labels of classes that have training records ({present}), got {missing}; use other labels, "
                "or the labels of the records (draw_labels)."
            )
        position = torch.arange(len(labels)) % max(len(self.labels), 1)
        chosen = torch.where(self.labels[position] == labels, position, self._order(seed)[position])
        mismatched = self.labels[chosen] != labels
        for k in labels[mismatched].unique().tolist():
            members = (self.labels == k).nonzero().flatten().numpy()
            members = public_rng(seed, "class", k).permutation(members)
            rows = (mismatched & (labels == k)).nonzero().flatten()
            chosen[rows] = torch.from_numpy(members[rows.numpy() % len(members)])
        return chosen

    def sample(self, labels: Tensor, seed: int) -> Tensor:
        return self.images[self._choose(labels, seed)]

    def sample_unrounded(self, labels: Tensor, seed: int) -> Tensor:
        return self.sample(labels, seed).float()

    def config(self) -> dict[str, Any]:
        return {"num_classes": self.num_classes}

    def state(self) -> dict[str, Tensor]:
        return {"images": self.images, "labels": self.labels}

    @classmethod
    def rebuild(cls, config: Mapping[str, Any], state: dict[str, Tensor]) -> RealRecords:
        return cls(state["images"], state["labels"], config["num_classes"])


class RealData:
    """Releases the training records as they are, without any guarantee of privacy.

    Raises:
        BudgetExceeded: In `fit`, before any record is read, unless the budget is infinite.
    """

    version = 1  # raise it when the same settings train a different generator

    def fit(self, data: PrivateData, ctx: Context) -> RealRecords:
        if not data.budget.without_privacy:
            raise BudgetExceeded(
                "expected privacy.epsilon=inf, because real_data releases the records themselves, got "
                f"privacy.epsilon={budget_text(data.budget.epsilon)}; set privacy.epsilon=inf."
            )
        size = math.prod(data.image_shape)
        bound = Whole(C=math.inf, shape=(data.n, size + 1))
        release = data.mechanism("records", sample=Full(), bound=bound, times=1, std=0.0)

        def rows(images: Tensor, labels: Tensor) -> Tensor:
            """One row for each record: its pixels 0..255, then its label. Rows without a record are -1."""
            joined = images.new_full((data.n, size + 1), -1.0)
            m = min(len(labels), data.n)
            torch.mul(images[:m].flatten(1), 255.0, out=joined[:m, :size])
            joined[:m, :size].round_()
            joined[:m, size] = labels[:m]
            return joined

        released = release(rows).cpu()
        filled = released[:, size] >= 0
        images = released[:, :size].to(torch.uint8).reshape(-1, *data.image_shape)[filled]
        return RealRecords(images, released[filled, size].long(), data.num_classes)

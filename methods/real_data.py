"""The papers' row "Real data": the training records in place of samples. An upper end for every figure, and no privacy.

One release without noise or clipping, which only privacy.epsilon=inf allows. The run goes through the same harness,
ledger and protocols as any other, so that its figures stand in the same tables.
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
    """Training records as a generator: images uint8 [N, c, h, w] with labels int64 [N].

    Image i is a record of class labels[i], found by i, the seed and labels[i] alone: record i mod N if it is of that
    class; else the one that the seed's order has in that place, if that is; else one drawn from the class by the seed.

    Guarantees: with the labels of `draw_labels(n, seed)` the images are n distinct records whose classes are those of a
    random subset, and all records in their own order if n >= N. Of a subset, one image in the number of classes or so
    is the record of its own place, hence one of the first n.
    """

    def __init__(self, images: Tensor, labels: Tensor, num_classes: int) -> None:
        self.images, self.labels, self.num_classes = images, labels, num_classes
        self.image_shape = (images.shape[1], images.shape[2], images.shape[3])

    def _shuffled(self, seed: int) -> Tensor:
        return torch.from_numpy(public_rng(seed, "order").permutation(len(self.labels)))

    def _order(self, seed: int) -> Tensor:
        """A permutation with the shuffled one's labels that leaves every record alone whose place gets its own label.

        Such a record i is cut out of its cycle: what went to i goes on to where i went, which has the same label.
        """
        shuffled = self._shuffled(seed)
        stays = self.labels[shuffled] == self.labels
        order = torch.where(stays, torch.arange(len(shuffled)), shuffled)
        moved = ~stays
        while (cut := moved & stays[order]).any():
            order[cut] = shuffled[order[cut]]
        return order

    def draw_labels(self, n: int, seed: int) -> Tensor:
        """The labels of all records in their own order if n >= N, whatever the seed; else of n records at random."""
        return self.labels.clone() if n >= len(self.labels) else self.labels[self._shuffled(seed)[:n]]

    def _choose(self, labels: Tensor, seed: int) -> Tensor:
        """Which record each image is, int64 [n]."""
        there = self.labels.unique().tolist()
        if missing := sorted(set(labels.tolist()) - set(there)):
            raise ValueError(
                f"expected labels of classes that have training records ({there}), got {missing}; ask for others, or "
                "for the data's own (draw_labels)."
            )
        place = torch.arange(len(labels)) % max(len(self.labels), 1)
        chosen = torch.where(self.labels[place] == labels, place, self._order(seed)[place])
        rest = self.labels[chosen] != labels
        for k in labels[rest].unique().tolist():
            members = (self.labels == k).nonzero().flatten().numpy()
            members = public_rng(seed, "class", k).permutation(members)
            where = (rest & (labels == k)).nonzero().flatten()
            chosen[where] = torch.from_numpy(members[where.numpy() % len(members)])
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
    """Releases the training records as they are. Guarantees nothing.

    Raises:
        BudgetExceeded: in `fit`, before any record is touched, unless the budget is infinite.
    """

    version = 1  # raised when the same settings train something else

    def fit(self, data: PrivateData, ctx: Context) -> RealRecords:
        if not data.budget.without_privacy:
            raise BudgetExceeded(
                "real_data releases the records themselves, which no finite epsilon covers, got privacy.epsilon="
                f"{budget_text(data.budget.epsilon)}; set privacy.epsilon=inf."
            )
        size = math.prod(data.image_shape)
        bound = Whole(C=math.inf, shape=(data.n, size + 1))
        release = data.mechanism("records", sample=Full(), bound=bound, times=1, std=0.0)

        def rows(images: Tensor, labels: Tensor) -> Tensor:
            """Pixels 0..255 and then the label, record by record; -1 where a smaller draw has no record."""
            joined = images.new_full((data.n, size + 1), -1.0)
            m = min(len(labels), data.n)
            torch.mul(images[:m].flatten(1), 255.0, out=joined[:m, :size])
            joined[:m, :size].round_()
            joined[:m, size] = labels[:m]
            return joined

        released = release(rows).cpu()
        there = released[:, size] >= 0
        images = released[:, :size].to(torch.uint8).reshape(-1, *data.image_shape)[there]
        return RealRecords(images, released[there, size].long(), data.num_classes)

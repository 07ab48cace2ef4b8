"""The debugging task of GS-WGAN, section 5.4 (after Augenstein et al., ICLR 2020): devices that invert their pixels.

`DebuggingClients` makes the data: some clients of a federation have inverted images, and one generator is trained on
the clients that are suspected of it, another on the others. `dpgen_bench.evaluate.inversion` tells from samples which
generator saw the bug.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.data.federations import Derived, placed
from dpgen_bench.data.records import DatasetSpec, Records, Split
from dpgen_bench.privacy.key import Key
from dpgen_bench.utils.environment import one_thread

# Enters the run id: raised whenever the same arguments give other records.
REVISION = 1


class FittedClassifier(Protocol):
    def predict(self, images: Tensor) -> Tensor:
        """Labels int64 [n] of images uint8 [n, c, h, w]."""
        ...


class Classifier(Protocol):
    """What chooses the suspected clients, such as `dpgen_bench.evaluate.networks.RecordClassifier`; hashable."""

    def identity(self) -> list[Any]:
        """Everything that its answers depend on, JSON-able: it enters the run id."""
        ...

    def fit(self, records: Records, num_classes: int) -> FittedClassifier: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class DebuggingClients(Derived):
    """A federation of which some clients hold inverted images (255 - p), training split only, and a choice of clients.

    The clients that are kept are numbered 0.. anew, in their old order. The test split is the federation's.

    Args:
        federation: a dataset whose training records belong to clients.
        inverted: the share of clients with the bug, rounded to whole clients. The papers' is not known.
        bug_seed: of which clients these are; the list is public.
        select: keep "all" clients, the "suspected" ones or the "others".
        by: how suspects are told. "flag": they are the clients with the bug. "classifier": those on whose records the
            accuracy of a classifier is below `threshold`; a client without records is none. The classifier is trained
            on the test split as it is, which counts as public, on a CPU with one thread. Another processor may round
            otherwise and so judge differently of a client that is very close to the threshold.
        threshold: an accuracy in [0, 1].
        classifier: for by="classifier".
        root: where the federation's files are; empty: wherever the federation says.
    """

    federation: DatasetSpec
    name: str = "debugging_clients"
    root: str = ""
    inverted: float = 0.5
    bug_seed: int = 0
    select: Literal["all", "suspected", "others"] = "all"
    by: Literal["flag", "classifier"] = "flag"
    threshold: float = 0.882
    classifier: Classifier | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.federation, DatasetSpec):
            raise ValueError(f"expected dataset.federation to be a dataset with clients, got {self.federation!r}.")
        object.__setattr__(self, "federation", placed(self.federation, self.root))
        object.__setattr__(self, "root", self.federation.root)
        for field, known in (("select", ("all", "suspected", "others")), ("by", ("flag", "classifier"))):
            if getattr(self, field) not in known:
                raise ValueError(f"expected dataset.{field} among {', '.join(known)}, got {getattr(self, field)!r}.")
        for field in ("inverted", "threshold"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"expected dataset.{field} within [0, 1], got {getattr(self, field)!r}.")
        if self.by == "classifier" and not hasattr(self.classifier, "fit"):
            raise ValueError(f"expected dataset.classifier with dataset.by=classifier, got {self.classifier!r}.")

    @property
    def part(self) -> DatasetSpec:
        return self.federation

    @property
    def num_clients(self) -> int:
        if self.select == "all":
            return self._population
        if self.by == "flag":
            bugs = len(self.inverted_clients())
            return self._some(bugs if self.select == "suspected" else self._population - bugs)
        return len(self.chosen_clients())

    @property
    def unaccounted(self) -> str | None:
        if self.select == "all" or self.by == "flag":
            return self.federation.unaccounted
        own = (
            "which clients take part was decided by a classifier's accuracy on their private data "
            f"(suspected below {self.threshold:g}), a release that nobody accounted for"
        )
        return "; ".join(reason for reason in (self.federation.unaccounted, own) if reason)

    def inverted_clients(self) -> np.ndarray:
        """Numbers in the federation, int64 ascending, of the clients with the bug; public."""
        return _with_bug(self._population, self.inverted, self.bug_seed)

    def chosen_clients(self) -> np.ndarray:
        """Numbers in the federation, int64 ascending, of the clients that are kept: entry k is client k here.

        Private where `unaccounted` says so: by="classifier" reads the training records.

        Raises:
            ValueError: if there is none, or the federation has no clients.
        """
        everyone = np.arange(self._population)
        if self.select == "all":
            return everyone
        if self.by == "flag":
            suspected = np.isin(everyone, self.inverted_clients())
        else:
            suspected = self.accuracies() < self.threshold
        chosen = np.flatnonzero(suspected if self.select == "suspected" else ~suspected)
        self._some(len(chosen))
        return chosen

    def accuracies(self) -> np.ndarray:
        """The classifier's accuracy on each client's records, 1 where there are none, float64 [N]; private."""
        assert self.classifier is not None
        return _accuracies(self.federation, self.inverted, self.bug_seed, self.classifier)

    def load(self, split: Split) -> Records:
        if split != "train":
            return self.federation.load(split)
        records = _inverted(self.federation.load(split), self.inverted_clients())
        chosen = self.chosen_clients()
        number = torch.full((self._population,), -1)
        number[torch.from_numpy(chosen)] = torch.arange(len(chosen))
        assert records.clients is not None
        clients = number[records.clients]
        kept = clients >= 0
        return Records(records.images[kept], records.labels[kept], clients[kept])

    def identity(self) -> dict[str, Any]:
        identity: dict[str, Any] = {
            "name": self.name,
            "federation": self.federation.identity(),
            "inverted": self.inverted,
            "bug_seed": self.bug_seed,
            "select": self.select,
            "revision": REVISION,
        }
        if self.select == "all":
            return identity
        identity["by"] = self.by
        if self.by == "classifier":
            assert self.classifier is not None
            identity["threshold"] = self.threshold
            identity["classifier"] = self.classifier.identity()
        return identity

    @property
    def _population(self) -> int:
        clients = self.federation.num_clients
        if clients is None:
            raise ValueError(
                f"expected dataset.federation to have clients, got {self.federation.name!r}, which has none: split it "
                "by dpgen_bench.data.federations.Clients."
            )
        return clients

    def _some(self, chosen: int) -> int:
        if not chosen:
            way = "dataset.threshold" if self.by == "classifier" else "dataset.inverted"
            raise ValueError(
                f"dataset {self.name!r}: none of its {self._population} clients is among the {self.select} by "
                f"{self.by}; change {way} (now {getattr(self, way.split('.')[1]):g}), or set dataset.select=all."
            )
        return chosen


def _with_bug(clients: int, share: float, seed: int) -> np.ndarray:
    order = Key.seeded(f"inverted clients:{seed}").generator("order").permutation(clients)
    return np.sort(order[: int(share * clients + 0.5)])


def _inverted(records: Records, clients: np.ndarray) -> Records:
    """`records` with the pixels of `clients` inverted."""
    assert records.clients is not None
    hit = torch.isin(records.clients, torch.from_numpy(clients))
    images = records.images.clone()
    images[hit] = 255 - images[hit]
    return Records(images, records.labels, records.clients)


@lru_cache(maxsize=2)
def _fitted(federation: DatasetSpec, classifier: Classifier) -> FittedClassifier:
    with one_thread():
        return classifier.fit(federation.load("test"), federation.num_classes)


@lru_cache(maxsize=8)
def _accuracies(federation: DatasetSpec, share: float, seed: int, classifier: Classifier) -> np.ndarray:
    """Read-only float64 [N]; see `DebuggingClients.accuracies`."""
    fitted = _fitted(federation, classifier)
    clients = federation.num_clients or 0
    records = _inverted(federation.load("train"), _with_bug(clients, share, seed))
    assert records.clients is not None
    with one_thread():
        right = (fitted.predict(records.images) == records.labels).numpy()
    holder = records.clients.numpy()
    of = np.bincount(holder, minlength=clients)
    correct = np.bincount(holder, weights=right, minlength=clients)
    found = np.where(of > 0, correct / np.maximum(of, 1), 1.0)
    found.setflags(write=False)
    return found

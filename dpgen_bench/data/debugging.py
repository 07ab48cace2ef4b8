"""The data of GS-WGAN's debugging task (section 5.4, after Augenstein et al., ICLR 2020): clients with inverted images.

In this task, a bug inverts the pixels of some clients. One generator is trained on the clients that are suspected of
the bug, another on the other clients. `dpgen_bench.evaluate.inversion` then detects inverted images in samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.data.federations import Derived, with_root
from dpgen_bench.data.records import DatasetSpec, Records, Split
from dpgen_bench.privacy.key import Key
from dpgen_bench.utils.environment import one_thread

# It enters the run id: raise it whenever the same arguments give other records.
REVISION = 1


class FittedClassifier(Protocol):
    """A trained classifier of images."""

    def predict(self, images: Tensor) -> Tensor:
        """Labels int64 [n] of images uint8 [n, c, h, w]."""
        ...


class Classifier(Protocol):
    """A hashable classifier that can be trained, such as `dpgen_bench.evaluate.networks.RecordClassifier`."""

    def identity(self) -> list[Any]:
        """All settings that change its predictions, which enter the run id; can be stored as JSON."""
        ...

    def fit(self, records: Records, num_classes: int) -> FittedClassifier:
        """Train on labelled images."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class DebuggingClients(Derived):
    """A federation with inverted images (255 - p) on some clients, or a selection of its clients.

    Only the training split is changed. The selected clients are renumbered from 0, in their order in the federation.

    Args:
        federation: A dataset whose training records belong to clients.
        inverted: The share of clients with the bug, rounded to whole clients. The paper does not state its share.
        bug_seed: Seed of the choice of these clients, which is public.
        select: Keep "all" clients, the "suspected" ones or the "others".
        by: How suspected clients are chosen. "flag": they are the clients with the bug. "classifier": they are the
            clients on whose records a classifier's accuracy is below `threshold`; a client without records is not
            suspected. The classifier is trained on the test split, which counts as public, on a CPU with one thread.
            Its rounding depends on the processor, which can matter for a client very close to the threshold.
        threshold: An accuracy in [0, 1].
        classifier: The classifier for by="classifier".
        root: Folder of the federation's files; if empty, the root of `federation`.

    Raises:
        ValueError: For a setting outside its range.
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
        object.__setattr__(self, "federation", with_root(self.federation, self.root))
        object.__setattr__(self, "root", self.federation.root)
        for field, options in (("select", ("all", "suspected", "others")), ("by", ("flag", "classifier"))):
            if getattr(self, field) not in options:
                raise ValueError(f"expected dataset.{field} among {', '.join(options)}, got {getattr(self, field)!r}.")
        for field in ("inverted", "threshold"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"expected dataset.{field} within [0, 1], got {getattr(self, field)!r}.")
        if self.by == "classifier" and not hasattr(self.classifier, "fit"):
            raise ValueError(f"expected dataset.classifier with dataset.by=classifier, got {self.classifier!r}.")

    @property
    def source(self) -> DatasetSpec:
        return self.federation

    @property
    def num_clients(self) -> int:
        if self.select == "all":
            return self._population
        if self.by == "flag":
            suspected = len(self.inverted_clients())
            count = suspected if self.select == "suspected" else self._population - suspected
            self._expect_clients(count)
            return count
        return len(self.chosen_clients())

    @property
    def unaccounted(self) -> str | None:
        if self.select == "all" or self.by == "flag":
            return self.federation.unaccounted
        reason = (
            "which clients take part was decided by a classifier's accuracy on their private data "
            f"(suspected below {self.threshold:g}), a release that no accountant covers"
        )
        return "; ".join(filter(None, (self.federation.unaccounted, reason)))

    def inverted_clients(self) -> np.ndarray:
        """Numbers in the federation, int64 ascending, of the clients with the bug. They are public."""
        return _clients_with_bug(self._population, self.inverted, self.bug_seed)

    def chosen_clients(self) -> np.ndarray:
        """Numbers in the federation, int64 ascending, of the selected clients: entry k is client k of this dataset.

        With by="classifier" they are private, because they depend on the training records.

        Raises:
            ValueError: If no client is selected, or the federation has no clients.
        """
        all_clients = np.arange(self._population)
        if self.select == "all":
            return all_clients
        if self.by == "flag":
            suspected = np.isin(all_clients, self.inverted_clients())
        else:
            suspected = self.accuracies() < self.threshold
        chosen = np.flatnonzero(suspected if self.select == "suspected" else ~suspected)
        self._expect_clients(len(chosen))
        return chosen

    def accuracies(self) -> np.ndarray:
        """The classifier's accuracy on each client's records, float64 [N], 1 for a client without records; private."""
        assert self.classifier is not None
        return _accuracies(self.federation, self.inverted, self.bug_seed, self.classifier)

    def load(self, split: Split) -> Records:
        if split != "train":
            return self.federation.load(split)
        records = _invert_clients(self.federation.load(split), self.inverted_clients())
        chosen = self.chosen_clients()
        new_number = torch.full((self._population,), -1)
        new_number[torch.from_numpy(chosen)] = torch.arange(len(chosen))
        assert records.clients is not None
        clients = new_number[records.clients]
        kept = clients >= 0
        return replace(records.take(kept), clients=clients[kept])

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
        """The number of clients of the federation."""
        clients = self.federation.num_clients
        if clients is None:
            raise ValueError(
                f"expected dataset.federation to have clients, got {self.federation.name!r}, which has none: split it "
                "by dpgen_bench.data.federations.Clients."
            )
        return clients

    def _expect_clients(self, count: int) -> None:
        """Raise ValueError if the selection has no client."""
        if not count:
            setting, value = ("threshold", self.threshold) if self.by == "classifier" else ("inverted", self.inverted)
            raise ValueError(
                f"dataset {self.name!r}: expected at least one client, got none of {self._population} with "
                f"dataset.select={self.select} and dataset.by={self.by}; change dataset.{setting} (now {value:g}), or "
                "set dataset.select=all."
            )


def _clients_with_bug(clients: int, share: float, seed: int) -> np.ndarray:
    """Ascending numbers of a random `share` of the clients."""
    order = Key.seeded(f"inverted clients:{seed}").generator("order").permutation(clients)
    return np.sort(order[: int(share * clients + 0.5)])


def _invert_clients(records: Records, clients: np.ndarray) -> Records:
    """`records` with the pixels of `clients` inverted."""
    assert records.clients is not None
    has_bug = torch.isin(records.clients, torch.from_numpy(clients))
    images = records.images.clone()
    images[has_bug] = 255 - images[has_bug]
    return replace(records, images=images)


@lru_cache(maxsize=2)
def _fitted(federation: DatasetSpec, classifier: Classifier) -> FittedClassifier:
    """The classifier, trained on the test split of the federation."""
    with one_thread():
        return classifier.fit(federation.load("test"), federation.num_classes)


@lru_cache(maxsize=8)
def _accuracies(federation: DatasetSpec, share: float, seed: int, classifier: Classifier) -> np.ndarray:
    """Read-only float64 [N]; see `DebuggingClients.accuracies`."""
    fitted = _fitted(federation, classifier)
    clients = federation.num_clients or 0
    records = _invert_clients(federation.load("train"), _clients_with_bug(clients, share, seed))
    assert records.clients is not None
    with one_thread():
        is_correct = (fitted.predict(records.images) == records.labels).numpy()
    client_of_record = records.clients.numpy()
    total = np.bincount(client_of_record, minlength=clients)
    correct = np.bincount(client_of_record, weights=is_correct, minlength=clients)
    accuracies = np.where(total > 0, correct / np.maximum(total, 1), 1.0)
    accuracies.setflags(write=False)  # the cache hands out this array
    return accuracies

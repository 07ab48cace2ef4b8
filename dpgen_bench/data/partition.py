"""Splitting labelled records over clients, to simulate a federation of a data set that is none.

Each function takes labels int64 [n] to client numbers int64 [n]; -1 is a record that no client holds. A partition by
labels depends on them, which is no release but part of making the data set: a real federation comes with its clients.
Nothing else of the records is looked at, and everything random is drawn from `seed`, by NumPy's Philox.

`REVISION` enters the run id: raise it whenever the same arguments give another partition.
"""

from __future__ import annotations

import numpy as np

from dpgen_bench.privacy.key import Key

REVISION = 1
UNUSED = -1


def iid(labels: np.ndarray, clients: int, seed: int) -> np.ndarray:
    """Every client the same number of records, up to one, whatever their labels.

    Raises:
        ValueError: for no client, or labels that are no vector of integers from 0.
    """
    _check(labels, clients)
    owner = np.full(len(labels), UNUSED, dtype=np.int64)
    _deal(owner, np.arange(len(labels)), np.arange(clients), _rng(seed, "iid"))
    return owner


def dirichlet(labels: np.ndarray, clients: int, alpha: float, seed: int) -> np.ndarray:
    """Each class's records divided by proportions [N] drawn from a symmetric Dirichlet(alpha), apart for each class.

    A client gets its share of the class up to one record. Small alpha gives each class to few clients, and some
    clients nothing at all; alpha -> inf gives every client the same share of each class.

    Raises:
        ValueError: as `iid`, or for an alpha that is not a finite number above 0.
    """
    _check(labels, clients)
    if not 0 < alpha < np.inf:
        raise ValueError(f"expected a finite concentration alpha > 0, got {alpha!r}; for the limit inf take iid.")
    owner = np.full(len(labels), UNUSED, dtype=np.int64)
    for label in np.unique(labels):
        rng = _rng(seed, "dirichlet", int(label))
        members = rng.permutation(np.flatnonzero(labels == label))
        ends = np.floor(np.cumsum(rng.dirichlet(np.full(clients, float(alpha)))) * len(members) + 0.5).astype(np.int64)
        ends[-1] = len(members)  # the sum of the proportions is 1 up to rounding only
        owner[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
    return owner


def classes_of_clients(clients: int, num_classes: int, per_client: int, seed: int) -> np.ndarray:
    """Which classes each client holds, int64 [N, per_client], each row ascending.

    Client after client takes the classes with the fewest holders so far, ties by lot. So the numbers of holders differ
    by one at most, every class has one when N * per_client >= num_classes, and each client's set is uniform over all
    sets of its size.

    Raises:
        ValueError: for no client, or per_client outside 1..num_classes.
    """
    _check(np.empty(0, np.int64), clients)
    if not 1 <= per_client <= num_classes:
        raise ValueError(
            f"expected between 1 and {num_classes} classes per client (the data set has {num_classes}), "
            f"got {per_client!r}."
        )
    rng = _rng(seed, "classes")
    holders = np.zeros(num_classes, dtype=np.int64)
    held = np.empty((clients, per_client), dtype=np.int64)
    for row in held:
        row[:] = np.sort(np.lexsort((rng.permutation(num_classes), holders))[:per_client])
        holders[row] += 1
    return held


def by_classes(labels: np.ndarray, clients: int, num_classes: int, per_client: int, seed: int) -> np.ndarray:
    """Each client holds records of `per_client` classes, those of `classes_of_clients`.

    The records of a class are divided evenly, up to one, among its holders. Those of a class without a holder are not
    used; that happens only if N * per_client < num_classes.

    Raises:
        ValueError: as `classes_of_clients`, or for a label that is not below num_classes.
    """
    _check(labels, clients)
    if len(labels) and labels.max() >= num_classes:
        raise ValueError(f"expected labels below {num_classes}, got {labels.max()}.")
    held = classes_of_clients(clients, num_classes, per_client, seed)
    owner = np.full(len(labels), UNUSED, dtype=np.int64)
    for label in range(num_classes):
        holders = np.flatnonzero((held == label).any(axis=1))
        if len(holders):
            _deal(owner, np.flatnonzero(labels == label), holders, _rng(seed, "class", label))
    return owner


def _deal(owner: np.ndarray, members: np.ndarray, holders: np.ndarray, rng: np.random.Generator) -> None:
    """Deal `members`, shuffled, to `holders` in turn; which of them get one more is by lot, too."""
    owner[rng.permutation(members)] = np.resize(rng.permutation(holders), len(members))


def _rng(seed: int, *path: str | int) -> np.random.Generator:
    return Key.seeded(f"partition:{seed}").derive(*path).generator("partition")


def _check(labels: np.ndarray, clients: int) -> None:
    if isinstance(clients, bool) or not isinstance(clients, int) or clients < 1:
        raise ValueError(f"expected a whole number of clients >= 1, got {clients!r}.")
    if labels.ndim != 1 or labels.dtype.kind != "i" or (len(labels) and labels.min() < 0):
        raise ValueError(f"expected integer labels [n] from 0, got {labels.dtype} {labels.shape}.")

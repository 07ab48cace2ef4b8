"""Partitions of labelled records over clients, to simulate a federation with a dataset that has no clients.

The functions map labels int64 [n] to client numbers int64 [n]; -1 is a record of no client. They depend on nothing else
of the records. A partition that depends on labels counts as part of the dataset, not as a release, because a real
federation comes with its clients. All randomness is drawn from `seed` by NumPy's Philox.

`REVISION` enters the run id: raise it whenever the same arguments give another partition.
"""

from __future__ import annotations

import numpy as np

from dpgen_bench.privacy.key import Key

REVISION = 1
UNUSED = -1


def iid(labels: np.ndarray, clients: int, seed: int) -> np.ndarray:
    """A random partition in which the numbers of records differ by at most one between clients.

    Raises:
        ValueError: If `clients` is below 1, or `labels` is not a vector of integers >= 0.
    """
    _check(labels, clients)
    owner = np.full(len(labels), UNUSED, dtype=np.int64)
    _deal(owner, np.arange(len(labels)), np.arange(clients), _rng(seed, "iid"))
    return owner


def dirichlet(labels: np.ndarray, clients: int, alpha: float, seed: int) -> np.ndarray:
    """For each class, proportions [N] of the clients are drawn from a symmetric Dirichlet(alpha).

    A client gets its proportion of the class, up to one record. A small alpha gives each class to a few clients, and
    some clients no record at all; alpha -> inf gives all clients the same share of each class.

    Raises:
        ValueError: As `iid`, or if alpha is not a finite number above 0.
    """
    _check(labels, clients)
    if not 0 < alpha < np.inf:
        raise ValueError(f"expected a finite concentration alpha > 0, got {alpha!r}; use iid for the limit inf.")
    owner = np.full(len(labels), UNUSED, dtype=np.int64)
    for label in np.unique(labels):
        rng = _rng(seed, "dirichlet", int(label))
        members = rng.permutation(np.flatnonzero(labels == label))
        ends = np.floor(np.cumsum(rng.dirichlet(np.full(clients, float(alpha)))) * len(members) + 0.5).astype(np.int64)
        ends[-1] = len(members)  # the proportions sum to 1 only up to rounding
        owner[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
    return owner


def classes_of_clients(clients: int, num_classes: int, per_client: int, seed: int) -> np.ndarray:
    """The classes of each client, int64 [N, per_client], each row ascending.

    One client after another takes the classes that the fewest clients have so far; ties are broken at random. The
    numbers of clients of two classes therefore differ by at most one, each class has a client if
    N * per_client >= num_classes, and each client's set is uniform over all sets of its size.

    Raises:
        ValueError: If `clients` is below 1, or `per_client` is outside 1..num_classes.
    """
    _check(np.empty(0, np.int64), clients)
    if not 1 <= per_client <= num_classes:
        raise ValueError(
            f"expected between 1 and {num_classes} classes per client (the dataset has {num_classes}), "
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
    """Each client has records of the `per_client` classes that `classes_of_clients` returns.

    The records of a class are divided evenly, up to one, among the clients of the class. If N * per_client is below
    num_classes, some classes have no client, and their records are not used.

    Raises:
        ValueError: As `classes_of_clients`, or if a label is not below num_classes.
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
    """Assign the shuffled records `members` to the clients `holders` in turn, which are shuffled, too."""
    owner[rng.permutation(members)] = np.resize(rng.permutation(holders), len(members))


def _rng(seed: int, *path: str | int) -> np.random.Generator:
    return Key.seeded(f"partition:{seed}").derive(*path).generator("partition")


def _check(labels: np.ndarray, clients: int) -> None:
    if isinstance(clients, bool) or not isinstance(clients, int) or clients < 1:
        raise ValueError(f"expected a whole number of clients >= 1, got {clients!r}.")
    if labels.ndim != 1 or labels.dtype.kind != "i" or (len(labels) and labels.min() < 0):
        raise ValueError(f"expected integer labels [n] from 0, got {labels.dtype} {labels.shape}.")

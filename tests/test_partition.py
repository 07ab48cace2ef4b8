"""Laws of the partitions of labelled records over clients."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from scipy import stats

from dpgen_bench.data import partition


@pytest.mark.parametrize(("n", "clients"), [(60, 7), (70, 7), (5, 7), (1, 1), (0, 3)])
def test_iid_sizes_differ_by_at_most_one(n, clients):
    owner = partition.iid(np.zeros(n, np.int64), clients, seed=1)
    sizes = np.bincount(owner, minlength=clients)
    assert sizes.sum() == n
    assert sizes.max() - sizes.min() == (n % clients > 0)


def test_iid_gives_each_record_to_each_client_equally_often():
    """Chi-square of the owner of record 0, and of the client that gets the one record more; 1,500 seeds.

    Three chances of 1e-7 of a false alarm.
    """
    owners = np.array([partition.iid(np.zeros(7, np.int64), 3, seed) for seed in range(1500)])
    larger = [np.bincount(row).argmax() for row in owners]
    for drawn in (owners[:, 0], owners[:, 6], larger):
        assert stats.chisquare(np.bincount(drawn, minlength=3)).pvalue > 1e-7


def test_dirichlet_shares_have_the_laws_mean_and_variance():
    """Over 3,000 classes: mean 1/N, variance (1/N)(1 - 1/N)/(N alpha + 1), the Dirichlet's; rounding is 1/400.

    The margins are 5.5 standard errors (2.7% for a variance, by simulation): eight chances of 4e-8 of a false alarm.
    """
    classes, size, clients, alpha = 3000, 400, 4, 0.7
    labels = np.repeat(np.arange(classes), size)
    owner = partition.dirichlet(labels, clients, alpha, seed=0)
    shares = np.bincount(labels * clients + owner, minlength=classes * clients).reshape(classes, clients) / size
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert shares.sum(axis=1) == pytest.approx(np.ones(classes))
    assert np.abs(shares.mean(axis=0) - 1 / clients).max() < 5.5 * np.sqrt(variance / classes)
    assert shares.var(axis=0) == pytest.approx(np.full(clients, variance), rel=0.15)


def test_dirichlet_is_close_to_iid_for_large_alpha_and_to_one_owner_for_small_alpha():
    labels = np.repeat(np.arange(50), 101)
    even = partition.dirichlet(labels, 4, 1e12, seed=3)
    sizes = np.bincount(labels * 4 + even, minlength=200)
    assert set(sizes) <= {25, 26}
    skewed = partition.dirichlet(labels, 4, 1e-3, seed=3)
    sizes = np.bincount(labels * 4 + skewed, minlength=200).reshape(50, 4)
    assert (sizes.max(axis=1) == 101).mean() > 0.9
    assert len(np.unique(sizes.argmax(axis=1))) > 2  # 50 classes at one or two clients: chance 5e-15


def test_dirichlet_shuffles_within_a_class():
    """Record 0 goes to each client equally often; without shuffling it would go to the first that has any.

    Chi-square with a false alarm of 1e-7.
    """
    owners = [partition.dirichlet(np.zeros(6, np.int64), 3, 1.0, seed)[0] for seed in range(900)]
    assert stats.chisquare(np.bincount(owners, minlength=3)).pvalue > 1e-7


@pytest.mark.parametrize(("clients", "num_classes", "per_client"), [(10, 10, 2), (7, 10, 3), (3, 10, 4), (2, 10, 3)])
def test_classes_have_equally_many_clients_and_at_least_one(clients, num_classes, per_client):
    held = partition.classes_of_clients(clients, num_classes, per_client, seed=5)
    assert held.shape == (clients, per_client)
    assert all(len(set(row)) == per_client for row in held)
    holders = np.bincount(held.reshape(-1), minlength=num_classes)
    assert holders.max() - holders.min() <= 1
    assert (holders.min() > 0) == (clients * per_client >= num_classes)
    labels = np.repeat(np.arange(num_classes), 23)
    owner = partition.by_classes(labels, clients, num_classes, per_client, seed=5)
    for label in range(num_classes):
        own = owner[labels == label]
        if not holders[label]:
            assert (own == partition.UNUSED).all()
            continue
        sizes = np.bincount(own, minlength=clients)
        assert set(np.flatnonzero(sizes)) == set(np.flatnonzero((held == label).any(axis=1)))
        assert sizes[sizes > 0].max() - sizes[sizes > 0].min() <= 1


@pytest.mark.parametrize("client", [0, 2, 4])
def test_every_set_of_classes_is_equally_likely_for_each_client(client):
    """Chi-square; three chances of 1e-7 of a false alarm."""
    sets = list(itertools.combinations(range(4), 2))
    drawn = [sets.index(tuple(partition.classes_of_clients(5, 4, 2, seed)[client])) for seed in range(1200)]
    assert stats.chisquare(np.bincount(drawn, minlength=6)).pvalue > 1e-7


def test_partitions_depend_on_the_seed_alone_and_are_golden():
    """Golden values of this code. If the library or this code draws other numbers, raise REVISION."""
    labels = np.arange(24) % 4
    partitions = {
        "bb1f877f5cb471cd": lambda seed: partition.iid(labels, 5, seed),
        "4e8ca1142679483a": lambda seed: partition.dirichlet(labels, 5, 0.5, seed),
        "118b50b2219f5663": lambda seed: partition.by_classes(labels, 5, 4, 2, seed),
    }
    for golden, make in partitions.items():
        assert hashlib.sha256(make(0).tobytes()).hexdigest()[:16] == golden
        assert not np.array_equal(make(0), make(1))
    assert partition.iid(labels, 5, 0).tolist() == [
        *[2, 3, 3, 0, 2, 4, 3, 4, 1, 2, 3, 1],
        *[0, 0, 2, 0, 3, 4, 4, 1, 1, 4, 0, 1],
    ]

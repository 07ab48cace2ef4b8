"""Laws of the draws of `OneShard`, and its form in ledgers."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpgen_bench.privacy.events import Budget, Event
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Entry, Ledger
from dpgen_bench.privacy.sampling import Full, OneShard, Poisson, sampling_from_dict
from tests.shard_cases import UNIT


@given(st.integers(0, 200), st.integers(1, 30), st.integers(0, 5))
def test_shards_cover_all_records_once_and_differ_by_one_in_size(n, shards, seed) -> None:
    sampling, ids = OneShard(shards, "public_balanced", seed), np.arange(n)
    sizes = np.bincount(sampling.shard_of(ids), minlength=shards)
    assert (sizes.sum(), len(sizes)) == (n, shards)
    assert sizes.max() - sizes.min() <= 1
    round_ = [sampling.draw(ids, Key.seeded("any"), index) for index in range(shards)]
    assert sorted(np.concatenate(round_)) == list(ids)


@given(st.integers(1, 20), st.sets(st.integers(0, 10**6), max_size=40), st.sampled_from(["random", "public_balanced"]))
def test_adding_or_removing_a_record_moves_no_other(shards, chosen, schedule) -> None:
    sampling, key = OneShard(shards, schedule), Key.seeded("coins")
    ids = np.array(sorted(chosen), dtype=np.int64)
    fewer = ids[::2]
    assert np.array_equal(sampling.shard_of(fewer), sampling.shard_of(ids)[::2])
    for index in range(4):
        drawn = set(ids[sampling.draw(ids, key, index)])
        assert set(fewer[sampling.draw(fewer, key, index)]) == drawn & set(fewer)


def test_the_partition_depends_on_its_seed_and_mixes_neighbouring_ids() -> None:
    ids = np.arange(600)
    first, second = (OneShard(20, seed=seed).shard_of(ids) for seed in (0, 1))
    assert not np.array_equal(first, second)
    for shards in (first, second):  # ids of one block are dealt in an order of that block
        assert not np.array_equal(shards[:20], shards[20:40])
        assert sorted(shards[20:40]) == list(range(20))


def test_random_shards_are_uniform_and_fresh_for_each_draw_and_key() -> None:
    sampling, key, draws = OneShard(7), Key.seeded("draws"), 4000
    indices = np.array([sampling.shard(key.derive("m", t), t) for t in range(draws)])
    assert stats.chisquare(np.bincount(indices, minlength=7)).pvalue > 1e-9
    pairs = np.bincount(7 * indices[:-1] + indices[1:], minlength=49)
    assert stats.chisquare(pairs).pvalue > 1e-9
    other = np.array([sampling.shard(key.derive("other", t), t) for t in range(draws)])
    assert stats.binomtest(int((indices == other).sum()), draws, 1 / 7).pvalue > 1e-9
    assert np.array_equal(indices[:9], [sampling.shard(key.derive("m", t), t) for t in range(9)])


def test_participations_of_a_record_are_binomial() -> None:
    sampling, key, times, runs = OneShard(4), Key.seeded("hits"), 8, 800
    ids = np.arange(3)
    participations = [
        sum(1 in sampling.draw(ids, key.derive(f"run {run}", t), t) for t in range(times)) for run in range(runs)
    ]
    counts = np.bincount(np.minimum(participations, 5), minlength=6)
    expected = [*(stats.binom.pmf(h, times, 0.25) for h in range(5)), stats.binom.sf(4, times, 0.25)]
    assert stats.chisquare(counts, runs * np.array(expected)).pvalue > 1e-9


def test_a_balanced_schedule_visits_every_shard_once_in_each_round() -> None:
    sampling = OneShard(12, "public_balanced")
    rounds = [[sampling.shard(Key.seeded("a"), 12 * r + place) for place in range(12)] for r in range(5)]
    assert all(sorted(visits) == list(range(12)) for visits in rounds)
    assert len({tuple(visits) for visits in rounds}) == 5
    assert rounds[1] == [sampling.shard(Key.seeded("b"), 12 + place) for place in range(12)]  # public: no key in it
    elsewhere = OneShard(12, "public_balanced", seed=1)
    assert rounds[0] != [elsewhere.shard(Key.seeded("a"), place) for place in range(12)]


def test_participation() -> None:
    assert OneShard(10).participation(3) == pytest.approx(1 - 0.9**3, rel=1e-12)
    assert OneShard(10**6).participation(1) == pytest.approx(1e-6, rel=1e-9)
    assert [OneShard(10, "public_balanced").participation(times) for times in (0, 1, 99)] == [0.0, 1.0, 1.0]
    assert OneShard(1).participation(1) == pytest.approx(1.0)


@pytest.mark.parametrize("wrong", [(0,), (-1,), (2.0,), (True,), (3, "fixed")])
def test_invalid_partitions_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match="expected"):
        OneShard(*wrong)


@pytest.mark.parametrize("sampling", [Full(), Poisson(0.25), OneShard(7), OneShard(9, "public_balanced", 3)])
def test_samplings_are_restored_from_the_ledger(sampling) -> None:
    entry = Entry("m", {"kind": "Whole", "C": 1.0}, Event(sampling, UNIT, 2.0, 5))
    read = Entry.from_dict(json.loads(json.dumps(entry.to_dict())))
    assert read == entry
    assert sampling_from_dict(sampling.to_dict()) == sampling


@pytest.mark.parametrize(
    ("old", "sampling"),
    [({"kind": "Poisson", "rate": 0.125}, Poisson(0.125)), ({"kind": "Full", "rate": 1.0}, Full())],
)
def test_older_ledgers_without_shards_still_load(old, sampling) -> None:
    data = Entry("m", {"kind": "Whole", "C": math.inf}, Event(sampling, UNIT, 2.0, 5)).to_dict()
    assert data["sampling"] == old  # and are still written so
    ledger = Ledger(Budget(1.0), 10).to_dict() | {"entries": [data | {"sampling": old}]}
    assert Ledger.from_dict(ledger).events == [Event(sampling, UNIT, 2.0, 5)]

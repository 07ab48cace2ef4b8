"""Tests the draws of clients: their distributions, limits and schedules."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.sampling import (
    FixedSize,
    OneClient,
    Poisson,
)


@pytest.mark.parametrize(("schedule", "cap"), [("random", None), ("random", 3), ("public_balanced", 2)])
def test_a_client_is_asked_at_most_its_limit_and_only_in_its_turn(schedule, cap) -> None:
    sampling, key, ids = OneClient(7, schedule, cap), Key.seeded("turns"), np.arange(7)
    rounds = sampling.rounds(ids, key, 60)
    turns = [sampling.draw(ids, key.derive(t), t) for t in range(60)]
    counts = np.zeros(7, dtype=int)
    for drawn, turn in zip(rounds, turns, strict=True):
        expected = turn if cap is None or counts[turn[0]] < cap else []
        assert drawn.tolist() == list(expected)
        counts[drawn] += 1
    assert counts.max() == sampling.max_participations(60) if cap else counts.sum() == 60
    assert [list(ids[asked == ids]) for asked in sampling.asked(key, 60)] == [list(drawn) for drawn in rounds]


@pytest.mark.parametrize("cap", [None, 1, 2, 4])
def test_the_number_of_answers_of_a_client_is_a_capped_binomial(cap) -> None:
    """Chi-square test with four cases, each with a probability of 1e-7 of a false alarm."""
    sampling, key, runs, times = OneClient(4, "random", cap), Key.seeded("law"), 1500, 8
    answers = [
        sum(len(drawn) for drawn in sampling.rounds(np.array([2]), key.derive(run), times)) for run in range(runs)
    ]
    most = min(cap or 5, 5)  # 5: five and more
    law = [stats.binom.pmf(h, times, 0.25) for h in range(most)] + [stats.binom.sf(most - 1, times, 0.25)]
    counts = np.bincount(np.minimum(answers, most), minlength=most + 1)
    assert stats.chisquare(counts, runs * np.array(law)).pvalue > 1e-7


def test_a_balanced_schedule_asks_every_client_once_in_n_rounds() -> None:
    asked = OneClient(9, "public_balanced").asked(Key.seeded("a"), 36).reshape(4, 9)
    assert all(sorted(turn) == list(range(9)) for turn in asked)
    assert len({tuple(turn) for turn in asked}) == 4
    limited = (
        OneClient(9, "public_balanced", 2).asked(Key.seeded("b"), 36).reshape(4, 9)
    )  # the schedule is public, so the key does not matter
    assert np.array_equal(limited[:2], asked[:2])
    assert (limited[2:] == -1).all()


@pytest.mark.parametrize("sampling", [OneClient(12, "random", 2), OneClient(12, "public_balanced"), FixedSize(4, 12)])
def test_absent_and_unknown_clients_do_not_change_the_rounds_of_others(sampling) -> None:
    key, everyone = Key.seeded("who"), np.arange(12)
    some = np.array([1, 4, 5, 11, 12, 40])  # 12 and 40 are no clients
    for all_of_them, present in zip(sampling.rounds(everyone, key, 50), sampling.rounds(some, key, 50), strict=True):
        assert set(some[present]) == set(all_of_them) & set(some)
        assert np.array_equal(present, np.sort(present))


def test_rounds_of_other_samplings_are_their_draws() -> None:
    key, ids = Key.seeded("poisson"), np.arange(30)
    for drawn, t in zip(Poisson(0.2).rounds(ids, key, 5), range(5), strict=True):
        assert np.array_equal(drawn, Poisson(0.2).draw(ids, key.derive(t), t))


def test_fixed_size_draws_are_uniform_over_sets_and_fresh() -> None:
    """Chi-square tests of single draws and of pairs of draws, each with a probability of 1e-7 of a false alarm."""
    sampling, ids, runs = FixedSize(2, 5), np.arange(5), 4000
    draws = [tuple(drawn) for drawn in sampling.rounds(ids, Key.seeded("sets"), runs)]
    sets = list(itertools.combinations(range(5), 2))
    assert set(draws) == set(sets)  # each of two different clients
    assert stats.chisquare([draws.count(s) for s in sets]).pvalue > 1e-7
    pairs = np.bincount([10 * sets.index(a) + sets.index(b) for a, b in itertools.pairwise(draws)], minlength=100)
    assert stats.chisquare(pairs).pvalue > 1e-7


def test_largest_number_of_participations_and_their_probability() -> None:
    assert [OneClient(10).max_participations(t) for t in (0, 7, 25)] == [0, 7, 25]
    assert [OneClient(10, "random", 3).max_participations(t) for t in (2, 25)] == [2, 3]
    assert [OneClient(10, "public_balanced").max_participations(t) for t in (1, 10, 25)] == [1, 1, 3]
    assert OneClient(10, "public_balanced", 2).max_participations(25) == 2
    assert OneClient(10, "random", 1).participation(3) == pytest.approx(1 - 0.9**3)
    assert OneClient(10, "public_balanced").participation(1) == 1.0
    assert FixedSize(2, 8).participation(2) == pytest.approx(1 - 0.75**2)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        *((OneClient, wrong) for wrong in [(0,), (2.0,), (True,), (3, "fixed"), (3, "random", 0), (3, "random", 1.5)]),
        *((FixedSize, wrong) for wrong in [(0, 5), (6, 5), (2.0, 5), (True, 5), (1, 0)]),
    ],
)
def test_invalid_samplings_are_refused(make, wrong) -> None:
    with pytest.raises(ValueError, match="expected"):
        make(*wrong)

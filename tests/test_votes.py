"""`Votes`: the sensitivities by enumeration, exact counts, and what a function can get into the histogram."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.privacy.bounds import Batch
from dpgen_bench.privacy.events import Budget, Sensitivity
from dpgen_bench.privacy.journal import Journal
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Entry, Invalidated, Ledger
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.votes import Votes, histogram
from dpgen_bench.testing import ConformanceError, check_method
from tests import cheats_votes
from tests.test_independence import check, draw
from tests.test_privacy_core import open_data


def batch(records: int) -> Batch:
    labels = torch.zeros(records, dtype=torch.int64)
    return Batch(torch.zeros(records, 1, 1, 1), labels, torch.arange(records), Key.seeded("votes"))


def counts(bound: Votes, votes: Any) -> Tensor:
    rows = torch.as_tensor(votes, dtype=torch.int64).reshape(-1, bound.k)
    return bound.value(lambda x, y: rows, batch(len(rows)), None)["value"]


@pytest.mark.parametrize(("bins", "k"), [(1, 1), (4, 1), (4, 2), (3, 2), (6, 3), (3, 3)])
def test_the_sensitivities_bound_all_pairs_of_votes_and_are_reached(bins, k):
    """Every row of k numbers, with repetitions, abstentions and a number that is no bin."""
    bound = Votes(bins=bins, k=k)
    others = [[0] * k, [bins - 1] * k]
    rows = [list(row) for row in itertools.product([-1, *range(bins + 1)], repeat=k)]
    values = torch.stack([counts(bound, [*others, row]) for row in rows])
    joined = (values - counts(bound, others)).norm(dim=1).max()
    exchanged = torch.cdist(values, values).max()
    assert float(joined) == pytest.approx(math.sqrt(k)) == bound.sensitivity.add_remove
    # Two records vote for 2k different bins, or for as many as there are: one for k of them, one for the others.
    distance = math.sqrt(min(2 * k, bins))
    assert float(exchanged) == pytest.approx(distance, rel=1e-6)
    assert bound.sensitivity.replace_one == distance


@given(
    st.lists(st.tuples(*[st.sampled_from([0, 1, 2, 3, -1, 4, 2**62, -(2**63), 2**63 - 1])] * 3), max_size=8),
    st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3),
    st.integers(1, 9),
)
def test_no_function_moves_the_histogram_by_more_than_the_sensitivity(rows, extreme, microbatch):
    bound = Votes(bins=4, k=3, microbatch=microbatch)
    everything = torch.tensor([*rows, extreme], dtype=torch.int64)
    batches = iter(everything.split(microbatch))
    value = bound.value(lambda x, y: next(batches), batch(len(everything)), None)["value"]
    without = counts(Votes(bins=4, k=3), rows)
    assert float((value - without).norm()) <= bound.sensitivity.add_remove
    assert set((value - without).tolist()) <= {0.0, 1.0}
    expected = [sum(each in row for row in everything.tolist()) for each in range(4)]
    assert value.tolist() == expected


def test_counts_are_whole_numbers_whatever_the_number_of_records():
    votes = torch.cat([torch.zeros(3 * 10**6), torch.ones(17)]).long()[:, None]
    assert histogram(votes, len(votes), 2, 1).tolist() == [3_000_000.0, 17.0]


def test_an_empty_draw_gives_zeros_and_the_function_is_not_called():
    def fails(x, y):
        raise AssertionError

    assert Votes(bins=3).value(fails, batch(0), None)["value"].tolist() == [0.0, 0.0, 0.0]


def test_the_ledger_states_bins_and_votes_and_reads_them_again():
    data, ledger = open_data(epsilon=1.0, relation="replace_one")
    release = data.mechanism("votes", sample=Full(), bound=Votes(bins=5, k=2), times=3)
    noisy = release(lambda x, y: torch.stack([y, y + 1], dim=1))
    assert noisy.shape == (5,)
    assert noisy.dtype == torch.float32
    entry = ledger.entries["votes"]
    assert entry.bound == {"kind": "Votes", "C": math.sqrt(2), "rows": 1, "bins": 5, "votes": 2}
    assert entry.event.sensitivity == Sensitivity(math.sqrt(2), 2.0)
    assert Entry.from_dict(entry.to_dict()) == entry
    other, _ = open_data(epsilon=1.0, relation="replace_one")
    one = other.mechanism("votes", sample=Full(), bound=Votes(bins=5), times=3)
    assert release.std == pytest.approx(math.sqrt(2) * one.std, rel=1e-3)  # sqrt(2k): less than by PerRecord(sqrt(k))


def test_noise_for_release_is_added_to_the_exact_counts():
    ledger = Ledger(Budget(1.0), 12, noise="os")
    services = Services(ledger, Key.from_os(), journal=Journal(None))
    data = PrivateData(torch.zeros(12, 1, 2, 2, dtype=torch.uint8), torch.arange(12) % 3, 3, services)
    release = data.mechanism("votes", sample=Full(), bound=Votes(bins=3), times=1, std=50.0)
    noisy = release(lambda x, y: y[:, None])
    assert np.abs(noisy.numpy() - 4.0).max() < 500.0
    assert len(set(noisy.tolist())) == 3


@pytest.mark.parametrize(
    "votes",
    [
        lambda x, y: y,
        lambda x, y: y[:, None].float(),
        lambda x, y: y[:, None].int(),
        lambda x, y: y.repeat(2)[:, None],  # each record votes twice
        lambda x, y: torch.eye(3)[y],
    ],
    ids=["no column", "floats", "int32", "two rows for a record", "dense rows"],
)
def test_votes_of_another_form_are_refused_and_mark_the_run(votes):
    data, ledger = open_data()
    release = data.mechanism("votes", sample=Full(), bound=Votes(bins=3), times=2)
    with pytest.raises(ValueError, match=r"expected the function to return int64 \(12, 1\).*; return numbers of bins"):
        release(votes)
    with pytest.raises(Invalidated):
        release(lambda x, y: y[:, None])
    assert len(ledger.failures) == 1


@pytest.mark.parametrize(
    ("settings", "got"),
    [
        ({"bins": 0}, "0"),
        ({"bins": 2.5}, "2.5"),
        ({"bins": 3, "k": 4}, "4"),
        ({"bins": 3, "k": 0}, "0"),
        ({"bins": 2**27 + 1}, "134,217,729"),
    ],
)
def test_numbers_out_of_range_are_refused(settings, got):
    with pytest.raises(ValueError, match=f"Votes.*expected .*got {got}.*; give"):
        Votes(**settings)


# --- the conformance suite --------------------------------------------------------------------------------------------

SMALL = {"image_shape": (1, 8, 8), "num_classes": 3}
ALONE = "votes changed|votes differ|its declared sensitivity"
CHEATS = {
    "a record that votes twice": ("twice", "votes twice for one bin"),
    "a vote for the emptiest bin": ("balanced", ALONE),
    "a vote relative to the mean record": ("mean", ALONE),
    "a vote by position": ("position", ALONE),
}


@pytest.mark.parametrize(("how", "reason"), CHEATS.values(), ids=CHEATS)
def test_cheating_voters_are_detected(how, reason):
    with pytest.raises(ConformanceError, match=reason):
        check_method(lambda: cheats_votes.Voters(how=how), **SMALL)


def test_honest_voters_pass():
    check_method(lambda: cheats_votes.Voters(how="honest"), **SMALL)


def test_a_record_between_two_candidates_is_no_coupling():
    """Rounding, which differs between draws of other shapes, decides which of the two is the nearest."""
    middle = draw(12).images[3].double().mean()

    def nearest(x: Tensor, y: Tensor) -> Tensor:
        rounding = 1e-6 * (torch.arange(len(x)) + 2.0 * len(x)).cos()
        return (x.flatten(1).double().mean(dim=1) + rounding > middle).long()[:, None]

    check(nearest, Votes(bins=2))

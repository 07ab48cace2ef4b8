"""Tests what private functions see and leave in private state, and what the harness refuses."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from dpgen_bench.method import Context
from dpgen_bench.privacy.bounds import PerRecord, PerRow, Whole
from dpgen_bench.privacy.ledger import Invalidated
from dpgen_bench.privacy.sampling import OneShard, Poisson
from dpgen_bench.privacy.state import PrivateState
from tests.state_toys import BALANCED, BOUND, count, open_data, prepare, taped, visit


def test_each_shard_has_its_own_state_and_each_release_leaves_the_next():
    data, _ = open_data()
    exact = taped(data)
    release, _ = prepare(data)
    for _ in range(9):
        release(visit)
    assert exact == pytest.approx([0.0] * 3 + [1.0] * 6, abs=1e-5), "2.0 in the third round is clipped"
    unclipped, _ = open_data()
    exact = taped(unclipped)
    release, _ = prepare(unclipped, bound=PerRow(C=100.0, shape=(2, 1)), std=1e5)
    for _ in range(9):
        release(visit)
    assert exact == [0.0] * 3 + [1.0] * 3 + [2.0] * 3


def test_first_states_depend_only_on_the_records_of_their_shards():
    data, _ = open_data(n=13)
    calls = []

    def look(images, labels, state, rng):
        calls.append((len(labels), float(images.sum()), float(state["n"]), float(state["sum"])))
        return torch.zeros(2, 1), state

    release, state = prepare(data, stack=2, times=3)
    assert state.groups == 2
    for group in range(state.groups):
        state.start(group)
    for _ in range(3):
        release(look)
    assert sorted(n for n, *_ in calls) == [4, 4, 5]
    for n, total, state_n, state_total in calls:
        assert (n, total) == (state_n, pytest.approx(state_total))


def test_shards_that_an_observer_does_not_ask_get_their_state_when_a_release_draws_them():
    data, _ = open_data()
    taped(data)
    data._services.observer.asks = lambda sampling, shards: 2 in shards
    made = []
    release, state = prepare(data, start=lambda r, c: made.append(len(r)) or count(r, c), times=3)
    for group in range(state.groups):
        state.start(group)
    assert len(made) == 1
    for _ in range(3):
        release(visit)
    assert len(made) == 3


def test_only_shards_that_will_be_drawn_are_made():
    data, _ = open_data()
    made = []
    release, state = prepare(data, start=lambda r, c: made.append(len(r)) or count(r, c), times=2)
    assert state.groups == 2
    for group in range(2):
        state.start(group)
        state.start(group)
    assert made == [1, 1], "each is made once"
    release(visit)


def test_a_state_not_started_is_made_when_it_is_needed():
    data, _ = open_data()
    exact = taped(data)
    release, _ = prepare(data)
    release(visit)
    assert exact == [0.0]


def test_nothing_is_made_before_the_mechanism_is_approved():
    data, ledger = open_data()
    state = data.private_state("critics", sample=BALANCED, start=count, identity={})
    with pytest.raises(ValueError, match="expected a mechanism before `start`"):
        state.start(0)
    assert not ledger.entries


def test_a_state_belongs_to_one_mechanism():
    data, _ = open_data()
    _, state = prepare(data)
    with pytest.raises(ValueError, match="expected one mechanism, got a second one"):
        data.mechanism("second", sample=BALANCED, bound=BOUND, times=1, std=1000.0, state=state)


@pytest.mark.parametrize(
    ("sample", "bound", "complaint"),
    [
        (OneShard(3), BOUND, "expected the sampling of private state"),
        (OneShard(3, "public_balanced", seed=1), BOUND, "expected the sampling of private state"),
        (Poisson(0.5), BOUND, "expected the sampling of private state"),
        (BALANCED, PerRecord(C=1.0, shape=(1,)), "expected PerRow or Whole"),
    ],
)
def test_state_that_no_proof_covers_is_refused(sample, bound, complaint):
    data, ledger = open_data()
    state = data.private_state("critics", sample=BALANCED, start=count, identity={})
    with pytest.raises(ValueError, match=complaint):
        data.mechanism("query", sample=sample, bound=bound, times=3, std=1000.0, state=state)
    assert not ledger.entries


def test_whole_is_covered_too():
    data, ledger = open_data()
    release, _ = prepare(data, bound=Whole(C=1.0, shape=(2, 1)))
    release(visit)
    assert ledger.entries["query"].bound["private_state"] == "critics"


@pytest.mark.parametrize("sample", [Poisson(0.5), type("Shards", (OneShard,), {})(3)])
def test_state_needs_a_sampling_of_the_harness_with_shards(sample):
    data, _ = open_data()
    with pytest.raises(ValueError, match="sampling with shards"):
        data.private_state("critics", sample=sample, start=count, identity={})


@pytest.mark.parametrize("stack", [0, True, 1.5])
def test_a_stack_must_be_a_positive_integer(stack):
    data, _ = open_data()
    with pytest.raises(ValueError, match="made together"):
        data.private_state("critics", sample=BALANCED, start=count, identity={}, stack=stack)


def test_a_start_that_raises_ends_the_run():
    data, ledger = open_data()

    def fail(records, rng):
        raise ZeroDivisionError

    release, state = prepare(data, start=fail)
    with pytest.raises(ZeroDivisionError):
        state.start(0)
    with pytest.raises(Invalidated, match="making private state 'critics' raised ZeroDivisionError"):
        release(visit)
    assert ledger.invalidated


def test_each_shard_and_each_release_has_its_own_randomness():
    """If one shard draws more numbers, the others draw the same numbers as before."""

    def run(greedy):
        data, _ = open_data()
        drawn = {}

        def start(records, rng):
            if greedy and len(records[0][1]) and float(records[0][0].sum()) > 2.0:
                torch.rand(5, generator=rng[0])
            return {"drawn": torch.stack([torch.rand((), generator=own) for own in rng])}

        def look(images, labels, state, rng):
            drawn[float(images.sum())] = (float(state["drawn"]), float(torch.rand((), generator=rng)))
            if greedy and float(images.sum()) > 2.0:
                torch.rand(5, generator=rng)
            return torch.zeros(2, 1), state

        release, _ = prepare(data, start=start, times=3)
        for _ in range(3):
            release(look)
        return drawn

    plain, greedy = run(False), run(True)
    assert plain.keys() == greedy.keys()
    same = [plain[key][0] == greedy[key][0] for key in plain if key <= 2.0]
    assert same
    assert all(same)
    assert [plain[key][1] for key in plain] == [greedy[key][1] for key in plain]
    assert len({number for pair in plain.values() for number in pair}) == 6


@pytest.mark.parametrize("name", ["", "a/b", "../up", "1st"])
def test_names_can_name_a_folder(name):
    data, _ = open_data()
    with pytest.raises(ValueError, match="name of private state"):
        data.private_state(name, sample=BALANCED, start=count, identity={})


def test_a_name_can_be_used_once():
    data, _ = open_data()
    data.private_state("critics", sample=BALANCED, start=count, identity={})
    with pytest.raises(ValueError, match="already made"):
        data.private_state("critics", sample=OneShard(3, seed=1), start=count, identity={})


@pytest.mark.parametrize(
    ("identity", "complaint"),
    [
        ({"partition": 1}, "which the harness adds"),
        ({"shards": 4}, "which the harness adds"),
        ({"w": np.zeros(3)}, "identity of"),
    ],
)
def test_identities_tell_states_apart(identity, complaint):
    data, _ = open_data()
    with pytest.raises(ValueError, match=complaint):
        data.private_state("critics", sample=BALANCED, start=count, identity=identity)


@pytest.mark.parametrize(
    ("start", "query", "complaint"),
    [
        (lambda r, c: None, visit, "float32 tensors by name, each with a first dimension of 1"),
        (lambda r, c: {}, visit, "float32 tensors by name"),
        (lambda r, c: {"a": torch.zeros(())}, visit, "first dimension of 1"),
        (lambda r, c: {"a": torch.zeros(2)}, visit, "first dimension of 1"),
        (count, lambda *_: torch.zeros(2, 1), r"return \(what the bound expects, the next state\), got Tensor"),
        (count, lambda *_: (torch.zeros(2, 1), [1.0]), "float32 tensors by name, got list"),
        (lambda r, c: {"a": torch.rand(1)}, visit, "drew from a global random generator"),
        (count, lambda i, y, state, rng: (torch.full((2, 1), random.random()), state), "global random generator"),
    ],
)
def test_the_outputs_of_private_functions_are_checked(start, query, complaint):
    data, _ = open_data()
    release, _ = prepare(data, start=start)
    with pytest.raises(ValueError, match=complaint):
        release(query)


def test_releases_with_state_are_made_in_loops(tmp_path):
    """Outside a loop, a killed run would make them again, after their state was lost."""
    data, ledger = open_data()
    context = Context(0, services=data._services)
    release, _ = prepare(data)
    with pytest.raises(RuntimeError, match=r"inside ctx\.steps"):
        release(visit)
    for _ in context.steps(3):
        release(visit)
    with pytest.raises(RuntimeError, match=r"inside ctx\.steps"):
        release(visit)
    assert ledger.entries["query"].executed == 3


def test_groups_do_not_depend_on_the_number_of_releases():
    """Otherwise a state would depend on the shards that the releases of a run draw."""
    members = []

    def start(records, rng):
        members.append([float(images.sum()) for images, _ in records])
        return count(records, rng)

    for times in (1, 9):
        data, _ = open_data()
        _, state = prepare(data, start=start, times=times, stack=2)
        for group in range(state.groups):
            state.start(group)
    assert members[0] in members[1:]
    assert len(members) == 3
    assert isinstance(state, PrivateState)

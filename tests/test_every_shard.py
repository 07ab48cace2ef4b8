"""`EveryShard`, `PerShard` and votes of shards: sensitivities by brute force, private state, resumption, refusals."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.bounds import PerRecord, PerRow
from dpgen_bench.privacy.events import RELATIONS, Budget, Event, Sensitivity
from dpgen_bench.privacy.journal import Journal
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Entry, Invalidated, Ledger
from dpgen_bench.privacy.sampling import EveryShard, Full, OneShard, Poisson, Sampling, sampling_from_dict
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.shards import PerShard
from dpgen_bench.privacy.state_file import StatePlace
from dpgen_bench.privacy.votes import Votes
from tests.state_toys import count, taped

SHARDS = EveryShard(3)
CPU = torch.device("cpu")


def open_data(n: int = 12, relation: Any = "replace_one", ids: Any = None, **services: Any) -> PrivateData:
    images = torch.arange(n).float().reshape(n, 1, 1, 1) / max(n, 1)
    own = Services(Ledger(Budget(1e4, relation=relation), n), Key.seeded("shards"), **services)
    return PrivateData(images, torch.zeros(n, dtype=torch.int64), 2, own, ids=ids)


def sums(shards: Any, rngs: Any) -> Tensor:
    return torch.stack([images.sum().reshape(1) for images, _ in shards])


# --- the sampling -----------------------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.sets(st.integers(0, 10**6), max_size=40), st.integers(0, 3))
def test_every_record_is_drawn_and_keeps_its_shard_when_others_leave(shards, chosen, seed) -> None:
    sampling, ids = EveryShard(shards, seed), np.array(sorted(chosen), dtype=np.int64)
    assert np.array_equal(sampling.draw(ids, Key.seeded("any"), 3), np.arange(len(ids)))
    members = sampling.members(ids)
    assert len(members) == shards
    assert sorted(np.concatenate(members).tolist()) == list(range(len(ids)))
    shard_of = sampling.shard_of(ids)
    assert all((shard_of[of_shard] == shard).all() for shard, of_shard in enumerate(members))
    assert all((np.diff(of_shard) > 0).all() for of_shard in members)
    assert np.array_equal(shard_of, OneShard(shards, seed=seed).shard_of(ids)), "the same partition as OneShard"
    assert np.array_equal(sampling.shard_of(ids[::2]), shard_of[::2])


def test_it_is_restored_from_the_ledger_and_counts_as_unsampled() -> None:
    event = Event(EveryShard(7, 2), Sensitivity(2.0, 2.0), 9.0, 5)
    entry = Entry("m", {"kind": "PerShard", "C": 1.0}, event)
    assert Entry.from_dict(json.loads(json.dumps(entry.to_dict()))) == entry
    assert sampling_from_dict(event.sampling.to_dict()) == EveryShard(7, 2)
    unsampled = Event(Full(), Sensitivity(2.0, 2.0), 9.0, 5)
    for relation, accountant in itertools.product(RELATIONS, ("rdp", "prv", "pld")):
        assert epsilon([event], 1e-5, relation, accountant) == epsilon([unsampled], 1e-5, relation, accountant)


@pytest.mark.parametrize("shards", [0, -1, 2.0, True])
def test_invalid_numbers_of_shards_are_refused(shards) -> None:
    with pytest.raises(ValueError, match="expected a number of shards >= 1"):
        EveryShard(shards)


# --- sensitivities, by brute force ------------------------------------------------------------------------------------


def test_one_shard_moves_the_sum_by_at_most_the_sensitivity_and_reaches_it():
    bound = PerShard(C=1.5, shape=(2,))
    others = torch.tensor([[3.0, -1.0], [0.1, 0.2], [math.nan, 1.0]])
    rows = [torch.tensor(row) for row in itertools.product([-9.0, -1.5, 0.0, 0.3, 1.5, math.inf, math.nan], repeat=2)]
    values = torch.stack([bound.total([(4, torch.cat([others, row[None]]))], CPU)["value"] for row in rows])
    moved = torch.cdist(values, values).max()
    assert bound.sensitivity == Sensitivity(3.0, 3.0)
    assert float(moved) == pytest.approx(3.0, rel=1e-5)
    assert float(moved) <= 3.0


def test_a_record_that_returns_under_another_id_may_move_two_answers():
    """This is no replace-one: one record leaves and another joins, and the sum may move by twice the sensitivity."""
    bound, ids = PerShard(C=1.0, shape=(1,)), np.arange(6)
    shard_of = SHARDS.shard_of(ids)

    def fullness(shards: Any, rngs: Any) -> Tensor:
        """+1 for a shard with both of its records, -1 for one without; the other way round in the last shard."""
        return torch.tensor([[(2.0 * len(y) - 3.0) * float(x.mean().sign())] for x, y in shards])

    def value(kept: np.ndarray) -> float:
        images = torch.where(torch.from_numpy(shard_of[kept]) == 2, -1.0, 1.0).reshape(-1, 1, 1, 1)
        services = Services(Ledger(Budget(1e4), 6), Key.seeded("shards"))
        data = PrivateData(images, torch.zeros(len(kept), dtype=torch.int64), 2, services, ids=kept)
        exact = taped(data)
        data.mechanism("sum", sample=SHARDS, bound=bound, times=1, std=100.0)(fullness)
        return exact[0]

    first, last = (int(np.flatnonzero(shard_of == shard)[0]) for shard in (0, 2))
    before, between, after = value(ids[ids != first]), value(ids), value(ids[ids != last])
    moved = [abs(between - before), abs(after - between), abs(after - before)]
    assert moved == pytest.approx([2.0, 2.0, 2.0 * bound.sensitivity.replace_one], rel=1e-5)


@pytest.mark.parametrize(("bins", "k"), [(1, 1), (2, 1), (4, 1), (4, 2), (3, 2), (3, 3)])
def test_votes_of_one_shard_move_the_histogram_by_at_most_the_sensitivity_and_reach_it(bins, k):
    bound = Votes(bins=bins, k=k, voters="shards")
    others = torch.zeros(2, k, dtype=torch.int64)
    rows = [torch.tensor([row]) for row in itertools.product([-1, *range(bins + 1)], repeat=k)]
    values = torch.stack([bound.total([(2, others), (1, row)], CPU)["value"] for row in rows])
    moved = float(torch.cdist(values, values).max())
    assert bound.sensitivity.add_remove == bound.sensitivity.replace_one == math.sqrt(min(2 * k, bins))
    assert moved == pytest.approx(math.sqrt(min(2 * k, bins)), rel=1e-6)


def test_the_law_of_the_release():
    """The sum of the shards' clipped answers plus noise of the stated scale; shards without records answer, too."""
    data = open_data(n=7)
    exact = taped(data)
    release = data.mechanism("sum", sample=EveryShard(5), bound=PerShard(C=0.6, shape=(1,)), times=400, std=2.0)
    noisy = torch.stack([release(sums) for _ in range(400)]).flatten()
    images = torch.arange(7) / 7
    own = torch.stack([images[at].sum().clamp(max=0.6) for at in EveryShard(5).members(np.arange(7))]).sum()
    assert exact[0] == pytest.approx(float(own), abs=1e-5)
    assert float((noisy - own).std()) == pytest.approx(2.0, rel=0.15)
    empty = open_data(n=0).mechanism("sum", sample=EveryShard(5), bound=PerShard(C=0.6, shape=(1,)), times=1, std=2.0)
    assert empty(sums).shape == (1,)


def test_the_ledger_states_who_votes():
    data = open_data()
    release = data.mechanism("votes", sample=SHARDS, bound=Votes(bins=4, voters="shards"), times=2, std=9.0)
    assert release(lambda shards, rngs: torch.tensor([[len(y) // 2] for _, y in shards])).shape == (4,)
    entry = data._services.ledger.entries["votes"]
    assert entry.bound == {"kind": "Votes", "C": 1.0, "rows": 1, "bins": 4, "votes": 1, "voters": "shards"}
    assert entry.event.sensitivity == Sensitivity(math.sqrt(2), math.sqrt(2))


# --- private state ----------------------------------------------------------------------------------------------------


def visits(shards: Any, states: Any, rngs: Any) -> tuple[Tensor, Any]:
    """Each shard answers with the number of its earlier releases."""
    own = torch.tensor([float(len(labels)) for _, labels in shards])
    assert torch.equal(own, states["n"]), "the state of a shard came with another shard's records"
    return states["visits"][:, None], {**states, "visits": states["visits"] + 1.0}


@pytest.mark.parametrize("stack", [1, 2, 5, 9])
def test_each_shard_has_its_own_state_and_each_release_leaves_the_next(stack):
    data = open_data(n=13)
    exact = taped(data)
    sample = EveryShard(5)
    state = data.private_state("teachers", sample=sample, start=count, identity={}, stack=stack)
    bound = PerShard(C=100.0, shape=(1,))
    release = data.mechanism("sum", sample=sample, bound=bound, times=4, std=1e5, state=state)
    assert state.groups == -(-5 // min(stack, 5))
    for number in range(state.groups):
        state.start(number)
    for _ in range(4):
        release(visits)
    assert exact == [0.0, 5.0, 10.0, 15.0]


def test_the_stack_changes_no_answer_and_no_randomness():
    def run(stack: int) -> list[float]:
        data = open_data(n=13)
        exact, sample = taped(data), EveryShard(5)

        def start(shards: Any, rngs: Any) -> dict[str, Tensor]:
            return {"own": torch.stack([torch.rand((), generator=rng) for rng in rngs])}

        def answer(shards: Any, states: Any, rngs: Any) -> tuple[Tensor, Any]:
            drawn = torch.stack([torch.rand((), generator=rng) for rng in rngs])
            rows = drawn + states["own"] + torch.stack([images.sum() for images, _ in shards])
            return rows[:, None], {"own": drawn}

        state = data.private_state("teachers", sample=sample, start=start, identity={}, stack=stack, keyed_stack=1)
        bound = PerShard(C=100.0, shape=(1,))
        release = data.mechanism("sum", sample=sample, bound=bound, times=3, std=1e5, state=state)
        for _ in range(3):
            release(answer)
        return exact

    first = run(1)
    assert len(set(first)) == 3
    assert run(3) == pytest.approx(first, rel=1e-6)


def test_the_runs_stack_changes_no_first_state():
    """`runtime.stack` computes more shards together than the method names; the key of first states stays."""

    def first_states(least: int | None) -> list[float]:
        data = open_data(n=13)
        object.__setattr__(data._services, "stack", least)
        exact, sample = taped(data), EveryShard(5)

        def start(shards: Any, rngs: Any) -> dict[str, Tensor]:
            return {"own": torch.stack([torch.rand((), generator=rng) for rng in rngs])}

        state = data.private_state("teachers", sample=sample, start=start, identity={}, stack=2)
        bound = PerShard(C=100.0, shape=(1,))
        release = data.mechanism("sum", sample=sample, bound=bound, times=1, std=1e5, state=state)
        groups = []

        def answer(shards: Any, states: Any, rngs: Any) -> tuple[Tensor, Any]:
            groups.append(len(shards))
            return states["own"][:, None], states

        release(answer)
        return [*exact, *map(float, groups)]

    asked = first_states(None)
    assert asked[1:] == [2, 2, 1]
    assert first_states(1) == asked, "it raises the method's number only"
    assert first_states(4) == pytest.approx([asked[0], 4, 1])
    assert first_states(9) == pytest.approx([asked[0], 5])


@pytest.mark.parametrize("held", [0, 8, 1000])
def test_a_killed_run_continues_with_the_states_of_its_checkpoint(tmp_path, held):
    """With no group of states in memory between checkpoints, with one of two, and with both."""

    def fit(folder: Any, kill: int | None) -> list[float]:
        ledger = Ledger.load(folder / "ledger.json") if (folder / "ledger.json").exists() else None
        ledger = ledger or Ledger(Budget(1e4), 12, path=folder / "ledger.json")
        services = Services(ledger, Key.seeded("k"), place=StatePlace(folder / "state", folder / "cache", {}, held))
        data = PrivateData(torch.rand(12, 1, 1, 1), torch.zeros(12, dtype=torch.int64), 2, services)
        exact = taped(data)
        context = Context(0, services=services, folder=folder, due=lambda _: len(exact) == 3)
        state = data.private_state("teachers", sample=SHARDS, start=count, identity={}, stack=2)
        bound = PerShard(C=100.0, shape=(1,))
        release = data.mechanism("sum", sample=SHARDS, bound=bound, times=7, std=1e5, state=state)
        for t in context.steps(7):
            release(visits)
            if t == kill:
                break
        return exact

    (tmp_path / "killed").mkdir()
    (tmp_path / "whole").mkdir()
    assert fit(tmp_path / "killed", kill=5) == [0.0, 3.0, 6.0, 9.0, 12.0, 15.0]
    assert fit(tmp_path / "killed", kill=None) == [9.0, 12.0, 15.0, 18.0], "from the checkpoint after three steps"
    assert fit(tmp_path / "whole", kill=None) == [3.0 * t for t in range(7)]


def test_releases_without_state_are_read_back_from_the_journal(tmp_path):
    def release(fn: Any) -> Tensor:
        data = open_data(journal=Journal(tmp_path))
        return data.mechanism("sum", sample=SHARDS, bound=PerShard(C=1.0, shape=(1,)), times=2, std=9.0)(fn)

    first = release(sums)
    assert torch.equal(release(lambda shards, rngs: 1 / 0), first), "the function is not called again"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sample", "bound"),
    [
        (SHARDS, PerRecord(C=1.0, shape=(1,))),
        (SHARDS, PerRow(C=1.0, shape=(1,))),
        (SHARDS, Votes(bins=3)),
        (Full(), PerShard(C=1.0, shape=(1,))),
        (OneShard(3), PerShard(C=1.0, shape=(1,))),
        (Poisson(0.5), Votes(bins=3, voters="shards")),
    ],
)
def test_only_answers_of_shards_go_with_this_sampling(sample: Sampling, bound: Any):
    data = open_data()
    with pytest.raises(ValueError, match=r"expected PerShard or Votes\(voters='shards'\) together with .*EveryShard"):
        data.mechanism("sum", sample=sample, bound=bound, times=1, std=9.0)
    assert not data._services.ledger.entries


def test_the_state_of_another_partition_is_refused():
    data = open_data()
    state = data.private_state("teachers", sample=EveryShard(3, seed=1), start=count, identity={})
    with pytest.raises(ValueError, match="expected the sampling of private state"):
        data.mechanism("sum", sample=SHARDS, bound=PerShard(C=1.0, shape=(1,)), times=1, std=9.0, state=state)


def test_voters_are_records_or_shards():
    with pytest.raises(ValueError, match="expected voters 'records' or 'shards', got 'clients'"):
        Votes(bins=3, voters="clients")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bound", "answer", "complaint"),
    [
        (PerShard(C=1.0, shape=(2,)), lambda g: torch.zeros(g, 3), r"expected .* shape \(1, 2\), a row for each shard"),
        (PerShard(C=1.0, shape=(2,)), lambda g: torch.zeros(2, 2), "one answer for each of the 1 shards"),
        (PerShard(C=1.0, shape=(2,)), lambda g: torch.tensor(0.0), "one answer for each of the 1 shards"),
        (PerShard(C=1.0, shape=(2,)), lambda g: [0.0], "expected a plain torch.Tensor, got list"),
        (Votes(bins=3, voters="shards"), lambda g: torch.zeros(g, 2, dtype=torch.int64), r"expected .* int64 \(1, 1\)"),
        (Votes(bins=3, voters="shards"), lambda g: torch.zeros(g, 1), r"expected .* int64 \(1, 1\)"),
    ],
)
def test_answers_of_another_form_are_refused_and_mark_the_run(bound, answer, complaint):
    data = open_data()
    release = data.mechanism("sum", sample=SHARDS, bound=bound, times=2, std=9.0)
    with pytest.raises(ValueError, match=complaint):
        release(lambda shards, rngs: answer(len(shards)))
    with pytest.raises(Invalidated):
        release(sums)


def test_functions_of_other_arguments_are_refused_before_records_are_used():
    data = open_data()
    state = data.private_state("teachers", sample=SHARDS, start=count, identity={})
    bound = PerShard(C=1.0, shape=(1,))
    plain = data.mechanism("plain", sample=SHARDS, bound=bound, times=1, std=9.0)
    kept = data.mechanism("kept", sample=SHARDS, bound=bound, times=1, std=9.0, state=state)
    with pytest.raises(ValueError, match=r"asks every shard: expected a function of \(shards, rngs\)"):
        plain(visits)
    with pytest.raises(ValueError, match=r"asks every shard and keeps private state: expected .*\(shards, states, rn"):
        kept(sums)
    assert not data._services.ledger.failures


@pytest.mark.parametrize("next_states", [None, {}, {"visits": torch.zeros(2)}, {"visits": torch.zeros(3).double()}])
def test_states_of_another_form_are_refused(next_states):
    data = open_data()
    state = data.private_state("teachers", sample=SHARDS, start=count, identity={}, stack=3)
    bound = PerShard(C=1.0, shape=(1,))
    release = data.mechanism("sum", sample=SHARDS, bound=bound, times=1, std=9.0, state=state)
    with pytest.raises(ValueError, match="float32 tensors"):
        release(lambda shards, states, rngs: (torch.zeros(3, 1), next_states))


def test_answers_must_not_use_public_randomness():
    data = open_data()
    release = data.mechanism("sum", sample=SHARDS, bound=PerShard(C=1.0, shape=(1,)), times=1, std=9.0)
    with pytest.raises(ValueError, match="a function of shards drew from a global random generator"):
        release(lambda shards, rngs: torch.rand(len(shards), 1))


def test_positions_as_ids_are_warned_of_under_add_remove():
    for ids, relation, warned in ((None, "add_remove", 1), (np.arange(12), "add_remove", 0), (None, "replace_one", 0)):
        data = open_data(relation=relation, ids=ids)
        data.mechanism("sum", sample=SHARDS, bound=PerShard(C=1.0, shape=(1,)), times=1, std=9.0)
        assert len(data._services.ledger.warnings) == warned

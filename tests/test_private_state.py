"""Private state: versions that survive a kill, a cache shared by runs, and what the harness refuses."""

from __future__ import annotations

import json
import os
import random

import numpy as np
import pytest
import torch

from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context
from dpgen_bench.privacy.bounds import PerRecord, PerRow, Whole
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger, Spoiled
from dpgen_bench.privacy.sampling import OneShard, Poisson
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state import PrivateState
from dpgen_bench.privacy.state_file import Rows, StatePlace

BALANCED = OneShard(3, "public_balanced")
BOUND = PerRow(C=1.0, shape=(2, 1))


def open_data(n=12, place=None, images=None):
    images = torch.arange(n).float().reshape(n, 1, 1, 1) / n if images is None else images
    ledger = Ledger(Budget(epsilon=1e4), n)
    labels = torch.zeros(len(images), dtype=torch.int64)
    return PrivateData(images, labels, 2, Services(ledger, Key.seeded("test"), place=place or StatePlace())), ledger


def count(records, coins):
    """First state: how many records, and their sum."""
    sums = torch.stack([images.sum() for images, _ in records])
    return {
        "n": torch.tensor([float(len(labels)) for _, labels in records]),
        "sum": sums,
        "visits": torch.zeros_like(sums),
    }


def visit(images, labels, state, coins):
    rows = torch.full((2, 1), float(state["visits"]))
    return rows, {**state, "visits": state["visits"] + 1.0}


def prepare(data, start=count, sample=BALANCED, bound=BOUND, times=9, std=1000.0, **kwargs):
    state = data.private_state("critics", sample=sample, start=start, identity={}, **kwargs)
    return data.mechanism("query", sample=sample, bound=bound, times=times, std=std, state=state), state


def taped(data):
    """The exact values of each release, by an observer."""
    exact = []

    class Tape:
        def release(self, mechanism, index, drawn, value, noisy):
            exact.append(float(value["value"][0]))
            return noisy

        def before_records(self):
            pass

    object.__setattr__(data._services, "observer", Tape())
    return exact


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


def test_first_states_are_of_the_records_of_their_shards_alone():
    data, _ = open_data(n=13)
    seen = []

    def look(images, labels, state, coins):
        seen.append((len(labels), float(images.sum()), float(state["n"]), float(state["sum"])))
        return torch.zeros(2, 1), state

    release, state = prepare(data, stack=2, times=3)
    assert state.groups == 2
    for group in range(state.groups):
        state.start(group)
    for _ in range(3):
        release(look)
    assert sorted(n for n, *_ in seen) == [4, 4, 5]
    for n, total, kept_n, kept_total in seen:
        assert (n, total) == (kept_n, pytest.approx(kept_total))


def test_only_shards_that_will_be_drawn_are_made():
    data, _ = open_data()
    made = []
    release, state = prepare(data, start=lambda r, c: made.append(len(r)) or count(r, c), times=2)
    assert state.groups == 2
    for group in range(2):
        state.start(group)
        state.start(group)
    assert made == [1, 1], "and none twice"
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
    with pytest.raises(ValueError, match="ask for the mechanism"):
        state.start(0)
    assert not ledger.entries


def test_a_state_belongs_to_one_mechanism():
    data, _ = open_data()
    _, state = prepare(data)
    with pytest.raises(ValueError, match="already belongs"):
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
def test_state_that_the_accounting_does_not_cover_is_refused(sample, bound, complaint):
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
def test_state_needs_the_harness_s_own_shards(sample):
    data, _ = open_data()
    with pytest.raises(ValueError, match="sampling with shards"):
        data.private_state("critics", sample=sample, start=count, identity={})


@pytest.mark.parametrize("stack", [0, True, 1.5])
def test_stacks_are_counted(stack):
    data, _ = open_data()
    with pytest.raises(ValueError, match="made together"):
        data.private_state("critics", sample=BALANCED, start=count, identity={}, stack=stack)


def test_a_start_that_raises_ends_the_run():
    data, ledger = open_data()

    def fail(records, coins):
        raise ZeroDivisionError

    release, state = prepare(data, start=fail)
    with pytest.raises(ZeroDivisionError):
        state.start(0)
    with pytest.raises(Spoiled, match="making private state 'critics' raised ZeroDivisionError"):
        release(visit)
    assert ledger.spoiled


def test_coins_are_the_shards_and_the_releases_own():
    """Whatever a shard draws, others draw the same: coins are not one common stream."""

    def run(greedy):
        data, _ = open_data()
        drawn = {}

        def start(records, coins):
            if greedy and len(records[0][1]) and float(records[0][0].sum()) > 2.0:
                torch.rand(5, generator=coins[0])
            return {"coin": torch.stack([torch.rand((), generator=coin) for coin in coins])}

        def look(images, labels, state, coins):
            drawn[float(images.sum())] = (float(state["coin"]), float(torch.rand((), generator=coins)))
            if greedy and float(images.sum()) > 2.0:
                torch.rand(5, generator=coins)
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
    assert len({coin for pair in plain.values() for coin in pair}) == 6


# On disk


def test_a_cache_is_shared_by_runs_and_marked_private(tmp_path):
    made = []

    def start(records, coins):
        made.append(len(records))
        return count(records, coins)

    place = StatePlace(tmp_path / "run", tmp_path / "cache", {"dataset": "x", "seed": 0})
    for std, times in ((1000.0, 3), (2000.0, 6)):  # other noise, other T
        data, _ = open_data(place=place)
        _, state = prepare(data, start=start, std=std, times=times)
        for group in range(state.groups):
            state.start(group)
    assert made == [1, 1, 1]
    (cached,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert sorted(path.name for path in cached.iterdir()) == [
        "PRIVATE",
        "identity.json",
        "layout.json",
        "locks",
        "state.npy",
    ]
    assert json.loads((cached / "identity.json").read_text())["dataset"] == "x"
    for private in (cached.parent, cached, cached / "state.npy"):
        assert private.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "other",
    [
        {"place": {"seed": 1}},
        {"identity": {"iterations": 2}},
        {"sample": OneShard(4, "public_balanced")},
        {"sample": OneShard(3, "public_balanced", seed=7)},
        {"stack": 3},
        {"record": "changed"},
    ],
)
def test_other_first_states_have_another_place(tmp_path, other):
    keys = set()
    images = torch.rand(12, 1, 1, 1)
    for change in ({}, other):
        place = StatePlace(tmp_path / "run", tmp_path / "cache", change.get("place", {"seed": 0}))
        changed = torch.cat([images[:-1], 1.0 - images[-1:]]) if "record" in change else images
        data, _ = open_data(place=place, images=changed)
        state = data.private_state(
            "critics",
            sample=change.get("sample", BALANCED),
            start=count,
            identity=change.get("identity", {"iterations": 1}),
            stack=change.get("stack", 1),
        )
        keys.add(state._cache)
    assert len(keys) == 2


def test_the_schedule_does_not_change_first_states(tmp_path):
    places = set()
    for schedule in ("random", "public_balanced"):
        data, _ = open_data(place=StatePlace(None, tmp_path, {}))
        state = data.private_state("critics", sample=OneShard(3, schedule), start=count, identity={})
        places.add(state._cache)
    assert len(places) == 1


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path):
    """Whatever releases were made after the checkpoint, the next process finds each shard as the checkpoint had it."""
    place = StatePlace(tmp_path / "run", tmp_path / "cache", {})
    wide = PerRow(C=100.0, shape=(2, 1))
    whole, _ = open_data()
    expected = taped(whole)
    release, _ = prepare(whole, bound=wide, std=1e5)
    for _ in range(9):
        release(visit)
    for checkpoint in range(9):
        for lost in range(9 - checkpoint + 1):
            folder = StatePlace(tmp_path / f"run-{checkpoint}-{lost}", place.cache, {})
            data, _ = open_data(place=folder)
            release, _ = prepare(data, bound=wide, std=1e5)
            for _ in range(checkpoint):
                release(visit)
            data._services.controls["query"].before_checkpoint()
            data._services.controls["query"].after_checkpoint()
            for _ in range(lost):
                release(visit)
            again, _ = open_data(place=folder)  # a new process
            exact = taped(again)
            release, _ = prepare(again, bound=wide, std=1e5)
            again._services.controls["query"].resume_at(checkpoint)
            for _ in range(9 - checkpoint):
                release(visit)
            assert exact == expected[checkpoint:], (checkpoint, lost)


def test_processes_that_share_a_cache_share_its_work(tmp_path):
    """Each group is made once, whoever comes first, and all find the same states."""
    from concurrent.futures import ThreadPoolExecutor

    made = []

    def start(records, coins):
        made.append(float(records[0][0].sum()))
        return count(records, coins)

    def run(_):
        data, _ = open_data(n=30, place=StatePlace(None, tmp_path, {}))
        sample = OneShard(10, "public_balanced")
        _, state = prepare(data, start=start, sample=sample, times=10)
        for group in range(state.groups):
            state.start(group)
        return [float(state._before(shard, 0)["sum"]) for shard in range(10)]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(run, range(4)))
    assert len(made) == 10
    assert found[0] == found[1] == found[2] == found[3]
    assert sorted(found[0]) == sorted(made)


def test_state_that_is_gone_is_missed(tmp_path):
    place = StatePlace(tmp_path / "run", tmp_path / "cache", {})
    data, _ = open_data(place=place)
    release, _ = prepare(data)
    for _ in range(4):
        release(visit)
    again, _ = open_data(place=StatePlace(tmp_path / "elsewhere", place.cache, {}))
    release, _ = prepare(again)
    again._services.controls["query"].resume_at(4)
    with pytest.raises(RuntimeError, match="does not fit its checkpoint"):
        release(visit)


def empty(folder):
    (folder / "state.npy").write_bytes(b"nothing")


def cut(folder):
    os.truncate(folder / "state.npy", (folder / "state.npy").stat().st_size - 4)


@pytest.mark.parametrize(
    "damage",
    [
        empty,
        cut,
        lambda folder: (folder / "layout.json").write_text(""),
        lambda folder: (folder / "layout.json").write_text("[]"),
        lambda folder: (folder / "layout.json").write_text('{"a": [4]}'),
    ],
)
def test_damaged_files_are_named(tmp_path, damage):
    rows = Rows(tmp_path / "rows", shards=2, slots=1)
    rows.write(0, 0, 1, {"a": torch.ones(3)})
    rows.flush()
    with pytest.raises(ValueError, match="cannot be used"):
        Rows(tmp_path / "rows", shards=3, slots=1)
    damage(tmp_path / "rows")
    with pytest.raises(ValueError, match=r"cannot be used .*Delete"):
        Rows(tmp_path / "rows", shards=2, slots=1)


def test_a_damaged_row_counts_as_not_there_and_is_made_again(tmp_path):
    place = StatePlace(tmp_path / "run", tmp_path / "cache", {})
    data, _ = open_data(place=place)
    _, state = prepare(data)
    for group in range(3):
        state.start(group)
    expected = [float(state._before(shard, 0)["sum"]) for shard in range(3)]
    file = state._cache / "state.npy"
    content = bytearray(file.read_bytes())
    content[-2] ^= 0x40  # within the last shard's row
    file.write_bytes(content)
    made = []
    again, _ = open_data(place=place)
    _, state = prepare(again, start=lambda r, c: made.append(1) or count(r, c))
    for group in range(3):
        state.start(group)
    assert made == [1]
    assert [float(state._before(shard, 0)["sum"]) for shard in range(3)] == expected


@pytest.mark.parametrize("name", ["", "a/b", "../up", "1st"])
def test_names_can_name_a_folder(name):
    data, _ = open_data()
    with pytest.raises(ValueError, match="name of private state"):
        data.private_state(name, sample=BALANCED, start=count, identity={})


def test_a_name_is_given_once():
    data, _ = open_data()
    data.private_state("critics", sample=BALANCED, start=count, identity={})
    with pytest.raises(ValueError, match="already made"):
        data.private_state("critics", sample=OneShard(3, seed=1), start=count, identity={})


@pytest.mark.parametrize(
    ("identity", "complaint"),
    [
        ({"partition": 1}, "the harness's own"),
        ({"shards": 4}, "the harness's own"),
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
        (count, lambda i, y, state, coins: (torch.full((2, 1), random.random()), state), "global random generator"),
    ],
)
def test_what_private_functions_give_is_checked(start, query, complaint):
    data, _ = open_data()
    release, _ = prepare(data, start=start)
    with pytest.raises(ValueError, match=complaint):
        release(query)


def test_releases_with_state_are_made_in_loops(tmp_path):
    """Elsewhere they would be made again after a kill, and the state that they had would be gone."""
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


@pytest.mark.parametrize("parts", [{"a": torch.ones(4)}, {"b": torch.ones(3)}, {"a": torch.ones(3).double()}])
def test_state_keeps_its_form(parts):
    rows = Rows(None, shards=2, slots=1)
    rows.write(0, 0, 1, {"a": torch.ones(3)})
    with pytest.raises(ValueError, match="same names and shapes"):
        rows.write(1, 0, 1, parts)


def test_one_file_holds_all_shards(tmp_path):
    rows = Rows(tmp_path, shards=1000, slots=1)
    rows.write(999, 0, 5, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7.0)})
    rows.flush()
    again = Rows(tmp_path, shards=1000, slots=1)
    assert again.find(999, 5) == 0
    assert again.find(999, 4) is None
    assert list(again.versions(3)) == [0]
    parts = again.read(999, 0, torch.device("cpu"))
    assert torch.equal(parts["a"], torch.arange(6.0).reshape(2, 3))
    assert float(parts["b"]) == 7.0
    assert sum(path.suffix == ".npy" for path in tmp_path.iterdir()) == 1
    assert isinstance(again._rows, np.memmap)


def test_groups_are_fixed_whatever_is_needed():
    """So that a state does not depend on which shards the releases of a run happen to draw."""
    members = []

    def start(records, coins):
        members.append([float(images.sum()) for images, _ in records])
        return count(records, coins)

    for times in (1, 9):
        data, _ = open_data()
        _, state = prepare(data, start=start, times=times, stack=2)
        for group in range(state.groups):
            state.start(group)
    assert members[0] in members[1:]
    assert len(members) == 3
    assert isinstance(state, PrivateState)

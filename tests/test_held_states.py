"""Tests of the states that stay in the device's memory between checkpoints."""

from __future__ import annotations

import pytest
import torch

from dpgen_bench.privacy.held_states import HeldStates, expect_room
from dpgen_bench.privacy.state_file import StateFile, StatePlace
from dpgen_bench.runs.execute import execute
from dpgen_bench.store.folders import Store
from tests.run_toys import config
from tests.state_toys import open_data, prepare, taped, visit

CPU = torch.device("cpu")
BYTES = 3 * 4  # of a state of `count`: three numbers


def checkpoint(data):
    data._services.controls["query"].before_checkpoint()
    data._services.controls["query"].after_checkpoint()


def written(folder, shards=3):
    """The newest version of each shard's state in the file; 0 for none."""
    file = StateFile(folder / "critics", shards, slots=2)
    return [int(file.versions(shard).max()) for shard in range(shards)]


def values_of_releases(data, fn=visit):
    """The exact values of nine releases, three of each shard."""
    exact = taped(data)
    release, _ = prepare(data, std=1e5)
    for _ in range(9):
        release(fn)
    return exact


# What is not held is written when the next state is: of three states the last one not yet.
@pytest.mark.parametrize(("held", "expected"), [(0, 2), (BYTES, 1), (2 * BYTES, 0), (3 * BYTES, 0)])
def test_states_are_written_for_a_checkpoint_if_there_is_room_for_them(tmp_path, held, expected):
    data, _ = open_data(place=StatePlace(tmp_path, None, {}, held))
    release, _ = prepare(data, std=1e5)
    for _ in range(3):  # balanced: each of the three shards once
        release(visit)
    assert sum(version > 0 for version in written(tmp_path)) == expected
    checkpoint(data)
    assert sorted(written(tmp_path)) == [1, 2, 3]


@pytest.mark.parametrize("held", [0, BYTES, 3 * BYTES])
def test_releases_are_those_of_states_in_a_file(tmp_path, held):
    data, _ = open_data(place=StatePlace(tmp_path, None, {}, held))
    in_file, _ = open_data()
    assert values_of_releases(data) == values_of_releases(in_file)


def test_a_checkpoint_writes_only_what_changed(tmp_path, monkeypatch):
    data, _ = open_data(place=StatePlace(tmp_path, None, {}, 1000))
    release, _ = prepare(data, std=1e5)
    writes = []
    original = StateFile.write_row
    monkeypatch.setattr(StateFile, "write_row", lambda self, *args: writes.append(args) or original(self, *args))
    for _ in range(3):
        release(visit)
    writes.clear()  # of first states
    checkpoint(data)
    assert len(writes) == 3
    checkpoint(data)
    assert len(writes) == 3
    release(visit)
    checkpoint(data)
    assert len(writes) == 4


def test_a_tensor_that_a_method_keeps_is_not_the_state(tmp_path):
    """Otherwise a function could change the state of one shard when it sees the records of another."""
    data, _ = open_data(place=StatePlace(tmp_path, None, {}, 1000))
    kept = []

    def changes_later(images, labels, state, rng):
        for tensor in kept:
            tensor += 100.0
        value, after = visit(images, labels, state, rng)
        kept.extend([*state.values(), *after.values()])
        return value, after

    honest, _ = open_data()
    assert values_of_releases(data, changes_later) == values_of_releases(honest)


@pytest.mark.parametrize("held", [0, 1_000_000])
def test_states_lie_in_memory_as_those_of_a_file_do(tmp_path, held):
    """Products of tensors with other strides are rounded otherwise, so a resumed run would differ."""
    data, _ = open_data(place=StatePlace(tmp_path, None, {}, held))
    strides = []

    def start(records, rngs):
        return {"weight": torch.zeros(len(records), 6, 4)}

    def transposed(images, labels, state, rng):
        strides.append(state["weight"].stride())
        return torch.zeros(2, 1), {"weight": torch.rand(4, 6, generator=rng).T}

    release, _ = prepare(data, start=start, std=1e5)
    for _ in range(9):
        release(transposed)
    assert strides == 9 * [(4, 1)]


def test_states_of_another_layout_are_refused(tmp_path):
    data, _ = open_data(place=StatePlace(tmp_path, None, {}, 1000))
    release, _ = prepare(data, std=1e5)
    for _ in range(3):
        release(visit)
    with pytest.raises(ValueError, match="expected private state as float32 tensors of the same names and shapes"):
        release(lambda images, labels, state, rng: (torch.zeros(2, 1), {"other": torch.zeros(2)}))


def test_only_the_version_that_is_held_is_found():
    held = HeldStates(1000, CPU)
    shards = range(2, 4)
    assert held.keep(shards, 5, {"a": torch.ones(2, 3)})
    assert held.find(shards, 4) is None
    assert held.find(range(0, 2), 5) is None
    found = held.find(shards, 5)
    assert found is not None
    assert torch.equal(found["a"], torch.ones(2, 3))
    assert [(group, version) for group, version, _ in held.unwritten()] == [(shards, 5)]
    assert list(held.unwritten()) == []


def test_states_are_overwritten_in_their_own_memory():
    held = HeldStates(1000, CPU)
    held.keep(range(0, 2), 1, {"a": torch.ones(2, 3)})
    (_, _, first), given = next(held.unwritten()), torch.zeros(3, 2).T
    held.keep(range(0, 2), 2, {"a": given})
    given += 5.0
    ((_, _, second),) = held.unwritten()
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert torch.equal(second["a"], torch.zeros(2, 3))
    assert second["a"].stride() == (3, 1)


def test_more_than_the_memory_of_the_device_is_refused():
    expect_room(0.0, CPU)
    expect_room(0.1, CPU)
    with pytest.raises(
        ValueError, match=r"expected runtime.state_gib of at most \d+, the GiB .* got 1e\+06; give less"
    ):
        expect_room(1e6, CPU)


def test_a_run_that_asks_for_more_memory_is_refused_before_it_trains(tmp_path):
    with pytest.raises(ValueError, match=r"expected runtime.state_gib of at most"):
        execute(config(tmp_path, "runtime.state_gib=1e6"))
    assert not Store(tmp_path).runs()


def test_states_of_an_inference_mode_can_be_overwritten():
    held = HeldStates(1000, CPU)
    with torch.inference_mode():
        held.keep(range(0, 2), 1, {"a": torch.ones(2, 3)})
    held.keep(range(0, 2), 2, {"a": torch.zeros(2, 3)})
    found = held.find(range(0, 2), 2)
    assert found is not None
    assert torch.equal(found["a"], torch.zeros(2, 3))


def test_a_group_without_room_is_never_held():
    held = HeldStates(24, CPU)
    assert held.keep(range(0, 2), 1, {"a": torch.ones(2, 3)})
    assert not held.keep(range(2, 4), 1, {"a": torch.ones(2, 3)})
    assert held.keep(range(0, 2), 2, {"a": torch.ones(2, 3)}), "its own room is free again"

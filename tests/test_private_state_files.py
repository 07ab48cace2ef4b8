"""Tests that private state on disk survives a kill, is shared by runs in a cache, and is checked for corruption."""

from __future__ import annotations

import gc
import json
import os

import numpy as np
import pytest
import torch

from dpgen_bench.privacy.bounds import PerRow
from dpgen_bench.privacy.sampling import OneShard
from dpgen_bench.privacy.state_file import StateFile, StatePlace
from tests.state_toys import BALANCED, count, open_data, prepare, taped, visit


def test_a_cache_is_shared_by_runs_and_marked_private(tmp_path):
    made = []

    def start(records, rng):
        made.append(len(records))
        return count(records, rng)

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


def test_a_killed_run_continues_from_its_checkpoint(tmp_path):
    """For any number of releases after the checkpoint, the next process finds each shard as of the checkpoint."""
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
    """Each group is made once, by any of the processes, and all read the same states."""
    from concurrent.futures import ThreadPoolExecutor

    made = []

    def start(records, rng):
        made.append(float(records[0][0].sum()))
        return count(records, rng)

    def run(_):
        data, _ = open_data(n=30, place=StatePlace(None, tmp_path, {}))
        sample = OneShard(10, "public_balanced")
        _, state = prepare(data, start=start, sample=sample, times=10)
        for group in range(state.groups):
            state.start(group)
        return [float(state._before_group(range(shard, shard + 1), 0)["sum"]) for shard in range(10)]

    gc.disable()  # CPython 3.11 before 3.11.8 fails if it collects while two threads parse (gh-106905), as NumPy does
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(run, range(4)))
    finally:
        gc.enable()
    assert len(made) == 10
    assert found[0] == found[1] == found[2] == found[3]
    assert sorted(found[0]) == sorted(made)


def test_missing_state_is_an_error(tmp_path):
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
    "corrupt",
    [
        empty,
        cut,
        lambda folder: (folder / "layout.json").write_text(""),
        lambda folder: (folder / "layout.json").write_text("[]"),
        lambda folder: (folder / "layout.json").write_text('{"a": [4]}'),
    ],
)
def test_damaged_files_are_named(tmp_path, corrupt):
    rows = StateFile(tmp_path / "rows", shards=2, slots=1)
    rows.write(0, 0, 1, {"a": torch.ones(3)})
    rows.flush()
    with pytest.raises(ValueError, match="cannot be used"):
        StateFile(tmp_path / "rows", shards=3, slots=1)
    corrupt(tmp_path / "rows")
    with pytest.raises(ValueError, match=r"cannot be used .*Delete"):
        StateFile(tmp_path / "rows", shards=2, slots=1)


def test_a_damaged_row_counts_as_missing_and_is_computed_again(tmp_path):
    place = StatePlace(tmp_path / "run", tmp_path / "cache", {})
    data, _ = open_data(place=place)
    _, state = prepare(data)
    for group in range(3):
        state.start(group)
    expected = [float(state._before_group(range(shard, shard + 1), 0)["sum"]) for shard in range(3)]
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
    assert [float(state._before_group(range(shard, shard + 1), 0)["sum"]) for shard in range(3)] == expected


@pytest.mark.parametrize("parts", [{"a": torch.ones(4)}, {"b": torch.ones(3)}, {"a": torch.ones(3).double()}])
def test_state_must_keep_its_names_and_shapes(parts):
    rows = StateFile(None, shards=2, slots=1)
    rows.write(0, 0, 1, {"a": torch.ones(3)})
    with pytest.raises(ValueError, match="same names and shapes"):
        rows.write(1, 0, 1, parts)


def test_one_file_holds_all_shards(tmp_path):
    rows = StateFile(tmp_path, shards=1000, slots=1)
    rows.write(999, 0, 5, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7.0)})
    rows.flush()
    again = StateFile(tmp_path, shards=1000, slots=1)
    slot, row = again.find(999, 5)
    assert (slot, row.tolist()) == (0, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0])
    assert again.find(999, 4) is None
    assert list(again.versions(3)) == [0]
    parts = again.read(999, 5, torch.device("cpu"))
    assert again.read(999, 4, torch.device("cpu")) is None
    assert torch.equal(parts["a"], torch.arange(6.0).reshape(2, 3))
    assert float(parts["b"]) == 7.0
    assert sum(path.suffix == ".npy" for path in tmp_path.iterdir()) == 1
    assert isinstance(again._rows, np.memmap)


def test_rows_of_a_group_are_those_of_its_shards_and_later_changes_of_the_tensors_do_not_reach_them():
    rows = StateFile(None, shards=3, slots=1)
    parts = {"step": torch.arange(3.0), "w": torch.arange(12.0).reshape(3, 2, 2), "b": torch.ones(3, 1)}
    packed = rows.pack(parts)
    parts["w"] += 100.0
    for shard, row in enumerate(packed()):
        rows.write_row(shard, 0, 1, row)
    for shard in range(3):
        one = rows.read(shard, 1, torch.device("cpu"))
        assert one["step"] == shard
        assert one["step"].shape == ()
        assert one["w"].tolist() == [[4.0 * shard, 4.0 * shard + 1.0], [4.0 * shard + 2.0, 4.0 * shard + 3.0]]
        assert one["b"].tolist() == [1.0]
    group = rows.unpack(np.stack([rows.find(shard, 1)[1] for shard in range(3)]), torch.device("cpu"))
    assert {name: part.shape for name, part in group.items()} == {"step": (3,), "w": (3, 2, 2), "b": (3, 1)}


def test_states_are_stored_by_name_in_any_order(tmp_path):
    file = StateFile(tmp_path, 1, slots=2)
    file.write(0, 0, 1, {"a": torch.zeros(2), "b": torch.ones(2)})
    file.write(0, 1, 2, {"b": torch.full((2,), 3.0), "a": torch.full((2,), 2.0)})
    found = file.read(0, 2, torch.device("cpu"))
    assert found is not None
    assert {name: part.tolist() for name, part in found.items()} == {"a": [2.0, 2.0], "b": [3.0, 3.0]}


def test_numbers_of_shards_stay_on_the_host():
    rows = StateFile(None, shards=2, slots=1)
    layout = {"step": torch.zeros(2), "w": torch.zeros(2, 3)}
    parts = rows.unpack(rows.pack(layout)(), torch.device("meta"))
    assert {name: part.device.type for name, part in parts.items()} == {"step": "cpu", "w": "meta"}


@pytest.mark.parametrize("in_file", [True, False])
def test_a_row_that_was_read_does_not_change_with_later_writes(tmp_path, in_file):
    rows = StateFile(tmp_path if in_file else None, shards=2, slots=2)
    rows.write(1, 0, 1, {"a": torch.ones(3)})
    _, row = rows.find(1, 1)
    state = rows.read(1, 1, torch.device("cpu"))
    rows.write(1, 0, 2, {"a": torch.zeros(3)})
    rows.write(1, 1, 3, {"a": torch.full((3,), 5.0)})
    assert row.tolist() == state["a"].tolist() == [1.0, 1.0, 1.0]
    state["a"] += 1.0
    assert [rows.find(1, version)[1].tolist() for version in (2, 3)] == [[0.0] * 3, [5.0] * 3]
    assert rows.find(1, 1) is None


def test_a_row_that_cannot_be_written_whole_is_an_error_and_leaves_its_old_version(tmp_path, monkeypatch):
    rows = StateFile(tmp_path, shards=1, slots=1)
    rows.write(0, 0, 1, {"a": torch.ones(3)})
    monkeypatch.setattr(os, "pwrite", lambda *arguments: 4)
    with pytest.raises(OSError, match=r"write 12 bytes .*got 4.*disk is full"):
        rows.write(0, 0, 2, {"a": torch.zeros(3)})
    assert rows.versions(0).tolist() == [1]

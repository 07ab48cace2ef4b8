"""Tests of trackers: they get the public scalars, each step once, and nothing private; a run does not need them."""

from __future__ import annotations

import functools
import json
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from dpgen_bench.runs.execute import execute
from dpgen_bench.store.folders import RunFolder
from dpgen_bench.training import tracker
from dpgen_bench.training.checkpoint import load_checkpoint
from tests import run_toys
from tests.run_toys import config, in_child, kill_at_rename

pytestmark = pytest.mark.usefixtures("one_thread_of_torch")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return execute(config(tmp_path_factory.mktemp("undisturbed")))


def contents(folder: RunFolder) -> dict[str, bytes]:
    """The contents of a run's files without its ledger, whose table of epsilons has a time limit here."""
    return {name: content for name, content in run_toys.contents(folder).items() if name != "ledger.json"}


def logged(folder: RunFolder) -> list[tuple[str, int, float]]:
    rows = [json.loads(line) for line in (folder.path / "log.jsonl").read_text().splitlines()]
    return [
        (f"{row['phase']}/{name}", row["step"], value)
        for row in rows
        for name, value in row.items()
        if name not in ("phase", "step")
    ]


def in_tensorboard(folder: RunFolder) -> list[tuple[str, int, float]]:
    """The scalars of all event files in a run's folder: tag, step and value."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    files = sorted((folder.path / "tensorboard").iterdir())
    events = [event for file in files for event in EventFileLoader(str(file)).Load()]
    return [
        (value.tag, event.step, float(make_ndarray(value.tensor))) for event in events for value in event.summary.value
    ]


def in_wandb(folder: RunFolder) -> tuple[list[dict[str, float]], dict[str, float]]:
    """The rows and the summary in the offline file of W&B in a run's folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = (folder.path / "wandb").glob("offline-run-*/*.wandb")
    content, position = file.read_bytes(), 7  # after the header
    assert len(content) < 2**15  # one block of LevelDB's log format, so that no record is split
    rows, summary = [], {}
    while position < len(content):
        _, length, kind = struct.unpack_from("<IHB", content, position)
        assert kind == 1
        record = Record()
        record.ParseFromString(content[position + 7 : position + 7 + length])
        position += 7 + length
        if record.HasField("history"):
            rows.append(_values(record.history.item))
        summary |= _values(record.summary.update)
    return rows, summary


def _values(items: Any) -> dict[str, Any]:
    return {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}


def measured(folder: RunFolder) -> float:
    [measurement] = folder.measurements.all()
    return measurement["repeats"][0]["metrics"]["brightness"]["values"]["brightness"]


def test_tensorboard_has_the_public_scalars_and_the_metrics(undisturbed, tmp_path):
    folder = execute(config(tmp_path, "tracker=tensorboard"))
    assert contents(folder) == contents(undisturbed)
    assert folder.id == undisturbed.id
    found = in_tensorboard(folder)
    assert [(tag, step) for tag, step, _ in found] == [
        *((tag, step) for tag, step, _ in logged(folder)),
        ("metrics/brightness", 0),
    ]
    expected = [*(value for _, _, value in logged(folder)), measured(folder)]
    assert [value for *_, value in found] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("number", [15, 21])
def test_a_step_is_in_tensorboard_once_after_the_run_was_killed_and_resumed(undisturbed, tmp_path, number, monkeypatch):
    """The run is killed when it writes a checkpoint, so that the last step is in the tracker and in no checkpoint."""
    write = tracker.TensorBoard.write

    def write_to_disk(self, row):
        write(self, row)
        self._writer.flush()

    monkeypatch.setattr(tracker.TensorBoard, "write", write_to_disk)
    make = functools.partial(config, tmp_path, "tracker=tensorboard")
    assert in_child(functools.partial(kill_at_rename, number, lambda: execute(make()))) < 0
    folder = RunFolder(tmp_path / "runs" / undisturbed.id)
    checkpoint = load_checkpoint(folder.path / "checkpoints" / "last.pt")
    assert 0 < checkpoint.phases["train"].steps < len(in_tensorboard(folder)) < len(logged(undisturbed))
    assert execute(make()).id == undisturbed.id
    steps = [(tag, step) for tag, step, _ in in_tensorboard(folder)]
    assert steps == [*((tag, step) for tag, step, _ in logged(undisturbed)), ("metrics/brightness", 0)]


def test_a_trained_run_that_is_only_measured_has_its_whole_log_in_the_tracker(undisturbed, tmp_path):
    shutil.copytree(undisturbed.path.parent.parent, tmp_path, dirs_exist_ok=True)
    folder = RunFolder(tmp_path / "runs" / undisturbed.id)
    shutil.rmtree(folder.path / "metrics")
    execute(config(tmp_path, "tracker=tensorboard"))
    assert len(in_tensorboard(folder)) == len(logged(folder)) + 1


class FailsAtStepTwo:
    """A tracker with an error in the middle of a run."""

    def __init__(self, folder: Path, title: str, settings: dict[str, object]) -> None:
        pass

    def write(self, row: dict[str, object]) -> None:
        if row["step"] == 2:
            raise OSError("no space left on device")

    def summary(self, values: dict[str, float]) -> None:
        raise AssertionError("called after a failure")

    def close(self) -> None:
        raise AssertionError("called after a failure")


def test_a_run_goes_on_without_a_tracker_that_fails(undisturbed, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(tracker.TRACKERS, "tensorboard", FailsAtStepTwo)
    folder = execute(config(tmp_path, "tracker=tensorboard"))
    assert contents(folder) == contents(undisturbed)
    warning = "the tracker tensorboard failed (OSError: no space left on device) and is switched off; the run goes on"
    assert capsys.readouterr().err.count(warning) == 1


def test_private_diagnostics_are_not_in_the_tracker(tmp_path):
    """The toy logs one public scalar; its diagnostics have the norms of records and the size of the batch."""
    folder = execute(config(tmp_path, "tracker=tensorboard", "privacy.diagnostics=unsafe"))
    rows = [json.loads(line) for line in (folder.path / "private" / "diagnostics.jsonl").read_text().splitlines()]
    assert rows
    assert {"mechanism", "release"} < rows[0].keys()  # so that the names below are those of private values, too
    assert {tag for tag, *_ in in_tensorboard(folder)} == {"train/mean", "metrics/brightness"}
    events = b"".join(file.read_bytes() for file in (folder.path / "tensorboard").iterdir())
    assert not [name for name in rows[0] if name not in ("mechanism", "release") and name.encode() in events]


@pytest.mark.slow
def test_weights_and_biases_is_offline_and_writes_into_the_runs_folder_only(tmp_path, monkeypatch):
    home, results = tmp_path / "home", tmp_path / "results"
    home.mkdir()
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.chdir(home)
    make = functools.partial(config, results, "tracker=wandb", "privacy.diagnostics=unsafe")
    assert in_child(functools.partial(kill_at_rename, 18, lambda: execute(make()))) < 0
    folder = execute(make())
    rows, summary = in_wandb(folder)
    names = ("train/step", "train/mean")
    assert [tuple(row[name] for name in names) for row in rows] == [
        (step, pytest.approx(value)) for _, step, value in logged(folder)
    ]
    assert summary["metrics/brightness"] == pytest.approx(measured(folder))
    assert {key for row in rows for key in row if not key.startswith("_")} == set(names)
    assert not list(home.rglob("*wandb*"))
    private = (folder.path / "private" / "diagnostics.jsonl").read_text()
    assert "norms" in private
    for file in (folder.path / "wandb").rglob("*"):
        assert not file.is_file() or b"norms" not in file.read_bytes()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandbb", r"expected tracker=tensorboard or tracker=wandb, or null.*got 'wandbb' \(did you mean 'wandb'\?\)"),
        ("3", "got 3"),
        ("tensorboard", r"expected the package tensorboard .*pip install 'dpgen-bench\[tensorboard\]'"),
    ],
)
def test_a_tracker_that_cannot_be_used_is_refused_before_anything_is_written(name, message, tmp_path, monkeypatch):
    monkeypatch.setattr(tracker, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=message):
        execute(config(tmp_path, f"tracker={name}"))
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_tracker_loads_none(tmp_path):
    """The packages of trackers are slow to import."""
    before = {"tensorboard", "wandb"} & sys.modules.keys()
    folder = execute(config(tmp_path))
    assert {"tensorboard", "wandb"} & sys.modules.keys() == before
    assert not [path for path in folder.path.iterdir() if path.name in ("tensorboard", "wandb")]

"""What makes a run's folder unusable, and what does not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dpgen_bench.runs.store import RunFolder, Store
from dpgen_bench.runs.validation import file_problem, folder_problem
from tests.report_toys import DEMO, make_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("made"), DEMO, "privacy.epsilon=10")


@pytest.fixture
def folder(made: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy that a test may spoil."""
    shutil.copytree(made.path, tmp_path / "runs" / made.id)
    return Store(tmp_path).folder(made.id)


def test_a_run_as_it_is_left_is_whole(folder: RunFolder) -> None:
    assert folder_problem(folder) == ""


def test_what_is_not_there_yet_is_no_damage(folder: RunFolder, tmp_path: Path) -> None:
    assert folder_problem(Store(tmp_path).folder("0123456789ab")) == ""
    empty = Store(tmp_path).folder("ba9876543210")
    empty.path.mkdir()
    assert folder_problem(empty) == ""
    (empty.path / "config.yaml").write_text((folder.path / "config.yaml").read_text())  # killed before the next file
    assert folder_problem(empty) == ""


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda f: (f.path / "config.yaml").unlink(), "config.yaml cannot be read"),
        (lambda f: (f.path / "config.yaml").write_text("{"), "config.yaml cannot be read"),
        (lambda f: (f.path / "config.yaml").write_text("- 1"), "config.yaml cannot be read"),
        (lambda f: (f.path / "identity.json").unlink(), "it does not say which run it is"),
        (lambda f: f.write_json("identity.json", {}), "it does not say which run it is"),
        (lambda f: (f.path / "ledger.json").write_text('{"unit": '), "ledger.json cannot be read"),
        (lambda f: (f.path / "ledger.json").write_bytes(b"\xff\xfe\x00"), "ledger.json cannot be read"),
        (lambda f: (f.path / "training.json").write_text("[1, 2]"), "training.json is not what a run leaves"),
        (lambda f: (f.path / "status.json").write_text('"done"'), "status.json is not what a run leaves"),
    ],
)
def test_damage_is_told_whatever_the_folder_is_called(folder: RunFolder, spoil: Callable, why: str) -> None:
    spoil(folder)
    told = folder_problem(folder)
    assert re.search(why, told), told
    assert file_problem(folder) == told
    assert str(folder.path.parent) not in told


def test_a_report_that_cannot_be_read_is_no_damage(folder: RunFolder) -> None:
    (path,) = (folder.path / "metrics").glob("*.json")
    path.write_text("{")
    assert folder_problem(folder) == ""


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "0123456789ab").write_text("x")
    assert folder_problem(Store(tmp_path).folder("0123456789ab")) == "it is a file, not a folder"


def test_a_folder_with_another_run_than_it_is_called(folder: RunFolder) -> None:
    other = RunFolder(folder.path.rename(folder.path.with_name("0123456789ab")))
    assert folder_problem(other) == f"it holds run {folder.id}"
    assert file_problem(other) == ""


def test_an_edited_identity_is_another_run(folder: RunFolder) -> None:
    identity = json.loads((folder.path / "identity.json").read_text())
    folder.write_json("identity.json", {**identity, "training_version": 99})
    assert folder_problem(folder).startswith("it holds run ")

"""Tests of `folder_problem`: which faults make a run's folder unusable, and which do not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dpgen_bench.runs.validation import file_problem, folder_problem
from dpgen_bench.store.folders import RunFolder, Store
from tests.report_toys import DEMO, make_run


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("original"), DEMO, "privacy.epsilon=10")


@pytest.fixture
def folder(original: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy that a test may change."""
    shutil.copytree(original.path, tmp_path / "runs" / original.id)
    return Store(tmp_path).folder(original.id)


def test_a_finished_run_has_no_problem(folder: RunFolder) -> None:
    assert folder_problem(folder) == ""


def test_missing_files_of_a_new_run_are_no_problem(folder: RunFolder, tmp_path: Path) -> None:
    assert folder_problem(Store(tmp_path).folder("0123456789ab")) == ""
    empty = Store(tmp_path).folder("ba9876543210")
    empty.path.mkdir()
    assert folder_problem(empty) == ""
    (empty.path / "config.yaml").write_text((folder.path / "config.yaml").read_text())  # killed before the next file
    assert folder_problem(empty) == ""


@pytest.mark.parametrize(
    ("corrupt", "problem"),
    [
        (lambda f: (f.path / "config.yaml").unlink(), "config.yaml cannot be read"),
        (lambda f: (f.path / "config.yaml").write_text("{"), "config.yaml cannot be read"),
        (lambda f: (f.path / "config.yaml").write_text("- 1"), "config.yaml cannot be read"),
        (
            lambda f: (f.path / "identity.json").unlink(),
            "its identity.json is missing, so it is unknown which run it is",
        ),
        (lambda f: f.write_json("identity.json", {}), "its identity.json is missing, so it is unknown which run it is"),
        (lambda f: (f.path / "ledger.json").write_text('{"unit": '), "ledger.json cannot be read"),
        (lambda f: (f.path / "ledger.json").write_bytes(b"\xff\xfe\x00"), "ledger.json cannot be read"),
        (lambda f: (f.path / "training.json").write_text("[1, 2]"), "training.json is not a JSON object"),
        (lambda f: (f.path / "status.json").write_text('"done"'), "status.json is not a JSON object"),
    ],
)
def test_corrupt_files_are_a_problem(folder: RunFolder, corrupt: Callable, problem: str) -> None:
    corrupt(folder)
    message = folder_problem(folder)
    assert re.search(problem, message), message
    assert file_problem(folder) == message
    assert str(folder.path.parent) not in message


def test_a_measurement_that_cannot_be_read_is_no_problem(folder: RunFolder) -> None:
    (path,) = (folder.path / "metrics").glob("*.json")
    path.write_text("{")
    assert folder_problem(folder) == ""


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "0123456789ab").write_text("x")
    assert folder_problem(Store(tmp_path).folder("0123456789ab")) == "it is a file, not a folder"


def test_a_folder_that_holds_another_run_than_its_name_says(folder: RunFolder) -> None:
    other = RunFolder(folder.path.rename(folder.path.with_name("0123456789ab")))
    assert folder_problem(other) == f"it holds run {folder.id}"
    assert file_problem(other) == ""


def test_an_edited_identity_is_another_run(folder: RunFolder) -> None:
    identity = json.loads((folder.path / "identity.json").read_text())
    folder.write_json("identity.json", {**identity, "training_version": 99})
    assert folder_problem(folder).startswith("it holds run ")

"""What makes a run's folder unusable, and what does not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dpgen_bench.runs.store import RunFolder, Store
from dpgen_bench.runs.validation import content_damage, damage
from tests.report_toys import DEMO, make_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("made"), DEMO, "privacy.epsilon=10")


@pytest.fixture
def folder(made: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy that a test may spoil."""
    shutil.copytree(made.path, tmp_path / "runs" / made.id)
    return Store(tmp_path).folder(made.id)


def edit(folder: RunFolder, name: str, change: Callable[[dict], object]) -> None:
    content = folder.read_json(name)
    change(content)
    folder.write_json(name, content)


def report_of(folder: RunFolder) -> str:
    (path,) = (folder.path / "metrics").glob("*.json")
    return f"metrics/{path.name}"


def values(report: dict) -> dict:
    return report["repeats"][0]["metrics"]["all"]["values"]


def replace(folder: RunFolder, old: str, new: str) -> None:
    path = folder.path / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_a_run_as_it_is_left_is_whole(folder: RunFolder) -> None:
    assert damage(folder) == ""


def test_what_is_not_there_yet_is_no_damage(folder: RunFolder, tmp_path: Path) -> None:
    assert damage(Store(tmp_path).folder("0123456789ab")) == ""
    empty = Store(tmp_path).folder("ba9876543210")
    empty.path.mkdir()
    assert damage(empty) == ""
    (empty.path / "config.yaml").write_text((folder.path / "config.yaml").read_text())  # killed before the next file
    assert damage(empty) == ""


def test_without_privacy_infinities_are_words_and_no_edits(tmp_path: Path) -> None:
    assert damage(make_run(tmp_path, DEMO, "privacy.epsilon=inf")) == ""


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda f: (f.path / "config.yaml").unlink(), "config.yaml is missing"),
        (lambda f: (f.path / "config.yaml").write_text("{"), "config.yaml cannot be read"),
        (lambda f: (f.path / "config.yaml").write_text("- 1"), "config.yaml is not what a run leaves"),
        (lambda f: replace(f, "seed: 0", "seed: 1"), "disagree about seed: one was edited"),
        (lambda f: replace(f, "epsilon: 10", "epsilon: 1"), "disagree about privacy: one was edited"),
        (lambda f: replace(f, "name: digits", "name: mnist"), r"disagree about dataset\.name"),
        (lambda f: (f.path / "identity.json").unlink(), "it does not say which run it is"),
        (lambda f: f.write_json("identity.json", {}), "it does not say which run it is"),
        (lambda f: (f.path / "ledger.json").write_text('{"unit": '), "ledger.json cannot be read"),
        (lambda f: (f.path / "ledger.json").write_bytes(b"\xff\xfe\x00"), "ledger.json cannot be read"),
        (lambda f: (f.path / "training.json").write_text("[1, 2]"), "training.json is not what a run leaves"),
        (lambda f: (f.path / "status.json").write_text('"done"'), "status.json is not what a run leaves"),
        (lambda f: edit(f, "ledger.json", lambda c: c.update(epsilon=[1])), "ledger.json is not what a run leaves"),
        (lambda f: edit(f, "ledger.json", lambda c: c["epsilon"].update(proven="abc")), "the ε proven .* is no number"),
        (lambda f: edit(f, "ledger.json", lambda c: c["epsilon"].update(proven="9.9")), "the ε proven .* is no number"),
        (lambda f: edit(f, "ledger.json", lambda c: c["epsilon"].update(proven=True)), "the ε proven .* is no number"),
        (lambda f: edit(f, "ledger.json", lambda c: c["epsilon"].update(proven=float("nan"))), "the ε proven"),
        (lambda f: edit(f, "ledger.json", lambda c: c["epsilon"].update(server={"x": 1})), "the ε server .* is not"),
        (lambda f: edit(f, "training.json", lambda c: c["seconds"].update(train="6")), "not what a run leaves"),
        (lambda f: edit(f, "training.json", lambda c: c["parameters"].update(g="166")), "g in training.json is no"),
        (lambda f: edit(f, "training.json", lambda c: c.update(seconds=[6.0])), "not what a run leaves"),
        (lambda f: edit(f, report_of(f), lambda c: values(c).update(fid="50.0")), "fid in a report .* is no number"),
        (lambda f: edit(f, report_of(f), lambda c: values(c).update(fid=None)), "fid in a report .* is no number"),
        (lambda f: edit(f, report_of(f), lambda c: values(c).update(fid=10**400)), "fid in a report .* is no number"),
    ],
)
def test_damage_is_told_whatever_the_folder_is_called(folder: RunFolder, spoil: Callable, why: str) -> None:
    spoil(folder)
    told = damage(folder)
    assert re.search(why, told), told
    assert content_damage(folder) == told
    assert str(folder.path.parent) not in told


def test_a_claim_whose_count_failed_is_no_damage(folder: RunFolder) -> None:
    edit(folder, "ledger.json", lambda c: c["epsilon"].update(claimed="failed: ValueError: no", proven="inf"))
    assert damage(folder) == ""


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_a_figure_that_is_not_finite_is_no_damage(folder: RunFolder, value: str) -> None:
    edit(folder, report_of(folder), lambda c: values(c).update(fid=float(value)))
    assert value in (folder.path / report_of(folder)).read_text()
    assert damage(folder) == ""


def test_a_report_that_cannot_be_read_is_no_damage(folder: RunFolder) -> None:
    (folder.path / report_of(folder)).write_text("{")
    assert damage(folder) == ""


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "0123456789ab").write_text("x")
    assert damage(Store(tmp_path).folder("0123456789ab")) == "it is a file, not a folder"


def test_a_folder_with_another_run_than_it_is_called(folder: RunFolder) -> None:
    other = RunFolder(folder.path.rename(folder.path.with_name("0123456789ab")))
    assert damage(other) == f"it holds run {folder.id}"
    assert content_damage(other) == ""


def test_an_edited_identity_is_another_run(folder: RunFolder) -> None:
    identity = json.loads((folder.path / "identity.json").read_text())
    folder.write_json("identity.json", {**identity, "training_version": 99})
    assert damage(folder).startswith("it holds run ")

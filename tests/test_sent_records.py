"""Records that others send, or that are damaged: nothing of them is called, and what is wrong is named."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpgen_bench.outcomes.record_checks import record_problems
from dpgen_bench.outcomes.recording import make_record
from dpgen_bench.store.records import Record, read_record
from tests.run_toys import recordable_run


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return make_record(recordable_run(tmp_path_factory.mktemp("results")), "Ada")[0]


@pytest.mark.parametrize("place", ["config", "command"])
@pytest.mark.parametrize("group", ["method", "dataset", "init"])
def test_a_record_that_names_another_function_is_refused_without_a_call(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, place: str
) -> None:
    """Others send records, and `dpgen record --check` builds the run that their config describes."""
    monkeypatch.chdir(tmp_path)
    content = copy.deepcopy(record.content)
    if place == "config":
        content["config"][group] = {"_target_": "numpy.savez", "file": "written", "name": "evil"}
    else:
        overrides = [f"{group}._target_=numpy.savez", f"+{group}.file=written"]
        content["command"] = [*content["command"], *(["init=gauss"] if group == "init" else []), *overrides]
    problems = record_problems(Record(record.path, content), data_root="unused")
    assert any(f"names numpy.savez as a part of its {group}, which was not called" in each for each in problems)
    assert not list(tmp_path.rglob("written*"))


def test_a_nested_function_of_a_library_is_refused_too(record: Record) -> None:
    content = copy.deepcopy(record.content)
    content["config"]["dataset"]["base"] = {"_target_": "torch.load", "f": "x"}
    problems = record_problems(Record(record.path, content), data_root="unused")
    assert any("names torch.load as a part of its dataset" in each for each in problems)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda content: content.pop("measurements"), "KeyError: 'measurements'"),
        (lambda content: content.pop("measured_by"), "KeyError: 'measured_by'"),
        (lambda content: content.update(config=None), "AttributeError: "),
        (
            lambda content: content["measurements"][0]["repeats"][0]["metrics"]["brightness"]["values"].update(x="9.5"),
            "TypeError: expected a number as x, got '9.5'",
        ),
        (lambda content: content.update(schema=2), "expected a record of schema 1 in "),
    ],
)
def test_a_damaged_record_is_named_with_what_is_damaged(
    record: Record, tmp_path: Path, damage: Callable[[dict[str, Any]], Any], what: str
) -> None:
    content = copy.deepcopy(record.content)
    damage(content)
    path, link = tmp_path / "0123456789ab.json", tmp_path / "link.json"
    path.write_text(json.dumps(content))
    link.symlink_to(path)
    with pytest.raises(ValueError, match=re.escape(what)) as raised:
        read_record(link)
    assert str(path.resolve()) in str(raised.value)

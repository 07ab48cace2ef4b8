"""`dpgen audit RUN`: what it writes into the ledger of a run, what it says otherwise, and edited runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dpgen_bench.audit.methods import audit_method, expect_planned
from dpgen_bench.cli import main
from dpgen_bench.config.spec import build_spec
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.runs.execute import execute
from dpgen_bench.runs.plan import plan_spec
from dpgen_bench.store.folders import RunFolder
from dpgen_bench.testing.errors import ConformanceError
from tests.run_toys import config
from tests.toys import MeanImage

AUDIT = ("--level", "c", "--trials")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return execute(config(tmp_path_factory.mktemp("results"), "method.name=dp_mean"))


@pytest.fixture
def run(made: RunFolder, tmp_path: Path) -> RunFolder:
    shutil.copytree(made.path, tmp_path / "runs" / made.id)
    return RunFolder(tmp_path / "runs" / made.id)


def audit(run: RunFolder, *arguments: str) -> int:
    return main(["audit", run.id[:6], *arguments, "--results", str(run.path.parents[1])])


def certified(run: RunFolder) -> Any:
    return run.read_json("ledger.json")["epsilon"].get("certified")


def edit_json(run: RunFolder, edit: Callable[[Any], Any]) -> None:
    path = run.path / "ledger.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_a_weaker_audit_does_not_replace_a_stronger_one(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(run, *AUDIT, "500") == 0
    strong = certified(run)
    assert strong["trials"] == 500
    assert "written    to" in capsys.readouterr().out
    assert audit(run, *AUDIT, "10") == 0
    assert certified(run) == strong
    assert "an audit with more trials, 500" in capsys.readouterr().out
    assert audit(run, *AUDIT, "600", "--seed", "3") == 0
    assert certified(run)["attack"]["certified"]["seed"] == 3


def test_json_writes_what_the_text_writes(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(run, *AUDIT, "500", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["written"]
    assert certified(run)["attack"]["certified"] == result["certified"]
    assert audit(run, *AUDIT, "500", "--relation", "replace_one", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["written"], result["why_not_written"]) == (False, "the budget of the run is for add_remove")


def test_an_unfinished_run_says_why_nothing_is_written(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(run, lambda ledger: ledger.update(epsilon=None))
    assert audit(run, *AUDIT, "50") == 0
    assert "not written to the ledger of the run: the run is not finished" in capsys.readouterr().out


@pytest.mark.parametrize("edited", ["config", "ledger", "budget"])
def test_an_edited_run_is_not_audited(run: RunFolder, edited: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise the ledger would have a certified epsilon of other mechanisms, above its proven one."""
    if edited == "config":
        changed = run.config
        changed.privacy.epsilon = 99.0
        OmegaConf.save(changed, run.path / "config.yaml")
    elif edited == "ledger":
        edit_json(run, lambda ledger: ledger["entries"][0].update(std=0.5 * ledger["entries"][0]["std"]))
    else:
        edit_json(run, lambda ledger: ledger["budget"].update(delta=1e-3))
    assert audit(run, *AUDIT, "50") == 2
    assert "was changed after the run" in capsys.readouterr().err
    assert certified(run) is None


def test_a_run_without_a_ledger_is_named_before_anything_is_audited(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / "ledger.json").unlink()
    assert audit(run, *AUDIT, "50") == 2
    captured = capsys.readouterr()
    assert "expected a ledger of run" in captured.err
    assert captured.out == ""


def test_the_ledger_of_a_run_is_that_of_its_plan(run: RunFolder) -> None:
    planned = plan_spec(build_spec(run.config))
    expect_planned(Ledger.from_dict(run.read_json("ledger.json")), planned)
    other = replace(planned, budget=replace(planned.budget, epsilon=2.0))
    with pytest.raises(ValueError, match="was changed after the run"):
        expect_planned(other, planned)


@dataclass
class Claiming(MeanImage):
    """Its paper claims nearly nothing, under the other relation than the budget's."""

    claimed_relation = "replace_one"

    def epsilon_claimed(self, events: Any, delta: float) -> float:
        return 1e-3


def test_a_claim_of_another_relation_is_not_refuted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = build_spec(config(tmp_path, target="tests.test_audit_runs.Claiming"))
    own = audit_method(spec, "replace_one", levels="c", trials=2000)
    other = audit_method(spec, "add_remove", levels="c", trials=2000)
    assert own.refuted == ["claimed"]
    assert other.certificate is not None
    assert other.certificate.strongest > 1e-3
    assert other.refuted == []
    assert not other.failed


def test_a_refuted_replay_is_json_if_json_is_asked_for(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refute(*_: object, **__: object) -> None:
        raise ConformanceError("control flow depends on the data")

    monkeypatch.setattr("dpgen_bench.audit.command.audit_method", refute)
    assert audit(run, "--json") == 1
    result = {"refuted": True, "fault": "control flow depends on the data"}
    assert json.loads(capsys.readouterr().out) == result


def test_a_method_without_noise_has_none_to_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = execute(config(tmp_path, "method.name=dp_mean", "privacy.epsilon=inf"))
    assert audit(folder, "--level", "b") == 0
    out = capsys.readouterr().out
    assert "the noise was not tested: none is stated" in out

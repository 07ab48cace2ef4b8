"""`dpgen record --audit` certifies an epsilon for records, and records with edited audits are refused."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dpgen_bench.audit.certified import certified_problems, certify_run, why_nothing_is_certified, with_certified
from dpgen_bench.audit.methods import audit_method
from dpgen_bench.cli import main
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import identify
from dpgen_bench.outcomes import record_checks
from dpgen_bench.outcomes.recording import make_record, write_record
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import OneClient
from dpgen_bench.store.folders import RunFolder, Store
from dpgen_bench.store.records import Record, read_record, record_paths
from dpgen_bench.utils.paths import RECORDS
from tests.run_toys import RECORDABLE, recordable_run

TRIALS = 2000
quick_audit = partial(audit_method, trials=TRIALS)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return recordable_run(tmp_path_factory.mktemp("results"))


@pytest.fixture(autouse=True)
def protocol_is_known(finished: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in tests/test_records.py; audits have few trials."""
    monkeypatch.setattr("dpgen_bench.audit.certified.audit_method", quick_audit)
    monkeypatch.setattr(record_checks, "ACCOUNT_S", 0.01)
    protocol = finished.measurements.all()[0]["protocol"]
    monkeypatch.setattr(record_checks, "current_protocol", lambda name: protocol)
    known = lambda overrides: finished.config if overrides == RECORDABLE else compose_config(overrides)  # noqa: E731
    monkeypatch.setattr(record_checks, "compose_config", known)


@pytest.fixture(scope="module")
def audited(finished: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """A record of the run, audited without the run."""
    made, picture = make_record(finished, "Ada")
    results = tmp_path_factory.mktemp("clone")
    record = Record(results / "records" / "dp_mean" / made.path.name, made.content)
    write_record(record, picture)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpgen_bench.audit.certified.audit_method", quick_audit)
        certified = certify_run(record, results, "unused")
    write_record(with_certified(record, certified), picture)
    return read_record(record.path)


def certified_of(record: Record) -> dict[str, Any]:
    certified: dict[str, Any] = record.content["ledger"]["epsilon"]["certified"]
    return certified


def test_a_records_certified_epsilon_is_at_most_the_proven_one_and_is_accepted(audited: Record) -> None:
    certified = certified_of(audited)
    assert 1.0 < certified["epsilon"] <= audited.content["ledger"]["epsilon"]["proven"]
    assert (certified["level"], certified["trials"], certified["confidence"]) == ("c", TRIALS, 0.95)
    assert (certified["run"], certified["seed"]) == (audited.id, 0)
    assert record_checks.record_problems(audited) == []
    assert certified_problems(audited) == []


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a larger epsilon": (lambda c: c.update(epsilon=1.3 * c["epsilon"]), "by its trials drawn again"),
    "a smaller epsilon": (lambda c: c.update(epsilon=0.0), "by its trials drawn again"),
    "a larger model-free epsilon of its attack": (
        lambda c: c["attack"]["certified"].update(epsilon=c["attack"]["certified"]["epsilon"] + 1.0),
        "has an attack with epsilon ",
    ),
    "another figure": (lambda c: c.update(figure="model-free" if c["figure"] == "gdp" else "gdp"), "is called "),
    "another confidence": (lambda c: c.update(confidence=0.99), "has a confidence of 0.99, expected 0.95"),
    "more trials": (lambda c: c.update(trials=TRIALS + 1), "another confidence, level or number of trials than its"),
    "another relation": (lambda c: c.update(relation="replace_one"), "is for relation add_remove, expected add_remove"),
    "another delta": (lambda c: c["attack"].update(delta=0.1), "is for delta 0.1, expected 1e-05"),
    "the audit of another run": (lambda c: c.update(run="0" * 12), "is that of run 000000000000, expected "),
    "the audit of another seed": (lambda c: c.update(seed=1), "these settings with seed 1"),
    "a release that moves further than declared": (
        lambda c: mechanism_of(c)["moved"].update(second=1e3),
        "that moves by 1000, declared ",
    ),
    "a release that moves less": (lambda c: mechanism_of(c)["moved"].update(second=0.0), "by its trials drawn again"),
    "less noise": (lambda c: mechanism_of(c).update(std=1e-3), "with another noise, sampling or number of releases"),
    "more releases": (lambda c: mechanism_of(c).update(times=7), "with another noise, sampling or number of releases"),
    "a mechanism that the run does not have": (
        lambda c: mechanism_of(c).update(name="another"),
        "attacks 'another', which its ledger does not have",
    ),
    "an audit that found a fault": (
        lambda c: c["attack"].update(noise={"sum": ["it is not normal"]}),
        "found wrong noise of 'sum'",
    ),
    "a reason in place of a value": (
        lambda c: (c.clear(), c.update(epsilon=None, reason="it takes long")),
        "is 'it takes long', expected 'a certified ε' by its ledger",
    ),
}


def test_a_certified_epsilon_above_the_proven_one_is_refused(audited: Record) -> None:
    problems = record_checks.record_problems(with_certified(audited, {**certified_of(audited), "epsilon": 99.0}))
    assert any("its certified ε is 99.0, expected at most the proven" in problem for problem in problems)


def mechanism_of(certified: dict[str, Any]) -> dict[str, Any]:
    mechanism: dict[str, Any] = certified["attack"]["certified"]["mechanisms"][0]
    return mechanism


@pytest.mark.parametrize("name", EDITS)
def test_a_record_with_an_edited_audit_is_refused(audited: Record, name: str) -> None:
    edit, reason = EDITS[name]
    content = copy.deepcopy(audited.content)
    edit(content["ledger"]["epsilon"]["certified"])
    edited = Record(audited.path, content)
    assert [*record_checks._form(edited)] == [], "it is refused for more than its form"
    assert any(reason in problem for problem in certified_problems(edited)), certified_problems(edited)


@pytest.mark.parametrize(
    ("key", "value"), [("level", "d"), ("trials", 0), ("epsilon", -1.0), ("epsilon", "inf"), ("attack", {})]
)
def test_a_certified_epsilon_of_another_form_is_refused(audited: Record, key: str, value: Any) -> None:
    content = copy.deepcopy(audited.content)
    content["ledger"]["epsilon"]["certified"][key] = value
    assert any("certified" in text for text in record_checks.record_problems(Record(audited.path, content)))


def test_the_verb_audits_a_run_once_for_all_of_its_seeds(
    finished: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished.path, tmp_path / "runs" / finished.id)
    arguments = ["record", finished.id, "--by", "Ada", "--audit", "--results", str(tmp_path)]
    assert main(arguments) == 0
    (path,) = record_paths(tmp_path).values()
    certified = certified_of(read_record(path))
    assert certified == Store(tmp_path).find(finished.id).read_json("ledger.json")["epsilon"]["certified"]
    assert main(["record", "--check", "--results", str(tmp_path)]) == 0

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a run with these settings was audited already")

    monkeypatch.setattr("dpgen_bench.audit.certified.audit_method", fail)
    assert main([*arguments, "--overwrite"]) == 0
    identity = {**finished.read_json("identity.json"), "seed": 1}
    other = tmp_path / "runs" / identify(identity)
    shutil.copytree(finished.path, other)
    (other / "identity.json").write_text(json.dumps(identity))
    OmegaConf.save(OmegaConf.merge(finished.config, {"seed": 1}), other / "config.yaml")
    shared = certify_run(RunFolder(other), tmp_path, "unused")
    assert shared == certified
    least = {**certified, "epsilon": 0.5}
    write_record(with_certified(read_record(path), least), read_record(path).picture.read_bytes())
    assert certify_run(RunFolder(other), tmp_path, "unused") == least
    capsys.readouterr()


def test_a_record_whose_run_is_elsewhere_is_audited(
    audited: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = copy.deepcopy(audited.content)
    del content["ledger"]["epsilon"]["certified"]
    path = tmp_path / "records" / "dp_mean" / audited.path.name
    write_record(Record(path, content), audited.picture.read_bytes())
    assert main(["record", audited.id[:6], "--audit", "--results", str(tmp_path)]) == 0
    assert read_record(path).content == audited.content
    assert capsys.readouterr().out.strip() == str(path)


def ledger_with(record: Record, **changes: Any) -> Ledger:
    content = copy.deepcopy(record.content["ledger"])
    for entry in content["entries"]:
        entry.update(changes)
    return Ledger.from_dict(content)


def test_runs_without_noise_or_releases_say_why_nothing_is_certified(audited: Record) -> None:
    assert why_nothing_is_certified(ledger_with(audited)) == ""
    assert why_nothing_is_certified(ledger_with(audited, std=0.0)) == "its releases have no noise"
    limited = OneClient(10, max_answers=1).to_dict()
    assert "the limit ties rounds" in why_nothing_is_certified(ledger_with(audited, sampling=limited))
    content = copy.deepcopy(audited.content)
    content["ledger"]["entries"] = []
    del content["ledger"]["epsilon"]["certified"]
    empty = Record(audited.path, content)
    assert certified_problems(empty) == []
    certified = certify_run(empty, audited.path.parents[2], "unused")
    assert certified == {"epsilon": None, "reason": "it makes no release"}
    assert certified_problems(with_certified(empty, certified)) == []
    wrong = with_certified(empty, {"epsilon": None, "reason": "its releases have no noise"})
    assert "expected 'it makes no release' by its ledger" in certified_problems(wrong)[0]
    stated = with_certified(empty, certified_of(audited))
    assert "expected 'it makes no release' by its ledger" in certified_problems(stated)[0]


COMMITTED = [*record_paths(RECORDS.parent).values()]
# Their audits pretrain for ten minutes or more of a core before the first noisy step.
# `dpgen record ID --audit` adds what it certifies; until then tables say that these lines are not audited.
# DPGAN with batches of 2,048 and a first stage, DPDM with batches of 1,600 or 4,000 and one, GS-WGAN with 2,000 steps
# on the images of one, and PSG with 1,000 updates on them.
NOT_AUDITED_YET = {
    "10b783600e6f",
    "4a504ee679de",
    "6596bb2009b5",
    "70f949161961",
    "7e901ea0e193",
    "b0963cc82ead",
    "d7f38735a368",
}


def test_what_is_refused_as_a_record_is_refused_before_an_audit(
    finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished.path, tmp_path / "runs" / finished.id)
    arguments = ["record", finished.id, "--by", "Ada", "--results", str(tmp_path)]
    assert main(arguments) == 0
    monkeypatch.setattr("dpgen_bench.cli.records.certify_run", lambda *given: pytest.fail("it was audited"))
    assert main([*arguments, "--audit"]) == 2
    assert "by somebody else than 'Ada'" in capsys.readouterr().err


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_record_carries_a_certified_epsilon_or_says_why_not(path: Path) -> None:
    """`dpgen record ID --audit` adds it to a record that has none."""
    if path.stem in NOT_AUDITED_YET:
        assert "certified" not in read_record(path).content["ledger"]["epsilon"]
        return
    certified = certified_of(read_record(path))
    if certified["epsilon"] is None:
        assert certified["reason"]
    else:
        assert 0.0 <= certified["epsilon"] <= read_record(path).content["ledger"]["epsilon"]["proven"]
        assert (certified["level"], certified["confidence"]) == ("c", 0.95)
        assert certified["trials"] >= 100_000


@pytest.mark.slow
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_certified_epsilon_of_a_committed_record_is_accepted(path: Path) -> None:
    assert certified_problems(read_record(path)) == []

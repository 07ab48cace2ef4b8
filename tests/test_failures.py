"""Tests private functions that raise: the mark in the ledger, epsilon, the operator's statement, and private texts."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import traceback

import pytest
from omegaconf import OmegaConf

from dpgen_bench import cli
from dpgen_bench.data.private import PrivateData
from dpgen_bench.outcomes.listing import is_unbounded
from dpgen_bench.outcomes.overview import overview, row
from dpgen_bench.outcomes.sample_command import NotForRelease, sample_run
from dpgen_bench.privacy.bounds import PerRow
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.isolation import UNNAMED
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Entry, Ledger
from dpgen_bench.privacy.sampling import Full, OneShard
from dpgen_bench.privacy.services import Services
from dpgen_bench.runs.execute import RunFailed, execute
from dpgen_bench.store.folders import RunFolder, Store
from tests import toys
from tests.failure_toys import SECRET
from tests.run_toys import config, in_child

pytestmark = pytest.mark.usefixtures("one_thread_of_torch")

STATED = "runtime.failures_independent_of_records=true"


@pytest.fixture
def flag(tmp_path):
    path = tmp_path / "flag"
    path.touch()
    return path


def make(tmp_path, flag, then="nothing", *overrides):
    composed = config(tmp_path / "results", "privacy.noise=os", *overrides, target="tests.failure_toys.Raises")
    OmegaConf.update(composed, "method", {"flag": str(flag), "then": then})
    return composed


def the_run(tmp_path) -> RunFolder:
    (run,) = Store(tmp_path / "results").runs()
    return run


def ledger_of(tmp_path) -> Ledger:
    return Ledger.load(the_run(tmp_path).path / "ledger.json")


def public_text(run: RunFolder) -> str:
    files = [
        path for path in run.path.rglob("*") if path.is_file() and "private" not in path.relative_to(run.path).parts
    ]
    return "\n".join(path.read_bytes().decode(errors="replace") for path in files)


# --- the mark and its consequences ------------------------------------------------------------------------------------


def test_a_later_attempt_proves_nothing_without_a_statement_of_the_operator(tmp_path, flag, capsys):
    with pytest.raises(
        RunFailed, match=r"release 2 of 'sum' raised an exception type of the plugin.*an answer without noise"
    ):
        execute(make(tmp_path, flag))
    (failure,) = ledger_of(tmp_path).failures
    assert (failure.what, failure.statement) == ("release 2 of 'sum' raised an exception type of the plugin", None)
    assert row(overview(the_run(tmp_path)))[7] == "inf"  # the proven epsilon, before it is computed
    flag.unlink()
    capsys.readouterr()
    run = execute(make(tmp_path, flag))
    assert "in an earlier attempt, release 2 of 'sum' raised an exception type of the plugin" in capsys.readouterr().err
    assert run.done
    epsilon = ledger_of(tmp_path).epsilon
    assert epsilon is not None
    assert epsilon["proven"] == "inf"
    assert epsilon["reason"].startswith("release 2 of 'sum' raised an exception type of the plugin")
    with pytest.raises(NotForRelease, match="infinite"):
        sample_run(tmp_path / "results", run.id, 5, 0, tmp_path / "a.npz", "balanced", benchmark=False)
    before = (run.path / "generator.safetensors").read_bytes()
    execute(make(tmp_path, flag, "nothing", STATED))
    ledger = ledger_of(tmp_path)
    assert ledger.epsilon is not None
    assert 0 < float(ledger.epsilon["proven"]) <= 10
    assert "reason" not in ledger.epsilon
    assert ledger.unproven == []
    assert STATED in str(ledger.failures[0].statement)
    assert (run.path / "generator.safetensors").read_bytes() == before
    sample_run(tmp_path / "results", run.id, 5, 0, tmp_path / "a.npz", "balanced", benchmark=False)
    execute(make(tmp_path, flag))  # without the statement, a finished run does not change
    assert ledger_of(tmp_path).epsilon == ledger.epsilon


def test_releases_without_noise_prove_nothing_before_they_are_accounted():
    budget = Budget(float("inf"))
    for std, times, unbounded in ((0.0, 1, True), (0.0, 0, False), (2.0, 1, False)):
        ledger = Ledger(budget, 12)
        ledger.approve(Entry("sum", {"C": 1.0}, Event(Full(), Sensitivity(1.0, 2.0), std, times)))
        assert is_unbounded(ledger.to_dict()) is unbounded


def test_a_statement_covers_recorded_failures_and_no_later_ones(tmp_path, flag):
    for attempt in range(2):  # the second time, the first failure is settled and the same one comes again
        with pytest.raises(RunFailed):
            execute(make(tmp_path, flag, "nothing", STATED))
        assert [failure.statement is None for failure in ledger_of(tmp_path).failures] == [False] * attempt + [True]
        assert ledger_of(tmp_path).unproven


def test_a_statement_is_true_or_false(tmp_path, flag):
    with pytest.raises(ValueError, match=r"runtime\.failures_independent_of_records: expected true or false"):
        execute(make(tmp_path, flag, "nothing", "runtime.failures_independent_of_records=maybe"))
    assert not (tmp_path / "results").exists()


def test_the_mark_is_on_disk_before_the_method_can_catch_the_error(tmp_path, flag):
    assert in_child(functools.partial(execute, make(tmp_path, flag, "dies"))) == -signal.SIGKILL
    assert [failure.what for failure in ledger_of(tmp_path).failures] == [
        "release 2 of 'sum' raised an exception type of the plugin"
    ]


def test_a_child_inherits_why_its_parent_is_not_proven_and_cannot_settle_it():
    parent, child = (Ledger(Budget(10.0), 12, noise="os") for _ in range(2))
    parent.record_failure("release 0 of 'a' raised ValueError")
    parent.state_failures_independent("stated")
    parent.record_failure("release 0 of 'b' raised ValueError")
    child.inherit(parent, "p")
    assert len(child.unproven) == 1
    assert "release 0 of 'b'" in child.unproven[0]
    assert [failure.what for failure in child.failures] == ["p: release 0 of 'a' raised ValueError"]
    assert child.state_failures_independent("stated") == []
    assert len(child.unproven) == 1


# --- other code that sees records -------------------------------------------------------------------------------------


def test_the_start_of_private_state_leaves_a_mark(tmp_path):
    images, labels = toys.records()
    ledger = Ledger(Budget(10.0), len(labels), path=tmp_path / "ledger.json")
    data = PrivateData(images, labels, 10, Services(ledger, Key.seeded("state")))
    sample = OneShard(3, "public_balanced")

    def start(records, rng):
        raise ZeroDivisionError(SECRET)

    state = data.private_state("critics", sample=sample, start=start, identity={})
    data.mechanism("query", sample=sample, bound=PerRow(C=1.0, shape=(2, 1)), times=3, std=50.0, state=state)
    with pytest.raises(ZeroDivisionError):
        state.start(0)
    (failure,) = Ledger.load(tmp_path / "ledger.json").failures
    assert failure.what == "making private state 'critics' raised ZeroDivisionError"


# --- what becomes public ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["nothing", "wraps", "logs", "goes on", "exits", "interrupts"])
def test_the_text_of_a_private_error_stays_in_private(tmp_path, flag, then, capsys):
    with pytest.raises(RunFailed) as caught:
        execute(make(tmp_path, flag, then))
    kind = "SystemExit" if then == "exits" else UNNAMED
    assert f"raised {kind}" in str(caught.value)
    chain, texts = [caught.value], []
    while chain:  # a launcher could print the whole chain of errors
        error = chain.pop()
        texts.append(str(error))
        chain += [each for each in (error.__cause__, error.__context__) if each is not None]
    out, err = capsys.readouterr()
    run = the_run(tmp_path)
    assert not any(SECRET in text for text in (out, err, public_text(run), *texts))
    assert run.status() == "failed"
    status = json.loads((run.path / "status.json").read_text())
    assert f"raised {kind}" in status["error"]
    private_text = run.path / "private" / "errors.txt"
    assert SECRET in private_text.read_text()
    assert "failure_toys.py" in private_text.read_text()
    assert (private_text.stat().st_mode & 0o777, private_text.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert not run.trained


@pytest.mark.parametrize("cannot", ["append_private", "save"])
def test_a_disk_that_is_full_when_a_function_raises_reveals_nothing_and_is_named(tmp_path, flag, cannot, monkeypatch):
    save = Ledger.save

    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    if cannot == "append_private":
        monkeypatch.setattr("dpgen_bench.runs.failures.append_private", full)
    else:  # from the moment when the failure is to be written
        monkeypatch.setattr(Ledger, "save", lambda ledger: full() if ledger.failures else save(ledger))
    with pytest.raises(RunFailed, match="cannot be written") as caught:
        execute(make(tmp_path, flag))
    assert ("remove " in str(caught.value)) == (cannot == "save")
    assert SECRET not in public_text(the_run(tmp_path)) + "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("multirun", [[], ["-m"]])
def test_the_command_line_does_not_print_it_either(tmp_path, flag, multirun):
    conf = tmp_path / "conf" / "method"
    conf.mkdir(parents=True)
    (conf / "raises.yaml").write_text(f"name: raises\n_target_: tests.failure_toys.Raises\nflag: {flag}\n")
    arguments = [
        *multirun, f"hydra.searchpath=[file://{conf.parent}]", "method=raises", f"results={tmp_path / 'results'}",
        "runtime.progress=false",
    ]  # fmt: skip
    printed = tmp_path / "printed"

    def child() -> None:  # its own process, because Hydra's logging keeps the streams
        out = os.open(printed, os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        cli.main(["run", *arguments])

    assert in_child(child) == 1
    assert "raised an exception type of the plugin" in printed.read_text()
    assert SECRET not in printed.read_text()


def test_errors_outside_private_functions_are_as_public_as_before(tmp_path):
    with pytest.raises(RunFailed, match="this method always fails"):
        execute(config(tmp_path, target="tests.toys.Broken"))
    (run,) = Store(tmp_path).runs()
    assert "toys.py" in (run.path / "private" / "traceback.txt").read_text()
    assert Ledger.load(run.path / "ledger.json").failures == []


def test_the_search_for_an_error_of_an_accelerator_ends(tmp_path, flag):
    toy = config(
        tmp_path, f"method.flag={flag}", "method.when=of another kind", target="tests.failure_toys.DeviceFails"
    )
    with pytest.raises(RunFailed, match="no accelerator"):
        execute(toy)
    assert Ledger.load(Store(tmp_path).runs()[0].path / "ledger.json").failures == []


@pytest.mark.parametrize("when", ["after", "wrapped", "before"])
def test_an_error_of_an_accelerator_after_a_release_may_be_that_of_the_release(tmp_path, flag, when):
    """It computes later than it is asked, so such an error can be raised outside of the release that caused it."""
    toy = config(tmp_path, f"method.flag={flag}", f"method.when={when}", target="tests.failure_toys.DeviceFails")
    with pytest.raises(RunFailed) as raised:
        execute(toy)
    (run,) = Store(tmp_path).runs()
    marked = when != "before"
    assert (SECRET in str(raised.value)) != marked
    assert (SECRET in (run.path / "status.json").read_text()) != marked
    expected = ["the accelerator failed, perhaps in a private function"] if marked else []
    assert [failure.what for failure in Ledger.load(run.path / "ledger.json").failures] == expected
    flag.unlink()
    execute(toy)
    proven = Ledger.load(run.path / "ledger.json").epsilon["proven"]
    assert (proven == "inf") == marked

"""Tests that a run that was killed at any rename or stopped ends as an undisturbed one, or is refused with a reason."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import platform
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from dpgen_bench.config.compose import compose_config
from dpgen_bench.runs import arithmetic
from dpgen_bench.runs import prepare as prepare_run
from dpgen_bench.runs.execute import RunFailed, execute
from dpgen_bench.store.folders import RunBusy, Store
from dpgen_bench.training.signals import STOP_SIGNALS, Preempted, StopSignals
from tests.run_toys import QUICK, config, contents, in_child, kill_at_rename, prepare, undisturbed_run

pytestmark = pytest.mark.usefixtures("one_thread_of_torch")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"))


EVERY = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])


@EVERY
def test_a_run_killed_at_any_rename_ends_like_one_that_was_not(undisturbed, tmp_path, every):
    """The fast suite kills it at every third rename, which includes each kind of file."""
    kills = 0
    for number in range(1, 200, every):
        results = tmp_path / str(number)
        prepare(results, undisturbed)
        code = in_child(functools.partial(kill_at_rename, number, functools.partial(execute, config(results))))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1
        assert Store(results).folder(undisturbed.id).status() in ("interrupted", "empty", "finished")
        folder = execute(config(results))
        assert contents(folder) == contents(undisturbed), f"killed at rename {number}"
        assert not list(folder.path.glob("private/*"))
        assert not list(folder.path.glob("checkpoints/*.tmp*")), f"killed at rename {number}"
        shutil.rmtree(results)
    assert kills * every > 15  # six checkpoints, the ledger's approvals, the generator, samples, metrics, DONE


@EVERY
def test_two_loops_with_a_release_between_them_resume_anywhere(tmp_path, every):
    """A repeated release between two loops must not get the number, and hence the noise, of an earlier release."""
    make = functools.partial(config, target="tests.toys.TwoLoops")
    whole = execute(make(tmp_path / "whole"))
    assert json.loads((whole.path / "ledger.json").read_text())["entries"][0]["executed"] == 7
    for number in range(1, 100, every):
        results = tmp_path / str(number)
        prepare(results, whole)
        if in_child(functools.partial(kill_at_rename, number, functools.partial(execute, make(results)))) == 0:
            break
        assert contents(execute(make(results))) == contents(whole), f"killed at rename {number}"
    assert number > 12


def test_a_run_that_continues_on_another_machine_names_both(tmp_path, undisturbed, monkeypatch):
    prepare(tmp_path, undisturbed)
    assert in_child(lambda: kill_at_rename(2, lambda: execute(config(tmp_path)), "last.pt")) == -signal.SIGKILL
    here = Store(tmp_path).folder(undisturbed.id).read_json("environment.json")
    assert "earlier" not in here
    for python in ("3.98", "3.99"):  # as on two other machines; the last one makes nothing but the end
        monkeypatch.setattr(platform, "python_version", lambda version=python: version)
        if python == "3.98":
            killed = in_child(lambda: kill_at_rename(2, lambda: execute(config(tmp_path)), "last.pt"))
            assert killed == -signal.SIGKILL
    last = execute(config(tmp_path)).read_json("environment.json")
    assert last.pop("earlier") == [here, {**here, "python": "3.98"}]
    assert last == {**here, "python": "3.99"}


def test_a_run_that_is_killed_repeatedly_finishes(undisturbed, tmp_path):
    prepare(tmp_path, undisturbed)
    for _ in range(40):
        if in_child(lambda: kill_at_rename(12, lambda: execute(config(tmp_path)))) == 0:
            break
    folder = Store(tmp_path).folder(undisturbed.id)
    assert folder.done
    assert contents(folder) == contents(undisturbed)


def test_a_dpgan_killed_in_the_middle_ends_bit_identical(tmp_path):
    def dpgan(results: Path):
        composed = compose_config(
            [
                "method=dpgan", "privacy.epsilon=inf", f"results={results}", *QUICK, "method.sigma=2.0",
                "method.clip_norm=1.0", "method.steps=8", "method.n_d=2", "method.batch_size=8", "method.d_d=8",
                "method.d_g=8",
            ]
        )  # fmt: skip
        OmegaConf.set_struct(composed, False)
        composed.protocol = config(results).protocol
        return composed

    whole = execute(dpgan(tmp_path / "whole"))
    assert (
        in_child(lambda: kill_at_rename(4, lambda: execute(dpgan(tmp_path / "killed")), "last.pt")) == -signal.SIGKILL
    )
    killed = Store(tmp_path / "killed").folder(whole.id)
    assert (killed.path / "checkpoints" / "last.pt").exists()
    assert not killed.trained
    assert contents(execute(dpgan(tmp_path / "killed"))) == contents(whole)


def test_noise_from_the_operating_system_is_repeated_on_resume_and_its_key_deleted(tmp_path, undisturbed):
    def make():
        return execute(config(tmp_path, "privacy.noise=os"))

    assert in_child(lambda: kill_at_rename(4, make, "last.pt")) == -signal.SIGKILL
    run = Store(tmp_path).runs()[0]
    key = (run.path / "private" / "noise.key").read_bytes()
    assert (run.path / "private" / "noise.key").stat().st_mode & 0o077 == 0
    before = [path.read_bytes() for path in sorted((run.path / "private" / "journal").glob("*"))]
    assert before
    assert in_child(lambda: kill_at_rename(2, make, "last.pt")) == -signal.SIGKILL
    assert (run.path / "private" / "noise.key").read_bytes() == key
    after = [path.read_bytes() for path in sorted((run.path / "private" / "journal").glob("*"))]
    assert after[: len(before)] == before
    folder = make()
    assert folder.done
    assert not (folder.path / "private" / "noise.key").exists()


def test_a_run_whose_noise_key_is_missing_is_not_trained_again(tmp_path, undisturbed):
    prepare(tmp_path, undisturbed)
    folder = execute(config(tmp_path, "privacy.noise=os"))
    (folder.path / "generator.safetensors").unlink()
    with pytest.raises(RunFailed, match="spend its epsilon a second time"):
        execute(config(tmp_path, "privacy.noise=os"))


def test_a_corrupt_checkpoint_is_refused(tmp_path, undisturbed):
    prepare(tmp_path, undisturbed)
    assert in_child(functools.partial(kill_at_rename, 4, functools.partial(execute, config(tmp_path)), "last.pt")) != 0
    folder = Store(tmp_path).folder(undisturbed.id)
    (folder.path / "checkpoints" / "last.pt").write_text("junk")
    with pytest.raises(RunFailed, match=r"cannot be read.*delete the run's folder"):
        execute(config(tmp_path))


def test_two_processes_on_one_run(undisturbed, tmp_path):
    prepare(tmp_path, undisturbed)
    folder = Store(tmp_path).folder(undisturbed.id)

    def hold() -> None:
        with folder.locked():
            time.sleep(60)

    holder = multiprocessing.get_context("fork").Process(target=hold)
    holder.start()
    while folder.status() != "running":
        time.sleep(0.05)
    try:
        with pytest.raises(RunBusy, match="is in use by another process"):
            execute(config(tmp_path))
    finally:
        holder.kill()
        holder.join()
    assert execute(config(tmp_path)).done  # the lock was released with its process


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_writes_a_checkpoint_and_the_run_goes_on_later(number, undisturbed, tmp_path):
    prepare(tmp_path, undisturbed)

    def stopped() -> None:
        toy = config(tmp_path, "runtime.checkpoint_s=1000")
        calls = [0]
        original = torch.Tensor.lerp_

        def lerp_(self, *arguments):
            calls[0] += 1
            if calls[0] == 3:
                os.kill(os.getpid(), number)
            return original(self, *arguments)

        torch.Tensor.lerp_ = lerp_
        try:
            execute(toy)
        except Preempted as error:
            os._exit(int(error.code))

    assert in_child(stopped) == 128 + number
    folder = Store(tmp_path).folder(undisturbed.id)
    assert folder.status() == "preempted"
    assert torch.load(folder.path / "checkpoints" / "last.pt", weights_only=True)["phases"]["train"]["steps"] == 3
    assert contents(execute(config(tmp_path))) == contents(undisturbed)


def test_a_run_killed_before_its_first_checkpoint_is_not_continued_with_another_source(tmp_path, monkeypatch):
    """Its releases would be made again for another query with the same noise."""

    def killed() -> None:
        original = torch.Tensor.lerp_
        calls = [0]

        def lerp_(self, *arguments):
            calls[0] += 1
            if calls[0] == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *arguments)

        torch.Tensor.lerp_ = lerp_
        execute(config(tmp_path, "runtime.checkpoint_s=1000", "privacy.noise=os"))

    assert in_child(killed) == -signal.SIGKILL
    (folder,) = Store(tmp_path).runs()
    assert not (folder.path / "checkpoints" / "last.pt").exists()
    source = (folder.path / "source").read_text()
    monkeypatch.setattr(prepare_run, "source_fingerprint", lambda cls: "another")
    with pytest.raises(RunFailed, match="expected the source of the method with which run"):
        execute(config(tmp_path, "privacy.noise=os"))
    assert (folder.path / "source").read_text() == source
    monkeypatch.undo()
    monkeypatch.setattr(arithmetic, "source_of_the_bench", lambda: "another")
    with pytest.raises(ValueError, match=r"expected dpgen_bench=\w+, .* got dpgen_bench=another: .* version"):
        execute(config(tmp_path, "privacy.noise=os"))
    monkeypatch.undo()
    assert execute(config(tmp_path, "privacy.noise=os")).done


def test_a_signal_during_the_last_step_is_obeyed(undisturbed, tmp_path):
    prepare(tmp_path, undisturbed)
    total = torch.load(undisturbed.path / "checkpoints" / "last.pt", weights_only=True)["phases"]["train"]["steps"]

    def stopped() -> None:
        calls = [0]
        original = torch.Tensor.lerp_

        def lerp_(self, *arguments):
            calls[0] += 1
            if calls[0] == total:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(self, *arguments)

        torch.Tensor.lerp_ = lerp_
        try:
            execute(config(tmp_path))
        except Preempted as error:
            os._exit(int(error.code))

    assert in_child(stopped) == 128 + signal.SIGTERM
    assert Store(tmp_path).folder(undisturbed.id).status() == "preempted"
    assert contents(execute(config(tmp_path))) == contents(undisturbed)


def test_a_second_ctrl_c_stops_at_once():
    with StopSignals(in_loop=lambda: True) as signals:
        signal.raise_signal(signal.SIGINT)  # waits for the end of the step
        assert signals.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_outside_a_loop_ends_the_run_without_a_traceback():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it in the background
    try:
        with pytest.raises(Preempted) as stopped, StopSignals(in_loop=lambda: False):
            signal.raise_signal(signal.SIGINT)
        assert stopped.value.code == 128 + signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)

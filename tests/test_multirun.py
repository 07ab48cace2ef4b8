"""A stop signal ends a multirun whose jobs are in processes of joblib: all write checkpoints, none begins any more."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpgen_bench.runs.multirun import VARIABLE, Multirun, job_of_multirun
from dpgen_bench.training.signals import STOP_SIGNALS, Preempted, StopSignals
from dpgen_bench.utils.paths import HOME

JOBS = """
import os, sys, time
from pathlib import Path
from joblib import Parallel, delayed
from dpgen_bench.runs.multirun import Multirun, ignore_signals, job_of_multirun
from dpgen_bench.training.signals import Preempted, StopSignals

def start():
    ignore_signals()
    Path(f"process-{os.getpid()}").touch()

def job(number):
    with job_of_multirun() as may_begin:
        if not may_begin:
            return
        with StopSignals(lambda: True) as signals:
            Path(f"begun-{number}").write_text(str(os.getpid()))
            while not signals.received:
                time.sleep(0.02)
            time.sleep(0.3)
            Path(f"checkpoint-{number}").touch()
            raise Preempted(128 + signals.received)

def main(workers, jobs):
    with Multirun():
        Parallel(workers, backend="loky", batch_size=1, initializer=start)(delayed(job)(n) for n in range(jobs))
"""


def wait_for(folder: Path, pattern: str, number: int) -> list[Path]:
    end = time.monotonic() + 300
    while len(found := [path for path in folder.glob(pattern) if path.name[0] == "p" or path.read_text()]) < number:
        assert time.monotonic() < end, f"{pattern} did not come"
        time.sleep(0.02)
    return sorted(found)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the test reads /proc")
@pytest.mark.parametrize(
    ("number", "to", "workers", "jobs"),
    [
        pytest.param(signal.SIGTERM, "all", 3, 2, marks=pytest.mark.slow),
        (signal.SIGUSR2, "multirun", 2, 6),
        (signal.SIGINT, "all", 3, 2),  # as a terminal does; the process without a job must not end the others
        pytest.param(signal.SIGUSR1, "multirun", 3, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "a job", 2, 6, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_all_jobs_write_a_checkpoint_and_no_other_begins(tmp_path, number, to, workers, jobs):
    (tmp_path / "jobs.py").write_text(JOBS)
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HOME)])}
    command = [sys.executable, "-c", f"import jobs; jobs.main({workers}, {jobs})"]
    multirun = subprocess.Popen(
        command, cwd=tmp_path, env=path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    processes = [int(file.name.split("-")[1]) for file in wait_for(tmp_path, "process-*", workers)]
    begun = wait_for(tmp_path, "begun-*", 2)
    if to == "all":
        os.killpg(multirun.pid, number)
    else:
        os.kill(multirun.pid if to == "multirun" else int(begun[0].read_text()), number)
    messages = multirun.communicate(timeout=300)[1]
    announced = ["", "stopping after this step; press Ctrl-C again to stop at once"] if number == signal.SIGINT else []
    # joblib's tracker may warn of a semaphore that its processes were removing when they were stopped.
    own = re.sub(r"\S+/loky/backend/resource_tracker\.py:\d+: UserWarning: .*\n  warnings\.warn\(.*\n", "", messages)
    assert own.splitlines() == [*announced, "dpgen: stopped by a signal; the same command continues"]
    assert multirun.returncode == 128 + number
    assert sorted(file.name for file in tmp_path.glob("begun-*")) == [file.name for file in begun]
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2
    assert not [process for process in processes if is_alive(process)]


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_between_jobs_ends_the_multirun_with_one_sentence(number, capsys):
    with pytest.raises(SystemExit) as end, Multirun():
        signal.raise_signal(number)
    assert end.value.code == 128 + number
    assert capsys.readouterr().err == "dpgen: stopped by a signal; the same command continues\n"
    assert VARIABLE not in os.environ


def test_a_run_in_the_same_process_reports_its_stop_itself(capsys):
    with pytest.raises(SystemExit) as end, Multirun(), job_of_multirun(), StopSignals(lambda: False):
        signal.raise_signal(signal.SIGTERM)
    assert (end.value.code, capsys.readouterr().err) == (128 + signal.SIGTERM, "")


def test_jobs_in_the_queue_of_a_cluster_are_mentioned(capsys):
    with pytest.raises(SystemExit), Multirun(queued=True):
        signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err.endswith("; jobs that were submitted to the cluster go on, and scancel stops them\n")


def test_a_multirun_that_is_not_stopped_leaves_everything_as_it_was(capsys):
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with Multirun(), job_of_multirun() as may_begin:
        folder = Path(os.environ[VARIABLE].partition(":")[2])
        assert may_begin
        assert folder.is_dir()
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before
    assert not folder.exists()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_job_of_a_cluster_without_the_folder_ends_by_a_signal_with_its_status(number, monkeypatch, tmp_path):
    """On another machine; submitit sees the status, or requeues the job by its own handler."""
    elsewhere = os.getppid() + 1  # of another machine; not 1, which is this process's parent in some containers
    monkeypatch.setenv(VARIABLE, f"{elsewhere}:{tmp_path / 'of another machine'}")
    called = []
    before = signal.signal(number, lambda number, frame: called.append(number))
    try:
        with pytest.raises(Preempted) as end, job_of_multirun():
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)
    assert (end.value.code, called) == (128 + number, [number])

"""Stops a multirun, also one whose jobs are executed by other processes: each writes a checkpoint and ends.

A process of joblib catches every exception and takes the next job, and joblib kills all its processes as soon as one of
them dies. So the process of the multirun passes a signal on to the jobs that run, waits until they have ended, and then
ends. It knows them by a folder, in which each job puts a file with its process id. No job begins any more when that
folder contains the file `stop`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dpgen_bench.config.runtime import number_of_processes
from dpgen_bench.runs.devices import jobs_at_once
from dpgen_bench.store.folders import RunFailed
from dpgen_bench.training.signals import STOP_SIGNALS, Preempted, StopSignals, announce_stop

VARIABLE = "DPGEN_MULTIRUN"  # PID:FOLDER of the process of the multirun, which its jobs inherit


class Multirun:
    """A context of the process that launches jobs, in which a stop signal ends all of them and then raises SystemExit.

    A second Ctrl-C raises KeyboardInterrupt at once.

    Args:
        queued: jobs may wait in the queue of a cluster, from which this process does not remove them.
    """

    def __init__(self, queued: bool = False) -> None:
        self._queued = queued
        self._before: dict[int, Any] = {}
        self._received: int | None = None
        self._reported = False
        self._ended = threading.Event()
        self._waiter = threading.Thread(target=self._wait_for_jobs, daemon=True)

    def __enter__(self) -> Multirun:
        self._folder = Path(tempfile.mkdtemp(prefix="dpgen-"))
        os.environ[VARIABLE] = f"{os.getpid()}:{self._folder}"
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ended.is_set():
            return
        if self._received == number == signal.SIGINT and self._waiter.is_alive():
            raise KeyboardInterrupt
        self._received = self._received or number
        self._reported |= frame is None  # called by the run in this process, which has printed what happened
        (self._folder / "stop").touch()  # before the running jobs are listed: a job announces itself, then looks for it
        running = self._running()
        if not running:
            raise SystemExit(128 + self._received)
        if not self._waiter.is_alive():
            if number == signal.SIGINT:
                announce_stop()
            for job in running:
                with suppress(ProcessLookupError):
                    os.kill(job, signal.SIGTERM)
            self._waiter.start()

    def _wait_for_jobs(self) -> None:
        while self._running():
            if self._ended.wait(0.05):
                return
        os.kill(os.getpid(), signal.SIGTERM)  # wakes the launcher, which waits for results of the jobs

    def _running(self) -> list[int]:
        """Processes of this machine that execute a job."""
        running = []
        for path in self._folder.iterdir():
            host, _, process = path.name.rpartition("@")
            if host == socket.gethostname() and _is_alive(int(process)):
                running.append(int(process))
        return running

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()  # signals are ignored from now on
        if self._waiter.is_alive():
            self._waiter.join()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.environ.pop(VARIABLE, None)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._received is None or isinstance(error, KeyboardInterrupt):
            return
        if not self._reported:
            queued = "; jobs that were submitted to the cluster go on, and scancel stops them" if self._queued else ""
            print(f"dpgen: stopped by a signal; the same command continues{queued}", file=sys.stderr)
        raise SystemExit(128 + self._received) from None


def in_process_of_launcher() -> bool:
    """Whether this process executes jobs of a multirun of another process."""
    parent, _, _ = os.environ.get(VARIABLE, "").partition(":")
    return bool(parent) and int(parent) != os.getpid()


def executed_by_launcher() -> bool:
    """Whether the present run is a job of a multirun that a launcher other than Hydra's own executes.

    joblib executes its jobs in the process of the multirun if it is to start one process only, so the id of the
    process does not tell.
    """
    hydra = HydraConfig.get()
    return hydra.mode == RunMode.MULTIRUN and not str(hydra.launcher["_target_"]).endswith(".BasicLauncher")


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        return True
    return True


@contextmanager
def job_of_multirun() -> Iterator[bool]:
    """A context of a job, which may be in another process than the multirun; yields whether it may begin.

    A stop signal raises `Preempted` in the context. It does not leave a process of joblib, in which it would end the
    other jobs: the process of the multirun is told instead, and stops them.

    Raises:
        RunFailed: if a signal of submitit has stopped the run, and submitit does not start its job again.
    """
    if not in_process_of_launcher():
        yield True
        return
    parent, _, folder = os.environ[VARIABLE].partition(":")
    stop, own = Path(folder) / "stop", Path(folder) / f"{socket.gethostname()}@{os.getpid()}"
    try:
        with StopSignals(in_loop=lambda: False):
            with suppress(OSError):  # the folder does not exist on other machines
                own.touch()
            yield not stop.exists()
    except Preempted:
        if os.getppid() != int(parent):  # a job of submitit, whose exit status says that it has not finished
            raise
        own.unlink(missing_ok=True)
        if not stop.exists():  # only this process has received the signal
            os.kill(int(parent), signal.SIGTERM)
    except RuntimeError as error:
        from submitit.core.utils import UncompletedJobError  # slow to import

        if isinstance(error, UncompletedJobError):  # raised by the handler of submitit, after the run was stopped
            raise RunFailed(f"{error} The run has a checkpoint, from which the same command continues it.") from None
        raise
    finally:
        own.unlink(missing_ok=True)


def ignore_signals() -> None:
    """Ignore stop signals in this process, except in a job."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class IgnoreSignalsBetweenJobs(Callback):
    """Lets processes of joblib ignore stop signals while they execute no job; conf/config.yaml names it for Hydra.

    Ctrl-C reaches all processes of a terminal. One that waits for a job would end, and with it those that work. On a
    machine with GPUs there are as many processes as GPUs, unless `hydra.launcher.n_jobs` gives their number.
    """

    def on_multirun_start(self, config: DictConfig, **more: Any) -> None:
        launcher = config.hydra.launcher
        if launcher["_target_"].endswith(".JoblibLauncher"):
            OmegaConf.set_struct(launcher, False)
            launcher.initializer = {"_target_": "hydra.utils.get_method", "path": f"{__name__}.ignore_signals"}
            device = str(OmegaConf.select(config, "runtime.device", default="cpu"))
            launcher.n_jobs = jobs_at_once(device, int(launcher.n_jobs), processes=number_of_processes(config))

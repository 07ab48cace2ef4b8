"""Several processes that train one run (`runtime.processes`): each computes a part of every padded draw.

Process 0 is the one that executes the run. It alone holds the run's lock, writes its folder, adds noise and evaluates.
The others, its helpers, execute the same `fit` with the same records and public randomness. They write nothing but
their errors, and are killed when the training of process 0 ends, however it ends.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loky.backend.context import get_context

from dpgen_bench.config.runtime import backend_of, number_of_processes
from dpgen_bench.config.spec import RunSpec
from dpgen_bench.method import fit_method
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.processes import NotDivisible, Processes
from dpgen_bench.privacy.services import Services
from dpgen_bench.runs.arithmetic import has_released
from dpgen_bench.runs.devices import further_devices, number_of_devices
from dpgen_bench.runs.failures import PrivateFailure
from dpgen_bench.runs.prepare import context_of, open_data
from dpgen_bench.store.folders import RunFolder
from dpgen_bench.training.signals import end_with
from dpgen_bench.utils import compiled
from dpgen_bench.utils.cores import usable_cores
from dpgen_bench.utils.files import append_private


def expect_possible_division(spec: RunSpec, device: torch.device) -> None:
    """Check that the settings of a run allow several processes.

    Raises:
        ValueError: for settings that do not, and for too few GPUs or cores.
    """
    number, runtime = number_of_processes(spec.config), spec.config.runtime
    if number == 1:
        return
    if spec.config.privacy.diagnostics != "off":
        raise ValueError(
            f"expected privacy.diagnostics=off with runtime.processes={number}, got {spec.config.privacy.diagnostics}: "
            "no process sees the norms of all records; leave out runtime.processes."
        )
    if runtime.get("padded") is False:
        raise ValueError(
            f"expected padded draws with runtime.processes={number}, got runtime.padded=false; leave one of them out."
        )
    if device.type == "cuda" and (device.index is not None or number_of_devices() < number):
        raise ValueError(
            f"expected a GPU for each of runtime.processes={number}, got runtime.device={runtime.device} on a machine "
            f"with {number_of_devices()}; use runtime.device=auto and at most as many processes as GPUs."
        )
    if device.type != "cuda" and number > usable_cores():
        raise ValueError(
            f"expected at most as many runtime.processes as cores on a CPU, got {number} on a machine with "
            f"{usable_cores()}; use fewer."
        )


@contextmanager
def _meeting_place(folder: RunFolder) -> Iterator[Path]:
    """An empty folder in which the processes of a run find each other; one that a killed process left is emptied.

    It lies outside of the run's folder, because locks of files may not work on a file system of a network.
    """
    digest = hashlib.sha256(str(folder.path.resolve()).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"dpgen-processes-{digest}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)  # raises if another user has made it
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def expect_divided(spec: RunSpec, services: Services) -> None:
    """Check, after the training, that there was anything to divide.

    Raises:
        NotDivisible: if several processes trained a method that makes no release.
    """
    if services.processes is not None and not services.mechanisms:
        raise NotDivisible(
            f"expected a method that makes releases with runtime.processes={number_of_processes(spec.config)}, got "
            f"{spec.config.method.name}, which makes none; leave out runtime.processes."
        )


@contextmanager
def undone_if_not_divisible(folder: RunFolder) -> Iterator[None]:
    """Undo what the block wrote if it raises NotDivisible, so that such a command is refused like any invalid one.

    A run that was started before gets its status back, and the folder of a new one is deleted. It is never deleted if a
    release was made: a method may ask for another mechanism too late, and its ledger must not be forgotten. To be
    entered while the folder is locked.
    """
    before = folder.read_json("status.json")
    try:
        yield
    except NotDivisible as error:
        if before:
            folder.write_json("status.json", before)
        elif has_released(folder):
            folder.mark("failed", "train", error)
        else:
            shutil.rmtree(folder.path)
        raise


@contextmanager
def processes_of(spec: RunSpec, folder: RunFolder, device: torch.device) -> Iterator[Processes | None]:
    """Start the helpers of a run, and end them with the block; None if the run has one process.

    Helpers wait twice (`Processes.wait`): until this process has opened the data, and until all have read the
    checkpoint.

    Raises:
        RuntimeError: if a helper ends before it has joined, or between releases.
        ValueError: if other jobs hold GPUs that the helpers need (`further_devices`).
    """
    number = number_of_processes(spec.config)
    if number == 1:
        yield None
        return
    on_gpu = device.type == "cuda"
    before = torch.get_num_threads()
    threads = int(spec.config.runtime.threads or max(1, before // number))
    torch.set_num_threads(threads)
    devices = further_devices(number - 1, torch.cuda.current_device()) if on_gpu else nullcontext([None] * (number - 1))
    with devices as indices, _meeting_place(folder) as meeting:
        # Unlike multiprocessing's, processes of loky do not execute the main module again, which may have no guard.
        helpers = [
            get_context("loky").Process(
                target=_help,
                args=(place + 1, meeting, index, threads, spec.config, spec.training, folder, os.getpid()),
                daemon=True,
            )
            for place, index in enumerate(indices)
        ]
        try:
            for helper in helpers:
                helper.start()
            _expect_ready(helpers, meeting, folder)
            with _group(0, number, meeting, on_gpu) as processes, _naming_who_ended(helpers, folder):
                yield processes
        finally:
            for helper in helpers:
                if helper.is_alive():  # it ignores the signals that stop a run; loky's own `terminate` is one of them
                    os.kill(helper.pid, signal.SIGKILL)
                    helper.join()
            torch.set_num_threads(before)


@contextmanager
def _group(number: int, size: int, meeting: Path, on_gpu: bool) -> Iterator[Processes]:
    """Join the group of the run's processes."""
    # Parts of exact values are sent: they stay on this machine.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if on_gpu:  # so that all processes keep the same state
        torch.use_deterministic_algorithms(True, warn_only=True)
    store = dist.FileStore(str(meeting / "group"), size)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=number, world_size=size)
    try:
        yield Processes()
    finally:
        dist.destroy_process_group()
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])


def _expect_ready(helpers: list[Any], meeting: Path, folder: RunFolder) -> None:
    """Wait until each helper is about to join the group.

    Raises:
        RuntimeError: if one ends before.
    """
    while not all((meeting / f"ready-{place + 1}").exists() for place in range(len(helpers))):
        if (ended := _who_ended(helpers, folder, "before the training began")) is not None:
            raise RuntimeError(ended)
        time.sleep(0.02)


@contextmanager
def _naming_who_ended(helpers: list[Any], folder: RunFolder) -> Iterator[None]:
    """Say which helper has ended in the place of an error of the group, which names addresses only.

    During a release, the error stays: the ledger is marked, and the error's text is private.
    """
    try:
        yield
    except PrivateFailure:
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        deadline = time.monotonic() + 1.0  # until the operating system reports the end of a process
        while (ended := _who_ended(helpers, folder, "between two releases")) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if ended is None:
            raise
        raise RuntimeError(ended) from error


def _who_ended(helpers: list[Any], folder: RunFolder, when: str) -> str | None:
    """What became of the helper that ended, and what to do; None if all are alive.

    Others may have ended because of one that was killed, which is named therefore.
    """
    ended = [(helper.exitcode, place + 1) for place, helper in enumerate(helpers) if not helper.is_alive()]
    if not ended:
        return None
    status, place = min(ended)
    what = f"process {place} of runtime.processes={len(helpers) + 1} (id {helpers[place - 1].pid})"
    if status >= 0:
        path = folder.path / "private" / "errors.txt"
        return f"{what} ended with status {status} {when}; {path} has its error, if it raised one."
    name = signal.Signals(-status).name
    return (
        f"{what} was killed by {name} {when}. The machine may have run out of memory, for which the operating system "
        "kills a process (its log, `dmesg`, says so): use fewer processes, smaller batches or more memory."
    )


def _help(
    number: int,
    meeting: Path,
    index: int | None,
    threads: int,
    config: Any,
    training: dict[str, Any],
    folder: RunFolder,
    parent: int,
) -> None:
    """What helper `number` does: the training of process 0, without its noise and its files.

    Args:
        meeting: a folder that the processes share.
        index: the number of its GPU; None for the CPU.
        config, training: those of the run's `RunSpec`.
        parent: the id of process 0.
    """
    end_with(parent)
    torch.set_num_threads(threads)
    device = torch.device("cpu" if index is None else f"cuda:{index}")
    if index is not None:
        torch.cuda.set_device(index)
    spec = RunSpec(config, training)
    compiled.use(backend_of(config))
    compiled.import_compiler()
    note_errors = partial(_noting_errors, folder.path / "private" / "errors.txt", number)
    with note_errors():
        (meeting / f"ready-{number}").touch()
        with _group(number, number_of_processes(spec.config), meeting, index is not None) as processes, note_errors():
            processes.wait()
            ledger = Ledger.load(folder.path / "ledger.json")
            ledger.path = None  # process 0 writes it
            data, services = open_data(spec, folder, ledger, spec.dataset().load("train"), device, processes)
            ctx = context_of(spec, folder, device, services, reads_only=True)
            processes.wait()
            fit_method(spec.method(), data, ctx)


@contextmanager
def _noting_errors(path: Path, number: int) -> Iterator[None]:
    """End the process for an error, after its text was written to a private file, because it may contain records.

    Within the group, this is before process 0 learns of the error and kills this process.
    """
    try:
        yield
    except Exception:
        append_private(path, f"process {number}:\n{traceback.format_exc()}\n")
        raise SystemExit(1) from None

"""One GPU for each job of a multirun: jobs on one machine hold locks, so that no two of them meet on one device."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

CHOSEN_BY_HARNESS = ("auto", "cuda")  # values of runtime.device that name no single device


def number_of_devices() -> int:
    """The number of GPUs that this process sees."""
    import torch  # imported here, because processes that launch jobs do not need it

    return torch.cuda.device_count()


def choose_current(index: int) -> None:
    """Make a GPU the current one of this process."""
    import torch

    torch.cuda.set_device(index)


def visible_devices(count: Callable[[], int] = number_of_devices) -> list[str]:
    """Names of the GPUs that this process sees, the same in all processes of a machine; [] without GPUs."""
    number = count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(number)] if visible is None else visible.split(",")
    return [name.strip() for name in names[:number]]


def locks_of_devices() -> Path:
    """The folder of the locks of this user on this machine."""
    return Path(tempfile.gettempdir()) / f"dpgen-devices-{os.getuid()}"


@contextmanager
def own_device(
    setting: str,
    *,
    folder: Path | None = None,
    count: Callable[[], int] = number_of_devices,
    choose: Callable[[int], None] = choose_current,
    wait: float = 1.0,
) -> Iterator[int | None]:
    """Hold a GPU that no other job of this user on this machine holds, and make it the process's current one.

    If all are held, wait until one is free. The lock is released when the context or the process ends.

    Args:
        setting: `runtime.device`. With "cpu", or with a single device such as "cuda:1", nothing is held.
        folder: of the locks.
        count, choose: the number of GPUs, and what makes one of them current.
        wait: seconds between two attempts.

    Yields:
        the number of the GPU, or None if none is held.
    """
    names = visible_devices(count) if setting in CHOSEN_BY_HARNESS else []
    if not names:
        yield None
        return
    place = folder or locks_of_devices()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    announced = False
    while True:
        for index, name in enumerate(names):
            lock = FileLock(place / f"{name}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            try:
                choose(index)
                yield index
            finally:
                lock.release()
            return
        if not announced:
            print(f"waiting for a GPU: jobs of other processes use all {len(names)}", flush=True)
            announced = True
        time.sleep(wait)


@contextmanager
def further_devices(
    number: int, current: int, *, folder: Path | None = None, count: Callable[[], int] = number_of_devices
) -> Iterator[list[int]]:
    """Hold GPUs for the other processes of a run, which no job of this user on this machine holds.

    Args:
        number: of GPUs.
        current: the number of the run's own GPU, which is none of them.

    Raises:
        ValueError: if too few are free. Nothing waits here: two runs could wait for each other's GPUs.
    """
    place = folder or locks_of_devices()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as held:
        free: list[int] = []
        for index, name in enumerate(visible_devices(count)):
            if index == current or len(free) == number:
                continue
            with suppress(Timeout):
                held.enter_context(FileLock(place / f"{name}.lock").acquire(timeout=0))
                free.append(index)
        if len(free) < number:
            raise ValueError(
                f"expected {number + 1} GPUs for runtime.processes={number + 1}, one for each process, got the run's "
                f"own and {len(free)} that no other job holds; use fewer processes, or runtime.device=cpu."
            )
        yield free


def jobs_at_once(setting: str, jobs: int, count: Callable[[], int] = number_of_devices, *, processes: int = 1) -> int:
    """The number of processes of a multirun: one for each GPU where there are GPUs and no number was given (-1).

    Args:
        processes: the number of processes, and so of GPUs, of each job (`runtime.processes`).
    """
    devices = count() if setting in CHOSEN_BY_HARNESS else 0
    return max(1, devices // processes) if jobs == -1 and devices else jobs

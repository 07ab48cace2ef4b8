"""GPUs of their own for the jobs of a multirun: jobs on one machine hold locks, so that no two meet on one device."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

CHOSEN_BY_HARNESS = ("auto", "cuda")  # values of runtime.device that name no single device
_OWN: ContextVar[tuple[int, ...]] = ContextVar("own", default=())  # numbers of the GPUs of `own_devices`


def number_of_devices() -> int:
    """The number of GPUs that this process sees."""
    import torch  # imported here, because processes that launch jobs do not need it

    return torch.cuda.device_count()


def choose_current(index: int) -> None:
    """Make a GPU the current one of this process."""
    import torch

    torch.cuda.set_device(index)


def names_of_devices() -> list[str]:
    """Names of the GPUs that this process sees, the same in all processes of a machine; [] without GPUs.

    Numbers of GPUs are not: they depend on CUDA_VISIBLE_DEVICES, and a job of Slurm may see any GPU as number 0.
    """
    import torch

    return [_name(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]


def _name(properties: Any) -> str:
    """The UUID of a GPU, or its place on the PCI bus if the driver tells none."""
    uuid = str(getattr(properties, "uuid", ""))
    if uuid.strip("0-"):
        return uuid
    return f"pci-{properties.pci_domain_id:04x}-{properties.pci_bus_id:02x}-{properties.pci_device_id:02x}"


def locks_of_devices() -> Path:
    """The folder of the locks of this user on this machine."""
    return Path(tempfile.gettempdir()) / f"dpgen-devices-{os.getuid()}"


@contextmanager
def own_devices(
    setting: str,
    number: int = 1,
    *,
    folder: Path | None = None,
    names: Callable[[], list[str]] = names_of_devices,
    choose: Callable[[int], None] = choose_current,
    wait: float = 1.0,
) -> Iterator[list[int]]:
    """Hold GPUs that no other job of this user on this machine holds, and make the first one the process's current one.

    If too few are free, wait. A job takes all its GPUs at once or none, so that no two jobs wait for each other. Jobs
    that see the same GPUs take them one after the other, so that a job of several is not overtaken by jobs of one. The
    locks are released when the context or the process ends.

    Args:
        setting: `runtime.device`. With "cpu", or with a single device such as "cuda:1", nothing is held.
        number: of GPUs (`runtime.processes`).
        folder: of the locks.
        names, choose: the names of the GPUs, and what makes one of them current.
        wait: seconds between two attempts.

    Yields:
        the numbers of the GPUs; [] if none is held, as on a machine that has fewer, on which the run is refused.
    """
    visible = names() if setting in CHOSEN_BY_HARNESS else []
    if not visible or len(visible) < number:
        yield []
        return
    place = _made(folder or locks_of_devices())
    queue = FileLock(place / f"queue-{hashlib.sha256(' '.join(sorted(visible)).encode()).hexdigest()[:16]}.lock")
    with ExitStack() as held:
        announced = False
        with ExitStack() as first_in_queue:
            is_first, taken = False, list[int]()
            while not taken:
                with suppress(Timeout):
                    if not is_first:
                        first_in_queue.enter_context(queue.acquire(timeout=0))
                        is_first = True
                    taken = _take(held, place, visible, number)
                if not taken:
                    if not announced:
                        what = "a GPU" if number == 1 else f"{number} GPUs"
                        print(f"waiting for {what}: other jobs hold, or wait for, the {len(visible)} here", flush=True)
                        announced = True
                    time.sleep(wait)
        choose(taken[0])
        token = _OWN.set(tuple(taken))
        try:
            yield taken
        finally:
            _OWN.reset(token)


def _made(place: Path) -> Path:
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place


def _take(held: ExitStack, place: Path, visible: Sequence[str], number: int, but: int | None = None) -> list[int]:
    """Take the locks of `number` free GPUs, none of which is `but`, until `held` ends; [] if fewer are free."""
    with FileLock(place / "gate.lock"), ExitStack() as attempt:  # the gate: one job at a time makes an attempt
        free: list[int] = []
        for index, name in enumerate(visible):
            if index == but or len(free) == number:
                continue
            with suppress(Timeout):
                attempt.enter_context(FileLock(place / f"{name}.lock").acquire(timeout=0))
                free.append(index)
        if len(free) < number:
            return []
        held.enter_context(attempt.pop_all())
        return free


@contextmanager
def further_devices(
    number: int, current: int, *, folder: Path | None = None, names: Callable[[], list[str]] = names_of_devices
) -> Iterator[list[int]]:
    """The GPUs for the other processes of a run, which no job of this user on this machine holds.

    They are those that `own_devices` holds for the run. A run that a script executes without it takes others here.

    Args:
        number: of GPUs.
        current: the number of the run's own GPU, which is none of them.

    Raises:
        ValueError: if too few are free for a run without `own_devices`. Nothing waits here: two runs could wait for
            each other's GPUs.
    """
    own = _OWN.get()
    if len(own) == number + 1 and own[0] == current:
        yield list(own[1:])
        return
    with ExitStack() as held:
        taken = _take(held, _made(folder or locks_of_devices()), names(), number, current)
        if len(taken) < number:
            raise ValueError(
                f"expected {number + 1} GPUs for runtime.processes={number + 1}, one for each process, got the run's "
                f"own and fewer than {number} that no other job holds; use fewer processes, or runtime.device=cpu."
            )
        yield taken


def jobs_at_once(setting: str, jobs: int, count: Callable[[], int] = number_of_devices, *, processes: int = 1) -> int:
    """The number of processes of a multirun: one for each GPU where there are GPUs and no number was given (-1).

    Args:
        processes: the number of processes, and so of GPUs, of each job (`runtime.processes`).
    """
    devices = count() if setting in CHOSEN_BY_HARNESS else 0
    return max(1, devices // processes) if jobs == -1 and devices else jobs

"""Clients as Ray actors: each in a process of its own, on this machine or on a cluster. Needs the extra `ray`."""

from __future__ import annotations

import logging
import math
import os
import pickle
import random
import signal
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from threadpoolctl import threadpool_info, threadpool_limits

from dpgen_bench.federation.engines import Fault, Handler, Kind, Setup, answered, note_error

OBJECT_STORE = 256 * 2**20  # bytes; messages above 100 kB pass through it
START_S = 300.0  # a process that has not begun by then never will; importing torch takes seconds where cores are few
END_S = 30.0  # and one that was killed is gone within milliseconds

# Read by a Ray of our own as it is imported or started; what the user has set stands.
ENVIRONMENT = {
    # It decides whether Ray counts on other machines. If not, it listens on the loopback interface alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Actors ask for no share of the accelerator; they may use it all the same.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass(frozen=True)
class _Raised:
    """What client code raised, in words: nothing that a client made is unpickled by the server.

    classes: the module and name of the error's class, and of all that it inherits from.
    """

    classes: list[tuple[str, str]]
    text: str
    trace: str


class _Process:
    """Runs in the actor's process: one client, opened at its first message. Its methods raise nothing.

    Ray would keep an error's text and traceback in its own logs, and print some; so no error ever gets to it.
    """

    def start(self, setup: bytes, threads: int, blas_threads: int) -> tuple[str, int]:
        """(node, process id). Sets threads, for Ray starts processes with OMP_NUM_THREADS=1 unless that is set."""
        import ray

        torch.set_num_threads(threads)
        threadpool_limits(blas_threads, user_api="blas")
        self._opened: Handler | None = None
        try:
            self._setup: Setup | _Raised = pickle.loads(setup)  # imports the program's modules, which may take long
        except BaseException as error:
            self._setup = _raised(error)
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def handle(self, message: bytes) -> bytes | _Raised:
        if isinstance(self._setup, _Raised):
            return self._setup
        try:
            if self._opened is None:
                self._opened = self._setup.open()
            return answered(self._opened, message)
        except BaseException as error:
            return _raised(error)


def _raised(error: BaseException) -> _Raised:
    classes = [(cls.__module__, cls.__qualname__) for cls in type(error).__mro__]
    _, _, text = "".join(traceback.format_exception_only(error)).partition(": ")  # str(error) might raise itself
    return _Raised(classes, text.rstrip("\n"), "".join(traceback.format_exception(error)))


@dataclass
class _Live:
    """An actor; node and pid are known once it has started."""

    actor: Any
    node: str = ""
    pid: int | None = None


@dataclass(frozen=True)
class _Step:
    """What is waited for: that a client's process starts, or that it answers."""

    client: int
    doing: Literal["start", "answer"]
    deadline: float


Steps = dict[Future[Any], _Step]


class RayEngine:
    """Each client is an actor, made at its first message from its `Setup` alone, so that it holds no other's records.

    No more than `actors` of them live at a time; the one used least recently is killed to make room, so clients keep
    their state on disk. Larger batches of messages go in turns. A fault of whatever kind ends the client's process, and
    its next message starts a new one: no late answer is taken for a later one, and no two processes ever write one
    client's state. (On other machines of a cluster, Ray's word is taken for the end of a process.)

    Faults: "lost", the process died, or did not start, or left by sys.exit; "late", no answer within `timeout_s`;
    "raised".

    A Ray that is started here listens on the loopback interface alone (unless ray had been imported before), sends no
    usage statistics, and leaves files in its temporary folder that their owner alone can read: what client code prints
    is among them. On a cluster, who may read what is up to the cluster, and records travel to its machines.

    Args:
        setup: what client number i is made of.
        address: of a running cluster ("auto" finds it); None starts a Ray on this machine. Of no effect if this process
            is connected to one already. A cluster that asks for a token is joined as Ray has it, by the environment
            variables RAY_AUTH_MODE=token and RAY_AUTH_TOKEN.
        actors: how many clients work at the same time, and have a process.
        timeout_s: seconds from a message to its answer, opening the client included; starting its process is not.
        threads: of PyTorch in each process; None is as many as in this one, so that sums and bits are the same.
        private_log: a private file that gets the traceback of every error of a client.
        let_through: errors that are raised here instead, made again from their text.

    Raises:
        ModuleNotFoundError: if ray is not installed.
        ValueError: for an argument out of its range.
    """

    def __init__(
        self,
        setup: Callable[[int], Setup],
        *,
        address: str | None = None,
        actors: int = 8,
        timeout_s: float = 300.0,
        threads: int | None = None,
        private_log: Path | None = None,
        let_through: tuple[type[BaseException], ...] = (),
    ) -> None:
        for name, number in (("actors", actors), ("threads", 1 if threads is None else threads)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"expected {name} as an integer >= 1, got {number!r}.")
        if not 0.0 < timeout_s < math.inf:
            raise ValueError(f"expected a number of seconds > 0 to wait for an answer, got {timeout_s!r}.")
        self.parallel = actors
        self._setup, self._timeout_s = setup, timeout_s
        self._threads = torch.get_num_threads() if threads is None else threads
        pools = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
        self._blas_threads = max(pools, default=self._threads) if threads is None else threads
        self._private_log, self._let_through = private_log, let_through
        self._live: OrderedDict[int, _Live] = OrderedDict()  # the one used last at the end
        self._closed = False
        with _process_as_it_was(ENVIRONMENT if address is None else {}):
            self._ray = ray = _import_ray()
            self._started = not ray.is_initialized()
            if self._started:
                own = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": OBJECT_STORE}
                where = {"address": "local", **own} if address is None else {"address": address}
                ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
        self._node = ray.get_runtime_context().get_node_id()
        # Of no CPU, so that a Ray that counts fewer than `actors` of them starts all. No restarts: see `_end`.
        self._make = ray.remote(_Process).options(
            num_cpus=0, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD"
        )

    def ask(self, messages: Mapping[int, bytes], *, round: int) -> dict[int, bytes | Fault]:
        if self._closed:
            raise RuntimeError("expected an engine that is open; this one was closed. Make another.")
        results: dict[int, bytes | Fault] = {}
        # Those that have a process come first, or they might be killed to make room for others of this very batch.
        waiting = deque(sorted(messages, key=lambda client: (client not in self._live, client)))
        steps: Steps = {}
        try:
            while waiting or steps:
                while waiting and len(steps) < self.parallel:
                    client = waiting.popleft()
                    if client in self._live:
                        self._send(client, messages[client], steps)
                    else:
                        self._start(client, steps)
                left = min(step.deadline for step in steps.values()) - time.monotonic()
                # Not ray.wait: what a signal's handler raises, `Preempted` above all, comes out of it as another error.
                done, _ = wait(steps, max(left, 0.0), FIRST_COMPLETED)
                for future in done or [each for each in steps if steps[each].deadline <= time.monotonic()]:
                    step = steps.pop(future)
                    got = self._get(step, future, round) if done else self._too_late(step)
                    if got is None:
                        self._send(step.client, messages[step.client], steps)
                    else:
                        results[step.client] = got
        finally:
            self._end(*(step.client for step in steps.values()))  # none unless something was raised
        return dict(sorted(results.items()))

    def _start(self, client: int, steps: Steps) -> None:
        setup = self._ray.cloudpickle.dumps(self._setup(client))
        busy = {step.client for step in steps.values()}
        idle = [other for other in self._live if other not in busy]
        self._end(*idle[: max(len(self._live) + 1 - self.parallel, 0)])
        live = self._live[client] = _Live(self._make.remote())
        future = live.actor.start.remote(setup, self._threads, self._blas_threads).future()
        steps[future] = _Step(client, "start", time.monotonic() + START_S)

    def _send(self, client: int, message: bytes, steps: Steps) -> None:
        self._live.move_to_end(client)
        future = self._live[client].actor.handle.remote(message).future()
        steps[future] = _Step(client, "answer", time.monotonic() + self._timeout_s)

    def _get(self, step: _Step, future: Future[Any], round: int) -> bytes | Fault | None:
        """What the step came to; None if the client's process has started."""
        try:
            got = future.result()
        except self._ray.exceptions.RayError as error:
            self._end(step.client)
            did = "did not start" if step.doing == "start" else "died"
            return Fault("lost", f"the client's process {did} ({type(error).__name__})")
        if step.doing == "start":
            self._live[step.client].node, self._live[step.client].pid = got
            return None
        if isinstance(got, bytes):
            return got
        self._end(step.client)
        note_error(self._private_log, round, step.client, got.trace)
        for cls in self._let_through:
            if (cls.__module__, cls.__qualname__) in got.classes:
                raise cls(got.text)
        name = got.classes[0][1].rpartition(".")[2]
        if ("builtins", "Exception") not in got.classes:  # SystemExit, say, by which a process is told to leave
            return Fault("lost", f"the client's process left ({name})")
        return Fault("raised", name)

    def _too_late(self, step: _Step) -> Fault:
        self._end(step.client)
        if step.doing == "start":
            return Fault("lost", f"the client's process did not start within {START_S:g} s")
        return Fault("late", f"no answer within {self._timeout_s:g} s")

    def _end(self, *clients: int) -> None:
        """Kill the processes of these clients, and wait until they are gone."""
        ending = [self._live.pop(client) for client in clients if client in self._live]
        for live in ending:
            self._ray.kill(live.actor, no_restart=True)
        for live in ending:
            if live.pid is not None and live.node == self._node:
                _await_end(live.pid)

    def injected(self, round: int, client: int) -> Kind | None:
        return None

    def close(self) -> None:
        """Kill all clients, and stop Ray if this engine has started it."""
        if self._closed:
            return
        self._closed = True
        self._end(*self._live)
        if self._started:
            with _process_as_it_was({}):
                self._ray.shutdown()


def _import_ray() -> ModuleType:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "expected the package ray, which runs clients as actors, and it is not installed: "
            "pip install 'dpgen-bench[ray]', or let clients run in this process with federation=inproc."
        ) from error
    return ray


def _await_end(pid: int) -> None:
    """Wait until there is no such process.

    Raises:
        RuntimeError: if it does not end.
    """
    deadline = time.monotonic() + END_S
    with suppress(ProcessLookupError, PermissionError):  # gone; or gone, and its number is another user's by now
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.005)
        raise RuntimeError(
            f"process {pid} of a client was killed and is still there after {END_S:g} s; a second one might write to "
            "the same state. End it by hand, then run the same command again."
        )


@contextmanager
def _process_as_it_was(environment: Mapping[str, str]) -> Iterator[None]:
    """Starting and stopping Ray changes this process in ways that runs would notice; afterwards, they are undone.

    It takes SIGTERM for itself, by which a cluster asks a run for a checkpoint, and draws from Python's global random
    generator, whose state is part of that checkpoint. What it starts inherits the environment, with what `environment`
    adds to it, and a mask by which files are private.
    """
    on_main = threading.current_thread() is threading.main_thread()  # no other may set handlers, and Ray does not
    handler = signal.getsignal(signal.SIGTERM)
    state = random.getstate()
    added = {name: value for name, value in environment.items() if name not in os.environ}
    os.environ.update(added)
    mask = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(mask)
        for name in added:
            os.environ.pop(name, None)
        random.setstate(state)
        if on_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)

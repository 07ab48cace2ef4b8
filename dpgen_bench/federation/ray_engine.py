"""An engine that runs each client as a Ray actor, in its own process on this machine or on a cluster.

It needs the extra `ray` (`pip install 'dpgen-bench[ray]'`).
"""

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

from dpgen_bench.federation.engines import Fault, Handler, Setup, checked_answer, note_error

OBJECT_STORE = 256 * 2**20  # bytes; messages above 100 kB pass through it
START_S = 300.0  # limit for the start of a process; importing torch takes seconds on a machine with few cores
END_S = 30.0  # limit for the end of a killed process, which usually takes milliseconds

# Environment of a Ray that this engine starts. Ray reads it when it is imported or started. Variables that the user has
# set are not changed.
ENVIRONMENT = {
    # Without other machines in the cluster, Ray listens on the loopback interface only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Actors reserve no share of the accelerator, but may use it.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass(frozen=True)
class _Raised:
    """An error of client code, as text, because the server unpickles nothing that a client has made.

    Attributes:
        classes: module and name of the error's class and of its base classes, in their order of inheritance.
        text: the error's message.
        trace: the traceback.
    """

    classes: list[tuple[str, str]]
    text: str
    trace: str


class _Process:
    """One client in the process of an actor, opened at its first message.

    Its methods never raise, because Ray would write the text and traceback of an error to its own logs, and print some.
    """

    def start(self, setup: bytes, threads: int, blas_threads: int) -> tuple[str, int]:
        """Unpickle the setup and set the numbers of threads; return the node and the process id.

        By default, Ray starts processes with OMP_NUM_THREADS=1.
        """
        import ray

        torch.set_num_threads(threads)
        threadpool_limits(blas_threads, user_api="blas")
        self._opened: Handler | None = None
        try:
            self._setup: Setup | _Raised = pickle.loads(setup)  # may take long, because it imports modules
        except BaseException as error:
            self._setup = _raised(error)
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def handle(self, message: bytes) -> bytes | _Raised:
        if isinstance(self._setup, _Raised):
            return self._setup
        try:
            if self._opened is None:
                self._opened = self._setup.open()
            return checked_answer(self._opened, message)
        except BaseException as error:
            return _raised(error)


def _raised(error: BaseException) -> _Raised:
    classes = [(cls.__module__, cls.__qualname__) for cls in type(error).__mro__]
    _, _, text = "".join(traceback.format_exception_only(error)).partition(": ")  # str(error) might raise itself
    return _Raised(classes, text.rstrip("\n"), "".join(traceback.format_exception(error)))


@dataclass
class _Live:
    """An actor; its node and process id are known after it has started."""

    actor: Any
    node: str = ""
    pid: int | None = None


@dataclass(frozen=True)
class _Step:
    """An event that the engine waits for: the start of a client's process, or its answer."""

    client: int
    doing: Literal["start", "answer"]
    deadline: float


Steps = dict[Future[Any], _Step]


class RayEngine:
    """Runs each client as a Ray actor in its own process, which receives no other client's records.

    An actor is made at the client's first message, from its `Setup` alone. At most `actors` of them exist at a time;
    the one used least recently is killed to make room, so clients must keep their state on disk. Larger batches of
    messages are sent in parts. Any fault ends the client's process, and the client's next message starts a new process.
    So an answer that is late is never taken for an answer to a later message, and two processes never write the state
    of one client. (For a process on another machine of a cluster, the engine relies on Ray to end it.)

    Faults: "lost", if the process died, did not start, or ended by sys.exit; "late", if there was no answer within
    `timeout_s`; "raised".

    A Ray that this engine starts listens on the loopback interface only (unless ray was imported before), sends no
    usage statistics, and writes its logs, which contain what client code prints, to files that only their owner can
    read. On a cluster, records are sent to its machines, and the cluster decides who can read them.

    Args:
        setup: returns the setup of a client, given its number.
        address: the address of a running cluster ("auto" finds it); None starts a Ray on this machine. It has no effect
            if this process is already connected to a Ray. For a cluster that requires a token, set the environment
            variables RAY_AUTH_MODE=token and RAY_AUTH_TOKEN.
        actors: the number of clients that have a process and run at the same time.
        timeout_s: the limit in seconds from a message to its answer. It includes opening the client, but not the start
            of its process.
        threads: the number of threads of PyTorch in each process; None takes the number in this process, so that
            results are bit-identical to those of this process.
        private_log: a private file to which the traceback of every error of a client is appended.
        let_through: classes of errors that are raised in this process (with the same text) instead of being turned into
            faults.

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
        self._live: OrderedDict[int, _Live] = OrderedDict()  # ordered from the least to the most recently used
        self._closed = False
        with _process_restored(ENVIRONMENT if address is None else {}):
            self._ray = ray = _import_ray()
            self._started = not ray.is_initialized()
            if self._started:
                own = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": OBJECT_STORE}
                where = {"address": "local", **own} if address is None else {"address": address}
                ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
        self._node = ray.get_runtime_context().get_node_id()
        # Actors reserve no CPU, so that Ray starts all of them on a machine with few CPUs. They are not restarted,
        # because two processes must never write one client's state.
        self._make = ray.remote(_Process).options(
            num_cpus=0, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD"
        )

    def ask(self, messages: Mapping[int, bytes], *, round: int) -> dict[int, bytes | Fault]:
        if self._closed:
            raise RuntimeError("expected an engine that is open, got one that was closed; make a new engine.")
        results: dict[int, bytes | Fault] = {}
        # Clients that have a process come first. Otherwise they could be killed to make room for others of this batch.
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
                # ray.wait is not used, because it replaces an error of a signal handler, such as `Preempted`.
                done, _ = wait(steps, max(left, 0.0), FIRST_COMPLETED)
                for future in done or [each for each in steps if steps[each].deadline <= time.monotonic()]:
                    step = steps.pop(future)
                    result = self._result(step, future, round) if done else self._end_overdue(step)
                    if result is None:
                        self._send(step.client, messages[step.client], steps)
                    else:
                        results[step.client] = result
        finally:
            self._end(*(step.client for step in steps.values()))  # steps is empty unless an error was raised
        return dict(sorted(results.items()))

    def _start(self, client: int, steps: Steps) -> None:
        """Start the process of a client, after ending those used least recently that are too many."""
        setup = self._ray.cloudpickle.dumps(self._setup(client))
        busy = {step.client for step in steps.values()}
        idle = [other for other in self._live if other not in busy]
        self._end(*idle[: max(len(self._live) + 1 - self.parallel, 0)])
        live = self._live[client] = _Live(self._make.remote())
        future = live.actor.start.remote(setup, self._threads, self._blas_threads).future()
        steps[future] = _Step(client, "start", time.monotonic() + START_S)

    def _send(self, client: int, message: bytes, steps: Steps) -> None:
        """Send a message to a client whose process runs; it is then the one used most recently."""
        self._live.move_to_end(client)
        future = self._live[client].actor.handle.remote(message).future()
        steps[future] = _Step(client, "answer", time.monotonic() + self._timeout_s)

    def _result(self, step: _Step, future: Future[Any], round: int) -> bytes | Fault | None:
        """The answer or fault in which a step ended; None if the client's process has started.

        Raises:
            Exception: an error of client code whose class is in `let_through`.
        """
        try:
            result = future.result()
        except self._ray.exceptions.RayError as error:
            self._end(step.client)
            outcome = "did not start" if step.doing == "start" else "died"
            return Fault("lost", f"the client's process {outcome} ({type(error).__name__})")
        if step.doing == "start":
            self._live[step.client].node, self._live[step.client].pid = result
            return None
        if isinstance(result, bytes):
            return result
        self._end(step.client)
        note_error(self._private_log, round, step.client, result.trace)
        for cls in self._let_through:
            if (cls.__module__, cls.__qualname__) in result.classes:
                raise cls(result.text)
        name = result.classes[0][1].rpartition(".")[2]
        if ("builtins", "Exception") not in result.classes:  # such as SystemExit
            return Fault("lost", f"the client's process left ({name})")
        return Fault("raised", name)

    def _end_overdue(self, step: _Step) -> Fault:
        """End the process of a step whose deadline has passed; return the fault."""
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

    def close(self) -> None:
        """Kill the processes of all clients, and stop Ray if this engine has started it."""
        if self._closed:
            return
        self._closed = True
        self._end(*self._live)
        if self._started:
            with _process_restored({}):
                self._ray.shutdown()


def _import_ray() -> ModuleType:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "expected the package ray, which runs clients as actors, to be installed, got no such package: "
            "pip install 'dpgen-bench[ray]', or run clients in this process with federation=inproc."
        ) from error
    return ray


def _await_end(pid: int) -> None:
    """Wait until a killed process has ended.

    Raises:
        RuntimeError: if it does not end within `END_S` seconds.
    """
    deadline = time.monotonic() + END_S
    with suppress(ProcessLookupError, PermissionError):  # PermissionError: the id now belongs to another user's process
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.005)
        raise RuntimeError(
            f"expected process {pid} of a client to end within {END_S:g} s after it was killed, got a process that "
            "still runs and could write to the client's state; end it by hand, then run the same command again."
        )


@contextmanager
def _process_restored(environment: Mapping[str, str]) -> Iterator[None]:
    """Undo what Ray changes in this process when it is started or stopped in the block.

    Ray replaces the handler of SIGTERM, with which a cluster asks a run for a checkpoint, and draws from Python's
    global random generator, whose state is part of that checkpoint. Processes that Ray starts in the block inherit the
    environment, with the variables of `environment` unless they are set, and a umask that makes files private.
    """
    on_main = threading.current_thread() is threading.main_thread()  # only the main thread can set handlers
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

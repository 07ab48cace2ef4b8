"""Stop signals of a cluster or a user: the run writes a checkpoint and exits, so that the same command continues it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Preempted(SystemExit):
    """Raised when the process got a stop signal. When started again, the run continues from its last checkpoint."""


# SIGUSR2 is what submitit sends before a job's time is over, SIGINT is Ctrl-C.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def announce_stop() -> None:
    """Say that the process stops soon; called by handlers of Ctrl-C, in which print must not be called."""
    with contextlib.suppress(OSError):
        os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")


class StopSignals:
    """A context in which a stop signal waits for the end of the step if `in_loop()`, and else raises `Preempted`.

    On exit, the handler that was installed before is called, because a launcher's handler requeues the job (submitit);
    but not Python's own handler of Ctrl-C, which would print a traceback. A second Ctrl-C raises KeyboardInterrupt at
    once: the run then continues from its last checkpoint.

    Attributes:
        received: The number of the signal, or None.
    """

    def __init__(self, in_loop: Callable[[], bool]) -> None:
        self._in_loop = in_loop
        self._before: dict[int, Any] = {}
        self.received: int | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, stopping = self.received == number == signal.SIGINT, self.received is not None
        self.received = number
        if again:
            raise KeyboardInterrupt
        if stopping:  # such as Ctrl-C in a terminal, which the process of the multirun passes on as SIGTERM
            return
        if not self._in_loop():
            raise Preempted(128 + number)
        of_another_process = isinstance(getattr(self._before.get(number), "__self__", None), StopSignals)
        if number == signal.SIGINT and not of_another_process:  # the process of the multirun announces it once
            announce_stop()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, Preempted) and self.received is not None:
            handler = self._before.get(self.received)
            if callable(handler) and handler is not signal.default_int_handler:
                handler(self.received, None)


def end_with(parent: int) -> None:
    """End this process when its parent ends, even in the middle of a long computation, and not by a stop signal.

    Ctrl-C and signals of a cluster may reach all processes. The parent ends its own.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

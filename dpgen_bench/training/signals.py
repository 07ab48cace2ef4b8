"""SIGTERM and SIGUSR1, a cluster's ways to say that the machine is wanted: checkpoint, leave, be requeued."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Preempted(SystemExit):
    """The process was asked to stop (SIGTERM, SIGUSR1); a checkpoint is on disk."""


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """While entered, a stop signal waits for the next checkpoint if `in_loop()`, else raises Preempted at once.

    A handler that a launcher had installed before (submitit's, which requeues the job) is called on the way out.
    """

    def __init__(self, in_loop: Callable[[], bool]) -> None:
        self._in_loop = in_loop
        self._before: dict[int, Any] = {}
        self.received: int | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._before[number] = signal.signal(number, self._caught)
        return self

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if not self._in_loop():
            raise Preempted(128 + number)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, Preempted) and self.received is not None:
            handler = self._before.get(self.received)
            if callable(handler):
                handler(self.received, None)

"""Stop signals of a cluster (SIGTERM, SIGUSR1): the run writes a checkpoint and exits, so that it can be requeued."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Preempted(SystemExit):
    """Raised when the process got a stop signal. When started again, the run continues from its last checkpoint."""


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """A context in which a stop signal waits for the end of the step if `in_loop()`, and else raises `Preempted`.

    On exit, the handler that was installed before is called, because a launcher's handler requeues the job (submitit).

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

"""Delays signals that stop the process until the end of a release, because an interrupted release counts as failed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from dpgen_bench.training.signals import STOP_SIGNALS


class Uninterrupted:
    """A context in which the `STOP_SIGNALS` (Ctrl-C among them) wait; on exit their own handlers get them.

    Signals in a nested context wait for the end of the outer one. Outside the main thread the context does nothing,
    because Python calls handlers and raises KeyboardInterrupt in the main thread only.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._waiting: list[int] = []
        self._over = False

    def __enter__(self) -> Uninterrupted:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in STOP_SIGNALS:
                    handler = signal.getsignal(number)
                    if handler is not None and handler != signal.SIG_IGN:  # None: a handler that Python cannot restore
                        self._before[number] = handler
                        signal.signal(number, self._caught)
            except BaseException:  # a signal arrived before its handler was replaced
                self._restore()
                raise
        return self

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self._over:  # a handler raised on exit, before this one was replaced
            handler = self._before[number]
            if callable(handler):
                handler(number, frame)
            else:
                signal.signal(number, handler)
                signal.raise_signal(number)
            return
        if number not in self._waiting:
            self._waiting.append(number)
            if number == signal.SIGINT:
                with contextlib.suppress(OSError):  # os.write, because print must not be called in a handler
                    os.write(2, b"\nstopping after this release, because an interrupted release would mark the run\n")

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()
        for number in self._waiting:
            signal.raise_signal(number)

    def _restore(self) -> None:
        self._over = True
        for number, handler in self._before.items():
            signal.signal(number, handler)

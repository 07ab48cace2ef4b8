"""What a person sees while a run trains or is measured: how far it is, how long it took, and how long it will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

QUIET_S = 5.0  # what takes less time than this shows nothing


class Progress(Protocol):
    """`Context.steps` reports to it where a loop stands."""

    def start(self, phase: str, total: int, done: int) -> None: ...

    def step(self, done: int) -> None: ...

    def finish(self) -> None: ...


class NoProgress:
    """Shows nothing."""

    def start(self, phase: str, total: int, done: int) -> None:
        pass

    def step(self, done: int) -> None:
        pass

    def finish(self) -> None:
        pass


class ProgressBar:
    """A bar on a terminal; elsewhere (a log file, a cluster), where rich shows no bar, one line per tenth.

    Args:
        title: whose progress this is.
        note: more to show, such as the epsilon spent. It may take a moment, so it is asked ten times per loop.
    """

    def __init__(self, title: str, note: Callable[[], str] = lambda: "") -> None:
        self._title = title
        self._note = note
        self._bar: RichProgress | None = None

    def start(self, phase: str, total: int, done: int = 0) -> None:
        self._name = f"{self._title} {phase}"
        self._total, self._first = total, done
        self._tenth = 10 * done // max(total, 1)
        self._began = time.monotonic()

    def step(self, done: int) -> None:
        tenth = 10 * done // self._total
        moved, self._tenth = tenth > self._tenth, max(tenth, self._tenth)
        gone = time.monotonic() - self._began
        if gone < QUIET_S:
            return
        if sys.stderr.isatty():
            if self._bar is None:
                self._bar, moved = self._open(), True
            if moved:
                self._bar.update(self._task, note=self._note())
            self._bar.update(self._task, completed=done)
        elif moved:
            left = gone * (self._total - done) / max(done - self._first, 1)
            words = [f"{done}/{self._total}", self._note(), f"{gone:.0f} s gone", f"{left:.0f} s left"]
            print(f"  {self._name}: {', '.join(filter(None, words))}", file=sys.stderr, flush=True)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _open(self) -> RichProgress:
        bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = bar.add_task(self._name, total=self._total, completed=self._first, note="")
        bar.start()
        return bar

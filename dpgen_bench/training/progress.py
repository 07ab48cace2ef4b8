"""Progress on the terminal while a run is trained or evaluated: steps done, time elapsed, and estimated time left."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

RECORD_S = 2.0  # seconds between two records of the progress
QUIET_S = 5.0  # nothing is shown in the first seconds of a loop


class Progress(Protocol):
    """Gets the progress of a loop from `Context.steps`."""

    def start(self, phase: str, total: int, done: int) -> None:
        """A loop of `total` steps begins, of which `done` were made before an interruption."""
        ...

    def step(self, done: int) -> None:
        """`done` steps of the loop have been made."""
        ...

    def finish(self) -> None:
        """The loop has ended."""
        ...


class NoProgress:
    """Shows nothing."""

    def start(self, phase: str, total: int, done: int) -> None:
        pass

    def step(self, done: int) -> None:
        pass

    def finish(self) -> None:
        pass


class RecordedProgress:
    """Writes the progress to a JSON file for other processes, such as `dpgen runs`, and passes it on.

    The file is written at most every `RECORD_S` seconds and removed when the loop ends. A reader may find it
    incomplete; an error while it is written must not end a run.
    """

    def __init__(self, path: Path, progress: Progress) -> None:
        self._path = path
        self._progress = progress

    def start(self, phase: str, total: int, done: int = 0) -> None:
        self._phase, self._total = phase, total
        self._written = time.monotonic()
        self._progress.start(phase, total, done)

    def step(self, done: int) -> None:
        if time.monotonic() - self._written >= RECORD_S:
            self._written = time.monotonic()
            with contextlib.suppress(OSError):
                self._path.write_text(json.dumps({"phase": self._phase, "step": done, "steps": self._total}))
        self._progress.step(done)

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._progress.finish()


class ProgressBar:
    """Shows a bar on a terminal, and prints one line for each tenth of the loop elsewhere (a log file, a cluster).

    Args:
        title: Name of the run, in front of the name of the phase.
        note: Returns a text to show, such as the epsilon spent. It may be slow, so it is called ten times per loop.
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
        is_new_tenth, self._tenth = tenth > self._tenth, max(tenth, self._tenth)
        elapsed = time.monotonic() - self._began
        if elapsed < QUIET_S:
            return
        if sys.stderr.isatty():
            if self._bar is None:
                self._bar, is_new_tenth = self._open(), True
            if is_new_tenth:
                self._bar.update(self._task, note=self._note())
            self._bar.update(self._task, completed=done)
        elif is_new_tenth:
            left = elapsed * (self._total - done) / max(done - self._first, 1)
            parts = [f"{done}/{self._total}", self._note(), f"{elapsed:.0f} s elapsed", f"{left:.0f} s left"]
            print(f"  {self._name}: {', '.join(filter(None, parts))}", file=sys.stderr, flush=True)

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

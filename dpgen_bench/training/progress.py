"""What a person sees while a run trains or is measured: how far it is, epsilon spent so far, time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

T = TypeVar("T")


class Progress(Protocol):
    """Told by `Context.steps` where a loop stands."""

    def start(self, phase: str, total: int, done: int) -> None: ...

    def step(self, done: int) -> None: ...

    def finish(self) -> None: ...


class Silent:
    """Shows nothing."""

    def start(self, phase: str, total: int, done: int) -> None:
        pass

    def step(self, done: int) -> None:
        pass

    def finish(self) -> None:
        pass


class Shown:
    """A bar on a terminal; elsewhere (a log file, a cluster) one line per tenth of the loop.

    Args:
        title: whose progress this is.
        epsilon_spent: epsilon of the releases made so far. Composing a ledger takes a moment, so it is asked ten
            times per loop and the figure shown is the one at the last tenth.
    """

    def __init__(self, title: str, epsilon_spent: Callable[[], float]) -> None:
        self._title = title
        self._epsilon_spent = epsilon_spent
        self._bar: RichProgress | None = None

    def start(self, phase: str, total: int, done: int) -> None:
        self._phase, self._total, self._first = phase, total, done
        self._began = time.monotonic()
        self._tenth = 10 * done // max(total, 1)
        self._epsilon = self._epsilon_spent()
        if sys.stderr.isatty():
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("ε spent {task.fields[epsilon]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(
                f"{self._title} {phase}", total=total, completed=done, epsilon=f"{self._epsilon:.3g}"
            )
            self._bar.start()

    def step(self, done: int) -> None:
        tenth = 10 * done // self._total
        moved, self._tenth = tenth > self._tenth, max(tenth, self._tenth)
        if moved:
            self._epsilon = self._epsilon_spent()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, epsilon=f"{self._epsilon:.3g}")
        elif moved:
            elapsed = time.monotonic() - self._began
            left = elapsed * (self._total - done) / max(done - self._first, 1)
            print(
                f"{self._title} {self._phase}: step {done}/{self._total}, ε spent {self._epsilon:.3g}, "
                f"{elapsed:.0f} s gone, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def counted(items: Sequence[T], title: str, slow_s: float = 5.0) -> Iterator[T]:
    """Go through `items`, and show how far that is once it has taken `slow_s` seconds.

    A bar on a terminal; elsewhere one line per tenth on standard error. What is fast says nothing.
    """
    began, tenth, bar = time.monotonic(), 0, None
    try:
        for done, item in enumerate(items):
            elapsed = time.monotonic() - began
            if elapsed > slow_s and sys.stderr.isatty():
                if bar is None:
                    bar = RichProgress(console=Console(stderr=True), transient=True)
                    task = bar.add_task(title, total=len(items))
                    bar.start()
                bar.update(task, completed=done)
            elif elapsed > slow_s and 10 * done // len(items) > tenth:
                tenth = 10 * done // len(items)
                left = elapsed * (len(items) - done) / done
                print(f"  {title}: {done}/{len(items)}, {elapsed:.0f} s gone, {left:.0f} s left", file=sys.stderr)
            yield item
    finally:
        if bar is not None:
            bar.stop()

"""How many runs of a sweep are finished: a bar below the output of its runs on a terminal, else a line each time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from dpgen_bench.tables.jobs import Job, is_finished, state_of

_FINISHED = re.compile(r"run [0-9a-f]+ .*finished")  # what a run prints at its end


class SweepProgress:
    """A context that counts the finished runs of a sweep.

    On a terminal, `output` prints the lines of the runs above the bar. Elsewhere the runs write to the same place as
    the sweep, and `report` prints a line.
    """

    def __init__(self, name: str, jobs: Sequence[Job], console: Console | None = None) -> None:
        self._name, self._total = name, len(jobs)
        self._missing = [job for job in jobs if not job.finished]
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None

    @property
    def shows_bar(self) -> bool:
        """Whether there is a terminal."""
        return self._console.is_terminal

    @property
    def finished(self) -> int:
        """The number of runs that were finished at the last count."""
        return self._total - len(self._missing)

    def __enter__(self) -> SweepProgress:
        if self.shows_bar:
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task(f"{self._name}: runs", total=self._total, completed=self.finished)
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def output(self, line: str) -> None:
        """Print a line of a run above the bar, and count again if it says that a run is finished."""
        assert self._bar is not None
        self._bar.console.print(Text.from_ansi(line), soft_wrap=True)
        if _FINISHED.match(line):
            self.count()

    def count(self) -> None:
        """Count the finished runs again."""
        self._missing = [job for job in self._missing if not is_finished(state_of(job.spec, job.folder))]
        if self._bar is not None:
            self._bar.update(self._task, completed=self.finished)

    def report(self) -> None:
        """Count again and, without a terminal, print how many runs are finished."""
        self.count()
        if not self.shows_bar:
            print(f"{self._name}: {self.finished} of {self._total} runs finished", flush=True)

"""What a client keeps on its own disk: its states, the history that led to each, and the questions it has answered."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dpgen_bench.privacy.state_file import Parts, StateFile
from dpgen_bench.utils.files import make_private, write_atomic


class Exhausted(RuntimeError):
    """A client was asked for more different answers than it may give."""


@dataclass(frozen=True)
class Point:
    """Where a client stood after an answer.

    Attributes:
        version: the round + 1; 0 before any.
        history: names all questions that led here, in order; "" before any. A function of what the server sent alone.
        row: the number under which the state is kept; 0: the first state.
    """

    version: int = 0
    history: str = ""
    row: int = 0


class Memory:
    """The states of one client: the first, that of the server's last checkpoint, and the newest.

    Guarantees: a state is a function of the client's records and of its point's history. So a question, together with
    the history of the state that it meets, has one answer; and whether it was asked before can be told, and written
    down before the answer leaves, without looking at a record.

    Args:
        folder: of this client; None keeps everything in memory.
        first: the state before any answer.
    """

    def __init__(self, folder: Path | None, device: torch.device, first: Callable[[], Parts]) -> None:
        self._folder, self._device, self._first = folder, device, first
        self._rows = StateFile(folder and folder / "state", 1, slots=2)
        self._points: list[Point] = []
        self._answered: set[str] = set()
        if folder is not None:
            make_private(folder)
            if (folder / "answered").exists():
                self._answered = set((folder / "answered").read_text().split())
            if (folder / "points.json").exists():
                self._points = [Point(**point) for point in json.loads((folder / "points.json").read_text())]

    def before(self, round_: int, committed: int) -> Point:
        """The newest point before a round. A later one is of a server that was killed, and asks again.

        Raises:
            RuntimeError: if the state that the server's checkpoint goes on from is damaged.
        """
        for point in sorted(self._points, key=lambda point: -point.version):
            if point.version > round_:
                continue
            if point.row == 0 or self._rows.find(0, point.row) is not None:
                return point
            if point.version <= committed:
                raise RuntimeError(
                    f"the state of a client in {self._folder} is damaged; restore the folder, or start the run again, "
                    "which with privacy.noise=os spends its epsilon a second time."
                )
        return Point()

    def state(self, point: Point) -> Parts:
        """The state of a point that `before` gave."""
        slot = self._rows.find(0, point.row) if point.row else None
        return self._first() if slot is None else self._rows.read(0, slot, self._device)

    def check(self, after: Parts) -> None:
        """Raise ValueError for a state of another type, or of another layout than that of earlier answers."""
        layout = {name: tuple(part.shape) for name, part in after.items()}
        if any(part.dtype != torch.float32 for part in after.values()):
            raise ValueError("expected a client's state as float32 tensors.")
        if after and self._rows.layout not in (None, layout):
            raise ValueError(f"expected a client's state as {self._rows.layout} every time, got {layout}.")

    def leave(self, point: Point, after: Parts, round_: int, committed: int, history: str) -> None:
        """Keep the state after an answer that began at `point`; with {} it is as it was.

        Raises:
            ValueError: for state of another layout than that of earlier answers.
        """
        kept = self.before(committed, committed)
        row = point.row
        if after:
            numbers = self._rows.versions(0)
            row = int(numbers.max()) + 1  # a number is never used twice, or a point could mean two states
            slot = self._rows.find(0, kept.row) if kept.row else None
            self._rows.write(0, 0 if slot is None else 1 - slot, row, after)
        self._points = [kept, Point(round_ + 1, history, row)]
        if self._folder is not None:
            write_atomic(self._folder / "points.json", json.dumps([asdict(point) for point in self._points]))

    def count(self, question: str, most: int) -> None:
        """Write down that this question is answered, before it is; a second time changes nothing.

        Raises:
            Exhausted: if it would be one more than `most`.
        """
        if question in self._answered:
            return
        if len(self._answered) >= most:
            raise Exhausted(f"this client has given the {most} answers that it may give.")
        self._answered.add(question)
        if self._folder is not None:
            with open(self._folder / "answered", "a") as out:
                out.write(question + "\n")
                out.flush()
                os.fsync(out.fileno())

    def flush(self) -> None:
        """Push states to disk."""
        self._rows.flush()

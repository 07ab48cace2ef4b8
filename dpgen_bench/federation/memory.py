"""Stores what a client has to remember: its states, the history that led to each, and the questions it has answered.

A *question* is the hash of a message together with the history of the state that the message meets.
"""

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
    """Raised when a client is asked for more different answers than it may give."""


@dataclass(frozen=True)
class Point:
    """A point in a client's history: the state that it had after an answer.

    Attributes:
        version: the number of the round + 1; 0 before the first answer.
        history: identifies all questions that led here, in their order; "" before the first answer. It is a function
            of the server's messages alone.
        row: the number under which the state is stored; 0 is the first state.
    """

    version: int = 0
    history: str = ""
    row: int = 0


class Memory:
    """The states of one client: its first state, the one of the server's last checkpoint, and the newest one.

    Guarantees: a state is a function of the client's records and of the history of its point. So a message that meets a
    state with a given history has exactly one answer. Whether the question was asked before can be determined, and
    written to disk before the answer is sent, without looking at a record.

    Args:
        folder: the client's own folder; None keeps everything in memory.
        first: returns the state before the first answer.
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
        """The newest point before a round. A later point was left by a server that was killed and now asks again.

        Args:
            round_: the number of the round.
            committed: the number of rounds that the server's last checkpoint contains.

        Raises:
            RuntimeError: if the state at the server's checkpoint is damaged.
        """
        for point in sorted(self._points, key=lambda point: -point.version):
            if point.version > round_:
                continue
            if point.row == 0 or self._rows.find(0, point.row) is not None:
                return point
            if point.version <= committed:
                raise RuntimeError(
                    f"expected the state of a client at its last checkpoint in {self._folder}, got a damaged file; "
                    "restore the folder, or start the run again, which with privacy.noise=os spends its epsilon a "
                    "second time."
                )
        return Point()

    def state(self, point: Point) -> Parts:
        """The state of a point that `before` returned."""
        state = self._rows.read(0, point.row, self._device) if point.row else None
        return self._first() if state is None else state

    def check(self, after: Parts) -> None:
        """Raise ValueError unless a state has float32 tensors, of the names and shapes that earlier states had."""
        layout = {name: tuple(part.shape) for name, part in after.items()}
        if any(part.dtype != torch.float32 for part in after.values()):
            raise ValueError("expected a client's state as float32 tensors.")
        if after and self._rows.layout not in (None, layout):
            raise ValueError(f"expected a client's state as {self._rows.layout} every time, got {layout}.")

    def store(self, point: Point, after: Parts, round_: int, committed: int, history: str) -> None:
        """Store the state after an answer, and forget all points but the new one and the one of the checkpoint.

        Args:
            point: where the client was before the answer.
            after: its state after the answer; {} leaves the state unchanged.
            round_: the number of the round.
            committed: the number of rounds that the server's last checkpoint contains.
            history: identifies the new point.

        Raises:
            ValueError: for a state of another layout than that of earlier states.
        """
        kept = self.before(committed, committed)
        row = point.row
        if after:
            numbers = self._rows.versions(0)
            row = int(numbers.max()) + 1  # if a number were used twice, a point could refer to two states
            found = self._rows.find(0, kept.row) if kept.row else None
            self._rows.write(0, 0 if found is None else 1 - found[0], row, after)
        self._points = [kept, Point(round_ + 1, history, row)]
        if self._folder is not None:
            write_atomic(self._folder / "points.json", json.dumps([asdict(point) for point in self._points]))

    def count(self, question: str, max_answers: int) -> None:
        """Count a question, on disk too, before it is answered. A question that was counted before costs nothing.

        Raises:
            Exhausted: if `max_answers` other questions were counted before.
        """
        if question in self._answered:
            return
        if len(self._answered) >= max_answers:
            raise Exhausted(f"this client has given the {max_answers} answers that it may give.")
        self._answered.add(question)
        if self._folder is not None:
            with open(self._folder / "answered", "a") as out:
                out.write(question + "\n")
                out.flush()
                os.fsync(out.fileno())

    def flush(self) -> None:
        """Write all states to disk."""
        self._rows.flush()

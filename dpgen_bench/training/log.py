"""The public log of a run, log.jsonl: one JSON object per line. Resumption truncates it to the last checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from dpgen_bench.training.tracker import Tracker


class Log:
    """Rows in memory which, if a path is given, are also appended to a file, and passed to a tracker.

    Attributes:
        rows: The rows written by this process.
        muted: Whether `write` does nothing.
    """

    def __init__(self, path: Path | None, tracker: Tracker | None = None) -> None:
        self.path = path
        self._tracker = tracker or Tracker()
        self.rows: list[dict[str, Any]] = []
        self.muted = False
        self._file: Any = None

    def truncate(self, length: int) -> None:
        """Open the file and keep its first `length` bytes: the steps after the last checkpoint are made again."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115 (stays open for the run)
        self._file.truncate(length)
        self._file.seek(0, os.SEEK_END)  # the position stays behind the new end otherwise, and `flush` returns it
        self._tracker.start()

    def write(self, row: dict[str, Any]) -> None:
        """Add a row, unless the log is muted."""
        if self.muted:
            return
        self.rows.append(row)
        if self._file is not None:
            self._file.write(json.dumps(row).encode() + b"\n")
            self._tracker.write(row)

    def flush(self) -> int:
        """Write all buffered rows to the file, and return its length in bytes."""
        if self._file is None:
            return 0
        self._file.flush()
        return self._file.tell()


def read_scalar(path: Path, name: str) -> np.ndarray:
    """The values of one scalar in a log.jsonl, in order, float64 [n], without the rows that lack it."""
    values = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # the run was killed while it wrote the line
            continue
        value = row.get(name) if isinstance(row, dict) else None
        if isinstance(value, float | int) and not isinstance(value, bool):
            values.append(float(value))
    return np.array(values)

"""The public log of a run: one JSON object per line, cut back to the last checkpoint when a run is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Log:
    """Rows kept in memory and, with a path, appended to log.jsonl."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.muted = False
        self._file: Any = None

    def truncate(self, length: int) -> None:
        """Drop what was logged after the last checkpoint: those steps are about to be made again."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115 (stays open for the run)
        self._file.truncate(length)

    def write(self, row: dict[str, Any]) -> None:
        """Add a row, unless muted."""
        if self.muted:
            return
        self.rows.append(row)
        if self._file is not None:
            self._file.write(json.dumps(row).encode() + b"\n")

    def flush(self) -> int:
        """Push everything to the file; its length in bytes."""
        if self._file is None:
            return 0
        self._file.flush()
        return self._file.tell()

"""The public record of a run: its log, its counters, and the bytes that clients and the server would exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpgen_bench.training.log import Log
from dpgen_bench.training.tracker import Tracker


class PublicRecord:
    """Log and counters, which are public: only functions of releases and public inputs may be written.

    Checkpoints contain both, so that an interrupted run has the same log and counts as an uninterrupted one.

    Attributes:
        log: Rows of scalars.
        phase, step: The current phase and step, which are part of each row.
        bytes_sent: Numbers of bytes by direction.
        counters: Counts by name.
    """

    def __init__(self) -> None:
        self.log = Log(None)
        self.phase, self.step = "start", 0
        self.bytes_sent: dict[str, int] = {}
        self.counters: dict[str, int] = {}

    def open(self, path: Path | None, length: int, muted: bool, tracker: Tracker | None = None) -> None:
        """Append the log to a file after its first `length` bytes; `muted` until the run has resumed."""
        self.log = Log(path, tracker)
        self.log.truncate(length)
        self.log.muted = muted

    def write(self, **scalars: float | str) -> None:
        """Write a row of the current phase and step with these scalars into the log."""
        self.log.write({"phase": self.phase, "step": self.step, **scalars})

    def count_bytes(self, *, server_to_client: int = 0, client_to_server: int = 0) -> None:
        """Add to the numbers of bytes sent.

        Raises:
            ValueError: For anything but integers >= 0.
        """
        for direction, count in (("server_to_client", server_to_client), ("client_to_server", client_to_server)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"expected {direction} as an integer number of bytes >= 0, got {count!r}.")
            self.bytes_sent[direction] = self.bytes_sent.get(direction, 0) + count

    def count(self, **counters: int) -> None:
        """Add to named counters.

        Raises:
            ValueError: For anything but integers >= 0.
        """
        for name, count in counters.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"expected {name} as an integer >= 0, got {count!r}.")
            self.counters[name] = self.counters.get(name, 0) + count

    def restore(self, bytes_sent: dict[str, Any], counters: dict[str, Any]) -> None:
        """Set bytes and counters to those of a checkpoint."""
        self.bytes_sent, self.counters = dict(bytes_sent), dict(counters)

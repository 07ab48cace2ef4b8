"""What a run tells everybody while it trains: its log, its counters, and the bytes that clients would exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpgen_bench.training.log import Log


class PublicRecord:
    """Public by rule: only functions of releases and public inputs may enter. Exact across a kill, see `Loop`.

    Attributes:
        log: rows of scalars. phase, step: where the run stands, for the log.
        bytes_sent: by direction. counters: by name.
    """

    def __init__(self) -> None:
        self.log = Log(None)
        self.phase, self.step = "start", 0
        self.bytes_sent: dict[str, int] = {}
        self.counters: dict[str, int] = {}

    def open(self, path: Path | None, length: int, muted: bool) -> None:
        """Write the log to a file from now on, after its first `length` bytes; `muted` until the run has resumed."""
        self.log = Log(path)
        self.log.truncate(length)
        self.log.muted = muted

    def write(self, **scalars: float | str) -> None:
        """Write scalars of the current step into the log."""
        self.log.write({"phase": self.phase, "step": self.step, **scalars})

    def count_bytes(self, *, server_to_client: int = 0, client_to_server: int = 0) -> None:
        """Add to the bytes that are sent.

        Raises:
            ValueError: for anything but integers >= 0.
        """
        for direction, count in (("server_to_client", server_to_client), ("client_to_server", client_to_server)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"expected {direction} as an integer number of bytes >= 0, got {count!r}.")
            self.bytes_sent[direction] = self.bytes_sent.get(direction, 0) + count

    def count(self, **counters: int) -> None:
        """Add to named counters.

        Raises:
            ValueError: for anything but integers >= 0.
        """
        for name, count in counters.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"expected {name} as an integer >= 0, got {count!r}.")
            self.counters[name] = self.counters.get(name, 0) + count

    def restore(self, bytes_sent: dict[str, Any], counters: dict[str, Any]) -> None:
        """Set the counts to those of a checkpoint."""
        self.bytes_sent, self.counters = dict(bytes_sent), dict(counters)

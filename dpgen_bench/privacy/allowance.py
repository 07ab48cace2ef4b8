"""What every mechanism shows: what was approved and how much of it was used; who watches it, and who steers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from torch import Tensor

from dpgen_bench.privacy.bounds import Batch, Bound, PublicRows
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.ledger import Entry


class AllowanceExhausted(RuntimeError):
    """A release beyond the approved number was asked for."""


class Allowance:
    """What was approved, and how much of it was used: the public face of every mechanism."""

    def __init__(self, entry: Entry, bound: Bound) -> None:
        self._entry, self._bound = entry, bound
        self._executed = 0

    @property
    def name(self) -> str:
        return self._entry.name

    @property
    def times(self) -> int:
        """Releases approved."""
        return self._entry.event.times

    @property
    def std(self) -> float:
        """Standard deviation of the noise on the released value, in its units."""
        return self._entry.event.std

    @property
    def bound(self) -> Bound:
        return self._bound

    @property
    def executed(self) -> int:
        """Releases made."""
        return self._executed

    @property
    def event(self) -> Event:
        """What was approved, as accountants see it."""
        return self._entry.event


class Observer(Protocol):
    """Sees what a release is made of. Used by the conformance suite only; a real run has none."""

    def release(
        self,
        mechanism: Allowance,
        index: int,
        drawn: np.ndarray,
        exact: dict[str, Tensor],
        noisy: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Called once per release; what it returns is what the method gets."""
        ...

    def before_release(
        self, mechanism: Allowance, index: int, fn: Callable[..., Tensor], batch: Batch, public: PublicRows | None
    ) -> None:
        """Called before fn sees the records of a release without private state; may call fn itself."""
        return

    def answers(self, rows: dict[int, Tensor]) -> None:
        """Called before a release that sums the clipped rows of clients, with these rows by client."""
        return

    def before_records(self) -> None:
        """Called before private state is made of records."""
        ...


class Control(Protocol):
    """What the harness alone may do with a mechanism. A method holds the mechanism, which has none of this."""

    def resume_at(self, executed: int) -> None:
        """Set the number of the next release, when a run is resumed from a checkpoint."""
        ...

    def before_checkpoint(self) -> None:
        """Push private state to disk, before a checkpoint is written."""
        ...

    def after_checkpoint(self) -> None:
        """A checkpoint stands at the releases made so far."""
        ...

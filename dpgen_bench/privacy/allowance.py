"""The public part of every mechanism, and the protocols of the harness that observe and control mechanisms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Protocol

import numpy as np
from torch import Tensor

from dpgen_bench.privacy.bounds import Batch, Bound, PublicRows
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.ledger import Entry
from dpgen_bench.privacy.sampling import EveryShard, OneShard


class AllowanceExhausted(RuntimeError):
    """Raised if more releases than the approved number are requested."""


class Allowance:
    """The public part of every mechanism: what was approved, and how much of it was used."""

    def __init__(self, entry: Entry, bound: Bound) -> None:
        self._entry, self._bound = entry, bound
        self._executed = 0

    @property
    def name(self) -> str:
        """The name of the mechanism, unique within a run."""
        return self._entry.name

    @property
    def times(self) -> int:
        """The approved number of releases."""
        return self._entry.event.times

    @property
    def std(self) -> float:
        """Standard deviation of the noise on the released value, in its units."""
        return self._entry.event.std

    @property
    def bound(self) -> Bound:
        """A copy of the bound on the exact value of a release; the mechanism's own must not change."""
        return copy.copy(self._bound)

    @property
    def executed(self) -> int:
        """The number of releases that were made."""
        return self._executed

    @property
    def event(self) -> Event:
        """A copy of the approved releases, as accountants read them; the mechanism's own must not change."""
        return copy.deepcopy(self._entry.event)


class Observer(Protocol):
    """Receives the parts of each release. Only the conformance suite uses one."""

    def release(
        self,
        mechanism: Allowance,
        index: int,
        drawn: np.ndarray,
        exact: dict[str, Tensor],
        noisy: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Called once per release; the method receives the value that this returns.

        Args:
            mechanism: the mechanism of the release.
            index: the number of the release, from 0.
            drawn: ids of the drawn records, or numbers of the asked clients.
            exact: the bounded value without noise, by part.
            noisy: the same with noise.
        """
        ...

    def before_release(
        self, mechanism: Allowance, index: int, fn: Callable[..., Tensor], batch: Batch, public: PublicRows | None
    ) -> None:
        """Called before fn sees the records of a release without private state; may call fn itself."""
        return

    def answers(self, rows: dict[int, Tensor]) -> None:
        """Called before a release that sums rows of clients (clipped) or of shards (not yet clipped), with these."""
        return

    def states(self, shards: range, parts: dict[str, Tensor]) -> None:
        """Called with the states of shards that a release reads, and with those that it leaves, [g, ...] by name."""
        return

    def before_records(self) -> None:
        """Called before records are used outside a release, to make private state."""
        ...

    def asks(self, sampling: OneShard | EveryShard, shards: range) -> bool:
        """Whether these shards are asked by a release of all shards, and get a state before a release needs it.

        An audit asks only the shard of the record that it attacks: the answers of others are equal on neighbours.
        """
        return True


class Control(Protocol):
    """Operations on a mechanism for the harness alone; the object that a method holds does not have them."""

    def resume_at(self, executed: int) -> None:
        """Set the number of the next release, when a run is resumed from a checkpoint."""
        ...

    def before_checkpoint(self) -> None:
        """Write private state to disk, before a checkpoint is written."""
        ...

    def after_checkpoint(self) -> None:
        """Register that a checkpoint now contains all releases that were made."""
        ...

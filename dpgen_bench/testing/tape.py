"""A tape records the releases of one fit, and can replay the noisy values of another fit.

A release is a value with named parts; `flat` makes it one vector, and `rounding` says how exactly its sum is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.privacy.allowance import Allowance
from dpgen_bench.privacy.bounds import Batch, PublicRows
from dpgen_bench.privacy.sampling import EveryShard, OneShard
from dpgen_bench.testing.errors import ConformanceError

Parts = dict[str, Tensor]
Query = Callable[[Allowance, int, Callable[..., Tensor], Batch, PublicRows | None], None]


@dataclass
class Release:
    """One taped release.

    Attributes:
        mechanism: the name of the mechanism.
        index: the number of the release, from 0.
        drawn: ids of the records in its draw, or numbers of the clients.
        exact: the value before noise was added, by part.
        noisy: the value that the method received, by part.
        rows: the row of each client or shard, where the exact value is the sum of these rows.
        states: the private states of each shard that the release read and left, one vector of all numbers for each.
    """

    mechanism: str
    index: int
    drawn: np.ndarray
    exact: Parts
    noisy: Parts
    rows: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, list[Tensor]] = field(default_factory=dict)


@dataclass
class Tape:
    """Records the releases of a fit; with a `source`, returns the source's noisy values to the method.

    Attributes:
        source: the tape of the fit that is replayed; None for a fit that receives its own noisy values.
        query: called before each release with the private function and the records of the draw.
        releases: the recorded releases, in order.
        error: the first error that was raised here; it is kept because the method may catch it.
    """

    source: Tape | None = None
    query: Query | None = None
    releases: list[Release] = field(default_factory=list)
    error: ConformanceError | None = None
    _rows: dict[int, Tensor] = field(default_factory=dict)
    _states: dict[int, list[Tensor]] = field(default_factory=dict)

    def answers(self, rows: dict[int, Tensor]) -> None:
        """Keep the row of each client or shard for the release that follows."""
        self._rows = {part: row.detach().clone() for part, row in rows.items()}

    def states(self, shards: range, parts: Parts) -> None:
        """Keep the states of these shards for the release that follows."""
        for place, shard in enumerate(shards):
            own = {name: part[place].detach() for name, part in parts.items()}
            self._states.setdefault(shard, []).append(flat(own))

    def release(self, mechanism: Allowance, index: int, drawn: np.ndarray, exact: Parts, noisy: Parts) -> Parts:
        """Record a release.

        Returns:
            The noisy value for the method: `noisy`, or that of the same release of the source.

        Raises:
            ConformanceError: if the source has another release at this place.
        """
        with self._keeping_errors():
            return self._release(mechanism, index, drawn, exact, noisy)

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except ConformanceError as error:
            self.error = self.error or error
            raise

    def _release(self, mechanism: Allowance, index: int, drawn: np.ndarray, exact: Parts, noisy: Parts) -> Parts:
        exact = {part: value.detach().clone() for part, value in exact.items()}
        noisy = {part: value.detach().clone() for part, value in noisy.items()}
        if self.source is not None:
            if len(self.releases) >= len(self.source.releases):
                raise ConformanceError(
                    f"control flow depends on the data: other data led to an extra release of {mechanism.name!r}."
                )
            first = self.source.releases[len(self.releases)]
            if (first.mechanism, first.index) != (mechanism.name, index) or shapes(first.exact) != shapes(exact):
                raise ConformanceError(
                    f"control flow depends on the data: where {first.mechanism!r} release {first.index} with shapes "
                    f"{shapes(first.exact)} was made, other data led to {mechanism.name!r} release {index} with shapes "
                    f"{shapes(exact)}."
                )
            noisy = first.noisy
        self.releases.append(Release(mechanism.name, index, drawn.copy(), exact, noisy, self._rows, self._states))
        self._rows, self._states = {}, {}
        return {part: value.clone() for part, value in noisy.items()}  # the method may change its value in place

    def before_release(
        self, mechanism: Allowance, index: int, fn: Callable[..., Tensor], batch: Batch, public: PublicRows | None
    ) -> None:
        if self.query is not None:
            with self._keeping_errors():
                self.query(mechanism, index, fn, batch, public)

    def before_records(self) -> None:
        """Does nothing: a fit of the suite makes private state, as the fit of a run does."""

    def asks(self, sampling: OneShard | EveryShard, shards: range) -> bool:
        return True


def flat(parts: Parts) -> Tensor:
    """All numbers of a value, float64 [p], in the order of the names of its parts."""
    return torch.cat([parts[name].double().flatten() for name in sorted(parts)])


def rounding(*values: Parts) -> float:
    """How far apart sums of the same summands can be, in L2 norm, if they are added in another order.

    This is the largest norm of the values times the spacing of floating-point numbers relative to them, which is twice
    the largest error that was measured for clipped sums of 2,000 to 4,000 rows. One removed record shifts all later
    ones to other places of the sum. A value that is not finite allows nothing.
    """
    norms = [
        math.hypot(*(float(part.double().norm()) * torch.finfo(part.dtype).eps for part in floats))
        for floats in ([part for part in parts.values() if part.is_floating_point()] for parts in values)
    ]
    return max((norm for norm in norms if math.isfinite(norm)), default=0.0)


def shapes(parts: Parts) -> dict[str, tuple[int, ...]]:
    """The shape of each part of a value."""
    return {name: tuple(value.shape) for name, value in parts.items()}

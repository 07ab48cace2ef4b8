"""Releases to which every shard of the records gives an answer: how shards are asked, and the bound `PerShard`.

A record belongs to one shard, by its id. It may change the answer of its shard in any way, at each release, also
through private state of this shard, and it changes no other answer. The answers are summed, so a release moves by what
one answer can move. `Votes(voters="shards")` of `dpgen_bench.privacy.votes` is the other bound for such releases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.privacy.bounds import Batch, Bound
from dpgen_bench.privacy.clipping import clip_rows
from dpgen_bench.privacy.events import Sensitivity
from dpgen_bench.privacy.isolation import expect_plain
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.sampling import EveryShard
from dpgen_bench.privacy.state import PrivateState, private_rng, public_randomness_untouched


@dataclass(frozen=True, kw_only=True)
class PerShard(Bound):
    """Sum over all shards of one row per shard, for the sampling `EveryShard`.

    The private function gets the shards of a group, see `Mechanism.__call__`, and returns their rows [g, *shape]. It is
    also called for shards without records, and must return a row for each of them.

    Guarantees: the sum moves by at most 2C if a record joins, leaves or is exchanged, for any two functions whose row
    of a shard depends on this shard, on its state and on public inputs alone.

    Args:
        shape: the shape of one row.
    """

    shape: tuple[int, ...]

    @property
    def sensitivity(self) -> Sensitivity:
        return Sensitivity(2.0 * self.C, 2.0 * self.C)

    def total(self, groups: Iterable[tuple[int, Tensor]], device: torch.device) -> dict[str, Tensor]:
        """The exact value of a release, given groups of g shards with their rows [g, *shape]."""
        total = torch.zeros(self.shape, dtype=torch.float64, device=device)
        for shards, rows in groups:
            if tuple(rows.shape) != (shards, *self.shape):
                raise ValueError(
                    f"PerShard: expected the function to return shape {(shards, *self.shape)}, a row for each shard, "
                    f"got {tuple(rows.shape)}; return rows of the shape that the bound declares."
                )
            total += clip_rows(rows, self.C).sum(dim=0, dtype=torch.float64)
        return {"value": total}


def answers(
    fn: Callable[..., Any],
    sampling: EveryShard,
    ids: np.ndarray,
    draw: Callable[[np.ndarray], Batch],
    state: PrivateState | None,
    index: int,
    key: Key,
    asks: Callable[[EveryShard, range], bool] = lambda sampling, shards: True,
) -> Iterator[tuple[range, Tensor]]:
    """Ask all shards, group by group, and store the state that they leave.

    Args:
        fn: fn(shards, rngs), or fn(shards, states, rngs) with private state; see `Mechanism.__call__`.
        sampling: the partition.
        ids: int64 [n], the ids of all records.
        draw: returns the records at the given positions.
        state: the private state of the mechanism; without one, a group is a single shard.
        index: the number of the release.
        key: of the release.
        asks: which groups are asked, see `Observer.asks`.

    Yields:
        The shards of a group, and what the function returned for them.
    """
    members = sampling.members(ids)
    size = 1 if state is None else state.stack
    for first in range(0, sampling.shards, size):
        group = range(first, min(first + size, sampling.shards))
        if not asks(sampling, group):
            continue
        images, labels = draw(np.concatenate([members[shard] for shard in group])).inputs
        sizes = [len(members[shard]) for shard in group]
        records = list(zip(images.split(sizes), labels.split(sizes), strict=True))
        rngs = [private_rng(key.derive("shard", shard)) for shard in group]
        before = () if state is None else (state._before_group(group, index),)
        with public_randomness_untouched("a function of shards"):
            returned = fn(records, *before, rngs)
        if state is not None:
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise ValueError(
                    "expected a function with private state to return (what the bound expects, the next states), got "
                    f"{type(returned).__name__}."
                )
            returned, after = returned
            state._keep_group(group, index, after)
        rows = expect_plain(returned, "what a private function returns")
        if rows.shape[:1] != (len(group),):
            raise ValueError(
                f"expected the function to return one answer for each of the {len(group)} shards that it was asked "
                f"for, got shape {tuple(rows.shape)}; return answers [{len(group)}, ...], also of shards without "
                "records."
            )
        yield group, rows

"""`Votes`: a histogram of votes. Each record votes for at most k of the bins, and the harness counts the votes.

A private function returns the numbers of bins, never rows. A record's row of the histogram therefore has at most k
ones and otherwise zeros, for every function.

Let A and B be the sets of bins that two records vote for, |A|, |B| <= k. A record that joins the draw moves the
histogram by 1 in each bin of A, that is by sqrt(|A|) <= sqrt(k). A record that is exchanged moves it by 1 in each bin
of A or B but not both, that is by sqrt(|A| + |B| - 2 |A and B|) <= sqrt(2k). The second is less than the 2 sqrt(k) of
`PerRecord(C=sqrt(k))`, because the rows have non-negative inner products. Both are reached: by k votes of a record that
joins, and by votes for 2k different bins.

This argument requires that each record votes for itself. With `voters="shards"`, each shard of an `EveryShard` sampling
casts k votes instead. Then a record that joins, leaves or is exchanged may change all k votes of its shard, so the
histogram moves by sqrt(|A| + |B| - 2 |A and B|) <= sqrt(2k) under both relations.

There are only `bins` bins, so that |A| + |B| - 2 |A and B| <= bins, too: `Votes(bins=k, k=k)`, k votes for yes or no,
moves by sqrt(k) under all of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from dpgen_bench.privacy.bounds import Batch, DrawBound, PublicRows, call
from dpgen_bench.privacy.events import Sensitivity
from dpgen_bench.privacy.expect import expect_integer, expect_size
from dpgen_bench.privacy.isolation import isolated_from_modes

_RECORDS_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True)
class Votes(DrawBound):
    """The number of votes for each bin: fn(images [b, c, h, w], labels [b]) -> numbers of bins, int64 [b, k].

    The value is a tensor [bins] of whole numbers, which are counted without rounding. Row i of the function's result
    has the bins that record i votes for. A number outside 0..bins-1, such as -1, is an abstention, and a bin that a
    record names twice gets one vote of it. (An error instead would depend on records.)

    Guarantees: the histogram moves by at most sqrt(k) if a record joins or leaves the draw, and by at most
    sqrt(min(2k, bins)) if one is exchanged, provided that row i depends on record i, its row of `rng` and public inputs
    alone. If shards vote, it moves by at most sqrt(min(2k, bins)) in both cases, for any two functions, hence also if
    private state differs.

    Args:
        bins: the number of bins.
        k: the largest number of bins that a record, or a shard, votes for.
        voters: "records", or "shards" for a mechanism that samples by `EveryShard`. Its function gets the shards of a
            group, see `Mechanism.__call__`, and returns the numbers of bins of each shard, int64 [g, k].
        microbatch: the largest number of records on which fn is called together, by default 1000. It limits the memory
            and does not change the result.

    Attributes:
        C: sqrt(k), the largest norm of a record's row. Nothing is clipped.

    Raises:
        ValueError: unless bins, k and microbatch are at least 1 and k is at most `bins`.
    """

    C: float = field(init=False, default=math.nan)
    bins: int
    k: int = 1
    voters: Literal["records", "shards"] = "records"
    microbatch: int | None = None

    def __post_init__(self) -> None:
        bins = expect_integer(self.bins, "Votes, bins", advice="give the number of bins")
        k = expect_integer(self.k, "Votes, k", advice="give the largest number of votes of a record")
        if k > bins:
            raise ValueError(f"Votes: expected k of at most {bins}, the number of bins, got {k}; give fewer votes.")
        if self.voters not in ("records", "shards"):
            raise ValueError(f"Votes: expected voters 'records' or 'shards', got {self.voters!r}; give one.")
        expect_size(bins, "Votes")
        object.__setattr__(self, "bins", bins)
        object.__setattr__(self, "k", k)
        object.__setattr__(self, "C", math.sqrt(k))
        super().__post_init__()

    @property
    def sensitivity(self) -> Sensitivity:
        exchanged = math.sqrt(min(2 * self.k, self.bins))
        return Sensitivity(exchanged if self.voters == "shards" else math.sqrt(self.k), exchanged)

    def describe(self) -> dict[str, Any]:
        of_shards = {"voters": "shards"} if self.voters == "shards" else {}
        return {**super().describe(), "bins": self.bins, "votes": self.k, **of_shards}

    def value(self, fn: Callable[..., Tensor], batch: Batch, public: PublicRows | None) -> dict[str, Tensor]:
        total = torch.zeros(self.bins, dtype=torch.float64, device=batch.labels.device)
        for chunk in batch.chunks(self.microbatch or _RECORDS_AT_ONCE):
            if len(chunk):
                total += histogram(call(fn, chunk), len(chunk), self.bins, self.k)
        return {"value": total}

    def total(self, groups: Iterable[tuple[int, Tensor]], device: torch.device) -> dict[str, Tensor]:
        """The exact value of a release in which shards vote: groups of g shards with their votes, int64 [g, k]."""
        total = torch.zeros(self.bins, dtype=torch.float64, device=device)
        for shards, votes in groups:
            total += histogram(votes, shards, self.bins, self.k)
        return {"value": total}


@isolated_from_modes()
def histogram(votes: Tensor, voters: int, bins: int, k: int) -> Tensor:
    """The number of voters that vote for each bin, float64 [bins] of whole numbers.

    Guarantees: each voter adds at most 1 to at most k bins, and nothing else.

    Args:
        votes: int64 [voters, k], the bins that each voter votes for; numbers outside 0..bins-1 are abstentions.
        voters: the number of voters.
        bins: the number of bins.
        k: the number of columns of `votes`.

    Raises:
        ValueError: for votes of another type or shape.
    """
    if votes.dtype != torch.int64 or tuple(votes.shape) != (voters, k):
        raise ValueError(
            f"Votes: expected the function to return int64 {(voters, k)}, the numbers of the bins that each voter "
            f"votes for, got {votes.dtype} {tuple(votes.shape)}; return numbers of bins, such as argmin(1)[:, None]."
        )
    ordered = votes.detach().sort(dim=1).values
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    counted = (ordered >= 0) & (ordered < bins) & ~repeated
    # Abstentions go to a bin of their own: to remove them, the program would wait for an accelerator.
    placed = torch.where(counted, ordered, bins).flatten()
    return torch.zeros(bins + 1, dtype=torch.float64, device=votes.device).index_add_(
        0, placed, torch.ones_like(placed, dtype=torch.float64)
    )[:bins]

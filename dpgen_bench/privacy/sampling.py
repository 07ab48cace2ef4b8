"""How a mechanism draws the records of one release, from coins that belong to the records.

A coin is keyed by (root key, mechanism, draw index, record id). Whether record i is drawn therefore never
depends on which other records exist: adding, removing or replacing one record shifts nobody else's coin, which
is what the neighbouring-dataset arguments of the accountants assume, and what the conformance replay relies on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from dpgen_bench.privacy.noise import Key


class Sampling(ABC):
    """A law of draws. The privacy proofs are of the classes below; a mechanism refuses any other.

    rate: the probability that one record takes part in one draw.
    """

    rate: float

    @abstractmethod
    def draw(self, ids: np.ndarray, key: Key, index: int) -> np.ndarray:
        """Positions (int64, ascending) in `ids` [n] of the records of draw number `index`, with the coins of `key`."""

    def participation(self, times: int) -> float:
        """The largest probability, over records, of taking part in one of `times` draws or more."""
        return -math.expm1(times * math.log1p(-min(self.rate, 1.0 - 1e-16)))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `sampling_from_dict` is the inverse."""
        return {"kind": type(self).__name__, "rate": self.rate, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class Full(Sampling):
    """Every record takes part in every release: no amplification."""

    @property
    def rate(self) -> float:  # type: ignore[override]
        return 1.0

    def draw(self, ids: np.ndarray, key: Key, index: int) -> np.ndarray:
        return np.arange(len(ids))

    def __str__(self) -> str:
        return "all records"


@dataclass(frozen=True)
class Poisson(Sampling):
    """Each record takes part independently with probability `rate`, afresh for each draw.

    The size of a draw is random and may be zero; it is never released.

    Raises:
        ValueError: if `rate` is not in (0, 1].
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0.0 < self.rate <= 1.0:
            raise ValueError(
                f"Poisson sampling needs a rate in (0, 1], got {self.rate!r}; for all records at once use Full()."
            )

    def draw(self, ids: np.ndarray, key: Key, index: int) -> np.ndarray:
        if len(ids) == 0:
            return np.empty(0, dtype=np.int64)
        # Coin number i of the stream is record i's, whoever else is in the data.
        coins = key.generator("coins").random(int(ids.max()) + 1)
        return np.flatnonzero(coins[ids] < self.rate)

    def __str__(self) -> str:
        return f"Poisson rate {self.rate:.6g}"


@dataclass(frozen=True)
class OneShard(Sampling):
    """The records lie in `shards` disjoint shards, fixed once; a draw is all of one shard (GS-WGAN, Algorithm 1).

    The partition is public and a function of record ids alone: every `shards` consecutive ids are dealt in an order of
    their own, one to each shard. So shards differ by one record in size at most (of ids 0..n-1), and a record that
    comes or goes moves no other.

    Guarantees: a record takes part in the draws of its own shard only, so a mechanism that keeps state for each shard
    (`PrivateData.private_state`) is covered. Its hits are Binomial(times, 1/shards) under "random", and
    ceil(times/shards) at most under "public_balanced". The proof of what they cost stands in
    `dpgen_bench.privacy.accountants`. It lets the drawn indices be known, because state that remembers past draws
    takes away what hiding them would give.

    Args:
        shards: K >= 1.
        schedule: "random": each draw's shard is uniform and independent. "public_balanced": draws visit every shard
            once before any a second time, in a public random order, anew for each round.
        seed: of the public partition and the public order.

    Raises:
        ValueError: for a number of shards below 1, or an unknown schedule.
    """

    shards: int
    schedule: Literal["random", "public_balanced"] = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.shards, bool) or not isinstance(self.shards, int) or self.shards < 1:
            raise ValueError(f"expected a number of shards >= 1, got {self.shards!r}.")
        if self.schedule not in ("random", "public_balanced"):
            raise ValueError(f"expected the schedule random or public_balanced, got {self.schedule!r}.")

    @property
    def rate(self) -> float:  # type: ignore[override]
        return 1.0 / self.shards

    def shard_of(self, ids: np.ndarray) -> np.ndarray:
        """The shard in 0..K-1 of each record id, int64 [n]."""
        return _partition(self.shards, self.seed, np.asarray(ids, dtype=np.int64).tobytes())

    def shard(self, key: Key, index: int) -> int:
        """The shard of draw number `index`."""
        if self.schedule == "random":
            return int(key.generator("shard").integers(self.shards))
        round_, place = divmod(index, self.shards)
        return int(_order(self.shards, self.seed, "round", round_)[place])

    def draw(self, ids: np.ndarray, key: Key, index: int) -> np.ndarray:
        return np.flatnonzero(self.shard_of(ids) == self.shard(key, index))

    def participation(self, times: int) -> float:
        return super().participation(times) if self.schedule == "random" else float(times > 0)

    def __str__(self) -> str:
        return f"one of {self.shards} shards, {self.schedule}"


@lru_cache(maxsize=4)  # every release asks for the same one
def _partition(shards: int, seed: int, ids: bytes) -> np.ndarray:
    """The shard of each of the int64 ids; read-only."""
    blocks, places = np.divmod(np.frombuffer(ids, dtype=np.int64), shards)
    known, inverse = np.unique(blocks, return_inverse=True)
    orders = [_order(shards, seed, "partition", int(block)) for block in known]
    found = np.stack(orders)[inverse, places] if len(known) else places
    found.setflags(write=False)
    return found


@lru_cache(maxsize=8)  # the schedule asks for one round many times
def _order(shards: int, seed: int, purpose: str, number: int) -> np.ndarray:
    return Key.seeded(f"shards:{shards}:{seed}").derive(purpose, number).generator("order").permutation(shards)


SAMPLINGS = (Full, Poisson, OneShard)


def sampling_from_dict(data: dict[str, Any]) -> Sampling:
    """Inverse of `Sampling.to_dict`."""
    (cls,) = [cls for cls in SAMPLINGS if cls.__name__ == data["kind"]]
    fields = {key: value for key, value in data.items() if key in cls.__dataclass_fields__}
    return cls(**fields)

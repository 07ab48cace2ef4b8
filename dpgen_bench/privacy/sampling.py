"""Samplings, by which a mechanism draws the records of one release.

Randomness belongs to ids: it is keyed by (root key, mechanism, draw index, record id). Whether record i is drawn
therefore does not depend on which other records exist, and adding, removing or replacing one record changes no other
record's participation. This is assumption A2 of docs/accounting.md, and the replays of the conformance suite rest on
it.

If the privacy unit is the client, read "client" for "record": ids are client numbers, and a draw is a round. Mechanisms
draw records by one of `SAMPLINGS` and clients by one of `CLIENT_SAMPLINGS`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from dpgen_bench.privacy.expect import expect_number
from dpgen_bench.privacy.key import Key

Schedule = Literal["random", "public_balanced"]


class Sampling(ABC):
    """A law of draws. The privacy proofs cover the subclasses in this module; a mechanism refuses any other.

    Attributes:
        rate: probability that one record takes part in one draw.
        period: number of draws after which a public schedule begins again; 1 if there is none. A whole period costs as
            much as its first draw, so only whole periods are worth planning.
    """

    rate: float
    period: int = 1

    @abstractmethod
    def draw(self, ids: np.ndarray, key: Key, index: int) -> np.ndarray:
        """Positions (int64, ascending) in `ids` [n] of the records of draw `index`, by the randomness of `key`."""

    def rounds(self, ids: np.ndarray, key: Key, times: int) -> list[np.ndarray]:
        """Positions (int64, ascending) in `ids` [n] of the records that take part in each of rounds 0..times-1.

        Round t has the randomness of key.derive(t), so a resumed run has the same rounds.
        """
        return [self.draw(ids, key.derive(index), index) for index in range(times)]

    def participation(self, times: int) -> float:
        """The largest probability, over records, of taking part in at least one of `times` draws."""
        return -math.expm1(times * math.log1p(-min(self.rate, 1.0 - 1e-16)))

    def to_dict(self) -> dict[str, Any]:
        """The sampling as JSON values; `sampling_from_dict` is the inverse."""
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
    """Each record takes part independently with probability `rate`, independently in each draw.

    The size of a draw is random and may be zero; it is never released.

    Guarantees: a mechanism whose releases depend on earlier ones only through what was released is amplified
    (docs/accounting.md, "Poisson draws under add/remove" and "Poisson draws under replace-one").

    Raises:
        ValueError: if `rate` is not in (0, 1].
    """

    rate: float

    def __post_init__(self) -> None:
        advice = "for all records at once use Full()"
        object.__setattr__(
            self, "rate", expect_number(self.rate, "Poisson, rate", above=0.0, maximum=1.0, advice=advice)
        )

    def draw(self, ids: np.ndarray, key: Key, index: int) -> np.ndarray:
        if len(ids) == 0:
            return np.empty(0, dtype=np.int64)
        # Variable number i of the stream belongs to record i, so it does not depend on which other records there are.
        return np.flatnonzero(key.bernoulli("coins", self.rate, int(ids.max()) + 1)[ids])

    def __str__(self) -> str:
        return f"Poisson rate {self.rate:.6g}"


class _Shards:
    """The public partition of the records into `shards` shards; see `OneShard` and `EveryShard`."""

    shards: int
    seed: int

    def shard_of(self, ids: np.ndarray) -> np.ndarray:
        """The shard in 0..K-1 of each record id, int64 [n]."""
        return _partition(self.shards, self.seed, np.asarray(ids, dtype=np.int64).tobytes())

    def members(self, ids: np.ndarray) -> list[np.ndarray]:
        """For each shard, the positions (int64, ascending) in `ids` [n] of its records."""
        shard_of = self.shard_of(ids)
        ends = np.bincount(shard_of, minlength=self.shards).cumsum()
        return np.split(np.argsort(shard_of, kind="stable"), ends[:-1])


@dataclass(frozen=True)
class OneShard(_Shards, Sampling):
    """The records are partitioned into `shards` shards; a draw consists of all records of one (GS-WGAN, Algorithm 1).

    The partition is public and a function of record ids alone: each `shards` consecutive ids are assigned to the shards
    by a permutation of their own. So the sizes of shards differ by at most one record (for ids 0..n-1), and adding or
    removing a record moves no other record to another shard.

    Guarantees: a record takes part in the draws of its own shard only. Its number of participations is
    Binomial(times, 1/shards) under "random", and at most ceil(times/shards) under "public_balanced". The bound on
    epsilon (docs/accounting.md, "One shard in each release") also holds for mechanisms that keep private state of each
    shard (`PrivateData.private_state`). It assumes that the drawn indices are known to the observer, because state that
    remembers past draws invalidates amplification by secret indices.

    Args:
        shards: K >= 1.
        schedule: "random": the shard of each draw is uniform and independent of others. "public_balanced": draws visit
            all shards once before any shard a second time, in a public random order that is drawn again for each pass.
        seed: the seed of the public partition and the public order.

    Raises:
        ValueError: for fewer than one shard, or an unknown schedule.
    """

    shards: int
    schedule: Schedule = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        _check_parts("shards", self.shards, self.schedule)

    @property
    def rate(self) -> float:  # type: ignore[override]
        return 1.0 / self.shards

    @property
    def period(self) -> int:  # type: ignore[override]
        return self.shards if self.schedule == "public_balanced" else 1

    def shard(self, key: Key, index: int) -> int:
        """The shard of draw number `index`."""
        return _part(self.shards, self.schedule, self.seed, key, index)

    def draw(self, ids: np.ndarray, key: Key, index: int) -> np.ndarray:
        return np.flatnonzero(self.shard_of(ids) == self.shard(key, index))

    def participation(self, times: int) -> float:
        return super().participation(times) if self.schedule == "random" else float(times > 0)

    def __str__(self) -> str:
        return f"one of {self.shards} shards, {self.schedule}"


@dataclass(frozen=True)
class EveryShard(_Shards, Sampling):
    """The records are partitioned into `shards` shards, and every shard answers in every draw (PATE).

    The partition is that of `OneShard`: public, and a function of record ids alone.

    Guarantees: a record takes part in every draw, through the answer of its own shard alone. So nothing is amplified,
    and mechanisms may keep private state of each shard at no cost (docs/accounting.md, "Every shard in each release").
    Answers are bounded by `PerShard`, or by `Votes(voters="shards")`.

    Args:
        shards: K >= 1.
        seed: the seed of the public partition.

    Raises:
        ValueError: for fewer than one shard.
    """

    shards: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check_parts("shards", self.shards, "random")

    @property
    def rate(self) -> float:  # type: ignore[override]
        return 1.0

    def draw(self, ids: np.ndarray, key: Key, index: int) -> np.ndarray:
        return np.arange(len(ids))

    def __str__(self) -> str:
        return f"every one of {self.shards} shards"


@dataclass(frozen=True)
class OneClient(Sampling):
    """In each round one of `clients` clients is asked, and no client is asked more than `max_answers` times.

    Which client is asked never depends on data: ids are 0..clients-1 whether or not these clients have records, and a
    client with another id is never asked. A client that is asked may have no records: see `asked`.

    Guarantees: a client takes part in its own rounds only, so it may keep state from one to the next. Its number of
    participations is min(Binomial(times, 1/clients), max_answers) under "random", and at most
    min(ceil(times/clients), max_answers) under "public_balanced". The bound on epsilon (docs/accounting.md, "One client
    in each round") holds even if the observer knows when each client was asked.

    Args:
        clients: N >= 1, public.
        schedule: "random": the client of each round is uniform and independent of others. "public_balanced": rounds ask
            all clients once before any client a second time, in a public random order that is drawn again for every N
            rounds.
        max_answers: k_max >= 1. A round that would ask a client once more asks no client and releases nothing. None: no
            limit. Rounds are counted and not answers: a lost or refused answer counts, too.
        seed: the seed of the public order.

    Raises:
        ValueError: for fewer than one client or answer, or an unknown schedule.
    """

    clients: int
    schedule: Schedule = "random"
    max_answers: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _check_parts("clients", self.clients, self.schedule)
        if self.max_answers is not None and not _is_count(self.max_answers):
            raise ValueError(f"expected max_answers >= 1, or None for no limit, got {self.max_answers!r}.")

    @property
    def rate(self) -> float:  # type: ignore[override]
        return 1.0 / self.clients

    @property
    def period(self) -> int:  # type: ignore[override]
        return self.clients if self.schedule == "public_balanced" else 1

    def client(self, key: Key, index: int) -> int:
        """The client whose turn is round number `index`, by the randomness of `key`; the limit is not applied."""
        return _part(self.clients, self.schedule, self.seed, key, index)

    def draw(self, ids: np.ndarray, key: Key, index: int) -> np.ndarray:
        """Position in `ids` of the client whose turn is round `index`, int64 [0 or 1].

        The limit is not applied, because it depends on earlier rounds; `rounds` applies it.
        """
        return np.flatnonzero(ids == self.client(key, index))

    def asked(self, key: Key, times: int) -> np.ndarray:
        """The client asked in each of rounds 0..times-1, int64 [times]; -1 where the limit permits no client.

        This is a function of `key` alone, while an empty entry of `rounds` may also mean that the client has no data.
        The two must not be confused under add/remove: whether a client has data is private, so a round that asks a
        client without data releases noise, and only a round that asks no client may release nothing.
        """
        turns = np.array([self.client(key.derive(index), index) for index in range(times)], dtype=np.int64)
        if self.max_answers is None:
            return turns
        before = np.zeros(self.clients, dtype=np.int64)
        for index, client in enumerate(turns):
            before[client] += 1
            if before[client] > self.max_answers:
                turns[index] = -1
        return turns

    def rounds(self, ids: np.ndarray, key: Key, times: int) -> list[np.ndarray]:
        """As `Sampling.rounds`, each with one position or none; the limit is applied."""
        return [np.flatnonzero(ids == client) for client in self.asked(key, times)]  # no id is -1

    def max_participations(self, times: int) -> int:
        """The largest number of times that one client can be asked in `times` rounds."""
        turns = times if self.schedule == "random" else -(-times // self.clients)
        return turns if self.max_answers is None else min(turns, self.max_answers)

    def participation(self, times: int) -> float:
        return super().participation(times) if self.schedule == "random" else float(times > 0)

    def __str__(self) -> str:
        limit = "" if self.max_answers is None else f", at most {self.max_answers} answers each"
        return f"one of {self.clients} clients, {self.schedule}{limit}"


@dataclass(frozen=True)
class FixedSize(Sampling):
    """Exactly `size` of the clients 0..of-1, uniformly without replacement, independently in each round (Fed-Avg).

    All `of` clients can be drawn, whether or not they have records, so the draw does not depend on which clients have
    data. The drawn clients that are present take part. A client with another id is never drawn.

    Guarantees: covered under replace-one only (docs/accounting.md, "Draws of a fixed size").

    Args:
        size: number of clients drawn, 1..of.
        of: number of clients, public.

    Raises:
        ValueError: if size is not in 1..of, or one of them is not an integer.
    """

    size: int
    of: int

    def __post_init__(self) -> None:
        if not _is_count(self.size) or not _is_count(self.of) or self.size > self.of:
            raise ValueError(f"expected 1 <= size <= of, both whole numbers, got size={self.size!r}, of={self.of!r}.")

    @property
    def rate(self) -> float:  # type: ignore[override]
        return self.size / self.of

    def draw(self, ids: np.ndarray, key: Key, index: int) -> np.ndarray:
        return np.flatnonzero(np.isin(ids, key.subset("fixed size", self.size, self.of)))

    def __str__(self) -> str:
        return f"{self.size} of {self.of} clients"


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _check_parts(what: str, number: int, schedule: str) -> None:
    if not _is_count(number):
        raise ValueError(f"expected a number of {what} >= 1, got {number!r}.")
    if schedule not in ("random", "public_balanced"):
        raise ValueError(f"expected the schedule random or public_balanced, got {schedule!r}.")


def _part(number: int, schedule: Schedule, seed: int, key: Key, index: int) -> int:
    """The shard or client in 0..number-1 whose turn is draw `index`."""
    if schedule == "random":
        return key.integer("shard", number)
    round_, place = divmod(index, number)
    return int(_order(number, seed, "round", round_)[place])


@lru_cache(maxsize=4)  # every release needs the same partition
def _partition(shards: int, seed: int, ids: bytes) -> np.ndarray:
    """The shard of each of the int64 ids; read-only."""
    blocks, places = np.divmod(np.frombuffer(ids, dtype=np.int64), shards)
    distinct, inverse = np.unique(blocks, return_inverse=True)
    orders = [_order(shards, seed, "partition", int(block)) for block in distinct]
    assigned = np.stack(orders)[inverse, places] if len(distinct) else places
    assigned.setflags(write=False)
    return assigned


@lru_cache(maxsize=8)  # the schedule needs the order of a pass many times
def _order(shards: int, seed: int, purpose: str, number: int) -> np.ndarray:
    return Key.seeded(f"shards:{shards}:{seed}").derive(purpose, number).generator("order").permutation(shards)


SAMPLINGS = (Full, Poisson, OneShard, EveryShard)  # of records
CLIENT_SAMPLINGS = (Poisson, FixedSize, OneClient)  # of clients


def sampling_from_dict(data: dict[str, Any]) -> Sampling:
    """Inverse of `Sampling.to_dict`."""
    known: tuple[Any, ...] = (*SAMPLINGS, OneClient, FixedSize)
    (cls,) = [cls for cls in known if cls.__name__ == data["kind"]]
    fields = {key: value for key, value in data.items() if key in cls.__dataclass_fields__}
    return cls(**fields)

"""Level a of an audit: how far each release moves if one record changes, at the shape and settings of a run.

The fit of a run is made on a part of its records, up to the first few releases, and is then replayed on neighbours with
the same noisy values, as the conformance suite does (`dpgen_bench.testing`). The part contains the records of the first
draws, so releases on small draws are those of the whole data set. Releases on all records are sums over records, in
which the others cancel; the noise is that of the whole data set.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.audit.distinguisher import Attacked
from dpgen_bench.audit.laws import Movement
from dpgen_bench.audit.noise import DRAWS
from dpgen_bench.audit.search import Candidate, Query, candidates, worst_pair
from dpgen_bench.privacy.allowance import Allowance
from dpgen_bench.privacy.batch import unit_range
from dpgen_bench.privacy.bounds import Batch, DrawBound, PerRecord, PerRecordGradient, PublicRows
from dpgen_bench.privacy.events import RELATIONS, Event, Relation
from dpgen_bench.privacy.factors import PerRecordMoments, PerRecordProducts
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.noise import add_noise
from dpgen_bench.privacy.sampling import EveryShard, OneShard
from dpgen_bench.privacy.state_file import StatePlace
from dpgen_bench.privacy.votes import Votes
from dpgen_bench.testing.bench import Bench, DataSet
from dpgen_bench.testing.checks import TOLERANCE
from dpgen_bench.testing.errors import ConformanceError
from dpgen_bench.testing.neighbours import relation, without
from dpgen_bench.testing.tape import Release, Tape, flat, rounding

RELEASES = 3  # of each mechanism that are replayed, if it makes as many
MOST_RELEASES = 60  # of all mechanisms together
MOST_DRAWS = 500  # further draws of noise in each run
RECORDS = 256  # that a fit is replayed on
SUMS = PerRecord | PerRecordGradient | PerRecordProducts | PerRecordMoments | Votes  # of rows of single records


class Enough(BaseException):
    """Ends a fit after its last replayed release; it is no `Exception`, so that a method does not catch it."""


@dataclass
class ShortTape(Tape):
    """A tape that ends the fit when each mechanism has made as many releases as `wanted` states.

    Attributes:
        record: the id of the attacked record. Of mechanisms that ask all shards, only its shard is asked: the answers
            of other shards are equal on neighbours. Private state is made of the shards that are asked or drawn.
        events: of the mechanisms that made a release.
        queried: names of the mechanisms whose private function was shown to `query`.
        most: the number of releases of all mechanisms after which the fit ends in any case.
    """

    wanted: dict[str, int] = field(default_factory=dict)
    record: int = 0
    events: dict[str, Event] = field(default_factory=dict)
    queried: set[str] = field(default_factory=set)
    most: int = MOST_RELEASES

    def asks(self, sampling: OneShard | EveryShard, shards: range) -> bool:
        return int(sampling.shard_of(np.array([self.record]))[0]) in shards

    def before_release(
        self, mechanism: Allowance, index: int, fn: Callable[..., Tensor], batch: Batch, public: PublicRows | None
    ) -> None:
        self.queried.add(mechanism.name)
        super().before_release(mechanism, index, fn, batch, public)

    def release(
        self, mechanism: Allowance, index: int, drawn: np.ndarray, exact: dict[str, Tensor], noisy: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        value = super().release(mechanism, index, drawn, exact, noisy)
        self.events[mechanism.name] = mechanism.event
        made = [release.mechanism for release in self.releases]
        if len(made) >= self.most or all(made.count(name) >= times for name, times in self.wanted.items()):
            raise Enough
        return value


@dataclass(frozen=True)
class Moved:
    """How far one release moved between two data sets.

    Attributes:
        first, second: the exact values on the line between them; the origin is the value without the attacked record.
        distance: between the exact values.
        declared: the sensitivity in the ledger for the relation of the two data sets.
        rounding: the distance that sums of the same summands can have, as `rounding` of testing/tape.py allows it.
    """

    mechanism: str
    index: int
    first: float
    second: float
    distance: float
    declared: float
    rounding: float

    @property
    def exceeds(self) -> bool:
        return self.distance > self.declared * (1.0 + TOLERANCE) + self.rounding

    @property
    def movement(self) -> Movement:
        """On the line between the values; what rounding adds to the declared distance is no part of an attack."""
        within = min(1.0, self.declared / self.distance) if self.distance else 1.0
        return Movement(self.first * within, self.second * within)


@dataclass(frozen=True)
class Pair:
    """Two neighbouring data sets, and how far each replayed release moved between them.

    Attributes:
        names: what the attacked record is in both data sets.
        moved: of the releases in whose draw the record is.
    """

    relation: Relation
    names: tuple[str, str]
    moved: tuple[Moved, ...]

    def strength(self, events: dict[str, Event]) -> float:
        """Sum over releases of the squared ratio of distance and noise; for releases without noise, of distances."""
        return sum((each.distance / (events[each.mechanism].std or 1.0)) ** 2 for each in self.moved)


@dataclass(frozen=True)
class Replayed:
    """The result of level a.

    Attributes:
        events: of the mechanisms, as the ledger states them.
        record: the id of the attacked record.
        records: the number of records that the fit was replayed on.
        releases: the number of replayed releases of each mechanism.
        pairs: all pairs of replayed data sets.
        tape: of the first fit.
    """

    events: dict[str, Event]
    record: int
    records: int
    releases: dict[str, int]
    pairs: tuple[Pair, ...]
    tape: Tape

    def worst(self, which: Relation) -> Pair:
        """The pair of a relation between which all releases together are told apart best."""
        return max((p for p in self.pairs if p.relation == which), key=lambda pair: pair.strength(self.events))

    def furthest(self, mechanism: str, which: Relation) -> tuple[Moved, Pair] | None:
        """The release of a mechanism that moved furthest, relative to what is declared, and the pair; None if none."""
        found = [(m, p) for p in self.pairs if p.relation == which for m in p.moved if m.mechanism == mechanism]
        return max(found, key=lambda each: each[0].distance, default=None)

    def attacked(self, which: Relation) -> tuple[Pair, list[Attacked]]:
        """The worst pair of a relation, and the mechanisms with their movements between its data sets.

        If all releases of a mechanism were replayed, each has its own movement. Otherwise the least movement that was
        seen stands for all releases, of which a part was replayed.
        """
        pair, attacked = self.worst(which), []
        for name, event in self.events.items():
            seen = [each for each in pair.moved if each.mechanism == name]
            if not seen:
                continue
            if event.sampling.rate == 1.0 and len(seen) == event.times:
                single = replace(event, times=1)
                attacked += [Attacked(name, single, each.movement) for each in seen]
            else:
                least = min(seen, key=lambda each: each.distance)
                attacked.append(Attacked(name, event, least.movement))
        return pair, attacked

    @property
    def exceeded(self) -> list[tuple[Moved, Pair]]:
        """Releases that moved further than declared."""
        return [(moved, pair) for pair in self.pairs for moved in pair.moved if moved.exceeds]


def attacked_record(ledger: Ledger, key: Key, records: int) -> tuple[int, np.ndarray]:
    """The id of the record that takes part in most mechanisms, and ids of records to replay a fit on, ascending.

    Args:
        key: the key of the fit, whose draws these are.
        records: the number of all records.
    """
    ids, used, rng = np.arange(records), np.zeros(records), np.random.default_rng(0)
    last = np.zeros(records)  # the number of the last replayed release that draws a record
    drawn: list[np.ndarray] = []
    for name, entry in ledger.entries.items():
        sampling, replayed = entry.event.sampling, min(RELEASES, entry.event.times)
        own = [sampling.draw(ids, key.derive(name, index), index) for index in range(replayed)]
        counts = np.bincount(np.concatenate([*own, []]).astype(int), minlength=records)
        used += np.minimum(counts, 1) + 1e-3 * counts
        drawn += own
        for index, draw in enumerate(own):
            last[draw] = np.maximum(last[draw], index)
    best = np.flatnonzero(used == used.max())
    best = best[last[best] == last[best].min()]  # replays on neighbours end with this release
    record = int(rng.choice(best))
    others = np.setdiff1d(np.concatenate([*drawn, []]).astype(int), [record])
    chosen = rng.permutation(others)[: RECORDS - 1]
    return record, np.sort(np.append(chosen, record))


def replay(bench: Bench, ledger: Ledger, record: int, echo: Callable[[str], None] = lambda line: None) -> Replayed:
    """Replay the first releases of a fit on neighbours, and measure how far they move.

    Args:
        bench: makes the fits; its data set contains the attacked record.
        ledger: the plan of the fit, which states the mechanisms.
        record: the id of the attacked record.
        echo: called with one line for each step.

    Raises:
        ConformanceError: if other data lead to other releases, or to releases of other shapes.
    """
    wanted = {name: min(RELEASES, entry.event.times) for name, entry in ledger.entries.items()}
    first = _fit(bench, bench.base, ShortTape(wanted=wanted, record=record))
    for name, event in first.events.items():
        if event != ledger.entries[name].event:
            raise ValueError(
                f"expected that settings for audits (`audited` of the class) leave mechanism {name!r} as it is, "
                f"{ledger.entries[name].event}, got {event}; leave out those that change it."
            )
    drawing = [place for place, release in enumerate(first.releases, start=1) if record in release.drawn]
    most = drawing[-1] if drawing else len(first.releases)
    at = int(np.flatnonzero(bench.base.ids == record)[0])
    own = Candidate("the record itself", unit_range(bench.base.images[at]), int(bench.base.labels[at]))
    found = _search(bench, first, wanted, record)
    echo(f"the worst records that the search found: {', '.join(each.name for each in found)}")
    tapes: list[tuple[Candidate | None, Tape]] = [(own, first)]
    for candidate in (None, *found):
        data = without(bench.base, record) if candidate is None else _with(bench.base, at, candidate)
        tapes.append((candidate, _fit(bench, data, ShortTape(source=first, wanted=wanted, record=record, most=most))))
    removed = tapes[1][1]
    pairs = tuple(
        _pair(record, one, other, removed, ledger) for one, other in combinations(sorted(tapes, key=_present), 2)
    )
    releases = {name: sum(each.mechanism == name for each in first.releases) for name in wanted}
    events = {name: entry.event for name, entry in ledger.entries.items()}
    return Replayed(events, record, len(bench.base), releases, pairs, first)


def noise_of_runs(bench: Bench, replayed: Replayed) -> dict[str, list[list[np.ndarray]]]:
    """The noise of the replayed releases of each mechanism in two runs, with further draws up to `DRAWS` numbers.

    The second run has another seed. Further draws are those of releases that were not replayed, by the function that
    adds noise to every release.
    """
    wanted = {name: min(RELEASES, event.times) for name, event in replayed.events.items()}
    other = replace(bench, seed=bench.seed + 1)
    again = ShortTape(wanted=wanted, record=replayed.record)
    tapes = [(bench, replayed.tape), (other, _fit(other, other.base, again))]
    noises: dict[str, list[list[np.ndarray]]] = {}
    for name, event in replayed.events.items():
        runs = [[noise_of(each) for each in tape.releases if each.mechanism == name] for _, tape in tapes]
        numbers = sum(map(len, runs[0] + runs[1]))
        shape = (len(runs[0][0]),) if runs[0] else (0,)
        for (own, _), run in zip(tapes, runs, strict=True):
            key = Key.seeded(f"conformance:{own.seed}").derive(name)
            more = min(MOST_DRAWS, -(-(DRAWS - numbers) // (2 * shape[0]))) if 0 < numbers < DRAWS else 0
            exact = torch.zeros(shape, dtype=torch.float64)
            further = (key.derive(len(run) + place, "value") for place in range(more))
            run += [add_noise(exact, event.std, each).double().numpy() for each in further]
        noises[name] = runs
    return noises


def noise_of(release: Release) -> np.ndarray:
    """The noise of a release [p], up to the rounding of the released float32 values."""
    return np.asarray((flat(release.noisy) - flat(release.exact)).numpy())


def _fit(bench: Bench, data: DataSet, tape: ShortTape) -> ShortTape:
    # Files of private state have room for every shard; those that are never asked take no space on disk.
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Enough):
        bench.fit(data, tape, place=StatePlace(Path(folder) / "state", Path(folder) / "cache"))
    if tape.source is not None and len(tape.releases) != min(tape.most, len(tape.source.releases)):
        raise ConformanceError(
            f"control flow depends on the data: {len(tape.releases)} releases were made with {data.name or 'the data'} "
            f"instead of {len(tape.source.releases)}."
        )
    return tape


def _present(entry: tuple[Candidate | None, Tape]) -> bool:
    """Sorts the data set without the record first, so that it is the first world of its pairs."""
    return entry[0] is not None


def _with(base: DataSet, at: int, candidate: Candidate) -> DataSet:
    images, labels = base.images.clone(), base.labels.clone()
    images[at], labels[at] = candidate.image.to(images.dtype), candidate.label
    return replace(base, name=candidate.name, images=images, labels=labels)


def _search(bench: Bench, first: ShortTape, wanted: dict[str, int], record: int) -> list[Candidate]:
    """The worst records of each mechanism, by its first release that draws the attacked one.

    The fit in which private functions are called more often is not used for anything else. Mechanisms with private
    state do not show their functions; for them and for all, a white and a black image are tried.
    """
    at = int(np.flatnonzero(bench.base.ids == record)[0])
    image, label = unit_range(bench.base.images[at]), int(bench.base.labels[at])
    others = unit_range(bench.base.images[bench.base.ids != record][:6])
    tried = list(candidates(image, label, others, bench.num_classes))
    found: list[Candidate] = []
    searched: set[str] = set()

    def query(
        mechanism: Allowance, index: int, fn: Callable[..., Tensor], batch: Batch, public: PublicRows | None
    ) -> None:
        place = torch.nonzero(batch.ids == record).flatten()
        if mechanism.name in searched or len(place) == 0:
            return
        searched.add(mechanism.name)
        assert isinstance(mechanism.bound, DrawBound)  # others show no function
        if isinstance(mechanism.bound, SUMS):  # the other records of the draw cancel
            batch, place = batch.rows(place), torch.zeros(1)
        found.extend(worst_pair(Query(mechanism.bound, fn, batch, public, int(place[0])), tried))

    if first.queried:  # mechanisms with private state and those that ask all shards show no function
        _fit(bench, bench.base, ShortTape(source=first, query=query, wanted=wanted, record=record))
    found += [each for each in tried if each.name in ("a white image", "a black image")]
    return list({(each.name, each.label): each for each in found if each.name != "the record itself"}.values())


def _pair(
    record: int,
    one: tuple[Candidate | None, Tape],
    other: tuple[Candidate | None, Tape],
    removed: Tape,
    ledger: Ledger,
) -> Pair:
    which = relation(one[0] is not None, other[0] is not None)
    moved = tuple(
        _moved(a, b, base, ledger.entries[a.mechanism].event, which)
        for a, b, base in zip(one[1].releases, other[1].releases, removed.releases)  # noqa: B905, see `ShortTape.most`
        if record in a.drawn or record in b.drawn
    )
    names = tuple("removed" if each[0] is None else each[0].name for each in (one, other))
    return Pair(which, (names[0], names[1]), moved)


def _moved(one: Release, other: Release, removed: Release, event: Event, which: Relation) -> Moved:
    origin, a, b = (flat(each.exact) for each in (removed, one, other))
    line = b - a
    distance = float(line.norm())
    unit = line / distance if distance else line
    declared: Any = getattr(event.sensitivity, which)
    first, second = (float((each - origin) @ unit) for each in (a, b))
    return Moved(one.mechanism, one.index, first, second, distance, float(declared), rounding(one.exact, other.exact))


def describe(replayed: Replayed, relations: Sequence[Relation] = RELATIONS) -> Iterator[str]:
    """One line for each mechanism and relation: moved, declared, and between which records."""
    for name, event in replayed.events.items():
        for which in relations:
            found = replayed.furthest(name, which)
            if found is None:
                yield f"{name}, {which}: the attacked record took part in no replayed release"
                continue
            moved, pair = found
            ratio = "" if np.isinf(moved.declared) else f" ({moved.distance / moved.declared:.3f})"
            yield (
                f"{name}, {which}: moved {moved.distance:.6g} of {moved.declared:.6g} declared{ratio}, "
                f"{replayed.releases[name]} of {event.times:,} releases replayed; {pair.names[0]} / {pair.names[1]}"
            )

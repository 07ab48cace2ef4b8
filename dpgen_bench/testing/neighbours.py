"""Makes data sets to replay a fit on: families that differ in one unit (a record or a client), and unrelated data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.privacy.events import Relation
from dpgen_bench.privacy.sampling import EveryShard, Sampling
from dpgen_bench.testing.bench import DataSet, random_images
from dpgen_bench.testing.tape import Tape

MOST_SHARDS = 4  # with at most this number of shards, one record of each is changed


@dataclass(frozen=True)
class Member:
    """A data set of a family.

    Attributes:
        data: the data set.
        there: whether it contains the unit that the family changes.
    """

    data: DataSet
    there: bool = True


@dataclass(frozen=True)
class Family:
    """Data sets that differ from each other in one unit.

    Attributes:
        changed: the unit: the id of a record, or the number of a client.
        base: the data set that the members are derived from; None for that of the first fit.
        base_there: whether the base contains the unit.
        members: the data sets.
    """

    changed: int
    base: DataSet | None = None
    base_there: bool = True
    members: list[Member] = field(default_factory=list)


def relation(one: bool, other: bool) -> Relation:
    """The neighbouring relation of two members of a family, by whether each contains the unit."""
    return "replace_one" if one == other else "add_remove"


def owners(records: int, clients: int) -> np.ndarray:
    """The client of each record, int [records]: record i belongs to client i modulo `clients`."""
    return np.arange(records) % clients


def odd_image(name: str, image: Tensor) -> Tensor:
    """An unusual image, by its name in ODD, of the same shape as `image`."""
    whole = {"NaN": math.nan, "1e30": 1e30, "constant": 1.0}
    return -image if name == "sign-flipped" else torch.full_like(image, whole[name])


ODD = ("NaN", "1e30", "constant", "sign-flipped")


def _odd_records(number: int, thorough: bool) -> tuple[str, ...]:
    """All names in ODD, or, unless thorough, two for units of even number and the other two for the others.

    1e30 and sign-flipped belong to one unit: as its records, they give rows of opposite directions, which show that a
    sensitivity under replace-one does not hold.
    """
    return ODD if thorough else (ODD[1], ODD[3]) if number % 2 == 0 else (ODD[0], ODD[2])


def record_families(
    base: DataSet, changed: Sequence[int], tape: Tape, num_classes: int, *, thorough: bool
) -> Iterator[Family]:
    """Families of data sets that differ in one record.

    In them a record is removed, replaced by an odd record or by a copy of another record, or is the only one of its
    class. In a last family, one record is added.

    Args:
        base: the data set of the first fit.
        changed: ids of the records to change.
        tape: of the first fit; the copy is of a record that was drawn together with the one that it replaces.
        num_classes: the number of classes.
        thorough: whether to make all of these for each record, instead of a part.
    """
    for number, record in enumerate(changed):
        at = int(np.flatnonzero(base.ids == record)[0])
        family = Family(record)
        family.members.append(Member(without(base, record), there=False))
        for name in _odd_records(number, thorough):
            family.members.append(Member(_replaced(base, at, name, num_classes)))
        if thorough or number == 0:
            family.members.append(Member(_copied(base, at, _companion(base, record, tape))))
        yield family
        if num_classes > 1 and (thorough or number == 0):
            yield _alone_in_its_class(base, at, num_classes)
    yield _one_more(base, int(changed[0]), thorough)


def without(base: DataSet, record: int) -> DataSet:
    """The data set without the record of this id."""
    keep = base.ids != record
    return DataSet(
        f"{base.name}record {record} removed",
        base.images[keep],
        base.labels[keep],
        base.ids[keep],
        base.clients[keep],
    )


def _replaced(base: DataSet, at: int, name: str, num_classes: int) -> DataSet:
    images, labels = base.images.clone(), base.labels.clone()
    images[at] = odd_image(name, images[at])
    labels[at] = (labels[at] + 1) % num_classes
    return replace(base, name=f"{base.name}record {base.ids[at]} replaced by {name}", images=images, labels=labels)


def _companion(base: DataSet, record: int, tape: Tape) -> int:
    """The position of a record that was drawn together with this one, or of any other if there is none."""
    draws = [release.drawn for release in tape.releases if record in release.drawn and len(release.drawn) > 1]
    candidates = draws[0] if draws else base.ids
    others = np.flatnonzero(np.isin(base.ids, candidates) & (base.ids != record))
    return int(others[0]) if len(others) else int(np.flatnonzero(base.ids == record)[0])


def _copied(base: DataSet, at: int, other: int) -> DataSet:
    images, labels = base.images.clone(), base.labels.clone()
    images[at], labels[at] = images[other], labels[other]
    name = f"{base.name}record {base.ids[at]} replaced by a copy of record {base.ids[other]}"
    return replace(base, name=name, images=images, labels=labels)


def _alone_in_its_class(base: DataSet, at: int, num_classes: int) -> Family:
    """A family whose base has the record as the only one of its class; it is removed, or moved to another class."""
    record = int(base.ids[at])
    labels = base.labels.clone()
    labels[labels == labels[at]] = (labels[at] + 1) % num_classes
    labels[at] = base.labels[at]
    alone = replace(base, name=f"record {record} as the only one of its class, ", labels=labels)
    moved_labels = labels.clone()
    moved_labels[at] = (labels[at] + 1) % num_classes
    moved = replace(alone, name=f"{alone.name}record {record} moved to another class", labels=moved_labels)
    return Family(record, alone, members=[Member(without(alone, record), there=False), Member(moved)])


def _one_more(base: DataSet, copied: int, thorough: bool) -> Family:
    """A family in which one record is added: a copy of another one or, if thorough, also a constant one."""
    new = int(base.ids.max()) + 1 if len(base) else 0
    at = int(np.flatnonzero(base.ids == copied)[0])

    def member(name: str, image: Tensor) -> Member:
        return Member(
            DataSet(
                f"one record added, {name}",
                torch.cat([base.images, image[None]]),
                torch.cat([base.labels, base.labels[at : at + 1]]),
                np.append(base.ids, new),
                np.append(base.clients, base.clients[at]),
            )
        )

    members = [member(f"a copy of record {copied}", base.images[at])]
    if thorough:
        members.append(member("constant", odd_image("constant", base.images[at])))
    return Family(new, base_there=False, members=members)


def client_families(
    base: DataSet, changed: Sequence[int], num_classes: int, *, join: bool, thorough: bool
) -> Iterator[Family]:
    """Families of data sets that differ in one client.

    In them a client has odd records, a copy of another client's records, no records, or three times as many. If `join`,
    a client is also removed, and in a last family one is added.

    Args:
        base: the data set of the first fit.
        changed: numbers of the clients to change.
        num_classes: the number of classes.
        join: whether clients may join and leave, which requires that each is drawn independently of the others.
        thorough: whether to make all of these for each client, instead of a part.
    """
    clients = base.clients
    for number, client in enumerate(changed):
        positions = np.flatnonzero(clients == client)
        family = Family(client)
        for name in _odd_records(number, thorough):
            images, labels = base.images.clone(), base.labels.clone()
            images[positions] = odd_image(name, images[positions])
            labels[positions] = (labels[positions] + 1) % num_classes
            member = replace(base, name=f"client {client} with {name} records", images=images, labels=labels)
            family.members.append(Member(member))
        keep = clients != client
        emptied = DataSet(
            f"client {client} without records", base.images[keep], base.labels[keep], base.ids[keep], clients[keep]
        )
        if thorough or number == 0:
            family.members.append(Member(emptied))
            family.members.append(Member(_three_times_the_records(base, client, positions)))
            family.members.append(Member(_records_of_another_client(base, client, keep)))
        if join:
            family.members.append(Member(replace(emptied, name=f"client {client} removed"), there=False))
        yield family
    if join:
        new = int(clients.max()) + 1 if len(base) else 0
        first = slice(0, 3)  # the new client has copies of these records
        added = DataSet(
            "one client added",
            torch.cat([base.images, base.images[first]]),
            torch.cat([base.labels, base.labels[first]]),
            np.append(base.ids, _new_ids(base, len(base.labels[first]))),
            np.append(clients, np.full(len(base.labels[first]), new)),
        )
        yield Family(new, base_there=False, members=[Member(added)])


def _new_ids(base: DataSet, number: int) -> np.ndarray:
    """Ids that no record has yet."""
    return np.arange(number) + int(base.ids.max(initial=-1)) + 1


def _three_times_the_records(base: DataSet, client: int, positions: np.ndarray) -> DataSet:
    chosen = np.concatenate([np.arange(len(base)), positions, positions])
    labels, clients = base.labels[chosen].clone(), base.clients[chosen]
    labels[np.flatnonzero(clients == client)] = 0
    ids = np.append(base.ids, _new_ids(base, 2 * len(positions)))
    name = f"client {client} with three times the records, all of one class"
    return DataSet(name, base.images[chosen], labels, ids, clients)


def _records_of_another_client(base: DataSet, client: int, others: np.ndarray) -> DataSet:
    """The client has a copy of another client's records; others: bool [records], those of all other clients."""
    source = int(base.clients[others][0]) if others.any() else client
    copied, kept = np.flatnonzero(base.clients == source), np.flatnonzero(others)
    chosen = np.append(kept, copied)
    clients = np.append(base.clients[kept], np.full(len(copied), client))
    ids = np.append(base.ids[kept], _new_ids(base, len(copied)))
    name = f"client {client} with a copy of the records of client {source}"
    return DataSet(name, base.images[chosen], base.labels[chosen], ids, clients)


def other_data(base: DataSet, num_classes: int, seed: int) -> Iterator[DataSet]:
    """Data sets with the same ids and clients that have nothing else in common with the first."""
    images, labels = random_images(tuple(base.images.shape[1:]), len(base), num_classes, seed)
    yield replace(base, name="unrelated records", images=1.0 - images, labels=labels)
    yield replace(base, name="all records dark", images=torch.zeros_like(images), labels=labels.flip(0))
    yield replace(base, name="all records bright", images=torch.ones_like(images), labels=labels)
    yield replace(base, name="all records of one class", images=images, labels=torch.zeros_like(labels))


def units_to_change(tape: Tape, samplings: Sequence[Sampling] = ()) -> list[int]:
    """Records, or clients, whose change is most likely to expose a fault.

    These are one of the first draw that is not in the last draw, and one of the last draw that is not in the first (if
    there are such). The change of the former exposes a method that keeps its first draw, and the change of the latter a
    method that uses records before they are drawn. Where draws are of few shards, or each draw asks all of few shards,
    one record of each shard is chosen; of many shards that are all asked, one record of each of MOST_SHARDS shards.
    """
    drawn = np.unique(np.concatenate([release.drawn for release in tape.releases] or [np.arange(1)])).astype(np.int64)
    for sampling in samplings:
        if isinstance(sampling, EveryShard) and len(drawn):
            filled = [members for members in sampling.members(drawn) if len(members)]
            chosen = np.linspace(0, len(filled) - 1, min(MOST_SHARDS, len(filled))).astype(int)
            return sorted(int(drawn[filled[shard][len(filled[shard]) // 2]]) for shard in chosen)
    draws = [release.drawn for release in tape.releases if len(release.drawn)] or [np.arange(1)]
    distinct = {tuple(draw): draw for draw in draws}
    disjoint = len(np.unique(np.concatenate(list(distinct.values())))) == sum(map(len, distinct.values()))
    if 1 < len(distinct) <= MOST_SHARDS and disjoint:
        return sorted({int(draw[len(draw) // 2]) for draw in distinct.values()})
    early, late = np.setdiff1d(draws[0], draws[-1]), np.setdiff1d(draws[-1], draws[0])
    return sorted({int((early if len(early) else draws[0])[0]), int((late if len(late) else draws[-1])[-1])})

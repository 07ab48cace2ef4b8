"""Neighbouring data sets: one record, or one client with all its records, is another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.privacy.events import Relation
from dpgen_bench.testing.bench import Tape

MOST_SHARDS = 4  # of which one record each is changed


@dataclass(frozen=True)
class Neighbour:
    """A dataset that differs from the first in one unit, `changed`: a record, by its id, or a client."""

    name: str
    relation: Relation
    changed: int
    images: Tensor
    labels: Tensor
    ids: np.ndarray
    clients: np.ndarray


def owners(records: int, clients: int) -> np.ndarray:
    """Client number [records] of each record: dealt in turn."""
    return np.arange(records) % clients


def odd_image(name: str, image: Tensor) -> Tensor:
    """What an image of another data set might be."""
    whole = {"NaN": math.nan, "1e30": 1e30, "constant": 1.0}
    return -image if name == "sign-flipped" else torch.full_like(image, whole[name])


ODD = ("NaN", "1e30", "constant", "sign-flipped")


def neighbours(
    images: Tensor, labels: Tensor, changed: Sequence[int], num_classes: int, clients: int
) -> Iterator[Neighbour]:
    """For each id in `changed`: without it, and with it replaced by odd records; and one dataset with a record more."""
    ids, own = np.arange(len(labels)), owners(len(labels), clients)
    for record in changed:
        keep = ids != record
        yield Neighbour(
            f"record {record} removed", "add_remove", record, images[keep], labels[keep], ids[keep], own[keep]
        )
        for name in ODD:
            replaced, relabelled = images.clone(), labels.clone()
            replaced[record] = odd_image(name, images[record])
            relabelled[record] = (labels[record] + 1) % num_classes
            what = f"record {record} replaced by {name}"
            yield Neighbour(what, "replace_one", record, replaced, relabelled, ids, own)
    more = torch.cat([images, odd_image("constant", images[:1])]), torch.cat([labels, labels[:1]])
    n = len(labels) + 1
    yield Neighbour("one record added", "add_remove", n - 1, *more, np.arange(n), owners(n, clients))


def client_neighbours(
    images: Tensor, labels: Tensor, changed: Sequence[int], num_classes: int, clients: int, *, join: bool
) -> Iterator[Neighbour]:
    """For each client in `changed`: with other records, none, or thrice as many; and, if `join`, a client more or less.

    Args:
        join: whether clients may join and leave, as where each is drawn by a coin of its own.
    """
    n, own = len(labels), owners(len(labels), clients)
    ids = np.arange(n)
    for client in changed:
        theirs = np.flatnonzero(own == client)
        for name in ODD:
            replaced, relabelled = images.clone(), labels.clone()
            replaced[theirs] = odd_image(name, images[theirs])
            relabelled[theirs] = (labels[theirs] + 1) % num_classes
            what = f"client {client} with {name} records"
            yield Neighbour(what, "replace_one", client, replaced, relabelled, ids, own)
        keep = own != client
        emptied = images[keep], labels[keep], ids[keep], own[keep]
        yield Neighbour(f"client {client} without records", "replace_one", client, *emptied)
        if join:
            yield Neighbour(f"client {client} gone", "add_remove", client, *emptied)
        more = np.concatenate([ids, theirs, theirs])
        one_class = labels[more].clone()
        one_class[np.isin(own[more], client)] = 0
        thrice = images[more], one_class, np.arange(len(more)), own[more]
        yield Neighbour(
            f"client {client} with three times the records, all of one class", "replace_one", client, *thrice
        )
    if join:
        added = np.concatenate([own, np.full(3, clients)])
        extra = torch.cat([images, images[:3]]), torch.cat([labels, labels[:3]])
        yield Neighbour("one client added", "add_remove", clients, *extra, np.arange(n + 3), added)


def telling_units(tape: Tape) -> list[int]:
    """Records, or clients, to change: one of the first draw that a later one missed, one drawn only later (if any).

    A method that keeps its first draw is caught by the former, one that looks at records before they are drawn by the
    latter. Where draws are of few shards, one record of each shard.
    """
    draws = [release.drawn for release in tape.releases if len(release.drawn)] or [np.arange(1)]
    distinct = {tuple(draw): draw for draw in draws}
    disjoint = len(np.unique(np.concatenate(list(distinct.values())))) == sum(map(len, distinct.values()))
    if 1 < len(distinct) <= MOST_SHARDS and disjoint:
        return sorted({int(draw[len(draw) // 2]) for draw in distinct.values()})
    early, late = np.setdiff1d(draws[0], draws[-1]), np.setdiff1d(draws[-1], draws[0])
    return sorted({int((early if len(early) else draws[0])[0]), int((late if len(late) else draws[-1])[-1])})

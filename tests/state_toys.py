"""Helpers for tests of private state: a small state with sums and visits, its mechanism, and data."""

from __future__ import annotations

import torch

from dpgen_bench.data.private import PrivateData
from dpgen_bench.privacy.allowance import Observer
from dpgen_bench.privacy.bounds import PerRow
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import OneShard
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state_file import StatePlace

BALANCED = OneShard(3, "public_balanced")
BOUND = PerRow(C=1.0, shape=(2, 1))


def open_data(n=12, place=None, images=None):
    images = torch.arange(n).float().reshape(n, 1, 1, 1) / n if images is None else images
    ledger = Ledger(Budget(epsilon=1e4), n)
    labels = torch.zeros(len(images), dtype=torch.int64)
    return PrivateData(images, labels, 2, Services(ledger, Key.seeded("test"), place=place or StatePlace())), ledger


def count(records, rng):
    """The first state: the number of records, their sum, and no visits."""
    sums = torch.stack([images.sum() for images, _ in records])
    return {
        "n": torch.tensor([float(len(labels)) for _, labels in records]),
        "sum": sums,
        "visits": torch.zeros_like(sums),
    }


def visit(images, labels, state, rng):
    rows = torch.full((2, 1), float(state["visits"]))
    return rows, {**state, "visits": state["visits"] + 1.0}


def prepare(data, start=count, sample=BALANCED, bound=BOUND, times=9, std=1000.0, **kwargs):
    state = data.private_state("critics", sample=sample, start=start, identity={}, **kwargs)
    return data.mechanism("query", sample=sample, bound=bound, times=times, std=std, state=state), state


def taped(data):
    """A list to which an observer appends the exact value of each release."""
    exact = []

    class Tape(Observer):
        def release(self, mechanism, index, drawn, value, noisy):
            exact.append(float(value["value"][0]))
            return noisy

        def answers(self, rows):
            pass

        def before_records(self):
            pass

    object.__setattr__(data._services, "observer", Tape())
    return exact

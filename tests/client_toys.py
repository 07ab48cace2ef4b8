"""Helpers for tests of federations: a client program, the data of four clients, and mechanisms that ask them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dpgen_bench.data.private import PrivateData
from dpgen_bench.federation.messages import encode
from dpgen_bench.privacy.bounds import PerRecord, PerRow
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import OneClient
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state_file import StatePlace
from tests.toys import records

SHAPE = (2, 3)
N = 4
ROWS = PerRow(C=1.0, shape=SHAPE)
ROW = PerRecord(C=1.0, shape=(3,))


class Odd(torch.Tensor):
    pass


class Ends(BaseException):
    pass


@dataclass(frozen=True)
class Toy:
    """Each row of an answer is (number of records, first label, number of earlier answers). `wrong` plants a fault."""

    shape: tuple[int, ...] = SHAPE
    keeps: bool = True
    wrong: str = ""

    def identity(self) -> dict[str, Any]:
        return {}

    def start(self, records, rng):
        if self.wrong == "start exits":
            raise SystemExit("secret 3")
        return {"answers": torch.zeros(1)}

    def answer(self, message, records, state, rng):
        _, labels = records
        if self.wrong == "raises" and 3 in labels:
            raise RuntimeError("secret 3")
        if self.wrong == "exits":
            raise SystemExit("secret 3")
        if self.wrong == "own kind":
            raise Ends("secret 3")
        if self.wrong == "in place":
            labels += 1
        if self.wrong == "global":
            torch.rand(1)
        answers = state.get("answers", torch.zeros(1))
        first = float(labels[0]) if len(labels) else -1.0
        row = torch.tensor([float(len(labels)), first, float(answers)]) * message["scale"]
        if self.wrong == "nan":
            row[0] = math.nan
        if self.wrong == "subclass":
            row = row.as_subclass(Odd)
        if self.wrong == "subclass in state":
            answers = answers.as_subclass(Odd)
        shape = (5, 3) if self.wrong == "shape" else self.shape
        return row.expand(shape).clone(), {"answers": answers + 1} if self.keeps else {}


def data(
    place=None, budget=None, clients=None, federation=None, tmp_path=None, ledger=None, number=N, key="k"
) -> PrivateData:
    images, labels = records(12)
    own = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]) if clients is None else clients
    return PrivateData(
        images,
        labels,
        10,
        Services(
            ledger or Ledger(budget or Budget(math.inf, relation="replace_one"), 12),
            Key.seeded(key),
            place=place or StatePlace(),
            client_folder=tmp_path,
        ),
        clients=own,
        num_clients=number,
        federation=federation,
    )


def ask_one(held: PrivateData, times=8, std=0.0, program=None, bound=None, **other):
    sample = other.pop("sample", OneClient(N, "public_balanced"))
    bound = bound or replace(ROWS, C=math.inf if std == 0.0 else 1.0)
    return held.grouped("client").mechanism(
        "toy", program=program or Toy(), sample=sample, bound=bound, noise_at="client", times=times, std=std, **other
    )


def ask_many(held: PrivateData, sample, times=3, std=0.0, program=None, bound=ROW):
    return held.grouped("client").mechanism(
        "toy",
        program=program or Toy(shape=(3,), keeps=False),
        sample=sample,
        bound=bound,
        noise_at="server",
        times=times,
        std=std,
    )


SCALE = {"scale": torch.ones(1)}
REFUSAL = encode({}, {"refused": 1})

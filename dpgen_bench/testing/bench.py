"""What a method under test is fitted on, and the tape of what it releases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import Generator
from dpgen_bench.method import Context, Method
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.mechanism import Allowance
from dpgen_bench.privacy.noise import Key
from dpgen_bench.privacy.state import StatePlace

Parts = dict[str, Tensor]


class ConformanceError(AssertionError):
    """A method (or the harness under it) broke a rule that its privacy rests on."""


@dataclass
class Release:
    """One taped release."""

    mechanism: str
    index: int
    drawn: np.ndarray
    exact: Parts
    noisy: Parts


@dataclass
class Tape:
    """Records releases; with a `source`, replays the source's noisy values into the method."""

    source: Tape | None = None
    releases: list[Release] = field(default_factory=list)

    def release(self, mechanism: Allowance, index: int, drawn: np.ndarray, exact: Parts, noisy: Parts) -> Parts:
        exact = {part: value.detach().clone() for part, value in exact.items()}
        noisy = {part: value.detach().clone() for part, value in noisy.items()}
        if self.source is not None:
            if len(self.releases) >= len(self.source.releases):
                raise ConformanceError(f"a neighbouring dataset led to an extra release of {mechanism.name!r}.")
            first = self.source.releases[len(self.releases)]
            if (first.mechanism, first.index) != (mechanism.name, index) or shapes(first.exact) != shapes(exact):
                raise ConformanceError(
                    f"control flow depends on the data: where {first.mechanism!r} release {first.index} with shapes "
                    f"{shapes(first.exact)} was made, a neighbouring dataset led to {mechanism.name!r} release "
                    f"{index} with shapes {shapes(exact)}."
                )
            noisy = {part: value.clone() for part, value in first.noisy.items()}
        self.releases.append(Release(mechanism.name, index, drawn.copy(), exact, noisy))
        return noisy

    def before_records(self) -> None:
        """A fit in the suite is a real one: private state is made."""


@dataclass
class Fit:
    """One fit of the method under test and all that came of it."""

    tape: Tape
    ledger: Ledger
    data: PrivateData
    generator: Generator
    log: list[dict[str, object]]
    counts: dict[str, int]

    @property
    def units(self) -> int:
        """How many records there are, or clients, if they are the unit."""
        return self.ledger.records


@dataclass(frozen=True)
class Bench:
    """What the method is tested on: a few records, a budget, fixed coins.

    Args:
        make_method: a fresh method for each fit.
        records: how many; they are smooth random images with random labels.
        clients: how many clients they belong to, equally many to each.
    """

    make_method: Callable[[], Method]
    image_shape: tuple[int, int, int] = (1, 28, 28)
    num_classes: int = 10
    records: int = 48
    seed: int = 0
    budget: Budget = field(default_factory=lambda: Budget(epsilon=10.0))
    clients: int = 8

    def images(self) -> tuple[Tensor, Tensor]:
        """Float images [n, c, h, w] in [0, 1] and labels int64 [n]."""
        coins = torch.Generator().manual_seed(self.seed + 1)
        coarse = torch.rand(self.records, self.image_shape[0], 4, 4, generator=coins)
        images = torch.nn.functional.interpolate(coarse, self.image_shape[1:], mode="bilinear", align_corners=False)
        return images, torch.randint(self.num_classes, (self.records,), generator=coins)

    def fit(
        self,
        images: Tensor,
        labels: Tensor,
        ids: np.ndarray,
        clients: np.ndarray,
        tape: Tape,
        place: StatePlace | None = None,
    ) -> Fit:
        ledger = Ledger(self.budget, self.records)
        data = PrivateData(
            images,
            labels,
            self.num_classes,
            ledger,
            Key.seeded(f"conformance:{self.seed}"),
            ids=ids,
            public_n=self.records,
            clients=clients,
            num_clients=self.clients,
            observer=tape,
            state_place=place,
        )
        context = Context(self.seed, "cpu", data=data)
        generator = self.make_method().fit(data, context)
        counts = {**context.bytes_sent, **context.counters}
        return Fit(tape, ledger, data, generator, context.history, counts)


def expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ConformanceError(otherwise)


def flat(parts: Parts) -> Tensor:
    return torch.cat([parts[name].double().flatten() for name in sorted(parts)])


def shapes(parts: Parts) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in parts.items()}

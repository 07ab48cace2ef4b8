"""Fits a method under test and records the fit: its data, a tape of its releases, and a context that records state.

A `Bench` makes the fits, a `WatchedContext` records what the method passes to `ctx.steps`, and a `Fit` has all results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import Generator
from dpgen_bench.method import Context, Method, Scale, fit_method
from dpgen_bench.pretraining.pretrained import plugin_of
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.journal import Journal
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state_file import StatePlace
from dpgen_bench.testing.digest import Digests, as_json, digests
from dpgen_bench.testing.pristine import Pristine
from dpgen_bench.testing.private_access import private_access_refused
from dpgen_bench.testing.public import (
    claims_text,
    randomness_digests,
    released_digests,
    saved_digests,
    state_digests,
)
from dpgen_bench.testing.tape import Tape

SAMPLES, SAMPLE_SEED = 30, 1  # images sampled after each fit, and their seed


@dataclass(frozen=True)
class DataSet:
    """Records [n] with their ids and the client number of each; `name` is what messages call it."""

    name: str
    images: Tensor
    labels: Tensor
    ids: np.ndarray
    clients: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


class Killed(BaseException):
    """Ends a fit as a kill would; it is no `Exception`, so that `except Exception` in a method does not catch it."""


class WatchedContext(Context):
    """A context that keeps digests of everything passed to `steps`, and can end the fit as a kill would.

    Attributes:
        states: digests of the objects passed to `steps`, after each step, in the order of steps.
        loops: (phase, steps) of each loop that was entered.
    """

    def __init__(self, *args: Any, kill_after: int | None = None, save_at: int | None = None, **kwargs: Any) -> None:
        self._kill_after, self._save_at = kill_after, save_at
        super().__init__(*args, due=self._due, should_stop=self._stop, **kwargs)
        self.states: list[Digests] = []
        self.loops: list[tuple[str, int]] = []
        self._passed: dict[str, Any] = {}

    def steps(self, total: int, *, phase: str = "train", **stateful: Any) -> Iterator[int]:
        self.loops.append((phase, total))
        self._passed |= {f"{phase}/{name}": value for name, value in stateful.items()}
        for t in super().steps(total, phase=phase, **stateful):
            yield t
            self.states.append(self._digests(phase, stateful))

    def _digests(self, phase: str, stateful: dict[str, Any]) -> Digests:
        return {
            **randomness_digests(self.generator),
            **digests(as_json([self.bytes_sent, self.counters], "counters"), "counters"),
            **state_digests({f"{phase}/{name}": value for name, value in stateful.items()}),
        }

    def final_state(self) -> Digests:
        """Digests of everything that was passed to any loop, as it is now."""
        return state_digests(self._passed)

    def _stop(self) -> None:
        if self._kill_after is not None and len(self.states) >= self._kill_after:
            raise Killed

    def _due(self, seconds: float) -> bool:
        """Whether a checkpoint is due: after step `save_at`, or after each step if that is None.

        The harness also makes one at the end of each loop.
        """
        return self._save_at in (None, len(self.states))


@dataclass
class Fit:
    """One fit of the method under test and all its results.

    Attributes:
        log: digests of the rows of the log.
        counts: the content of training.json; times are represented by their names alone.
        states: digests of the objects passed to `ctx.steps`, after each step (together with public randomness) and,
            last, at the end of the fit.
        loops: (phase, steps) of each loop of `ctx.steps`.
        samples: uint8 [SAMPLES, c, h, w], drawn directly after the fit.
        labels: digests of the labels that the generator draws.
        saved: digests of the generator's files, if its class overrides `save`.
        released: digests of the state and config of the generator, as they are saved.
        ledger_file: the content of ledger.json.
        claims: epsilon_claimed and epsilon_conditional, as JSON text.
    """

    tape: Tape
    ledger: Ledger
    data: PrivateData
    services: Services
    generator: Generator
    log: list[Digests]
    counts: dict[str, Any]
    states: list[Digests]
    loops: list[tuple[str, int]]
    samples: Tensor
    labels: Digests
    saved: Digests
    released: Digests
    ledger_file: dict[str, Any]
    claims: str

    @property
    def units(self) -> int:
        """The number of records, or the number of clients if the client is the unit of privacy."""
        return self.ledger.records


@dataclass(frozen=True)
class Bench:
    """The conditions under which a method is tested: a data set, a budget, and fixed randomness.

    Args:
        make_method: returns a fresh method for each fit.
        base: the first data set.
        image_shape: (c, h, w) of the images.
        num_classes: the number of classes.
        seed: of the key and of public randomness.
        budget: the budget of each fit.
        clients: the number of clients that the records belong to.
        pristine: resets the plugin's modules, before each fit, to their state before the first fit.
        class_names: the names of the classes; None takes their numbers.
        public_n: the number of records that methods are told and the ledger states; None takes that of `base`.
        scale: the caps of a run's scale; None for those of a fit without a config.
    """

    make_method: Callable[[], Method]
    base: DataSet
    image_shape: tuple[int, int, int] = (1, 28, 28)
    num_classes: int = 10
    seed: int = 0
    budget: Budget = field(default_factory=lambda: Budget(epsilon=10.0))
    clients: int = 8
    pristine: Pristine | None = None
    class_names: tuple[str, ...] | None = None
    public_n: int | None = None
    scale: Scale | None = None

    def fit(
        self,
        data_set: DataSet,
        tape: Tape,
        *,
        place: StatePlace | None = None,
        folder: Path | None = None,
        kill_after: int | None = None,
        save_at: int | None = None,
        key: type[Key] = Key,
    ) -> Fit:
        """Fit a fresh method once.

        Args:
            tape: observes the releases of this fit.
            place: where private state is stored; by default in memory, or in the folder.
            folder: the fit writes checkpoints into this folder, and continues from the last one that is there.
            kill_after: raise `Killed` after this number of steps, before the checkpoint of the last of them.
            save_at: make a checkpoint after this number of steps, and at the end of each loop; None makes one after
                each step.
            key: the class of the key from which draws and noise are derived.

        Raises:
            ConformanceError: an error of the tape, or a `PrivateAccess`, even if the method caught it.
            Killed: see `kill_after`.
        """
        if self.pristine is not None:
            self.pristine.restore()
        ledger, private = self._ledger(folder), None
        if folder is not None:
            private = folder / "private"
            place = place or StatePlace(private / "state", folder / "cache", {})
        services = Services(
            ledger,
            key.seeded(f"conformance:{self.seed}"),
            observer=tape,
            place=place or StatePlace(),
            journal=Journal(private and private / "journal"),
            client_folder=private and private / "federation",
        )
        data = PrivateData(
            data_set.images,
            data_set.labels,
            self.num_classes,
            services,
            ids=data_set.ids,
            public_n=self._records,
            clients=data_set.clients,
            num_clients=self.clients,
            class_names=self.class_names,
        )
        when = {"kill_after": kill_after, "save_at": save_at}
        context = WatchedContext(self.seed, "cpu", scale=self.scale, services=services, folder=folder, **when)
        method = self.make_method()
        # The generator and the epsilons that the method claims are the plugin's code, too, so the guard covers them.
        with private_access_refused(plugin_of(method)) as refused:
            try:
                generator = fit_method(method, data, context)
            finally:
                data.close()
                context.close()
                for error in (tape.error, *refused):  # the method may have caught them
                    if error is not None:
                        raise error
            states = [*context.states, context.final_state()]
            released = released_digests(generator)
            claims = claims_text(method, ledger, self.budget.delta)
            # No samples after a fit on no records: such a generator may be unable to draw any.
            labels = torch.arange(SAMPLES if len(data_set) else 0) % self.num_classes
            samples = generator.sample(labels, SAMPLE_SEED)
            drawn, saved = digests(generator.draw_labels(SAMPLES, SAMPLE_SEED)), saved_digests(generator)
            counts = context.cost(generator)
        # Measured times are public and differ between fits.
        counts |= {"seconds": list(counts["seconds"]), "seconds_outside_loops": None, "cpu_seconds": None}
        log = [digests(json.loads(as_json(row, "values in the log"))) for row in context.history]
        return Fit(
            tape,
            ledger,
            data,
            services,
            generator,
            log,
            counts,
            states,
            context.loops,
            samples,
            drawn,
            saved,
            released,
            json.loads(as_json(ledger.to_dict(), "a ledger")),
            claims,
        )

    def _ledger(self, folder: Path | None) -> Ledger:
        if folder is None:
            return Ledger(self.budget, self._records)
        if (folder / "ledger.json").exists():
            return Ledger.load(folder / "ledger.json")
        return Ledger(self.budget, self._records, path=folder / "ledger.json")

    @property
    def _records(self) -> int:
        return len(self.base) if self.public_n is None else self.public_n


def random_images(shape: tuple[int, ...], records: int, num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Smooth random images [n, c, h, w] in [0, 1] and random labels int64 [n]."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(records, shape[0], 4, 4, generator=rng)
    images = torch.nn.functional.interpolate(coarse, shape[1:], mode="bilinear", align_corners=False)
    return images, torch.randint(num_classes, (records,), generator=rng)

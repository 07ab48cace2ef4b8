"""`Services`: one object with everything that the mechanisms, private state and clients of a run share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpgen_bench.privacy import noise
from dpgen_bench.privacy.allowance import Allowance, Control, Observer
from dpgen_bench.privacy.journal import Journal
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.processes import Processes
from dpgen_bench.privacy.sampling import EveryShard, OneShard
from dpgen_bench.privacy.state_file import StatePlace
from dpgen_bench.training.loop import LoopState
from dpgen_bench.training.public import PublicRecord

STEPS_BETWEEN_COMPARISONS = 100  # of the states of several processes


@dataclass(frozen=True)
class Services:
    """The objects that mechanisms, private state and clients of a run share.

    Attributes:
        ledger: the approved and the executed releases.
        key: the root of the keys of all draws and all noise.
        device: the device of records and releases.
        journal: noisy values that a resumed run repeats.
        observer: receives the exact value of each release; for the conformance suite.
        diagnostics: a private file for norms before clipping, on public data.
        place: where private state is stored.
        client_folder: a private folder for the faults of clients; None keeps none.
        loop: knows whether the run is inside `ctx.steps`.
        public: the run's public log and counters.
        mechanisms: the mechanisms that the method was given, by name.
        controls: the harness's control of each mechanism, by name.
        padded: whether Poisson draws of sums over records are padded (`padding`); None pads on an accelerator, and
            where several processes divide draws.
        host_noise: a private file that says that all noise for release is added on the host, see `noise.Undecided`.
        stack: the least number of shards that private state computes together, where a method names fewer.
        processes: those that make the releases together; None for this one alone.

    Raises:
        ValueError: for a key of another noise mode than the ledger states, and for diagnostics of several processes.
    """

    ledger: Ledger
    key: Key
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    journal: Journal = field(default_factory=lambda: Journal(None))
    observer: Observer | None = None
    diagnostics: Path | None = None
    place: StatePlace = field(default_factory=StatePlace)
    client_folder: Path | None = None
    loop: LoopState = field(default_factory=LoopState)
    public: PublicRecord = field(default_factory=PublicRecord)
    mechanisms: dict[str, Allowance] = field(default_factory=dict)
    controls: dict[str, Control] = field(default_factory=dict)
    padded: bool | None = None
    stack: int | None = None
    processes: Processes | None = None
    host_noise: Path | None = None

    @property
    def pads(self) -> bool:
        """Whether Poisson draws of sums over records are padded."""
        if self.processes is not None:
            return True
        return self.device.type != "cpu" if self.padded is None else self.padded

    def adds_on_device(self, std: float) -> bool:
        """Whether an accelerator adds the noise for release, so that no step waits for it (`noise.NoiseAhead`)."""
        only_on_host = self.host_noise is not None and self.host_noise.exists()
        return self.key.mode == "os" and std > 0.0 and self.device.type not in noise.ON_HOST and not only_on_host

    def __post_init__(self) -> None:
        if self.key.mode != self.ledger.noise:
            raise ValueError(
                f"expected a key of the ledger's noise mode, privacy.noise={self.ledger.noise}, got one of mode "
                f"{self.key.mode}: the ledger would state another kind of noise than is added."
            )
        if self.processes is not None and self.diagnostics is not None:
            raise ValueError(
                "expected privacy.diagnostics=off with several processes, got unsafe: no process sees the norms of all "
                "records; leave out runtime.processes."
            )

    def register(self, mechanism: Allowance, control: Control) -> None:
        """Register a mechanism before a method receives it."""
        self.ledger.names_in_use.add(mechanism.name)
        self.mechanisms[mechanism.name] = mechanism
        self.controls[mechanism.name] = control

    def before_records(self) -> None:
        """Call this before records are used outside a release: it refuses after a failure and informs the observer.

        Raises:
            Invalidated: if a private function of the run has raised.
        """
        self.ledger.refuse_if_invalidated()
        if self.observer is not None:
            self.observer.before_records()

    def observe_states(self, shards: range, parts: dict[str, Tensor]) -> None:
        """Show the observer the states of shards: see `Observer.states`."""
        if self.observer is not None:
            self.observer.states(shards, parts)

    def asks(self, sampling: OneShard | EveryShard, shards: range) -> bool:
        """Whether these shards are needed: see `Observer.asks`."""
        return self.observer is None or self.observer.asks(sampling, shards)

    # The methods of `dpgen_bench.training.loop.Releases`: checkpoints of the releases that were made.

    def refuse_if_invalidated(self) -> None:
        self.ledger.refuse_if_invalidated()

    def executed(self) -> dict[str, int]:
        return {name: mechanism.executed for name, mechanism in self.mechanisms.items()}

    def resume_at(self, executed: dict[str, int]) -> None:
        for name, count in executed.items():
            self.controls[name].resume_at(count)

    def after_step(self, step: int, state: Callable[[], Any]) -> None:
        if self.processes is not None and (step == 1 or step % STEPS_BETWEEN_COMPARISONS == 0):
            self.processes.expect_equal(state(), f"after {step} steps")

    def before_checkpoint(self) -> None:
        self.ledger.save()
        for control in self.controls.values():
            control.before_checkpoint()

    def after_checkpoint(self) -> None:
        for control in self.controls.values():
            control.after_checkpoint()

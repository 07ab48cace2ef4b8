"""`Services`: one object with everything that the mechanisms, private state and clients of a run share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from dpgen_bench.privacy.allowance import Allowance, Control, Observer
from dpgen_bench.privacy.journal import Journal
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.state_file import StatePlace
from dpgen_bench.training.loop import LoopState
from dpgen_bench.training.public import PublicRecord


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

    Raises:
        ValueError: for a key of another noise mode than the ledger states.
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

    def __post_init__(self) -> None:
        if self.key.mode != self.ledger.noise:
            raise ValueError(
                f"expected a key of the ledger's noise mode, privacy.noise={self.ledger.noise}, got one of mode "
                f"{self.key.mode}: the ledger would state another kind of noise than is added."
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

    # The methods of `dpgen_bench.training.loop.Releases`: checkpoints of the releases that were made.

    def refuse_if_invalidated(self) -> None:
        self.ledger.refuse_if_invalidated()

    def executed(self) -> dict[str, int]:
        return {name: mechanism.executed for name, mechanism in self.mechanisms.items()}

    def resume_at(self, executed: dict[str, int]) -> None:
        for name, count in executed.items():
            self.controls[name].resume_at(count)

    def before_checkpoint(self) -> None:
        self.ledger.save()
        for control in self.controls.values():
            control.before_checkpoint()

    def after_checkpoint(self) -> None:
        for control in self.controls.values():
            control.after_checkpoint()

"""Checkpoints: the state from which an interrupted run continues with the same results as an uninterrupted one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dpgen_bench.utils.files import UNFINISHED, atomic
from dpgen_bench.utils.randomness import global_randomness, restore_global_randomness


@dataclass(frozen=True)
class PhaseState:
    """The state of one loop (phase) after a step.

    A finished phase keeps its state in the checkpoint. On resumption, `fit` runs again what it does between two loops.
    This code must see the same randomness and release numbers as the first time: otherwise a noise value would be used
    for two queries, and bytes would be counted twice.

    Attributes:
        steps: Steps done.
        stateful: State dicts by name.
        randomness: States of all public generators, as `public_randomness` returns them.
        executed: Releases so far, by mechanism.
        bytes_sent, counters: Counts of the run so far, by direction and by name.
    """

    steps: int
    stateful: dict[str, Any]
    randomness: dict[str, Any]
    executed: dict[str, int]
    bytes_sent: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run. Checkpoints of older versions lack the attributes that have a default.

    Attributes:
        phases: The phases entered so far, in order; the run is in the last one.
        seconds: Seconds by phase.
        log_bytes: Length of the log file in bytes.
        seconds_outside: Seconds of `fit` outside the phases.
        peak_memory: What `PeakMemory.read` returned, or None if memory was not measured.
        cpu_seconds: Processor time of `fit`, or None if an earlier version did not measure it.
    """

    phases: dict[str, PhaseState]
    seconds: dict[str, float]
    log_bytes: int
    seconds_outside: float = 0.0
    peak_memory: dict[str, Any] | None = None
    cpu_seconds: float | None = None

    @property
    def current(self) -> str:
        """The name of the last phase."""
        return list(self.phases)[-1]


def public_randomness(generator: torch.Generator) -> dict[str, Any]:
    """States of the context's generator and of the global ones, see `global_randomness`."""
    return {"context": generator.get_state(), **global_randomness()}


def restore_randomness(state: dict[str, Any], generator: torch.Generator) -> None:
    """Set all public generators to the states that `public_randomness` returned."""
    generator.set_state(state["context"])
    restore_global_randomness(state)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep_as: str | None = None) -> None:
    """Write last.pt, and a copy under the name `keep_as` that later checkpoints do not overwrite. Writes are atomic."""
    # `asdict` would copy the tensors once more, and it cannot rebuild a Counter (the milestones of a schedule).
    content = {**vars(checkpoint), "phases": {name: dict(vars(phase)) for name, phase in checkpoint.phases.items()}}
    for name in ["last", *([keep_as] if keep_as else [])]:
        with atomic(folder / f"{name}.pt") as temporary:
            torch.save(content, temporary)


def remove_unfinished(folder: Path) -> None:
    """Remove what a process that was killed while it wrote a checkpoint left in the folder. No other may be writing."""
    for path in folder.glob(f"{UNFINISHED}.pt"):
        path.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint of a file, loaded without unpickling code (weights_only), or None if there is no file.

    Raises:
        ValueError: If the file cannot be read.
    """
    if not path.exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        phases = {name: PhaseState(**state) for name, state in content.pop("phases").items()}
        return Checkpoint(phases, **content)
    except Exception as error:
        raise ValueError(
            f"the checkpoint {path} cannot be read ({type(error).__name__}: {error}). If you have no copy, delete "
            "the run's folder and start the run again; with privacy.noise=os this spends its epsilon a second time."
        ) from error

"""A checkpoint: all that a killed run needs to go on as if nothing had happened."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpgen_bench.utils.files import atomic


@dataclass(frozen=True)
class PhaseState:
    """Where one loop stood after a step.

    stateful: state dicts by name. randomness: every public generator. executed: releases made so far, by mechanism.
    bytes_sent, counters: counted so far in the run. A finished phase keeps its own: what a method does between two
    loops is done again on resume, and must find the randomness and the release numbers it had the first time, or a
    noise value would be used twice (and a byte counted twice).
    """

    steps: int
    stateful: dict[str, Any]
    randomness: dict[str, Any]
    executed: dict[str, int]
    bytes_sent: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """The phases entered so far, in order; the run stands in the last. log_bytes: length of the log at that moment.

    seconds: of each phase; seconds_outside: of `fit` between them. peak_memory: as `PeakMemory.read` gave it, or None.
    Checkpoints of older versions lack what has a default.
    """

    phases: dict[str, PhaseState]
    seconds: dict[str, float]
    log_bytes: int
    seconds_outside: float = 0.0
    peak_memory: dict[str, Any] | None = None

    @property
    def current(self) -> str:
        return list(self.phases)[-1]


def public_randomness(generator: torch.Generator) -> dict[str, Any]:
    """State of the context's generator and of PyTorch's, NumPy's and Python's global ones."""
    kind, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return {
        "context": generator.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (kind, torch.from_numpy(np.asarray(words).astype(np.int64)), position, has_gauss, gauss),
        "python": (version, list(internal), gauss_next),
    }


def restore_randomness(state: dict[str, Any], generator: torch.Generator) -> None:
    """Inverse of `public_randomness`."""
    generator.set_state(state["context"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, words, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep_as: str | None = None) -> None:
    """Write last.pt (and a copy that stays, if named), each atomically."""
    # Not `asdict`, which copies once more and spoils a Counter, such as a schedule's milestones.
    content = {**vars(checkpoint), "phases": {name: dict(vars(phase)) for name, phase in checkpoint.phases.items()}}
    for name in ["last", *([keep_as] if keep_as else [])]:
        with atomic(folder / f"{name}.pt") as temporary:
            torch.save(content, temporary)


def load_checkpoint(path: Path) -> Checkpoint | None:
    """A checkpoint, or None where there is no file. Loaded without unpickling code (weights_only).

    Raises:
        ValueError: if the file is damaged.
    """
    if not path.exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        phases = {name: PhaseState(**state) for name, state in content.pop("phases").items()}
        return Checkpoint(phases, **content)
    except Exception as error:
        raise ValueError(
            f"the checkpoint {path} cannot be read ({type(error).__name__}: {error}). If it is lost, delete the run's "
            "folder and start the run again; with privacy.noise=os that spends its epsilon a second time."
        ) from error

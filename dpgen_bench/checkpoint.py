"""A checkpoint: all that a killed run needs to go on as if nothing had happened."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpgen_bench.files import atomic


@dataclass
class Checkpoint:
    """State at the end of a step.

    phases: names of the loops entered so far; the last one is where the run stands. steps: steps done in each.
    stateful: state dicts of the last phase; earlier: those of the finished phases. randomness: public generators.
    executed: releases made, by mechanism. log_bytes: length of the log at that moment.
    """

    phases: list[str]
    steps: dict[str, int]
    stateful: dict[str, Any]
    randomness: dict[str, Any]
    executed: dict[str, int]
    seconds: dict[str, float]
    log_bytes: int
    earlier: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def after(
        cls,
        previous: Checkpoint | None,
        phase: str,
        step: int,
        states: dict[str, Any],
        generator: torch.Generator,
        seconds: dict[str, float],
        log_bytes: int,
        executed: dict[str, int],
    ) -> Checkpoint:
        """The checkpoint that follows `previous` after `step` steps of `phase`."""
        phases = list(previous.phases) if previous else []
        earlier = dict(previous.earlier) if previous else {}
        if phase not in phases:
            if previous:
                earlier[phases[-1]] = previous.stateful
            phases.append(phase)
        steps = {**(previous.steps if previous else {}), phase: step}
        return cls(phases, steps, states, _randomness(generator), executed, dict(seconds), log_bytes, earlier)

    def restore_randomness(self, generator: torch.Generator) -> None:
        """Set every public generator to where it stood."""
        state = self.randomness
        generator.set_state(state["context"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"])
        kind, words, position, has_gauss, gauss = state["numpy"]
        np.random.set_state((kind, words.numpy().astype(np.uint32), position, has_gauss, gauss))
        version, internal, gauss_next = state["python"]
        random.setstate((version, tuple(internal), gauss_next))


def _randomness(generator: torch.Generator) -> dict[str, Any]:
    kind, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return {
        "context": generator.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (kind, torch.from_numpy(np.asarray(words).astype(np.int64)), position, has_gauss, gauss),
        "python": (version, list(internal), gauss_next),
    }


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep_as: str | None = None) -> None:
    """Write last.pt (and a copy that stays, if named), each atomically."""
    content = {item.name: getattr(checkpoint, item.name) for item in fields(checkpoint)}
    for name in ["last", *([keep_as] if keep_as else [])]:
        with atomic(folder / f"{name}.pt") as temporary:
            torch.save(content, temporary)


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """The last checkpoint of a run, or None. Loaded without unpickling code (weights_only)."""
    path = folder / "last.pt"
    if not path.exists():
        return None
    return Checkpoint(**torch.load(path, map_location="cpu", weights_only=True))

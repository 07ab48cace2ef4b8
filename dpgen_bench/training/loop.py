"""The resumable loops of a run: counting steps, checkpoints, clocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from dpgen_bench.training.checkpoint import (
    Checkpoint,
    PhaseState,
    load_checkpoint,
    public_randomness,
    restore_randomness,
    save_checkpoint,
)
from dpgen_bench.training.cost import PeakMemory, trainable_parameters
from dpgen_bench.training.plain import plain
from dpgen_bench.training.progress import NoProgress, Progress
from dpgen_bench.training.public import PublicRecord
from dpgen_bench.training.signals import Preempted


class LoopState:
    """Whether the run is within one of its loops. Where nobody counts steps, it is."""

    inside = True


class Releases(Protocol):
    """The releases of a run as its loops see them; `dpgen_bench.privacy.services.Services` is one."""

    def refuse_if_invalidated(self) -> None:
        """Raise after a private function has raised."""
        ...

    def executed(self) -> dict[str, int]:
        """Releases made so far, by mechanism."""
        ...

    def resume_at(self, executed: dict[str, int]) -> None:
        """Set the numbers of the next releases."""
        ...

    def before_checkpoint(self) -> None: ...

    def after_checkpoint(self) -> None: ...


class NoReleases:
    """For a loop without private data."""

    def refuse_if_invalidated(self) -> None:
        return

    def executed(self) -> dict[str, int]:
        return {}

    def resume_at(self, executed: dict[str, int]) -> None:
        return

    def before_checkpoint(self) -> None:
        return

    def after_checkpoint(self) -> None:
        return


class Loop:
    """Counts the steps of a run's phases and makes checkpoints from which a killed run goes on.

    Args:
        generator: the run's public generator; its state is part of each checkpoint.
        releases: moved back to the releases of the checkpoint when a run is resumed.
        public: the log and counters, which are part of each checkpoint.
        state: told whether the run is within a loop.
        folder: the run's folder; None makes no checkpoints.
        due: whether a checkpoint is due, given the seconds since the last one.
        keep_steps: steps whose checkpoint is kept under its own name.
        should_stop: asked after every step; the number of a signal means checkpoint and raise `Preempted`.
        memory: measures the run's peak memory; None does not.

    Attributes:
        seconds: by phase, up to its last step. steps_done: by phase. parameters: the largest number of trainable
            parameters of each network that was passed to `steps`, by name.
    """

    def __init__(
        self,
        generator: torch.Generator,
        releases: Releases,
        public: PublicRecord,
        state: LoopState,
        *,
        folder: Path | None = None,
        due: Callable[[float], bool] = lambda seconds: seconds >= 60.0,
        keep_steps: tuple[int, ...] = (),
        progress: Progress | None = None,
        should_stop: Callable[[], int | None] = lambda: None,
        memory: PeakMemory | None = None,
    ) -> None:
        self._generator, self._releases, self._public, self._state = generator, releases, public, state
        self._folder, self._due, self._keep_steps = folder, due, frozenset(keep_steps)
        self._progress, self._should_stop, self._memory = progress or NoProgress(), should_stop, memory
        self.seconds: dict[str, float] = {}
        self.steps_done: dict[str, int] = {}
        self.parameters: dict[str, int] = {}
        self._state.inside = False
        self._saved = load_checkpoint(folder / "checkpoints" / "last.pt") if folder else None
        # What comes before the point of resumption was logged the first time.
        public.open(
            folder / "log.jsonl" if folder else None, self._saved.log_bytes if self._saved else 0, bool(self._saved)
        )
        self._seconds_outside = self._saved.seconds_outside if self._saved else 0.0
        self._outside_since = time.monotonic()

    @property
    def inside(self) -> bool:
        """Whether the run is within a loop."""
        return self._state.inside

    def seconds_outside(self) -> float:
        """Seconds of `fit` outside its loops, over all attempts."""
        return self._seconds_outside + time.monotonic() - self._outside_since

    def peak_memory(self) -> dict[str, Any] | None:
        earlier = self._saved.peak_memory if self._saved else None
        return earlier if self._memory is None else self._memory.read(earlier)

    def steps(self, total: int, phase: str, stateful: Mapping[str, Any]) -> Iterator[int]:
        """Count t = 0 .. total-1; see `dpgen_bench.method.Context.steps`."""
        if total < 1:
            raise ValueError(f"expected a loop of at least one step in phase {phase!r}, got {total}.")
        public = self._public
        public.phase = phase
        for name, thing in stateful.items():
            if issubclass(type(thing), nn.Module):  # isinstance would also run a property `__class__` of the thing
                self.parameters[name] = max(self.parameters.get(name, 0), trainable_parameters(thing))
        first = self._restore(phase, stateful)
        public.step = max(first - 1, 0)
        self._progress.start(phase, total, first)
        began, saved_at = time.monotonic(), time.monotonic()
        before = self.seconds.get(phase, 0.0)
        self._seconds_outside += began - self._outside_since
        self._outside_since = began
        self._state.inside = True
        for t in range(first, total):
            public.step = t
            yield t
            self._releases.refuse_if_invalidated()
            self._progress.step(t + 1)
            signal = self._should_stop()
            now = time.monotonic()
            due = self._due(now - saved_at)
            keep = t + 1 in self._keep_steps
            self._outside_since = now
            self.seconds[phase] = before + now - began
            self.steps_done[phase] = t + 1
            if due or signal is not None or keep or t + 1 == total:
                self._save(phase, t + 1, stateful, keep)
                saved_at = time.monotonic()
            if signal is not None and t + 1 < total:
                raise Preempted(128 + signal)
        self._state.inside = False
        self._progress.finish()

    def _restore(self, phase: str, stateful: Mapping[str, Any]) -> int:
        log = self._public.log
        if self._saved is None or phase not in self._saved.phases:
            log.muted = False
            return 0
        saved = self._saved.phases[phase]
        if saved.stateful.keys() != stateful.keys():
            raise ValueError(
                f"the checkpoint of phase {phase!r} holds {sorted(saved.stateful)}, the method now names "
                f"{sorted(stateful)}; a resumed run must name the same. Start a new run instead."
            )
        for name, thing in stateful.items():
            thing.load_state_dict(saved.stateful[name])
        restore_randomness(saved.randomness, self._generator)
        self._releases.resume_at(saved.executed)
        # What was counted before this loop, in this process, is part of the saved count.
        self._public.restore(saved.bytes_sent, saved.counters)
        self.seconds[phase] = self._saved.seconds[phase]
        self.steps_done[phase] = saved.steps
        if phase == self._saved.current:
            log.muted = False
        return saved.steps

    def _save(self, phase: str, step: int, stateful: Mapping[str, Any], keep: bool) -> None:
        if self._folder is None:
            return
        state = PhaseState(
            step,
            # A copy: state dicts point at live tensors, which later phases may change.
            plain({name: thing.state_dict() for name, thing in stateful.items()}),
            public_randomness(self._generator),
            self._releases.executed(),
            dict(self._public.bytes_sent),
            dict(self._public.counters),
        )
        phases = {**(self._saved.phases if self._saved else {}), phase: state}
        self._saved = Checkpoint(
            phases, dict(self.seconds), self._public.log.flush(), self._seconds_outside, self.peak_memory()
        )
        self._releases.before_checkpoint()
        save_checkpoint(self._folder / "checkpoints", self._saved, f"step-{step}" if keep else None)
        self._releases.after_checkpoint()

"""The resumable loops of a run: they count steps, write checkpoints, restore them, and measure time."""

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
    remove_unfinished,
    restore_randomness,
    save_checkpoint,
)
from dpgen_bench.training.cost import PeakMemory, trainable_parameters
from dpgen_bench.training.plain import plain
from dpgen_bench.training.progress import NoProgress, Progress
from dpgen_bench.training.public import PublicRecord
from dpgen_bench.training.signals import Preempted
from dpgen_bench.training.tracker import Tracker


class LoopState:
    """Whether the run is within one of its loops. Without a `Loop`, `inside` stays True.

    Attributes:
        parent: the checkpoint of a parent run from which the method has not started yet; None without one.
    """

    inside = True
    parent: Path | None = None

    def expect_started(self) -> None:
        """Raise ValueError for a method that has ignored its parent."""
        if self.parent is not None:
            raise ValueError(
                "expected a method that loads its parent run (ctx.warm_start) before its first release, got one that "
                "does not: it would pay for the parent and train from scratch; leave out restart."
            )


class Releases(Protocol):
    """What loops need of a run's releases; `dpgen_bench.privacy.services.Services` implements it."""

    def refuse_if_invalidated(self) -> None:
        """Raise `Invalidated` if a private function has raised an exception."""
        ...

    def executed(self) -> dict[str, int]:
        """The number of releases so far, by mechanism."""
        ...

    def resume_at(self, executed: dict[str, int]) -> None:
        """Set the numbers of the next releases, by mechanism."""
        ...

    def after_step(self, step: int, state: Callable[[], Any]) -> None:
        """Called after `step` steps of a phase; `state()` is what a checkpoint would hold of them."""
        ...

    def before_checkpoint(self) -> None:
        """Called before a checkpoint is written."""
        ...

    def after_checkpoint(self) -> None:
        """Called after a checkpoint was written."""
        ...


class NoReleases:
    """`Releases` of a run without private data."""

    def refuse_if_invalidated(self) -> None:
        return

    def executed(self) -> dict[str, int]:
        return {}

    def resume_at(self, executed: dict[str, int]) -> None:
        return

    def after_step(self, step: int, state: Callable[[], Any]) -> None:
        return

    def before_checkpoint(self) -> None:
        return

    def after_checkpoint(self) -> None:
        return


class Loop:
    """Counts the steps of a run's phases, and writes checkpoints from which an interrupted run continues.

    Args:
        generator: The run's public generator of random numbers; its state is part of each checkpoint.
        releases: The run's releases. On resumption their numbers are set to those of the checkpoint.
        public: The log and the counters, which are part of each checkpoint.
        state: Its attribute `inside` is set while the run is within a loop.
        folder: The run's folder; None writes no checkpoints.
        reads_only: The checkpoint in the folder is read, and nothing is written.
        due: Whether a checkpoint is due, given the seconds since the last one.
        keep_steps: Steps of the phase "train" whose checkpoint is also kept under its own name.
        progress: Shows the progress of a loop.
        should_stop: Called after every step. If it returns the number of a signal, a checkpoint is written and
            `Preempted` is raised.
        memory: Measures the run's peak memory; None does not measure it.
        tracker: Gets a copy of the rows of the log.

    Attributes:
        seconds: Seconds by phase, up to the last step that was counted.
        steps_done: Steps by phase.
        parameters: The largest number of trainable parameters of each network passed to `steps`, by name.
    """

    def __init__(
        self,
        generator: torch.Generator,
        releases: Releases,
        public: PublicRecord,
        state: LoopState,
        *,
        folder: Path | None = None,
        reads_only: bool = False,
        due: Callable[[float], bool] = lambda seconds: seconds >= 60.0,
        keep_steps: tuple[int, ...] = (),
        progress: Progress | None = None,
        should_stop: Callable[[], int | None] = lambda: None,
        memory: PeakMemory | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        self._generator, self._releases, self._public, self._state = generator, releases, public, state
        self._due, self._keep_steps = due, frozenset(keep_steps)
        self._progress, self._should_stop, self._memory = progress or NoProgress(), should_stop, memory
        self.seconds: dict[str, float] = {}
        self.steps_done: dict[str, int] = {}
        self.parameters: dict[str, int] = {}
        self._state.inside = False
        if folder:
            remove_unfinished(folder / "checkpoints")
        self._saved = load_checkpoint(folder / "checkpoints" / "last.pt") if folder else None
        # Until the run reaches its checkpoint, the log is muted: these rows were written before the interruption.
        length = self._saved.log_bytes if self._saved else 0
        self._folder = None if reads_only else folder
        public.open(self._folder and self._folder / "log.jsonl", length, bool(self._saved), tracker)
        self._seconds_outside = self._saved.seconds_outside if self._saved else 0.0
        self._outside_since = time.monotonic()
        self._earlier_cpu_seconds = self._saved.cpu_seconds if self._saved else 0.0
        self._cpu_since = time.process_time()

    @property
    def inside(self) -> bool:
        """Whether the run is within a loop."""
        return self._state.inside

    def seconds_outside(self) -> float:
        """Seconds of `fit` outside its loops, over all attempts."""
        return self._seconds_outside + time.monotonic() - self._outside_since

    def cpu_seconds(self) -> float | None:
        """Processor time of `fit`, over all attempts and threads; None if an earlier attempt did not measure it."""
        earlier = self._earlier_cpu_seconds
        return None if earlier is None else earlier + time.process_time() - self._cpu_since

    def peak_memory(self) -> dict[str, Any] | None:
        """Peak memory over all attempts as `PeakMemory.read` returns it, None if it is not measured."""
        earlier = self._saved.peak_memory if self._saved else None
        return earlier if self._memory is None else self._memory.read(earlier)

    def steps(self, total: int, phase: str, stateful: Mapping[str, Any]) -> Iterator[int]:
        """Count t = 0 .. total-1; see `dpgen_bench.method.Context.steps`.

        Raises:
            ValueError: If `total` is below 1, if the checkpoint of the phase has other states than `stateful`, or if a
                state cannot be stored in a checkpoint.
            Preempted: After a stop signal, when the checkpoint is written.
        """
        if total < 1:
            raise ValueError(f"expected a loop of at least one step in phase {phase!r}, got {total}.")
        public = self._public
        public.phase = phase
        for name, owner in stateful.items():
            if issubclass(
                type(owner), nn.Module
            ):  # isinstance would also run a property `__class__` of the plugin's class
                self.parameters[name] = max(self.parameters.get(name, 0), trainable_parameters(owner))
        first = self._restore(phase, stateful)
        public.step = max(first - 1, 0)
        self._progress.start(phase, total, first)
        # Time in the loop is not outside time: every step moves the start of the outside clock to its end.
        began, saved_at = time.monotonic(), time.monotonic()
        earlier_seconds = self.seconds.get(phase, 0.0)
        self._seconds_outside += began - self._outside_since
        self._outside_since = began
        self._state.inside = True
        for t in range(first, total):
            public.step = t
            yield t  # the method makes step t
            self._releases.refuse_if_invalidated()
            self._releases.after_step(t + 1, lambda: self._state_of(stateful))
            self._progress.step(t + 1)
            signal = self._should_stop()
            now = time.monotonic()
            due = self._due(now - saved_at)
            keep = phase == "train" and t + 1 in self._keep_steps  # not those of a pretraining, which count from 1, too
            self._outside_since = now
            self.seconds[phase] = earlier_seconds + now - began
            self.steps_done[phase] = t + 1
            if due or signal is not None or keep or t + 1 == total:
                self._save(phase, t + 1, stateful, keep)
                saved_at = time.monotonic()
            if signal is not None:
                raise Preempted(128 + signal)
        self._state.inside = False
        self._progress.finish()

    def _restore(self, phase: str, stateful: Mapping[str, Any]) -> int:
        """Load the checkpoint of a phase, if there is one, and return the number of its steps that are done."""
        log = self._public.log
        if self._saved is None or phase not in self._saved.phases:
            log.muted = False
            return 0
        saved = self._saved.phases[phase]
        if saved.stateful.keys() != stateful.keys():
            raise ValueError(
                f"expected the states {sorted(saved.stateful)} of the checkpoint of phase {phase!r}, got "
                f"{sorted(stateful)} from the method; a resumed run must use the same names. Start a new run instead."
            )
        for name, owner in stateful.items():
            owner.load_state_dict(saved.stateful[name])
        restore_randomness(saved.randomness, self._generator)
        self._releases.resume_at(saved.executed)
        # This replaces what this process counted before the loop, because the saved counts include it.
        self._public.restore(saved.bytes_sent, saved.counters)
        self.seconds[phase] = self._saved.seconds[phase]
        self.steps_done[phase] = saved.steps
        if phase == self._saved.current:
            log.muted = False
        return saved.steps

    def _state_of(self, stateful: Mapping[str, Any]) -> Any:
        """States by name, and the state of the public generator."""
        states = {name: owner.state_dict() for name, owner in stateful.items()}
        return {**states, "public generator": self._generator.get_state()}

    def _save(self, phase: str, step: int, stateful: Mapping[str, Any], keep: bool) -> None:
        """Write a checkpoint after `step` steps of a phase; if `keep`, also under a name of its own."""
        if self._folder is None:
            return
        state = PhaseState(
            steps=step,
            # A copy: state dicts share memory with the networks, which later phases may change.
            stateful=plain({name: owner.state_dict() for name, owner in stateful.items()}),
            randomness=public_randomness(self._generator),
            executed=self._releases.executed(),
            bytes_sent=dict(self._public.bytes_sent),
            counters=dict(self._public.counters),
        )
        self._saved = Checkpoint(
            phases={**(self._saved.phases if self._saved else {}), phase: state},
            seconds=dict(self.seconds),
            log_bytes=self._public.log.flush(),
            seconds_outside=self._seconds_outside,
            peak_memory=self.peak_memory(),
            cpu_seconds=self.cpu_seconds(),
        )
        self._releases.before_checkpoint()
        save_checkpoint(self._folder / "checkpoints", self._saved, f"step-{step}" if keep else None)
        self._releases.after_checkpoint()

"""What a plugin is (`Method`) and what it is given besides the data (`Context`)."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dpgen_bench.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import Generator
from dpgen_bench.log import Log
from dpgen_bench.progress import Progress, Silent


class Method(Protocol):
    """A plugin: one class in one file, named by `_target_` in conf/method/NAME.yaml.

    `fit` may read records only inside the functions it gives to `data.mechanism(...)`, and takes public randomness from
    `ctx.generator` or PyTorch's seeded global generator. It may also define
    `epsilon_claimed(events, delta) -> float | None`: the paper's own count, kept beside the proven one.
    """

    def fit(self, data: PrivateData, ctx: Context) -> Generator: ...


class Preempted(SystemExit):
    """The process was asked to stop (SIGTERM, SIGUSR1); a checkpoint is on disk."""


@dataclass(frozen=True)
class Scale:
    """How much of the paper's training is run. `max_steps` caps every loop; None is the full number."""

    name: str = "paper"
    max_steps: int | None = None


def seed_everything(seed: int) -> None:
    """Seed the public randomness of a run: network initialisation, latents, labels. Never coins or noise."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class Context:
    """Everything `fit` needs that is not data: seeds, device, resumable loops, the public log.

    Args:
        folder: the run's directory; None keeps everything in memory (tests, conformance).
        parent: a checkpoint of another run to start from, see `warm_start`.
        should_stop: asked after every step; the number of a signal means checkpoint and raise `Preempted`.
    """

    def __init__(
        self,
        seed: int = 0,
        device: torch.device | str = "cpu",
        *,
        scale: Scale | None = None,
        data: PrivateData | None = None,
        folder: Path | None = None,
        parent: Path | None = None,
        checkpoint_s: float = 60.0,
        keep_steps: tuple[int, ...] = (),
        progress: Progress | None = None,
        should_stop: Callable[[], int | None] = lambda: None,
        save_ledger: Callable[[], None] = lambda: None,
    ) -> None:
        seed_everything(seed)
        self.seed = seed
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)
        self.scale = scale or Scale()
        self.seconds: dict[str, float] = {}
        self.steps_done: dict[str, int] = {}
        self.in_loop = False
        self._data = data
        self._folder = folder
        self._parent = parent
        self._checkpoint_s = checkpoint_s
        self._keep_steps = frozenset(keep_steps)
        self._progress = progress or Silent()
        self._should_stop = should_stop
        self._save_ledger = save_ledger
        self._saved = load_checkpoint(folder / "checkpoints") if folder else None
        self._log = Log(folder / "log.jsonl" if folder else None)
        self._log.truncate(self._saved.log_bytes if self._saved else 0)
        self._phase, self._step = "start", 0

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was logged in this process, oldest first."""
        return self._log.rows

    def close(self) -> None:
        """Push the log to its file; called by the harness after `fit`."""
        self._log.flush()

    def limit(self, steps: int) -> int:
        """`steps`, or the scale's cap if that is lower (scale=quick)."""
        return steps if self.scale.max_steps is None else min(steps, self.scale.max_steps)

    def log(self, **scalars: float) -> None:
        """Write public scalars of the current step into log.jsonl: only functions of releases and public inputs."""
        self._log.write({"phase": self._phase, "step": self._step, **scalars})

    def warm_start(self, **stateful: Any) -> None:
        """Load the named states from the checkpoint that the config's `restart` names; without one, do nothing.

        Raises:
            ValueError: if the checkpoint lacks one of the names.
        """
        if self._parent is None:
            return
        saved = torch.load(self._parent, map_location="cpu", weights_only=True)["stateful"]
        if missing := stateful.keys() - saved.keys():
            raise ValueError(f"expected states {sorted(stateful)} in {self._parent}, missing {sorted(missing)}.")
        for name, thing in stateful.items():
            thing.load_state_dict(saved[name])

    def steps(self, total: int, *, phase: str = "train", **stateful: Any) -> Iterator[int]:
        """Count t = 0 .. total-1, resumable: the loop's whole state is `stateful` and the generators of randomness.

        Args:
            stateful: everything that changes in the loop and has state_dict/load_state_dict: networks, optimisers,
                schedules. What is not listed is not restored.
        """
        self._phase = phase
        first = self._restore(phase, stateful)
        self._progress.start(phase, total, first)
        began, saved_at = time.monotonic(), time.monotonic()
        before = self.seconds.get(phase, 0.0)
        self.in_loop = True
        for t in range(first, total):
            self._step = t
            yield t
            self._progress.step(t + 1)
            signal = self._should_stop()
            due = time.monotonic() - saved_at >= self._checkpoint_s
            keep = t + 1 in self._keep_steps
            self.seconds[phase] = before + time.monotonic() - began
            self.steps_done[phase] = t + 1
            if due or signal is not None or keep or t + 1 == total:
                self._save(phase, t + 1, stateful, keep)
                saved_at = time.monotonic()
            if signal is not None and t + 1 < total:
                raise Preempted(128 + signal)
        self.in_loop = False
        self._progress.finish()

    def _restore(self, phase: str, stateful: Mapping[str, Any]) -> int:
        saved = self._saved
        if saved is None or phase not in saved.phases:
            return 0
        current = saved.phases[-1] == phase
        states = saved.stateful if current else saved.earlier[phase]
        if states.keys() != stateful.keys():
            raise ValueError(
                f"the checkpoint of phase {phase!r} holds {sorted(states)}, the method now names {sorted(stateful)}; a "
                "resumed run must name the same. Start a new run instead."
            )
        for name, thing in stateful.items():
            thing.load_state_dict(states[name])
        if current:
            saved.restore_randomness(self.generator)
            self.seconds = dict(saved.seconds)
            if self._data is not None:
                for name, executed in saved.executed.items():
                    self._data.mechanisms[name].executed = executed
        self.steps_done[phase] = saved.steps[phase]
        return saved.steps[phase]

    def _save(self, phase: str, step: int, stateful: Mapping[str, Any], keep: bool) -> None:
        if self._folder is None:
            return
        mechanisms = self._data.mechanisms if self._data is not None else {}
        previous = self._saved
        # A copy: state dicts point at live tensors, which later phases may change.
        states = copy.deepcopy({name: thing.state_dict() for name, thing in stateful.items()})
        self._saved = Checkpoint.after(
            previous,
            phase,
            step,
            states,
            self.generator,
            self.seconds,
            self._log.flush(),
            {name: mechanism.executed for name, mechanism in mechanisms.items()},
        )
        self._save_ledger()
        save_checkpoint(self._folder / "checkpoints", self._saved, f"step-{step}" if keep else None)

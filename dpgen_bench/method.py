"""What a plugin is (`Method`) and what it is given besides the data (`Context`)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, overload

import numpy as np
import torch
from torch import Tensor, nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import Generator, NetGenerator
from dpgen_bench.nets.latents import draw_latents
from dpgen_bench.training.checkpoint import (
    Checkpoint,
    PhaseState,
    load_checkpoint,
    public_randomness,
    restore_randomness,
    save_checkpoint,
)
from dpgen_bench.training.cost import PeakMemory, trainable_parameters
from dpgen_bench.training.log import Log
from dpgen_bench.training.plain import plain
from dpgen_bench.training.progress import NoProgress, Progress
from dpgen_bench.training.signals import Preempted


class Method(Protocol):
    """A plugin: one class in one file, named by `_target_` in conf/method/NAME.yaml.

    `fit` may read records only inside the functions it gives to `data.mechanism(...)`, and takes public randomness from
    `ctx.generator` or PyTorch's seeded global generator. It may also define
    `epsilon_claimed(events, delta) -> float | None`: the paper's own count, kept beside the proven one; and
    `epsilon_conditional(events, delta) -> (float, assumption in words) | None`: what an unproven assumption would give.
    """

    def fit(self, data: PrivateData, ctx: Context) -> Generator: ...


@dataclass(frozen=True)
class Scale:
    """How much of the paper's training is run. `max_steps` caps every loop; None is the full number."""

    name: str = "paper"
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"expected scale.max_steps of at least 1, or null for no cap, got {self.max_steps}.")


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
        memory: what measures the run's peak memory; None does not measure it.
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
        memory: PeakMemory | None = None,
    ) -> None:
        seed_everything(seed)
        self.seed = seed
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)
        self.scale = scale or Scale()
        self._seconds: dict[str, float] = {}
        self.steps_done: dict[str, int] = {}
        self.bytes_sent: dict[str, int] = {}
        self.counters: dict[str, int] = {}
        self._data = data
        if data is not None:
            data.books = self
        self._enter_loop(False)
        self._folder = folder
        self._parent = parent
        self._checkpoint_s = checkpoint_s
        self._keep_steps = frozenset(keep_steps)
        self._progress = progress or NoProgress()
        self._should_stop = should_stop
        self._save_ledger = save_ledger
        self._memory = memory
        self._parameters: dict[str, int] = {}
        self._saved = load_checkpoint(folder / "checkpoints" / "last.pt") if folder else None
        self._log = Log(folder / "log.jsonl" if folder else None)
        self._log.truncate(self._saved.log_bytes if self._saved else 0)
        # What comes before the point of resumption was logged the first time.
        self._log.muted = self._saved is not None
        self._phase, self._step = "start", 0
        self._seconds_outside = self._saved.seconds_outside if self._saved else 0.0
        self._outside_since = time.monotonic()

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was logged in this process, oldest first; a copy, since what was logged stays as it was."""
        return [dict(row) for row in self._log.rows]

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase, up to its last step; a clock of the harness's own, which a method can read alone."""
        return MappingProxyType(self._seconds)

    def close(self) -> None:
        """Push the log to its file; called by the harness after `fit`."""
        self._log.flush()

    @overload
    def limit(self, steps: int) -> int: ...
    @overload
    def limit(self, steps: None) -> None: ...
    def limit(self, steps: int | None) -> int | None:
        """`steps`, or the scale's cap if that is lower (scale=quick); None, an open number of steps, stays None."""
        return steps if steps is None or self.scale.max_steps is None else min(steps, self.scale.max_steps)

    def latents(self, generator: NetGenerator, *shape: int) -> tuple[Tensor, Tensor]:
        """Public latents [*shape, latent_dim] of the generator's law, and uniform labels int64 [*shape], on the device.

        They are drawn from `ctx.generator` on the CPU, so that they are the same on every device.
        """
        z = draw_latents(generator.latent, (*shape, generator.latent_dim), self.generator, self.device)
        return z, torch.randint(generator.num_classes, shape, generator=self.generator).to(self.device)

    def log(self, **scalars: float | str) -> None:
        """Write public scalars of the current step into log.jsonl: only functions of releases and public inputs.

        Raises:
            Spoiled: after a private function has raised: what a method logs then may be of that error.
        """
        self._refuse_if_spoiled()
        self._log.write({"phase": self._phase, "step": self._step, **scalars})

    def count_bytes(self, *, server_to_client: int = 0, client_to_server: int = 0) -> None:
        """Add to the bytes that this method would send if its clients were machines of their own.

        Exact across a kill: what is counted in a step is part of its checkpoint. Like the log, the counts are public:
        only functions of releases and public inputs.

        Raises:
            ValueError: for anything but integers >= 0.
        """
        for direction, count in (("server_to_client", server_to_client), ("client_to_server", client_to_server)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"expected {direction} as an integer number of bytes >= 0, got {count!r}.")
            self.bytes_sent[direction] = self.bytes_sent.get(direction, 0) + count

    def count(self, **counters: int) -> None:
        """Add to named counters, such as generator_updates=1: public, and exact across a kill, like `count_bytes`.

        Raises:
            ValueError: for anything but integers >= 0.
        """
        for name, count in counters.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"expected {name} as an integer >= 0, got {count!r}.")
            self.counters[name] = self.counters.get(name, 0) + count

    def cost(self, generator: Generator) -> dict[str, Any]:
        """What the run cost so far: the content of training.json; `cost.cost_values` makes columns of it.

        Args:
            generator: what `fit` returned.

        Returns:
            seconds and steps by phase; seconds_outside_loops, the rest of `fit` (the time of every attempt counts, up
            to its last checkpoint); device; parameters, the trainable numbers of each network handed to `steps` (the
            largest count, where several had one name) and of the released generator; peak_memory_mib as
            `PeakMemory.read` gives it, None if it was not measured; bytes by direction and counters, {} without any.
        """
        return {
            "seconds": dict(self._seconds),
            "seconds_outside_loops": self._seconds_outside + time.monotonic() - self._outside_since,
            "steps": dict(self.steps_done),
            "device": str(self.device),
            "parameters": {**self._parameters, "released_generator": generator.num_parameters},
            "peak_memory_mib": self._peak_memory(),
            "bytes": dict(self.bytes_sent),
            "counters": dict(self.counters),
        }

    def _peak_memory(self) -> dict[str, Any] | None:
        earlier = self._saved.peak_memory if self._saved else None
        return earlier if self._memory is None else self._memory.read(earlier)

    def warm_start(self, **stateful: Any) -> None:
        """Load the named states from the checkpoint that the config's `restart` names; without one, do nothing.

        An optimiser takes its parent's moments, and keeps its own settings (learning rate and so on).

        Raises:
            ValueError: if the checkpoint lacks one of the names.
        """
        if self._parent is None:
            return
        checkpoint = load_checkpoint(self._parent)
        if checkpoint is None:
            raise ValueError(f"expected a checkpoint at {self._parent}, found none.")
        saved = checkpoint.phases[checkpoint.current].stateful
        if missing := stateful.keys() - saved.keys():
            raise ValueError(f"expected states {sorted(stateful)} in {self._parent}, missing {sorted(missing)}.")
        for name, thing in stateful.items():
            own: list[dict[str, Any]] = []
            if issubclass(type(thing), torch.optim.Optimizer):
                own = [{key: value for key, value in group.items() if key != "params"} for group in thing.param_groups]
            thing.load_state_dict(saved[name])
            for group, settings in zip(thing.param_groups, own, strict=True) if own else ():
                group.update(settings)

    def steps(self, total: int, *, phase: str = "train", **stateful: Any) -> Iterator[int]:
        """Count t = 0 .. total-1, resumable: the loop's whole state is `stateful` and the generators of randomness.

        Args:
            stateful: everything that changes in the loop and has state_dict/load_state_dict: networks, optimisers,
                schedules. What is not listed is not restored.

        Raises:
            ValueError: at a checkpoint, if a state dict holds what no checkpoint can: see `training.plain`.
        """
        if total < 1:
            raise ValueError(f"expected a loop of at least one step in phase {phase!r}, got {total}.")
        self._phase = phase
        for name, thing in stateful.items():
            if issubclass(type(thing), nn.Module):  # isinstance would also run a property `__class__` of the thing
                self._parameters[name] = max(self._parameters.get(name, 0), trainable_parameters(thing))
        first = self._restore(phase, stateful)
        self._step = max(first - 1, 0)
        self._progress.start(phase, total, first)
        began, saved_at = time.monotonic(), time.monotonic()
        before = self._seconds.get(phase, 0.0)
        self._seconds_outside += began - self._outside_since
        self._outside_since = began
        self._enter_loop(True)
        for t in range(first, total):
            self._step = t
            yield t
            self._refuse_if_spoiled()
            self._progress.step(t + 1)
            signal = self._should_stop()
            due = time.monotonic() - saved_at >= self._checkpoint_s
            keep = t + 1 in self._keep_steps
            self._outside_since = time.monotonic()
            self._seconds[phase] = before + self._outside_since - began
            self.steps_done[phase] = t + 1
            if due or signal is not None or keep or t + 1 == total:
                self._save(phase, t + 1, stateful, keep)
                saved_at = time.monotonic()
            if signal is not None and t + 1 < total:
                raise Preempted(128 + signal)
        self._enter_loop(False)
        self._progress.finish()

    def _refuse_if_spoiled(self) -> None:
        if self._data is not None:
            self._data._ledger.refuse_if_spoiled()

    def _enter_loop(self, inside: bool) -> None:
        self.in_loop = inside
        if self._data is not None:
            self._data.in_loop = inside

    def _restore(self, phase: str, stateful: Mapping[str, Any]) -> int:
        if self._saved is None or phase not in self._saved.phases:
            self._log.muted = False
            return 0
        saved = self._saved.phases[phase]
        if saved.stateful.keys() != stateful.keys():
            raise ValueError(
                f"the checkpoint of phase {phase!r} holds {sorted(saved.stateful)}, the method now names "
                f"{sorted(stateful)}; a resumed run must name the same. Start a new run instead."
            )
        for name, thing in stateful.items():
            thing.load_state_dict(saved.stateful[name])
        restore_randomness(saved.randomness, self.generator)
        if self._data is not None:
            for name, executed in saved.executed.items():
                self._data._controls[name].resume_at(executed)
        # What was counted before this loop, in this process, is part of the saved count.
        self.bytes_sent, self.counters = dict(saved.bytes_sent), dict(saved.counters)
        self._seconds[phase] = self._saved.seconds[phase]
        self.steps_done[phase] = saved.steps
        if phase == self._saved.current:
            self._log.muted = False
        return saved.steps

    def _save(self, phase: str, step: int, stateful: Mapping[str, Any], keep: bool) -> None:
        if self._folder is None:
            return
        mechanisms = self._data.mechanisms if self._data is not None else {}
        state = PhaseState(
            step,
            # A copy: state dicts point at live tensors, which later phases may change.
            plain({name: thing.state_dict() for name, thing in stateful.items()}),
            public_randomness(self.generator),
            {name: mechanism.executed for name, mechanism in mechanisms.items()},
            dict(self.bytes_sent),
            dict(self.counters),
        )
        phases = {**(self._saved.phases if self._saved else {}), phase: state}
        self._saved = Checkpoint(
            phases, dict(self._seconds), self._log.flush(), self._seconds_outside, self._peak_memory()
        )
        self._save_ledger()
        controls = self._data._controls if self._data is not None else {}
        for control in controls.values():
            control.before_checkpoint()
        save_checkpoint(self._folder / "checkpoints", self._saved, f"step-{step}" if keep else None)
        for control in controls.values():
            control.after_checkpoint()

"""What a plugin is (`Method`) and what it is given besides the data (`Context`)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import Generator, NetGenerator
from dpgen_bench.nets.latents import draw_latents
from dpgen_bench.privacy.services import Services
from dpgen_bench.training.checkpoint import load_checkpoint
from dpgen_bench.training.loop import Loop, LoopState, NoReleases, Releases
from dpgen_bench.training.public import PublicRecord


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
    """Seed the public randomness of a run: network initialisation, latents, labels. Never draws or noise."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class Context:
    """Everything `fit` needs that is not data: seeds, device, resumable loops, the public log.

    Args:
        services: those of the run's `PrivateData`, so that its releases go along with the loops; None without data.
        folder: the run's directory; None keeps everything in memory (tests, conformance).
        parent: a checkpoint of another run to start from, see `warm_start`.
        loops: further arguments of `dpgen_bench.training.loop.Loop`: `due`, `keep_steps`, `progress`, `should_stop`,
            `memory`.
    """

    def __init__(
        self,
        seed: int = 0,
        device: torch.device | str = "cpu",
        *,
        scale: Scale | None = None,
        services: Services | None = None,
        folder: Path | None = None,
        parent: Path | None = None,
        **loops: Any,
    ) -> None:
        seed_everything(seed)
        self.seed = seed
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)
        self.scale = scale or Scale()
        self._parent = parent
        self._releases: Releases = services or NoReleases()
        self._public = services.public if services else PublicRecord()
        state = services.loop if services else LoopState()
        self._loop = Loop(self.generator, self._releases, self._public, state, folder=folder, **loops)

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was logged in this process, oldest first; a copy, since what was logged stays as it was."""
        return [dict(row) for row in self._public.log.rows]

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase, up to its last step; a clock of the harness's own, which a method can read alone."""
        return MappingProxyType(dict(self._loop.seconds))

    @property
    def steps_done(self) -> Mapping[str, int]:
        """Steps by phase."""
        return MappingProxyType(dict(self._loop.steps_done))

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes by direction."""
        return dict(self._public.bytes_sent)

    @property
    def counters(self) -> dict[str, int]:
        """Counters by name."""
        return dict(self._public.counters)

    @property
    def in_loop(self) -> bool:
        """Whether the run is within `steps`."""
        return self._loop.inside

    def close(self) -> None:
        """Push the log to its file; called by the harness after `fit`."""
        self._public.log.flush()

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
            Invalidated: after a private function has raised: what a method logs then may be of that error.
        """
        self._releases.refuse_if_invalidated()
        self._public.write(**scalars)

    def count_bytes(self, *, server_to_client: int = 0, client_to_server: int = 0) -> None:
        """Add to the bytes that this method would send if its clients were machines of their own.

        Exact across a kill: what is counted in a step is part of its checkpoint. Like the log, the counts are public:
        only functions of releases and public inputs.

        Raises:
            ValueError: for anything but integers >= 0.
        """
        self._public.count_bytes(server_to_client=server_to_client, client_to_server=client_to_server)

    def count(self, **counters: int) -> None:
        """Add to named counters, such as generator_updates=1: public, and exact across a kill, like `count_bytes`.

        Raises:
            ValueError: for anything but integers >= 0.
        """
        self._public.count(**counters)

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
            "seconds": dict(self._loop.seconds),
            "seconds_outside_loops": self._loop.seconds_outside(),
            "steps": dict(self._loop.steps_done),
            "device": str(self.device),
            "parameters": {**self._loop.parameters, "released_generator": generator.num_parameters},
            "peak_memory_mib": self._loop.peak_memory(),
            "bytes": self.bytes_sent,
            "counters": self.counters,
        }

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
        return self._loop.steps(total, phase, stateful)

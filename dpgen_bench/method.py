"""The interface of a method (`Method`), and what the harness passes to it together with the data (`Context`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import Generator, ImageFormat, NetGenerator
from dpgen_bench.nets.latents import draw_latents
from dpgen_bench.privacy.services import Services
from dpgen_bench.training.checkpoint import load_checkpoint
from dpgen_bench.training.loop import Loop, LoopState, NoReleases, Releases
from dpgen_bench.training.precision import expect_possible, public_computation, steps_in
from dpgen_bench.training.public import PublicRecord
from dpgen_bench.training.signals import Preempted
from dpgen_bench.utils.execution import Precision
from dpgen_bench.utils.randomness import seed_everything
from dpgen_bench.utils.upload import upload
from dpgen_bench.utils.validation import check_types


class Method(Protocol):
    """A method (plugin): one class in one file, named by `_target_` in conf/method/NAME.yaml.

    A method that uses data besides the records (pretrained networks, images, fonts) declares them by an attribute
    `public_data`, such as `public_data = "fonts"`. The ledger states it, and tables show it in a column.

    It may also define `epsilon_claimed(events, delta) -> float | None`, the paper's own count, which is reported next
    to the proven epsilon, and `epsilon_conditional(events, delta) -> (float, text of the assumption) | None`, the
    epsilon under an assumption that is not proven.

    By a ValueError, `expect_data(class_names, image_shape)` refuses settings that do not fit the data set. It is called
    before a run exists, with what is public of the data set.
    """

    def fit(self, data: PrivateData, ctx: Context) -> Generator:
        """Train a generator.

        Records may be read only inside the functions passed to the mechanisms of `data`. Public randomness comes from
        `ctx.generator` or from PyTorch's global generator, which is seeded.
        """


@dataclass(frozen=True)
class Scale:
    """How much of the paper's training is run.

    Args:
        name: Name of the scale.
        max_steps: Largest number of steps of each loop; None means no limit.

    Raises:
        ValueError: If `name` is no text, or `max_steps` no integer, or below 1.
    """

    name: str = "paper"
    max_steps: int | None = None

    def __post_init__(self) -> None:
        check_types(Scale, vars(self), "scale")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"expected scale.max_steps of at least 1, or null for no cap, got {self.max_steps}.")


class Context:
    """What `fit` needs besides the data: public randomness, the device, resumable loops and the public log.

    Args:
        seed: Seed of all public randomness.
        device: Where networks are trained.
        scale: Limits of the numbers of steps; the default has none.
        services: Those of the run's `PrivateData`, so that checkpoints include its releases; None without data.
        folder: The run's folder; None writes no files (tests, conformance suite).
        parent: A checkpoint of another run to start from, see `warm_start`.
        precision: Of the networks that are passed to `steps`, outside of private functions; see `training.precision`.
        loops: Further arguments of `dpgen_bench.training.loop.Loop`: `due`, `keep_steps`, `progress`, `should_stop`,
            `memory`, `tracker`.

    Attributes:
        generator: The run's generator of public random numbers, on the CPU.
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
        precision: Precision = "fp32",
        **loops: Any,
    ) -> None:
        seed_everything(seed)
        self.seed = seed
        self.device = torch.device(device)
        self.precision = expect_possible(precision, self.device)
        self.generator = torch.Generator().manual_seed(seed)
        self.scale = scale or Scale()
        self._parent = parent
        self._before_training: Callable[[dict[str, Any]], None] | None = None
        self._releases: Releases = services or NoReleases()
        self._public = services.public if services else PublicRecord()
        self._state = services.loop if services else LoopState()
        self._state.parent = parent
        self._loop = Loop(self.generator, self._releases, self._public, self._state, folder=folder, **loops)

    @property
    def history(self) -> list[dict[str, Any]]:
        """A copy of the rows that this process has logged, oldest first."""
        return [dict(row) for row in self._public.log.rows]

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase, up to the last step of the phase; read-only."""
        return MappingProxyType(dict(self._loop.seconds))

    @property
    def steps_done(self) -> Mapping[str, int]:
        """Steps by phase; read-only."""
        return MappingProxyType(dict(self._loop.steps_done))

    @property
    def bytes_sent(self) -> dict[str, int]:
        """A copy of the numbers of bytes by direction."""
        return dict(self._public.bytes_sent)

    @property
    def counters(self) -> dict[str, int]:
        """A copy of the counters by name."""
        return dict(self._public.counters)

    @property
    def in_loop(self) -> bool:
        """Whether the run is within a loop of `steps`."""
        return self._loop.inside

    def close(self) -> None:
        """Write buffered rows of the log to its file. The harness calls it after `fit`."""
        self._public.log.flush()

    @overload
    def limit(self, steps: int) -> int: ...
    @overload
    def limit(self, steps: None) -> None: ...
    def limit(self, steps: int | None) -> int | None:
        """The smaller of `steps` and the scale's `max_steps`; None, an open number of steps, stays None."""
        return steps if steps is None or self.scale.max_steps is None else min(steps, self.scale.max_steps)

    def latents(self, generator: NetGenerator, *shape: int) -> tuple[Tensor, Tensor]:
        """Public latents [*shape, latent_dim] and uniform labels int64 [*shape], on the context's device.

        Both are drawn from `ctx.generator` on the CPU, so that they are the same on every device.
        """
        z = draw_latents(generator.latent, (*shape, generator.latent_dim), self.generator, self.device)
        return z, upload(torch.randint(generator.num_classes, shape, generator=self.generator), self.device)

    def log(self, **scalars: float | str) -> None:
        """Write scalars of the current step into log.jsonl, which is public.

        They must be functions of releases and public inputs alone.

        Raises:
            Invalidated: If a private function has raised an exception, because the scalars may depend on it.
        """
        self._releases.refuse_if_invalidated()
        self._public.write(**scalars)

    def count_bytes(self, *, server_to_client: int = 0, client_to_server: int = 0) -> None:
        """Add to the numbers of bytes that the method would send if clients and server were separate machines.

        The counts are part of checkpoints, so an interruption does not change them. They are public, and must be
        functions of releases and public inputs alone.

        Raises:
            ValueError: For anything but integers >= 0.
        """
        self._public.count_bytes(server_to_client=server_to_client, client_to_server=client_to_server)

    def count(self, **counters: int) -> None:
        """Add to named counters, such as generator_updates=1. Like those of `count_bytes`, they are public.

        Raises:
            ValueError: For anything but integers >= 0.
        """
        self._public.count(**counters)

    def cost(self, generator: Generator) -> dict[str, Any]:
        """The cost of the run so far; see also `training.cost.cost_values`.

        Args:
            generator: What `fit` returned.

        Returns:
            The content of training.json, by these keys:

            - seconds and steps by phase, and seconds_outside_loops, the rest of `fit`. cpu_seconds: Processor time of
                `fit` in this process, or None. An interrupted attempt counts up to its last checkpoint.
            - parameters: The number of trainable parameters of each network passed to `steps` (the largest number, if
                several networks had the same name), and of the released generator.
            - device, and peak_memory_mib: The result of `PeakMemory.read`, or None if it was not measured.
            - bytes by direction, and counters; {} if nothing was counted.
        """
        return {
            "seconds": dict(self._loop.seconds),
            "seconds_outside_loops": self._loop.seconds_outside(),
            "cpu_seconds": self._loop.cpu_seconds(),
            "steps": dict(self._loop.steps_done),
            "device": str(self.device),
            "parameters": {**self._loop.parameters, "released_generator": generator.num_parameters},
            "peak_memory_mib": self._loop.peak_memory(),
            "bytes": self.bytes_sent,
            "counters": self.counters,
        }

    def warm_start(self, **stateful: Any) -> None:
        """Load states from the checkpoint of the parent run (`restart` in the config); without one, do nothing.

        An optimiser loads the moments of the parent run, but keeps its own settings, such as the learning rate.

        Args:
            stateful: Objects with load_state_dict, by their names in the checkpoint.

        Raises:
            ValueError: If the checkpoint does not exist, or has no state of one of the names.
        """
        if self._parent is None:
            return
        self._state.parent = None
        checkpoint = load_checkpoint(self._parent)
        if checkpoint is None:
            raise ValueError(f"expected a checkpoint at {self._parent}, found none.")
        saved = checkpoint.phases[checkpoint.current].stateful
        if missing := stateful.keys() - saved.keys():
            raise ValueError(f"expected states {sorted(stateful)} in {self._parent}, missing {sorted(missing)}.")
        for name, owner in stateful.items():
            if not issubclass(type(owner), torch.optim.Optimizer):
                owner.load_state_dict(saved[name])
                continue
            own = [{key: value for key, value in group.items() if key != "params"} for group in owner.param_groups]
            owner.load_state_dict(saved[name])
            for group, settings in zip(owner.param_groups, own, strict=True):
                group.update(settings)

    def before_training(self, start: Callable[[dict[str, Any]], None]) -> None:
        """Call start(stateful) once, when the first loop with a network begins; it may change the networks."""
        self._before_training = start

    def steps(self, total: int, *, phase: str = "train", **stateful: Any) -> Iterator[int]:
        """Count t = 0 .. total-1 in a loop that can be resumed from a checkpoint.

        Args:
            total: The number of steps.
            phase: Name of the loop, unique within `fit`.
            stateful: All objects that change in the loop, with state_dict and load_state_dict: networks, optimisers,
                schedules. Only these and the generators of public randomness are restored on resumption.

        Raises:
            ValueError: If `total` is below 1, the checkpoint has other names of states, or a state cannot be stored in
                a checkpoint (see `training.plain`).
        """
        networks = [each for each in stateful.values() if issubclass(type(each), nn.Module)]
        if networks and (start := self._before_training):
            self._before_training = None
            start(stateful)
        return steps_in(self.precision, self.device, networks, self._loop.steps(total, phase, stateful))


def train_generator(
    ctx: Context,
    generator: NetGenerator,
    loss: Callable[[int, Tensor, Tensor], Tensor],
    *,
    steps: int,
    batch_size: int,
    lr: float,
    lr_decay: float,
    decay_steps: int,
    balanced: bool = False,
) -> None:
    """Train `generator.net` by Adam on a loss of its images, for methods that make all releases before training.

    Args:
        loss: loss(t, images [b, c, h, w], labels [b]) of step t. It is logged, so it must be a function of releases and
            public inputs alone.
        steps: The number of steps, which the scale may limit.
        batch_size: b, the number of generated images in a step.
        lr: Learning rate of Adam, which is multiplied by `lr_decay` after every `decay_steps` steps.
        balanced: The labels are each class in turn. By default they are uniform, drawn independently of each other.
    """
    net = generator.net
    adam = torch.optim.Adam(net.parameters(), lr=lr)
    decay = torch.optim.lr_scheduler.StepLR(adam, decay_steps, lr_decay)
    for t in ctx.steps(ctx.limit(steps), net=net, adam=adam, decay=decay):
        z, labels = ctx.latents(generator, batch_size)
        if balanced:
            labels = torch.arange(batch_size, device=labels.device) % generator.num_classes
        value = loss(t, net(z, labels), labels)
        adam.zero_grad()
        value.backward()
        adam.step()
        decay.step()
        if t % 50 == 0:
            ctx.log(loss=float(value.detach()))


def fit_method(method: Method, data: PrivateData, ctx: Context) -> Generator:
    """What `method.fit(data, ctx)` returns, which is checked to be a generator of images like the data's.

    Raises:
        TypeError: If `fit` is missing, cannot be called with (data, ctx), or returns anything else.
        ValueError: If the generator makes images of another shape or number of classes, or `fit` ignored a parent run.
        RuntimeError: If `fit` ends the process (`sys.exit`), which would end a run or check without any result.
        Preempted: As `Context.steps`.
        BaseException: The error of the method.
    """
    fit, name = getattr(method, "fit", None), type(method).__name__
    if not callable(fit):
        raise TypeError(
            f"expected {name} to have a method `fit(self, data, ctx)`, got "
            f"{'none' if fit is None else type(fit).__name__}; define it, such that it returns a generator."
        )
    try:
        signature = inspect.signature(fit)
    except (TypeError, ValueError):  # a callable without a signature
        signature = None
    try:
        if signature is not None:
            signature.bind(data, ctx)
    except TypeError:
        raise TypeError(
            f"expected {name}.fit to take the arguments (data, ctx), got fit{signature}; write "
            "`def fit(self, data, ctx):`."
        ) from None
    try:
        with public_computation(ctx.precision, ctx.device):
            generator = fit(data, ctx)
            ctx._state.expect_started()
    except Preempted:
        raise
    except SystemExit as end:
        raise RuntimeError(
            f"expected fit to return a generator such as NetGenerator, got SystemExit({end.code!r}); raise an error "
            "that says what is wrong instead of ending the process."
        ) from end
    if not isinstance(generator, Generator):
        got = "None" if generator is None else f"an object of the type {type(generator).__name__}"
        raise TypeError(
            f"expected fit to return a generator such as NetGenerator, got {got}; end {name}.fit with a statement "
            "`return generator`."
        )
    expect_images_of(generator, data)
    return generator


def expect_images_of(generator: Generator, images: ImageFormat) -> None:
    """Check that a generator makes labelled images of the format of the data, by what it declares and by a few samples.

    Raises:
        ValueError: If it does not.
    """
    classes = getattr(generator, "num_classes", None)
    if classes != images.num_classes:
        raise ValueError(
            f"expected the generator that fit returns to have num_classes={images.num_classes}, as the dataset has, "
            f"got {classes}; pass data.num_classes to it."
        )
    expected, advice = tuple(images.image_shape), "build it for data.image_shape."
    declared = getattr(generator, "image_shape", expected)
    if not isinstance(declared, list | tuple) or tuple(declared) != expected:
        raise ValueError(
            f"expected the generator that fit returns to have image_shape={expected}, as the dataset has, got "
            f"{declared}; {advice}"
        )
    with torch.random.fork_rng(devices=[]):  # in case that sampling uses the global generator, against its contract
        labels = generator.draw_labels(4, seed=0)
        labels = torch.arange(4) % images.num_classes if labels is None else labels
        try:
            samples = generator.sample(labels, seed=0)
        except ValueError:  # pixels that are not finite: the evaluation says so, and the diverged generator is kept
            return
    made = (
        tuple(samples.shape[1:]) if isinstance(samples, Tensor) else f"an object of the type {type(samples).__name__}"
    )
    if made != expected:
        raise ValueError(
            f"expected the generator that fit returns to make images of the shape {expected}, as the dataset has, got "
            f"{made}; {advice}"
        )

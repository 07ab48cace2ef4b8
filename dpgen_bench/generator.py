"""`Generator`: what a run may release. It samples labelled images and is saved as safetensors + a JSON config."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np
import torch
from hydra.utils import get_class, instantiate
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import vector_to_parameters

from dpgen_bench.nets.latents import Law
from dpgen_bench.privacy.key import Key
from dpgen_bench.utils.files import atomic, write_atomic

# Images are always made in blocks of this many rows, padded at the end: a row then goes through the same kernels
# whatever the size of the request, so that image i depends on (seed, i, label i) alone, bit by bit.
BLOCK = 250

WEIGHTS, CONFIG = "generator.safetensors", "generator.json"

Config = dict[str, Any]  # `_target_` and arguments of a network


class Generator(ABC):
    """A trained sampler of labelled images. Holds nothing of the training data but what mechanisms released.

    Guarantees: `sample` is deterministic in (labels, seed) on one machine, and image i depends on the seed, on i and on
    labels[i] alone.
    """

    num_classes: int
    image_shape: tuple[int, int, int]

    @abstractmethod
    def sample(self, labels: Tensor, seed: int) -> Tensor:
        """uint8 images [n, c, h, w] for int64 labels [n]."""

    def sample_unrounded(self, labels: Tensor, seed: int) -> Tensor:
        """The images of `sample` before they were rounded to whole pixels: float32 [n, c, h, w] within 0..255.

        Raises:
            ValueError: if the generator knows its images in whole pixels only.
        """
        raise ValueError(
            f"{type(self).__name__} gives whole pixels only: override sample_unrounded(labels, seed), such that "
            "`sample` is its rounding, or measure by a protocol that rounds."
        )

    def sample_by_batch(self, labels: Tensor, seed: int, batch_size: int) -> Tensor:
        """Images whose batch normalisation takes its statistics from them: float32 [n, c, h, w] within 0..255.

        They are made in consecutive batches of `batch_size` >= 2 (`batch_sizes`), from the latents of `sample`, so that
        the two differ by the statistics alone. Image i depends on all latents and labels of its batch.

        Raises:
            ValueError: if the generator has no batch normalisation, or for a batch that has no statistics.
        """
        raise ValueError(
            f"expected a generator with batch normalisation, got {type(self).__name__}, which does not normalise by "
            "batches: measure by a protocol with batch_statistics null, or override sample_by_batch(labels, seed, "
            "batch_size)."
        )

    def draw_labels(self, n: int, seed: int) -> Tensor | None:
        """The labels for which `sample(labels, seed)` is to be called by whoever wants `n` images.

        None, the default, leaves the choice to the asker. A generator whose labels have a law of their own (a data set,
        a coreset) returns int64 labels [m], m <= n; m < n where it has no more to give.
        """
        return None

    @property
    def num_parameters(self) -> int:
        """How many trained numbers the generator holds; here all floating-point entries of `state()`."""
        return sum(value.numel() for value in self.state().values() if value.is_floating_point())

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """JSON-able arguments that rebuild the generator without its weights."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Weights by name."""

    @classmethod
    @abstractmethod
    def rebuild(cls, config: Mapping[str, Any], state: dict[str, Tensor]) -> Generator:
        """Inverse of (`config`, `state`)."""

    def save(self, folder: Path) -> None:
        """Write generator.safetensors and generator.json into `folder`, weights last."""
        kind = f"{type(self).__module__}.{type(self).__qualname__}"
        write_atomic(folder / CONFIG, json.dumps({"kind": kind, **self.config()}, indent=2))
        with atomic(folder / WEIGHTS) as temporary:
            save_file({k: v.detach().contiguous().cpu() for k, v in self.state().items()}, temporary)

    @staticmethod
    def load(folder: Path) -> Generator:
        """Read a generator back from a run's folder.

        Raises:
            FileNotFoundError: if the folder holds no finished generator.
        """
        if not (folder / WEIGHTS).exists():
            raise FileNotFoundError(
                f"expected a trained generator at {folder / WEIGHTS}, found none; has the run finished training? "
                "`dpgen runs` tells."
            )
        config = json.loads((folder / CONFIG).read_text())
        kind: type[Generator] = get_class(config.pop("kind"))
        return kind.rebuild(config, load_file(folder / WEIGHTS))


class NetGenerator(Generator):
    """A conditional network fed with latents: net(z [b, latent_dim], y int64 [b]) -> [b, c, h, w].

    Args:
        net_config: `_target_` and arguments that build `net` again.
        latent: law of z: standard normal, uniform on [0, 1], or Bernoulli(1/2).
        value_range: what the net's output spans; mapped to 0..255 and rounded.
    """

    def __init__(
        self,
        net: nn.Module,
        net_config: Mapping[str, Any],
        latent_dim: int,
        num_classes: int,
        image_shape: tuple[int, int, int],
        latent: Law = "normal",
        value_range: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        if latent not in get_args(Law):
            raise ValueError(f"expected latent normal, uniform or bernoulli, got {latent!r}.")
        self.net = net
        self.net_config = dict(net_config)
        self.latent_dim = latent_dim
        self.num_classes = num_classes
        self.image_shape = tuple(image_shape)  # type: ignore[assignment]
        self.latent: Law = latent
        self.value_range = tuple(value_range)

    @classmethod
    def build(
        cls,
        net: type[nn.Module],
        images: ImageFormat,
        device: torch.device,
        *,
        latent_dim: int,
        latent: Law = "normal",
        **sizes: Any,
    ) -> NetGenerator:
        """A fresh network, together with the config that builds it again. Train `net`, and the generator follows.

        Args:
            net: its class, at the top of a module, with arguments image_shape, num_classes, latent_dim and `sizes`. Its
                attribute `value_range` says what its output spans, (0.0, 1.0) if it has none.
            images: the data, of which the shape of an image and the number of classes are taken.
            sizes: further arguments of the class; None leaves one out, so that the class's default holds.
        """
        config = config_of(net, images, latent_dim=latent_dim, **sizes)
        built = make_net(config, device)
        value_range = getattr(net, "value_range", (0.0, 1.0))
        return cls(built, config, latent_dim, images.num_classes, images.image_shape, latent, value_range)

    def releasing(self, net: nn.Module) -> NetGenerator:
        """The same with another network of the same class, such as a moving average of the trained one."""
        return NetGenerator(net, **self.config())

    def _latents(self, seed: int, block: int) -> Tensor:
        rng = Key.seeded(f"sample:{seed}").derive(block).generator("latents")
        shape = (BLOCK, self.latent_dim)
        if self.latent == "normal":
            return torch.from_numpy(rng.standard_normal(shape, dtype="float32"))
        uniform = torch.from_numpy(rng.random(shape, dtype="float32"))
        return uniform if self.latent == "uniform" else (uniform < 0.5).float()

    def sample(self, labels: Tensor, seed: int) -> Tensor:
        return self._sample(labels, seed, self._blocks, lambda pixels: pixels.round().to(torch.uint8))

    def sample_unrounded(self, labels: Tensor, seed: int) -> Tensor:
        return self._sample(labels, seed, self._blocks, lambda pixels: pixels)

    def sample_by_batch(self, labels: Tensor, seed: int, batch_size: int) -> Tensor:
        def batches(labels: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
            sizes = batch_sizes(len(labels), batch_size)
            z, y = (torch.cat(parts)[: len(labels)] for parts in zip(*self._blocks(labels, seed), strict=True))
            return zip(z.split(sizes), y.split(sizes), strict=True)

        with batch_statistics(self.net):
            return self._sample(labels, seed, batches, lambda pixels: pixels)

    def _blocks(self, labels: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Latents and labels in blocks of BLOCK rows, the last padded with label 0."""
        for block, start in enumerate(range(0, len(labels), BLOCK)):
            y = labels[start : start + BLOCK].cpu()
            yield self._latents(seed, block), torch.cat([y, y.new_zeros(BLOCK - len(y))])

    @property
    def num_parameters(self) -> int:
        """Numbers in the net's parameters; its buffers, such as running means, do not count."""
        return sum(parameter.numel() for parameter in self.net.parameters())

    @torch.no_grad()
    def _sample(
        self,
        labels: Tensor,
        seed: int,
        batches: Callable[[Tensor, int], Iterator[tuple[Tensor, Tensor]]],
        finish: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Images after `finish`, which gets the float32 pixels within 0..255 of one batch.

        Args:
            batches: from (labels, seed) to the (z, y) of each pass, in order; rows past len(labels) are padding.

        Raises:
            ValueError: for labels of another type or range, or if the net draws pixels that are no finite numbers.
        """
        if labels.ndim != 1 or labels.dtype != torch.int64:
            raise ValueError(f"expected labels int64 [n], got {labels.dtype} {tuple(labels.shape)}.")
        if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= self.num_classes):
            raise ValueError(
                f"expected labels in 0..{self.num_classes - 1}, got {int(labels.min())}..{int(labels.max())}."
            )
        device = next(self.net.parameters()).device
        low, high = self.value_range
        images, made, broken = [], 0, 0
        with in_eval_mode(self.net):
            for z, y in batches(labels, seed) if len(labels) else ():
                x = self.net(z.to(device), y.to(device))[: len(labels) - made]
                made += len(x)
                broken += int((~torch.isfinite(x).flatten(1).all(dim=1)).sum())
                images.append(finish(((x - low) / (high - low)).clamp(0.0, 1.0).mul(255.0).float()).cpu())
        if broken:
            raise ValueError(
                f"expected finite pixels, got NaN or infinite ones in {broken} of {len(labels)} images (seed {seed}): "
                "the training probably diverged. Look at log.jsonl for the step, and train with a lower learning rate "
                "or another seed."
            )
        return torch.cat(images) if images else finish(torch.empty(0, *self.image_shape))

    def config(self) -> dict[str, Any]:
        return {
            "net_config": self.net_config,
            "latent_dim": self.latent_dim,
            "num_classes": self.num_classes,
            "image_shape": list(self.image_shape),
            "latent": self.latent,
            "value_range": list(self.value_range),
        }

    def state(self) -> dict[str, Tensor]:
        return self.net.state_dict()

    @classmethod
    def rebuild(cls, config: Mapping[str, Any], state: dict[str, Tensor]) -> NetGenerator:
        net = instantiate(config["net_config"])
        net.load_state_dict(state)
        return cls(net, **config)


class ImageFormat(Protocol):
    """What a network must know of a data set: `PrivateData` and `ClientData` have it."""

    num_classes: int
    image_shape: tuple[int, int, int]


def config_of(net: type[nn.Module], images: ImageFormat, **sizes: Any) -> Config:
    """`_target_` and arguments of a network for these images; sizes that are None are left to the class's defaults."""
    given = {name: size for name, size in sizes.items() if size is not None}
    shape = {"image_shape": list(images.image_shape), "num_classes": images.num_classes}
    return {"_target_": f"{net.__module__}.{net.__qualname__}", **shape, **given}


def make_net(config: Config, device: torch.device) -> nn.Module:
    """A fresh network of a config, on the device."""
    net: nn.Module = instantiate(config)
    return net.to(device)


def net_with_parameters(config: Config, values: Tensor) -> nn.Module:
    """The network of a config with these parameters, one vector, on its device; PyTorch's generators are untouched."""
    with torch.random.fork_rng(devices=[]):
        net = make_net(config, values.device)
    vector_to_parameters(values.clone(), net.parameters())  # parameters become views of the vector
    return net


def public_rng(seed: int, purpose: str, *path: int) -> np.random.Generator:
    """Public randomness for a generator that shuffles or chooses: a function of the arguments alone."""
    key = Key.seeded(f"records:{seed}")
    return (key.derive(*path) if path else key).generator(purpose)


def batch_sizes(n: int, batch_size: int) -> list[int]:
    """Sizes of consecutive batches of n rows: `batch_size` each, then what is left; a single row left joins the last.

    Raises:
        ValueError: if a batch would be of one row, which has no variance.
    """
    if not isinstance(batch_size, int) or batch_size < 2:
        raise ValueError(
            f"expected batches of two images or more, an integer, got {batch_size!r}: one has no variance."
        )
    if n == 1:
        raise ValueError("expected two images or more to take batch statistics of, got 1; ask for more samples.")
    sizes = [batch_size] * (n // batch_size) + [n % batch_size] * (n % batch_size > 0)
    return [*sizes[:-2], batch_size + 1] if sizes[-1:] == [1] else sizes


@contextmanager
def in_eval_mode(net: nn.Module) -> Iterator[None]:
    """Within it `net` is in eval mode; afterwards every module of it is in the mode in which it was."""
    training = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        net.train(training[net])  # before the others: it may be overridden, and it sets them all alike
        for module, mode in training.items():
            module.training = mode


@contextmanager
def batch_statistics(net: nn.Module) -> Iterator[None]:
    """Within it `net` in eval mode normalises each batch by the batch's own mean and (biased) variance.

    PyTorch's batch normalisation does so in eval mode where it finds no running statistics. They are put aside, and
    back afterwards: no pass moves them, as it would in training mode, and all other layers stay in eval mode.

    Raises:
        ValueError: if the net has no torch batch-norm layer.
    """
    layers = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    if not layers:
        raise ValueError(
            f"expected a net with batch normalisation, got {type(net).__name__} without a torch BatchNorm layer, for "
            "which batch statistics would change nothing: measure by a protocol with batch_statistics null."
        )
    running = [(layer.running_mean, layer.running_var) for layer in layers]
    try:
        for layer in layers:
            layer.running_mean = layer.running_var = None
        yield
    finally:
        for layer, (mean, variance) in zip(layers, running, strict=True):
            layer.running_mean, layer.running_var = mean, variance

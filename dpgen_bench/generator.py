"""`Generator`, the released result of a run: it samples labelled images, and is saved as safetensors and JSON."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from dpgen_bench.nets.latents import LatentDistribution
from dpgen_bench.nets.modes import batch_statistics, in_eval_mode
from dpgen_bench.privacy.key import Key
from dpgen_bench.utils.building import instantiate
from dpgen_bench.utils.classes import find_target, targets_in
from dpgen_bench.utils.errors import describe_error
from dpgen_bench.utils.files import atomic, write_atomic

# Images are always generated in blocks of this size, and the last block is padded. The computation of a row is then the
# same for every number of images, so that image i depends bit by bit on (seed, i, label i) alone.
BLOCK = 250

WEIGHTS, CONFIG = "generator.safetensors", "generator.json"
EXPORTED_WEIGHTS, EXPORTED_CONFIG = "model.safetensors", "config.json"  # the names that model hubs expect

Config = dict[str, Any]  # `_target_` and arguments of a network


class Generator(ABC):
    """A trained sampler of labelled images, which depends on the training data only through released values.

    Guarantees: On one machine, `sample` is a deterministic function of (labels, seed), and image i depends on the seed,
    on i and on labels[i] alone.
    """

    num_classes: int
    image_shape: tuple[int, int, int]
    set_size: int | None = None  # the number of images, for a generator that draws from a finite set of them

    @abstractmethod
    def sample(self, labels: Tensor, seed: int) -> Tensor:
        """uint8 images [n, c, h, w] for int64 labels [n]."""

    def sample_unrounded(self, labels: Tensor, seed: int) -> Tensor:
        """The images of `sample` before they are rounded to integers: float32 [n, c, h, w] within 0..255.

        Raises:
            ValueError: If the generator only has rounded pixels.
        """
        raise ValueError(
            f"expected a generator of unrounded pixels, got {type(self).__name__}, which only has rounded ones: "
            "override sample_unrounded(labels, seed) such that `sample` is its rounding, or use a protocol that rounds."
        )

    def sample_by_batch(self, labels: Tensor, seed: int, batch_size: int) -> Tensor:
        """Images with batch normalisation by the statistics of their batch: float32 [n, c, h, w] within 0..255.

        The batches are consecutive and have `batch_size` >= 2 rows (see `batch_sizes`). The latents are those of
        `sample`, so the two methods differ by the statistics alone. Image i depends on all latents and labels of its
        batch.

        Raises:
            ValueError: If the generator has no batch normalisation, or for a batch of one image.
        """
        raise ValueError(
            f"expected a generator with batch normalisation, got {type(self).__name__}, which does not normalise by "
            "batches: use a protocol with batch_statistics null, or override sample_by_batch(labels, seed, batch_size)."
        )

    def draw_labels(self, n: int, seed: int) -> Tensor | None:
        """The labels with which to call `sample(labels, seed)` for `n` images.

        None, the default, leaves the choice to the caller. A generator that has its own distribution of labels (a
        dataset, a coreset) returns int64 labels [m] with m <= n; m < n if it has only m images.
        """
        return None

    @property
    def num_parameters(self) -> int:
        """The number of trained parameters; by default, of all floating-point entries of `state()`."""
        return sum(value.numel() for value in self.state().values() if value.is_floating_point())

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Arguments that rebuild the generator without its weights; they can be stored as JSON."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Weights by name."""

    @classmethod
    @abstractmethod
    def rebuild(cls, config: Mapping[str, Any], state: dict[str, Tensor]) -> Generator:
        """The generator whose `config` and `state` returned these values."""

    def save(self, folder: Path) -> None:
        """Write generator.json, and then generator.safetensors, into `folder`."""
        kind = f"{type(self).__module__}.{type(self).__qualname__}"
        write_atomic(folder / CONFIG, json.dumps({"kind": kind, **self.config()}, indent=2))
        with atomic(folder / WEIGHTS) as temporary:
            save_file({k: v.detach().contiguous().cpu() for k, v in self.state().items()}, temporary)

    @staticmethod
    def load(folder: Path) -> Generator:
        """The generator that was saved in a run's folder, or exported to a folder.

        Raises:
            FileNotFoundError: If the folder has no trained generator.
            ValueError: If files are damaged, or the config of an exported generator names other than networks.
        """
        exported = not (folder / WEIGHTS).exists() and (folder / EXPORTED_WEIGHTS).exists()
        names = (EXPORTED_CONFIG, EXPORTED_WEIGHTS) if exported else (CONFIG, WEIGHTS)
        if not (folder / names[1]).exists():
            raise FileNotFoundError(
                f"expected a trained generator at {folder / WEIGHTS}, found none; `dpgen runs` shows its status."
            )
        try:
            content = json.loads((folder / names[0]).read_text())
            config = _expect_networks(content["generator"]) if exported else content
            kind = find_target(config.pop("kind"), "kind")
            return kind.rebuild(config, load_file(folder / names[1]))  # type: ignore[attr-defined]
        except (SafetensorError, RuntimeError, ValueError, OSError, LookupError, TypeError, AttributeError) as error:
            again = f"restore both{'' if exported else f', or delete {folder} and execute the run again'}"
            raise ValueError(
                f"expected a generator in {folder / names[0]} and {names[1]}, got files that cannot be used "
                f"({describe_error(error)}); {again}."
            ) from error


def _expect_networks(config: dict[str, Any]) -> dict[str, Any]:
    """The config of an exported generator, which may come from somebody else: it can only build networks."""
    named = {config["kind"]: Generator, **{target: nn.Module for target in targets_in(config)}}
    for name, base in named.items():
        found = find_target(name, "_target_")
        if not (isinstance(found, type) and issubclass(found, base)):
            raise ValueError(
                f"expected subclasses of {base.__name__}, got {name}; do not load it, unless you know who changed it"
            )
    return config


class NetGenerator(Generator):
    """A generator that is a conditional network of latents: net(z [b, latent_dim], y int64 [b]) -> [b, c, h, w].

    Args:
        net: The network.
        net_config: `_target_` and arguments that build `net` again.
        latent_dim: Dimension of z.
        num_classes: The labels are 0..num_classes-1.
        image_shape: (c, h, w).
        latent: Distribution of z: "normal" (standard), "uniform" on [0, 1], or "bernoulli" with probability 1/2.
        value_range: The interval of the network's outputs, which is mapped to 0..255 and rounded.

    Attributes:
        clipped: The share of the pixels of the last samples that were clipped to `value_range` by more than a tenth of
            its length.

    Raises:
        ValueError: For an unknown distribution of latents.
    """

    clipped = 0.0

    def __init__(
        self,
        net: nn.Module,
        net_config: Mapping[str, Any],
        latent_dim: int,
        num_classes: int,
        image_shape: tuple[int, int, int],
        latent: LatentDistribution = "normal",
        value_range: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        if latent not in get_args(LatentDistribution):
            raise ValueError(f"expected latent normal, uniform or bernoulli, got {latent!r}.")
        self.net, self.set_size = net, getattr(net, "set_size", None)
        self.net_config = dict(net_config)
        self.latent_dim = latent_dim
        self.num_classes = num_classes
        self.image_shape = tuple(image_shape)  # type: ignore[assignment]
        self.latent: LatentDistribution = latent
        self.value_range = tuple(value_range)

    @classmethod
    def build(
        cls,
        net: type[nn.Module],
        images: ImageFormat,
        device: torch.device,
        *,
        latent_dim: int,
        latent: LatentDistribution = "normal",
        **sizes: Any,
    ) -> NetGenerator:
        """A generator with a new network, whose attribute `net` is to be trained.

        Args:
            net: The network's class, at the top of a module, with the arguments image_shape, num_classes, latent_dim
                and `sizes`. Its attribute `value_range` is the interval of its outputs, (0.0, 1.0) if it has none.
            images: The data, which gives image_shape and num_classes.
            device: Where the network is.
            latent_dim: Dimension of the latents.
            latent: Distribution of the latents.
            sizes: Further arguments of the class; for those that are None, the default of the class is used.
        """
        config = config_of(net, images, latent_dim=latent_dim, **sizes)
        value_range = getattr(net, "value_range", (0.0, 1.0))
        return cls(
            make_net(config, device), config, latent_dim, images.num_classes, images.image_shape, latent, value_range
        )

    def releasing(self, net: nn.Module) -> NetGenerator:
        """This generator with another network of the same class, such as a moving average of the trained one."""
        return NetGenerator(net, **self.config())

    def _latents(self, seed: int, block: int) -> Tensor:
        """The latents [BLOCK, latent_dim] of one block of images, on the CPU."""
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
        """Latents and labels in blocks of BLOCK rows; the last block is padded with label 0."""
        for block, start in enumerate(range(0, len(labels), BLOCK)):
            y = labels[start : start + BLOCK].cpu()
            yield self._latents(seed, block), torch.cat([y, y.new_zeros(BLOCK - len(y))])

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the network, without its buffers, such as running means."""
        return sum(parameter.numel() for parameter in self.net.parameters())

    @torch.no_grad()
    def _sample(
        self,
        labels: Tensor,
        seed: int,
        batches: Callable[[Tensor, int], Iterator[tuple[Tensor, Tensor]]],
        finish: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Images for the labels.

        Args:
            batches: Maps (labels, seed) to the (z, y) of each forward pass, in order; rows after len(labels) are
                padding.
            finish: Maps the float32 pixels within 0..255 of one batch to the images to return.

        Raises:
            ValueError: For labels of another type or range, or if the network's pixels are NaN or infinite.
        """
        if labels.ndim != 1 or labels.dtype != torch.int64:
            raise ValueError(f"expected labels int64 [n], got {labels.dtype} {tuple(labels.shape)}.")
        if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= self.num_classes):
            raise ValueError(
                f"expected labels in 0..{self.num_classes - 1}, got {int(labels.min())}..{int(labels.max())}."
            )
        device = next(self.net.parameters()).device
        low, high = self.value_range
        images, done, nonfinite, clipped = [], 0, 0, 0.0
        with in_eval_mode(self.net):
            for z, y in batches(labels, seed) if len(labels) else ():
                x = self.net(z.to(device), y.to(device))[: len(labels) - done]  # without the padding
                done += len(x)
                nonfinite += int((~torch.isfinite(x).flatten(1).all(dim=1)).sum())
                scaled = (x - low) / (high - low)
                clipped += float(((scaled - 0.5).abs() > 0.6).float().mean()) * len(x) / len(labels)
                images.append(finish(scaled.clamp(0.0, 1.0).mul(255.0).float()).cpu())
        self.clipped = clipped
        if nonfinite:
            raise ValueError(
                f"expected finite pixels, got NaN or infinite ones in {nonfinite} of {len(labels)} images (seed "
                f"{seed}): the training probably diverged. Look for the step in log.jsonl, and train with a lower "
                "learning rate or another seed."
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
    """The format of a dataset's images and labels; `PrivateData` and `ClientData` have it."""

    num_classes: int
    image_shape: tuple[int, int, int]


def config_of(net: type[nn.Module], images: ImageFormat, **sizes: Any) -> Config:
    """`_target_` and arguments of a network for these images; for sizes that are None, the class's defaults hold."""
    arguments = {name: size for name, size in sizes.items() if size is not None}
    shape = {"image_shape": list(images.image_shape), "num_classes": images.num_classes}
    return {"_target_": f"{net.__module__}.{net.__qualname__}", **shape, **arguments}


def make_net(config: Config, device: torch.device) -> nn.Module:
    """A new network of a config on the device, initialised from PyTorch's global generator."""
    net: nn.Module = instantiate(config)
    return net.to(device)


def net_with_parameters(config: Config, values: Tensor) -> nn.Module:
    """The network of a config, with the parameters of one vector and on its device. It uses no global randomness."""
    with torch.random.fork_rng(devices=[]):
        net = make_net(config, values.device)
    vector_to_parameters(values.clone(), net.parameters())  # parameters become views of the vector
    return net


def public_rng(seed: int, purpose: str, *path: int) -> np.random.Generator:
    """A generator of public random numbers, which depend on the arguments alone."""
    key = Key.seeded(f"records:{seed}")
    return (key.derive(*path) if path else key).generator(purpose)


def batch_sizes(n: int, batch_size: int) -> list[int]:
    """Sizes of consecutive batches of n rows: `batch_size` each, and the rest. A rest of one row joins the last batch.

    Raises:
        ValueError: If a batch would have one row, which has no variance.
    """
    if not isinstance(batch_size, int) or batch_size < 2:
        raise ValueError(
            f"expected an integer batch size of at least 2, got {batch_size!r}; set 2 or more: one has no variance."
        )
    if n == 1:
        raise ValueError("expected at least 2 images for batch statistics, got 1; sample more images.")
    sizes = [batch_size] * (n // batch_size) + [n % batch_size] * (n % batch_size > 0)
    return [*sizes[:-2], batch_size + 1] if sizes[-1:] == [1] else sizes

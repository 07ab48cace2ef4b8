"""A generator that is a finite set of images, and the network whose gradients such sets are matched to.

The network is the ConvNet of Zhao, Mopuri & Bilen (*Dataset Condensation with Gradient Matching*, ICLR 2021), which
Chen, Kerkouche & Fritz (*Private Set Generation with Discriminative Information*, NeurIPS 2022) use.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.nets.wgan import DCGANGenerator
from dpgen_bench.utils.upload import upload


class FiniteSet(nn.Module):
    """G(z, y): one of the images of class y, chosen by z, which is uniform on [0, 1]: sampling with replacement.

    Subclasses take image_shape (c, h, w), num_classes, latent_dim (1), and images_per_class, the size of each class.

    Attributes:
        images: [num_classes, images_per_class, c, h, w], in [-1, 1] up to optimisation.
    """

    value_range: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    images: Tensor

    @property
    def set_size(self) -> int:
        """The number of images of the set."""
        return self.images.shape[0] * self.images.shape[1]

    def optimised(self) -> Tensor:
        """The images [num_classes * images_per_class, c, h, w] as functions of the parameters, class after class."""
        return self.images.flatten(0, 1)

    def update(self) -> None:
        """Make `images` those of the parameters, after a change of these."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        number = self.images.shape[1]
        return self.images[y, (z[:, 0] * number).long().clamp(max=number - 1)]


class ImageSet(FiniteSet):
    """A set whose parameters are the images themselves, which are initially standard normal."""

    def __init__(self, image_shape: Sequence[int], num_classes: int, latent_dim: int, images_per_class: int) -> None:
        super().__init__()
        self.images = nn.Parameter(torch.randn(num_classes, images_per_class, *image_shape))


class PriorSet(FiniteSet):
    """A set whose images are those of a DCGAN at fixed latents; its parameters are those of the DCGAN.

    The generator is the one of GS-WGAN's authors without its sigmoid, and latents are standard normal in 10 dimensions.
    """

    latents: Tensor
    labels: Tensor

    def __init__(self, image_shape: Sequence[int], num_classes: int, latent_dim: int, images_per_class: int) -> None:
        super().__init__()
        self.generator = DCGANGenerator(image_shape, num_classes, latent_dim=10)
        self.register_buffer("latents", torch.randn(num_classes * images_per_class, 10))
        self.register_buffer("labels", torch.arange(num_classes).repeat_interleave(images_per_class))
        self.register_buffer("images", torch.empty(num_classes, images_per_class, *image_shape))
        self.update()

    def optimised(self) -> Tensor:
        return self.generator.linear_images(self.latents, self.labels)

    @torch.no_grad()
    def update(self) -> None:
        self.images.copy_(self.optimised().reshape(self.images.shape))


class MatchNet(nn.Module):
    """Three blocks of convolution 3x3, instance normalisation with scale and shift, ReLU, means of 2x2; a linear layer.

    Images of 28x28 are padded to 32x32. With width 128: 317,706 parameters at 1x28x28 with 10 classes. The scale and
    shift of a channel are a convolution of this channel alone, which clipped gradients cover.
    """

    def __init__(self, image_shape: Sequence[int], num_classes: int, width: int = 128) -> None:
        super().__init__()
        channels, *sides = image_shape
        if sides[0] != sides[1] or sides[0] not in (28, 32):
            raise ValueError(
                f"expected images of 28x28 or 32x32 pixels, got {sides[0]}x{sides[1]}: set the dataset's image_size."
            )
        self.pad = (32 - sides[0]) // 2
        wide = [channels, width, width, width]
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(wide))
        self.affine = nn.ModuleList(nn.Conv2d(width, width, 1, groups=width) for _ in range(3))
        self.linear = nn.Linear(width * 16, num_classes)
        self.reset()

    def reset(self) -> None:
        """Draw new weights from PyTorch's global generator of the CPU, so that they are the same on each device."""
        for layer in (*self.convolutions, self.linear):
            drawn = deepcopy(layer).to_empty(device="cpu")
            drawn.reset_parameters()
            with torch.no_grad():
                for own, new in zip(layer.parameters(), drawn.parameters(), strict=True):
                    own.copy_(upload(new.detach(), own.device))
        for scale in self.affine:
            nn.init.ones_(scale.weight)  # type: ignore[arg-type]
            nn.init.zeros_(scale.bias)  # type: ignore[arg-type]

    def matched(self) -> dict[str, Tensor]:
        """The weights whose gradients are matched, by name: those of convolutions and of the linear layer."""
        return {
            name: weight
            for name, weight in self.named_parameters()
            if name.endswith("weight") and not name.startswith("affine")
        }

    def forward(self, x: Tensor) -> Tensor:
        """Logits [b, num_classes] of images [b, c, h, w] in [-1, 1]."""
        h = F.pad(x, (self.pad,) * 4, value=-1.0) if self.pad else x
        for convolution, affine in zip(self.convolutions, self.affine, strict=True):
            h = convolution(h)
            h = affine(F.group_norm(h, h.shape[1]))
            h = F.avg_pool2d(F.relu(h), 2)
        return self.linear(h.flatten(1))


def cosine_distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> Tensor:
    """The sum over weights and their output channels of 1 - cos of two gradients, by name."""
    pairs = [(gradient.flatten(1), other[name].flatten(1)) for name, gradient in one.items()]
    return torch.stack([(1.0 - F.cosine_similarity(a, b, dim=1, eps=1e-6)).sum() for a, b in pairs]).sum()

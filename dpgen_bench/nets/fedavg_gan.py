"""Fed-Avg GAN's networks (Augenstein et al., "Generative Models for Effective ML on Private, Decentralized Datasets",
ICLR 2020; the authors' code in google-research/federated, folder gans), and their optimisers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    """Batch normalisation with a trained shift and no scale, of features [b, width] or [b, width, h, w].

    Args:
        width: Number of features.
        running: Whether evaluation mode uses running statistics, or else those of the batch.
    """

    def __init__(self, width: int, *, running: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width, affine=False, track_running_stats=running)
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, h: Tensor) -> Tensor:
        """Normalised features of the shape of h."""
        shape = h.shape
        h = h[:, :, None, None] if h.dim() == 2 else h
        return (self.norm(h) + self.shift[:, None, None]).reshape(shape)


def _quarter_side(image_shape: Sequence[int]) -> int:
    """A quarter of the images' height and width.

    Raises:
        ValueError: For images that are not square, or whose side is not a multiple of 4.
    """
    _, h, w = image_shape
    if h != w or h % 4:
        raise ValueError(
            f"the Fed-Avg GAN networks are made for square images whose side is a multiple of 4, got {h}x{w}: choose "
            "another dataset, or set the dataset's image_size."
        )
    return h // 4


class GeneratorNet(nn.Module):
    """Fully connected layers to 1024 and 256@7x7, two transposed convolutions to 32@28x28, a convolution, tanh.

    Batch normalisation and ReLU are between layers. With width 1 and latent_dim 128 it has 13,285,217 parameters at
    1x28x28 without labels, as published.

    Args:
        image_shape: (c, h, w) with h = w, a multiple of 4.
        num_classes: The labels are 0..num_classes-1.
        latent_dim: Dimension of z.
        width: Factor of all layer sizes.
        conditional: Whether the one-hot label is concatenated to z, or labels are ignored.

    Raises:
        ValueError: For images of another size.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        latent_dim: int = 128,
        width: float = 1.0,
        conditional: bool = True,
    ) -> None:
        super().__init__()
        self.side, self.num_classes, self.conditional = _quarter_side(image_shape), num_classes, conditional
        hidden, deep, middle, shallow = (max(1, round(size * width)) for size in (1024, 256, 64, 32))
        self.fc1 = nn.Linear(latent_dim + (num_classes if conditional else 0), hidden, bias=False)
        self.norm1 = Norm(hidden, running=True)
        self.fc2 = nn.Linear(hidden, self.side**2 * deep, bias=False)
        self.norm2 = Norm(self.side**2 * deep, running=True)
        self.up1 = nn.ConvTranspose2d(deep, middle, 4, stride=2, padding=1, bias=False)
        self.norm3 = Norm(middle, running=True)
        self.up2 = nn.ConvTranspose2d(middle, shallow, 4, stride=2, padding=1, bias=False)
        self.norm4 = Norm(shallow, running=True)
        self.image = nn.Conv2d(shallow, image_shape[0], 4)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Images in [0, 1] [b, c, h, w] of latents z [b, latent_dim] and labels y int64 [b]."""
        if self.conditional:
            z = torch.cat([z, F.one_hot(y, self.num_classes).to(z.dtype)], dim=1)
        h = F.relu(self.norm1(self.fc1(z)))
        h = F.relu(self.norm2(self.fc2(h))).reshape(len(z), -1, self.side, self.side)
        h = F.relu(self.norm3(self.up1(h)))
        h = F.relu(self.norm4(self.up2(h)))
        return (torch.tanh(self.image(F.pad(h, (1, 2, 1, 2)))) + 1.0) / 2.0  # the padding keeps the size with kernel 4


class DiscriminatorNet(nn.Module):
    """Two convolutions to 64@14x14 and 128@7x7, fully connected layers to 1024 and 1; leaky ReLU of slope 0.01.

    With width 1 it has 6,556,865 parameters at 1x28x28 without labels, as published.

    Args:
        image_shape: (c, h, w) with h = w, a multiple of 4.
        num_classes: The labels are 0..num_classes-1.
        width: Factor of all layer sizes.
        conditional: Whether one-hot planes of the label are concatenated to the image, or labels are ignored.
        norm: Normalisation of the layer of 1024: "batch", by the statistics of each pass (published), or "layer".

    Raises:
        ValueError: For images of another size.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        width: float = 1.0,
        conditional: bool = True,
        norm: Literal["batch", "layer"] = "batch",
    ) -> None:
        super().__init__()
        side, self.num_classes, self.conditional = _quarter_side(image_shape), num_classes, conditional
        shallow, middle, hidden = (max(1, round(size * width)) for size in (64, 128, 1024))
        planes = num_classes if conditional else 0
        self.conv1 = nn.Conv2d(image_shape[0] + planes, shallow, 4, stride=2, padding=1)
        self.conv2 = nn.Conv2d(shallow, middle, 4, stride=2, padding=1)
        self.fc1 = nn.Linear(side**2 * middle, hidden, bias=False)
        self.norm = Norm(hidden, running=False) if norm == "batch" else nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores [b] of images x [b, c, h, w] with labels y int64 [b]."""
        if self.conditional:
            planes = F.one_hot(y, self.num_classes).to(x.dtype)[:, :, None, None].expand(-1, -1, *x.shape[2:])
            x = torch.cat([x, planes], dim=1)
        h = F.leaky_relu(self.conv1(x), 0.01)
        h = F.leaky_relu(self.conv2(h), 0.01).flatten(1)
        return self.fc2(F.leaky_relu(self.norm(self.fc1(h)), 0.01)).squeeze(1)


def make_optimizer(
    name: Literal["sgd", "adam"], net: nn.Module, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """SGD without momentum, or Adam with the betas (0.5, 0.9) of Gulrajani et al."""
    if name == "sgd":
        return torch.optim.SGD(net.parameters(), lr, weight_decay=weight_decay)
    return torch.optim.Adam(net.parameters(), lr, (0.5, 0.9), weight_decay=weight_decay)

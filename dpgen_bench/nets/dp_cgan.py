"""DP-CGAN's networks (Torkzadehmahani, Kairouz & Paten, 2019): two linear layers each, as in the authors' code."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _layers(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Two linear layers with weights of N(0, 2 / inputs) and biases of 0, as the authors initialise them."""
    layers = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
    for layer in (layers[0], layers[2]):
        assert isinstance(layer, nn.Linear)
        nn.init.normal_(layer.weight, std=math.sqrt(2.0 / layer.in_features))
        nn.init.zeros_(layer.bias)
    return layers


class MLPGenerator(nn.Module):
    """G(z, y) with a sigmoid at its end. z is uniform on [0, 1], and the first layer sees 2z - 1.

    It has 115,344 parameters at 1x28x28 with 10 classes, latent_dim 100 and hidden 128.
    """

    def __init__(self, latent_dim: int, num_classes: int, image_shape: tuple[int, int, int], hidden: int = 128) -> None:
        super().__init__()
        self.num_classes, self.image_shape = num_classes, tuple(image_shape)
        self.layers = _layers(latent_dim + num_classes, hidden, math.prod(image_shape))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Images in [0, 1] [b, c, h, w] of latents z [b, latent_dim] and labels y int64 [b]."""
        one_hot = F.one_hot(y, self.num_classes).to(z.dtype)
        return torch.sigmoid(self.layers(torch.cat([2.0 * z - 1.0, one_hot], dim=1))).view(-1, *self.image_shape)


class MLPDiscriminator(nn.Module):
    """D(x, y), the logit that an image is real: 101,889 parameters at 1x28x28 with 10 classes and hidden 128."""

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int, hidden: int = 128) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.layers = _layers(math.prod(image_shape) + num_classes, hidden, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Logits [b] of images x [b, c, h, w] with labels y int64 [b]."""
        one_hot = F.one_hot(y, self.num_classes).to(x.dtype)
        return self.layers(torch.cat([x.flatten(1), one_hot], dim=1)).squeeze(1)

"""The generators of DP-MERF (Harder et al. 2021) and DP-HP (Vinaroz et al. 2022), as in their code for 28x28 images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CodeGenerator(nn.Module):
    """G(z, y): two linear layers, then two 5x5 convolutions, each after a bilinear upsampling by 2.

    It has 166,161 parameters at 1x28x28 with 10 classes and latent_dim 5.

    Args:
        latent_dim: Dimension of z (zeta in the paper).
        num_classes: The labels are 0..num_classes-1.
        image_shape: (c, h, w), with h and w multiples of 4.
        hidden: Width of the first linear layer; DP-HP has 500.
        align_corners: Whether the upsampling keeps the values of corners, as PyTorch's `UpsamplingBilinear2d` in the
            authors' code does.

    Raises:
        ValueError: For a height or width that is not a multiple of 4.
    """

    def __init__(
        self,
        latent_dim: int,
        num_classes: int,
        image_shape: tuple[int, int, int],
        hidden: int = 200,
        align_corners: bool = False,
    ) -> None:
        super().__init__()
        self.expect(image_shape)
        c, h, w = image_shape
        self.num_classes, self.grid = num_classes, (16, h // 4, w // 4)
        pixels = 16 * (h // 4) * (w // 4)
        first = [nn.Linear(latent_dim + num_classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU()]
        second = [nn.Linear(hidden, pixels), nn.BatchNorm1d(pixels), nn.ReLU()]
        self.code = nn.Sequential(*first, *second)
        twice = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=align_corners)
        coarse, fine = nn.Conv2d(16, 8, 5, padding=2), nn.Conv2d(8, c, 5, padding=2)
        self.image = nn.Sequential(twice, coarse, nn.ReLU(), twice, fine, nn.Sigmoid())

    @staticmethod
    def expect(image_shape: Sequence[int]) -> None:
        """Check that height and width are multiples of 4.

        Raises:
            ValueError: if they are not.
        """
        _, h, w = image_shape
        if h % 4 or w % 4:
            raise ValueError(
                f"image_shape: expected a height and width that are multiples of 4, got {h}x{w}; choose another "
                "dataset.image_size, or pad the images."
            )

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Images in [0, 1] [b, c, h, w] of latents z [b, latent_dim] and labels y int64 [b]."""
        code = self.code(torch.cat([z, F.one_hot(y, self.num_classes).to(z.dtype)], dim=1))
        return self.image(code.reshape(-1, *self.grid))


class DenseGenerator(nn.Module):
    """G(z, y): two linear layers with batch normalisation and ReLU, and a third one with a sigmoid.

    It has 653,284 parameters at 1x28x28 with 10 classes and latent_dim 5. DP-HP uses it for digits.

    Args:
        latent_dim: Dimension of z.
        num_classes: The labels are 0..num_classes-1.
        image_shape: (c, h, w).
        hidden: Width of both hidden layers.
    """

    def __init__(self, latent_dim: int, num_classes: int, image_shape: tuple[int, int, int], hidden: int = 500) -> None:
        super().__init__()
        self.num_classes, self.image_shape = num_classes, tuple(image_shape)
        layers: list[nn.Module] = []
        for before in (latent_dim + num_classes, hidden):
            layers += [nn.Linear(before, hidden), nn.BatchNorm1d(hidden), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(hidden, math.prod(image_shape)), nn.Sigmoid())

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Images in [0, 1] [b, c, h, w] of latents z [b, latent_dim] and labels y int64 [b]."""
        code = torch.cat([z, F.one_hot(y, self.num_classes).to(z.dtype)], dim=1)
        return self.layers(code).reshape(-1, *self.image_shape)

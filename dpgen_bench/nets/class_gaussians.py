"""A generator that is one normal distribution per class: in a common subspace of pixel space, plus pixel noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class ClassGaussians(nn.Module):
    """G(z, y) = m_y + V A_y z' + s z'' for z = (z', z'') ~ N(0, I): the law N(m_y, V A_y A_y^T V^T + s^2 I) of class y.

    Args:
        latent_dim: d + p, for the dimension d of the subspace and p = c h w pixels.
        num_classes: The labels are 0..num_classes-1.
        image_shape: (c, h, w).
        threshold: Pixels of at most this value become 0.

    Attributes:
        means: m [classes, p].
        basis: V [p, d].
        roots: A [classes, d, d].
        texture: s [].
    """

    def __init__(
        self, latent_dim: int, num_classes: int, image_shape: tuple[int, int, int], threshold: float = 0.0
    ) -> None:
        super().__init__()
        p = math.prod(image_shape)
        d = latent_dim - p
        self.image_shape, self.threshold = tuple(image_shape), threshold
        self.means = nn.Parameter(torch.zeros(num_classes, p))
        self.basis = nn.Parameter(torch.zeros(p, d))
        self.roots = nn.Parameter(torch.zeros(num_classes, d, d))
        self.texture = nn.Parameter(torch.zeros(()))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Images in [0, 1] [b, c, h, w] of latents z [b, d + p] and labels y int64 [b]."""
        d = self.basis.shape[1]
        codes = torch.einsum("bij,bj->bi", self.roots[y], z[:, :d])
        x = (self.means[y] + codes @ self.basis.T + self.texture * z[:, d:]).clamp(0.0, 1.0)
        return torch.where(x > self.threshold, x, 0.0).view(-1, *self.image_shape)

"""A generator that is one normal distribution per class, or a mixture of them, in a subspace, plus pixel noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class ClassGaussians(nn.Module):
    """G(z, y) = m_y + V A_y z' + s z'' for z = (z', z'') ~ N(0, I): the law N(m_y, V A_y A_y^T V^T + s^2 I) of class y.

    With several clusters, a class is a mixture of such laws. One more latent chooses the cluster: it is standard
    normal, so its cumulative probability is uniform on [0, 1].

    Args:
        latent_dim: d + p, for the dimension d of the subspace and p = c h w pixels; d + p + 1 with several clusters.
        num_classes: The labels are 0..num_classes-1.
        image_shape: (c, h, w).
        threshold: Pixels of at most this value become 0.
        clusters: K, the number of clusters of each class.

    Attributes:
        means: m [classes K, p]; the clusters of a class follow one another.
        basis: V [p, d].
        roots: A [classes K, d, d].
        texture: s [].
        cumulative: [classes, K], the probabilities of clusters, summed up; only with several clusters.
    """

    def __init__(
        self,
        latent_dim: int,
        num_classes: int,
        image_shape: tuple[int, int, int],
        threshold: float = 0.0,
        clusters: int = 1,
    ) -> None:
        super().__init__()
        p = math.prod(image_shape)
        self.d = latent_dim - p - (clusters > 1)
        self.image_shape, self.threshold, self.clusters = tuple(image_shape), threshold, clusters
        self.means = nn.Parameter(torch.zeros(num_classes * clusters, p))
        self.basis = nn.Parameter(torch.zeros(p, self.d))
        self.roots = nn.Parameter(torch.zeros(num_classes * clusters, self.d, self.d))
        self.texture = nn.Parameter(torch.zeros(()))
        if clusters > 1:
            self.cumulative = nn.Parameter(torch.ones(num_classes, clusters))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Images in [0, 1] [b, c, h, w] of latents z [b, latent_dim] and labels y int64 [b]."""
        d, p = self.basis.shape[1], len(self.basis)
        if self.clusters > 1:
            uniform = torch.special.ndtr(z[:, d + p])[:, None]
            y = self.clusters * y + (uniform > self.cumulative[y, :-1]).sum(dim=1)
        codes = torch.einsum("bij,bj->bi", self.roots[y], z[:, :d])
        x = (self.means[y] + codes @ self.basis.T + self.texture * z[:, d : d + p]).clamp(0.0, 1.0)
        return torch.where(x > self.threshold, x, 0.0).view(-1, *self.image_shape)

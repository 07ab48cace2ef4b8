"""Clusters within classes, and normal distributions of clusters, from sums of codes that may have noise.

The functions of records return rows of which the class sums are released; everything else is computed from such sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpgen_bench.utils.exact import length


@dataclass(frozen=True)
class Clusters:
    """K clusters of codes z [d] in each of k classes.

    Attributes:
        cells: [k, K, d]; the code of a record belongs to the cluster with the nearest of the points of its class.
        centres: [k, K, d], from which deviations are computed: the means of the clusters, as far as they are known.
        size: [k, K], numbers of records of clusters in relation to each other; 0 for a cluster that is unknown.
    """

    cells: Tensor
    centres: Tensor
    size: Tensor

    @classmethod
    def draw(cls, classes: int, clusters: int, covariance: Tensor, rng: torch.Generator) -> Clusters:
        """K > 1 clusters with random centres, or one cluster at the origin, whose deviations are the codes themselves.

        Args:
            covariance: [d, d], of codes within classes. The centres are normal, with half of its standard deviation.
        """
        origin = torch.zeros(classes, clusters, len(covariance)).to(covariance)
        centres = origin
        if clusters > 1:
            centres = torch.randn(origin.shape, generator=rng).to(covariance) @ root(covariance / 4.0, noise=0.0)
        return cls(origin, centres, torch.ones(classes, clusters).to(covariance))

    def rows_of_step(self, z: Tensor, y: Tensor, constant: float) -> Tensor:
        """Codes [b, d] of classes y and a constant, whose sum counts records, in the block of the nearest centre.

        [b, K (d + 1)].
        """
        return _in_block(F.pad(z, (0, 1), value=constant), _nearest(z, y, self.centres), self.size.shape[1])

    def moved(self, sums: Tensor, constant: float, least: float) -> Clusters:
        """The clusters after a Lloyd step: those of the nearest centre, with their means as new centres.

        Args:
            sums: [k, K (d + 1)], noisy sums of `rows_of_step` by class.
            constant: as in `rows_of_step`.
            least: a cluster of fewer records is unknown, and keeps its centre.
        """
        sums = sums.view(*self.size.shape, -1)
        size = sums[..., -1] / constant
        size = torch.where(size >= least, size, 0.0)
        centres = torch.where(size[..., None] > 0.0, sums[..., :-1] / size[..., None], self.centres)
        return Clusters(self.centres, centres, size)

    def deviations(self, z: Tensor, y: Tensor) -> Tensor:
        """Deviations of codes [b, d] of classes y from their centres, in the blocks of their clusters [b, K d]."""
        cluster = _nearest(z, y, self.cells)
        return _in_block(z - self.centres[y, cluster], cluster, self.size.shape[1])

    @property
    def weights(self) -> Tensor:
        """The probability of each cluster in its class [k, K]; equal ones if all are unknown."""
        size = self.size + 1e-6
        return size / size.sum(dim=1, keepdim=True)


def normal_distributions(
    count: Tensor, known: Tensor, first: Tensor, second: Tensor, noise: float
) -> tuple[Tensor, Tensor]:
    """Means [c, d] and symmetric roots of covariances [c, d, d] from noisy sums of deviations of c clusters.

    A cluster that is unknown, or whose covariance is not above its noise, gets the pooled covariance.

    Args:
        count: [c, 1], numbers of records, at least 1.
        known: [c, 1], 1 or 0.
        first: [c, d], sums of z.
        second: [c, K d, K d] or [c, d, d], sums of z z^T.
        noise: the spectral norm of the noise of a sum of z z^T.
    """
    mu = known * first / count
    scatter = second - count[:, None] * mu[:, :, None] * mu[:, None, :]
    pooled = root(scatter.sum(dim=0) / count.sum(), float(noise * len(count) ** 0.5 / count.sum()))
    roots = [root(scatter[c] / count[c], float(noise / count[c])) for c in range(len(count))]
    return mu, torch.stack([own if known[c] and own.any() else pooled for c, own in enumerate(roots)])


def diagonal_blocks(matrix: Tensor, blocks: int) -> Tensor:
    """The blocks [c blocks, d, d] on the diagonals of matrices [c, blocks d, blocks d]."""
    d = matrix.shape[-1] // blocks
    by_block = matrix.view(-1, blocks, d, blocks, d).diagonal(dim1=1, dim2=3)
    return by_block.permute(0, 3, 1, 2).reshape(-1, d, d)


def root(covariance: Tensor, noise: float) -> Tensor:
    """The symmetric square root of a noisy covariance matrix [d, d], without the eigenvalues of at most `noise`."""
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * torch.where(values > noise, values, 0.0).clamp(min=0.0).sqrt()) @ vectors.T


def _in_block(z: Tensor, cluster: Tensor, clusters: int) -> Tensor:
    """Rows [b, clusters n] that have z [b, n] in the block of their cluster and zeros in all others."""
    return (F.one_hot(cluster, clusters)[:, :, None] * z[:, None]).flatten(1)


def _nearest(z: Tensor, y: Tensor, points: Tensor) -> Tensor:
    """The number of the nearest of the points [k, K, d] of its class y to each code [b, d]; of equal ones, the first.

    The limit depends on the points alone, so that no other code of the batch can change it; a code that is 32 times as
    far away as the farthest point may be given to any cluster. It is above 0 also where all points are 0.
    """
    return length(z[:, None] - points[y], limit=32.0 * max(float(points.abs().max()), 1e-30)).argmin(dim=1)

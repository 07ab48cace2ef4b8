"""DP-Gauss: noisy class means, a noisy principal subspace, and one noisy normal distribution per class in it.

A baseline of this bench in the family of RON-Gauss (Chanyaswad, Liu & Mittal 2019; its first version is PCA-Gauss), of
P3GM (Takagi et al. 2021) and of "Analyze Gauss" (Dwork et al. 2014). An image x is a vector of p pixels in [0, 1], and
y is its class. Three sums over all records are released, each once. Everything else is post-processing.

    means      by class, count and sum of x, |x| <= R              -> m_y = sum / count, m the mean of all
    residuals  sum r r^T of r = x - m_y, |r| <= R_r                -> S, the covariance within classes
    subspace   V [p, d], the top eigenvectors of S + b sum_y (n_y / n) (m_y - m)(m_y - m)^T; m_y <- m + V V^T (m_y - m)
    codes      by class, sum z and sum z z^T of z = V^T (x - m_y), |z| <= R_z      -> mu_y and C_y
    texture    s^2 = (tr S - tr V^T S V) / (p - d), the variance of a pixel outside of the subspace
    samples    x = m_y + V (mu_y + C_y^(1/2) z') + s z'',  z' and z'' ~ N(0, I)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.class_gaussians import ClassGaussians
from dpgen_bench.privacy.factors import PerRecordMoments
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.utils.validation import Checked, Count, Fraction, Interval, NonNegative, Positive

Share = Annotated[float, Interval("(0, 1)")]


@dataclass
class DPGauss(Checked):
    """Three releases that share the budget, with shares of the squared multiplier mu^2 of the Gaussian mechanism.

    Guarantees: each release has the sensitivity C = 1 under add/remove, and sqrt(2) under replace-one (1.4147 for the
    codes), by `PerRecordMoments`. The noise is calibrated to privacy.epsilon.

    Args:
        dim: d, the dimension of the subspace.
        radius: R as a root mean square over pixels: |x| <= radius sqrt(p). The other radii are in the same unit.
        radius_residual: R_r, for the deviation of an image from its class mean.
        radius_code: R_z, for the part of this deviation in the subspace.
        share_means: Share of the budget for the class means.
        share_residuals: Share of the budget for the covariance within classes; the codes get the rest.
        between: b, the weight of the covariance between classes in the choice of the subspace.
        texture: Multiplies s.
        threshold: Pixels of samples of at most this value become black.

    Raises:
        ValueError: For a setting outside its range, for shares that leave nothing, and in `fit`, before any record is
            read, for a d that is not below the number of pixels.
    """

    version = 1  # raise it when the same settings train a different generator
    dim: Count
    radius: Positive
    radius_residual: Positive
    radius_code: Positive
    share_means: Share
    share_residuals: Share
    between: NonNegative
    texture: NonNegative
    threshold: Fraction

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.share_means + self.share_residuals < 1.0:
            raise ValueError(
                "method.share_means + method.share_residuals: expected a sum below 1, because the codes get the rest, "
                f"got {self.share_means:g} + {self.share_residuals:g}; lower one of them."
            )

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        k, p, d = data.num_classes, math.prod(data.image_shape), self.dim
        if d >= p:
            raise ValueError(
                f"method.dim: expected less than {p}, the number of pixels of an image, got {d}; lower it."
            )
        R, R_r, R_z = (radius * p**0.5 for radius in (self.radius, self.radius_residual, self.radius_code))
        images = PerRecordMoments(dim=p, radius=R, weights=(0.2, 1.0, 0.0), classes=k, nonnegative=True)
        residuals = PerRecordMoments(dim=p, radius=R_r, weights=(0.0, 0.0, 1.0))
        codes = PerRecordMoments(dim=d, radius=R_z, weights=(0.0, 0.2, 1.0), classes=k)
        of_images = data.mechanism("images", sample=Full(), bound=images, times=1, share=self.share_means)
        of_residuals = data.mechanism("residuals", sample=Full(), bound=residuals, times=1, share=self.share_residuals)
        of_codes = data.mechanism("codes", sample=Full(), bound=codes, times=1)

        # Class means. A class whose count is not above its noise is unknown: it gets the mean and covariance of all.
        sums = images.unpack(of_images(lambda x, y: x.flatten(1)))
        least = max(2.0 * of_images.std / images.coefficients[0], 1.0)
        count, known = sums.count.clamp(min=least)[:, None], (sums.count >= least).float()[:, None]
        overall = sums.first.sum(dim=0) / data.n
        between = known * (sums.first / count - overall)

        # Subspace. The signs of eigenvectors are fixed, so that all machines agree. Means are projected on it, which
        # removes most of their noise: a classifier would recognise the class by a fixed pattern of noise.
        S = residuals.unpack(of_residuals(lambda x, y: x.flatten(1) - (overall + between)[y])).second / data.n
        B = (between * count / data.n).T @ between
        V = torch.linalg.eigh(S + self.between * B).eigenvectors[:, -d:].flip(1)
        V = torch.where(V.sum(dim=0) < 0.0, -V, V)
        m = overall + between @ V @ V.T
        texture = self.texture * ((S.trace() - (V.T @ S @ V).trace()) / (p - d)).clamp(min=0.0).sqrt()

        # Normal distributions of codes. The noise of a sum of z z^T has the spectral norm `noise`.
        z = codes.unpack(of_codes(lambda x, y: (x.flatten(1) - m[y]) @ V.to(x.dtype)))
        noise = of_codes.std / codes.coefficients[2] * (2.0 * d) ** 0.5
        mu = known * z.first / count
        scatter = z.second - count[:, None] * mu[:, :, None] * mu[:, None, :]
        pooled = root(scatter.sum(dim=0) / count.sum(), float(noise * k**0.5 / count.sum()))
        roots = [root(scatter[c] / count[c], float(noise / count[c])) for c in range(k)]
        roots = [own if known[c] and own.any() else pooled for c, own in enumerate(roots)]

        generator = NetGenerator.build(ClassGaussians, data, ctx.device, latent_dim=d + p, threshold=self.threshold)
        state = {"means": m + mu @ V.T, "basis": V, "roots": torch.stack(roots), "texture": texture}
        generator.net.load_state_dict(state)
        return generator


def root(covariance: Tensor, noise: float) -> Tensor:
    """The symmetric square root of a noisy covariance matrix [d, d], without the eigenvalues of at most `noise`."""
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * torch.where(values > noise, values, 0.0).clamp(min=0.0).sqrt()) @ vectors.T

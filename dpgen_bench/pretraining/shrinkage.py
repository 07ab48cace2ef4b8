"""Shrinkage of noisy images towards zero: bands of spatial frequencies keep the share of their energy above the noise.

Images are smooth and noise is not. A discrete cosine transform therefore collects an image in few coefficients, of low
frequencies, and leaves white noise as it is. Coefficients of similar frequency are a band. All coefficients of a band
are multiplied by the positive-part factor of James and Stein ("Estimation with Quadratic Loss", 1961), as in block
thresholding of wavelets (Cai, "Adaptive Wavelet Estimation", Annals of Statistics 27, 1999). It is computed from the
noisy images and the variance of their noise, so it is post-processing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.fft import dct
from torch import Tensor


def stein_factor(energy: Tensor, noise: Tensor | float) -> Tensor:
    """max(1 - noise / energy, 0), by which noisy numbers are multiplied to lower their squared error.

    Args:
        energy: The sum of their squares.
        noise: The part of it that noise is expected to add, its variance times the number of numbers.
    """
    return (1.0 - noise / energy.clamp(min=1e-30)).clamp(min=0.0)


class Bands:
    """The bands of frequencies of images c, h, w, which are vectors of p = c h w pixels.

    A coefficient of frequencies i and j, in half waves along the sides, belongs to band round(sqrt(i^2 + j^2)); of two
    sides, frequencies of the shorter one are scaled up to the longer. Channels share the bands.

    Attributes:
        band: int64 [p], the band of each coefficient.
        size: [bands], numbers of coefficients.
    """

    def __init__(self, image_shape: Sequence[int], device: torch.device | str = "cpu") -> None:
        channels, *self._sides = image_shape
        self._cosines = [torch.from_numpy(dct(np.eye(n), axis=0, norm="ortho")).float().to(device) for n in self._sides]
        i, j = (np.arange(n) * (max(self._sides) / n) for n in self._sides)
        radius = np.hypot(i[:, None], j).round().astype(np.int64)
        self.band = torch.from_numpy(np.tile(radius.flatten(), channels)).to(device)
        self.size = self.band.bincount().float()

    def coefficients(self, images: Tensor) -> Tensor:
        """The orthonormal cosine transform [b, p] of images [b, p], of each channel by itself."""
        rows, columns = self._cosines
        return (rows @ images.view(len(images), -1, *self._sides) @ columns.T).view(images.shape)

    def images(self, coefficients: Tensor) -> Tensor:
        """Images [b, p] of their coefficients [b, p]."""
        rows, columns = self._cosines
        return (rows.T @ coefficients.view(len(coefficients), -1, *self._sides) @ columns).view(coefficients.shape)

    def sums(self, values: Tensor) -> Tensor:
        """[bands], the sum of values [p] of coefficients in each band."""
        return torch.zeros_like(self.size).index_add(0, self.band, values)

    def shrunk(self, images: Tensor, variance: Tensor | float) -> Tensor:
        """Images [b, p] with independent white noise, shrunk by one factor for each band.

        Args:
            variance: Of the noise of a pixel, summed over the images.
        """
        noisy = self.coefficients(images)
        factor = stein_factor(self.sums(noisy.square().sum(dim=0)), variance * self.size)
        return self.images(noisy * factor[self.band])

    def weighted(self, covariance: Tensor, noise: Tensor | float) -> Tensor:
        """A noisy covariance [p, p] of pixels, in which frequencies with less variance than the noise are damped.

        It is F W^(1/2) T W^(1/2) F^T, where T is the covariance of the coefficients F^T x, and W is the diagonal matrix
        of v / (v + noise), for the mean variance v of a band, at least 0.

        Args:
            noise: Spectral norm of the noise.
        """
        T = self.coefficients(self.coefficients(covariance).T)
        variance = (self.sums(T.diagonal()) / self.size).clamp(min=0.0)
        w = (variance / (variance + noise).clamp(min=1e-30)).sqrt()[self.band]
        return self.images(self.images(w[:, None] * T * w).T)

"""Smooth images: an orthonormal basis of the lowest frequencies of the discrete cosine transform, for each channel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.fft import dct
from torch import Tensor


def lowest_frequencies(image_shape: Sequence[int], r: int) -> Tensor:
    """D [p, c r^2] with D^T D = I: cosines of the r lowest frequencies along each side of images c, h, w.

    Args:
        image_shape: c, h and w; p is their product.
        r: at most h and w.
    """
    channels, height, width = image_shape
    of_rows, of_columns = (dct(np.eye(side), axis=0, norm="ortho")[:r].T for side in (height, width))
    return torch.from_numpy(np.kron(np.eye(channels), np.kron(of_rows, of_columns))).float()


def top_eigenvectors(matrix: Tensor, d: int, basis: Tensor | None) -> Tensor:
    """The eigenvectors V [p, d] of the largest eigenvalues of a symmetric matrix [p, p], within the span of a basis.

    Symmetric noise of variance 1 has a largest eigenvalue of about 2 sqrt(m) in m dimensions, so that it hides fewer
    eigenvectors in a smaller span.
    """
    within = matrix if basis is None else basis.T @ matrix @ basis
    vectors = torch.linalg.eigh(within).eigenvectors[:, -d:].flip(1)
    return vectors if basis is None else basis @ vectors

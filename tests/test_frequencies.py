"""Smooth images: cosines of the lowest frequencies, and eigenvectors among them."""

from __future__ import annotations

import math

import pytest
import torch

from dpgen_bench.pretraining.frequencies import lowest_frequencies, top_eigenvectors


@pytest.mark.parametrize(("shape", "r"), [((1, 8, 8), 3), ((3, 6, 9), 4), ((1, 5, 7), 5)])
def test_the_basis_is_orthonormal_and_channels_are_apart(shape: tuple[int, int, int], r: int) -> None:
    D = lowest_frequencies(shape, r)
    assert D.shape == (math.prod(shape), shape[0] * r**2)
    torch.testing.assert_close(D.T @ D, torch.eye(D.shape[1]), atol=1e-5, rtol=0)
    red = torch.zeros(shape)
    red[0] = torch.rand(shape[1:], generator=torch.Generator().manual_seed(0))
    smooth = (red.flatten() @ D @ D.T).view(shape)
    assert not smooth[1:].any()


def test_frequencies_are_those_of_cosines() -> None:
    """cos(pi f (2 i + 1) / (2 h)) along the side of h pixels, for f = 0 to r - 1."""
    height, width, r = 6, 8, 3
    D = lowest_frequencies((1, height, width), r).T.view(r, r, height, width)
    rows, columns = ((2.0 * torch.arange(side) + 1.0) / (2.0 * side) for side in (height, width))
    for f in range(r):
        for g in range(r):
            image = torch.outer(torch.cos(math.pi * f * rows), torch.cos(math.pi * g * columns))
            torch.testing.assert_close(D[f, g], image / image.norm(), atol=1e-5, rtol=0)


def test_all_frequencies_leave_images_and_eigenvectors_as_they_are() -> None:
    images = torch.rand(5, 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    D = lowest_frequencies((2, 4, 4), 4)
    torch.testing.assert_close(images @ D @ D.T, images, atol=1e-5, rtol=0)
    matrix = images.T @ images
    own, within = top_eigenvectors(matrix, 3, None), top_eigenvectors(matrix, 3, D)
    torch.testing.assert_close(own @ own.T, within @ within.T, atol=1e-4, rtol=0)


def test_eigenvectors_are_within_the_span_and_largest_first() -> None:
    rng = torch.Generator().manual_seed(0)
    D = lowest_frequencies((1, 6, 6), 3)
    matrix = torch.randn(36, 36, generator=rng)
    matrix = matrix + matrix.T
    V = top_eigenvectors(matrix, 4, D)
    torch.testing.assert_close(D @ D.T @ V, V, atol=1e-5, rtol=0)
    expected = torch.linalg.eigvalsh(D.T @ matrix @ D).flip(0)[:4]
    torch.testing.assert_close((V.T @ matrix @ V).diagonal(), expected, atol=1e-4, rtol=0)

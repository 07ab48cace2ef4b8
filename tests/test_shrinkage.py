"""Bands of frequencies: the cosine transform, and what shrinkage by bands does to noise and to images."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.fft import dctn
from torch import Tensor

from dpgen_bench.pretraining.shrinkage import Bands, stein_factor

SHAPES = [(1, 8, 8), (3, 6, 9), (2, 7, 4)]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", SHAPES)
def test_coefficients_are_the_orthonormal_cosine_transform_of_each_channel(shape: tuple[int, int, int]) -> None:
    bands, images = Bands(shape), torch.rand(5, math.prod(shape), generator=rng())
    expected = torch.from_numpy(dctn(images.view(5, *shape).numpy(), axes=(2, 3), norm="ortho")).view(5, -1)
    torch.testing.assert_close(bands.coefficients(images), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(bands.images(bands.coefficients(images)), images, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_coefficient_belongs_to_the_band_of_its_frequency(shape: tuple[int, int, int]) -> None:
    """On squares the band is the rounded radius; the mean of an image is a band of its own, shared by the channels."""
    bands, (c, h, w) = Bands(shape), shape
    assert int(bands.size.sum()) == c * h * w
    assert int(bands.size[0]) == c
    assert torch.equal(bands.size, bands.band.bincount().float())
    for channel in range(c):
        for i in range(h):
            for j in range(w):
                radius = math.hypot(i * max(h, w) / h, j * max(h, w) / w)
                assert abs(int(bands.band.view(shape)[channel, i, j]) - radius) <= 0.5 + 1e-9


def test_the_factor_is_that_of_james_and_stein() -> None:
    energy = torch.tensor([4.0, 1.0, 0.5, 0.0])
    assert stein_factor(energy, 1.0).tolist() == [0.75, 0.0, 0.0, 0.0]
    assert stein_factor(energy, 0.0).tolist() == [1.0, 1.0, 1.0, 1.0]


def smooth(count: int, bands: Bands, generator: torch.Generator) -> Tensor:
    """Images whose coefficients have standard deviations 1 / (1 + band)^2."""
    return bands.images(torch.randn(count, len(bands.band), generator=generator) / (1.0 + bands.band) ** 2)


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_shrinkage_is_nearly_as_good_as_the_best_factors(noise: float) -> None:
    """The best factor of a band is v / (v + noise^2); its expected error is v noise^2 / (v + noise^2)."""
    bands, generator = Bands((1, 16, 16)), rng(1)
    images = smooth(10, bands, generator)
    noisy = images + noise * torch.randn(images.shape, generator=generator)
    error = float((bands.shrunk(noisy, 10 * noise**2) - images).square().sum())
    v = 1.0 / (1.0 + torch.arange(len(bands.size))) ** 4
    best = 10 * float((bands.size * v * noise**2 / (v + noise**2)).sum())
    assert error < 1.3 * best
    assert error < float((noisy - images).square().sum()) / 4


def test_without_noise_nothing_is_shrunk_and_noise_alone_becomes_little() -> None:
    bands, generator = Bands((3, 8, 8)), rng(2)
    images = smooth(4, bands, generator)
    torch.testing.assert_close(bands.shrunk(images, 0.0), images, atol=1e-5, rtol=0)
    noise = torch.randn(40, 3 * 64, generator=generator)
    assert float(bands.shrunk(noise, 40.0).square().sum()) < 0.02 * float(noise.square().sum())


def test_a_weighted_covariance_without_noise_is_the_covariance_itself() -> None:
    bands, generator = Bands((2, 5, 5)), rng(3)
    images = smooth(30, bands, generator)
    S = images.T @ images / 30
    torch.testing.assert_close(bands.weighted(S, 0.0), S, atol=1e-5, rtol=0)


def test_principal_directions_of_a_weighted_covariance_are_nearer_to_the_true_ones() -> None:
    """Under symmetric noise whose norm is half of the largest variance."""
    bands, generator = Bands((1, 16, 16)), rng(4)
    S, p, d = bands.images(bands.images(torch.diag(1.0 / (1.0 + bands.band.float()) ** 4)).T), 256, 8
    entry = 0.25 / (2.0 * p) ** 0.5
    upper = torch.randn(p, p, generator=generator)
    noisy = S + entry * (upper.triu(1) + upper.triu(1).T) / 2.0**0.5 + entry * upper.diagonal().diag()

    def explained(matrix: Tensor) -> float:
        V = torch.linalg.eigh(matrix).eigenvectors[:, -d:]
        return float((V.T @ S @ V).trace() / torch.linalg.eigvalsh(S)[-d:].sum())

    weighted = bands.weighted(noisy, entry * (2.0 * p) ** 0.5)
    torch.testing.assert_close(weighted, weighted.T, atol=1e-6, rtol=0)
    assert explained(weighted) > explained(noisy) + 0.05
    assert explained(weighted) > 0.9

"""The U-Net, EDM's preconditioning, and samplers against normal data, for which the best denoiser is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dpgen_bench.nets.edm import DATA_STD, HIGHEST, LOWEST, Denoiser, EDMSampler, noise_levels
from dpgen_bench.nets.unet import UNet

TINY = dict(width=4, multipliers=(1, 2), blocks=1, patch=2, embedding=6)
MEDIUM = dict(width=28, multipliers=(1, 2), blocks=1, patch=2, embedding=96)
SMALL = dict(width=32, multipliers=(1,), blocks=1, patch=4, embedding=64)


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(("sizes", "number"), [(dict(embedding=224), 1_751_905), (MEDIUM, 490_352), (SMALL, 156_336)])
def test_the_three_sizes_of_the_network(sizes: dict, number: int) -> None:
    assert parameters(UNet((1, 28, 28), 10, **sizes)) == number


def trained(shape: tuple[int, int, int] = (1, 8, 8), classes: int = 3) -> Denoiser:
    """A denoiser in float64 whose last layer is not zero."""
    torch.manual_seed(0)
    denoiser = Denoiser(shape, classes, **TINY).double()
    nn.init.normal_(denoiser.net.leave.weight, std=0.1)
    return denoiser


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 12)])
def test_a_row_of_the_network_depends_on_its_own_image_noise_and_class(shape: tuple[int, int, int]) -> None:
    D = trained(shape)
    x = torch.randn(4, *shape, dtype=torch.float64)
    s, y = torch.tensor([0.1, 0.5, 2.0, 0.1], dtype=torch.float64), torch.tensor([0, 1, 2, 3])  # 3: no class
    out = D(x, s, y)
    assert out.shape == x.shape
    for i in range(4):
        torch.testing.assert_close(D(x[i : i + 1], s[i : i + 1], y[i : i + 1])[0], out[i])
    for other in (D(x, s, (y + 1) % 4), D(x, 1.1 * s, y), D(x.flip(0), s, y)):
        assert ((other - out).flatten(1).norm(dim=1) > 1e-6).all()


@pytest.mark.parametrize(("shape", "sizes"), [((1, 30, 28), TINY), ((1, 28, 28), {**TINY, "multipliers": (1, 1, 1)})])
def test_images_that_cannot_be_halved_are_refused(shape: tuple[int, int, int], sizes: dict) -> None:
    with pytest.raises(ValueError, match="sides are divisible by"):
        UNet(shape, 10, **sizes)


def test_preconditioning_gives_the_network_inputs_and_targets_of_variance_one() -> None:
    """EDM, appendix B.6: for data of standard deviation sigma_data, whatever the noise."""
    inputs: list[Tensor] = []

    class Keep(nn.Module):
        def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
            inputs.append(x)
            return torch.zeros_like(x)

    denoiser = Denoiser((1, 8, 8), 3, **TINY)
    denoiser.net = Keep()  # type: ignore[assignment]
    torch.manual_seed(0)
    x, y = DATA_STD * torch.randn(400, 1, 8, 8), torch.zeros(400, dtype=torch.int64)
    for level in (0.01, 0.5, 30.0):
        s, noise = torch.full((400,), level), torch.randn(400, 1, 8, 8)
        skipped = denoiser(x + level * noise, s, y)  # c_skip x, because F is zero
        assert inputs[-1].std().item() == pytest.approx(1.0, abs=0.02)
        c_out = level * DATA_STD / math.hypot(level, DATA_STD)
        assert ((x - skipped) / c_out).std().item() == pytest.approx(1.0, abs=0.02)
        # The weight of the loss is 1 / c_out^2, so that every noise level has the same loss: one for each pixel.
        losses = denoiser.losses(x, y, s, noise)
        assert losses.shape == (400,)
        assert losses.mean().item() == pytest.approx(64.0, rel=0.03)


def test_a_loss_is_the_weighted_squared_error_of_its_own_row() -> None:
    D = trained()
    x, noise = torch.rand(3, 1, 8, 8, dtype=torch.float64), torch.randn(3, 1, 8, 8, dtype=torch.float64)
    s, y = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64), torch.tensor([0, 1, 3])
    for i, loss in enumerate(D.losses(x, y, s, noise)):
        own = slice(i, i + 1)
        error = ((D(x[own] + s[i] * noise[own], s[own], y[own]) - x[own]) ** 2).sum()
        torch.testing.assert_close(loss, error * (s[i] ** 2 + 0.25) / (0.5 * s[i]) ** 2)


# Samplers


class Normal(nn.Module):
    """The best denoiser of pixels N(m_y, v): (v x + s^2 m_y) / (v + s^2). Label 2 stands for no class, with m = 0."""

    means, variance = torch.tensor([-0.3, 0.4, 0.0]), 0.04

    def forward(self, x: Tensor, s: Tensor, y: Tensor) -> Tensor:
        s2 = (s**2).view(-1, 1, 1, 1)
        return (self.variance * x + s2 * self.means.to(x)[y].view(-1, 1, 1, 1)) / (self.variance + s2)


def sampled(sampler: str, steps: int, n: int = 400, **settings: object) -> tuple[Tensor, Tensor]:
    """Images of a sampler with the denoiser of normal data, and their labels."""
    shape = (1, 8, 8)
    dim = EDMSampler.latent_dim_of(shape, sampler, steps)  # type: ignore[arg-type]
    net = EDMSampler(shape, 2, dim, sampler, steps, **settings, **TINY)  # type: ignore[arg-type]
    net.denoiser = Normal()  # type: ignore[assignment]
    y = torch.arange(n) % 2
    return net(torch.randn(n, dim, generator=torch.Generator().manual_seed(0)), y), y


@pytest.mark.parametrize(
    ("sampler", "steps", "settings"),
    [
        ("ddim", 100, {}),
        ("stochastic", 400, {}),  # its variance converges slowly: 6 % too small with 100 steps
        ("churn", 30, {}),
        ("churn", 60, {"churn": (20.0, 0.01, 50.0, 1.0)}),
    ],
)
def test_samplers_draw_normal_data(sampler: str, steps: int, settings: dict) -> None:
    x, y = sampled(sampler, steps, **settings)
    for label in (0, 1):
        own = x[y == label]
        assert own.mean().item() == pytest.approx(float(Normal.means[label]), abs=0.01)
        assert own.std().item() == pytest.approx(Normal.variance**0.5, rel=0.06)
    pixels = x.flatten(1)[y == 0]
    assert abs(float(torch.corrcoef(pixels.T)[0, 1])) < 0.35  # 200 rows; pixels are independent


def test_stochastic_samplers_use_the_noise_of_every_step() -> None:
    shape, steps = (1, 4, 4), 6
    churn = (3.0, 0.0, 100.0, 1.0)
    for sampler in ("stochastic", "churn"):
        dim = EDMSampler.latent_dim_of(shape, sampler, steps)  # type: ignore[arg-type]
        assert dim == 16 * (1 + steps)
        net = EDMSampler(shape, 2, dim, sampler, steps, churn=churn, **TINY)  # type: ignore[arg-type]
        net.denoiser = Normal()  # type: ignore[assignment]
        z = torch.randn(1, dim, requires_grad=True)
        (gradient,) = torch.autograd.grad(net(z, torch.zeros(1, dtype=torch.int64)).sum(), z)
        used = gradient.view(1 + steps, 16).abs().sum(dim=1) > 0
        # The last step of the stochastic sampler goes to noise zero, to which no noise belongs.
        assert used.tolist() == [True] * (steps + (sampler == "churn")) + [False] * (sampler == "stochastic")
    assert EDMSampler.latent_dim_of(shape, "ddim", steps) == 16


def test_guidance_moves_images_away_from_those_without_class() -> None:
    """D + w (D - D_none) with means m and 0 is the denoiser of data with the mean (1 + w) m."""
    x, y = sampled("ddim", 60, guidance=0.5)
    for label in (0, 1):
        assert x[y == label].mean().item() == pytest.approx(1.5 * float(Normal.means[label]), abs=0.015)


def test_noise_levels_are_edms() -> None:
    levels = noise_levels(18)
    assert len(levels) == 19
    assert levels[0] == pytest.approx(HIGHEST)
    assert levels[17] == pytest.approx(LOWEST)
    assert levels[18] == 0.0
    assert levels[1] == pytest.approx(57.586, abs=1e-3)  # (80^(1/7) + (0.002^(1/7) - 80^(1/7)) / 17)^7
    assert levels == sorted(levels, reverse=True)


@pytest.mark.parametrize(
    ("sampler", "steps", "reason"), [("euler", 9, "ddim, stochastic, churn"), ("ddim", 1, "at least 2")]
)
def test_unknown_samplers_and_too_few_steps_are_refused(sampler: str, steps: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EDMSampler((1, 8, 8), 2, 64, sampler, steps, **TINY)  # type: ignore[arg-type]

"""Denoising networks with the preconditioning of EDM, and samplers that draw images by removing noise step by step.

Karras, Aittala, Aila & Laine, *Elucidating the Design Space of Diffusion-Based Generative Models*, NeurIPS 2022, which
is "EDM" below. Images x are in [-1, 1], s is the standard deviation of the noise, and D(x + s n; s, y) estimates x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from dpgen_bench.nets.unet import UNet

Sampler = Literal["ddim", "stochastic", "churn"]

DATA_STD = 0.5  # sigma_data, the standard deviation of pixels that EDM assumes
LOWEST, HIGHEST, RHO = 0.002, 80.0, 7.0  # noise levels of samplers (EDM, Table 1)


class Denoiser(nn.Module):
    """D(x; s, y) = c_skip x + c_out F(c_in x, c_noise, y), with EDM's coefficients (Table 1) and a U-Net F."""

    def __init__(self, image_shape: Sequence[int], num_classes: int, **sizes: object) -> None:
        super().__init__()
        self.net = UNet(image_shape, num_classes, **sizes)  # type: ignore[arg-type]

    def forward(self, x: Tensor, s: Tensor, y: Tensor) -> Tensor:
        """Estimates of clean images [b, c, h, w] of noisy x, for noise s [b] and labels y int64 [b]."""
        total = (s**2 + DATA_STD**2).view(-1, 1, 1, 1)
        wide = s.view(-1, 1, 1, 1)
        F = self.net(x / total.sqrt(), s.log() / 4.0, y)
        return DATA_STD**2 / total * x + wide * DATA_STD / total.sqrt() * F

    def losses(self, x: Tensor, y: Tensor, s: Tensor, noise: Tensor) -> Tensor:
        """lambda(s) |D(x + s n; s, y) - x|^2 [b], lambda = (s^2 + DATA_STD^2) / (s DATA_STD)^2 (EDM, equation 8)."""
        errors = (self(x + s.view(-1, 1, 1, 1) * noise, s, y) - x).square().flatten(1).sum(dim=1)
        return (s**2 + DATA_STD**2) / (s * DATA_STD) ** 2 * errors


class EDMSampler(nn.Module):
    """A generator of images: `sampler` turns latents z, which are the noise of all steps, into images in [-1, 1].

    - ddim: Euler's method for the probability flow, which is deterministic DDIM.
    - stochastic: DDIM with eta = 1: each step returns to the next lower noise level by new noise.
    - churn: EDM's Algorithm 2 with Heun's method: each step first adds noise.

    Args:
        image_shape: (c, h, w).
        num_classes: The labels are 0..num_classes-1.
        latent_dim: What `latent_dim_of` returns.
        sampler: The name of the sampler.
        sampler_steps: The number of its steps; "churn" evaluates the network twice in each but the last.
        guidance: w of classifier-free guidance: D = (1 + w) D(x; s, y) - w D(x; s, no class).
        churn: S_churn, S_min, S_max and S_noise of EDM.
        sizes: Those of the U-Net.

    Raises:
        ValueError: For an unknown sampler, or less than 2 steps.
    """

    value_range: ClassVar[tuple[float, float]] = (-1.0, 1.0)

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        latent_dim: int,
        sampler: Sampler = "stochastic",
        sampler_steps: int = 20,
        guidance: float = 0.0,
        churn: Sequence[float] = (0.0, 0.0, 100.0, 1.0),
        **sizes: object,
    ) -> None:
        super().__init__()
        if sampler not in get_args(Sampler):
            raise ValueError(f"expected a sampler of {', '.join(get_args(Sampler))}, got {sampler!r}; take one.")
        if sampler_steps < 2:
            raise ValueError(f"expected sampler_steps of at least 2, got {sampler_steps}; set more.")
        self.image_shape, self.num_classes = tuple(image_shape), num_classes
        self.sampler, self.sampler_steps, self.guidance, self.churn = sampler, sampler_steps, guidance, tuple(churn)
        self.denoiser = Denoiser(image_shape, num_classes, **sizes)

    @staticmethod
    def latent_dim_of(image_shape: Sequence[int], sampler: Sampler, sampler_steps: int) -> int:
        """The number of normal random numbers that one image needs: its first noise, and that of each random step."""
        return math.prod(image_shape) * (1 + sampler_steps * (sampler != "ddim"))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        noise = z.view(len(z), -1, *self.image_shape).unbind(dim=1)
        levels = noise_levels(self.sampler_steps)
        x = noise[0] * levels[0]
        for i, (s, to) in enumerate(pairwise(levels)):
            if self.sampler == "ddim":
                x = self._euler(x, y, s, to)
            elif self.sampler == "stochastic":
                # To the level `down` without noise, and back to `to`, such that to^2 = down^2 + up^2.
                up = (to**2 * (s**2 - to**2) / s**2) ** 0.5
                x = self._euler(x, y, s, (to**2 - up**2) ** 0.5) + up * noise[1 + i]
            else:
                S_churn, S_min, S_max, S_noise = self.churn
                gamma = min(S_churn / self.sampler_steps, 2.0**0.5 - 1.0) if S_min <= s <= S_max else 0.0
                raised = s * (1.0 + gamma)
                x = x + (raised**2 - s**2) ** 0.5 * S_noise * noise[1 + i]
                x = self._heun(x, y, raised, to)
        return x

    def _denoised(self, x: Tensor, y: Tensor, s: float) -> Tensor:
        level = torch.full((len(x),), s, dtype=x.dtype, device=x.device)
        D = self.denoiser(x, level, y)
        if self.guidance:
            D = D + self.guidance * (D - self.denoiser(x, level, torch.full_like(y, self.num_classes)))
        return D.clamp(-1.0, 1.0)

    def _slope(self, x: Tensor, y: Tensor, s: float) -> Tensor:
        """dx/ds of the probability flow."""
        return (x - self._denoised(x, y, s)) / s

    def _euler(self, x: Tensor, y: Tensor, s: float, to: float) -> Tensor:
        return x + (to - s) * self._slope(x, y, s)

    def _heun(self, x: Tensor, y: Tensor, s: float, to: float) -> Tensor:
        slope = self._slope(x, y, s)
        ahead = x + (to - s) * slope
        if to == 0.0:
            return ahead
        return x + (to - s) * 0.5 * (slope + self._slope(ahead, y, to))


def noise_levels(steps: int) -> list[float]:
    """`steps` levels from HIGHEST to LOWEST, and 0 (EDM, equation 5)."""
    ends = HIGHEST ** (1.0 / RHO), LOWEST ** (1.0 / RHO)
    return [(ends[0] + i / (steps - 1) * (ends[1] - ends[0])) ** RHO for i in range(steps)] + [0.0]

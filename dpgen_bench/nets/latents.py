"""Random latents of conditional generators."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dpgen_bench.utils.upload import upload

LatentDistribution = Literal["normal", "uniform", "bernoulli"]


def draw_latents(
    distribution: LatentDistribution, shape: tuple[int, ...], rng: torch.Generator, device: torch.device
) -> Tensor:
    """Latents z of this shape: standard normal, uniform on [0, 1], or Bernoulli(1/2) on {0, 1}.

    They are drawn on the CPU, so that they are the same on every device.

    Args:
        rng: A generator of random numbers on the CPU.
        device: Where to move the latents.
    """
    if distribution == "normal":
        return upload(torch.randn(shape, generator=rng), device)
    uniform = torch.rand(shape, generator=rng)
    return upload(uniform if distribution == "uniform" else uniform.lt(0.5).float(), device)

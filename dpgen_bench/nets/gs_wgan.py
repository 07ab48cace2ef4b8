"""What GS-WGAN's centralized and federated settings share: settings, and a generator with its moving average.

Chen, Orekondy & Fritz, "GS-WGAN" (NeurIPS 2020), Algorithms 1 and 2. Critics are trained in `nets.wasserstein`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from dpgen_bench.nets.spectral import settle_spectral
from dpgen_bench.nets.wasserstein import CriticTraining
from dpgen_bench.nets.wgan import DCGANGenerator, ResNetGenerator
from dpgen_bench.utils.validation import Checked, Count, CountOrZero, Decay, NonNegative, Positive

GENERATORS: dict[str, type[nn.Module]] = {"resnet": ResNetGenerator, "dcgan": DCGANGenerator}


@dataclass
class GSWGANSettings(Checked):
    """Settings of both algorithms.

    Args:
        schedule: which critic a step asks: "random", uniform (paper), or "public_balanced", each equally often.
        batch_size: B, of records and of generated images, in every update exactly (the released code's batches of
            records alternate between 32 and 28, and its batches of images with them).
        n_critic: updates of the asked critic in each step.
        warm_start: iterations that prepare each critic, of n_critic updates against one of a throw-away generator (the
            text's 2,000; the released code makes 2,001).
        sigma: σ; each image's gradient gets noise N(0, (2Cσ)^2 I). None: calibrated to the budget, or, if that is
            infinite, neither clipping nor noise.
        clip_norm: C, of the gradient of -sum D(x) (paper: 1; the released code divides both by B).
        gp_weight: λ of the gradient penalty. drift: weight of the critic's squared scores.
        lr, betas: of Adam, for critics and generator.
        latent_dim, latent: dimension and law of z, "bernoulli" on {0, 1} or "normal".
        width, critic_width: of the layers; None is the paper's.
        ema: largest decay of the moving average of the generator, which is what is released.
    """

    schedule: Literal["random", "public_balanced"]
    batch_size: Count
    n_critic: Count
    warm_start: CountOrZero
    sigma: Positive | None
    clip_norm: Positive
    gp_weight: NonNegative
    drift: NonNegative
    lr: Positive
    betas: tuple[Decay, Decay]
    generator: Literal["resnet", "dcgan"]
    latent_dim: Count
    latent: Literal["bernoulli", "normal"]
    width: Count | None
    critic_width: Count | None
    ema: Decay

    def __post_init__(self) -> None:
        super().__post_init__()
        self.training = CriticTraining(
            self.batch_size,
            self.n_critic,
            self.gp_weight,
            self.drift,
            self.latent,
            self.latent_dim,
            self.lr,
            self.betas,
        )

    @property
    def generator_class(self) -> type[nn.Module]:
        return GENERATORS[self.generator]

    @property
    def generator_sizes(self) -> dict[str, Any]:
        """Arguments of the generator's class besides the format of images."""
        return {"latent_dim": self.latent_dim, "width": self.width}

    @property
    def std(self) -> float | None:
        """Standard deviation 2Cσ of the noise in every pixel; None: calibrated to the budget."""
        return None if self.sigma is None else 2.0 * self.clip_norm * self.sigma

    def warm_start_iterations(self, critics: int, limit: Callable[[int], int]) -> int:
        """For each critic.

        Args:
            limit: a scale's cap (`Context.limit`). It holds for all critics together; each gets one iteration at least.
        """
        return max(1, limit(critics * self.warm_start) // critics) if self.warm_start else 0


class AveragedGenerator:
    """The generator g, which Adam moves along sanitised gradients in its images, and its moving average.

    Attributes:
        states: what changes in the training loop, by name, for `Context.steps` and `Context.warm_start`.
    """

    def __init__(self, g: nn.Module, settings: GSWGANSettings) -> None:
        self.g = g
        self.adam = torch.optim.Adam(g.parameters(), settings.lr, settings.betas)
        most = settings.ema
        self.ema = AveragedModel(g, avg_fn=lambda mean, new, n: mean + max(1.0 - most, 1.0 / (n + 1)) * (new - mean))
        self.states: dict[str, Any] = {"g": self.g, "adam": self.adam, "ema": self.ema}

    def descend(self, x: Tensor, gradient: Tensor) -> None:
        """One step of Adam along the gradient [B, c, h, w] in the images x [B, c, h, w] that g has made."""
        self.adam.zero_grad()
        x.backward(gradient / len(x))
        self.adam.step()
        self.ema.update_parameters(self.g)

    def average(self) -> nn.Module:
        """The network whose parameters are the moving averages."""
        return settle_spectral(self.ema.module)

"""Shared parts of centralized and federated GS-WGAN: their settings, and the generator with its moving average.

Chen, Orekondy & Fritz, "GS-WGAN" (NeurIPS 2020), Algorithms 1 and 2. `nets.wasserstein` trains the critics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

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
        schedule: How the critic of a step is chosen: "random", uniformly (paper), or "public_balanced", each critic
            equally often.
        batch_size: B, the number of records and of generated images in every update (in the released code, batches
            alternate between 32 and 28).
        n_critic: Updates of the chosen critic in each step.
        warm_start: Iterations that pretrain each critic against a temporary generator: n_critic updates of the critic,
            then one of the generator (2,000 in the text; the released code makes 2,001).
        sigma: The gradient in each image gets noise N(0, (2 C sigma)^2 I). None: calibrated to the budget; an infinite
            budget means no clipping and no noise.
        clip_norm: C, the bound on the gradient of -sum D(x) (paper: 1; the released code divides both by B).
        gp_weight: Weight lambda of the gradient penalty.
        drift: Weight of the critic's squared scores.
        lr, betas: Settings of Adam, for critics and generator.
        generator: Architecture of the generator, "resnet" (paper) or "dcgan".
        latent_dim, latent: Dimension and distribution of z, "bernoulli" on {0, 1} or "normal".
        width, critic_width: Widths of the layers; None means the paper's.
        ema: Largest decay of the moving average of the generator's weights. The average is released.

    Raises:
        ValueError: For a value outside its range.
    """

    # Settings with which `dpgen audit` fits: a release moves as declared for critics of any training.
    audited: ClassVar[Mapping[str, Any]] = {"warm_start": 0}

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
        """The class of the generator's network."""
        return GENERATORS[self.generator]

    @property
    def generator_sizes(self) -> dict[str, Any]:
        """Arguments of the generator's class, except those for the format of images."""
        return {"latent_dim": self.latent_dim, "width": self.width}

    @property
    def std(self) -> float | None:
        """Standard deviation 2 C sigma of the noise in every pixel; None means calibrated to the budget."""
        return None if self.sigma is None else 2.0 * self.clip_norm * self.sigma

    def warm_start_iterations(self, critics: int, limit: Callable[[int], int]) -> int:
        """Number of warm-start iterations of each critic.

        Args:
            critics: The number of critics.
            limit: The scale's limit (`Context.limit`) of the iterations of all critics together. Each critic has at
                least one iteration, unless `warm_start` is 0.
        """
        return max(1, limit(critics * self.warm_start) // critics) if self.warm_start else 0


class AveragedGenerator:
    """The generator g, which Adam trains with sanitised gradients in its images, and the moving average of its weights.

    Attributes:
        states: All objects that change in the training loop, for `Context.steps` and `Context.warm_start`.
    """

    def __init__(self, g: nn.Module, settings: GSWGANSettings) -> None:
        self.g = g
        self.adam = torch.optim.Adam(g.parameters(), settings.lr, settings.betas)
        largest_decay = settings.ema

        @torch.no_grad()
        def average(means: Sequence[Tensor], news: Sequence[Tensor], n: Tensor | int) -> None:
            """A plain mean of the first weights, and later an exponential average of the largest decay.

            The weight of the new values stays on the device, so that no step waits for it.
            """
            weight = torch.as_tensor(1.0 / (n + 1)).clamp(min=1.0 - largest_decay)
            for mean, new in zip(means, news, strict=True):
                mean.copy_(mean + weight * (new - mean))

        self.ema = AveragedModel(g, multi_avg_fn=average)
        self.states: dict[str, Any] = {"g": self.g, "adam": self.adam, "ema": self.ema}

    def descend(self, x: Tensor, gradient: Tensor) -> None:
        """One step of Adam with the gradient [B, c, h, w] in the images x [B, c, h, w], which g generated."""
        self.adam.zero_grad()
        x.backward(gradient / len(x))
        self.adam.step()
        self.ema.update_parameters(self.g)

    def average(self) -> nn.Module:
        """The network with the averaged weights."""
        return settle_spectral(self.ema.module)

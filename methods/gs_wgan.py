"""GS-WGAN: a generator that learns from the sanitised gradients of many Wasserstein critics, each on a shard of its own
(Chen, Orekondy & Fritz, "GS-WGAN: A Gradient-Sanitized Approach for Learning Differentially Private Generators",
NeurIPS 2020, Algorithm 1).

Guarantees: critics are private state of the mechanism "image_gradient" and never leave it. What leaves, T times, is
the gradient of one critic's loss in B generated images, clipped and noised; the generator, its optimiser and its moving
average are functions of public randomness and of those releases.

A record is in one shard, so it acts on the releases that draw its shard, on each through all B rows: one release of
joint sensitivity 2C sqrt(B). Its critic remembers at which earlier steps it was drawn, so hiding the drawn index does
not amplify what a step proves. The paper's count (T B subsampled releases, 9.99 at its settings) is no bound, nor is
that of T subsampled ones (329.4, true if steps were memoryless). What is proven lets the indices be known: 610.3.
`schedule: public_balanced` hides nothing either and visits every shard equally often, which costs less noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator, in_eval_mode
from dpgen_bench.method import Context
from dpgen_bench.nets.spectral import settle_spectral
from dpgen_bench.nets.wasserstein import CriticTraining, draw_latents
from dpgen_bench.nets.wgan import DCGANGenerator, ProjectionCritic, ResNetGenerator
from dpgen_bench.privacy.accountants.claims import memoryless, wor_rdp
from dpgen_bench.privacy.bounds import Bound, PerRow, Whole
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.sampling import OneShard
from dpgen_bench.privacy.state import PrivateState
from dpgen_bench.utils.validation import check_bounds, check_types

NETS: dict[str, type[nn.Module]] = {"resnet": ResNetGenerator, "dcgan": DCGANGenerator}


@dataclass
class GSWGAN:
    """Algorithm 1.

    Args:
        shards: K, disjoint parts of the records, and critics: one for each.
        schedule: the critic of each step: "random", uniform (paper), or "public_balanced", each once in every K steps.
        batch_size: B, of records and of generated images, in every update exactly (the released code's batches of
            records alternate between 32 and 28, and its batches of images with them).
        steps: T, of the generator. None: as many as the budget allows at this σ.
        n_critic: updates of the drawn critic in each step.
        warm_start: iterations that prepare each critic, of n_critic updates against one of a throw-away generator (the
            text's 2,000; the released code makes 2,001, and 20,001 steps for T = 20,000).
        sigma: σ; each image's gradient gets noise N(0, (2Cσ)^2 I). None: calibrated from `steps` to the budget, or, if
            that is infinite, neither clipping nor noise.
        clip: "per_row": each image's gradient to norm C (paper), or "whole": all B together to C sqrt(B). Both bound a
            step by 2C sqrt(B), so the same σ proves the same.
        clip_norm: C, of the gradient of -sum D(x) (paper: 1; the released code divides both by B).
        gp_weight: λ. drift: weight of the critic's squared scores.
        lr, betas: of Adam, for critics and generator.
        generator: "resnet" or "dcgan".
        latent_dim, latent: dimension and law of z, "bernoulli" on {0, 1} or "normal".
        width, critic_width: of the layers; None is the paper's.
        ema: largest decay of the moving average of the generator, which is what is released.
        stack: critics that are warm-started together, as one batched network.

    Raises:
        ValueError: for a value outside its range, or a (σ, T, budget) that leaves T open.
    """

    shards: int = 1000
    schedule: Literal["random", "public_balanced"] = "random"
    batch_size: int = 32
    steps: int | None = 20_000
    n_critic: int = 5
    warm_start: int = 2000
    sigma: float | None = None
    clip: Literal["per_row", "whole"] = "per_row"
    clip_norm: float = 1.0
    gp_weight: float = 10.0
    drift: float = 1e-3
    lr: float = 1e-4
    betas: tuple[float, float] = (0.5, 0.9)
    generator: Literal["resnet", "dcgan"] = "resnet"
    latent_dim: int = 10
    latent: Literal["bernoulli", "normal"] = "bernoulli"
    width: int | None = None
    critic_width: int | None = None
    ema: float = 0.999
    stack: int = 1

    def __post_init__(self) -> None:
        check_types(type(self), vars(self), "method")
        self.betas = (self.betas[0], self.betas[1])  # a config gives a list
        bounds = {
            "[1, inf)": ("shards", "batch_size", "steps", "n_critic", "latent_dim", "width", "critic_width", "stack"),
            "(0, inf)": ("sigma", "clip_norm", "lr"),
            "[0, inf)": ("warm_start", "gp_weight", "drift"),
            "[0, 1)": ("betas", "ema"),
        }
        check_bounds(self, "method", bounds)
        if self.sigma is None and self.steps is None:
            raise ValueError("method.sigma and method.steps are both null: give σ, or T, or both.")
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

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float | None:
        """The paper's count (Theorem A.1, Appendix A): RDP of T B releases, each subsampled without replacement.

        None where the paper has no count: for a public schedule, for rows clipped together, for a run that inherits
        releases of another.
        """
        if len(events) != 1 or self.schedule != "random" or self.clip != "per_row":
            return None
        (event,) = events
        if event.std == 0.0:
            return math.inf
        sigma = event.std / (2.0 * self.clip_norm)
        return wor_rdp(1.0 / self.shards, sigma, event.times * self.batch_size, delta)

    def epsilon_conditional(self, events: Sequence[Event], delta: float) -> tuple[float, str] | None:
        """What T subsampled releases of joint sensitivity 2C sqrt(B) would cost; no bound, see the module."""
        if len(events) != 1 or events[0].std == 0.0 or self.schedule != "random":
            return None
        return memoryless(events[0], delta), "if critics kept nothing of earlier steps (fresh state in each)"

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        B, device, num_classes = self.batch_size, ctx.device, data.num_classes
        config = self._net_config(data)
        g: nn.Module = instantiate(config).to(device)
        adam = torch.optim.Adam(g.parameters(), self.lr, self.betas)
        ema = AveragedModel(g, avg_fn=lambda mean, new, n: mean + max(1.0 - self.ema, 1.0 / (n + 1)) * (new - mean))
        ctx.warm_start(g=g, adam=adam, ema=ema)
        for group in adam.param_groups:  # a restored optimiser brings its parent's settings along
            group.update(lr=self.lr, betas=self.betas)
        release, critics = self._mechanism(data, ctx)
        critic_template = self._critic(data)

        def query(
            x: Tensor, y: Tensor, images: Tensor, labels: Tensor, critic: dict[str, Tensor], coins: torch.Generator
        ) -> tuple[Tensor, dict[str, Tensor]]:
            """Lines 16-22: train the drawn critic on its shard; the gradient of its loss in x, and the critic."""
            D = self.training.stack(critic_template, {name: value[None] for name, value in critic.items()})
            with in_eval_mode(g):  # a private pass must not move the generator's spectral vectors
                self.training.improve(D, [(images, labels)], lambda z, y: g(z[0], y[0])[None], [coins])
            gradient = self.training.image_gradient(D, x[None], y[None])[0]
            return gradient, {name: value[0] for name, value in D.tensors(adam=True).items()}

        for group_number in ctx.steps(critics.groups, phase="warm_start"):
            critics.start(group_number)

        for t in ctx.steps(ctx.limit(release.times), g=g, adam=adam, ema=ema):
            z = draw_latents(self.latent, (B, self.latent_dim), ctx.generator, device)
            y = torch.randint(num_classes, (B,), generator=ctx.generator).to(device)
            x = g(z, y)
            gradient = release(partial(query, x.detach(), y))
            adam.zero_grad()
            x.backward(gradient / B)
            adam.step()
            ema.update_parameters(g)
            if t % 50 == 0:
                ctx.log(gradient_norm=float(gradient.flatten(1).norm(dim=1).mean()))

        return NetGenerator(
            settle_spectral(ema.module),
            config,
            latent_dim=self.latent_dim,
            latent=self.latent,
            num_classes=num_classes,
            image_shape=data.image_shape,
        )

    def _net_config(self, data: PrivateData) -> dict[str, Any]:
        net = NETS[self.generator]
        return {
            "_target_": f"{net.__module__}.{net.__name__}",
            "image_shape": list(data.image_shape),
            "num_classes": data.num_classes,
            "latent_dim": self.latent_dim,
            **({} if self.width is None else {"width": self.width}),
        }

    def _critic(self, data: PrivateData) -> nn.Module:
        width = {} if self.critic_width is None else {"width": self.critic_width}
        return ProjectionCritic(data.image_shape, data.num_classes, **width).to(data.device)

    def _mechanism(self, data: PrivateData, ctx: Context) -> tuple[Mechanism, PrivateState]:
        """T releases with noise of standard deviation 2Cσ in every pixel, and the critics that they question."""
        if self.shards > data.n:
            raise ValueError(f"method.shards: expected K <= N = {data.n} records, got {self.shards}.")
        endless = math.isinf(data.budget.epsilon)
        if endless and self.steps is None:
            raise ValueError("an infinite budget sets no limit on T: give method.steps.")
        C = math.inf if endless and self.sigma is None else self.clip_norm
        rows = (self.batch_size, *data.image_shape)
        bound: Bound
        if self.clip == "per_row":
            bound = PerRow(C=C, shape=rows)
        else:
            bound = Whole(C=C * math.sqrt(self.batch_size), shape=rows)
        iterations = self._warm_start_iterations(ctx)
        net = self._net_config(data)
        sample = OneShard(self.shards, self.schedule)
        critics = data.private_state(
            "critics",
            sample=sample,
            start=partial(
                self.training.warm_start,
                partial(self._critic, data),
                lambda: instantiate(net).to(data.device),
                iterations,
                data.num_classes,
            ),
            identity={
                "training": vars(self.training),
                "iterations": iterations,
                "critic_width": self.critic_width,
                "throw_away_generator": net,
            },
            stack=self.stack,
        )
        release = data.mechanism(
            "image_gradient",
            sample=sample,
            bound=bound,
            times=None if self.steps is None else ctx.limit(self.steps),
            std=None if self.sigma is None else 2.0 * self.clip_norm * self.sigma,
            state=critics,
        )
        return release, critics

    def _warm_start_iterations(self, ctx: Context) -> int:
        """For each critic; a scale's cap holds for all K critics together, of which each gets one at least."""
        if self.warm_start == 0:
            return 0
        return max(1, ctx.limit(self.shards * self.warm_start) // self.shards)

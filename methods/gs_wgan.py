"""GS-WGAN: a generator trained with the sanitised gradients of many Wasserstein critics, each on its own shard of the
records (Chen, Orekondy & Fritz, "GS-WGAN: A Gradient-Sanitized Approach for Learning Differentially Private
Generators", NeurIPS 2020, Algorithm 1).

Guarantees: critics are private state of the mechanism "image_gradient" and never leave it. The mechanism releases T
times the gradient of one critic's loss in B generated images, clipped and noised. The generator, its optimiser and its
moving average are functions of public randomness and of those releases.

A record belongs to one shard. It changes all B rows of each release that draws this shard, so this is one release of
joint sensitivity 2 C sqrt(B). The shard's critic is hidden state that remembers earlier draws, so the secrecy of the
drawn index does not amplify privacy. The proven epsilon treats the indices as known (610.3 at the paper's settings).
The paper's count (9.99) and the count for steps without memory (329.4) are not upper bounds: docs/methods/gs_wgan.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator, config_of, make_net
from dpgen_bench.method import Context
from dpgen_bench.nets.gs_wgan import AveragedGenerator, GSWGANSettings
from dpgen_bench.nets.modes import in_eval_mode
from dpgen_bench.nets.wgan import ProjectionCritic
from dpgen_bench.privacy.accountants.claims import if_memoryless, paper_count, wor_rdp
from dpgen_bench.privacy.bounds import PerRow, Whole
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.sampling import OneShard
from dpgen_bench.privacy.state import PrivateState
from dpgen_bench.utils.validation import Count, expect_shards


@dataclass
class GSWGAN(GSWGANSettings):
    """Algorithm 1. `GSWGANSettings` has the settings that it shares with Algorithm 2.

    Args:
        shards: K, the number of disjoint shards of the records, with one critic for each.
        steps: T, the number of generator steps. None means as many as the budget allows at this sigma.
        clip: "per_row": each image's gradient to norm C (paper); "whole": all B together to C sqrt(B). Both give a
            step the sensitivity 2 C sqrt(B), so the same sigma proves the same epsilon.
        stack: Number of critics that are warm-started together, as one batched network.

    Raises:
        ValueError: For a value outside its range, or if both `sigma` and `steps` are None.
    """

    version = 1  # raise it when the same settings train a different generator
    claimed_relation = "replace_one"  # of `epsilon_claimed`
    speed = (("stack", 1),)  # it changes results by rounding alone, so the identity of each run has this value
    shards: Count
    steps: Count | None
    clip: Literal["per_row", "whole"]
    stack: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect_one_of("sigma", "steps")

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float | None:
        """The paper's count (Theorem A.1, appendix A): RDP of T B releases, each subsampled without replacement.

        None where the paper has no count: for a public schedule, rows clipped together, and inherited releases.
        """
        if self.schedule != "random" or self.clip != "per_row":
            return None
        return paper_count(wor_rdp, events, delta, unit=2.0 * self.clip_norm, per_step=self.batch_size)

    # Epsilon of T subsampled releases, which holds only if critics had no memory (see the module's docstring).
    epsilon_conditional = staticmethod(if_memoryless)

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        sizes = self.generator_sizes
        generator = NetGenerator.build(self.generator_class, data, ctx.device, latent=self.latent, **sizes)
        g, trained = generator.net, AveragedGenerator(generator.net, self)  # line 13
        ctx.warm_start(**trained.states)
        release, critics = self._mechanism(data, ctx)
        critic_template = make_net(config_of(ProjectionCritic, data, width=self.critic_width), ctx.device)

        def query(
            x: Tensor, y: Tensor, images: Tensor, labels: Tensor, critic: dict[str, Tensor], rng: torch.Generator
        ) -> tuple[Tensor, dict[str, Tensor]]:
            """Train the drawn critic on its shard; return the gradient of its loss in x, and its new state."""
            D = self.training.stack(critic_template, {name: value[None] for name, value in critic.items()})
            with in_eval_mode(g):  # so that a pass that sees records does not move the generator's spectral norms
                self.training.improve(D, [(images, labels)], lambda z, y: g(z[0], y[0])[None], [rng])  # lines 16-21
            gradient = self.training.image_gradient(D, x[None], y[None])[0]
            return gradient, {name: value[0] for name, value in D.tensors(adam=True).items()}

        for group_number in ctx.steps(critics.groups, phase="warm_start"):  # lines 2-12
            critics.start(group_number)

        for t in ctx.steps(ctx.limit(release.times), **trained.states):  # line 14
            z, y = ctx.latents(generator, self.batch_size)
            x = g(z, y)
            gradient = release(partial(query, x.detach(), y))  # lines 15-21: sample the subset, train, sanitise
            trained.descend(x, gradient)  # line 22
            if t % 50 == 0:
                ctx.log(gradient_norm=float(gradient.flatten(1).norm(dim=1).mean()))

        return generator.releasing(trained.average())

    def _mechanism(self, data: PrivateData, ctx: Context) -> tuple[Mechanism, PrivateState]:
        """T releases with noise of standard deviation 2 C sigma in every pixel, and the critics that they train."""
        expect_shards("method.shards", self.shards, data.n)
        sample = OneShard(self.shards, self.schedule)  # line 1
        iterations = self.warm_start_iterations(self.shards, ctx.limit)
        net = config_of(self.generator_class, data, **self.generator_sizes)
        critic = config_of(ProjectionCritic, data, width=self.critic_width)
        make_critic, make_generator = (partial(make_net, config, data.device) for config in (critic, net))
        critics = data.private_state(
            "critics",
            sample=sample,
            start=partial(self.training.warm_start, make_critic, make_generator, iterations, data.num_classes),
            identity={
                "training": vars(self.training),
                "iterations": iterations,
                "critic_width": self.critic_width,
                "throw_away_generator": net,
            },
            stack=self.stack,
            keyed_stack=1,
        )
        C, rows = data.budget.clip_norm(self.clip_norm, self.sigma), (self.batch_size, *data.image_shape)
        joint = C * math.sqrt(self.batch_size)
        release = data.mechanism(
            "image_gradient",
            sample=sample,
            bound=PerRow(C=C, shape=rows) if self.clip == "per_row" else Whole(C=joint, shape=rows),
            times=ctx.limit(self.steps),
            std=self.std,
            state=critics,
        )
        return release, critics

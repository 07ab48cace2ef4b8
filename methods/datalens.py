"""DataLens: a generator that follows the signs of its teachers' largest gradients (Wang, Wu, Long, Rimanic, Zhang & Li,
"DataLens: Scalable Privacy Preserving Training via Gradient Compression and Aggregation", CCS 2021).

The records are partitioned into K shards. Every shard has a teacher, a discriminator that sees its shard alone.

    teachers    `d_steps` updates of each teacher on its own records and the B generated images x of the step
    signs       of each teacher's gradient in an image, the direction to a more real one, the k largest coordinates are
                kept, and each is replaced by a random sign whose mean is the coordinate / b, b <= `max_grad`
    release     the sum of all teachers' signs + N(0, s^2 I)
    generator   u = +1 or -1 where the release is above beta K or below -beta K; one step of Adam towards x + lr u
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator, config_of, make_net
from dpgen_bench.method import Context
from dpgen_bench.nets.g_pate import PateGenerator
from dpgen_bench.nets.stack import Stack
from dpgen_bench.nets.teachers import TEACHERS, score_gradients, untrained, update_teachers
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.sampling import EveryShard
from dpgen_bench.privacy.shards import PerShard
from dpgen_bench.utils.upload import upload
from dpgen_bench.utils.validation import Checked, Count, Decay, Fraction, Positive, TwoOrMore, expect_shards

State = dict[str, Tensor]
ORDERS = (1.1, *(float(order) for order in range(2, 200)))  # of Rényi DP in the authors' code


@dataclass
class DataLens(Checked):
    """T steps of teachers, signs and generator.

    Guarantees: teachers are private state of the mechanism "signs". A teacher answers with k signs for each of B
    images, a row of norm sqrt(k B), and a record changes the row of its own teacher alone: a step has the sensitivity
    2 sqrt(k B) under both relations (`PerShard`). Everything else uses releases alone.

    Args:
        teachers: K, the number of shards and of teachers.
        steps: T, the number of updates of the generator; null: as many as the budget allows at this sigma.
        d_steps, first_d_steps: updates of a teacher in a step, and in the first one.
        batch_size: B, the number of generated images, and of a teacher's records, in a step.
        top_k: k, the number of coordinates of an image's gradient that a teacher answers with.
        max_grad: largest scale b of the random signs; it is the largest coordinate of the gradient if that is less.
        sigma: standard deviation s of the noise in each pixel; null: calibrated to the budget.
        threshold: beta, the share of K that the noisy sum needs; otherwise the pixel has no direction.
        lr, betas: settings of Adam, for all networks; lr is also the size of a direction.
        latent_dim, width: of the generator; z is uniform on [0, 1].
        teacher, teacher_width: "conv" (authors) or "dense" (ours), and its number of hidden units.
        stack: number of teachers that are trained together.
    """

    version = 1  # raise it when the same settings train a different generator
    claimed_relation = "replace_one"  # of `epsilon_claimed`
    teachers: Count
    steps: Count | None
    d_steps: Count
    first_d_steps: Count
    batch_size: TwoOrMore  # batch normalisation needs a variance
    top_k: Count
    max_grad: Positive
    sigma: Positive | None
    threshold: Fraction
    lr: Positive
    betas: tuple[Decay, Decay]
    latent_dim: Count
    width: Count
    teacher: Literal["conv", "dense"]
    teacher_width: Count
    stack: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect_one_of("sigma", "steps")

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float | None:
        """The authors' count, by Rényi DP of the Gaussian mechanism and the classical conversion. It is a bound."""
        if len(events) != 1:
            return None
        if events[0].std == 0.0:
            return math.inf
        mu2 = events[0].times * (events[0].sensitivity.replace_one / events[0].std) ** 2
        return min(order * mu2 / 2.0 + math.log(1.0 / delta) / (order - 1.0) for order in ORDERS)

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        B, pixels = self.batch_size, math.prod(data.image_shape)
        k = min(self.top_k, pixels)
        sizes = {"latent_dim": self.latent_dim, "width": self.width}
        expect_shards("method.teachers", self.teachers, data.n)
        generator = NetGenerator.build(PateGenerator, data, ctx.device, latent="uniform", **sizes)
        G = generator.net
        adam = torch.optim.Adam(G.parameters(), self.lr, self.betas)
        teacher = config_of(TEACHERS[self.teacher], data, width=self.teacher_width)
        make, sample = partial(make_net, teacher, data.device), EveryShard(self.teachers)
        release = data.mechanism(
            "signs",
            sample=sample,
            bound=PerShard(C=math.sqrt(k * B), shape=(B, pixels)),
            times=ctx.limit(self.steps),
            std=self.sigma,
            state=data.private_state("teachers", sample=sample, **untrained(make, teacher, self.stack)),
        )
        template = make()
        for t in ctx.steps(ctx.limit(release.times), generator=G, adam=adam):
            z, y = ctx.latents(generator, B)
            x = G(z, y)
            votes = release(partial(self._signs, template, self.d_steps if t else self.first_d_steps, k, x.detach(), y))
            direction = self.lr * votes.sign() * (votes.abs() > self.threshold * self.teachers)
            adam.zero_grad()
            x.backward(-direction.reshape(x.shape))  # half of the gradient of |G(z) - (x + lr u)|^2
            adam.step()
            if t % 10 == 0:
                ctx.log(share_of_agreement=float((direction != 0).float().mean()))
        return generator

    def _signs(
        self, template: nn.Module, updates: int, k: int, x: Tensor, y: Tensor, shards: Any, states: State, rngs: Any
    ) -> tuple[Tensor, State]:
        """Train the teachers of some shards; return their signs [g, B, pixels] for the images x, and their states."""
        T = Stack(template, states, lr=self.lr, betas=self.betas)
        for _ in range(updates):
            update_teachers(T, shards, rngs, x, y, self.batch_size)
        g = score_gradients(T, x, y).nan_to_num(0.0)
        b = g.abs().amax(dim=2, keepdim=True).clamp(1e-30, self.max_grad)
        uniform = upload(torch.stack([torch.rand(g[0].shape, generator=rng) for rng in rngs]), g.device)
        signs = torch.where(uniform < 0.5 + 0.5 * g / b, 1.0, -1.0)
        largest = torch.zeros_like(g).scatter_(2, g.abs().topk(k, dim=2).indices, 1.0)
        return signs * largest, T.tensors(adam=True)

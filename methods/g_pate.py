"""G-PATE: a generator that follows directions for which teachers vote (Long et al., "G-PATE: Scalable Differentially
Private Data Generator via Private Aggregation of Teacher Discriminators", NeurIPS 2021).

The records are partitioned into K shards. Every shard has a teacher, a discriminator that sees its shard alone.

    teachers    one update of each teacher on its own records and the B generated images x of the step
    votes       each teacher's gradient in an image, the direction to a more real one, is projected to d random
                dimensions, clipped to [-c, c] and voted for by its bin, one of 10 in each dimension
    release     the histogram of all votes + N(0, s^2 I)
    generator   the bin with most votes in each dimension, if they are enough, projected back to a direction u of the
                image; one step of Adam towards x + u

The authors release the winners of Confident-GNMax and count with the true votes. That count depends on the records, so
it is private itself. Here the whole histogram is released, and all that follows is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator, config_of, make_net
from dpgen_bench.method import Context
from dpgen_bench.nets.g_pate import PateGenerator
from dpgen_bench.nets.stack import Stack
from dpgen_bench.nets.teachers import TEACHERS, score_gradients, untrained, update_teachers
from dpgen_bench.privacy.sampling import EveryShard
from dpgen_bench.privacy.votes import Votes
from dpgen_bench.utils.upload import upload
from dpgen_bench.utils.validation import Checked, Count, Decay, Fraction, Positive, TwoOrMore, expect_shards


@dataclass
class GPATE(Checked):
    """T steps of teachers, votes and generator.

    Guarantees: teachers are private state of the mechanism "votes" and never leave it. A record changes the teacher of
    its own shard, which casts B d votes in each step. A step therefore has the sensitivity sqrt(2 B d) under both
    relations (`Votes` of shards), and T steps are T Gaussian mechanisms. Everything else uses releases alone.

    Args:
        teachers: K, the number of shards and of teachers.
        steps: T, the number of updates of the generator; null: as many as the budget allows at this sigma.
        batch_size: B, the number of generated images, and of a teacher's records, in a step.
        sigma: standard deviation s of the noise on each count of votes; null: calibrated to the budget.
        dims, bins: d, the dimensions to which a gradient is projected, and the bins of each.
        clip: c, to which projected gradients are clipped.
        threshold: share of the K votes that the noisy winner needs; otherwise the dimension has no direction.
        lr, betas: settings of Adam, for all networks.
        latent_dim: dimension of z, uniform on [0, 1].
        width: of the generator.
        teacher, teacher_width: "conv" (authors) or "dense" (ours), and its number of hidden units.
        stack: number of teachers that are trained together, as one batched network.
    """

    version = 1  # raise it when the same settings train a different generator
    teachers: Count
    steps: Count | None
    batch_size: TwoOrMore  # batch normalisation needs a variance
    sigma: Positive | None
    dims: Count
    bins: TwoOrMore  # with one bin, votes would not depend on gradients
    clip: Positive
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

    def expect_data(self, class_names: Sequence[str], image_shape: Sequence[int]) -> None:
        pixels = math.prod(image_shape)
        if self.dims > pixels:
            raise ValueError(f"method.dims: expected d <= {pixels}, the pixels of an image, got {self.dims}; lower it.")

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        B, d, pixels = self.batch_size, self.dims, math.prod(data.image_shape)
        self.expect_data(data.class_names, data.image_shape)
        sizes = {"latent_dim": self.latent_dim, "width": self.width}
        expect_shards("method.teachers", self.teachers, data.n)
        generator = NetGenerator.build(PateGenerator, data, ctx.device, latent="uniform", **sizes)
        G = generator.net
        adam = torch.optim.Adam(G.parameters(), self.lr, self.betas)
        teacher = config_of(TEACHERS[self.teacher], data, width=self.teacher_width)
        make, sample = partial(make_net, teacher, data.device), EveryShard(self.teachers)
        release = data.mechanism(
            "votes",
            sample=sample,
            bound=Votes(bins=B * d * self.bins, k=B * d, voters="shards"),
            times=ctx.limit(self.steps),
            std=self.sigma,
            state=data.private_state("teachers", sample=sample, **untrained(make, teacher, self.stack)),
        )
        template = make()
        centres = self.clip * (2.0 * torch.arange(self.bins, device=ctx.device) + 1.0 - self.bins) / self.bins
        for t in ctx.steps(ctx.limit(release.times), generator=G, adam=adam):
            z, y = ctx.latents(generator, B)
            x = G(z, y)
            basis = upload(torch.randn(B, pixels, d, generator=ctx.generator), x.device) / math.sqrt(d)
            histogram = release(partial(self._votes, template, x.detach(), y, basis)).reshape(B, d, self.bins)
            most, winner = histogram.max(dim=2)
            agreed = most >= self.threshold * self.teachers
            direction = (basis @ torch.where(agreed, centres[winner], 0.0)[:, :, None]).reshape(x.shape)
            adam.zero_grad()
            x.backward(-direction)  # half of the gradient of |G(z) - (x + u)|^2
            adam.step()
            if t % 10 == 0:
                ctx.log(share_of_agreement=float(agreed.float().mean()))
        return generator

    def _votes(
        self,
        template: nn.Module,
        x: Tensor,
        y: Tensor,
        basis: Tensor,
        shards: Sequence[tuple[Tensor, Tensor]],
        states: dict[str, Tensor],
        rngs: Sequence[torch.Generator],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Train the teachers of some shards; return each one's votes on the images x [B, ...], and their states."""
        T = Stack(template, states, lr=self.lr, betas=self.betas)
        update_teachers(T, shards, rngs, x, y, self.batch_size)
        projected = torch.einsum("gbp,bpd->gbd", score_gradients(T, x, y), basis).nan_to_num(0.0)
        place = ((projected / self.clip + 1.0) * (0.5 * self.bins)).clamp(0, self.bins - 1).long()
        first = self.bins * torch.arange(place[0].numel(), device=place.device)
        return place.flatten(1) + first, T.tensors(adam=True)

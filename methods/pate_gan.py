"""PATE-GAN: a student discriminator that learns from noisy votes of teachers (Jordon, Yoon & van der Schaar, "PATE-GAN:
Generating Synthetic Data with Differential Privacy Guarantees", ICLR 2019, Algorithm 1), for labelled images.

The records are partitioned into K shards. Every shard has a teacher, a discriminator that sees its shard alone.

    teachers    n_T updates of each teacher on n of its own records and n generated images
    votes       each teacher says which of m generated images are real; the count of every image is released with
                noise N(0, s^2)
    student     n_S passes over these images, with labels from the noisy counts
    generator   n_G updates against the student

The paper adds Laplace noise and counts with the true votes. Here the noise is Gaussian, for any votes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator, config_of, make_net
from dpgen_bench.method import Context
from dpgen_bench.nets.code_generator import CodeGenerator
from dpgen_bench.nets.stack import Stack
from dpgen_bench.nets.teachers import DenseTeacher, untrained, update_teachers
from dpgen_bench.privacy.sampling import EveryShard
from dpgen_bench.privacy.votes import Votes
from dpgen_bench.utils.upload import upload
from dpgen_bench.utils.validation import Checked, Count, Decay, NonNegative, Positive, TwoOrMore, expect_shards

State = dict[str, Tensor]


@dataclass
class PATEGAN(Checked):
    """T rounds of teachers, votes, student and generator.

    Guarantees: teachers are private state of the mechanism "votes" and never leave it. A record changes the teacher of
    its own shard alone, which votes on m images in a round: the sensitivity of a round is sqrt(m) under both relations
    (`Votes` of shards). Everything else uses releases alone.

    Args:
        teachers, rounds: K, the number of shards and of teachers, and T.
        batch_size: n, the number of images, and of records, in an update.
        votes: m, the number of images on which each teacher votes in a round.
        n_teacher, n_student, n_generator: n_T, n_S and n_G.
        sigma: standard deviation s of the noise on a count of votes; null: calibrated to the budget.
        lr, lr_d, betas: settings of Adam; lr is that of the generator, lr_d of teachers and student.
        vote: "sign" (paper): an image is real if a teacher's logit is above 0; "median" (ours): above the teacher's
            median for images with the same label in this round.
        target: "majority" (paper): the student learns by cross-entropy whether the noisy count is above K/2; "share"
            (ours): by squared error the noisy share of the votes, so that noise has the mean 0 in its gradient.
        explore: standard deviation of the noise on the images of a vote, in each square of `pool` (paper: 0).
        latent_dim, hidden, student_width, teacher_width: dimension of z ~ N(0, I), and widths of the networks.
        pool: side of the squares over which teachers and student average pixels.
        stack: number of teachers that are trained together, as one batched network.
    """

    version = 1  # raise it when the same settings train a different generator
    teachers: Count
    rounds: Count
    batch_size: TwoOrMore  # batch normalisation needs a variance
    votes: TwoOrMore
    n_teacher: Count
    n_student: Count
    n_generator: Count
    sigma: Positive | None
    lr: Positive
    lr_d: Positive
    betas: tuple[Decay, Decay]
    vote: Literal["sign", "median"]
    target: Literal["majority", "share"]
    explore: NonNegative
    latent_dim: Count
    hidden: Count
    student_width: Count
    teacher_width: Count
    pool: Count
    stack: Count

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        n, m, K = self.batch_size, self.votes, self.teachers
        expect_shards("method.teachers", K, data.n)
        generator = NetGenerator.build(CodeGenerator, data, ctx.device, latent_dim=self.latent_dim, hidden=self.hidden)
        student = config_of(DenseTeacher, data, width=self.student_width, pool=self.pool)
        G, S = generator.net, make_net(student, ctx.device)
        adam_G = torch.optim.Adam(G.parameters(), self.lr, self.betas)
        adam_S = torch.optim.Adam(S.parameters(), self.lr_d, self.betas)
        teacher = config_of(DenseTeacher, data, width=self.teacher_width, pool=self.pool)
        make, sample = partial(make_net, teacher, data.device), EveryShard(K)
        release = data.mechanism(
            "votes",
            sample=sample,
            bound=Votes(bins=m, k=m, voters="shards"),
            times=ctx.limit(self.rounds),
            std=self.sigma,
            state=data.private_state("teachers", sample=sample, **untrained(make, teacher, self.stack)),
        )
        template = make()
        for t in ctx.steps(release.times, generator=G, student=S, adam_generator=adam_G, adam_student=adam_S):
            with torch.no_grad():
                fakes = [(G(z, y), y) for z, y in (ctx.latents(generator, n) for _ in range(self.n_teacher))]
                z, y = ctx.latents(generator, m)
                x = G(z, y)
                noise = upload(torch.randn(F.avg_pool2d(x, self.pool).shape, generator=ctx.generator), x.device)
                x += self.explore * F.interpolate(noise, scale_factor=self.pool)
            share = release(partial(self._votes, template, fakes, x, y)) / K
            target = share if self.target == "share" else (share > 0.5).float()
            error = F.mse_loss if self.target == "share" else F.binary_cross_entropy
            for _ in range(self.n_student):
                for batch in upload(torch.randperm(m, generator=ctx.generator), x.device).split(n):
                    loss = error(torch.sigmoid(S(x[batch], y[batch])), target[batch])
                    adam_S.zero_grad()
                    loss.backward()
                    adam_S.step()
            for _ in range(self.n_generator):
                z, y = ctx.latents(generator, n)
                adam_G.zero_grad()
                F.logsigmoid(-S(G(z, y), y)).mean().backward()  # log(1 - S(G(z)))
                adam_G.step()
            if t % 10 == 0:
                ctx.log(share_of_real=float(share.mean()), student_loss=float(loss.detach()))
        return generator

    def _votes(
        self, template: nn.Module, fakes: Sequence[Any], x: Tensor, y: Tensor, shards: Any, states: State, rngs: Any
    ) -> tuple[Tensor, State]:
        """Train the teachers of some shards; return each one's votes for the images x, and their states."""
        T = Stack(template, states, lr=self.lr_d, betas=self.betas)
        for fake, labels in fakes:
            update_teachers(T, shards, rngs, fake, labels, self.batch_size)
        with torch.no_grad():
            logits = T.on_same(x, y)
        least = torch.zeros_like(logits)
        if self.vote == "median":
            for label in range(states["label.weight"].shape[1]):  # [g, classes, width]
                own = torch.where(y == label, logits, torch.nan)
                least = torch.where(y == label, own.nanmedian(dim=1, keepdim=True).values, least)
        return torch.where(logits > least, torch.arange(len(y), device=y.device), -1), T.tensors(adam=True)

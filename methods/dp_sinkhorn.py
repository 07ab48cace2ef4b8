"""DP-Sinkhorn: a generator trained on a semi-debiased Sinkhorn loss, whose gradient in the images is clipped and noised
(Cao, Bie, Vahdat, Fidler & Kreis, "Don't Generate Me", NeurIPS 2021, Algorithm 1, and its earlier version).

Guarantees: only the mechanism "cross_group" reads records. It releases T times the gradient of the loss, clipped and
noised. The debiasing group, the generator and the optimiser are functions of public randomness and of those releases.

The n rows of a step depend on the same secret batch, so a step is one release of joint sensitivity 2 Delta sqrt(n), not
n releases as the final paper counts (docs/methods/dp_sinkhorn.md). With `clip: whole` the paper's count is sound.
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
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.biggan import BigGANGenerator
from dpgen_bench.nets.conv_generator import ConvGenerator
from dpgen_bench.nets.sinkhorn_loss import SinkhornLoss, assign_gradient
from dpgen_bench.nets.transport import Cost, Transport
from dpgen_bench.privacy.accountants.claims import classical_rdp, paper_count
from dpgen_bench.privacy.bounds import PerRow, Whole, clip_rows
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.utils.compiled import network
from dpgen_bench.utils.validation import Checked, Count, Decay, Fraction, NonNegative, Positive

NETS: dict[str, type[nn.Module]] = {"dcgan": ConvGenerator, "biggan": BigGANGenerator}


@dataclass
class DPSinkhorn(Checked):
    """Algorithm 1. conf/method/dp_sinkhorn.yaml says where each setting stands in the paper.

    Args:
        batch_size: n, images of the cross group in a step, and the expected number of records: q = n / N.
        p: The debiasing group has n' = floor(n p) images; 0 is the biased Sinkhorn loss, 1 the debiased one.
        cost, m: c(x, y) is "l1+l2" |x-y|_2^2 + m |x-y|_1, "l2" |x-y|_2^2, or "l1" |x-y|_1.
        lam, alpha_c: lambda, the entropic regularisation in units of the cost, and the weight of the class.
        exponent, scaling: Annealing towards lambda, see `dpgen_bench.nets.transport`.
        debias_labels: Labels of the debiasing group: "fresh", or "repeated" from the first n' of the cross group.
        perturb: Clip and noise the gradient in the "image"s, or in the "parameter"s (always as a whole).
        clip: "per_row": each image's gradient to norm Delta (final paper); "whole": all n together (earlier version).
        clip_norm, sigma: Delta, and sigma of the noise N(0, (2 Delta sigma)^2 I). If sigma is None, it is calibrated
            from `steps` to the budget; an infinite budget means no clipping and no noise.
        steps: T. None means as many as the budget allows at this sigma.
        lr, betas, weight_decay: Settings of Adam. label_dim, activation: Settings of the generator "dcgan" alone.
        latent_dim, width: Dimension of z, uniform on [0, 1], and width of the generator's layers.
    """

    version = 1  # raise it when the same settings train a different generator
    claimed_relation = "add_remove"  # of `epsilon_claimed`
    batch_size: Count
    p: Fraction
    cost: Literal["l1+l2", "l2", "l1"]
    m: NonNegative
    lam: float
    exponent: float
    scaling: float
    alpha_c: NonNegative
    debias_labels: Literal["fresh", "repeated"]
    perturb: Literal["image", "parameter"]
    clip: Literal["per_row", "whole"]
    clip_norm: Positive
    sigma: Positive | None
    steps: Count | None
    lr: Positive
    betas: tuple[Decay, Decay]
    weight_decay: NonNegative
    generator: Literal["dcgan", "biggan"]
    latent_dim: Count
    label_dim: Count
    activation: Literal["relu", "leaky_relu"]
    width: Count | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect_one_of("sigma", "steps")
        weights = {"l1+l2": (1.0, self.m), "l2": (1.0, 0.0), "l1": (0.0, 1.0)}[self.cost]
        self.transport = Transport(Cost(*weights), self.lam, self.exponent, self.scaling)

    @property
    def debiasing(self) -> int:
        """n' = floor(n p). The product is rounded first, because 100 * 0.29 is 28.999999999999996."""
        return math.floor(round(self.batch_size * self.p, 9))

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float | None:
        """The papers' count (section 4.3, appendix D.4): TF-privacy's RDP, for each row where rows are clipped."""
        rows = self.batch_size if self.clip == "per_row" and self.perturb == "image" else 1
        return paper_count(classical_rdp, events, delta, unit=2.0 * self.clip_norm, per_step=rows)

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        n, n_ = self.batch_size, self.debiasing
        of_dcgan = {"label_dim": self.label_dim, "activation": self.activation} if self.generator == "dcgan" else {}
        sizes: dict[str, Any] = {"latent_dim": self.latent_dim, "width": self.width, **of_dcgan}
        generator = NetGenerator.build(NETS[self.generator], data, ctx.device, latent="uniform", **sizes)
        g, theta, images = generator.net, list(generator.net.parameters()), network(generator.net)
        adam = torch.optim.Adam(theta, self.lr, self.betas, weight_decay=self.weight_decay)
        ctx.warm_start(g=g, adam=adam)
        release = self._mechanism(data, ctx, sum(each.numel() for each in theta))
        loss = SinkhornLoss(self.transport, self.alpha_c, data.num_classes, data.image_shape, n)

        for t in ctx.steps(ctx.limit(release.times), g=g, adam=adam):
            z, l_x = ctx.latents(generator, n + n_)  # sample the latents Z and the labels L_x
            if self.debias_labels == "repeated":
                l_x[n:] = l_x[:n_]
            X = images(z, l_x)
            x = loss.points(X.detach(), l_x)
            G_X, value = loss.gradient_without_records(x)
            adam.zero_grad()
            if self.perturb == "image":
                # Rows 0..n-1 depend on a sampled batch Y: clip and noise them. The n' rows after them are only clipped.
                G_X[:n] = release(partial(loss.gradient, G_X[:n].clone(), x[:n]))
                G_X[n:] = self._clipped(G_X[n:], release.bound.C)
                X.backward(G_X)  # G_theta = backprop(X, theta, G_X)
            else:
                assign_gradient(theta, release(partial(loss.parameter_gradient, theta, X, G_X, x[:n])))
            adam.step()  # theta = theta - alpha Adam(G_theta)
            if t % 50 == 0:
                ctx.log(transport_among_generated=float(value))
        return generator

    def _mechanism(self, data: PrivateData, ctx: Context, num_parameters: int) -> Mechanism:
        """T releases with noise of standard deviation 2 Delta sigma in every entry."""
        if self.batch_size > data.n:
            raise ValueError(f"method.batch_size: expected n <= N = {data.n} records, got {self.batch_size}.")
        C = data.budget.clip_norm(self.clip_norm, self.sigma)
        shape = (num_parameters,) if self.perturb == "parameter" else (self.batch_size, *data.image_shape)
        per_row = self.perturb == "image" and self.clip == "per_row"
        return data.mechanism(
            "cross_group",
            sample=Poisson(self.batch_size / data.n),
            bound=PerRow(C=C, shape=shape) if per_row else Whole(C=C, shape=shape),
            times=ctx.limit(self.steps),
            std=None if self.sigma is None else 2.0 * self.clip_norm * self.sigma,
        )

    def _clipped(self, G_X: Tensor, C: float) -> Tensor:
        """The debiasing group's rows [n', *shape], clipped to C like the others, without noise."""
        return clip_rows(G_X[None], C)[0] if self.clip == "whole" and len(G_X) else clip_rows(G_X, C)

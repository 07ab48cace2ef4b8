"""DP-CGAN: a conditional GAN of two small perceptrons, whose discriminator is trained by DP-SGD (Torkzadehmahani,
Kairouz & Paten, "DP-CGAN: Differentially Private Synthetic Data and Label Generation", CVPR Workshops 2019).

    line of the algorithm                                                    here
    gradients of the loss on real records, clipped, summed, plus noise       the release, with noise N(0, sigma^2 C^2 I)
    gradients of the loss on generated images, clipped, without noise        public rows of the same release
    D: a step of SGD with their sum / B; G: a step of Adam through D         post-processing

Guarantees: only the mechanism "discriminator" reads records. It releases T noisy sums of clipped per-record gradients.
Labels of generated images are drawn uniformly, so that no label of a record is used anywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.dp_cgan import MLPDiscriminator, MLPGenerator
from dpgen_bench.privacy.accountants.claims import classical_rdp, paper_count
from dpgen_bench.privacy.bounds import PerRecordGradient
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.utils.validation import Checked, Count, Decay, Positive

# The orders of Rényi DP in the authors' script.
ORDERS = (*(1.0 + x / 10.0 for x in range(1, 100)), *(float(order) for order in range(12, 64)))


@dataclass
class DPCGAN(Checked):
    """Training of D and G in turn. docs/methods/dp_cgan.md lists the differences from the authors' code.

    Args:
        batch_size: B, the expected number of records in a step, and the number of generated images.
        clip_norm: C, the bound on the norm of each row's gradient.
        clip: "joint": the gradient in all parameters of D together has norm at most C. "per_tensor": its part in each
            of the four tensors has, as in the released code, so that its norm is at most 2 C.
        sigma: The noise has standard deviation sigma C in each coordinate of the sum. If None, it is calibrated from
            `steps` to the budget; an infinite budget means no clipping and no noise.
        steps: T, the number of steps of D and of G. None means the largest number that the budget allows.
        lr_d, lr_d_end, lr_d_steps: The learning rate of SGD for D falls linearly from lr_d to lr_d_end in this number
            of steps, and is constant from then on.
        lr_g, betas: Settings of Adam for G.
        hidden: Width of both networks.
        latent_dim: Dimension of z.

    Raises:
        ValueError: For a value outside its range, or if both `sigma` and `steps` are None.
    """

    version = 1  # raise it when the same settings train a different generator
    claimed_relation = "add_remove"  # of `epsilon_claimed`
    batch_size: Count
    clip_norm: Positive
    clip: Literal["joint", "per_tensor"]
    sigma: Positive | None
    steps: Count | None
    lr_d: Positive
    lr_d_end: Positive
    lr_d_steps: Count
    lr_g: Positive
    betas: tuple[Decay, Decay]
    hidden: Count
    latent_dim: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect_one_of("sigma", "steps")

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float | None:
        """The authors' count, by classical RDP with sigma C in place of sigma. It is a bound only for C = 1 and a joint
        clip: with C = 1.1 it assumes more noise than there is."""
        return paper_count(partial(classical_rdp, orders=ORDERS), events, delta, unit=1.0)

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        B = self.batch_size
        sizes = {"latent_dim": self.latent_dim, "hidden": self.hidden}
        generator = NetGenerator.build(MLPGenerator, data, ctx.device, latent="uniform", **sizes)
        G = generator.net
        D = MLPDiscriminator(data.image_shape, data.num_classes, self.hidden).to(ctx.device)
        opt_g = torch.optim.Adam(G.parameters(), self.lr_g, self.betas)
        opt_d = torch.optim.SGD(D.parameters(), self.lr_d)
        ctx.warm_start(G=G, D=D, opt_g=opt_g, opt_d=opt_d)

        C = data.budget.clip_norm(self.clip_norm, self.sigma)
        release = data.mechanism(
            "discriminator",
            sample=Poisson(min(1.0, B / data.n)),
            bound=PerRecordGradient(C=C, module=D, public_rows=B, clip=self.clip),
            times=ctx.limit(self.steps),
            std=None if self.sigma is None else self.sigma * self.clip_norm,
        )

        def d_losses(x: Tensor, y: Tensor, fake: Tensor) -> Tensor:  # for each row: records are 1, generated images 0
            return F.binary_cross_entropy_with_logits(D(x, y), 1.0 - fake.to(x.dtype), reduction="none")

        for t in ctx.steps(ctx.limit(release.times), G=G, D=D, opt_g=opt_g, opt_d=opt_d):
            z, y = ctx.latents(generator, B)
            x = G(z, y)
            gradient = release(d_losses, public=(x.detach(), y))
            for name, parameter in D.named_parameters():
                parameter.grad = gradient[name] / B
            for group in opt_d.param_groups:
                group["lr"] = self.lr_d + (self.lr_d_end - self.lr_d) * min(1.0, t / self.lr_d_steps)
            opt_d.step()

            scores = D(x, y)  # of the same images, by the updated D
            opt_g.zero_grad()
            F.softplus(-scores).mean().backward(inputs=list(G.parameters()))
            opt_g.step()
            if t % 100 == 0:
                ctx.log(d_accuracy_on_fakes=(scores < 0).float().mean().item())

        return generator

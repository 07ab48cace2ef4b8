"""DPGAN: a conditional GAN whose discriminator is trained by DP-SGD (Bie, Kamath & Zhang, "Private GANs,
Revisited", TMLR 2023, Algorithm 1), with the paper's fixed or adaptive discriminator step frequency.

Guarantees: only the mechanism "discriminator" reads training records. It releases T noisy sums of clipped per-record
gradients. The discriminator, the generator, the optimisers and the step frequency are post-processing of those releases
and of public randomness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.dpgan import DiscriminatorNet, GeneratorNet
from dpgen_bench.privacy.accountants.claims import opacus_epsilon
from dpgen_bench.privacy.bounds import PerRecordGradient
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.training.frequency import StepFrequency
from dpgen_bench.utils.compiled import network
from dpgen_bench.utils.validation import Checked, Count, Decay, Fraction, Positive


@dataclass
class DPGAN(Checked):
    """Algorithm 1, `TrainDPGAN`. docs/methods/dpgan.md lists the differences from the authors' code.

    Args:
        batch_size: B, the expected number of records in a discriminator step.
        clip_norm: C, the bound on the L2 norm of each row's gradient, all parameters of D together.
        sigma: The noise multiplier. If None, it is calibrated from `steps` to the budget; an infinite budget means the
            non-private GAN, without clipping and noise.
        steps: T, the number of D steps. None means the largest number that the budget allows at this sigma.
        n_d: n_D, the number of D steps for each G step, or "adaptive".
        beta, threshold: beta and d of the adaptive frequency (section 6.2). The logged average uses beta, too.
        lr_d, lr_g, betas: Learning rates of Adam for D and G, and its (beta_1, beta_2) for both.
        d_d, d_g: Widths of D (d_D of Table 4; even, because half sees the image and half the label) and of G.
        latent_dim: Dimension of z ~ N(0, I).
        microbatch: Number of rows whose gradients are in memory at once; None means all. It does not change the sum.

    Raises:
        ValueError: For a value outside its range, or if both `sigma` and `steps` are None.
    """

    version = 1  # raise it when the same settings train a different generator
    claimed_relation = "add_remove"  # of `epsilon_claimed`
    batch_size: Count
    clip_norm: Positive
    sigma: Positive | None
    steps: Count | None
    n_d: Count | Literal["adaptive"]
    beta: Decay
    threshold: Fraction
    lr_d: Positive
    lr_g: Positive
    betas: tuple[Decay, Decay]
    d_d: Count
    d_g: Count
    latent_dim: Count
    microbatch: Count | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect_one_of("sigma", "steps")
        if self.d_d % 2:
            raise ValueError(f"method.d_d: expected an even width (half image, half label), got {self.d_d}.")

    def sampling_rate(self, n: int) -> float:
        """q for n records: 1/ceil(n/B), as in Opacus's data loader and so in the authors' code (text: B/n)."""
        return 1.0 / math.ceil(n / self.batch_size)

    def fake_batch_size(self, n: int) -> int:
        """b = round(q n), the number of generated images in a D step, whose gradients are divided by 2 b."""
        return round(self.sampling_rate(n) * n)

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float | None:
        """The paper's count: Opacus's RDP accountant under add/remove (section 3). It is sound for Algorithm 1."""
        return opacus_epsilon(events, delta)

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        q, b = self.sampling_rate(data.n), self.fake_batch_size(data.n)
        generator = NetGenerator.build(GeneratorNet, data, ctx.device, latent_dim=self.latent_dim, width=self.d_g)
        G, images = generator.net, network(generator.net)
        D = DiscriminatorNet(data.image_shape, data.num_classes, self.d_d).to(ctx.device)
        opt_g = torch.optim.Adam(G.parameters(), self.lr_g, self.betas)
        opt_d = torch.optim.Adam(D.parameters(), self.lr_d, self.betas)
        ctx.warm_start(G=G, D=D, opt_g=opt_g, opt_d=opt_d)
        frequency = StepFrequency(self.n_d, self.beta, self.threshold)

        C = data.budget.clip_norm(self.clip_norm, self.sigma)
        release = data.mechanism(
            "discriminator",
            sample=Poisson(q),
            bound=PerRecordGradient(C=C, module=D, microbatch=self.microbatch, public_rows=b, pure=True),
            times=ctx.limit(self.steps),
            std=None if self.sigma is None else self.sigma * self.clip_norm,  # line 7: N(0, sigma^2 C^2 I) on the sum
        )

        def d_losses(x: Tensor, y: Tensor, fake: Tensor) -> Tensor:  # line 6, for each row
            return F.binary_cross_entropy_with_logits(D(x, y), 1.0 - fake.to(x.dtype), reduction="none")

        for _ in ctx.steps(ctx.limit(release.times), G=G, D=D, opt_g=opt_g, opt_d=opt_d, frequency=frequency):
            z, y = ctx.latents(generator, b)  # line 5
            with torch.no_grad():
                fakes = images(z, y)
            gradient = release(d_losses, public=(fakes, y))  # lines 4, 6
            for name, parameter in D.named_parameters():
                parameter.grad = gradient[name] / (2 * b)  # line 7
            opt_d.step()  # line 8

            if frequency.after_d_step():  # line 10: n_D divides t
                z, y = ctx.latents(generator, self.batch_size)
                # D's accuracy on new fakes drives the adaptive frequency. No layer differs between train and eval mode.
                with torch.no_grad():
                    accuracy = (D(G(z, y), y) < 0).float().mean().item()
                ema = frequency.before_g_step(accuracy)
                z, y = ctx.latents(generator, b)  # line 11
                loss = F.softplus(-D(G(z, y), y)).mean()  # line 12: -log D
                opt_g.zero_grad()
                loss.backward(inputs=list(G.parameters()))
                opt_g.step()  # line 13
                ctx.log(d_accuracy_on_fakes=accuracy, d_accuracy_ema=ema, n_d=frequency.n_d)
                frequency.after_g_step()

        return generator

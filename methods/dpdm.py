"""DPDM: a diffusion model trained by DP-SGD with noise multiplicity (Dockhorn, Cao, Vahdat & Kreis, "Differentially
Private Diffusion Models", TMLR 2023), written from the paper.

Guarantees: only the mechanism "denoiser" reads training records. It releases T noisy sums of clipped gradients, one
gradient for each record of a draw. The K noise levels of a record are averaged inside its loss, before clipping, so K
changes no sensitivity. The network, its moving average and all samples are post-processing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.edm import EDMSampler, Sampler
from dpgen_bench.privacy.accountants.claims import opacus_epsilon
from dpgen_bench.privacy.bounds import PerRecordGradient
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.record_rng import RecordRng
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.utils.validation import Checked, Count, Decay, Finite, Fraction, NonNegative, Positive


@dataclass
class DPDM(Checked):
    """DP-SGD on the loss of a denoiser. docs/methods/dpdm.md lists the differences from the paper.

    Args:
        batch_size: B, the expected number of records in a step, up to rounding of the rate.
        clip_norm: C, the bound on the L2 norm of a record's gradient, all parameters together.
        sigma: The noise multiplier. If None, it is calibrated from `steps` to the budget.
        steps: T. None means the largest number that the budget allows at this sigma.
        noise_levels: K, the number of noise levels (and noises) that are averaged inside a record's loss.
        p_mean, p_std: Noise levels are exp(N(p_mean, p_std^2)).
        label_dropout: Probability with which a copy of a record has no class, for guidance.
        lr: Learning rate of Adam.
        ema: Decay of the moving average of the parameters, which is released.
        width, multipliers, blocks, patch, embedding: Sizes of the U-Net.
        sampler, sampler_steps, guidance, churn: Those of `EDMSampler`.
        microbatch: Number of records whose K noisy images are in memory at once. It does not change the sum.

    Raises:
        ValueError: For a value outside its range, or if both `sigma` and `steps` are None.
    """

    version = 1  # raise it when the same settings train a different generator
    claimed_relation = "add_remove"  # of `epsilon_claimed`
    batch_size: Count
    clip_norm: Positive
    sigma: Positive | None
    steps: Count | None
    noise_levels: Count
    p_mean: Finite
    p_std: Positive
    label_dropout: Fraction
    lr: Positive
    ema: Decay
    width: Count
    multipliers: tuple[Count, ...]
    blocks: Count
    patch: Count
    embedding: Count
    sampler: Sampler
    sampler_steps: Count
    guidance: Finite
    churn: tuple[NonNegative, NonNegative, NonNegative, NonNegative]
    microbatch: Count | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect_one_of("sigma", "steps")
        if not self.multipliers:
            raise ValueError(
                "method.multipliers: expected a number for each resolution, got none; [1] is one resolution."
            )
        if self.churn[1] > self.churn[2]:
            raise ValueError(f"method.churn: expected S_min <= S_max, got {self.churn[1]:g} > {self.churn[2]:g}.")

    def sampling_rate(self, n: int) -> float:
        """q for n records: 1/ceil(n/B), as in Opacus's data loader."""
        return 1.0 / math.ceil(n / self.batch_size)

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float | None:
        """The paper's count: Opacus's RDP accountant under add/remove. It is sound."""
        return opacus_epsilon(events, delta)

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        generator = NetGenerator.build(
            EDMSampler,
            data,
            ctx.device,
            latent_dim=EDMSampler.latent_dim_of(data.image_shape, self.sampler, self.sampler_steps),
            sampler=self.sampler,
            sampler_steps=self.sampler_steps,
            guidance=self.guidance,
            churn=list(self.churn),
            width=self.width,
            multipliers=list(self.multipliers),
            blocks=self.blocks,
            patch=self.patch,
            embedding=self.embedding,
        )
        assert isinstance(generator.net, EDMSampler)
        D, no_class = generator.net.denoiser, data.num_classes
        averaged = copy.deepcopy(generator.net)
        adam = torch.optim.Adam(D.parameters(), self.lr)

        q = self.sampling_rate(data.n)
        C = data.budget.clip_norm(self.clip_norm, self.sigma)
        release = data.mechanism(
            "denoiser",
            sample=Poisson(q),
            bound=PerRecordGradient(C=C, module=D, microbatch=self.microbatch, copies=self.noise_levels, pure=True),
            times=ctx.limit(self.steps),
            std=None if self.sigma is None else self.sigma * self.clip_norm,
        )

        def losses(x: Tensor, y: Tensor, rng: RecordRng) -> Tensor:  # of a record's K copies, each with its own noise
            s = torch.exp(self.p_mean + self.p_std * rng.normal().to(x.dtype))
            noise = rng.normal(data.image_shape).to(x.dtype)
            y = torch.where(rng.uniform() < self.label_dropout, no_class, y)
            return D.losses(2.0 * x - 1.0, y, s, noise)

        for _ in ctx.steps(ctx.limit(release.times), D=D, adam=adam, averaged=averaged):
            gradient = release(losses)
            for name, parameter in D.named_parameters():
                parameter.grad = gradient[name] / (q * data.n)  # the configured size of a draw
            adam.step()
            track(averaged.denoiser, D, self.ema)
            ctx.log(gradient_norm=float(nn.utils.get_total_norm(list(gradient.values()))))

        return generator.releasing(averaged)


@torch.no_grad()
def track(average: nn.Module, net: nn.Module, decay: float) -> None:
    """Move the parameters of `average` towards those of `net`."""
    for slow, fast in zip(average.parameters(), net.parameters(), strict=True):
        slow.lerp_(fast, 1.0 - decay)

"""DPGAN: a conditional GAN whose discriminator is trained by DP-SGD (Bie, Kamath & Zhang, "Private GANs,
Revisited", TMLR 2023, Algorithm 1), with the paper's fixed and adaptive discriminator step frequency.

Guarantees: the training records are read in one place, the mechanism "discriminator", which releases T noisy
sums of clipped per-record gradients. The discriminator, the generator, the optimisers and the step frequency are
post-processing of those releases and of public randomness.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.privacy.accountants.claims import opacus_epsilon
from dpgen_bench.privacy.bounds import PerRecordGradient
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.sampling import Poisson

LADDER = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)  # section 6.2, as far as the authors' code goes

# Kernel between the 4x4 features and the next larger ones: k3 s2 p1 maps 4 <-> 7, k4 s2 p1 maps 4 <-> 8.
INNER_KERNEL = {28: 3, 32: 4}


def _inner_kernel(image_shape: Sequence[int]) -> int:
    _, h, w = image_shape
    if h != w or h not in INNER_KERNEL:
        raise ValueError(
            f"the DPGAN networks are made for 28x28 or 32x32 images, got {h}x{w}: choose a dataset of that size, "
            "or set the dataset's image_size to one of them."
        )
    return INNER_KERNEL[h]


class GeneratorNet(nn.Module):
    """𝒢: four transposed convolutions, no normalisation, PyTorch's default initialisation (appendices B.1, C).

    With width 128 and latent_dim 128: 2,272,129 parameters at 1x28x28 with 10 classes; 3,160,963 at 3x32x32 with 2.
    """

    def __init__(self, image_shape: Sequence[int], num_classes: int, width: int = 128, latent_dim: int = 128) -> None:
        super().__init__()
        inner = _inner_kernel(image_shape)
        self.num_classes = num_classes
        self.latent = nn.ConvTranspose2d(latent_dim, 2 * width, 4)
        self.label = nn.ConvTranspose2d(num_classes, 2 * width, 4)
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, inner, stride=2, padding=1)
        self.up2 = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.up3 = nn.ConvTranspose2d(width, image_shape[0], 4, stride=2, padding=1)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Images in [0, 1] [b, c, h, w] of latents z [b, latent_dim] and labels y int64 [b]."""
        onehot = F.one_hot(y, self.num_classes).to(z.dtype)
        h = torch.cat([self.latent(z[:, :, None, None]), self.label(onehot[:, :, None, None])], dim=1)
        h = self.up1(F.leaky_relu(h, 0.2))
        h = self.up2(F.leaky_relu(h, 0.2))
        h = self.up3(F.leaky_relu(h, 0.2))
        return (torch.tanh(h) + 1.0) / 2.0


class DiscriminatorNet(nn.Module):
    """𝒟: four convolutions, no normalisation, the label given as one-hot planes (appendices B.1, C, Table 4).

    `width` is d_𝒟, the number of filters of the first layer: half of them see the image, half the label. With
    width 128: 1,724,289 parameters at 1x28x28 with 10 classes; 2,635,649 at 3x32x32 with 2. Table 4's fourth size,
    3.86M and 2.24 times the third, is width 192; the 196 printed beside it would have 4.03M.
    """

    def __init__(self, image_shape: Sequence[int], num_classes: int, width: int = 128) -> None:
        super().__init__()
        inner = _inner_kernel(image_shape)
        self.num_classes = num_classes
        self.image = nn.Conv2d(image_shape[0], width // 2, 4, stride=2, padding=1)
        self.label = nn.Conv2d(num_classes, width // 2, 4, stride=2, padding=1)
        self.down1 = nn.Conv2d(2 * (width // 2), 2 * width, 4, stride=2, padding=1)
        self.down2 = nn.Conv2d(2 * width, 4 * width, inner, stride=2, padding=1)
        self.logit = nn.Conv2d(4 * width, 1, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Logits [b] that images x [b, c, h, w] with labels y int64 [b] are real."""
        planes = F.one_hot(y, self.num_classes).to(x.dtype)[:, :, None, None].expand(-1, -1, *x.shape[2:])
        h = torch.cat([self.image(x), self.label(planes)], dim=1)
        h = self.down1(F.leaky_relu(h, 0.2))
        h = self.down2(F.leaky_relu(h, 0.2))
        return self.logit(F.leaky_relu(h, 0.2)).reshape(len(x))


class StepFrequency:
    """n_𝒟, the number of 𝒟 steps per 𝒢 step: fixed, or climbing LADDER as 𝒟 weakens (section 6.2).

    Before each 𝒢 step the accuracy of 𝒟 on fresh fakes enters an exponential moving average (which starts at its
    first value, and is kept for a fixed n_𝒟 too). After a 𝒢 step n_𝒟 moves up one rung if the average is at or
    below `threshold` and at least 2/(1-β) 𝒢 steps have passed since it last moved. It never moves down, and the
    average is not restarted.

    Args:
        n_d: a fixed n_𝒟, or "adaptive" to start at 1.
        beta: β, decay of the average.
        threshold: d, the accuracy floor.
    """

    def __init__(self, n_d: int | Literal["adaptive"], beta: float = 0.99, threshold: float = 0.6) -> None:
        self.adaptive = n_d == "adaptive"
        self.n_d = LADDER[0] if self.adaptive else int(n_d)
        self.beta, self.threshold = beta, threshold
        # 2 / (1 - 0.9) is 20.000000000000004 in floating point: round first, or the period grows by one.
        self.grace = math.ceil(round(2.0 / (1.0 - beta), 9))
        self.d_steps = 0  # since the last 𝒢 step
        self.g_steps = 0  # since n_𝒟 last moved
        self.ema: float | None = None

    def after_d_step(self) -> bool:
        """Count one 𝒟 step; whether a 𝒢 step is due (for a fixed n_𝒟: "n_𝒟 divides t")."""
        self.d_steps += 1
        return self.d_steps >= self.n_d

    def before_g_step(self, accuracy: float) -> float:
        """Take in 𝒟's accuracy on fresh fakes; the new moving average."""
        self.ema = accuracy if self.ema is None else self.beta * self.ema + (1.0 - self.beta) * accuracy
        return self.ema

    def after_g_step(self) -> None:
        """Count one 𝒢 step and move up a rung if the average asks for it."""
        self.d_steps = 0
        self.g_steps += 1
        weak = self.ema is not None and self.ema <= self.threshold
        if self.adaptive and weak and self.g_steps >= self.grace and self.n_d < LADDER[-1]:
            self.n_d = LADDER[LADDER.index(self.n_d) + 1]
            self.g_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"n_d": self.n_d, "d_steps": self.d_steps, "g_steps": self.g_steps, "ema": self.ema}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n_d, self.d_steps, self.g_steps = state["n_d"], state["d_steps"], state["g_steps"]
        self.ema = state["ema"]


@dataclass
class DPGAN:
    """Algorithm 1, `TrainDPGAN`.

    The 𝒟 step divides its sum by 2 round(q n), the configured number of records and fakes, with noise or without. The
    authors' code differs in two places:

    - With noise it divides by 255 where this class divides by 256 (B = 128 on 60,000 records): Opacus 1.1.3 truncates
      q n = 127.93 to 127. At B = 512 and 2048 both divide by 1016 and 4000. Adam's step does not depend on a constant
      factor of the gradient.
    - Without noise its loss is the mean over the realised Poisson batch and the fakes, so that a step depends on the
      size of the batch. Here it does not, at a finite budget or at an infinite one.

    Args:
        batch_size: B, expected number of real records per 𝒟 step.
        clip_norm: C, bound on each record's gradient (L2, all parameters of 𝒟 together).
        sigma: σ, noise multiplier: N(0, σ² C² I) is added to the summed gradient. None: calibrated from `steps`
            to the budget, or, when the budget is infinite, the non-private GAN (no clipping, no noise).
        steps: T, number of 𝒟 steps. None: the largest number the budget allows at this σ.
        n_d: n_𝒟, 𝒟 steps per 𝒢 step, or "adaptive".
        beta, threshold: β and d of the adaptive frequency (section 6.2); β is also the logged average's.
        rate: q, the probability that a record joins a batch: "loader" 1/ceil(n/B) (Opacus's data loader, hence
            the authors' code), "ratio" B/n (the paper's text).
        clip_fakes: fakes are clipped with the records (Algorithm 1, line 6), or their plain gradient is added
            after the release, where it needs no clipping (appendix B.1).
        lr_d, lr_g, betas: Adam's learning rates and (β1, β2).
        d_d, d_g: widths of 𝒟 (Table 4's d_𝒟) and of 𝒢.
        latent_dim: dimension of z ~ N(0, I).
        backend, microbatch: how the clipped sum is computed; neither changes its value.

    Raises:
        ValueError: for a value outside its range, or a (σ, T, budget) that leaves T open.
    """

    batch_size: int = 128
    clip_norm: float = 1.0
    sigma: float | None = None
    steps: int | None = 450_000
    n_d: int | Literal["adaptive"] = 50
    beta: float = 0.99
    threshold: float = 0.6
    rate: Literal["loader", "ratio"] = "loader"
    clip_fakes: bool = True
    lr_d: float = 2e-4
    lr_g: float = 2e-4
    betas: tuple[float, float] = (0.5, 0.999)
    d_d: int = 128
    d_g: int = 128
    latent_dim: int = 128
    backend: Literal["bookkeeping", "opacus"] = "bookkeeping"
    microbatch: int | None = None

    def __post_init__(self) -> None:
        def expect(holds: bool, key: str, what: str) -> None:
            if not holds:
                raise ValueError(f"method.{key}: expected {what}, got {getattr(self, key)!r}.")

        def counts(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= 1

        expect(self.rate in ("loader", "ratio"), "rate", "'loader' (1/ceil(n/B)) or 'ratio' (B/n)")
        expect(self.sigma is None or self.sigma > 0, "sigma", "σ > 0, or null to calibrate it from steps")
        expect(self.steps is None or counts(self.steps), "steps", "T >= 1, or null for as many as σ allows")
        expect(self.n_d == "adaptive" or counts(self.n_d), "n_d", "an integer >= 1 or 'adaptive'")
        expect(0 <= self.beta < 1, "beta", "β in [0, 1)")
        expect(0 <= self.threshold <= 1, "threshold", "an accuracy in [0, 1]")
        expect(counts(self.d_d) and self.d_d % 2 == 0, "d_d", "an even width >= 2 (half image, half label)")
        for key in ("batch_size", "d_g", "latent_dim"):
            expect(counts(getattr(self, key)), key, "an integer >= 1")
        for key in ("clip_norm", "lr_d", "lr_g"):
            expect(0 < getattr(self, key) < math.inf, key, "a finite number > 0")
        expect(len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas), "betas", "two numbers in [0, 1)")
        self.betas = (self.betas[0], self.betas[1])  # a config gives a list
        if self.sigma is None and self.steps is None:
            raise ValueError("method.sigma and method.steps are both null: give σ, or T, or both.")

    def sampling_rate(self, n: int) -> float:
        """q for n records."""
        if self.rate == "loader":
            return 1.0 / math.ceil(n / self.batch_size)
        if self.batch_size > n:
            raise ValueError(f"method.rate=ratio needs B <= n, got B={self.batch_size} and n={n} records.")
        return self.batch_size / n

    def fake_batch_size(self, n: int) -> int:
        """round(q n), the configured number of fakes; the denominator of the 𝒟 step is twice this."""
        return round(self.sampling_rate(n) * n)

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float | None:
        """The paper's own count: Opacus's RDP accountant under add/remove (section 3), sound for Algorithm 1."""
        return opacus_epsilon(events, delta)

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        q, b = self.sampling_rate(data.n), self.fake_batch_size(data.n)
        shape, num_classes, device = data.image_shape, data.num_classes, ctx.device
        net: dict[str, Any] = dict(
            image_shape=list(shape), num_classes=num_classes, width=self.d_g, latent_dim=self.latent_dim
        )
        G = GeneratorNet(**net).to(device)
        D = DiscriminatorNet(shape, num_classes, self.d_d).to(device)
        opt_g = torch.optim.Adam(G.parameters(), self.lr_g, self.betas)
        opt_d = torch.optim.Adam(D.parameters(), self.lr_d, self.betas)
        ctx.warm_start(G=G, D=D, opt_g=opt_g, opt_d=opt_d)
        for opt, lr in ((opt_g, self.lr_g), (opt_d, self.lr_d)):
            for group in opt.param_groups:  # a restored optimiser brings its parent's settings along
                group.update(lr=lr, betas=self.betas)

        release = self._mechanism(data, ctx, D, q, b)
        frequency = StepFrequency(self.n_d, self.beta, self.threshold)

        def sample(size: int) -> tuple[Tensor, Tensor]:  # drawn on the CPU: the same on every device
            z = torch.randn(size, self.latent_dim, generator=ctx.generator)
            y = torch.randint(num_classes, (size,), generator=ctx.generator)
            return z.to(device), y.to(device)

        def d_losses(x: Tensor, y: Tensor, public: Tensor | None = None) -> Tensor:  # line 6, per row
            fake = torch.zeros(len(x), device=x.device) if public is None else public
            return F.binary_cross_entropy_with_logits(D(x, y), 1.0 - fake.to(x.dtype), reduction="none")

        T = ctx.limit(release.times)
        for _ in ctx.steps(T, G=G, D=D, opt_g=opt_g, opt_d=opt_d, frequency=frequency):
            z, y = sample(b)  # line 5
            with torch.no_grad():
                fakes = G(z, y)
            gradient = self._noisy_sum(release, D, d_losses, fakes, y)  # lines 4, 6
            for name, parameter in D.named_parameters():
                parameter.grad = gradient[name] / (2 * b)  # line 7
            opt_d.step()  # line 8

            if frequency.after_d_step():  # line 10
                # The networks have no layer that behaves differently in eval mode.
                z, y = sample(self.batch_size)
                with torch.no_grad():
                    accuracy = (D(G(z, y), y) < 0).float().mean().item()
                ema = frequency.before_g_step(accuracy)
                z, y = sample(b)  # line 11
                loss = F.softplus(-D(G(z, y), y)).mean()  # line 12: -log 𝒟
                opt_g.zero_grad()
                loss.backward(inputs=list(G.parameters()))
                opt_g.step()  # line 13
                ctx.log(d_accuracy_on_fakes=accuracy, d_accuracy_ema=ema, n_d=frequency.n_d)
                frequency.after_g_step()

        return NetGenerator(
            G,
            {"_target_": f"{__name__}.{GeneratorNet.__name__}", **net},
            latent_dim=self.latent_dim,
            latent="normal",
            num_classes=num_classes,
            image_shape=shape,
        )

    def _mechanism(self, data: PrivateData, ctx: Context, D: nn.Module, q: float, b: int) -> Any:
        """T releases of the clipped sum, with noise std σC (Algorithm 1, line 7)."""
        endless = math.isinf(data.budget.epsilon)
        if endless and self.steps is None:
            raise ValueError(
                "an infinite budget sets no limit on T: give method.steps (the paper's non-private GAN has 45000; "
                "set method.sigma=null with it to train without clipping and noise)."
            )
        clip_norm = math.inf if endless and self.sigma is None else self.clip_norm
        bound = PerRecordGradient(
            C=clip_norm,
            module=D,
            backend=self.backend,
            microbatch=self.microbatch,
            public_rows=b if self.clip_fakes else 0,
        )
        return data.mechanism(
            "discriminator",
            sample=Poisson(q),
            bound=bound,
            times=None if self.steps is None else ctx.limit(self.steps),
            std=None if self.sigma is None else self.sigma * self.clip_norm,
        )

    def _noisy_sum(
        self, release: Any, D: nn.Module, losses: Callable[..., Tensor], fakes: Tensor, y: Tensor
    ) -> dict[str, Tensor]:
        """Noisy sum over records and fakes of the gradients in 𝒟's parameters, by parameter name."""
        if self.clip_fakes:
            return release(losses, public=(fakes, y))
        noisy = release(losses)
        everyone = torch.ones(len(fakes), dtype=torch.bool, device=fakes.device)
        grads = torch.autograd.grad(losses(fakes, y, everyone).sum(), list(D.parameters()))
        return {name: noisy[name] + grad for (name, _), grad in zip(D.named_parameters(), grads, strict=True)}

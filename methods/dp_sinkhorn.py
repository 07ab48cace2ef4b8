"""DP-Sinkhorn: a generator trained on a semi-debiased Sinkhorn loss whose gradient is clipped and noised where it
leaves the data (Cao, Bie, Vahdat, Fidler & Kreis, "Don't Generate Me", NeurIPS 2021, Algorithm 1; earlier version).

Guarantees: the training records are read in one place, the mechanism "cross_group", which releases T times the gradient
of the loss, clipped and noised. The debiasing group's gradient, which compares generated images with each other, the
generator and the optimiser are functions of public randomness and of those releases.

A step's n rows are functions of one secret batch, which may move each of them by 2Δ. So they are one release of joint
sensitivity 2Δ sqrt(n), not n releases, as the final paper counts them: of its settings for MNIST, printed with ε = 10,
ε = 845 can be proven. `epsilon_claimed` is the paper's count. With `clip: whole` (earlier version, released code) the
paper's count is sound.

Each step makes one generator pass of n + n' images, as Algorithm 1 reads; the released code makes two, of n and of n'
images, whose batch normalisations have statistics of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.biggan import BigGANGenerator
from dpgen_bench.nets.conv_generator import ConvGenerator
from dpgen_bench.nets.transport import Cost, Transport
from dpgen_bench.privacy.accountants.claims import classical_rdp
from dpgen_bench.privacy.bounds import Bound, PerRow, Whole, clip_rows
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.sampling import Poisson

CHOICES = {
    "cost": ("l1+l2", "l2", "l1"),
    "debias_labels": ("fresh", "repeated"),
    "perturb": ("image", "parameter"),
    "clip": ("per_row", "whole"),
    "generator": ("dcgan", "biggan"),
}
NETS: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {  # and which of the method's settings are theirs alone
    "dcgan": (ConvGenerator, ("label_dim", "activation")),
    "biggan": (BigGANGenerator, ()),
}


@dataclass
class DPSinkhorn:
    """Algorithm 1.

    Args:
        batch_size: n, images of the cross group in each step, and expected number of real records: q = n / N. Fixed,
            whatever the size of the drawn batch.
        p: fraction of the cross group that is drawn anew for the debiasing group: n' = floor(n p) more images.
            0 is the biased Sinkhorn loss, 1 the debiased one (Definition 4.3).
        cost: c(x, y) between images in [-1, 1] with α_c onehot(label) appended: "l1+l2" |x-y|_2^2 + m |x-y|_1, or
            "l2" and "l1", the first and (without m) the second term alone.
        m: weight of the L1 term in "l1+l2".
        lam: λ, entropic regularisation, in units of the cost.
        exponent, scaling: geomloss's p and scaling, which set how λ is approached; see `dpgen_bench.nets.transport`.
        alpha_c: α_c, weight of the class.
        debias_labels: labels of the debiasing group: "fresh" (Algorithm 1), or "repeated" from the first n' of the
            cross group (released code).
        perturb: what is clipped and noised: the gradient in the generated "image"s, or in the "parameter"s of the
            generator (Table 2, first row), there always as a whole.
        clip: "per_row": each image's gradient to norm Δ (final paper), or "whole": all n together (earlier version).
        clip_norm: Δ.
        sigma: σ; noise is N(0, (2Δσ)^2 I), Algorithm 1's convention. None: calibrated from `steps` to the budget, or,
            if that is infinite, neither clipping nor noise.
        steps: T. None: as many as the budget allows at this σ.
        lr, betas, weight_decay: of Adam.
        generator: "dcgan" or "biggan".
        latent_dim: dimension of z, uniform on [0, 1].
        label_dim, activation: of the DCGAN-type generator.
        width: of the generator's layers; None is the paper's.
        backend: of the transport problems, "fast" or "geomloss".

    Raises:
        ValueError: for a value outside its range, or a (σ, T, budget) that leaves T open.
    """

    batch_size: int = 50
    p: float = 0.4
    cost: Literal["l1+l2", "l2", "l1"] = "l1+l2"
    m: float = 1.0
    lam: float = 0.05
    exponent: float = 1.0
    scaling: float = 0.5
    alpha_c: float = 15.0
    debias_labels: Literal["fresh", "repeated"] = "fresh"
    perturb: Literal["image", "parameter"] = "image"
    clip: Literal["per_row", "whole"] = "per_row"
    clip_norm: float = 0.5
    sigma: float | None = None
    steps: int | None = 160_000
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 2e-5
    generator: Literal["dcgan", "biggan"] = "dcgan"
    latent_dim: int = 12
    label_dim: int = 4
    activation: Literal["relu", "leaky_relu"] = "relu"
    width: int | None = None
    backend: Literal["fast", "geomloss"] = "fast"

    def __post_init__(self) -> None:
        def expect(holds: bool, key: str, what: str) -> None:
            if not holds:
                raise ValueError(f"method.{key}: expected {what}, got {getattr(self, key)!r}.")

        def counts(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= 1

        for key, words in CHOICES.items():
            expect(getattr(self, key) in words, key, " or ".join(map(repr, words)))
        for key in ("batch_size", "latent_dim", "label_dim"):
            expect(counts(getattr(self, key)), key, "an integer >= 1")
        expect(self.width is None or counts(self.width), "width", "an integer >= 1, or null for the paper's")
        for key in ("clip_norm", "lr"):
            expect(0 < getattr(self, key) < math.inf, key, "a finite number > 0")
        for key in ("m", "alpha_c", "weight_decay"):
            expect(0 <= getattr(self, key) < math.inf, key, "a finite number >= 0")
        expect(0 <= self.p <= 1, "p", "a fraction in [0, 1]")
        expect(self.sigma is None or 0 < self.sigma < math.inf, "sigma", "σ > 0, or null to calibrate it from steps")
        expect(self.steps is None or counts(self.steps), "steps", "T >= 1, or null for as many as σ allows")
        expect(len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas), "betas", "two numbers in [0, 1)")
        self.betas = (self.betas[0], self.betas[1])  # a config gives a list
        if self.sigma is None and self.steps is None:
            raise ValueError("method.sigma and method.steps are both null: give σ, or T, or both.")
        weights = {"l1+l2": (1.0, self.m), "l2": (1.0, 0.0), "l1": (0.0, 1.0)}[self.cost]
        self.transport = Transport(Cost(*weights), self.lam, self.exponent, self.scaling, self.backend)

    @property
    def debiasing(self) -> int:
        """n' = floor(n p); products such as 100 * 0.29 = 28.999999999999996 are meant as 29."""
        return math.floor(round(self.batch_size * self.p, 9))

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float | None:
        """The papers' count (section 4.3, appendix D.4): TF-privacy's RDP, per row of each step where rows are clipped.

        None for a run that inherits releases of another, which the papers have no count for.
        """
        if len(events) != 1:
            return None
        (event,) = events
        if event.std == 0.0:
            return math.inf
        per_row = self.clip == "per_row" and self.perturb == "image"
        compositions = event.times * (self.batch_size if per_row else 1)
        return classical_rdp(event.sampling.rate, event.std / (2.0 * self.clip_norm), compositions, delta)

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        n, n_, device, num_classes, shape = (
            self.batch_size,
            self.debiasing,
            ctx.device,
            data.num_classes,
            data.image_shape,
        )
        config = self._net_config(data)
        g: nn.Module = instantiate(config).to(device)
        parameters = list(g.parameters())
        adam = torch.optim.Adam(g.parameters(), self.lr, self.betas, weight_decay=self.weight_decay)
        ctx.warm_start(g=g, adam=adam)
        for group in adam.param_groups:  # a restored optimiser brings its parent's settings along
            group.update(lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)
        release = self._mechanism(data, ctx, sum(theta.numel() for theta in parameters))

        def points(images: Tensor, labels: Tensor) -> Tensor:  # [b, *shape], [b] -> [b, d + classes]
            return torch.cat([images.flatten(1), self.alpha_c * F.one_hot(labels, num_classes).to(images.dtype)], dim=1)

        def pixels(gradient: Tensor) -> Tensor:  # [b, d + classes] -> [b, *shape]
            return gradient[:, : math.prod(shape)].reshape(-1, *shape)

        def loss_gradient(own: Tensor, x: Tensor, images: Tensor, labels: Tensor) -> Tensor:
            """Gradient of 2 W(X[0:n], Y) - W(X[0:n], X[n':n'+n]) in X[0:n]; `own` is the second term's."""
            if len(labels) == 0:
                return own
            y = points((2.0 * images - 1.0).nan_to_num(0.0).clamp(-1.0, 1.0), labels)
            (cross,) = self.transport.solve((x, y))
            return own + 2.0 * pixels(cross.in_x)

        def parameter_gradient(X: Tensor, G_X: Tensor, x: Tensor, images: Tensor, labels: Tensor) -> Tensor:
            """The same in all parameters of g, as one vector."""
            G = torch.cat([loss_gradient(G_X[:n], x, images, labels), G_X[n:]])
            return parameters_to_vector(torch.autograd.grad(X, parameters, G, retain_graph=True))

        for t in ctx.steps(ctx.limit(release.times), g=g, adam=adam):
            z = torch.rand(n + n_, self.latent_dim, generator=ctx.generator).to(device)
            l_x = torch.randint(num_classes, (n + n_,), generator=ctx.generator).to(device)
            if self.debias_labels == "repeated":
                l_x[n:] = l_x[:n_]
            X = g(z, l_x)
            x = points(X.detach(), l_x)

            # -W(X[0:n], X[n':n'+n]) knows no records. It is solved apart from the other term: rows n.. of its gradient
            # leave without noise, and must not have shared even their rounding with a secret batch.
            (own,) = self.transport.solve((x[:n], x[n_:]))
            in_cross, in_last = own.in_both
            G_X = torch.zeros_like(X)
            G_X[:n] -= pixels(in_cross)
            G_X[n_:] -= pixels(in_last)

            adam.zero_grad()
            if self.perturb == "image":
                G_X[:n] = release(partial(loss_gradient, G_X[:n].clone(), x[:n]))
                G_X[n:] = self._clipped(G_X[n:], release.bound.C)
                X.backward(G_X)
            else:
                G_theta = release(partial(parameter_gradient, X, G_X, x[:n]))
                for theta, slope in zip(
                    parameters, G_theta.split([theta.numel() for theta in parameters]), strict=True
                ):
                    theta.grad = slope.view_as(theta)
            adam.step()
            if t % 50 == 0:
                ctx.log(transport_among_generated=float(own.value))

        return NetGenerator(
            g,
            config,
            latent_dim=self.latent_dim,
            latent="uniform",
            num_classes=num_classes,
            image_shape=shape,
            value_range=(-1.0, 1.0),
        )

    def _net_config(self, data: PrivateData) -> dict[str, Any]:
        net, own = NETS[self.generator]
        return {
            "_target_": f"{net.__module__}.{net.__name__}",
            "image_shape": list(data.image_shape),
            "num_classes": data.num_classes,
            "latent_dim": self.latent_dim,
            **({} if self.width is None else {"width": self.width}),
            **{key: getattr(self, key) for key in own},
        }

    def _mechanism(self, data: PrivateData, ctx: Context, num_parameters: int) -> Mechanism:
        """T releases with noise of standard deviation 2Δσ in every entry (Algorithm 1)."""
        if self.batch_size > data.n:
            raise ValueError(f"method.batch_size: expected n <= N = {data.n} records, got {self.batch_size}.")
        endless = math.isinf(data.budget.epsilon)
        if endless and self.steps is None:
            raise ValueError("an infinite budget sets no limit on T: give method.steps.")
        C = math.inf if endless and self.sigma is None else self.clip_norm
        rows = (self.batch_size, *data.image_shape)
        bound: Bound
        if self.perturb == "parameter":
            bound = Whole(C=C, shape=(num_parameters,))
        elif self.clip == "per_row":
            bound = PerRow(C=C, shape=rows)
        else:
            bound = Whole(C=C, shape=rows)
        return data.mechanism(
            "cross_group",
            sample=Poisson(self.batch_size / data.n),
            bound=bound,
            times=None if self.steps is None else ctx.limit(self.steps),
            std=None if self.sigma is None else 2.0 * self.clip_norm * self.sigma,
        )

    def _clipped(self, G: Tensor, C: float) -> Tensor:
        """The debiasing group's rows [n', *shape], clipped to the scale of the others, without noise."""
        if self.clip == "per_row" or len(G) == 0:
            return clip_rows(G, C)
        return clip_rows(G[None], C)[0]

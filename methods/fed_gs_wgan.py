"""GS-WGAN on clients: each trains a Wasserstein critic on its own records and sends noisy image gradients to the server
(Chen, Orekondy & Fritz, "GS-WGAN: A Gradient-Sanitized Approach for Learning Differentially Private Generators",
NeurIPS 2020, Algorithm 2).

Guarantees, for the client as the unit, one exchanged for another with any records: critics and records never leave a
client. What leaves is the gradient of its critic's loss in B generated images, clipped and noised before it is sent, at
most k_max times; the generator is a function of that and of public randomness.

Two figures follow. *Outsiders*, who see the generator alone: a client answers min(Binomial(T, 1/N), k_max) times, and
its critic remembers when, so nothing is gained by hiding who was asked (see `methods/gs_wgan.py`). *The server*, which
asks and keeps all answers: k_max Gaussian releases, of multiplier σ / sqrt(B k_max) together. The paper's "untrusted
server" is this second figure and no smaller one. It holds against a server that sends whatever it likes; that it
samples clients as it says matters to the first figure only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from dpgen_bench.data.private import PrivateData
from dpgen_bench.federation.client_mechanism import ClientMechanism
from dpgen_bench.federation.data import ClientData
from dpgen_bench.generator import NetGenerator, in_eval_mode
from dpgen_bench.method import Context
from dpgen_bench.nets.spectral import settle_spectral
from dpgen_bench.nets.wasserstein import CriticTraining, draw_latents, draw_matching
from dpgen_bench.nets.wgan import DCGANGenerator, ProjectionCritic, ResNetGenerator
from dpgen_bench.privacy.accountants.claims import memoryless, wor_rdp
from dpgen_bench.privacy.bounds import PerRow
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.sampling import OneClient
from dpgen_bench.utils.validation import check_bounds, check_types

NETS: dict[str, type[nn.Module]] = {"resnet": ResNetGenerator, "dcgan": DCGANGenerator}
Config = dict[str, Any]  # `_target_` and arguments of a network


@dataclass(frozen=True)
class CriticClient:
    """What runs on a client: ClientWarmStart and ClientUpdate of Algorithm 2.

    Args:
        critic, generator: the critic, and the throw-away generator that prepares it.
        iterations: of the warm start.
    """

    training: CriticTraining
    critic: Config
    generator: Config
    iterations: int
    num_classes: int

    def identity(self) -> dict[str, Any]:
        return asdict(self)

    def start(self, records: tuple[Tensor, Tensor], coins: torch.Generator) -> dict[str, Tensor]:
        """ClientWarmStart, lines 17-31."""

        def make(config: Config) -> nn.Module:
            return instantiate(config).to(records[0].device)

        make_critic, make_generator = partial(make, self.critic), partial(make, self.generator)
        tensors = self.training.warm_start(
            make_critic, make_generator, self.iterations, self.num_classes, [records], [coins]
        )
        return {name: tensor[0] for name, tensor in tensors.items()}

    def answer(
        self,
        message: dict[str, Tensor],
        records: tuple[Tensor, Tensor],
        state: dict[str, Tensor],
        coins: torch.Generator,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """ClientUpdate, lines 33-37, for every batch of the message; the gradient in the images of the last.

        Labels come from the server, so each image is set against a record of the same label. Those of labels that the
        client has no record of train nothing, and their gradient is zero.
        """
        images, labels = message["images"], message["labels"]  # [n_critic, B, c, h, w], [n_critic, B]
        with torch.random.fork_rng(devices=[]):
            template = instantiate(self.critic).to(images.device)
        D = self.training.stack(template, {name: tensor[None] for name, tensor in state.items()})
        improved = False
        for x, y in zip(images, labels, strict=True):
            if (pairs := draw_matching(records, y, len(y), coins)) is None:
                continue
            places, real = pairs
            mix = torch.rand(1, len(y), 1, 1, 1, generator=coins).to(x.device)
            self.training.update(D, real[None], x[places][None], y[places][None], mix)
            improved = True
        gradient = self.training.image_gradient(D, images[-1][None], labels[-1][None])[0]
        held = torch.isin(labels[-1], records[1])
        gradient = torch.where(held[:, None, None, None], gradient, torch.zeros_like(gradient))
        after = {name: tensor[0] for name, tensor in D.tensors(adam=True).items()} if improved else {}
        return gradient, after


@dataclass
class FedGSWGAN:
    """Algorithm 2.

    Args:
        schedule: whom a step asks: "random", one of the N clients, uniformly (paper), or "public_balanced", each once
            in every N steps.
        max_answers: k_max; a step that would ask a client once more passes without an answer. None: T/N and four
            standard deviations, so that hardly any step is lost; under public_balanced the ceil(T/N) that are needed.
        against: whom privacy.epsilon is kept against where σ is calibrated: "outsiders", or the "server".
        batch_size: B, images in each batch. A step sends n_critic of them, the last of which is the one that the
            generator learns from.
        steps: T, of the generator.
        n_critic: updates of the asked client's critic in each step.
        warm_start: iterations that prepare each critic, of n_critic updates against one of a throw-away generator.
        sigma: σ; each image's gradient gets noise N(0, (2Cσ)^2 I), at the client. None: calibrated to the budget, or,
            if that is infinite, neither clipping nor noise.
        clip_norm: C, of the gradient of -sum D(x), for each image.
        gp_weight, drift, lr, betas, generator, latent_dim, latent, width, critic_width, ema: as in the centralized
            setting, see conf/method/gs_wgan.yaml.

    Raises:
        ValueError: for a value outside its range.
    """

    schedule: Literal["random", "public_balanced"] = "random"
    max_answers: int | None = None
    against: Literal["outsiders", "server"] = "outsiders"
    batch_size: int = 32
    steps: int = 30_000
    n_critic: int = 5
    warm_start: int = 2000
    sigma: float | None = None
    clip_norm: float = 1.0
    gp_weight: float = 10.0
    drift: float = 1e-3
    lr: float = 1e-4
    betas: tuple[float, float] = (0.5, 0.9)
    generator: Literal["resnet", "dcgan"] = "resnet"
    latent_dim: int = 10
    latent: Literal["bernoulli", "normal"] = "bernoulli"
    width: int | None = None
    critic_width: int | None = None
    ema: float = 0.999

    def __post_init__(self) -> None:
        check_types(type(self), vars(self), "method")
        self.betas = (self.betas[0], self.betas[1])  # a config gives a list
        bounds = {
            "[1, inf)": ("max_answers", "batch_size", "steps", "n_critic", "latent_dim", "width", "critic_width"),
            "(0, inf)": ("sigma", "clip_norm", "lr"),
            "[0, inf)": ("warm_start", "gp_weight", "drift"),
            "[0, 1)": ("betas", "ema"),
        }
        check_bounds(self, "method", bounds)
        self.training = CriticTraining(
            self.batch_size,
            self.n_critic,
            self.gp_weight,
            self.drift,
            self.latent,
            self.latent_dim,
            self.lr,
            self.betas,
        )

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float | None:
        """The paper's count for a client: Theorem A.1, T B releases subsampled at rate 1/N without replacement.

        None where the paper has no count: for a public schedule, for a run that inherits releases of another.
        """
        if len(events) != 1 or self.schedule != "random":
            return None
        (event,) = events
        if event.std == 0.0:
            return math.inf
        return wor_rdp(event.sampling.rate, event.std / (2.0 * self.clip_norm), event.times * self.batch_size, delta)

    def epsilon_conditional(self, events: Sequence[Event], delta: float) -> tuple[float, str] | None:
        """What T subsampled releases of joint sensitivity 2C sqrt(B) would cost outsiders; no bound, see the module."""
        if len(events) != 1 or events[0].std == 0.0 or self.schedule != "random":
            return None
        return memoryless(events[0], delta), "if critics kept nothing of earlier steps (fresh state in each)"

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        B, device = self.batch_size, ctx.device
        clients = data.grouped("client")
        config = self._net(NETS[self.generator], clients, self.width, latent_dim=self.latent_dim)
        g: nn.Module = instantiate(config).to(device)
        adam = torch.optim.Adam(g.parameters(), self.lr, self.betas)
        ema = AveragedModel(g, avg_fn=lambda mean, new, n: mean + max(1.0 - self.ema, 1.0 / (n + 1)) * (new - mean))
        ctx.warm_start(g=g, adam=adam, ema=ema)
        for group in adam.param_groups:  # a restored optimiser brings its parent's settings along
            group.update(lr=self.lr, betas=self.betas)
        ask = self._mechanism(clients, ctx, config)

        for number in ctx.steps(ask.groups, phase="warm_start"):  # lines 1-3
            ask.start(number)

        for t in ctx.steps(ask.times, g=g, adam=adam, ema=ema):
            z = draw_latents(self.latent, (self.n_critic, B, self.latent_dim), ctx.generator, device)
            y = torch.randint(clients.num_classes, (self.n_critic, B), generator=ctx.generator).to(device)
            with torch.no_grad(), in_eval_mode(g):  # one power iteration of the generator's norms in a step, for x
                earlier = [g(*batch) for batch in zip(z[:-1], y[:-1], strict=True)]
            x = g(z[-1], y[-1])
            gradient = ask({"images": torch.stack([*earlier, x.detach()]), "labels": y})  # lines 6-10
            if gradient is None:
                continue
            adam.zero_grad()
            x.backward(gradient / B)  # line 11
            adam.step()
            ema.update_parameters(g)
            ctx.count(generator_updates=1)
            if t % 50 == 0:
                ctx.log(gradient_norm=float(gradient.flatten(1).norm(dim=1).mean()))

        return NetGenerator(
            settle_spectral(ema.module),
            config,
            latent_dim=self.latent_dim,
            latent=self.latent,
            num_classes=clients.num_classes,
            image_shape=clients.image_shape,
        )

    def _net(self, net: type[nn.Module], clients: ClientData, width: int | None, **sizes: int) -> Config:
        return {
            "_target_": f"{net.__module__}.{net.__name__}",
            "image_shape": list(clients.image_shape),
            "num_classes": clients.num_classes,
            **sizes,
            **({} if width is None else {"width": width}),
        }

    def _mechanism(self, clients: ClientData, ctx: Context, generator: Config) -> ClientMechanism:
        """T questions to single clients, which answer with noise of standard deviation 2Cσ in every pixel."""
        T, N = ctx.limit(self.steps), clients.n
        k_max = self.max_answers
        if k_max is None:
            visits = T / N if self.schedule == "public_balanced" else T / N + 4.0 * math.sqrt(T / N)
            k_max = min(math.ceil(visits), T)
        free = math.isinf(clients.budget.epsilon) and self.sigma is None
        critic = self._net(ProjectionCritic, clients, self.critic_width)
        iterations = min(self.warm_start, max(1, ctx.limit(N * self.warm_start) // N)) if self.warm_start else 0
        return clients.mechanism(
            "image_gradient",
            program=CriticClient(self.training, critic, generator, iterations, clients.num_classes),
            sample=OneClient(N, self.schedule, k_max),
            bound=PerRow(C=math.inf if free else self.clip_norm, shape=(self.batch_size, *clients.image_shape)),
            noise_at="client",
            times=T,
            std=None if self.sigma is None else 2.0 * self.clip_norm * self.sigma,
            against=self.against,
        )

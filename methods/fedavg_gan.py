"""Fed-Avg GAN: a GAN whose discriminator is trained by federated averaging with user-level differential privacy
(Augenstein et al., "Generative Models for Effective ML on Private, Decentralized Datasets", ICLR 2020, Algorithm 1),
the baseline of GS-WGAN's federated setting.

Guarantees, for the client as the unit: what leaves the mechanism "discriminator" in each of R rounds is the sum of the
clipped parameter differences of the clients that were drawn, plus noise; the discriminator, the generator and their
optimisers are post-processing. Clients keep nothing from round to round, so that amplification by their secret draw
holds. The server is trusted: it sees each client's difference before it adds the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dpgen_bench.data.private import PrivateData
from dpgen_bench.federation.client_mechanism import ClientMechanism
from dpgen_bench.federation.data import ClientData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.wasserstein import CriticTraining, draw_batch, draw_latents
from dpgen_bench.privacy.accountants.claims import opacus_rdp
from dpgen_bench.privacy.bounds import PerRecord
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.sampling import FixedSize, Poisson
from dpgen_bench.utils.validation import check_bounds, check_types

Config = dict[str, Any]  # `_target_` and arguments of a network


class Norm(nn.Module):
    """Batch normalisation with a learnt shift and no learnt scale, of features [b, width] or [b, width, h, w]."""

    def __init__(self, width: int, *, running: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width, affine=False, track_running_stats=running)
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, h: Tensor) -> Tensor:
        shape = h.shape
        h = h[:, :, None, None] if h.dim() == 2 else h
        return (self.norm(h) + self.shift[:, None, None]).reshape(shape)


def _check_side(image_shape: Sequence[int]) -> int:
    _, h, w = image_shape
    if h != w or h % 4:
        raise ValueError(
            f"the Fed-Avg GAN networks are made for square images whose side is a multiple of 4, got {h}x{w}: choose "
            "another dataset, or set the dataset's image_size."
        )
    return h // 4


class GeneratorNet(nn.Module):
    """Fully connected layers to 1024 and 256@7x7, two transposed convolutions to 32@28x28, a convolution, tanh.

    Batch normalisation and ReLU between layers. With width 1 and latent_dim 128: 13,285,217 parameters at 1x28x28
    without labels, as published; with labels a one-hot vector joins z.

    Args:
        width: all sizes are multiplied by it.
        conditional: whether labels are used.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        latent_dim: int = 128,
        width: float = 1.0,
        conditional: bool = True,
    ) -> None:
        super().__init__()
        self.side, self.num_classes, self.conditional = _check_side(image_shape), num_classes, conditional
        hidden, deep, middle, shallow = (max(1, round(size * width)) for size in (1024, 256, 64, 32))
        self.fc1 = nn.Linear(latent_dim + (num_classes if conditional else 0), hidden, bias=False)
        self.norm1 = Norm(hidden, running=True)
        self.fc2 = nn.Linear(hidden, self.side**2 * deep, bias=False)
        self.norm2 = Norm(self.side**2 * deep, running=True)
        self.up1 = nn.ConvTranspose2d(deep, middle, 4, stride=2, padding=1, bias=False)
        self.norm3 = Norm(middle, running=True)
        self.up2 = nn.ConvTranspose2d(middle, shallow, 4, stride=2, padding=1, bias=False)
        self.norm4 = Norm(shallow, running=True)
        self.image = nn.Conv2d(shallow, image_shape[0], 4)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Images in [0, 1] [b, c, h, w] of latents z [b, latent_dim] and labels y int64 [b]."""
        if self.conditional:
            z = torch.cat([z, F.one_hot(y, self.num_classes).to(z.dtype)], dim=1)
        h = F.relu(self.norm1(self.fc1(z)))
        h = F.relu(self.norm2(self.fc2(h))).reshape(len(z), -1, self.side, self.side)
        h = F.relu(self.norm3(self.up1(h)))
        h = F.relu(self.norm4(self.up2(h)))
        return (torch.tanh(self.image(F.pad(h, (1, 2, 1, 2)))) + 1.0) / 2.0  # an even kernel, padded to the same size


class DiscriminatorNet(nn.Module):
    """Two convolutions to 64@14x14 and 128@7x7, fully connected layers to 1024 and 1; leaky ReLU of slope 0.01.

    The layer of 1024 is normalised: "batch", by each pass's own batch (published), or "layer", each row by itself. With
    width 1: 6,556,865 parameters at 1x28x28 without labels, as published; with labels one-hot planes join the image.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        width: float = 1.0,
        conditional: bool = True,
        norm: Literal["batch", "layer"] = "batch",
    ) -> None:
        super().__init__()
        side, self.num_classes, self.conditional = _check_side(image_shape), num_classes, conditional
        shallow, middle, hidden = (max(1, round(size * width)) for size in (64, 128, 1024))
        planes = num_classes if conditional else 0
        self.conv1 = nn.Conv2d(image_shape[0] + planes, shallow, 4, stride=2, padding=1)
        self.conv2 = nn.Conv2d(shallow, middle, 4, stride=2, padding=1)
        self.fc1 = nn.Linear(side**2 * middle, hidden, bias=False)
        self.norm = Norm(hidden, running=False) if norm == "batch" else nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores [b] of images x [b, c, h, w] with labels y int64 [b]."""
        if self.conditional:
            planes = F.one_hot(y, self.num_classes).to(x.dtype)[:, :, None, None].expand(-1, -1, *x.shape[2:])
            x = torch.cat([x, planes], dim=1)
        h = F.leaky_relu(self.conv1(x), 0.01)
        h = F.leaky_relu(self.conv2(h), 0.01).flatten(1)
        return self.fc2(F.leaky_relu(self.norm(self.fc1(h)), 0.01)).squeeze(1)


def make_optimizer(
    name: Literal["sgd", "adam"], net: nn.Module, lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Plain SGD, or Adam with Gulrajani et al.'s betas."""
    if name == "sgd":
        return torch.optim.SGD(net.parameters(), lr, weight_decay=weight_decay)
    return torch.optim.Adam(net.parameters(), lr, (0.5, 0.9), weight_decay=weight_decay)


@dataclass(frozen=True)
class DiscriminatorClient:
    """What runs on a client: `local_steps` on the server's discriminator, against images of its generator."""

    training: CriticTraining
    discriminator: Config
    generator: Config
    local_steps: int
    optimizer: Literal["sgd", "adam"]
    lr: float
    weight_decay: float

    def identity(self) -> dict[str, Any]:
        return asdict(self)

    def start(self, records: tuple[Tensor, Tensor], coins: torch.Generator) -> dict[str, Tensor]:
        """A client keeps nothing."""
        return {}

    def answer(
        self,
        message: dict[str, Tensor],
        records: tuple[Tensor, Tensor],
        state: dict[str, Tensor],
        coins: torch.Generator,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Parameters after the steps minus those before, [P]."""
        before, size = message["discriminator"], self.training.batch_size
        with torch.random.fork_rng(devices=[]):
            D, G = (instantiate(config).to(before.device) for config in (self.discriminator, self.generator))
        vector_to_parameters(before.clone(), D.parameters())  # parameters become views of the vector
        vector_to_parameters(message["generator"].clone(), G.parameters())
        optimizer = make_optimizer(self.optimizer, D, self.lr, self.weight_decay)

        def scores(x: Tensor, y: Tensor) -> Tensor:  # records and images in passes of their own, as batches normalise
            return torch.cat([D(*part) for part in zip(x[0].split(size), y[0].split(size), strict=True)])[None]

        for _ in range(self.local_steps):
            real, labels = draw_batch(records, size, coins)
            z = draw_latents(self.training.latent, (size, self.training.latent_dim), coins, before.device)
            mix = torch.rand(1, size, 1, 1, 1, generator=coins).to(before.device)
            with torch.no_grad():
                fake = G(z, labels)
            loss = self.training.loss(scores, real[None], fake[None], labels[None], mix)
            optimizer.zero_grad()
            loss.sum().backward()
            optimizer.step()
        return parameters_to_vector(D.parameters()).detach() - before, {}


@dataclass
class FedAvgGAN:
    """Algorithm 1 of Augenstein et al.

    Args:
        clients_per_round: expected number of clients in a round, and the denominator of their sum, whoever answers.
        selection: "poisson", each client joins a round with probability q = clients_per_round / N, or "fixed", exactly
            so many without replacement (paper), for which only privacy.relation=replace_one has an accountant.
        steps: R, rounds.
        local_steps: steps of a client in a round, on batches of batch_size.
        g_steps: steps of the generator at the server after each round.
        sigma: σ; the sum gets noise N(0, σ² C² I). None: calibrated to the budget, or, if that is infinite, neither
            clipping nor noise.
        clip_norm: C, of a client's difference.
        lr_d, lr_g: learning rates, on clients and for the generator. lr_server: what the mean difference is multiplied
            by.
        optimizer_d, optimizer_g: "sgd" (paper), or "adam" with betas (0.5, 0.9), which on a client starts anew in each
            round.
        gp_weight: λ.
        latent_dim: of z ~ N(0, I).
        width: of the networks, 1 as published.
        conditional: whether the networks are given labels (the paper's are not).
        norm: of the discriminator, "batch" (paper), by the batch of each pass, or "layer".
        weight_decay: of both networks.

    Raises:
        ValueError: for a value outside its range.
    """

    clients_per_round: int = 10
    selection: Literal["poisson", "fixed"] = "poisson"
    steps: int = 1000
    local_steps: int = 6
    g_steps: int = 6
    batch_size: int = 32
    sigma: float | None = None
    clip_norm: float = 0.1
    lr_d: float = 5e-4
    lr_g: float = 5e-3
    lr_server: float = 1.0
    optimizer_d: Literal["sgd", "adam"] = "sgd"
    optimizer_g: Literal["sgd", "adam"] = "sgd"
    gp_weight: float = 10.0
    latent_dim: int = 128
    width: float = 1.0
    conditional: bool = True
    norm: Literal["batch", "layer"] = "batch"
    weight_decay: float = 2.5e-5

    def __post_init__(self) -> None:
        check_types(type(self), vars(self), "method")
        counts = ("clients_per_round", "steps", "local_steps", "g_steps", "batch_size", "latent_dim")
        bounds = {
            "[1, inf)": counts,
            "(0, inf)": ("sigma", "clip_norm", "lr_d", "lr_g", "lr_server", "width"),
            "[0, inf)": ("gp_weight", "weight_decay"),
        }
        check_bounds(self, "method", bounds)
        self.training = CriticTraining(
            self.batch_size, 1, self.gp_weight, drift=0.0, latent="normal", latent_dim=self.latent_dim
        )

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float | None:
        """DP-FedAvg's count: RDP of R Poisson-sampled Gaussians of sensitivity C. The paper's table prints none."""
        if len(events) != 1:
            return None
        (event,) = events
        if event.std == 0.0:
            return math.inf
        return opacus_rdp(event.sampling.rate, event.std / self.clip_norm, event.times, delta)

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        device = ctx.device
        clients = data.grouped("client")
        config = self._net(GeneratorNet, clients, latent_dim=self.latent_dim)
        d_config = self._net(DiscriminatorNet, clients, norm=self.norm)
        G, D = instantiate(config).to(device), instantiate(d_config).to(device)
        optimizer = make_optimizer(self.optimizer_g, G, self.lr_g, self.weight_decay)
        ctx.warm_start(G=G, D=D, optimizer=optimizer)
        for group in optimizer.param_groups:  # a restored optimiser brings its parent's settings along
            group.update(lr=self.lr_g)
        parameters = parameters_to_vector(D.parameters())
        program = DiscriminatorClient(
            self.training, d_config, config, self.local_steps, self.optimizer_d, self.lr_d, self.weight_decay
        )
        ask = self._mechanism(clients, ctx, program, len(parameters))

        for t in ctx.steps(ask.times, G=G, D=D, optimizer=optimizer):
            before = parameters_to_vector(D.parameters()).detach()
            noisy = ask({"discriminator": before, "generator": parameters_to_vector(G.parameters()).detach()})
            mean = noisy / self.clients_per_round
            vector_to_parameters(before + self.lr_server * mean, D.parameters())
            for _ in range(self.g_steps):
                z = draw_latents("normal", (self.batch_size, self.latent_dim), ctx.generator, device)
                y = torch.randint(clients.num_classes, (self.batch_size,), generator=ctx.generator).to(device)
                loss = -D(G(z, y), y).mean()
                optimizer.zero_grad()
                loss.backward(inputs=list(G.parameters()))
                optimizer.step()
            ctx.count(generator_updates=self.g_steps)
            if t % 10 == 0:
                ctx.log(update_norm=float(mean.norm()), g_loss=float(loss.detach()))

        return NetGenerator(
            G,
            config,
            latent_dim=self.latent_dim,
            latent="normal",
            num_classes=clients.num_classes,
            image_shape=clients.image_shape,
        )

    def _net(self, net: type[nn.Module], clients: ClientData, **own: Any) -> Config:
        return {
            "_target_": f"{__name__}.{net.__name__}",
            "image_shape": list(clients.image_shape),
            "num_classes": clients.num_classes,
            "width": self.width,
            "conditional": self.conditional,
            **own,
        }

    def _mechanism(
        self, clients: ClientData, ctx: Context, program: DiscriminatorClient, parameters: int
    ) -> ClientMechanism:
        """R rounds of the clipped sum of differences, with noise of standard deviation σC at the server."""
        expected, N = self.clients_per_round, clients.n
        if expected > N:
            raise ValueError(f"method.clients_per_round: expected at most N = {N} clients, got {expected}.")
        free = math.isinf(clients.budget.epsilon) and self.sigma is None
        return clients.mechanism(
            "discriminator",
            program=program,
            sample=Poisson(expected / N) if self.selection == "poisson" else FixedSize(expected, N),
            bound=PerRecord(C=math.inf if free else self.clip_norm, shape=(parameters,)),
            noise_at="server",
            times=ctx.limit(self.steps),
            std=None if self.sigma is None else self.sigma * self.clip_norm,
        )

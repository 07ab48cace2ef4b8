"""Fed-Avg GAN: a GAN whose discriminator is trained by federated averaging with user-level differential privacy
(Augenstein et al., "Generative Models for Effective ML on Private, Decentralized Datasets", ICLR 2020, Algorithm 1).

Guarantees, with the client as the unit of privacy: in each of R rounds the mechanism "discriminator" releases the sum
of the clipped parameter differences of the sampled clients, plus noise. The discriminator, the generator and their
optimisers are post-processing. Clients keep no state between rounds, so amplification by sampling holds. The server is
trusted: it sees each client's difference before it adds the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dpgen_bench.data.private import PrivateData
from dpgen_bench.federation.client import Answer, Parts, Program, Records
from dpgen_bench.federation.client_mechanism import ClientMechanism
from dpgen_bench.federation.data import ClientData
from dpgen_bench.generator import Config, NetGenerator, config_of, make_net, net_with_parameters
from dpgen_bench.method import Context
from dpgen_bench.nets.fedavg_gan import DiscriminatorNet, GeneratorNet, make_optimizer
from dpgen_bench.nets.wasserstein import CriticTraining
from dpgen_bench.privacy.accountants.claims import opacus_rdp, paper_count
from dpgen_bench.privacy.bounds import PerRecord
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.sampling import FixedSize, Poisson
from dpgen_bench.utils.validation import Checked, Count, NonNegative, Positive


@dataclass(frozen=True)
class DiscriminatorClient(Program):
    """The program of a client: train the server's discriminator for `local_steps` against the server's generator."""

    training: CriticTraining
    discriminator: Config
    generator: Config
    local_steps: int
    optimizer: Literal["sgd", "adam"]
    lr: float
    weight_decay: float

    def answer(self, message: Parts, records: Records, state: Parts, rng: torch.Generator) -> Answer:
        """The discriminator's parameters after the local steps minus those before, [P]."""
        before = message["discriminator"]
        D = net_with_parameters(self.discriminator, before)
        G = net_with_parameters(self.generator, message["generator"])
        optimizer = make_optimizer(self.optimizer, D, self.lr, self.weight_decay)
        for _ in range(self.local_steps):
            loss = self.training.loss_of_one(D, G, records, rng)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return parameters_to_vector(D.parameters()).detach() - before, {}


@dataclass
class FedAvgGAN(Checked):
    """Algorithm 1, the baseline of GS-WGAN's federated setting. conf/method/fedavg_gan.yaml has the published settings.

    Args:
        clients_per_round: Expected number of clients in a round, by which their sum is divided.
        selection: "poisson": each client joins a round with probability q = clients_per_round / N. "fixed" (paper):
            exactly so many without replacement, for which only privacy.relation=replace_one has an accountant.
        steps, local_steps, g_steps: R rounds; steps of a client, and then of the generator at the server, in a round.
        sigma, clip_norm: A client's difference is clipped to C; the sum gets noise N(0, sigma^2 C^2 I). If sigma is
            None, it is calibrated to the budget; an infinite budget means no clipping and no noise.
        lr_d, lr_g, lr_server: Learning rates on clients and of the generator, and factor of the mean difference.
        optimizer_d, optimizer_g: "sgd" (paper), or "adam", whose state on a client is new in each round.
        gp_weight, weight_decay: Weight lambda of the gradient penalty, and weight decay of both networks.
        latent_dim, width: Dimension of z ~ N(0, I), and width of the networks (published: 1).
        conditional: Whether the networks see labels (the paper's do not).
        norm: Normalisation in the discriminator: "batch" (paper), by the statistics of each pass, or "layer".
    """

    version = 1  # raise it when the same settings train a different generator
    clients_per_round: Count
    selection: Literal["poisson", "fixed"]
    steps: Count
    local_steps: Count
    g_steps: Count
    batch_size: Count
    sigma: Positive | None
    clip_norm: Positive
    lr_d: Positive
    lr_g: Positive
    lr_server: Positive
    optimizer_d: Literal["sgd", "adam"]
    optimizer_g: Literal["sgd", "adam"]
    gp_weight: NonNegative
    latent_dim: Count
    width: Positive
    conditional: bool
    norm: Literal["batch", "layer"]
    weight_decay: NonNegative

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float | None:
        """DP-FedAvg's count: RDP of R Poisson-sampled Gaussians of sensitivity C (the paper's table prints none)."""
        return paper_count(opacus_rdp, events, delta, unit=self.clip_norm)

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        clients, sizes = data.grouped("client"), dict[str, Any](width=self.width, conditional=self.conditional)
        generator = NetGenerator.build(GeneratorNet, clients, ctx.device, latent_dim=self.latent_dim, **sizes)
        d_config = config_of(DiscriminatorNet, clients, **sizes, norm=self.norm)
        G, D = generator.net, make_net(d_config, ctx.device)
        optimizer = make_optimizer(self.optimizer_g, G, self.lr_g, self.weight_decay)
        ctx.warm_start(G=G, D=D, optimizer=optimizer)
        training = CriticTraining(self.batch_size, 1, self.gp_weight, 0.0, "normal", self.latent_dim)
        local = (self.local_steps, self.optimizer_d, self.lr_d, self.weight_decay)
        program = DiscriminatorClient(training, d_config, generator.net_config, *local)
        ask = self._mechanism(clients, ctx, program, len(parameters_to_vector(D.parameters())))

        for t in ctx.steps(ask.times, G=G, D=D, optimizer=optimizer):  # each round t
            before = parameters_to_vector(D.parameters()).detach()
            # Each sampled client trains D on its records; the server gets the noisy sum of clipped differences.
            noisy = ask({"discriminator": before, "generator": parameters_to_vector(G.parameters()).detach()})
            assert noisy is not None  # every round has a sum if the server adds the noise
            mean = noisy / self.clients_per_round
            vector_to_parameters(before + self.lr_server * mean, D.parameters())
            for _ in range(self.g_steps):  # the server trains G against D
                z, y = ctx.latents(generator, self.batch_size)
                loss = -D(G(z, y), y).mean()
                optimizer.zero_grad()
                loss.backward(inputs=list(G.parameters()))
                optimizer.step()
            ctx.count(generator_updates=self.g_steps)
            if t % 10 == 0:
                ctx.log(update_norm=float(mean.norm()), g_loss=float(loss.detach()))

        return generator

    def _mechanism(self, clients: ClientData, ctx: Context, program: DiscriminatorClient, size: int) -> ClientMechanism:
        """R rounds, each a sum of clipped differences to which the server adds noise of standard deviation sigma C."""
        expected, N = self.clients_per_round, clients.n
        if expected > N:
            raise ValueError(f"method.clients_per_round: expected at most N = {N} clients, got {expected}.")
        C = clients.budget.clip_norm(self.clip_norm, self.sigma)
        return clients.mechanism(
            "discriminator",
            program=program,
            sample=Poisson(expected / N) if self.selection == "poisson" else FixedSize(expected, N),
            bound=PerRecord(C=C, shape=(size,)),
            noise_at="server",
            times=ctx.limit(self.steps),
            std=None if self.sigma is None else self.sigma * self.clip_norm,
        )

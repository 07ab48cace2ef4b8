"""Fed-Avg GAN: a GAN whose discriminator is trained by federated averaging with user-level differential privacy
(Augenstein et al., "Generative Models for Effective ML on Private, Decentralized Datasets", ICLR 2020, Algorithm 1),
the baseline of GS-WGAN's federated setting.

Guarantees, for the client as the unit: what leaves the mechanism "discriminator" in each of R rounds is the sum of the
clipped parameter differences of the clients that were drawn, plus noise; the discriminator, the generator and their
optimisers are post-processing. Clients keep nothing from round to round, so that amplification by their secret draw
holds. The server is trusted: it sees each client's difference before it adds the noise.
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
    """What runs on a client: `local_steps` on the server's discriminator, against images of its generator."""

    training: CriticTraining
    discriminator: Config
    generator: Config
    local_steps: int
    optimizer: Literal["sgd", "adam"]
    lr: float
    weight_decay: float

    def answer(self, message: Parts, records: Records, state: Parts, rng: torch.Generator) -> Answer:
        """Parameters after the steps minus those before, [P]."""
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
    """Algorithm 1 of Augenstein et al. Its published settings: conf/method/fedavg_gan.yaml.

    Args:
        clients_per_round: expected number of clients in a round, and the denominator of their sum, whoever answers.
        selection: "poisson", each client joins a round with probability q = clients_per_round / N, or "fixed", exactly
            so many without replacement (paper), for which only privacy.relation=replace_one has an accountant.
        steps: R, rounds. local_steps: of a client in a round. g_steps: of the generator, at the server after it.
        sigma, clip_norm: the sum gets noise N(0, σ² C² I), a client's difference is clipped to C. σ None: calibrated to
            the budget, or, if that is infinite, neither clipping nor noise.
        lr_d, lr_g: learning rates, on clients and for the generator. lr_server: factor of the mean difference.
        optimizer_d, optimizer_g: "sgd" (paper), or "adam", which on a client starts again in each round.
        gp_weight: λ. latent_dim: of z ~ N(0, I). width: of the networks, 1 as published. weight_decay: of both.
        conditional: whether the networks are given labels (the paper's are not).
        norm: of the discriminator, "batch" (paper), by the batch of each pass, or "layer".
    """

    version = 1  # raised when the same settings train something else
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
        """DP-FedAvg's count: RDP of R Poisson-sampled Gaussians of sensitivity C. The paper's table prints none."""
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
            # The clients' part: each trains D on its records; the sum of clipped differences, plus noise.
            noisy = ask({"discriminator": before, "generator": parameters_to_vector(G.parameters()).detach()})
            assert noisy is not None  # where the server adds the noise, every round has a sum
            mean = noisy / self.clients_per_round
            vector_to_parameters(before + self.lr_server * mean, D.parameters())
            for _ in range(self.g_steps):  # the server's part: train G against D
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
        """R rounds of the clipped sum of differences, with noise of standard deviation σC at the server."""
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

"""GS-WGAN on clients: each client trains a Wasserstein critic on its own records and sends noisy image gradients to the
server (Chen, Orekondy & Fritz, "GS-WGAN", NeurIPS 2020, Algorithm 2).

Guarantees, with the client as the unit of privacy and replacement of one client as the relation: critics and records
never leave a client. A client sends the gradient of its critic's loss in B generated images, clipped and noised at the
client, at most k_max times. The generator is a function of these gradients and of public randomness.

There are two epsilons: one against outsiders, who see the generator alone, and one against the server, which sees all
answers. The latter is the paper's "untrusted server". It holds for any messages of the server
(docs/methods/fed_gs_wgan.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from dpgen_bench.data.private import PrivateData
from dpgen_bench.federation.client import Answer, Parts, Program, Records
from dpgen_bench.federation.client_mechanism import ClientMechanism
from dpgen_bench.federation.data import ClientData
from dpgen_bench.generator import Config, NetGenerator, config_of, make_net
from dpgen_bench.method import Context
from dpgen_bench.nets.gs_wgan import AveragedGenerator, GSWGANSettings
from dpgen_bench.nets.modes import in_eval_mode
from dpgen_bench.nets.wasserstein import CriticTraining, draw_matching
from dpgen_bench.nets.wgan import ProjectionCritic
from dpgen_bench.privacy.accountants.claims import if_memoryless, paper_count, wor_rdp
from dpgen_bench.privacy.bounds import PerRow
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.sampling import OneClient
from dpgen_bench.utils.upload import upload
from dpgen_bench.utils.validation import Count


@dataclass(frozen=True)
class CriticClient(Program):
    """The program of a client: ClientWarmStart (`iterations` against a temporary generator) and ClientUpdate."""

    training: CriticTraining
    critic: Config
    generator: Config
    iterations: int
    num_classes: int

    def start(self, records: Records, rng: torch.Generator) -> Parts:
        """ClientWarmStart, lines 17-31."""
        critic, generator = (partial(make_net, net, records[0].device) for net in (self.critic, self.generator))
        tensors = self.training.warm_start(critic, generator, self.iterations, self.num_classes, [records], [rng])
        return {name: tensor[0] for name, tensor in tensors.items()}

    def answer(self, message: Parts, records: Records, state: Parts, rng: torch.Generator) -> Answer:
        """ClientUpdate, lines 33-37: update the critic on every batch, then take the gradient in the last images.

        The server chooses the labels, so each image is paired with a record of the same label. An image whose label
        the client has no record of does not train the critic, and its gradient is zero.
        """
        images, labels = message["images"], message["labels"]  # [n_critic, B, c, h, w], [n_critic, B]
        with torch.random.fork_rng(devices=[]):
            template = make_net(self.critic, images.device)
        D = self.training.stack(template, {name: tensor[None] for name, tensor in state.items()})  # a stack of one
        updated = False
        for x, y in zip(images, labels, strict=True):
            if (pairs := draw_matching(records, y, len(y), rng)) is None:
                continue
            positions, real = pairs
            mix = upload(torch.rand(1, len(y), 1, 1, 1, generator=rng), x.device)
            self.training.update(D, real[None], x[positions][None], y[positions][None], mix)
            updated = True
        gradient = self.training.image_gradient(D, images[-1][None], labels[-1][None])[0]
        has_record = torch.isin(labels[-1], records[1])[:, None, None, None]
        new_state = {name: tensor[0] for name, tensor in D.tensors(adam=True).items()} if updated else {}
        return torch.where(has_record, gradient, 0.0), new_state


@dataclass
class FedGSWGAN(GSWGANSettings):
    """Algorithm 2. `GSWGANSettings` has the settings that it shares with Algorithm 1.

    Args:
        max_answers: k_max. A step that draws a client with k_max answers is skipped. None means T/N plus four standard
            deviations, so that hardly any step is skipped; under public_balanced it means ceil(T/N).
        against: Where sigma is calibrated, privacy.epsilon holds against "outsiders" or against the "server".
        steps: T, steps of the generator. A step sends n_critic batches; the last one updates the generator.
    """

    version = 1  # raise it when the same settings train a different generator
    max_answers: Count | None
    against: Literal["outsiders", "server"]
    steps: Count

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float | None:
        """The paper's count for a client (Theorem A.1): T B releases, subsampled at rate 1/N without replacement."""
        if self.schedule != "random":  # the paper has no count for a public schedule
            return None
        return paper_count(wor_rdp, events, delta, unit=2.0 * self.clip_norm, per_step=self.batch_size)

    # Epsilon of T subsampled releases against outsiders, which holds only if steps had no memory.
    epsilon_conditional = staticmethod(if_memoryless)

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        clients, sizes = data.grouped("client"), self.generator_sizes
        generator = NetGenerator.build(self.generator_class, clients, ctx.device, latent=self.latent, **sizes)
        g, trained = generator.net, AveragedGenerator(generator.net, self)  # line 4
        ctx.warm_start(**trained.states)
        ask = self._mechanism(clients, ctx, generator.net_config)

        for number in ctx.steps(ask.groups, phase="warm_start"):  # lines 1-3
            ask.start(number)

        for t in ctx.steps(ask.times, **trained.states):  # line 5
            z, y = ctx.latents(generator, self.n_critic, self.batch_size)  # line 8
            # Only the last batch, x, updates g. Eval mode keeps the others from moving the spectral norms of g.
            with torch.no_grad(), in_eval_mode(g):
                earlier = [g(*batch) for batch in zip(z[:-1], y[:-1], strict=True)]
            x = g(z[-1], y[-1])
            gradient = ask({"images": torch.stack([*earlier, x.detach()]), "labels": y})  # lines 6-10
            if gradient is None:
                continue
            trained.descend(x, gradient)  # line 11
            ctx.count(generator_updates=1)
            if t % 50 == 0:
                ctx.log(gradient_norm=float(gradient.flatten(1).norm(dim=1).mean()))

        return generator.releasing(trained.average())

    def _mechanism(self, clients: ClientData, ctx: Context, generator: Config) -> ClientMechanism:
        """T requests to one client each, whose answer has noise of standard deviation 2 C sigma in every pixel."""
        T, N = ctx.limit(self.steps), clients.n
        participations = T / N if self.schedule == "public_balanced" else T / N + 4.0 * math.sqrt(T / N)
        k_max = self.max_answers or min(math.ceil(participations), T)
        critic = config_of(ProjectionCritic, clients, width=self.critic_width)
        iterations = self.warm_start_iterations(N, ctx.limit)
        C = clients.budget.clip_norm(self.clip_norm, self.sigma)
        return clients.mechanism(
            "image_gradient",
            program=CriticClient(self.training, critic, generator, iterations, clients.num_classes),
            sample=OneClient(N, self.schedule, k_max),
            bound=PerRow(C=C, shape=(self.batch_size, *clients.image_shape)),
            noise_at="client",
            times=T,
            std=self.std,
            against=self.against,
        )

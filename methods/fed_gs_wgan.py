"""GS-WGAN on clients: each trains a Wasserstein critic on its own records and sends noisy image gradients to the server
(Chen, Orekondy & Fritz, "GS-WGAN", NeurIPS 2020, Algorithm 2).

Guarantees, for the client as the unit, one exchanged for another with any records: critics and records never leave a
client. What leaves is the gradient of its critic's loss in B generated images, clipped and noised before it is sent, at
most k_max times; the generator is a function of that and of public randomness.

Two epsilons follow: against outsiders, who see the generator alone, and against the server, which asks and keeps all
answers: the figure of the paper's "untrusted server", which holds whatever it sends (methods/fed_gs_wgan.md).
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
from dpgen_bench.generator import Config, NetGenerator, config_of, in_eval_mode, make_net
from dpgen_bench.method import Context
from dpgen_bench.nets.gs_wgan import AveragedGenerator, GSWGANSettings
from dpgen_bench.nets.wasserstein import CriticTraining, draw_matching
from dpgen_bench.nets.wgan import ProjectionCritic
from dpgen_bench.privacy.accountants.claims import if_memoryless, paper_count, wor_rdp
from dpgen_bench.privacy.bounds import PerRow
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.sampling import OneClient
from dpgen_bench.utils.validation import Count


@dataclass(frozen=True)
class CriticClient(Program):
    """What runs on a client: ClientWarmStart (`iterations`, against a throw-away generator) and ClientUpdate."""

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
        """ClientUpdate, lines 33-37, for every batch of the message; the gradient in the images of the last.

        Labels come from the server, so each image is set against a record of the same label. Those of labels that the
        client has no record of train nothing, and their gradient is zero.
        """
        images, labels = message["images"], message["labels"]  # [n_critic, B, c, h, w], [n_critic, B]
        with torch.random.fork_rng(devices=[]):
            template = make_net(self.critic, images.device)
        D = self.training.stack(template, {name: tensor[None] for name, tensor in state.items()})
        improved = False
        for x, y in zip(images, labels, strict=True):
            if (pairs := draw_matching(records, y, len(y), rng)) is None:
                continue
            places, real = pairs
            mix = torch.rand(1, len(y), 1, 1, 1, generator=rng).to(x.device)
            self.training.update(D, real[None], x[places][None], y[places][None], mix)
            improved = True
        gradient = self.training.image_gradient(D, images[-1][None], labels[-1][None])[0]
        held = torch.isin(labels[-1], records[1])[:, None, None, None]
        after = {name: tensor[0] for name, tensor in D.tensors(adam=True).items()} if improved else {}
        return torch.where(held, gradient, 0.0), after


@dataclass
class FedGSWGAN(GSWGANSettings):
    """Algorithm 2. The settings that it shares with Algorithm 1: `GSWGANSettings`.

    Args:
        max_answers: k_max; a step that would ask a client once more passes without an answer. None: T/N and four
            standard deviations, so that hardly any step is lost; under public_balanced the ceil(T/N) that are needed.
        against: whom privacy.epsilon is kept against where σ is calibrated: "outsiders", or the "server".
        steps: T, of the generator. A step sends n_critic batches, of which the last moves the generator.
    """

    version = 1  # raised when the same settings train something else
    max_answers: Count | None
    against: Literal["outsiders", "server"]
    steps: Count

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float | None:
        """The paper's count for a client: Theorem A.1, T B releases subsampled at rate 1/N without replacement."""
        if self.schedule != "random":  # the paper has no count for a public schedule
            return None
        return paper_count(wor_rdp, events, delta, unit=2.0 * self.clip_norm, per_step=self.batch_size)

    epsilon_conditional = staticmethod(if_memoryless)  # of T subsampled releases against outsiders; no bound

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
            with torch.no_grad(), in_eval_mode(g):  # one power iteration of the generator's norms in a step, for x
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
        """T questions to single clients, which answer with noise of standard deviation 2Cσ in every pixel."""
        T, N = ctx.limit(self.steps), clients.n
        visits = T / N if self.schedule == "public_balanced" else T / N + 4.0 * math.sqrt(T / N)
        k_max = self.max_answers or min(math.ceil(visits), T)
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

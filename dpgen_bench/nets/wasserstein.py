"""Wasserstein critics with gradient penalty, several at a time: what GS-WGAN's two settings share.

Chen, Orekondy & Fritz, "GS-WGAN" (NeurIPS 2020), Algorithms 1 and 2; Gulrajani et al., "Improved Training of
Wasserstein GANs" (NeurIPS 2017). What sees records here is called inside private functions: it draws its randomness
from the generators that it is given, leaves PyTorch's global generators alone, and raises for no records whatever.

The ids of runs, and what warm starts are kept under, know a method's file but nothing of `nets`: raise
TRAINING_VERSION (runs/config.py) when what they compute changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpgen_bench.nets.latents import Law, draw_latents
from dpgen_bench.nets.stack import Stack

Records = tuple[Tensor, Tensor]
Critics = Callable[[Tensor, Tensor], Tensor]  # (images [G, B, c, h, w], labels [G, B]) -> scores [G, B]


def draw_batch(records: Records, size: int, rng: torch.Generator) -> Records:
    """Exactly `size` of the records: distinct ones where there are enough, else with repetition.

    Where there is none, a black image of class 0 stands in, so that a critic's arithmetic has the same shape for any
    records: in a stack, it is shared with other critics.
    """
    images, labels = records
    if len(labels) == 0:
        images, labels = images.new_zeros(1, *images.shape[1:]), labels.new_zeros(1)
    if len(labels) >= size:
        chosen = torch.randperm(len(labels), generator=rng)[:size]
    else:
        chosen = torch.randint(len(labels), (size,), generator=rng)
    chosen = chosen.to(labels.device)
    return images[chosen].nan_to_num(0.0).clamp(0.0, 1.0), labels[chosen]


def draw_matching(records: Records, labels: Tensor, size: int, rng: torch.Generator) -> tuple[Tensor, Tensor] | None:
    """For given labels, records of the same labels: what a client answers to labels that it did not choose.

    Args:
        labels: int64 [b], of the images that the records shall be set against.
        size: how many pairs to make.

    Returns:
        (places int64 [size] in `labels`, images [size, c, h, w] of those labels), places whose label no record has left
        out and the others repeated in their stead; None if no record has any of the labels.
    """
    images, own = records
    order = torch.argsort(own, stable=True)
    ends = torch.searchsorted(own[order], labels, right=True)
    starts = torch.searchsorted(own[order], labels)
    held = torch.nonzero(ends > starts).flatten()
    if len(held) == 0:
        return None
    places = held[torch.arange(size, device=held.device) % len(held)]
    share = torch.rand(size, generator=rng, dtype=torch.float64).to(own.device)
    chosen = starts[places] + (share * (ends - starts)[places]).long()
    return places, images[order[chosen]].nan_to_num(0.0).clamp(0.0, 1.0)


@dataclass(frozen=True)
class CriticTraining:
    """How critics D are trained: n_critic updates for each of the generator (Algorithm 1, lines 4-9 and 16-21).

    Args:
        batch_size: B, records and generated images in an update.
        n_critic: updates in a round.
        gp_weight: λ of the gradient penalty.
        drift: weight of the mean squared score of records, which keeps scores from wandering (released code).
        latent, latent_dim: law and dimension of z.
        lr, betas: of Adam.
    """

    batch_size: int = 32
    n_critic: int = 5
    gp_weight: float = 10.0
    drift: float = 1e-3
    latent: Law = "bernoulli"
    latent_dim: int = 10
    lr: float = 1e-4
    betas: tuple[float, float] = (0.5, 0.9)

    def stack(self, template: nn.Module, tensors: dict[str, Tensor]) -> Stack:
        return Stack(template, tensors, lr=self.lr, betas=self.betas)

    def loss(self, critics: Critics, real: Tensor, fake: Tensor, labels: Tensor, mix: Tensor) -> Tensor:
        """L_D of each critic, [G]: mean D(fake) - mean D(real) + λ mean (|∇D(x̃)| - 1)² + drift mean D(real)².

        Args:
            real, fake: images [G, B, c, h, w], of the same labels [G, B].
            mix: [G, B, 1, 1, 1] in [0, 1]; x̃ = mix real + (1 - mix) fake.
        """
        size = real.shape[1]
        real_scores, fake_scores = critics(torch.cat([real, fake], 1), torch.cat([labels, labels], 1)).split(size, 1)
        between = (mix * real + (1.0 - mix) * fake).requires_grad_()
        # A pass of its own: differentiating the pass above twice would carry all of its rows along.
        (slopes,) = torch.autograd.grad(critics(between, labels).sum(), between, create_graph=True)
        penalty = (slopes.flatten(2).norm(dim=2) - 1.0).square().mean(1)
        drift = self.drift * real_scores.square().mean(1)
        return fake_scores.mean(1) - real_scores.mean(1) + self.gp_weight * penalty + drift

    def loss_of_one(self, D: nn.Module, G: nn.Module, records: Records, rng: torch.Generator) -> Tensor:
        """L_D of one network D, a scalar, on a batch of its records and images that G makes for their labels.

        Records and images go through D in passes of their own, because its batch normalisation may couple rows.
        """
        size = self.batch_size

        def scores(x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([D(*part) for part in zip(x[0].split(size), y[0].split(size), strict=True)])[None]

        real, labels = draw_batch(records, size, rng)
        z = draw_latents(self.latent, (size, self.latent_dim), rng, real.device)
        mix = torch.rand(1, size, 1, 1, 1, generator=rng).to(real.device)
        with torch.no_grad():
            fake = G(z, labels)
        return self.loss(scores, real[None], fake[None], labels[None], mix).sum()

    def improve(
        self,
        critics: Stack,
        records: Sequence[Records],
        generate: Callable[[Tensor, Tensor], Tensor],
        rngs: Sequence[torch.Generator],
    ) -> None:
        """n_critic updates of each critic on its own records, against images with the labels of those records.

        Args:
            records: of each critic.
            generate: (z [G, B, latent_dim], labels [G, B]) -> images [G, B, c, h, w].
            rngs: one generator for each critic.
        """
        for _ in range(self.n_critic):
            batches = [draw_batch(own, self.batch_size, rng) for own, rng in zip(records, rngs, strict=True)]
            real, labels = (torch.stack(parts) for parts in zip(*batches, strict=True))
            mix = [torch.rand(self.batch_size, 1, 1, 1, generator=rng) for rng in rngs]
            with torch.no_grad():
                fake = generate(self._latents(rngs, real.device), labels)
            self.update(critics, real, fake, labels, torch.stack(mix).to(real.device))

    def update(self, critics: Stack, real: Tensor, fake: Tensor, labels: Tensor, mix: Tensor) -> None:
        """One step of each critic on given batches; shapes as in `loss`."""
        critics.power_iteration()
        critics.descend(self.loss(critics, real, fake, labels, mix))

    def image_gradient(self, critics: Stack, images: Tensor, labels: Tensor) -> Tensor:
        """Gradient of L_G = -sum D(x) in the images x [G, B, c, h, w] of labels [G, B], before it is sanitised."""
        critics.power_iteration()
        x = images.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(-critics(x, labels).sum(), x)
        return gradient

    def warm_start(
        self,
        make_critic: Callable[[], nn.Module],
        make_generator: Callable[[], nn.Module],
        iterations: int,
        num_classes: int,
        records: Sequence[Records],
        rngs: Sequence[torch.Generator],
    ) -> dict[str, Tensor]:
        """Critics after `iterations` rounds against throw-away generators of their own (Algorithm 1, lines 2-12).

        Args:
            make_critic, make_generator: fresh networks on the device of the records.
            records, rngs: of each critic.

        Returns:
            The tensors of a stack of critics, without Adam's, which starts anew afterwards, as in the released code.
        """
        with torch.random.fork_rng(devices=[]):
            critic_template, generator_template = make_critic(), make_generator()
        critics = self.stack(critic_template, Stack.initial(make_critic, rngs))
        generators = self.stack(generator_template, Stack.initial(make_generator, rngs))
        for _ in range(iterations):
            self.iterate(critics, generators, num_classes, records, rngs)
        return critics.tensors(adam=False)

    def iterate(
        self,
        critics: Stack,
        generators: Stack,
        num_classes: int,
        records: Sequence[Records],
        rngs: Sequence[torch.Generator],
    ) -> None:
        """One round for each critic and its generator: n_critic updates of the one, then one of the other."""
        self.improve(critics, records, generators, rngs)
        y = [torch.randint(num_classes, (self.batch_size,), generator=rng) for rng in rngs]
        labels = torch.stack(y).to(records[0][0].device)
        critics.power_iteration()
        generators.power_iteration()
        generators.descend(-critics(generators(self._latents(rngs, labels.device), labels), labels).mean(1))

    def _latents(self, rngs: Sequence[torch.Generator], device: torch.device) -> Tensor:
        shape = (self.batch_size, self.latent_dim)
        return torch.stack([draw_latents(self.latent, shape, rng, device) for rng in rngs])

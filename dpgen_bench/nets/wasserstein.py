"""Training of Wasserstein critics with gradient penalty, one or several at a time.

Chen, Orekondy & Fritz, "GS-WGAN" (NeurIPS 2020), Algorithms 1 and 2; Gulrajani et al., "Improved Training of
Wasserstein GANs" (NeurIPS 2017). Functions that see records run inside mechanisms: they use only the given rng, and do
not raise for any records.

After a change of what is computed here, raise `TRAINING_VERSION` in config/spec.py: run ids and the cache of warm
starts do not depend on the source of `nets`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpgen_bench.nets.latents import LatentDistribution, draw_latents
from dpgen_bench.nets.stack import Stack
from dpgen_bench.utils.upload import upload

Records = tuple[Tensor, Tensor]
Critics = Callable[[Tensor, Tensor], Tensor]  # (images [G, B, c, h, w], labels [G, B]) -> scores [G, B]


def draw_batch(records: Records, size: int, rng: torch.Generator) -> Records:
    """Exactly `size` of the records: distinct ones if there are enough, else with repetition.

    If there is no record, the batch has black images of class 0, so that it has the same shape for all records, as a
    stack of critics needs.
    """
    images, labels = records
    if len(labels) == 0:
        images, labels = images.new_zeros(1, *images.shape[1:]), labels.new_zeros(1)
    if len(labels) >= size:
        chosen = torch.randperm(len(labels), generator=rng)[:size]
    else:
        chosen = torch.randint(len(labels), (size,), generator=rng)
    chosen = upload(chosen, labels.device)
    return images[chosen].nan_to_num(0.0).clamp(0.0, 1.0), labels[chosen]


def draw_matching(records: Records, labels: Tensor, size: int, rng: torch.Generator) -> tuple[Tensor, Tensor] | None:
    """Random records with the given labels, to be paired with generated images of these labels.

    Args:
        records: The records.
        labels: int64 [b], the labels of the generated images.
        size: The number of pairs.
        rng: Generator of random numbers.

    Returns:
        (positions int64 [size] in `labels`, images [size, c, h, w] of records with these labels). Positions whose label
        no record has are left out, and others are repeated instead. None if no record has any of the labels.
    """
    images, record_labels = records
    # After sorting, the records of labels[i] are at starts[i] .. ends[i] - 1.
    order = torch.argsort(record_labels, stable=True)
    ends = torch.searchsorted(record_labels[order], labels, right=True)
    starts = torch.searchsorted(record_labels[order], labels)
    available = torch.nonzero(ends > starts).flatten()
    if len(available) == 0:
        return None
    positions = available[torch.arange(size, device=available.device) % len(available)]
    uniform = upload(torch.rand(size, generator=rng, dtype=torch.float64), record_labels.device)
    chosen = starts[positions] + (uniform * (ends - starts)[positions]).long()
    return positions, images[order[chosen]].nan_to_num(0.0).clamp(0.0, 1.0)


@dataclass(frozen=True)
class CriticTraining:
    """Settings and steps of the training of critics D (Algorithm 1, lines 4-9 and 16-21).

    G is the number of critics in a stack, B the batch size.

    Args:
        batch_size: B, the number of records and of generated images in an update.
        n_critic: Updates of a critic for each update of the generator.
        gp_weight: Weight lambda of the gradient penalty.
        drift: Weight of the mean squared score of records, which keeps scores near 0 (released code).
        latent, latent_dim: Distribution and dimension of z.
        lr, betas: Settings of Adam.
    """

    batch_size: int = 32
    n_critic: int = 5
    gp_weight: float = 10.0
    drift: float = 1e-3
    latent: LatentDistribution = "bernoulli"
    latent_dim: int = 10
    lr: float = 1e-4
    betas: tuple[float, float] = (0.5, 0.9)

    def stack(self, template: nn.Module, tensors: dict[str, Tensor]) -> Stack:
        """A stack of networks with these tensors, which is trained with these settings of Adam."""
        return Stack(template, tensors, lr=self.lr, betas=self.betas)

    def loss(self, critics: Critics, real: Tensor, fake: Tensor, labels: Tensor, mix: Tensor) -> Tensor:
        """L_D of each critic, [G].

        L_D = mean D(fake) - mean D(real) + gp_weight mean (|grad D(x)| - 1)^2 + drift mean D(real)^2, with the gradient
        at x = mix real + (1 - mix) fake.

        Args:
            critics: D.
            real, fake: Images [G, B, c, h, w].
            labels: The labels [G, B] of both.
            mix: [G, B, 1, 1, 1] in [0, 1].
        """
        size = real.shape[1]
        real_scores, fake_scores = critics(torch.cat([real, fake], 1), torch.cat([labels, labels], 1)).split(size, 1)
        between = (mix * real + (1.0 - mix) * fake).requires_grad_()
        # A separate pass, because differentiating the pass above twice would include all of its rows.
        (slopes,) = torch.autograd.grad(critics(between, labels).sum(), between, create_graph=True)
        penalty = (slopes.flatten(2).norm(dim=2) - 1.0).square().mean(1)
        drift = self.drift * real_scores.square().mean(1)
        return fake_scores.mean(1) - real_scores.mean(1) + self.gp_weight * penalty + drift

    def loss_of_one(self, D: nn.Module, G: nn.Module, records: Records, rng: torch.Generator) -> Tensor:
        """L_D of one network D, a scalar, on a batch of its records and images that G generates for their labels.

        Records and generated images are separate passes through D, because D may have batch normalisation.
        """
        size = self.batch_size

        def scores(x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([D(*part) for part in zip(x[0].split(size), y[0].split(size), strict=True)])[None]

        real, labels = draw_batch(records, size, rng)
        z = draw_latents(self.latent, (size, self.latent_dim), rng, real.device)
        mix = upload(torch.rand(1, size, 1, 1, 1, generator=rng), real.device)
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
        """Make n_critic updates of each critic on its own records, and generated images with the same labels.

        Args:
            critics: The critics.
            records: Records of each critic.
            generate: (z [G, B, latent_dim], labels [G, B]) -> images [G, B, c, h, w].
            rngs: One generator of random numbers for each critic.
        """
        for _ in range(self.n_critic):
            batches = [draw_batch(own, self.batch_size, rng) for own, rng in zip(records, rngs, strict=True)]
            real, labels = (torch.stack(parts) for parts in zip(*batches, strict=True))
            mix = [torch.rand(self.batch_size, 1, 1, 1, generator=rng) for rng in rngs]
            with torch.no_grad():
                fake = generate(self._latents(rngs, real.device), labels)
            self.update(critics, real, fake, labels, upload(torch.stack(mix), real.device))

    def update(self, critics: Stack, real: Tensor, fake: Tensor, labels: Tensor, mix: Tensor) -> None:
        """One step of each critic on given batches; the shapes are those of `loss`."""
        critics.power_iteration()
        critics.descend_on(self.loss, real, fake, labels, mix)

    def image_gradient(self, critics: Stack, images: Tensor, labels: Tensor) -> Tensor:
        """Gradient of L_G = -sum D(x) in images x [G, B, c, h, w] with labels [G, B], neither clipped nor noised."""
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
        """Critics after `iterations` rounds, each against its own temporary generator (Algorithm 1, lines 2-12).

        Args:
            make_critic, make_generator: Return a new network on the device of the records.
            iterations: The number of rounds.
            num_classes: The labels are 0..num_classes-1.
            records, rngs: Records, and a generator of random numbers, of each critic.

        Returns:
            The tensors of a stack of critics, without Adam's moments: as in the released code, the training after the
            warm start begins with new moments.
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
        """One round for each critic and its generator: n_critic updates of the critic, then one of the generator."""
        self.improve(critics, records, generators, rngs)
        y = [torch.randint(num_classes, (self.batch_size,), generator=rng) for rng in rngs]
        labels = upload(torch.stack(y), records[0][0].device)
        critics.power_iteration()
        generators.power_iteration()
        generators.descend(-critics(generators(self._latents(rngs, labels.device), labels), labels).mean(1))

    def _latents(self, rngs: Sequence[torch.Generator], device: torch.device) -> Tensor:
        """Latents [G, B, latent_dim]."""
        shape = (self.batch_size, self.latent_dim)
        return torch.stack([draw_latents(self.latent, shape, rng, device) for rng in rngs])

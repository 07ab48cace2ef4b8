"""PSG: a small set of images for each class, learned from noisy gradients (Chen, Kerkouche & Fritz, "Private Set
Generation with Discriminative Information", NeurIPS 2022).

Guarantees: only the mechanism "classifier" reads training records. It releases T noisy sums of clipped gradients of a
classifier that is drawn at random again and again. The images and the training of the classifier on them are
post-processing of those releases and of public randomness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.image_set import FiniteSet, ImageSet, MatchNet, PriorSet, cosine_distance
from dpgen_bench.privacy.accountants.claims import opacus_epsilon
from dpgen_bench.privacy.bounds import PerRecordGradient
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.utils.upload import upload
from dpgen_bench.utils.validation import Checked, Count, CountOrZero, Decay, Positive


@dataclass
class PSG(Checked):
    """Gradient matching with T = networks x rounds x updates releases.

    Args:
        images_per_class: Number of images that are learned for each class.
        batch_size: B, the expected number of records in a release.
        clip_norm: C, the bound on the L2 norm of a record's gradient, all parameters together.
        sigma: The noise multiplier. If None, it is calibrated to the budget.
        networks: How often a new classifier is drawn.
        rounds: Number of trainings of a classifier; before each, the images are updated.
        updates: Number of releases, and of updates of the images, in a round.
        lr_images, momentum: Those of SGD for the images.
        prior: "none" learns pixels, "dcgan" the parameters of a generator, whose images at fixed latents are the set.
        lr_prior: Learning rate of Adam for these parameters.
        epochs: Epochs of training of the classifier on the images at the end of a round.
        lr_net: Learning rate of SGD for the classifier, with the same momentum.
        width: Channels of the classifier.
        microbatch: Number of records whose gradients are in memory at once. It does not change the sum.

    Raises:
        ValueError: For a value outside its range.
    """

    version = 1  # raise it when the same settings train a different generator
    claimed_relation = "add_remove"  # of `epsilon_claimed`
    added = ("prior", "lr_prior")  # runs from before these options existed keep their ids
    images_per_class: Count
    batch_size: Count
    clip_norm: Positive
    sigma: Positive | None
    networks: Count
    rounds: Count
    updates: Count
    lr_images: Positive
    momentum: Decay
    epochs: CountOrZero
    lr_net: Positive
    width: Count
    microbatch: Count | None
    prior: Literal["none", "dcgan"] = "none"
    lr_prior: Positive = 0.01

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float | None:
        """The paper's count: Opacus's RDP accountant under add/remove. It is sound."""
        return opacus_epsilon(events, delta)

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        kind = ImageSet if self.prior == "none" else PriorSet
        generator = NetGenerator.build(
            kind, data, ctx.device, latent_dim=1, latent="uniform", images_per_class=self.images_per_class
        )
        images = generator.net
        assert isinstance(images, FiniteSet)
        parameters = list(images.parameters())
        labels = torch.arange(data.num_classes, device=ctx.device).repeat_interleave(self.images_per_class)
        net = MatchNet(data.image_shape, data.num_classes, self.width).to(ctx.device)
        matched = net.matched()
        optimiser: torch.optim.Optimizer = torch.optim.SGD(parameters, self.lr_images, self.momentum)
        if self.prior == "dcgan":
            optimiser = torch.optim.Adam(parameters, self.lr_prior)

        q = min(1.0, self.batch_size / data.n)
        release = data.mechanism(
            "classifier",
            sample=Poisson(q),
            bound=PerRecordGradient(
                C=data.budget.clip_norm(self.clip_norm, self.sigma), module=net, microbatch=self.microbatch
            ),
            times=ctx.limit(self.networks * self.rounds * self.updates),
            std=None if self.sigma is None else self.sigma * self.clip_norm,
        )

        def losses(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(net(2.0 * x - 1.0), y, reduction="none")

        for t in ctx.steps(release.times, images=images, net=net, sgd=optimiser):
            if t % (self.rounds * self.updates) == 0:
                net.reset()
            private = release(losses)
            loss = F.cross_entropy(net(images.optimised()), labels)
            own = torch.autograd.grad(loss, list(matched.values()), create_graph=True)
            distance = cosine_distance(dict(zip(matched, own, strict=True)), private)
            for parameter, gradient in zip(parameters, torch.autograd.grad(distance, parameters), strict=True):
                parameter.grad = gradient
            optimiser.step()
            images.update()  # of a set with a prior, which are functions of what was learned
            if t % self.updates == self.updates - 1:
                self.train(net, images.images.detach().flatten(0, 1), labels, ctx.generator)
            ctx.log(distance=float(distance.detach()))

        return generator

    def train(self, net: MatchNet, x: Tensor, y: Tensor, rng: torch.Generator) -> None:
        """Train the classifier on the images, for `epochs` epochs of batches of at most 256."""
        sgd = torch.optim.SGD(net.parameters(), self.lr_net, self.momentum)
        for _ in range(self.epochs):
            for batch in upload(torch.randperm(len(y), generator=rng), y.device).split(256):
                sgd.zero_grad()
                F.cross_entropy(net(x[batch]), y[batch]).backward()
                sgd.step()
        net.zero_grad()

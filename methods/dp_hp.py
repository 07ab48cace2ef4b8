"""DP-HP: a generator trained to match noisy mean embeddings by Hermite features (Vinaroz, Charusaie, Harder,
Adamczewski & Park 2022).

The features phi_0 .. phi_C of a pixel are those of Mehler's expansion of the Gaussian kernel, in the order of their
weight (`dpgen_bench.nets.hermite`). Their squares sum to at most 1. P is the number of pixels of an image x.

    sum kernel      s(x) = [phi_k(x_p)] / sqrt(P), over all pixels p and k = 0 .. sum_order
    product kernel  r(x) = phi(x_a) phi(x_b)^T, k = 0 .. product_order; two random pixels a, b, new ones in each epoch
    release         1/m sum_i s(x_i) onehot(y_i)^T once, and 1/m sum_i r(x_i) onehot(y_i)^T once for each epoch; the
                    noise has std 2 sigma / m
    loss            |release of r - mean embedding of fakes|^2 + gamma |release of s - mean embedding of fakes|^2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context, train_generator
from dpgen_bench.nets.code_generator import CodeGenerator, DenseGenerator
from dpgen_bench.nets.hermite import hermite_features, hermite_sums, mehler_rho
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.factors import PerRecordProducts
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.utils.validation import Checked, Count, CountOrZero, NonNegative, Positive, Share, TwoOrMore


@dataclass
class DPHP(Checked):
    """All releases, followed by `steps` steps of Adam on the distance between mean embeddings.

    Guarantees: the rows s(x) onehot(y)^T and r(x) onehot(y)^T of a record have norms of at most 1, for every x.
    Replacing one record moves a sum of rows by at most 2 (adding or removing one, by 1). Noise of standard deviation
    2 sigma on the sum is the paper's 2 sigma / m on the mean.

    Args:
        sum_order, product_order: C, the largest order of the Hermite polynomials of each kernel.
        length_scale2: l^2, the squared length scale of both kernels (0.005 for digits, 0.15 for Fashion-MNIST).
        gamma: Weight of the sum kernel in the loss.
        share: Share of the sum kernel's release in the budget, as a fraction of mu^2; the product kernel gets the rest.
        sigma_sum, sigma_product: Noise multipliers, null: calibrated to the budget, jointly for all releases.
        generator: "dense" (digits) or "conv" (Fashion-MNIST).
        hidden: Width of the generator's hidden layers.
        latent_dim: Dimension of the latents, z ~ N(0, I).
        batch_size: The number of generated images in each step; their labels are uniform.
        steps: Number of training steps of the generator.
        epoch_steps: Steps of an epoch. Each epoch has its own two pixels and release of the product kernel.
        lr: Learning rate of Adam. It is multiplied by `lr_decay` after every epoch.

    Raises:
        ValueError: For a setting outside its range.
    """

    version = 1  # raise it when the same settings train a different generator
    claimed_relation = "replace_one"  # of `epsilon_claimed`
    sum_order: CountOrZero
    product_order: CountOrZero
    length_scale2: Positive
    gamma: NonNegative
    share: Share
    sigma_sum: Positive | None
    sigma_product: Positive | None
    generator: Literal["dense", "conv"]
    hidden: Count
    latent_dim: Count
    batch_size: TwoOrMore  # batch normalisation needs a variance
    steps: Count
    epoch_steps: Count
    lr: Positive
    lr_decay: Positive

    def epsilon_claimed(self, events: Sequence[Event], delta: float) -> float | None:
        """The authors' count: half of delta for each mechanism, by the classical conversion of its Rényi DP."""
        if len(events) != 2:
            return None
        if any(event.std == 0.0 for event in events):
            return math.inf
        mus = [math.sqrt(event.times) * event.sensitivity.replace_one / event.std for event in events]
        return sum(mu**2 / 2 + mu * math.sqrt(2 * math.log(2 / delta)) for mu in mus)

    def expect_data(self, class_names: Sequence[str], image_shape: Sequence[int]) -> None:
        if self.generator == "conv":
            CodeGenerator.expect(image_shape)
        if math.prod(image_shape) < 2:
            raise ValueError("image_shape: expected at least two pixels, for the pairs of the product kernel, got one.")

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        rho, classes, pixels = mehler_rho(self.length_scale2), data.num_classes, math.prod(data.image_shape)
        s, r, scale = self.sum_order + 1, self.product_order + 1, pixels**-0.5
        epochs = math.ceil(ctx.limit(self.steps) / self.epoch_steps)
        pairs = [torch.randperm(pixels, generator=ctx.generator)[:2].to(ctx.device) for _ in range(epochs)]

        def product_features(images: Tensor, pair: Tensor) -> Tensor:  # [b, c, h, w] -> [r, b, 2]
            return hermite_features(images.flatten(1)[:, pair], rho, self.product_order)

        # A record's row is the outer product of two factors. Batches of more than 2^21 numbers are slower: the system
        # provides their memory again for each batch, which takes longer than the computation.
        def request(name: str, shape: tuple[int, int], times: int, sigma: float | None, **rest: Any) -> Any:
            batch = max(1, 2**21 // math.prod(shape))
            bound = PerRecordProducts(C=1.0, shapes={"value": shape}, classes=classes, microbatch=batch)
            noise = rest if sigma is None else {"std": 2 * sigma * bound.C}
            return data.mechanism(name, sample=Full(), bound=bound, times=times, **noise)

        release_sum = request("sum_embedding", (1, s * pixels), 1, self.sigma_sum, share=self.share)
        release_product = request("product_embedding", (r, r), epochs, self.sigma_product)

        def sum_rows(images: Tensor, labels: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
            features = hermite_features(images.flatten(1), rho, self.sum_order) * scale  # [s, b, P]
            return {"value": (torch.ones_like(images[:, :1, 0, 0]), features.transpose(0, 1).flatten(1))}

        def product_rows(pair: Tensor, images: Tensor, labels: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
            a, b = product_features(images, pair).unbind(dim=2)
            return {"value": (a.T, b.T)}

        sums = release_sum(sum_rows).reshape(classes, s, pixels).transpose(0, 1) / data.n
        products = [release_product(partial(product_rows, pair)) / data.n for pair in pairs]  # [classes, r, r] each

        net = CodeGenerator if self.generator == "conv" else DenseGenerator
        more: dict[str, Any] = {"align_corners": True} if self.generator == "conv" else {}
        generator = NetGenerator.build(net, data, ctx.device, latent_dim=self.latent_dim, hidden=self.hidden, **more)

        def loss(t: int, images: Tensor, labels: Tensor) -> Tensor:
            one_hot = F.one_hot(labels, classes).to(images.dtype) / len(images)
            generated_sums = hermite_sums(images.flatten(1), one_hot * scale, rho, self.sum_order)
            a, b = product_features(images, pairs[t // self.epoch_steps]).unbind(dim=2)
            generated = torch.einsum("bc,jb,kb->cjk", one_hot, a, b)
            distance = (products[t // self.epoch_steps] - generated).square().sum()
            return distance + self.gamma * (sums - generated_sums).square().sum()

        train_generator(
            ctx,
            generator,
            loss,
            steps=self.steps,
            batch_size=self.batch_size,
            lr=self.lr,
            lr_decay=self.lr_decay,
            decay_steps=self.epoch_steps,
        )
        return generator

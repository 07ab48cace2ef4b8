"""DP-NTK: a generator trained to match one noisy mean embedding of neural tangent features (Yang et al. 2024).

The feature of an image is the gradient of an untrained network in its own parameters, scaled to norm 1. The mean of the
records' features, in one block for each class, is released once, with Gaussian noise. Everything after that release is
post-processing, so the number of training steps does not change epsilon.

    network    f(x) = V LN(relu(W x + b)) + c,   with drawn weights that are never trained
    feature    phi(x) = grad of sum_j f_j(x) in (W, b, V, c),   e(x, y) = phi(x) / |phi(x)| onehot(y)^T
    release    M = 1/m sum_i e(x_i, y_i) + N(0, (2 sigma / m)^2 I)
    loss       |M - 1/b sum_j e(G(zeta_j, y_j), y_j)|^2

Features are outer products (`dpgen_bench.nets.ntk_features`), so both means are products of two matrices, and no record
has a gradient of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context, train_generator
from dpgen_bench.nets.code_generator import CodeGenerator
from dpgen_bench.nets.ntk_features import NTKFeatures, squared_distance
from dpgen_bench.privacy.factors import PerRecordProducts
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.utils.validation import Checked, Count, Positive, TwoOrMore


@dataclass
class DPNTK(Checked):
    """One release, followed by `steps` steps of Adam on the squared distance between the two mean embeddings.

    Guarantees: replacing one record moves the sum of features by at most 2 (adding or removing one, by 1). Noise of
    standard deviation 2 sigma on the sum is the paper's 2 sigma / m on the mean. The noise is calibrated to
    privacy.epsilon.

    Args:
        width: The number of hidden units of the network; a feature has about width times pixels numbers.
        bias_scale: Factor of the network's bias b. With the authors' 1, an image and a darker copy have almost the same
            feature.
        latent_dim: Dimension of zeta ~ N(0, I).
        batch_size: b, the number of generated images in each step.
        labels: Their labels: "uniform", each drawn independently, or "balanced", each class in turn. Balanced labels
            have no random class sizes, whose noise in the loss decreases with b.
        steps: Number of training steps of the generator.
        lr: Learning rate of Adam. It is multiplied by `lr_decay` after every `decay_steps` steps.

    Raises:
        ValueError: For a setting outside its range.
    """

    version = 1  # raise it when the same settings train a different generator
    width: Count
    bias_scale: Positive
    latent_dim: Count
    batch_size: TwoOrMore  # batch normalisation needs a variance
    labels: Literal["uniform", "balanced"]
    steps: Count
    lr: Positive
    lr_decay: Positive
    decay_steps: Count

    def expect_data(self, class_names: Sequence[str], image_shape: Sequence[int]) -> None:
        CodeGenerator.expect(image_shape)

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        pixels = math.prod(data.image_shape)
        features = NTKFeatures.draw(pixels, self.width, data.num_classes, ctx.generator, ctx.device, self.bias_scale)

        release = data.mechanism(
            "mean_embedding",
            sample=Full(),
            bound=PerRecordProducts(
                C=1.0, shapes={"first": (self.width, pixels + 1), "last": (1, self.width + 1)}, classes=data.num_classes
            ),
            times=1,
        )

        def factors(images: Tensor, labels: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
            outer, inputs, hidden = features(images)
            return {"first": (outer, inputs), "last": (torch.ones_like(hidden[:, :1]), hidden)}

        noisy_sum = release(factors)
        first, last = noisy_sum["first"] / data.n, noisy_sum["last"].squeeze(1) / data.n

        generator = NetGenerator.build(CodeGenerator, data, ctx.device, latent_dim=self.latent_dim, align_corners=True)

        def loss(t: int, images: Tensor, labels: Tensor) -> Tensor:
            return squared_distance(first, last, features(images), labels)

        train_generator(
            ctx,
            generator,
            loss,
            steps=self.steps,
            batch_size=self.batch_size,
            balanced=self.labels == "balanced",
            lr=self.lr,
            lr_decay=self.lr_decay,
            decay_steps=self.decay_steps,
        )
        return generator

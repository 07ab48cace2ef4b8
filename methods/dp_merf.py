"""DP-MERF: a generator trained to match one noisy mean embedding of the records (Harder, Adamczewski & Park 2021).

Each of the m records (x_i, y_i) is mapped to random Fourier features times its one-hot label. The mean over the records
is released once, with Gaussian noise. Everything after that release is post-processing, so the number of training steps
does not change epsilon.

    features   z(x) = [cos(w_1 x) .. cos(w_{D/2} x), sin(w_1 x) .. sin(w_{D/2} x)] / sqrt(D/2),   w_k ~ N(0, I / l^2)
    embedding  e(x, y) = z(x) onehot(y)^T, a matrix [D, classes] of norm 1
    release    target = 1/m sum_i e(x_i, y_i) + N(0, (2 sigma / m)^2 I)
    loss       |target - 1/b sum_j e(G(zeta_j, y_j), y_j)|^2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context, train_generator
from dpgen_bench.nets.code_generator import CodeGenerator
from dpgen_bench.privacy.bounds import PerRecord
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.utils.validation import Checked, Count, Positive, TwoOrMore


@dataclass
class DPMERF(Checked):
    """One release, followed by `steps` steps of Adam on the squared distance between the two mean embeddings.

    Guarantees: replacing one record moves the sum of embeddings by at most 2 (adding or removing one, by 1). Noise of
    standard deviation 2 sigma on the sum is the paper's 2 sigma / m on the mean. The noise is calibrated to
    privacy.epsilon.

    Args:
        features: D, the number of random Fourier features, which is even.
        length_scale2: l^2, the squared length scale of the kernel (105 for digits, 127 for Fashion-MNIST).
        latent_dim: Dimension of zeta ~ N(0, I).
        batch_size: b, the number of generated images in each step; their labels are uniform.
        steps: Number of training steps of the generator.
        lr: Learning rate of Adam. It is multiplied by `lr_decay` after every `decay_steps` steps (an epoch of MNIST).

    Raises:
        ValueError: For a setting outside its range, or an odd number of features.
    """

    version = 1  # raise it when the same settings train a different generator
    features: Count
    length_scale2: Positive
    latent_dim: Count
    batch_size: TwoOrMore  # batch normalisation needs a variance
    steps: Count
    lr: Positive
    lr_decay: Positive
    decay_steps: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features % 2:
            raise ValueError(f"method.features: expected an even number (cosines and sines), got {self.features}.")

    def expect_data(self, class_names: Sequence[str], image_shape: Sequence[int]) -> None:
        CodeGenerator.expect(image_shape)

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        pixels = math.prod(data.image_shape)
        frequencies = torch.randn(self.features // 2, pixels, generator=ctx.generator) / self.length_scale2**0.5
        frequencies = frequencies.to(ctx.device)

        def embed(images: Tensor) -> Tensor:  # [b, c, h, w] -> [b, D], every row of norm 1
            angles = images.flatten(1) @ frequencies.T
            return torch.cat([angles.cos(), angles.sin()], dim=1) / (self.features / 2) ** 0.5

        def one_hot(labels: Tensor) -> Tensor:  # [b] -> [b, classes]
            return F.one_hot(labels, data.num_classes).float()

        generator = NetGenerator.build(CodeGenerator, data, ctx.device, latent_dim=self.latent_dim)
        release = data.mechanism(
            "mean_embedding",
            sample=Full(),
            bound=PerRecord(C=1.0, shape=(self.features, data.num_classes), microbatch=250),
            times=1,
        )
        noisy_sum = release(lambda x, y: embed(x)[:, :, None] * one_hot(y)[:, None, :])
        target = noisy_sum / data.n

        def loss(t: int, images: Tensor, labels: Tensor) -> Tensor:
            generated = embed(images).T @ one_hot(labels) / len(images)  # 1/b sum_j e(G(zeta_j, y_j), y_j)
            return (target - generated).square().sum()

        train_generator(
            ctx,
            generator,
            loss,
            steps=self.steps,
            batch_size=self.batch_size,
            lr=self.lr,
            lr_decay=self.lr_decay,
            decay_steps=self.decay_steps,
        )
        return generator

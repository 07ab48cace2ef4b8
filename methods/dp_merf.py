"""DP-MERF (Harder, Adamczewski, Park 2021): one noisy mean embedding, then a generator trained to match it.

Each record becomes random Fourier features times its one-hot label; the mean over the records is released once with
Gaussian noise. Everything after that release is post-processing, so the generator may train for as long as it likes.

    z(x) = [cos(w_1·x) .. cos(w_{D/2}·x), sin(w_1·x) .. sin(w_{D/2}·x)] / sqrt(D/2),   w_k ~ N(0, I / ℓ²)
    μ    = (1/m) Σ_i z(x_i) ⊗ onehot(y_i),                 |z(x) ⊗ onehot(y)| = 1
    loss = | μ + N(0, (2σ/m)² I) − (1/b) Σ_j z(G(ζ_j, y_j)) ⊗ onehot(y_j) |²
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.code_generator import CodeGenerator
from dpgen_bench.privacy.bounds import PerRecord
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.utils.validation import Checked, Count, Positive


@dataclass
class DPMERF(Checked):
    """One release, then `steps` of Adam on its distance to the fakes' mean embedding.

    Guarantees: one record exchanged moves the sum of embeddings by at most 2 (by 1 when it joins or leaves), so noise
    of standard deviation 2σ on the sum is the paper's 2σ/m on the mean. σ is calibrated exactly to privacy.epsilon.

    Args:
        features: D, an even number of random Fourier features.
        length_scale2: ℓ², the kernel's squared length (105 for digits, 127 for Fashion-MNIST).
        latent_dim: dimension of ζ ~ N(0, I).
        batch_size: b, fakes per step, labels uniform.
        lr: of Adam, multiplied by `lr_decay` after every `decay_steps` steps (one epoch of MNIST).
    """

    version = 1  # raised when the same settings train something else
    features: Count
    length_scale2: Positive
    latent_dim: Count
    batch_size: Count
    steps: Count
    lr: Positive
    lr_decay: Positive
    decay_steps: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features % 2:
            raise ValueError(f"method.features: expected an even number (cosines and sines), got {self.features}.")

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        pixels = math.prod(data.image_shape)
        frequencies = torch.randn(self.features // 2, pixels, generator=ctx.generator) / self.length_scale2**0.5
        frequencies = frequencies.to(ctx.device)

        def embed(images: Tensor) -> Tensor:  # [b, c, h, w] -> [b, D], every row of norm 1
            angles = images.flatten(1) @ frequencies.T
            return torch.cat([angles.cos(), angles.sin()], dim=1) / (self.features / 2) ** 0.5

        def one_hot(labels: Tensor) -> Tensor:  # [b] -> [b, classes]
            return F.one_hot(labels, data.num_classes).float()

        release = data.mechanism(
            "mean_embedding",
            sample=Full(),
            bound=PerRecord(C=1.0, shape=(self.features, data.num_classes), microbatch=250),
            times=1,
        )
        total = release(lambda x, y: embed(x)[:, :, None] * one_hot(y)[:, None, :])
        target = total / data.n  # μ + N(0, (2σ/m)² I)

        generator = NetGenerator.build(CodeGenerator, data, ctx.device, latent_dim=self.latent_dim)
        net = generator.net
        adam = torch.optim.Adam(net.parameters(), lr=self.lr)
        decay = torch.optim.lr_scheduler.StepLR(adam, self.decay_steps, self.lr_decay)

        for t in ctx.steps(ctx.limit(self.steps), net=net, adam=adam, decay=decay):
            zeta, y = ctx.latents(generator, self.batch_size)
            fakes = embed(net(zeta, y)).T @ one_hot(y) / self.batch_size  # (1/b) Σ_j z(G(ζ_j, y_j)) ⊗ onehot(y_j)
            loss = (target - fakes).square().sum()
            adam.zero_grad()
            loss.backward()
            adam.step()
            decay.step()
            if t % 50 == 0:
                ctx.log(loss=float(loss.detach()))
        return generator

"""DP-MERF (Harder, Adamczewski, Park 2021): one noisy mean embedding, then a generator trained to match it.

Each record becomes random Fourier features times its one-hot label; the mean over the records is released once with
Gaussian noise. Everything after that release is post-processing, so the generator may train for as long as it likes.

    z(x) = [cos(w_1·x) .. cos(w_{D/2}·x), sin(w_1·x) .. sin(w_{D/2}·x)] / sqrt(D/2),   w_k ~ N(0, I / ℓ²)
    μ    = (1/m) Σ_i z(x_i) ⊗ onehot(y_i),                 |z(x) ⊗ onehot(y)| = 1
    loss = | μ + N(0, (2σ/m)² I) − (1/b) Σ_j z(G(ζ_j, y_j)) ⊗ onehot(y_j) |²
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.privacy.bounds import PerRecord
from dpgen_bench.privacy.sampling import Full


class CodeGenerator(nn.Module):
    """G(ζ [b, latent_dim], y [b]) -> images [b, c, h, w] in [0, 1]: two linear layers, then two 5x5 convolutions.

    166,161 parameters for 28x28 grey images, ten classes and latent_dim 5. Height and width are multiples of 4.
    """

    def __init__(self, latent_dim: int, num_classes: int, image_shape: tuple[int, int, int], hidden: int = 200) -> None:
        super().__init__()
        c, h, w = image_shape
        if h % 4 or w % 4:
            raise ValueError(f"expected a height and width that are multiples of 4, got {h}x{w}.")
        self.num_classes, self.grid = num_classes, (16, h // 4, w // 4)
        pixels = 16 * (h // 4) * (w // 4)
        first = [nn.Linear(latent_dim + num_classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU()]
        second = [nn.Linear(hidden, pixels), nn.BatchNorm1d(pixels), nn.ReLU()]
        self.code = nn.Sequential(*first, *second)
        twice = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        coarse, fine = nn.Conv2d(16, 8, 5, padding=2), nn.Conv2d(8, c, 5, padding=2)
        self.image = nn.Sequential(twice, coarse, nn.ReLU(), twice, fine, nn.Sigmoid())

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        code = self.code(torch.cat([z, F.one_hot(y, self.num_classes).to(z.dtype)], dim=1))
        return self.image(code.reshape(-1, *self.grid))


@dataclass
class DPMERF:
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

    features: int = 10_000
    length_scale2: float = 105.0
    latent_dim: int = 5
    batch_size: int = 100
    steps: int = 3_000
    lr: float = 0.01
    lr_decay: float = 0.9
    decay_steps: int = 600

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        c, h, w = data.image_shape
        frequencies = torch.randn(self.features // 2, c * h * w, generator=ctx.generator) / self.length_scale2**0.5
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
        target = total / data.n

        config = {
            "_target_": "methods.dp_merf.CodeGenerator",
            "latent_dim": self.latent_dim,
            "num_classes": data.num_classes,
            "image_shape": [c, h, w],
        }
        net = CodeGenerator(self.latent_dim, data.num_classes, (c, h, w)).to(ctx.device)
        adam = torch.optim.Adam(net.parameters(), lr=self.lr)
        decay = torch.optim.lr_scheduler.StepLR(adam, self.decay_steps, self.lr_decay)

        for t in ctx.steps(ctx.limit(self.steps), net=net, adam=adam, decay=decay):
            zeta = torch.randn(self.batch_size, self.latent_dim, generator=ctx.generator).to(ctx.device)
            y = torch.randint(data.num_classes, (self.batch_size,), generator=ctx.generator).to(ctx.device)
            fakes = embed(net(zeta, y)).T @ one_hot(y) / self.batch_size
            loss = (target - fakes).square().sum()
            adam.zero_grad()
            loss.backward()
            adam.step()
            decay.step()
            if t % 50 == 0:
                ctx.log(loss=float(loss.detach()))
        return NetGenerator(net, config, self.latent_dim, data.num_classes, (c, h, w))

"""Cost of GS-WGAN's warm start: critics trained one by one against critics trained as a stack, per critic.

One iteration is n_critic = 5 updates of the paper's critic (1,071,105 parameters, 32 records of 28x28) and one of its
throw-away DCGAN generator. `modules` is each critic as a plain module with its own optimiser; `stack of G` trains G
critics as one batched network. The second part compares nearest upsampling followed by a 3x3 convolution, of 256
channels and 32 images, forward and backward, with `upsample_conv3x3`, which needs four ninths of the multiplications.
All are interleaved in one process, on one CPU thread and, where there is one, on an accelerator. CPU times are
processor time of the process; ratios are medians of round-by-round ratios. Stacking saves launches of kernels, so no
gain is expected on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.nets.latents import draw_latents
from dpgen_bench.nets.stack import Stack
from dpgen_bench.nets.wasserstein import CriticTraining, draw_batch
from dpgen_bench.nets.wgan import DCGANGenerator, ProjectionCritic, upsample_conv3x3
from tests.bench._machine import on_each_device
from tests.bench._ways import compared

SHAPE, CLASSES, TRAINING = (1, 28, 28), 10, CriticTraining()
STACKS = {"cpu": (1, 4), "cuda": (1, 10, 50)}
SIDES = (4, 8, 16)


def _critic(device: str) -> nn.Module:
    return ProjectionCritic(SHAPE, CLASSES).to(device)


def _generator(device: str) -> nn.Module:
    return DCGANGenerator(SHAPE, CLASSES).to(device)


def _generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(number) for number in range(count)]


def as_modules(device: str, records: tuple[Tensor, Tensor]) -> Callable[[], None]:
    """An iteration of one critic as a plain module, without the stack."""
    critic, generator = _critic(device).train(), _generator(device).train()
    adams = [torch.optim.Adam(net.parameters(), TRAINING.lr, TRAINING.betas) for net in (critic, generator)]
    (rng,) = _generators(1)
    size = TRAINING.batch_size

    def latents() -> Tensor:
        return draw_latents(TRAINING.latent, (size, TRAINING.latent_dim), rng, torch.device(device))

    def iterate() -> None:
        for _ in range(TRAINING.n_critic):
            real, labels = draw_batch(records, size, rng)
            with torch.no_grad():
                fake = generator(latents(), labels)
            real_scores, fake_scores = critic(torch.cat([real, fake]), labels.repeat(2)).chunk(2)
            mix = torch.rand(size, 1, 1, 1, generator=rng).to(device)
            between = (mix * real + (1.0 - mix) * fake).requires_grad_()
            (slopes,) = torch.autograd.grad(critic(between, labels).sum(), between, create_graph=True)
            penalty = (slopes.flatten(1).norm(dim=1) - 1.0).square().mean()
            loss = fake_scores.mean() - real_scores.mean() + TRAINING.gp_weight * penalty
            loss = loss + TRAINING.drift * real_scores.square().mean()
            adams[0].zero_grad()
            loss.backward()
            adams[0].step()
        labels = torch.randint(CLASSES, (size,), generator=rng).to(device)
        adams[1].zero_grad()
        (-critic(generator(latents(), labels), labels).mean()).backward()
        adams[1].step()

    return iterate


def as_stack(device: str, records: tuple[Tensor, Tensor], count: int) -> Callable[[], None]:
    rng = _generators(count)
    critics = TRAINING.stack(_critic(device), Stack.initial(lambda: _critic(device), rng))
    generators = TRAINING.stack(_generator(device), Stack.initial(lambda: _generator(device), rng))
    return lambda: TRAINING.iterate(critics, generators, CLASSES, [records] * count, rng)


def training(device: str) -> dict[str, Any]:
    """Milliseconds of an iteration per critic, and the ratio of each way's time to that of the widest stack."""
    images = torch.rand(60, *SHAPE, generator=_generators(1)[0]).to(device)
    records = (images, (torch.arange(60) % CLASSES).to(device))
    ways = {"modules": (1, as_modules(device, records))}
    ways.update({f"stack of {count}": (count, as_stack(device, records, count)) for count in STACKS[device]})
    return compared(ways, f"stack of {STACKS[device][-1]}", device)


def upsampling(device: str, side: int) -> dict[str, Any]:
    h = torch.randn(32, 256, side, side, device=device, requires_grad=True)
    weight = torch.randn(256, 256, 3, 3, device=device, requires_grad=True)

    def plain() -> None:
        torch.autograd.grad(F.conv2d(F.interpolate(h, scale_factor=2), weight, padding=1).sum(), [h, weight])

    def exact() -> None:
        torch.autograd.grad(upsample_conv3x3(h, weight).sum(), [h, weight])

    return compared(
        {"interpolate, then convolve": (1, plain), "upsample_conv3x3": (1, exact)}, "upsample_conv3x3", device
    )


def measure() -> dict[str, Any]:
    """All values of this benchmark."""
    return on_each_device(
        __doc__,
        lambda device: {
            "warm start, per critic": training(device),
            **{f"upsampling {side} to {2 * side}": upsampling(device, side) for side in SIDES},
        },
    )

"""Cost of a release of DataLens: teachers trained one by one against teachers trained as a stack, per teacher.

A release is two updates of a teacher on 15 records and 15 generated images of 28x28, and the gradients of its scores in
the images. Teachers are those of G-PATE's authors (conv, 555,059 parameters) and of reduced presets (dense, 13,313).
`modules` is each teacher as a plain module with its own optimiser, which convolves the planes of the label as G-PATE's
authors do; `stack of G` trains G teachers as one batched network, as the methods do. All are interleaved in one
process, on one CPU thread and, where there is one, on an accelerator. CPU times are processor time of the process;
ratios are medians of round-by-round ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.nets.g_pate import ConvTeacher
from dpgen_bench.nets.stack import Stack
from dpgen_bench.nets.teachers import TEACHERS, score_gradients, update_teachers
from dpgen_bench.nets.wasserstein import draw_batch
from tests.bench._machine import on_each_device
from tests.bench._ways import compared

SHAPE, CLASSES, SIZE, UPDATES, LR, BETAS = (1, 28, 28), 10, 15, 2, 1e-3, (0.5, 0.999)
STACKS = {"conv": {"cpu": (1, 10), "cuda": (1, 10, 200)}, "dense": {"cpu": (1, 10, 100), "cuda": (1, 100, 1000)}}


class Planes(ConvTeacher):
    """The teacher with the label as constant planes of each convolution's input."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        onehot = F.one_hot(y, self.num_classes).to(x.dtype)
        for conv in (self.conv1, self.conv2):
            planes = onehot[:, :, None, None].expand(-1, -1, *x.shape[2:])
            x = F.leaky_relu(conv(F.pad(torch.cat([x, planes], dim=1), (1, 2, 1, 2))), 0.2)
        x = F.leaky_relu(self.linear(torch.cat([x.flatten(1), onehot], dim=1)), 0.2)
        return self.logit(torch.cat([x, onehot], dim=1)).flatten()


def _images(seed: int, device: str) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(SIZE, *SHAPE, generator=rng).to(device), (torch.arange(SIZE) % CLASSES).to(device)


AS_MODULE: dict[str, type[nn.Module]] = {**TEACHERS, "conv": Planes}


def as_module(kind: str, device: str) -> Callable[[], None]:
    """A release of one teacher as a plain module."""
    teacher, records = AS_MODULE[kind](SHAPE, CLASSES).to(device), _images(1, device)
    fake, labels = _images(0, device)
    adam, rng = torch.optim.Adam(teacher.parameters(), LR, BETAS), torch.Generator().manual_seed(0)

    def release() -> None:
        for _ in range(UPDATES):
            loss = -F.logsigmoid(teacher(*draw_batch(records, SIZE, rng))).mean()
            loss = loss - F.logsigmoid(-teacher(fake, labels)).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
        images = fake.clone().requires_grad_()
        torch.autograd.grad(F.logsigmoid(teacher(images, labels)).mean(), images)

    return release


def as_stack(kind: str, device: str, count: int) -> Callable[[], None]:
    """A release of `count` teachers, with the copies of their states."""
    rngs = [torch.Generator().manual_seed(number) for number in range(count)]

    def make() -> nn.Module:
        return TEACHERS[kind](SHAPE, CLASSES).to(device)

    template, shards, (fake, labels) = make(), [_images(1, device)] * count, _images(0, device)
    states = Stack.initial(make, rngs)

    def release() -> None:
        nonlocal states
        T = Stack(template, states, lr=LR, betas=BETAS)
        for _ in range(UPDATES):
            update_teachers(T, shards, rngs, fake, labels, SIZE)
        score_gradients(T, fake, labels)
        states = T.tensors(adam=True)

    return release


def measure() -> dict[str, Any]:
    """All values of this benchmark."""

    def releases(device: str) -> dict[str, Any]:
        groups = {}
        for kind, stacks in STACKS.items():
            ways = {"modules": (1, as_module(kind, device))}
            ways.update({f"stack of {count}": (count, as_stack(kind, device, count)) for count in stacks[device]})
            groups[f"release, per {kind} teacher"] = compared(ways, f"stack of {stacks[device][-1]}", device)
        return groups

    return on_each_device(__doc__, releases)

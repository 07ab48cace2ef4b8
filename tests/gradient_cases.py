"""Helpers of the tests of clipped gradient sums: a float64 loop over records, a network, its loss and rows."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from torch import Tensor, nn

BACKENDS = ("bookkeeping", "opacus")
TOLERANCE = 1e-5

both = pytest.mark.parametrize("backend", BACKENDS)
some_examples = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].flatten().double() for name in sorted(gradients)])


def loop(module: nn.Module, loss_of: Callable, rows: tuple[Tensor, ...]) -> Tensor:
    """Per-record gradients [b, p] in float64: one record at a time through ordinary autograd."""
    exact = copy.deepcopy(module).double()
    rows = tuple(row.double() if row.is_floating_point() else row for row in rows)
    names = sorted(name for name, p in exact.named_parameters() if p.requires_grad)
    parameters = [exact.get_parameter(name) for name in names]
    gradients_of_records = []
    for i in range(len(rows[0])):
        loss = loss_of(exact)(*(row[i : i + 1] for row in rows)).sum()
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        pairs = zip(grads, parameters, strict=True)
        gradients_of_records.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]))
    return torch.stack(gradients_of_records)


def clip(per_record: Tensor, max_norm: float) -> Tensor:
    norms = per_record.norm(dim=1, keepdim=True)
    return per_record * (max_norm / norms.clamp_min(max_norm))


def assert_same(got: Tensor, clipped: Tensor) -> None:
    """A sum equals the sum of `clipped` [b, p], relative to the norms of the summands (which may cancel)."""
    assert (got - clipped.sum(0)).norm() <= TOLERANCE * clipped.norm(dim=1).sum()


def squared_output(module: nn.Module) -> Callable[..., Tensor]:
    """A loss whose gradient is zero at outputs of 1 only: ½‖out - 1‖² per record."""
    return lambda *rows: 0.5 * (module(*rows) - 1.0).flatten(1).square().sum(1)


class Net(nn.Module):
    """A network with all supported types of layers, on images, positions and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1)
        self.positions = nn.Linear(3, 5)
        self.label = nn.Embedding(4, 5)
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.up(torch.tanh(self.conv(x)))).flatten(2).transpose(1, 2)  # [b, T, 3]
        h = torch.tanh(self.positions(h)).mean(1) + self.label(y)
        return self.head(torch.tanh(h)).squeeze(1)


def net_loss(module: nn.Module) -> Callable[..., Tensor]:
    return lambda x, y: F.softplus(3.0 * module(x, y))


def net_rows(b: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(b, 2, 6, 6, generator=generator), torch.randint(4, (b,), generator=generator)

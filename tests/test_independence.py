"""`RowComparison` detects weak and rare coupling of rows, and does not mistake rounding for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.privacy.bounds import Batch, PerRecord, PerRecordGradient
from dpgen_bench.privacy.key import Key
from dpgen_bench.testing import ConformanceError
from dpgen_bench.testing.bench import random_images
from dpgen_bench.testing.independence import RowComparison

SHAPE = (1, 8, 8)


def draw(records: int, seed: int = 0) -> Batch:
    images, labels = random_images(SHAPE, records, 3, seed)
    return Batch(images, labels, torch.arange(records), Key.seeded("release"))


def check(fn: Any, bound: Any, records: int = 12, seed: int = 0, public: Any = None) -> torch.dtype:
    """The precision of the comparison; raises ConformanceError if rows depend on other records."""
    comparison = RowComparison("query", seed, bound, fn, draw(records, seed), public, 3)
    comparison.check()
    return comparison.dtype


ROWS = PerRecord(C=1.0, shape=SHAPE)

COUPLED = {
    "a faint mean": lambda x, y: x + 1e-5 * x.nan_to_num().clamp(-99, 99).mean(dim=0),
    "the next record": lambda x, y: x + 0.01 * x.nan_to_num().clamp(-9, 9).roll(1, dims=0),
    "the number of records": lambda x, y: x + 1e-4 * len(x),
    "the position": lambda x, y: x + 1e-4 * torch.arange(len(x))[:, None, None, None],
    "whether others are NaN": lambda x, y: x + float(torch.isnan(x).any()),
    "whether others have its class": lambda x, y: x * (y[:, None] == y).sum(dim=1)[:, None, None, None],
    "whether others are large": lambda x, y: x / x.abs().nan_to_num().amax().clamp_min(1.0),
    "batch normalisation": lambda x, y: F.batch_norm(x, None, None, training=True),
    "the number of earlier calls": [0.0],
}


@pytest.mark.parametrize("records", [1, 2, 12])
@pytest.mark.parametrize("fn", COUPLED.values(), ids=COUPLED)
def test_coupled_rows_are_detected(fn, records):
    if isinstance(fn, list):
        calls = fn

        def fn(x: Tensor, y: Tensor) -> Tensor:
            calls[0] += 0.01
            return x + calls[0]

    with pytest.raises(ConformanceError, match=r"Row i must depend|two results for the same records"):
        check(fn, ROWS, records)


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    convolutions = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 4, stride=2), nn.LeakyReLU(0.2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(72, 16), nn.ReLU(), nn.Linear(16, 3))


@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_rounding_of_other_shapes_is_no_coupling(precision):
    """Networks with kinks; a function that casts to float32 cannot be evaluated in float64."""
    for seed in range(8):
        module = net(seed)

        def scores(x: Tensor, module: nn.Module = module) -> Tensor:
            return module(x.float() if precision == torch.float32 else x)

        def losses(x: Tensor, y: Tensor, scores: Any = scores) -> Tensor:
            return F.cross_entropy(scores(x), y, reduction="none")

        assert check(losses, PerRecordGradient(C=1e-3, module=module), seed=seed) == precision
        assert check(lambda x, y, scores=scores: scores(x), PerRecord(C=1.0, shape=(3,)), seed=seed) == precision
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


FAINT_IN_FLOAT32 = {
    "noise by position": lambda x: x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(7)),
    "the number of records": lambda x: 8.0 * x / len(x),
    "the first position": lambda x: x * (torch.arange(len(x)) > 0)[:, None, None, None],
    "the last position": lambda x: x * (torch.arange(len(x)) < len(x) - 1)[:, None, None, None],
    "the number of records in tens": lambda x: x * (1 + len(x) // 10),
}


@pytest.mark.parametrize("fn", FAINT_IN_FLOAT32.values(), ids=FAINT_IN_FLOAT32)
def test_each_kind_of_coupling_is_detected_in_float32(fn):
    """Each kind shows in some variants of the draw only: a position in other orders, a number in other sizes."""
    with pytest.raises(ConformanceError, match="Row i must depend"):
        check(lambda x, y: fn(x.float()), ROWS)


class RoundedByShape(nn.Module):
    """Simulates the rounding of matrix products of different shapes and positions, the same on every machine."""

    def forward(self, h: Tensor) -> Tensor:
        return h + 1e-6 * torch.cos(torch.arange(len(h)) + 2.0 * len(h))[:, None]


@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_records_on_a_kink_are_no_coupling(slope):
    """Each record has one unit whose input is zero up to rounding, so that rounding determines its gradient."""
    torch.manual_seed(0)
    images = draw(12).images.flatten(1)
    first, last = nn.Linear(64, 12), nn.Linear(12, 1)
    module = nn.Sequential(nn.Flatten(), first, RoundedByShape(), nn.LeakyReLU(slope), last)
    with torch.no_grad():
        first.bias.copy_(-(images @ first.weight.T).diag())

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return module(x.float()).squeeze(1)

    assert check(losses, PerRecordGradient(C=1e-3, module=module)) == torch.float32


@pytest.mark.parametrize("backend", ["bookkeeping", "opacus"])
@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_a_gradient_that_is_not_a_number_hides_nothing(backend, precision):
    """The square root has an infinite slope at zero, so one record makes the weighted sum of all gradients NaN."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 1))
    bound = PerRecordGradient(C=1e-4, module=module, backend=backend)

    def losses(x: Tensor, weighted: float, bad: Tensor) -> Tensor:
        scores = module(x if precision == torch.float64 else x.float()).squeeze(1)
        own = F.softplus(scores)
        nan = (scores - scores.detach())[bad].abs().sqrt()
        return (own * (1 + weighted * own.detach().clamp(0, 9).mean())).index_put((bad,), nan)

    def dark(x: Tensor) -> Tensor:
        return x.flatten(1).mean(1) < 0.5

    assert check(lambda x, y: losses(x, 0.0, dark(x)), bound) == precision
    with pytest.raises(ConformanceError, match="Row i must depend"):
        check(lambda x, y: losses(x, 1.0, dark(x)), bound)
    with pytest.raises(ConformanceError, match="of 12 records none"):
        check(lambda x, y: losses(x, 1.0, dark(x) | True), bound)


def test_the_nan_of_a_public_row_hides_nothing():
    module = net(1)
    public = (torch.rand(1, *SHAPE), torch.zeros(1).long())
    bound = PerRecordGradient(C=1e-4, module=module, public_rows=1)

    def losses(x: Tensor, y: Tensor, mask: Tensor, weighted: float) -> Tensor:
        own = F.cross_entropy(module(x), y, reduction="none")
        mean = own[~mask].detach().clamp(0, 9).mean() if (~mask).any() else 0.0
        return torch.cat([own[~mask] * (1 + weighted * mean), (own - own.detach())[mask].abs().sqrt()])

    check(lambda x, y, mask: losses(x, y, mask, 0.0), bound, public=public)
    with pytest.raises(ConformanceError, match="Row i must depend"):
        check(lambda x, y, mask: losses(x, y, mask, 0.1), bound, public=public)


def test_rows_may_be_gradients():
    module = net(2)

    def rows(x: Tensor, y: Tensor) -> Tensor:
        x = x.nan_to_num().clamp(0, 1)  # otherwise a NaN of one record is in all gradients, because 0 * NaN is NaN
        losses = F.cross_entropy(module(x), y, reduction="none")
        return torch.stack([torch.autograd.grad(loss, module[-1].bias, retain_graph=True)[0] for loss in losses])

    check(rows, PerRecord(C=1.0, shape=(3,)))


def test_coupled_losses_are_detected_where_clipping_hides_them():
    module = net(0)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        own = F.cross_entropy(module(x), y, reduction="none")
        return own * (1.0 + 0.01 * own.mean().clamp(0, 9))

    with pytest.raises(ConformanceError, match="per-record gradients, before clipping"):
        check(losses, PerRecordGradient(C=1e-4, module=module))


def test_public_rows_must_not_depend_on_the_draw():
    module = net(1)
    public = (torch.rand(2, *SHAPE), torch.zeros(2).long())

    def losses(x: Tensor, y: Tensor, mask: Tensor, coupling: float) -> Tensor:
        own = F.cross_entropy(module(x), y, reduction="none")
        return torch.where(mask, own * (1.0 + coupling * x[~mask].clamp(0, 1).mean()), own)

    bound = PerRecordGradient(C=1e-4, module=module, public_rows=2)
    check(lambda x, y, mask: losses(x, y, mask, 0.0), bound, public=public)
    with pytest.raises(ConformanceError, match="per-record gradients, before clipping"):
        check(lambda x, y, mask: losses(x, y, mask, 0.01), bound, public=public)


def test_randomness_by_record_and_public_randomness_pass():
    """`rng` belongs to records; one number for all records of a call is public."""
    stream = torch.Generator().manual_seed(3)
    check(lambda x, y, rng: x + rng.normal(SHAPE), ROWS)
    check(lambda x, y: x + torch.rand((), generator=stream) + torch.rand(()), ROWS)
    with pytest.raises(ConformanceError, match="Row i must depend"):
        check(lambda x, y: x + torch.rand(x.shape, generator=stream), ROWS)


def test_a_function_that_raises_on_other_records_is_refused():
    def picky(x: Tensor, y: Tensor) -> Tensor:
        if len(x) == 1:
            raise ValueError("too few")
        return x

    with pytest.raises(ConformanceError, match=r"raised ValueError .too few. on some of the records"):
        check(picky, ROWS)

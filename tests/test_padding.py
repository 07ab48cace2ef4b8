"""Padded draws: the same releases up to rounding, nothing dropped, and padding that adds exactly nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.privacy import clipping, padding
from dpgen_bench.privacy.batch import Batch
from dpgen_bench.privacy.bounds import Bound, PerRecord, PerRecordGradient, PerRow
from dpgen_bench.privacy.clipping import clip_rows
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.gradients import clipped_gradient_sum
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.padding import PADDED, Padding
from dpgen_bench.privacy.record_rng import RecordRng
from dpgen_bench.privacy.sampling import Full, Poisson
from dpgen_bench.privacy.services import Services
from dpgen_bench.testing import ConformanceError, check_method
from tests import toys
from tests.gradient_cases import Net, assert_same, both, clip, flat, loop, net_loss, net_rows, squared_output

SMALL = {"image_shape": (1, 8, 8), "num_classes": 3}
N = 40


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(1, 3, 3), nn.Linear(3 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.conv(x)).flatten(1))


def losses(net: nn.Module):
    return lambda x, y: F.cross_entropy(net(x), y, reduction="none")


def cases() -> dict[str, tuple[Bound, Any, Any]]:
    """Bounds with a function, and public rows."""
    net = SmallNet()
    fakes = (torch.rand(7, 1, 8, 8, generator=toys.seeded(1)), torch.arange(7) % 10)

    def with_mask(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.cross_entropy(net(x), torch.where(mask, 9 - y, y), reduction="none")

    def with_rng(x: Tensor, y: Tensor, rng: RecordRng) -> Tensor:
        return F.cross_entropy(net(x + rng.normal((1, 8, 8))), y, reduction="none")

    def gradient(**options: Any) -> PerRecordGradient:
        return PerRecordGradient(C=0.1, module=net, **options)

    return {
        "rows": (PerRecord(C=1.0, shape=(1, 8, 8)), lambda x, y: 1.0 - x, None),
        "rows in pieces": (PerRecord(C=1.0, shape=(1, 8, 8), microbatch=4), lambda x, y: 1.0 - x, None),
        "gradients": (gradient(), losses(net), None),
        "gradients in pieces": (gradient(microbatch=4), losses(net), None),
        "public rows": (gradient(public_rows=7, microbatch=5), with_mask, fakes),
        "copies": (gradient(copies=3), with_rng, None),
        "each tensor": (gradient(clip="per_tensor"), losses(net), None),
        "opacus": (gradient(backend="opacus"), losses(net), None),
        "without clipping": (PerRecordGradient(C=math.inf, module=net), losses(net), None),
    }


def released(case: str, padded: bool, *, rate: float = 0.3, n: int = N, std: float = 0.5, times: int = 3):
    """The releases of a case as vectors, the draws, and the ledger's entries."""
    bound, fn, public = cases()[case]
    images, labels = toys.records(n, (1, 8, 8))
    watcher = toys.Watcher()
    watcher.release = lambda mechanism, index, drawn, exact, noisy: draws.append(drawn) or noisy  # type: ignore[method-assign]
    watcher.before_release = lambda *args: None  # type: ignore[method-assign]
    draws: list[np.ndarray] = []
    ledger = Ledger(Budget(math.inf), N)
    services = Services(ledger, Key.seeded("padding"), observer=watcher, padded=padded)
    data = PrivateData(images, labels, 10, services, public_n=N)
    std = 0.0 if math.isinf(bound.C) else std
    mechanism = data.mechanism("m", sample=Poisson(rate), bound=bound, times=times, std=std)
    values = [mechanism(fn, public=public) for _ in range(times)]
    vectors = [flat(value) if isinstance(value, dict) else value.flatten().double() for value in values]
    return vectors, draws, {name: (entry.event, entry.executed) for name, entry in ledger.entries.items()}


def assert_equal_releases(first, second) -> None:
    for a, b in zip(first[0], second[0], strict=True):
        assert torch.allclose(a, b, rtol=0.0, atol=2e-6 * (1.0 + float(a.abs().max())))
    assert all(np.array_equal(a, b) for a, b in zip(first[1], second[1], strict=True))
    assert first[2] == second[2]


@pytest.mark.parametrize("case", cases())
def test_padded_releases_are_those_of_the_exact_draw_up_to_rounding(case):
    assert_equal_releases(released(case, False), released(case, True))


@pytest.mark.parametrize("case", ["rows", "gradients", "public rows", "opacus"])
@pytest.mark.parametrize(("rate", "n"), [(0.5, N), (1.0, N), (0.01, N), (0.3, 0), (0.3, 1)])
def test_draws_that_are_larger_or_empty_are_released_in_full(monkeypatch, case, rate, n):
    monkeypatch.setattr(padding, "_DEVIATIONS", -2.0)  # the usual number of rows is less than most draws have
    assert_equal_releases(*(released(case, padded, rate=rate, n=n, times=2) for padded in (False, True)))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("most", "public_rows"), [(None, 0), (4, 0), (7, 5), (1000, 6)])
def test_every_record_of_a_draw_has_one_row_and_usual_draws_have_one_number_of_rows(parts, most, public_rows):
    plans = [Padding.plan(0.25, 400, most=most, public_rows=public_rows, part=(i, parts)) for i in range(parts)]
    assert sum(plan.public_rows for plan in plans) == public_rows
    sizes = set()
    for count in (0, 1, 80, 100, 120, 137, 200, 400):
        drawn = np.flatnonzero(np.random.default_rng(count).permutation(400) < count)
        rows = [plan.padded(drawn) for plan in plans]
        assert sorted(np.concatenate([part[part != PADDED] for part in rows])) == list(drawn)
        for plan, part in zip(plans, rows, strict=True):
            assert most is None or plan.at_once <= most
            assert (len(part) + plan.public_rows) % plan.at_once == 0
        if count <= 130:  # the mean is 100 and the standard deviation 8.7
            sizes.add(tuple(map(len, rows)))
    assert len(sizes) == 1


@pytest.mark.parametrize("value", [1.0, math.nan, math.inf, 1e38])
def test_padding_adds_exactly_zero_whatever_the_function_returns_for_it(value):
    """Black images are padding only, and the row of a record is e_0."""

    def rows(x: Tensor, y: Tensor) -> Tensor:
        black = x.flatten(1).amax(1) == 0.0
        return torch.stack([(~black).float(), torch.where(black, value, 0.0)], dim=1)

    images, labels = toys.records(N, (1, 8, 8))
    services = Services(Ledger(Budget(math.inf), N), Key.seeded("p"), padded=True)
    data = PrivateData(images, labels, 10, services)
    mechanism = data.mechanism("m", sample=Poisson(0.3), bound=PerRecord(C=2.0, shape=(2,)), times=20, std=0.0)
    for index in range(20):
        drawn = Poisson(0.3).draw(np.arange(N), services.key.derive("m", index), index)
        assert mechanism(rows).tolist() == [len(drawn), 0.0]


@both
@pytest.mark.parametrize("value", [1.0, math.nan, math.inf, 1e38])
def test_padding_adds_exactly_zero_to_a_sum_of_gradients(backend, value):
    net = Net()
    x, y = net_rows(9)
    mask = torch.arange(9) % 3 > 0

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return net_loss(net)(x, y) * torch.where(x.flatten(1)[:, 0] == 5.0, value, 1.0)

    x[~mask] = 5.0
    total = clipped_gradient_sum(net, loss, (x, y), 0.1, mask=mask, backend=backend, padded=True)
    other = x.clone()
    other[~mask, 0] = -2.0
    again = clipped_gradient_sum(net, loss, (other, y), 0.1, mask=mask, backend=backend, padded=True)
    assert all(torch.equal(part, again.gradients[name]) for name, part in total.gradients.items())
    assert_same(flat(total.gradients), clip(loop(net, net_loss, (x[mask], y[mask])), 0.1))
    assert (total.norms[~mask] == 0.0).all()
    assert (total.norms[mask] > 0.0).all()


def test_without_branches_records_with_extreme_gradients_are_clipped_or_dropped_as_before():
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    x = torch.randn(6, 3)
    x[1], x[2], x[3] = 1e15, math.nan, math.inf
    mask = torch.ones(6, dtype=torch.bool)
    exact = clipped_gradient_sum(net, squared_output(net), (x,), 0.1)
    padded = clipped_gradient_sum(net, squared_output(net), (x,), 0.1, mask=mask, padded=True)
    assert torch.allclose(flat(padded.gradients), flat(exact.gradients), rtol=1e-5, atol=1e-7)
    assert torch.equal(padded.norms > 0.0, exact.norms > 0.0)


@pytest.mark.parametrize("noise", [0.0, 1e-1, 1e-3, 1e-5])
def test_without_branches_no_record_exceeds_the_bound_where_its_positions_cancel(noise):
    """A record's gradient is a sum over positions, of which the second half almost cancels the first."""
    torch.manual_seed(1)
    layer = nn.Linear(40, 30)
    half = torch.randn(1, 32, 40)
    x = torch.cat([half, half + noise * torch.randn_like(half)], dim=1)
    signs = torch.cat([torch.ones(32), -torch.ones(32)])[None, :, None] * torch.randn(1, 1, 30)
    for C in (1e-3, 0.1, 10.0):
        mask = torch.ones(1, dtype=torch.bool)
        loss = lambda x: 1e3 * (layer(x) * signs).sum((1, 2))  # noqa: E731
        total = clipped_gradient_sum(layer, loss, (x,), C, mask=mask, padded=True)
        assert flat(total.gradients).norm() <= C
        exact = loop(layer, lambda module: lambda x: 1e3 * (module(x) * signs).sum((1, 2)), (x,))
        assert float(total.norms) >= float(exact.norm()) * (1.0 - 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("C", [1e-30, 0.5, math.inf])
def test_rows_are_clipped_to_the_same_bits_without_branches(monkeypatch, dtype, C):
    rows = (
        torch.randn(40, 5, dtype=torch.float64, generator=toys.seeded(2)) * 10.0 ** torch.arange(-20.0, 20.0)[:, None]
    )
    rows[3, 1], rows[4, 2] = math.nan, math.inf
    rows = rows.to(dtype)
    before = clip_rows(rows, C)
    monkeypatch.setattr(clipping, "MAY_BRANCH", frozenset())
    assert torch.equal(clip_rows(rows, C), before)


def test_only_poisson_draws_of_sums_over_records_are_padded_and_only_on_an_accelerator():
    images, labels = toys.records(N, (1, 8, 8))

    def is_padded(padded, sample, bound) -> bool:
        services = Services(Ledger(Budget(math.inf), N), Key.seeded("p"), padded=padded)
        mechanism = PrivateData(images, labels, 10, services).mechanism(
            "m", sample=sample, bound=bound, times=1, std=0.0
        )
        return mechanism._padded_draws is not None

    sum_, rows = PerRecord(C=1.0, shape=(1,)), PerRow(C=1.0, shape=(2, 3))
    assert is_padded(True, Poisson(0.5), sum_)
    assert not is_padded(True, Poisson(0.5), rows)
    assert not is_padded(True, Full(), sum_)
    assert not is_padded(None, Poisson(0.5), sum_)  # on a CPU
    assert not is_padded(False, Poisson(0.5), sum_)
    on_gpu = Services(Ledger(Budget(math.inf), N), Key.seeded("p"), torch.device("cuda"))
    assert on_gpu.pads


# The conformance suite on methods with padded draws, and with mistakes in the padding.


class Negative(toys.MeanImage):
    """Honest: the rows of black images are not zero."""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        return 1.0 - images


class Opposite(toys.MeanImage):
    """Honest: rows of two records may be opposite, so that a record that takes the place of another moves the sum."""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        sign = 1.0 - 2.0 * (labels % 2).float()
        return sign[:, None, None, None] * torch.full_like(images, 100.0)


@pytest.fixture
def padded(monkeypatch):
    monkeypatch.setattr(Services, "pads", True)
    monkeypatch.setattr(padding, "_DEVIATIONS", 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Negative, Opposite, toys.GradientMethod])
def test_methods_with_padded_draws_conform(padded, make):
    check_method(make, **SMALL)


def test_padding_that_counts_is_detected(padded, monkeypatch):
    make = PrivateData._PrivateData__padded_batch

    def counted(self, plan, positions, key) -> Batch:
        batch = make(self, plan, positions, key)
        return Batch(batch.images, batch.labels, batch.ids, key, real=torch.ones_like(batch.real), padding=plan)

    monkeypatch.setattr(PrivateData, "_PrivateData__padded_batch", counted)
    with pytest.raises(ConformanceError, match="its declared sensitivity"):
        check_method(Negative, **SMALL)


def test_a_draw_that_is_cut_off_is_detected(padded, monkeypatch):
    whole = Padding.padded
    monkeypatch.setattr(padding, "_DEVIATIONS", -2.0)
    monkeypatch.setattr(
        Padding, "padded", lambda self, drawn: whole(self, drawn)[: self.pieces * self.at_once - self.public_rows]
    )
    with pytest.raises(ConformanceError, match="its declared sensitivity"):
        check_method(Opposite, **SMALL)

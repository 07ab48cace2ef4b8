"""Copies of records inside a loss: clipped gradients of means of K losses, against a float64 loop over records."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpgen_bench.privacy.bounds import Batch, PerRecordGradient
from dpgen_bench.privacy.gradients import clipped_gradient_sum, convolution, layers
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.record_rng import RecordRng
from tests.gradient_cases import Net, assert_same, both, clip, flat, loop, net_loss, net_rows, some_examples
from tests.test_gradients import WAYS, image_networks

KEY = Key.seeded("copies")


def of_copies(copies: int, loss_of: Callable[[nn.Module], Callable[..., Tensor]]) -> Callable:
    """A loss per record: the mean of the losses of K shifted copies of its first row, which is an image or vector."""

    def make(module: nn.Module) -> Callable[..., Tensor]:
        def losses(x: Tensor, *more: Tensor) -> Tensor:
            shifts = 0.3 * torch.arange(copies, dtype=x.dtype).repeat(len(x)).view(-1, *[1] * (x.dim() - 1))
            rows = [row.repeat_interleave(copies, 0) for row in (x, *more)]
            return loss_of(module)(rows[0] + shifts, *rows[1:]).view(-1, copies).mean(1)

        return losses

    return make


def outputs(module: nn.Module) -> Callable[..., Tensor]:
    return lambda *rows: 0.5 * (module(*rows) - 1.0).flatten(1).square().sum(1)


@pytest.mark.parametrize("way", WAYS)
@given(images=image_networks(), max_norm=st.sampled_from([1e-2, 1.0, 30.0]), copies=st.sampled_from([2, 3]))
@settings(some_examples)
def test_convolutions_of_copies_agree_with_the_loop(
    way: str, images: tuple[nn.Module, Tensor], max_norm: float, copies: int
) -> None:
    backend, cost, pixels = WAYS[way]
    net, x = images
    losses = of_copies(copies, outputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "_COST_OF_A_KEPT_NUMBER", cost)
        patch.setattr(layers, "_NUMBERS_AT_ONCE", 300)
        patch.setattr(convolution, "_PIXELS_OVER_PATCHES", pixels)
        got = clipped_gradient_sum(net, losses(net), (x,), max_norm, backend=backend, copies=copies)
    exact = loop(net, losses, (x,))
    assume(bool((exact.norm(dim=1) > 1e-6).all()))
    assert_same(flat(got.gradients), clip(exact, max_norm))
    assert torch.allclose(got.norms.double(), exact.norm(dim=1), rtol=1e-5, atol=0.0)


@both
@pytest.mark.parametrize("max_norm", [0.1, 100.0, math.inf])
@pytest.mark.parametrize("microbatch", [None, 2])
def test_a_network_of_all_layers_agrees_with_the_loop(backend: str, max_norm: float, microbatch: int | None) -> None:
    torch.manual_seed(0)
    net, rows = Net(), net_rows(5)
    losses = of_copies(4, net_loss)
    exact = clip(loop(net, losses, rows), max_norm) if math.isfinite(max_norm) else loop(net, losses, rows)
    got = clipped_gradient_sum(net, losses(net), rows, max_norm, microbatch=microbatch, backend=backend, copies=4)
    assert_same(flat(got.gradients), exact)
    net.double()
    rows = (rows[0].double(), rows[1])
    got = clipped_gradient_sum(net, losses(net), rows, max_norm, microbatch=microbatch, backend=backend, copies=4)
    assert (flat(got.gradients) - exact.sum(0)).norm() <= 1e-5 * exact.norm(dim=1).sum()


def test_without_clipping_margins_the_sum_equals_brute_force_in_float64() -> None:
    """At a norm that clips no record, no rounding margin enters: the difference is rounding of float64."""
    torch.manual_seed(0)
    net, rows = Net().double(), net_rows(5)
    rows = (rows[0].double(), rows[1])
    losses = of_copies(4, net_loss)
    got = clipped_gradient_sum(net, losses(net), rows, 1e3, copies=4)
    torch.testing.assert_close(flat(got.gradients), loop(net, losses, rows).sum(0), rtol=1e-12, atol=1e-14)


@both
def test_a_record_with_one_copy_that_is_not_finite_adds_nothing(backend: str) -> None:
    torch.manual_seed(0)
    net, (x, y) = Net(), net_rows(4)
    poison = torch.zeros(8)
    poison[5] = math.nan  # copy 1 of record 2

    def losses(x: Tensor, y: Tensor, row: Tensor) -> Tensor:
        extra = torch.stack([2 * row, 2 * row + 1], dim=1).flatten()
        each = net_loss(net)(x.repeat_interleave(2, 0), y.repeat_interleave(2, 0)) + poison[extra]
        return each.view(-1, 2).mean(1)

    got = clipped_gradient_sum(net, losses, (x, y, torch.arange(4)), 0.1, backend=backend, copies=2)
    keep = torch.tensor([0, 1, 3])
    poison.zero_()
    rest = clipped_gradient_sum(net, losses, (x[keep], y[keep], keep), 0.1, backend=backend, copies=2)
    assert_same(flat(got.gradients), flat(rest.gradients)[None])
    assert got.norms[2] == 0


def test_layers_must_see_all_copies() -> None:
    torch.manual_seed(0)
    net, rows = Net(), net_rows(3)
    with pytest.raises(ValueError, match="expected the input of layer 'conv' to have 6 rows"):
        clipped_gradient_sum(net, net_loss(net), rows, 0.1, copies=2)


def batch(b: int = 4) -> Batch:
    x, y = net_rows(b)
    return Batch(x, y, torch.tensor([5, 17, 2, 40])[:b], KEY)


@both
def test_the_bound_clips_the_gradient_of_the_mean_over_copies_with_noise_of_their_own(backend: str) -> None:
    torch.manual_seed(0)
    net, rows, K = Net(), batch(), 3
    noise = RecordRng(KEY, rows.ids.repeat_interleave(K), K).normal((2, 6, 6)).view(len(rows), K, 2, 6, 6)
    assert len(noise.flatten(2).flatten(0, 1).unique(dim=0)) == K * len(rows)

    def fn(x: Tensor, y: Tensor, rng: RecordRng) -> Tensor:
        return net_loss(net)(x + rng.normal((2, 6, 6)), y)

    def brute(module: nn.Module) -> Callable[..., Tensor]:
        def losses(x: Tensor, y: Tensor, noise: Tensor) -> Tensor:
            return torch.stack([net_loss(module)(x + noise[:, k], y) for k in range(K)]).mean(0)

        return losses

    bound = PerRecordGradient(C=0.1, module=net, backend=backend, copies=K)
    exact = clip(loop(net, brute, (rows.images, rows.labels, noise)), 0.1)
    assert_same(flat(bound.value(fn, rows, None)), exact)
    # The noise of a copy depends on its record, not on the place in the draw or the microbatch.
    order = torch.tensor([2, 0, 3, 1])
    small = PerRecordGradient(C=0.1, module=net, backend=backend, copies=K, microbatch=2)
    assert_same(flat(small.value(fn, rows.rows(order), None)), exact)
    assert bound.sensitivity == PerRecordGradient(C=0.1, module=net).sensitivity


def test_public_rows_have_copies_too() -> None:
    torch.manual_seed(0)
    net, (x, y) = Net(), net_rows(6)
    rows = Batch(x[:4], y[:4], torch.arange(4), KEY)

    def fn(x: Tensor, y: Tensor, public: Tensor, rng: RecordRng) -> Tensor:
        return net_loss(net)(x + rng.normal((2, 6, 6)), y) * (1.0 + public.to(x.dtype))

    bound = PerRecordGradient(C=0.1, module=net, copies=2, public_rows=2)
    noise = RecordRng(KEY, torch.tensor([0, 1, 2, 3, -1, -2]).repeat_interleave(2), 2).normal((2, 6, 6))

    def brute(module: nn.Module) -> Callable[..., Tensor]:
        def losses(x: Tensor, y: Tensor, noise: Tensor, weight: Tensor) -> Tensor:
            return weight * torch.stack([net_loss(module)(x + noise[:, k], y) for k in range(2)]).mean(0)

        return losses

    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, 2.0])
    exact = clip(loop(net, brute, (x, y, noise.view(6, 2, 2, 6, 6), weights)), 0.1)
    assert_same(flat(bound.value(fn, rows, (x[4:], y[4:]))), exact)


def test_a_mean_over_copies_by_the_function_is_refused() -> None:
    net = Net()
    bound = PerRecordGradient(C=0.1, module=net, copies=2)
    with pytest.raises(
        ValueError, match=r"expected one loss for each of 2 copies of 4 records, shape \(8,\), got \(4,"
    ):
        bound.value(lambda x, y: net_loss(net)(x, y).view(-1, 2).mean(1), batch(), None)


@pytest.mark.parametrize("copies", [0, 1.5, True])
def test_numbers_of_copies_out_of_range_are_refused(copies: object) -> None:
    with pytest.raises(ValueError, match="PerRecordGradient, copies"):
        PerRecordGradient(C=0.1, module=Net(), copies=copies)  # type: ignore[arg-type]


def test_copies_have_the_stream_of_their_number_and_the_first_one_that_of_the_record() -> None:
    ids = torch.tensor([3, 11])
    rows = RecordRng(KEY, ids.repeat_interleave(3), 3).uniform(5)
    words = np.frombuffer(KEY.derive("private randomness").secret[:16], dtype=np.uint64)
    for j, row in enumerate(rows):
        counter = np.array([0, 0, int(ids[j // 3]), j % 3], dtype=np.uint64)
        expected = np.random.Generator(np.random.Philox(key=words, counter=counter)).random(5, dtype=np.float32)
        assert np.array_equal(row.numpy(), expected)
    assert torch.equal(rows[::3], RecordRng(KEY, ids).uniform(5))

"""Per-record clipped gradient sums: both back ends against a float64 loop over records."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpgen_bench.privacy.gradients import clipped_gradient_sum, convolution, layers
from tests.gradient_cases import (
    BACKENDS,
    TOLERANCE,
    Net,
    assert_same,
    both,
    clip,
    flat,
    loop,
    net_loss,
    net_rows,
    some_examples,
    squared_output,
)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@st.composite
def image_networks(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """(Up to three random convolutions with tanh between, input [b, c, h, w]) in float32."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    small = st.integers(1, 3)
    b, channels = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4]))
    x = torch.randn(b, channels, draw(st.integers(4, 9)), draw(st.integers(4, 9)))
    net, out = nn.Sequential(), x[:1]
    for _ in range(draw(small)):
        groups = draw(st.sampled_from([g for g in (1, 2) if channels % g == 0]))
        width = groups * draw(small)
        kernel, stride = (draw(small), draw(small)), (draw(small), draw(small))
        common = {"groups": groups, "bias": draw(st.booleans()), "dilation": draw(st.integers(1, 2))}
        if draw(st.booleans()):
            padding = draw(st.sampled_from([0, 1, (0, 2)]))
            if draw(st.integers(0, 4)) == 0:
                padding, stride = "same", (1, 1)
            layer: nn.Module = nn.Conv2d(channels, width, kernel, stride, padding, **common)
        else:
            extra = tuple(draw(st.integers(0, max(s, common["dilation"]) - 1)) for s in stride)
            layer = nn.ConvTranspose2d(channels, width, kernel, stride, draw(st.integers(0, 1)), extra, **common)
        try:
            out = layer(out)
        except RuntimeError:  # the kernel is larger than the remaining image
            assume(False)
        assume(0 < out.shape[2] * out.shape[3] <= 900)
        net.extend([layer, nn.Tanh()])
        channels = width
    return net, x


# How a layer's norms are computed: (backend, cost of a kept number, preference for pixels over patches).
WAYS = {
    "kept gradients": ("bookkeeping", 0, 0.0),
    "Gram matrices of pixels": ("bookkeeping", 10**9, 1e9),
    "Gram matrices of patches": ("bookkeeping", 10**9, 0.0),
    "whichever is cheaper": ("bookkeeping", 16, 2.0),
    "opacus": ("opacus", 16, 2.0),
}


@pytest.mark.parametrize("way", WAYS)
@given(
    images=image_networks(),
    max_norm=st.sampled_from([1e-2, 1.0, 30.0]),
    at_once=st.sampled_from([1, 300, 2**21]),
    padded=st.booleans(),
)
@settings(some_examples, max_examples=50)
def test_convolutions_agree_with_the_loop(
    way: str, images: tuple[nn.Module, Tensor], max_norm: float, at_once: int, padded: bool
) -> None:
    backend, cost, pixels = WAYS[way]
    net, x = images
    mask = torch.ones(len(x), dtype=torch.bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "_COST_OF_A_KEPT_NUMBER", cost)
        patch.setattr(layers, "_NUMBERS_AT_ONCE", at_once)
        patch.setattr(convolution, "_PIXELS_OVER_PATCHES", pixels)
        got = clipped_gradient_sum(net, squared_output(net), (x,), max_norm, mask=mask, backend=backend, padded=padded)
    exact = loop(net, squared_output, (x,))
    assert_same(flat(got.gradients), clip(exact, max_norm))
    assert torch.allclose(got.norms.double(), exact.norm(dim=1), rtol=TOLERANCE, atol=0.0)


@given(
    seed=st.integers(0, 10**6),
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    widths=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    bias=st.booleans(),
    cost=st.sampled_from([0, 10**9]),
    backend=st.sampled_from(BACKENDS),
)
@some_examples
def test_embedding_and_linear_of_any_rank_agree_with_the_loop(
    seed: int, shape: list[int], widths: tuple[int, int], bias: bool, cost: int, backend: str
) -> None:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Embedding(3, widths[0]), nn.Tanh(), nn.Linear(*widths, bias=bias), nn.Tanh())
    ids = torch.randint(3, tuple(shape))  # [b], [b, T] or [b, S, T]: indices repeat within a record
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "_COST_OF_A_KEPT_NUMBER", cost)
        got = clipped_gradient_sum(net, squared_output(net), (ids,), 0.3, backend=backend)
    assert_same(flat(got.gradients), clip(loop(net, squared_output, (ids,)), 0.3))


@given(b=st.integers(1, 7), seed=st.integers(0, 1000), max_norm=st.sampled_from([1e-3, 0.3, 100.0]))
@some_examples
def test_back_ends_agree_with_each_other_and_the_loop(b: int, seed: int, max_norm: float) -> None:
    torch.manual_seed(seed)
    net, rows = Net(), net_rows(b, seed)
    exact = loop(net, net_loss, rows)
    sums = {name: clipped_gradient_sum(net, net_loss(net), rows, max_norm, backend=name) for name in BACKENDS}
    for result in sums.values():
        assert list(result.gradients) == [name for name, _ in net.named_parameters()]
        assert all(result.gradients[name].shape == p.shape for name, p in net.named_parameters())
        assert not any(g.requires_grad for g in result.gradients.values())
        assert_same(flat(result.gradients), clip(exact, max_norm))


@both
def test_float64_modules(net: Net, backend: str) -> None:
    rows = net_rows(5)
    exact = loop(net, net_loss, rows)
    net.double()
    result = clipped_gradient_sum(net, net_loss(net), (rows[0].double(), rows[1]), 0.3, backend=backend)
    assert result.norms.dtype == torch.float64
    assert_same(flat(result.gradients), clip(exact, 0.3))


def test_padding_index_of_an_embedding_gets_no_gradient() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(4, 3, padding_idx=1), nn.Linear(3, 2))
    ids = torch.tensor([[0, 1], [1, 1], [2, 1]])
    result = clipped_gradient_sum(net, squared_output(net), (ids,), 0.3)
    assert_same(flat(result.gradients), clip(loop(net, squared_output, (ids,)), 0.3))


@both
def test_frozen_parameters_are_left_out(net: Net, backend: str) -> None:
    net.conv.weight.requires_grad_(False)
    net.head.bias.requires_grad_(False)
    net.label.requires_grad_(False)
    rows = net_rows(4)
    result = clipped_gradient_sum(net, net_loss(net), rows, 0.1, backend=backend)
    assert set(result.gradients) == {name for name, p in net.named_parameters() if p.requires_grad}
    assert_same(flat(result.gradients), clip(loop(net, net_loss, rows), 0.1))


@both
def test_parameters_the_loss_does_not_use_have_zero_gradients(net: Net, backend: str) -> None:
    net.unused = nn.Linear(3, 3)
    result = clipped_gradient_sum(net, net_loss(net), net_rows(3), 1.0, backend=backend)
    assert not result.gradients["unused.weight"].any()
    assert result.gradients["head.weight"].any()


@both
@pytest.mark.parametrize("max_norm", [1.0, math.inf])
def test_an_empty_batch_gives_zeros(net: Net, backend: str, max_norm: float) -> None:
    result = clipped_gradient_sum(net, net_loss(net), net_rows(0), max_norm, backend=backend)
    assert result.norms.shape == (0,)
    assert {name: g.shape for name, g in result.gradients.items()} == {n: p.shape for n, p in net.named_parameters()}
    assert not flat(result.gradients).any()


@both
@pytest.mark.parametrize("max_norm", [0.1, math.inf])
def test_masked_rows_add_exactly_nothing(net: Net, backend: str, max_norm: float) -> None:
    x, y = net_rows(6)
    mask = torch.tensor([1, 0, 1, 1, 0, 0])
    x[1] = math.nan
    result = clipped_gradient_sum(net, net_loss(net), (x, y), max_norm, mask=mask, backend=backend)
    kept = clipped_gradient_sum(net, net_loss(net), (x[mask == 1], y[mask == 1]), max_norm, backend=backend)
    assert torch.equal(flat(result.gradients), flat(kept.gradients))
    assert not result.norms[mask == 0].any()
    nothing = clipped_gradient_sum(net, net_loss(net), (x, y), max_norm, mask=torch.zeros(6).bool(), backend=backend)
    assert not flat(nothing.gradients).any()


@both
@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_sum_does_not_depend_on_the_microbatch(net: Net, backend: str, size: int) -> None:
    rows = net_rows(8)
    exact = clip(loop(net, net_loss, rows), 0.1)
    for mask in (None, torch.ones(8).bool()):
        result = clipped_gradient_sum(net, net_loss(net), rows, 0.1, mask=mask, microbatch=size, backend=backend)
        assert_same(flat(result.gradients), exact)
        assert result.norms.shape == (8,)
        assert (result.norms > 0).all()


@both
def test_without_clipping_the_sum_is_the_ordinary_gradient(net: Net, backend: str) -> None:
    rows = net_rows(6)
    result = clipped_gradient_sum(net, net_loss(net), rows, math.inf, microbatch=4, backend=backend)
    assert_same(flat(result.gradients), loop(net, net_loss, rows))
    assert result.norms.isnan().all()


def test_without_clipping_any_module_is_accepted_and_nonfinite_records_are_dropped() -> None:
    torch.manual_seed(0)
    lin = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).eval()
    net = nn.Sequential(lin, nn.Tanh(), lin, nn.LayerNorm(3))
    x = torch.randn(9, 3)
    clean = loop(net, squared_output, (x,))[torch.arange(9) != 4]
    x[4] = math.nan
    result = clipped_gradient_sum(net, squared_output(net), (x,), math.inf)
    assert_same(flat(result.gradients), clean)
    assert result.norms[4] == 0

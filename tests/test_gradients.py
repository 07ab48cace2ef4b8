"""Per-record clipped gradient sums: both back ends against a float64 loop over records, their bound, their limits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpgen_bench.privacy.gradients import clipped_gradient_sum, convolution, layers

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
    found = []
    for i in range(len(rows[0])):
        loss = loss_of(exact)(*(row[i : i + 1] for row in rows)).sum()
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        pairs = zip(grads, parameters, strict=True)
        found.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]))
    return torch.stack(found)


def clip(per_record: Tensor, max_norm: float) -> Tensor:
    norms = per_record.norm(dim=1, keepdim=True)
    return per_record * (max_norm / norms.clamp_min(max_norm))


def assert_same(got: Tensor, clipped: Tensor) -> None:
    """A sum agrees with the sum of `clipped` [b, p], relative to the sizes of what was summed (it may cancel)."""
    assert (got - clipped.sum(0)).norm() <= TOLERANCE * clipped.norm(dim=1).sum()


def squared_output(module: nn.Module) -> Callable[..., Tensor]:
    """A loss whose gradient is not zero anywhere special: ½‖out - 1‖² per record."""
    return lambda *rows: 0.5 * (module(*rows) - 1.0).flatten(1).square().sum(1)


class Net(nn.Module):
    """Image network with every supported layer kind that takes images, then positions, then a vector."""

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


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


# --- against the float64 loop --------------------------------------------------------------------------------------


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
        except RuntimeError:  # the kernel is larger than what is left of the image
            assume(False)
        assume(0 < out.shape[2] * out.shape[3] <= 900)
        net.extend([layer, nn.Tanh()])
        channels = width
    return net, x


@given(
    images=image_networks(),
    max_norm=st.sampled_from([1e-2, 1.0, 30.0]),
    cost=st.sampled_from([0, 16, 10**9]),
    pixels=st.sampled_from([0.0, 1e9]),
    at_once=st.sampled_from([1, 2**21]),
    backend=st.sampled_from(BACKENDS),
)
@settings(some_examples, max_examples=60)
def test_convolutions_agree_with_the_loop(
    images: tuple[nn.Module, Tensor], max_norm: float, cost: int, pixels: float, at_once: int, backend: str
) -> None:
    """Whichever way book-keeping measures a layer: kept gradients (cost 0), Gram matrices of pixels or patches."""
    net, x = images
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "_COST_OF_A_KEPT_NUMBER", cost)
        patch.setattr(layers, "_NUMBERS_AT_ONCE", at_once)
        patch.setattr(convolution, "_PIXELS_OVER_PATCHES", pixels)
        got = clipped_gradient_sum(net, squared_output(net), (x,), max_norm, backend=backend)
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
    for found in sums.values():
        assert list(found.gradients) == [name for name, _ in net.named_parameters()]
        assert all(found.gradients[name].shape == p.shape for name, p in net.named_parameters())
        assert not any(g.requires_grad for g in found.gradients.values())
        assert_same(flat(found.gradients), clip(exact, max_norm))


@both
def test_float64_modules(net: Net, backend: str) -> None:
    rows = net_rows(5)
    exact = loop(net, net_loss, rows)
    net.double()
    found = clipped_gradient_sum(net, net_loss(net), (rows[0].double(), rows[1]), 0.3, backend=backend)
    assert found.norms.dtype == torch.float64
    assert_same(flat(found.gradients), clip(exact, 0.3))


def test_padding_index_of_an_embedding_gets_no_gradient() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(4, 3, padding_idx=1), nn.Linear(3, 2))
    ids = torch.tensor([[0, 1], [1, 1], [2, 1]])
    found = clipped_gradient_sum(net, squared_output(net), (ids,), 0.3)
    assert_same(flat(found.gradients), clip(loop(net, squared_output, (ids,)), 0.3))


@both
def test_frozen_parameters_are_left_out(net: Net, backend: str) -> None:
    net.conv.weight.requires_grad_(False)
    net.head.bias.requires_grad_(False)
    net.label.requires_grad_(False)
    rows = net_rows(4)
    found = clipped_gradient_sum(net, net_loss(net), rows, 0.1, backend=backend)
    assert set(found.gradients) == {name for name, p in net.named_parameters() if p.requires_grad}
    assert_same(flat(found.gradients), clip(loop(net, net_loss, rows), 0.1))


@both
def test_parameters_the_loss_does_not_use_have_zero_gradients(net: Net, backend: str) -> None:
    net.unused = nn.Linear(3, 3)
    found = clipped_gradient_sum(net, net_loss(net), net_rows(3), 1.0, backend=backend)
    assert not found.gradients["unused.weight"].any()
    assert found.gradients["head.weight"].any()


# --- batches: empty, single, masked, in pieces ---------------------------------------------------------------------


@both
@pytest.mark.parametrize("max_norm", [1.0, math.inf])
def test_an_empty_batch_gives_zeros(net: Net, backend: str, max_norm: float) -> None:
    found = clipped_gradient_sum(net, net_loss(net), net_rows(0), max_norm, backend=backend)
    assert found.norms.shape == (0,)
    assert {name: g.shape for name, g in found.gradients.items()} == {n: p.shape for n, p in net.named_parameters()}
    assert not flat(found.gradients).any()


@both
@pytest.mark.parametrize("max_norm", [0.1, math.inf])
def test_masked_rows_add_exactly_nothing(net: Net, backend: str, max_norm: float) -> None:
    x, y = net_rows(6)
    mask = torch.tensor([1, 0, 1, 1, 0, 0])
    x[1] = math.nan
    found = clipped_gradient_sum(net, net_loss(net), (x, y), max_norm, mask=mask, backend=backend)
    kept = clipped_gradient_sum(net, net_loss(net), (x[mask == 1], y[mask == 1]), max_norm, backend=backend)
    assert torch.equal(flat(found.gradients), flat(kept.gradients))
    assert not found.norms[mask == 0].any()
    nothing = clipped_gradient_sum(net, net_loss(net), (x, y), max_norm, mask=torch.zeros(6).bool(), backend=backend)
    assert not flat(nothing.gradients).any()


@both
@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_sum_does_not_depend_on_the_microbatch(net: Net, backend: str, size: int) -> None:
    rows = net_rows(8)
    exact = clip(loop(net, net_loss, rows), 0.1)
    for mask in (None, torch.ones(8).bool()):
        found = clipped_gradient_sum(net, net_loss(net), rows, 0.1, mask=mask, microbatch=size, backend=backend)
        assert_same(flat(found.gradients), exact)
        assert found.norms.shape == (8,)
        assert (found.norms > 0).all()


# --- the bound -----------------------------------------------------------------------------------------------------


def test_one_record_never_adds_more_than_its_bound(net: Net) -> None:
    """The float64 norm of what the float32 sum holds, for records one at a time, is at most C; and close to it."""
    x, y = net_rows(40)
    for backend in BACKENDS:
        for max_norm in (0.01, 0.0333):
            for i in range(len(y)):
                found = clipped_gradient_sum(
                    net, net_loss(net), (x[i : i + 1], y[i : i + 1]), max_norm, backend=backend
                )
                norm = flat(found.gradients).norm().item()
                assert found.norms.item() > max_norm, "this record is not clipped; the test says nothing"
                assert max_norm * (1 - TOLERANCE) <= norm <= max_norm


@given(
    seed=st.integers(0, 10**6),
    positions=st.sampled_from([2, 3, 16, 49]),
    spread=st.sampled_from([1.0, 0.3, 0.1, 0.03, 1e-2, 1e-3, 1e-5]),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
)
@settings(some_examples, max_examples=60)
def test_the_bound_holds_where_positions_cancel(seed: int, positions: int, spread: float, scale: float) -> None:
    """Near-equal inputs a_t with output gradients d_t that sum to zero: a float32 ghost norm is mostly rounding
    error there, and a norm measured too small would let the record through above C."""
    torch.manual_seed(seed)
    lin = nn.Linear(8, 3)
    a = scale * (torch.randn(1, 1, 8) + spread * torch.randn(1, positions, 8))
    signs = torch.randn(1, positions, 1)
    d = (signs - signs.mean(1, keepdim=True)) * torch.randn(1, 1, 3)
    exact = torch.einsum("tk,to->ok", a[0].double(), d[0].double())
    norm = torch.cat([exact.flatten(), d[0].double().sum(0)]).norm().item()
    assume(norm > 2e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "_COST_OF_A_KEPT_NUMBER", 10**9)  # always through Gram matrices
        found = clipped_gradient_sum(lin, lambda a, d: (lin(a) * d).flatten(1).sum(1), (a, d), norm / 2)
    assert norm <= found.norms.double().item() * (1 + 1e-7) <= norm * (1 + TOLERANCE) * (1 + 1e-7)
    assert norm / 2 * (1 - 2 * TOLERANCE) <= flat(found.gradients).norm().item() <= norm / 2


@pytest.mark.parametrize("positions", [1, 2, 4, 32])
def test_no_norm_of_many_is_measured_too_small(positions: int) -> None:
    """5,000 records whose positions cancel to every degree: no reported norm is below the exact one."""
    torch.manual_seed(positions)
    b, lin = 5000, nn.Linear(6, 2, bias=False)
    spread = torch.logspace(-2, 0.5, b).view(b, 1, 1)
    a = torch.randn(b, 1, 6) + spread * torch.randn(b, positions, 6)
    signs = torch.randn(b, positions, 1)
    d = (signs - signs.mean(1, keepdim=True) * (positions > 1)) * torch.randn(b, 1, 2)
    exact = torch.bmm(d.double().transpose(1, 2), a.double()).flatten(1).norm(dim=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "_COST_OF_A_KEPT_NUMBER", 10**9)
        norms = clipped_gradient_sum(lin, lambda a, d: (lin(a) * d).flatten(1).sum(1), (a, d), 1.0).norms.double()
    assert (norms > exact).all()
    assert (norms <= exact * (1 + TOLERANCE)).all()


@both
@pytest.mark.parametrize("size", [1e12, 1e17, 1e-17])
@pytest.mark.parametrize("positions", [1, 2])
def test_the_bound_holds_where_squares_leave_the_range_of_float32(backend: str, size: float, positions: int) -> None:
    """Inputs of 1e17 against output gradients of 1e-22, or the reverse: an ordinary product of extraordinary parts."""
    torch.manual_seed(0)
    lin = nn.Linear(5, 4, bias=False)
    a, d = size * torch.randn(3, positions, 5), 1e-5 / size * torch.randn(3, positions, 4)
    exact = torch.bmm(d.double().transpose(1, 2), a.double())
    loss = lambda a, d: (lin(a) * d).flatten(1).sum(1)  # noqa: E731
    for i in range(3):
        found = clipped_gradient_sum(lin, loss, (a[i : i + 1], d[i : i + 1]), 2e-6, backend=backend)
        part = found.gradients["weight"].double()
        assert exact[i].norm() > 2e-6
        assert part.norm() <= 2e-6
        assert torch.allclose(part, exact[i] * (2e-6 / exact[i].norm()), rtol=1e-4, atol=1e-10)


@both
def test_norms_of_millions_of_weights_are_exact(backend: str) -> None:
    """PyTorch's float32 norm of so many numbers is off by 1e-5."""
    torch.manual_seed(0)
    lin = nn.Linear(3_000_000, 1, bias=False)
    x = torch.rand(1, 3_000_000)
    norm = clipped_gradient_sum(lin, lambda x: lin(x).squeeze(1), (x,), 1.0, backend=backend).norms.item()
    exact = x.double().norm().item()
    assert exact <= norm <= exact * (1 + 3e-6)


@both
def test_gradients_within_the_bound_are_not_touched(net: Net, backend: str) -> None:
    rows = net_rows(5)
    clipped = clipped_gradient_sum(net, net_loss(net), rows, 1e6, backend=backend)
    plain = clipped_gradient_sum(net, net_loss(net), rows, math.inf, backend=backend)
    assert torch.allclose(flat(clipped.gradients), flat(plain.gradients), rtol=1e-5, atol=1e-6)


# --- poisoned records ----------------------------------------------------------------------------------------------


def relu_net() -> nn.Module:
    """Piecewise linear, so that huge finite inputs give huge finite gradients; ReLU makes zeros of some infinities."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 1),
    )


@both
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30, -1e30, 3e38, 1e15])
def test_a_poisoned_record_changes_no_other_records_part(backend: str, size: int | None, poison: float) -> None:
    net = relu_net()
    loss = lambda x: F.softplus(net(x).squeeze(1))  # noqa: E731
    x = net_rows(6)[0]
    clean = clipped_gradient_sum(net, loss, (x[torch.arange(6) != 2],), 0.1, backend=backend)
    for where in ((2,), (2, 0, 3, 3)):  # the whole record, or one pixel of it
        bad = x.clone()
        bad[where] = poison
        found = clipped_gradient_sum(net, loss, (bad,), 0.1, microbatch=size, backend=backend)
        alone = clipped_gradient_sum(net, loss, (bad[2:3],), 0.1, backend=backend)
        assert torch.isfinite(flat(found.gradients)).all()
        assert torch.isfinite(found.norms).all()
        assert flat(alone.gradients).norm() <= 0.1
        if not math.isfinite(poison):
            assert not flat(alone.gradients).any()
            assert found.norms[2] == 0
        rest = flat(found.gradients) - flat(alone.gradients)
        assert torch.allclose(rest, flat(clean.gradients), rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize("max_norm", [0.1, math.inf])
@pytest.mark.parametrize("what", ["loss", "gradient", "activation"])
def test_non_finite_losses_gradients_and_activations_count_as_zero(
    net: Net, backend: str, max_norm: float, what: str
) -> None:
    x, y = net_rows(5)
    bad = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])

    def loss(x: Tensor, y: Tensor, bad: Tensor) -> Tensor:
        if what == "activation":  # an infinite input of a layer whose output is then not looked at: 0 * inf
            h = torch.where(bad == 1, math.inf, 1.0)[:, None].expand(-1, 5)
            return torch.where(bad == 1, 0.0, net.head(h).squeeze(1)) + net.label(y).sum(1)
        out = net(x, y)
        if what == "loss":  # NaN, with a finite gradient
            return out + torch.where(bad == 1, math.nan, 0.0)
        return out + (out - out.detach()) * (1e30 * bad) * (1e30 * bad)  # finite, with an infinite slope

    found = clipped_gradient_sum(net, loss, (x, y, bad), max_norm, backend=backend)
    clean = clipped_gradient_sum(net, loss, (x, y, bad), max_norm, mask=1 - bad, backend=backend)
    assert torch.allclose(flat(found.gradients), flat(clean.gradients), rtol=1e-5, atol=1e-7)
    assert found.norms[2] == 0


# --- no clipping ---------------------------------------------------------------------------------------------------


@both
def test_without_clipping_the_sum_is_the_ordinary_gradient(net: Net, backend: str) -> None:
    rows = net_rows(6)
    found = clipped_gradient_sum(net, net_loss(net), rows, math.inf, microbatch=4, backend=backend)
    assert_same(flat(found.gradients), loop(net, net_loss, rows))
    assert found.norms.isnan().all()


def test_without_clipping_any_module_goes_and_poison_is_left_out() -> None:
    torch.manual_seed(0)
    lin = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).eval()
    net = nn.Sequential(lin, nn.Tanh(), lin, nn.LayerNorm(3))
    x = torch.randn(9, 3)
    clean = clipped_gradient_sum(net, squared_output(net), (x,), math.inf, mask=torch.arange(9) != 4)
    x[4] = math.nan
    found = clipped_gradient_sum(net, squared_output(net), (x,), math.inf)
    assert torch.allclose(flat(found.gradients), flat(clean.gradients), rtol=1e-5, atol=1e-6)
    assert found.norms[4] == 0


# --- the module afterwards -----------------------------------------------------------------------------------------


def state_of(module: nn.Module) -> list[object]:
    """Everything a back end might leave behind: attributes, hooks and flags of all layers and parameters."""
    seen: list[object] = []
    for name, layer in module.named_modules():
        hooks = {key: len(value) for key, value in layer.__dict__.items() if key.endswith("hooks")}
        seen.append((name, sorted(layer.__dict__), hooks, layer.training, layer._is_full_backward_hook))
    for name, parameter in module.named_parameters():
        seen.append((name, sorted(parameter.__dict__), parameter.requires_grad, parameter._version))
    return seen


@both
@pytest.mark.parametrize("mode", [True, False])
def test_the_module_is_left_as_it_was(net: Net, backend: str, mode: bool) -> None:
    net.train(mode)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, rows = state_of(net), net_rows(4)
    found = clipped_gradient_sum(net, net_loss(net), rows, 0.1, backend=backend)
    assert_same(flat(found.gradients), clip(loop(net, net_loss, rows), 0.1))
    assert state_of(net) == before
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in net.parameters())

    def fails(x: Tensor, y: Tensor) -> Tensor:
        net(x, y)
        raise RuntimeError("in the loss")

    with pytest.raises(RuntimeError, match="in the loss"):
        clipped_gradient_sum(net, fails, rows, 0.1, backend=backend)
    assert state_of(net) == before


def test_in_place_activations_do_not_disturb_the_recorded_gradients() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.2, inplace=True), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    found = clipped_gradient_sum(net, squared_output(net), (x,), 0.1)
    assert_same(flat(found.gradients), clip(loop(net, squared_output, (x,)), 0.1))


def test_an_input_overwritten_after_its_layer_is_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 3))

    def loss(x: Tensor) -> Tensor:
        x = x.clone()
        out = net(x).sum(1)
        x.zero_()
        return out

    with pytest.raises(ValueError, match=r"input of layer '0' was changed in place"):
        clipped_gradient_sum(net, loss, (torch.randn(2, 3),), 1.0)


def test_hooks_of_the_user_stay_and_act() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net[0].register_forward_hook(lambda layer, args, out: torch.tanh(out) * 3.0)
    x = torch.randn(5, 3)
    found = clipped_gradient_sum(net, squared_output(net), (x,), 0.1)
    assert_same(flat(found.gradients), clip(loop(net, squared_output, (x,)), 0.1))
    assert len(net[0]._forward_hooks) == 1


# --- refusals ------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("max_norm", [1.0, math.inf])
@pytest.mark.parametrize("shape", [(4, 1), (), (1,), (2, 2)])
def test_losses_of_another_shape_are_refused(backend: str, max_norm: float, shape: tuple[int, ...]) -> None:
    """(b, 1) above all: Opacus 1.6.0's ghost clipping broadcasts it and clips nothing, without a word."""
    net = nn.Linear(3, 1)
    reduce = {(4, 1): lambda o: o, (): lambda o: o.mean(), (1,): lambda o: o.mean(0), (2, 2): lambda o: o.view(2, 2)}
    with pytest.raises(ValueError, match=r"shape \(4,\), got"):
        clipped_gradient_sum(net, lambda x: reduce[shape](net(x)), (torch.randn(4, 3),), max_norm, backend=backend)


@both
@pytest.mark.parametrize("max_norm", [1.0, math.inf])
@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(3),
        nn.BatchNorm1d(3, affine=False),
        nn.BatchNorm1d(3, track_running_stats=False).eval(),
        nn.InstanceNorm1d(3, track_running_stats=True),
    ],
)
def test_layers_that_couple_rows_are_refused(backend: str, max_norm: float, norm: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(3, 3), norm)
    with pytest.raises(ValueError, match=r"layer '1' \((Batch|Instance)Norm1d\).*other rows"):
        clipped_gradient_sum(net, squared_output(net), (torch.randn(4, 3),), max_norm, backend=backend)


def test_a_frozen_batch_norm_in_eval_mode_couples_nothing() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3).eval().requires_grad_(False)
    norm.running_mean.normal_()
    net = nn.Sequential(nn.Linear(3, 3), norm)
    x = torch.randn(4, 3)
    for backend in BACKENDS:
        found = clipped_gradient_sum(net, squared_output(net), (x,), 0.1, backend=backend)
        assert_same(flat(found.gradients), clip(loop(net, squared_output, (x,)), 0.1))


class Scale(nn.Module):
    """A layer with parameters of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


class Doubled(nn.Linear):
    """A linear layer whose forward is not linear in its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.square(), self.bias)


@pytest.mark.parametrize("layer", [nn.LayerNorm(3), Scale(), Doubled(3, 3)])
def test_book_keeping_refuses_other_layers_and_opacus_takes_them(layer: nn.Module) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), layer)
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match=rf"layer '1' is a {type(layer).__name__}: use backend='opacus'"):
        clipped_gradient_sum(net, squared_output(net), (x,), 0.1)
    found = clipped_gradient_sum(net, squared_output(net), (x,), 0.1, backend="opacus")
    assert_same(flat(found.gradients), clip(loop(net, squared_output, (x,)), 0.1))


def test_book_keeping_refuses_repeated_and_shared_layers_and_opacus_takes_them() -> None:
    torch.manual_seed(0)
    lin = nn.Linear(3, 3)
    twice = nn.Sequential(lin, nn.Tanh(), lin)
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"layer '0' is called more than once.*backend='opacus'"):
        clipped_gradient_sum(twice, squared_output(twice), (x,), 0.1)
    shared = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    shared[2].weight = shared[0].weight
    with pytest.raises(ValueError, match=r"'2\.weight' is shared with '0\.weight'.*backend='opacus'"):
        clipped_gradient_sum(shared, squared_output(shared), (x,), 0.1)
    for net in (twice, shared):
        found = clipped_gradient_sum(net, squared_output(net), (x,), 0.1, backend="opacus")
        assert_same(flat(found.gradients), clip(loop(net, squared_output, (x,)), 0.1))


@both
@pytest.mark.parametrize(
    "wrap",
    [nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm],
)
def test_computed_weights_are_refused(backend: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    net = nn.Sequential(nn.Tanh(), wrap(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match=r"layer '1' .* computed from other parameters"):
        clipped_gradient_sum(net, squared_output(net), (torch.randn(4, 3),), 0.1, backend=backend)


@both
def test_parameters_used_outside_their_layer_are_refused(backend: str) -> None:
    """Both would be clipped wrongly in silence: a weight read directly, and a gradient penalty (second derivative)."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))

    def read(x: Tensor) -> Tensor:
        return net(x).squeeze(1) + x @ net[0].weight.sum(0)

    def penalty(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        out = net(x).squeeze(1)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + (slope.norm(dim=1) - 1.0).square()

    for loss in (read, penalty):
        with pytest.raises(ValueError, match=r"parameter '.*weight' enters the loss outside its own layer"):
            clipped_gradient_sum(net, loss, (torch.randn(4, 3),), 0.1, backend=backend)


@both
def test_layers_that_do_not_see_one_row_per_record_are_refused(backend: str) -> None:
    net = nn.Linear(3, 1)
    with pytest.raises(ValueError, match="in dimension 0"):
        clipped_gradient_sum(
            net, lambda x: net(x.flatten(0, 1)).view(4, 2).sum(1), (torch.randn(4, 2, 3),), 1.0, backend=backend
        )


@both
@pytest.mark.parametrize(
    ("net", "rows", "match"),
    [
        (nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), torch.randn(2, 1, 4, 4), "padding_mode"),
        (nn.Embedding(3, 2, max_norm=1.0), torch.tensor([0, 1]), "max_norm"),
        (nn.Embedding(3, 2, scale_grad_by_freq=True), torch.tensor([0, 1]), "scale_grad_by_freq"),
    ],
)
def test_layer_options_that_cannot_be_right_are_refused(backend: str, net: nn.Module, rows: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        clipped_gradient_sum(net, squared_output(net), (rows,), 1.0, backend=backend)


def test_opacus_refuses_a_padding_index() -> None:
    net = nn.Embedding(3, 2, padding_idx=0)
    with pytest.raises(ValueError, match="padding_idx"):
        clipped_gradient_sum(net, squared_output(net), (torch.tensor([0, 1]),), 1.0, backend="opacus")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"max_norm": 0.0}, "max_norm"),
        ({"max_norm": -1.0}, "max_norm"),
        ({"max_norm": math.nan}, "max_norm"),
        ({"microbatch": 0}, "microbatch"),
        ({"backend": "ghost"}, "backend"),
        ({"mask": torch.ones(3)}, "mask of shape"),
        ({"mask": torch.full((4,), 0.5)}, "booleans"),
        ({"rows": ()}, "non-empty tuple"),
        ({"rows": (torch.randn(4, 3), torch.randn(2, 3))}, r"\[4, 2\]"),
        ({"loss_fn": lambda x: x.sum(1)}, "without a gradient"),
        ({"module": nn.Tanh()}, "trainable parameters, got none"),
    ],
)
def test_arguments_out_of_range_are_refused(change: dict, match: str) -> None:
    net = nn.Linear(3, 1)
    given_arguments = {
        "module": net,
        "loss_fn": lambda x, *_: net(x).squeeze(1),
        "rows": (torch.randn(4, 3),),
        "max_norm": 1.0,
    }
    arguments = {**given_arguments, **change}
    with pytest.raises(ValueError, match=match):
        clipped_gradient_sum(**arguments)


def test_lower_precision_is_refused() -> None:
    net = nn.Linear(3, 1)
    with (
        pytest.raises(ValueError, match="turn autocast off"),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        clipped_gradient_sum(net, lambda x: net(x).float().squeeze(1), (torch.randn(4, 3),), 1.0)


@pytest.mark.gpu
@both
def test_on_an_accelerator_the_bound_holds_with_tf32_switched_on(net: Net, backend: str) -> None:
    """The module's own passes may run in TF32 (PyTorch's default for convolutions); norms and sums may not."""
    device = torch.device("cuda")
    net.to(device)
    x, y = (row.to(device) for row in net_rows(20))
    whole = clipped_gradient_sum(net, net_loss(net), (x, y), 0.02, backend=backend)
    single = [
        flat(clipped_gradient_sum(net, net_loss(net), (x[i : i + 1], y[i : i + 1]), 0.02, backend=backend).gradients)
        for i in range(20)
    ]
    assert all(0.02 * (1 - TOLERANCE) <= part.norm() <= 0.02 for part in single)
    assert (flat(whole.gradients) - sum(single)).norm() <= 20 * 0.02 * 2e-3  # TF32 forwards differ with the batch
    assert torch.backends.cudnn.allow_tf32

"""Tests that no record adds more than C to a clipped gradient sum, for all values of records."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpgen_bench.privacy.gradients import clipped_gradient_sum, layers
from tests.gradient_cases import (
    BACKENDS,
    TOLERANCE,
    Net,
    both,
    flat,
    net_loss,
    net_rows,
    some_examples,
)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def test_one_record_never_adds_more_than_its_bound(net: Net) -> None:
    """For single records, the float64 norm of the float32 sum is at most C, and close to it."""
    x, y = net_rows(40)
    for backend in BACKENDS:
        for max_norm in (0.01, 0.0333):
            for i in range(len(y)):
                result = clipped_gradient_sum(
                    net, net_loss(net), (x[i : i + 1], y[i : i + 1]), max_norm, backend=backend
                )
                norm = flat(result.gradients).norm().item()
                assert result.norms.item() > max_norm, "this record is not clipped, so the test shows nothing"
                assert max_norm * (1 - TOLERANCE) <= norm <= max_norm


# The margins of privacy/gradients/rounding.py are for errors of a few units of float32, here as on every machine; the
# 17 units of a perturbed product are more than they allow where many positions cancel.
@pytest.mark.rounding
@given(
    seed=st.integers(0, 10**6),
    positions=st.sampled_from([2, 3, 16, 49]),
    spread=st.sampled_from([1.0, 0.3, 0.1, 0.03, 1e-2, 1e-3, 1e-5]),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
)
@settings(some_examples, max_examples=60)
def test_the_bound_holds_where_positions_cancel(seed: int, positions: int, spread: float, scale: float) -> None:
    """Nearly equal inputs a_t with output gradients d_t that sum to zero: a float32 ghost norm is mostly rounding
    error, and with a norm that is too small the record would add more than C."""
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
        result = clipped_gradient_sum(lin, lambda a, d: (lin(a) * d).flatten(1).sum(1), (a, d), norm / 2)
    assert norm <= result.norms.double().item() * (1 + 1e-7) <= norm * (1 + TOLERANCE) * (1 + 1e-7)
    assert norm / 2 * (1 - 2 * TOLERANCE) <= flat(result.gradients).norm().item() <= norm / 2


@pytest.mark.rounding
@pytest.mark.parametrize(("positions", "features"), [(1, 6), (2, 6), (2, 4096), (4, 64), (32, 6)])
def test_no_norm_of_many_records_is_too_small(positions: int, features: int) -> None:
    """1,000 records with all degrees of cancellation: no returned norm is below the exact one."""
    torch.manual_seed(0)
    b, lin = 1000, nn.Linear(features, 2, bias=False)
    spread = torch.logspace(-2, 0.5, b).view(b, 1, 1)
    a = torch.randn(b, 1, features) + spread * torch.randn(b, positions, features)
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
    """Inputs of 1e17 with output gradients of 1e-22, or the reverse: an ordinary product of extreme factors."""
    torch.manual_seed(0)
    lin = nn.Linear(5, 4, bias=False)
    a, d = size * torch.randn(3, positions, 5), 1e-5 / size * torch.randn(3, positions, 4)
    exact = torch.bmm(d.double().transpose(1, 2), a.double())
    loss = lambda a, d: (lin(a) * d).flatten(1).sum(1)  # noqa: E731
    for i in range(3):
        result = clipped_gradient_sum(lin, loss, (a[i : i + 1], d[i : i + 1]), 2e-6, backend=backend)
        part = result.gradients["weight"].double()
        assert exact[i].norm() > 2e-6
        assert part.norm() <= 2e-6
        assert torch.allclose(part, exact[i] * (2e-6 / exact[i].norm()), rtol=1e-4, atol=1e-10)


@both
def test_norms_of_millions_of_weights_are_exact(backend: str) -> None:
    """PyTorch's float32 norm of so many numbers has an error of 1e-5."""
    torch.manual_seed(0)
    lin = nn.Linear(3_000_000, 1, bias=False)
    x = torch.rand(1, 3_000_000)
    norm = clipped_gradient_sum(lin, lambda x: lin(x).squeeze(1), (x,), 1.0, backend=backend).norms.item()
    exact = x.double().norm().item()
    assert exact <= norm <= exact * (1 + 3e-6)


@both
def test_gradients_within_the_bound_are_not_changed(net: Net, backend: str) -> None:
    rows = net_rows(5)
    clipped = clipped_gradient_sum(net, net_loss(net), rows, 1e6, backend=backend)
    plain = clipped_gradient_sum(net, net_loss(net), rows, math.inf, backend=backend)
    assert torch.allclose(flat(clipped.gradients), flat(plain.gradients), rtol=1e-5, atol=1e-6)


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
def test_a_nonfinite_record_changes_no_other_records_summand(backend: str, size: int | None, poison: float) -> None:
    net = relu_net()
    loss = lambda x: F.softplus(net(x).squeeze(1))  # noqa: E731
    x = net_rows(6)[0]
    clean = clipped_gradient_sum(net, loss, (x[torch.arange(6) != 2],), 0.1, backend=backend)
    for where in ((2,), (2, 0, 3, 3)):  # the whole record, or one pixel of it
        bad = x.clone()
        bad[where] = poison
        result = clipped_gradient_sum(net, loss, (bad,), 0.1, microbatch=size, backend=backend)
        alone = clipped_gradient_sum(net, loss, (bad[2:3],), 0.1, backend=backend)
        assert torch.isfinite(flat(result.gradients)).all()
        assert torch.isfinite(result.norms).all()
        assert flat(alone.gradients).norm() <= 0.1
        if not math.isfinite(poison):
            assert not flat(alone.gradients).any()
            assert result.norms[2] == 0
        rest = flat(result.gradients) - flat(alone.gradients)
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

    result = clipped_gradient_sum(net, loss, (x, y, bad), max_norm, backend=backend)
    clean = clipped_gradient_sum(net, loss, (x, y, bad), max_norm, mask=1 - bad, backend=backend)
    assert torch.allclose(flat(result.gradients), flat(clean.gradients), rtol=1e-5, atol=1e-7)
    assert result.norms[2] == 0


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

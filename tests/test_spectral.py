"""Power iterations on state dicts against PyTorch's own, against singular vectors, and on stacks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.nn.utils.parametrizations import spectral_norm

from dpgen_bench.nets.spectral import advance_spectral, power_iteration
from dpgen_bench.nets.wgan import ProjectionCritic, ResNetGenerator

TOLERANCES = [(torch.float32, 1e-5), (torch.float64, 1e-12)]  # of entries of unit vectors


class Layers(nn.Module):
    """One layer of each kind, and a buffer that no spectral norm owns."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.conv = spectral_norm(nn.Conv2d(3, width, (2, 3)))
        self.linear = spectral_norm(nn.Linear(7, width))
        self.table = spectral_norm(nn.Embedding(4, width))
        self.plain = nn.Linear(2, 2)
        self.register_buffer("count", torch.tensor(3.0))


def state(net: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of its parameters and buffers."""
    copies = [{n: t.detach().clone() for n, t in tensors} for tensors in (net.named_parameters(), net.named_buffers())]
    return copies[0], copies[1]


def forward_in_training_mode(net: nn.Module) -> None:
    net.train()
    dtype = next(net.parameters()).dtype
    y = torch.tensor([0, 2])
    if isinstance(net, Layers):
        net.conv(torch.ones(2, 3, 5, 5, dtype=dtype)), net.linear(torch.ones(2, 7, dtype=dtype)), net.table(y)
    elif isinstance(net, ProjectionCritic):
        net(torch.ones(2, 1, 28, 28, dtype=dtype), y)
    else:
        net(torch.ones(2, 10, dtype=dtype), y)


def shaken(build, dtype: torch.dtype) -> nn.Module:
    """A network whose weights differ from those of its vectors' estimate, as after a step of an optimiser."""
    net = build().to(dtype)
    with torch.no_grad():
        for weight in net.parameters():
            weight += 0.3 * weight.std() * torch.randn_like(weight) if weight.numel() > 1 else 0.0
    return net


BUILDS = [Layers, lambda: ProjectionCritic((1, 28, 28), 3, width=3), lambda: ResNetGenerator((1, 28, 28), 3, width=4)]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("build", BUILDS, ids=["layers", "critic", "generator"])
def test_one_training_forward(build, dtype, tolerance):
    torch.manual_seed(0)
    net = shaken(build, dtype)
    parameters, before = state(net)
    advanced = advance_spectral(parameters, before)
    forward_in_training_mode(net)
    assert advanced.keys() == dict(net.named_buffers()).keys()
    moved = set()
    for name, buffer in net.named_buffers():
        torch.testing.assert_close(advanced[name], buffer, rtol=0, atol=tolerance)
        if (buffer - before[name]).abs().max().item() > 100 * tolerance:
            moved.add(name)
    # The one number in u of a single output stays ±1.
    assert moved == {name for name, buffer in before.items() if name.endswith(("_u", "_v")) and buffer.numel() > 1}


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("build", BUILDS, ids=["layers", "critic", "generator"])
def test_a_stack_moves_as_its_networks(build, dtype, tolerance):
    torch.manual_seed(1)
    nets = [shaken(build, dtype) for _ in range(3)]
    advanced = advance_spectral(*stack_module_state(nets))
    for i, net in enumerate(nets):
        forward_in_training_mode(net)
        for name, buffer in net.named_buffers():
            torch.testing.assert_close(advanced[name][i], buffer, rtol=0, atol=tolerance)


def test_two_leading_dimensions():
    torch.manual_seed(2)
    weight = torch.randn(2, 3, 5, 4, 2, 2, dtype=torch.float64)
    u, v = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 3, 16, dtype=torch.float64)
    new_u, new_v = power_iteration(weight, u, v)
    for i in range(2):
        for j in range(3):
            for stacked, single in zip((new_u, new_v), power_iteration(weight[i, j], u[i, j], v[i, j]), strict=True):
                torch.testing.assert_close(stacked[i, j], single, rtol=0, atol=1e-14)


def test_inputs_stay_as_they_are_and_nothing_needs_gradients():
    torch.manual_seed(3)
    net = Layers()
    copies = state(net)
    advanced = advance_spectral(dict(net.named_parameters()), dict(net.named_buffers()))
    for now, before in zip(state(net), copies, strict=True):
        assert all(torch.equal(now[name], before[name]) for name in before)
    assert not any(buffer.requires_grad for buffer in advanced.values())
    assert advanced["count"] is net.count


def test_converges_to_the_largest_singular_value():
    """On a matrix with known singular values 3, 1, 1/2: each iteration shrinks the rest of v by 9 in ratio."""
    torch.manual_seed(4)
    left, right = (torch.linalg.qr(torch.randn(n, 3, dtype=torch.float64)).Q for n in (5, 8))
    weight = (left * torch.tensor([3.0, 1.0, 0.5], dtype=torch.float64)) @ right.T
    u, v = torch.zeros(5, dtype=torch.float64), (right @ torch.ones(3, dtype=torch.float64)) / 3**0.5
    ratios = []
    for _ in range(12):
        u, v = power_iteration(weight, u, v)
        ratios.append(((right[:, 1] @ v) / (right[:, 0] @ v)).item())
    assert ratios[:3] == pytest.approx([1 / 9, 1 / 81, 1 / 729], rel=1e-10)
    assert (u @ weight @ v).item() == pytest.approx(3.0, abs=1e-12)


def test_a_zero_weight_gives_zeros_not_nan():
    u, v = power_iteration(torch.zeros(2, 3), torch.ones(2), torch.ones(3))
    assert not u.any()
    assert not v.any()


def test_errors():
    weight, u, v = torch.ones(3, 4, 2), torch.ones(3), torch.ones(8)
    with pytest.raises(ValueError, match=r"v \[7\] for a weight \[3, 4, 2\].*same stack dimensions"):
        power_iteration(weight, u, v[:7])
    with pytest.raises(ValueError, match="not a transposed"):
        power_iteration(weight[0], u, v)
    with pytest.raises(ValueError, match="same stack dimensions"):
        power_iteration(weight, u, v.expand(2, 8))
    parameters, buffers = state(Layers())
    with pytest.raises(ValueError, match=r"conv.parametrizations.weight.0._u needs .*one of which is missing"):
        advance_spectral({}, buffers)
    with pytest.raises(ValueError, match=r"^linear.parametrizations.weight: expected u"):
        advance_spectral(parameters, {**buffers, "linear.parametrizations.weight.0._v": torch.ones(2)})
    transposed = spectral_norm(nn.ConvTranspose2d(3, 4, 2))
    with pytest.raises(ValueError, match="transposed convolution"):
        advance_spectral(*state(transposed))

"""Tests of clipped gradient sums: the module is not changed, and wrong modules and arguments are refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.privacy.bounds import PerRecordGradient
from dpgen_bench.privacy.gradients import clipped_gradient_sum
from tests.gradient_cases import (
    BACKENDS,
    Net,
    assert_same,
    both,
    clip,
    flat,
    loop,
    net_loss,
    net_rows,
    squared_output,
)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


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
def test_the_module_is_not_changed(net: Net, backend: str, mode: bool) -> None:
    net.train(mode)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, rows = state_of(net), net_rows(4)
    result = clipped_gradient_sum(net, net_loss(net), rows, 0.1, backend=backend)
    assert_same(flat(result.gradients), clip(loop(net, net_loss, rows), 0.1))
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
    result = clipped_gradient_sum(net, squared_output(net), (x,), 0.1)
    assert_same(flat(result.gradients), clip(loop(net, squared_output, (x,)), 0.1))


@pytest.mark.parametrize(
    "layer", [nn.ReLU(inplace=True), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.5, inplace=True)]
)
def test_opacus_refuses_layers_that_work_in_place_before_a_record_is_seen(layer) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(layer), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"layer '1.0' .* works in place.*construct it with inplace=False"):
        clipped_gradient_sum(net, squared_output(net), (torch.randn(5, 3),), 0.1, backend="opacus")
    with pytest.raises(ValueError, match="works in place"):
        PerRecordGradient(C=0.1, module=net, backend="opacus").check_public(None)
    PerRecordGradient(C=0.1, module=net).check_public(None)


def test_an_input_overwritten_after_its_layer_is_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 3))

    def loss(x: Tensor) -> Tensor:
        x = x.clone()
        out = net(x).sum(1)
        x.zero_()
        return out

    with pytest.raises(ValueError, match=r"input of layer '0' was changed in place"):
        clipped_gradient_sum(net, loss, (torch.randn(2, 3),), 1.0)


def test_hooks_of_the_user_stay_and_run() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net[0].register_forward_hook(lambda layer, args, out: torch.tanh(out) * 3.0)
    x = torch.randn(5, 3)
    result = clipped_gradient_sum(net, squared_output(net), (x,), 0.1)
    assert_same(flat(result.gradients), clip(loop(net, squared_output, (x,)), 0.1))
    assert len(net[0]._forward_hooks) == 1


@both
@pytest.mark.parametrize("max_norm", [1.0, math.inf])
@pytest.mark.parametrize("shape", [(4, 1), (), (1,), (2, 2)])
def test_losses_of_another_shape_are_refused(backend: str, max_norm: float, shape: tuple[int, ...]) -> None:
    """Above all (b, 1): Opacus 1.6.0's ghost clipping broadcasts it and clips nothing, without a warning."""
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
        result = clipped_gradient_sum(net, squared_output(net), (x,), 0.1, backend=backend)
        assert_same(flat(result.gradients), clip(loop(net, squared_output, (x,)), 0.1))


class Scale(nn.Module):
    """A layer with parameters other than weight and bias."""

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
def test_book_keeping_refuses_other_layers_and_opacus_accepts_them(layer: nn.Module) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), layer)
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match=rf"layer '1' is a {type(layer).__name__}: use backend='opacus'"):
        clipped_gradient_sum(net, squared_output(net), (x,), 0.1)
    result = clipped_gradient_sum(net, squared_output(net), (x,), 0.1, backend="opacus")
    assert_same(flat(result.gradients), clip(loop(net, squared_output, (x,)), 0.1))


def test_book_keeping_refuses_repeated_and_shared_layers_and_opacus_accepts_them() -> None:
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
        result = clipped_gradient_sum(net, squared_output(net), (x,), 0.1, backend="opacus")
        assert_same(flat(result.gradients), clip(loop(net, squared_output, (x,)), 0.1))


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
    """A weight that is read directly, and a gradient penalty (second derivative), would be clipped wrongly."""
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
def test_layers_without_one_row_per_record_are_refused(backend: str) -> None:
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
def test_layer_options_that_would_be_wrong_are_refused(backend: str, net: nn.Module, rows: Tensor, match: str) -> None:
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

"""DP-Sinkhorn against Algorithm 1, Definition 4.3 and the arithmetic of its three ways to clip."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.config.building import build_method
from dpgen_bench.config.compose import compose_config
from dpgen_bench.generator import Generator, NetGenerator
from dpgen_bench.nets.conv_generator import ConvGenerator
from dpgen_bench.nets.transport import semi_debiased
from dpgen_bench.training.signals import Preempted
from methods import dp_sinkhorn
from methods.dp_sinkhorn import DPSinkhorn
from tests.defaults import build
from tests.dp_sinkhorn_toys import TINY, VARIANTS, fit, private
from tests.toys import Watcher, records

SHAPE = (1, 28, 28)


# --- one step is Algorithm 1 ------------------------------------------------------------------------------------


class FirstStep:
    """The first step of a fit with seed 3, computed again by hand: X, its labels, and the plain gradient in X."""

    def __init__(self, method: DPSinkhorn, drawn: np.ndarray) -> None:
        n, rest = method.batch_size, method.debiasing
        torch.manual_seed(3)
        self.g = ConvGenerator(SHAPE, 10, latent_dim=3, label_dim=2, width=2)
        public = torch.Generator().manual_seed(3)
        z = torch.rand(n + rest, 3, generator=public)
        labels = torch.randint(10, (n + rest,), generator=public)
        if method.debias_labels == "repeated":
            labels[n:] = labels[:rest]
        self.X = self.g(z, labels)
        images, y_labels = records()
        y = 2.0 * images[drawn] / 255.0 - 1.0
        points = [
            torch.cat([a.detach().flatten(1), 15.0 * F.one_hot(b, 10)], dim=1)
            for a, b in ((self.X, labels), (y, y_labels[drawn]))
        ]
        _, gradient = semi_debiased(method.transport, points[0].double(), points[1].double(), n)
        self.G = gradient[:, : math.prod(SHAPE)].reshape(-1, *SHAPE).float()

    def backprop(self, G: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(self.X, list(self.g.parameters()), G, retain_graph=True))


def grads_of_a_fit(method: DPSinkhorn, monkeypatch: pytest.MonkeyPatch, **private_options: Any) -> Any:
    """(watcher, gradients that Adam got in the first step)."""
    received: list[list[Tensor]] = []
    step = torch.optim.Adam.step
    monkeypatch.setattr(
        torch.optim.Adam,
        "step",
        lambda self: (received.append([p.grad.clone() for p in self.param_groups[0]["params"]]), step(self)),
    )
    watcher = Watcher()
    fit(method, private(watcher=watcher, **private_options))
    return watcher, received[0]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-3) -> None:
    """Relative: the float32 loop's exponents reach 2e4, which costs a few 1e-4."""
    assert float((a - b).norm()) <= tolerance * float(b.norm())


@pytest.mark.parametrize("debias_labels", ["fresh", "repeated"])
@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("cost", ["l1+l2", "l2", "l1"])
def test_the_released_rows_are_the_loss_gradient(cost: Any, p: float, debias_labels: Any) -> None:
    """Without privacy: rows 0..n-1 of the gradient of Definition 4.3, on q = 5/12 of the records."""
    method = build(DPSinkhorn, **{**TINY, "p": p}, cost=cost, m=3.0, debias_labels=debias_labels)
    watcher = Watcher()
    fit(method, private(watcher=watcher))
    ((drawn, exact, _),) = watcher.releases
    assert len(drawn) > 1
    close(exact, FirstStep(method, drawn).G[:5])


def row_clip(G: Tensor, C: float) -> Tensor:
    return torch.stack([row * min(1.0, C / float(row.norm())) for row in G]) if len(G) else G


def whole_clip(G: Tensor, C: float) -> Tensor:
    return G * min(1.0, C / float(G.norm())) if len(G) else G


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("clip", "by_hand"), [("per_row", row_clip), ("whole", whole_clip)])
def test_parameters_get_the_backprop_of_the_sanitised_image_gradient(
    clip: Any, by_hand: Any, p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noisy rows as released, debiasing rows clipped alone and without noise: then exactly autograd.grad."""
    method = build(DPSinkhorn, **{**TINY, "p": p, "sigma": 0.7}, clip=clip, clip_norm=0.05)
    watcher, received = grads_of_a_fit(method, monkeypatch)
    ((drawn, exact, noisy),) = watcher.releases
    step = FirstStep(method, drawn)
    close(exact, by_hand(step.G[:5], 0.05))
    noise = (noisy - exact).std()
    assert 0.9 < float(noise) / (2 * 0.05 * 0.7) < 1.1  # of 5 x 784 values known to 1.1%: false alarm below 1e-17
    for a, b in zip(received, step.backprop(torch.cat([noisy, by_hand(step.G[5:], 0.05)])), strict=True):
        close(a, b, 2e-3)


def test_without_privacy_nothing_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    method = build(DPSinkhorn, **TINY)
    watcher, received = grads_of_a_fit(method, monkeypatch)
    ((drawn, exact, noisy),) = watcher.releases
    assert torch.equal(exact, noisy)
    step = FirstStep(method, drawn)
    assert float(step.G.flatten(1).norm(dim=1).min()) > method.clip_norm  # it would have been clipped
    for a, b in zip(received, step.backprop(step.G), strict=True):
        close(a, b)


def test_a_step_is_adams_along_the_gradient_with_weight_decay() -> None:
    method = build(DPSinkhorn, **TINY, lr=3e-3, betas=(0.6, 0.9), weight_decay=0.1)
    _, ctx = fit(method, private())
    torch.manual_seed(3)
    by_hand = ConvGenerator(SHAPE, 10, latent_dim=3, label_dim=2, width=2)
    adam = torch.optim.Adam(by_hand.parameters(), 3e-3, (0.6, 0.9), weight_decay=0.1)
    for before, after in zip(by_hand.parameters(), ctx.stateful["g"].parameters(), strict=True):
        before.grad = after.grad
    adam.step()
    for expected, after in zip(by_hand.parameters(), ctx.stateful["g"].parameters(), strict=True):
        assert torch.allclose(after, expected, atol=1e-6)
    assert ctx.stateful["adam"].param_groups[0]["betas"] == (0.6, 0.9)


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_the_parameter_gradient_is_the_backprop_of_the_whole_loss(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    method = build(DPSinkhorn, **{**TINY, "p": p, "sigma": 0.5}, perturb="parameter", clip_norm=0.03)
    watcher, received = grads_of_a_fit(method, monkeypatch)
    ((drawn, exact, noisy),) = watcher.releases
    step = FirstStep(method, drawn)
    slopes = torch.cat([slope.flatten() for slope in step.backprop(step.G)])
    close(exact, whole_clip(slopes, 0.03))
    assert torch.equal(torch.cat([grad.flatten() for grad in received]), noisy)


def test_an_empty_draw_releases_the_public_term_with_noise() -> None:
    watcher = Watcher()
    generator, _ = fit(
        build(DPSinkhorn, **{**TINY, "batch_size": 1, "steps": 12, "sigma": 1.0}), private(watcher=watcher)
    )
    empty = [(exact, noisy) for drawn, exact, noisy in watcher.releases if len(drawn) == 0]
    assert empty
    for exact, noisy in empty:
        assert exact.shape == (1, *SHAPE)
        assert float((noisy - exact).std()) > 0.5
    assert all(torch.isfinite(value).all() for value in generator.state().values())


def test_the_batch_never_changes_how_many_images_are_generated() -> None:
    watcher = Watcher()
    fit(build(DPSinkhorn, **{**TINY, "steps": 8, "sigma": 1.0}), private(watcher=watcher))
    assert len({len(drawn) for drawn, _, _ in watcher.releases}) > 1
    assert {tuple(exact.shape) for _, exact, _ in watcher.releases} == {(5, *SHAPE)}


@pytest.mark.parametrize(("n", "p", "rest"), [(50, 0.4, 20), (50, 0.2, 10), (50, 1.0, 50), (50, 0.0, 0), (7, 0.4, 2)])
def test_debiasing_group(n: int, p: float, rest: int) -> None:
    """n' = floor(n p); 0.29 x 100 is 28.999999999999996 in floating point."""
    assert build(DPSinkhorn, batch_size=n, p=p).debiasing == rest
    assert build(DPSinkhorn, batch_size=100, p=0.29).debiasing == 29


# --- settings, resuming, restarting -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, r"batch_size: expected a number in \[1, inf\), got 0"),
        ({"batch_size": True}, "batch_size"),
        ({"p": 1.5}, r"method.p: expected a number in \[0, 1\], got 1.5"),
        ({"cost": "l3"}, "cost: expected 'l1\\+l2' or 'l2' or 'l1'"),
        ({"m": -1.0}, r"m: expected a number in \[0, inf\), got -1"),
        ({"lam": 0.0}, "lam between"),
        ({"exponent": 235.0}, "exponent between 0.5 and 4"),
        ({"scaling": 1.0}, "scaling between"),
        ({"perturb": "both"}, "perturb"),
        ({"clip": "rows"}, "clip"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"sigma": 0.0}, r"sigma: expected a number in \(0, inf\), got 0"),
        ({"steps": 0}, r"steps: expected a number in \[1, inf\), got 0"),
        ({"sigma": None, "steps": None}, "both null"),
        ({"betas": [0.9]}, "betas"),
        ({"generator": "resnet"}, "generator"),
        ({"width": 0}, "width"),
        ({"weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_bad_values_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(DPSinkhorn, **change)


@pytest.mark.parametrize("variant", ["per_row", "whole", "parameter"])
def test_a_resumed_fit_ends_like_an_uninterrupted_one(tmp_path: Path, variant: str) -> None:
    method = build(DPSinkhorn, **{**TINY, "steps": 5, "sigma": 1.0, **VARIANTS[variant]})
    whole, _ = fit(method, private())
    asked = iter(range(1, 100))
    with pytest.raises(Preempted):
        fit(method, private(), folder=tmp_path, should_stop=lambda: 15 if next(asked) == 3 else None)
    resumed, _ = fit(method, private(), folder=tmp_path)
    for name, weights in whole.state().items():
        assert torch.equal(weights, resumed.state()[name]), name


def test_restart_takes_states_but_not_the_old_settings(tmp_path: Path) -> None:
    _, parent = fit(build(DPSinkhorn, **{**TINY, "steps": 3}), private(), folder=tmp_path)
    child = build(DPSinkhorn, **{**TINY, "sigma": 1.0}, lr=3e-3, betas=(0.4, 0.9), weight_decay=0.5)
    _, ctx = fit(child, private(), parent=tmp_path / "checkpoints" / "last.pt")
    (group,) = ctx.stateful["adam"].state_dict()["param_groups"]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-3, (0.4, 0.9), 0.5)
    assert int(ctx.stateful["adam"].state_dict()["state"][0]["step"]) == 4
    assert int(parent.stateful["adam"].state_dict()["state"][0]["step"]) == 3


def test_the_released_generator_keeps_its_running_statistics(tmp_path: Path) -> None:
    generator, _ = fit(build(DPSinkhorn, **{**TINY, "steps": 3}), private())
    assert isinstance(generator, NetGenerator)
    assert (generator.latent, generator.value_range) == ("uniform", (-1.0, 1.0))
    norms = [module for module in generator.net.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert all(int(norm.num_batches_tracked) == 3 for norm in norms)  # type: ignore[arg-type]
    generator.save(tmp_path)
    labels = torch.arange(7) % 10
    images = generator.sample(labels, 1)
    assert torch.equal(Generator.load(tmp_path).sample(labels, 1), images)
    assert torch.equal(generator.sample(labels[:2], 1), images[:2])  # no batch-mates


def test_the_check_config_builds() -> None:
    config = compose_config(["method=dp_sinkhorn", "dataset=mnist"])
    config.method.update(config.method.check)
    tiny = build_method(config)
    assert (tiny.batch_size, tiny.width, tiny.sigma, tiny.steps) == (6, 4, None, 5)  # type: ignore[attr-defined]


def test_the_log_holds_the_public_term_alone() -> None:
    _, ctx = fit(build(DPSinkhorn, **{**TINY, "steps": 3}), private())
    assert [row.keys() - {"phase", "step"} for row in ctx.history] == [{"transport_among_generated"}]
    assert dp_sinkhorn.NETS.keys() == {"dcgan", "biggan"}

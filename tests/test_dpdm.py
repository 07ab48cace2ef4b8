"""DPDM: a step equals brute force, the accounting of the paper's setting, settings, samples."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import Generator, NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.edm import Denoiser, EDMSampler
from dpgen_bench.privacy.accountants.calibration import calibrate_std
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.allowance import Observer
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.record_rng import RecordRng
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.privacy.services import Services
from methods.dpdm import DPDM
from tests.adam import expect_first_step_of_adam
from tests.defaults import build, check_settings
from tests.toys import records

TINY: dict[str, Any] = {**check_settings("dpdm"), "steps": 1, "width": 8}


class Watcher(Observer):
    """Stores the drawn records, the key and the network of each release."""

    def __init__(self) -> None:
        self.releases: list[tuple[np.ndarray, Denoiser]] = []

    def release(
        self, mechanism: Mechanism, index: int, drawn: np.ndarray, exact: dict[str, Tensor], noisy: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        self.releases.append((drawn, copy.deepcopy(mechanism.bound.module)))  # type: ignore[attr-defined]
        return noisy


class Seen(Context):
    """A context that stores the states of the method's loop."""

    def steps(self, total: int, *, phase: str = "train", **stateful: Any) -> Any:
        self.stateful = stateful
        return super().steps(total, phase=phase, **stateful)


def fit(n: int = 12, watcher: Watcher | None = None, **settings: Any) -> tuple[Generator, Seen, Ledger]:
    ledger = Ledger(Budget(math.inf, 1e-5, "add_remove", "rdp"), n)
    services = Services(ledger, Key.seeded("test"), observer=watcher)
    data = PrivateData(*records(n), 10, services)
    ctx = Seen(3, services=services)
    return build(DPDM, **{**TINY, **settings}).fit(data, ctx), ctx, ledger


@pytest.mark.parametrize("C", [0.5, math.inf])
def test_a_step_clips_the_gradient_of_the_mean_over_noise_levels(C: float) -> None:
    """n = 12 and B = 5: q = 1/3 and denominator 4 for every draw. Without noise, in float64, record by record."""
    K, watcher = 3, Watcher()
    noise_free = {} if math.isinf(C) else {"clip_norm": C, "sigma": 1e-20}
    settings = {**noise_free, "batch_size": 5, "noise_levels": K, "steps": 2, "lr": 0.1, "label_dropout": 0.3}
    _, ctx, _ = fit(watcher=watcher, **settings)
    drawn, before = watcher.releases[1]  # in the first step all gradients but those of the last layer are zero
    assert len(drawn) not in (0, 4)

    images, labels = records(12)
    key = Key.seeded("test").derive("denoiser", 1)
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in before.named_parameters()}
    norms = []
    for record in drawn:
        D = copy.deepcopy(before).double()
        rng = RecordRng(key, torch.full((K,), int(record)), K)
        s = torch.exp(-1.2 + 1.2 * rng.normal().double())
        noise, dropped = rng.normal((1, 28, 28)).double(), rng.uniform() < 0.3
        x = 2.0 * images[record].double() / 255.0 - 1.0
        loss = torch.zeros((), dtype=torch.float64)
        for k in range(K):
            y = torch.tensor([10 if dropped[k] else int(labels[record])])
            error = (D((x + s[k] * noise[k])[None], s[k : k + 1], y)[0] - x).square().sum()
            loss = loss + (s[k] ** 2 + 0.25) / (0.5 * s[k]) ** 2 * error / K
        gradients = torch.autograd.grad(loss, list(D.parameters()))
        norms.append(float(torch.cat([g.flatten() for g in gradients]).norm()))
        for name, g in zip(total, gradients, strict=True):
            total[name] += g * min(1.0, C / norms[-1])
    assert min(norms) > 0.5
    exact = copy.deepcopy(before).double()
    for name, parameter in exact.named_parameters():
        parameter.grad = total[name] / 4.0
    after = ctx.stateful["D"]
    largest = max(float(p.grad.abs().max()) for p in exact.parameters() if p.grad is not None)
    for name, parameter in after.named_parameters():
        expected = exact.get_parameter(name).grad
        assert expected is not None
        assert torch.allclose(parameter.grad.double(), expected, rtol=1e-3, atol=1e-4 * largest), name


def test_the_first_step_is_adams_and_the_moving_average_is_released() -> None:
    watcher = Watcher()
    generator, ctx, _ = fit(watcher=watcher, lr=0.01, ema=0.75)
    (_, before), after = watcher.releases[0], ctx.stateful["D"]
    exact = copy.deepcopy(before).double()
    for name, parameter in exact.named_parameters():
        parameter.grad = after.get_parameter(name).grad.double()
    before.net, exact.net, last = before.net.leave, exact.net.leave, after.net.leave  # only its gradients are not zero
    expect_first_step_of_adam(before.net, exact.net, last, 0.01)
    assert isinstance(generator, NetGenerator)
    released = generator.net.denoiser.net.leave.weight  # type: ignore[union-attr]
    torch.testing.assert_close(released, 0.25 * last.weight)  # it starts at zero


def test_the_average_of_all_parameters_follows_the_network() -> None:
    generator, ctx, _ = fit(steps=3, lr=0.05, ema=0.0)
    assert isinstance(generator, NetGenerator)
    for name, parameter in ctx.stateful["D"].named_parameters():
        torch.testing.assert_close(generator.net.get_parameter(f"denoiser.{name}"), parameter)


def test_samples_are_repeatable_and_those_of_the_sampler() -> None:
    labels = torch.arange(6) % 10
    images = {}
    for sampler in ("ddim", "stochastic", "churn"):
        generator, _, _ = fit(sampler=sampler, steps=2, lr=0.05)
        images[sampler] = generator.sample(labels, seed=1)
        assert torch.equal(images[sampler], generator.sample(labels, seed=1))
        assert torch.equal(images[sampler][:2], generator.sample(labels[:2], seed=1))
        assert not torch.equal(images[sampler], generator.sample(labels, seed=2))
    assert not torch.equal(images["ddim"], images["stochastic"])
    assert not torch.equal(images["ddim"], images["churn"])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sigma": None, "steps": None}, "method.sigma and method.steps"),
        ({"noise_levels": 0}, "method.noise_levels"),
        ({"sampler": "euler"}, "method.sampler"),
        ({"churn": [1.0, 2.0]}, "method.churn"),
        ({"churn": [10.0, 50.0, 0.05, 1.0]}, "method.churn: expected S_min <= S_max, got 50 > 0.05"),
        ({"multipliers": []}, "method.multipliers"),
        ({"p_mean": math.nan}, r"method.p_mean: expected a number in \(-inf, inf\), got nan"),
        ({"guidance": math.inf}, "method.guidance"),
        ({"ema": 1.0}, "method.ema"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        build(DPDM, **{**TINY, **settings})


@pytest.mark.parametrize(("eps", "sigma", "proven"), [(10, 2.487, 9.295), (1, 18.13, 0.915)])
def test_the_noise_of_the_published_setting(eps: int, sigma: float, proven: float) -> None:
    """q = 1/15 and 4,500 steps: multipliers that the authors' accountant gives, and their epsilon by PLD."""
    spec = build_spec(compose_config(["experiment=dpdm/mnist", f"privacy.epsilon={eps}"]))
    method, privacy = spec.training["method"], spec.training["privacy"]
    assert build(DPDM, batch_size=method["batch_size"]).sampling_rate(60_000) == 1 / 15
    assert method["sigma"] is None
    budget = Budget(privacy["epsilon"], privacy["delta"], privacy["relation"], privacy["accountant"])
    unit = Sensitivity(1.0, 2.0)
    std = calibrate_std(budget, [], Poisson(1 / 15), unit, method["steps"])
    assert std == pytest.approx(sigma, rel=1e-3)
    event = Event(Poisson(1 / 15), unit, std, method["steps"])
    assert epsilon([event], 1e-5, "add_remove", "pld") == pytest.approx(proven, abs=0.01)


@pytest.mark.parametrize(
    ("preset", "number"), [("mnist", 1_751_905), ("medium_mnist", 490_352), ("reduced_mnist", 156_336)]
)
def test_presets_have_the_three_sizes(preset: str, number: int) -> None:
    method = build_spec(compose_config([f"experiment=dpdm/{preset}"])).training["method"]
    sizes = {name: method[name] for name in ("width", "multipliers", "blocks", "patch", "embedding")}
    net = EDMSampler((1, 28, 28), 10, 784, "ddim", **sizes)
    assert sum(p.numel() for p in net.parameters()) == number

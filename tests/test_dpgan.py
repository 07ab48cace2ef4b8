"""DPGAN against the paper and the arithmetic of its Algorithm 1.

Golden numbers: parameter counts of section 4.1, Table 4 and appendix C (the authors' networks, instantiated).
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import Generator
from dpgen_bench.method import Context, Scale
from dpgen_bench.nets.dpgan import DiscriminatorNet, GeneratorNet
from dpgen_bench.privacy.accountants.calibration import BudgetExceeded
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.allowance import Observer
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.services import Services
from dpgen_bench.training.signals import Preempted
from methods import dpgan
from methods.dpgan import DPGAN
from tests.defaults import build
from tests.toys import records

MNIST, CELEBA = ((1, 28, 28), 10), ((3, 32, 32), 2)
TINY: dict[str, Any] = dict(batch_size=4, d_d=4, d_g=2, latent_dim=3, sigma=None, steps=1, n_d=1)


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters() if p.requires_grad)


# --- networks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "g", "d"), [(MNIST, 2_272_129, 1_724_289), (CELEBA, 3_160_963, 2_635_649)])
def test_parameter_counts_are_the_papers(data: Any, g: int, d: int) -> None:
    assert parameters(GeneratorNet(*data)) == g
    assert parameters(DiscriminatorNet(*data)) == d


@pytest.mark.parametrize(("width", "millions"), [(64, 0.44), (96, 0.97), (128, 1.72), (192, 3.86)])
def test_discriminator_sizes_of_table_4(width: int, millions: float) -> None:
    """The table prints d_𝒟 = 196 next to 3.86M and the ratio 2.24: both are those of 192 (196 has 4,026,429)."""
    assert round(parameters(DiscriminatorNet(*MNIST, width)) / 1e6, 2) == millions


@pytest.mark.parametrize("data", [MNIST, CELEBA, ((3, 28, 28), 4), ((1, 32, 32), 10)])
@pytest.mark.parametrize("b", [0, 1, 5])
def test_shapes_and_ranges(data: Any, b: int) -> None:
    shape, classes = data
    z, y = torch.randn(b, 6), torch.arange(b) % classes
    x = GeneratorNet(*data, width=4, latent_dim=6)(z, y)
    assert x.shape == (b, *shape)
    assert ((x >= 0) & (x <= 1)).all()
    assert DiscriminatorNet(*data, width=4)(x, y).shape == (b,)


def test_networks_are_conditional_and_rows_do_not_mix() -> None:
    torch.manual_seed(0)
    G, D = GeneratorNet(*MNIST, 4, 6).double(), DiscriminatorNet(*MNIST, 4).double()
    z, y = torch.randn(3, 6, dtype=torch.float64), torch.tensor([1, 7, 7])
    x = G(z, y)
    assert not torch.allclose(x, G(z, (y + 1) % 10))
    assert not torch.allclose(D(x, y), D(x, (y + 1) % 10))
    assert torch.allclose(G(z[1:2], y[1:2])[0], x[1], atol=1e-12)
    assert torch.allclose(D(x[1:2], y[1:2])[0], D(x, y)[1], atol=1e-12)


def test_initialisation_follows_the_global_seed() -> None:
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        nets = GeneratorNet(*MNIST, 4, 6), DiscriminatorNet(*MNIST, 4)
        return torch.cat([p.flatten() for net in nets for p in net.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


@pytest.mark.parametrize("net", [GeneratorNet, DiscriminatorNet])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 28, 32), (3, 64, 64)])
def test_other_image_sizes_are_refused(net: Any, shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="28x28 or 32x32"):
        net(shape, 10)


# --- one fit, seen from outside ---------------------------------------------------------------------------------


class Watcher(Observer):
    """Stores the inputs of each release: the sampled records, 𝒟 before the release, the exact sum."""

    def __init__(self) -> None:
        self.releases: list[tuple[np.ndarray, nn.Module, dict[str, Tensor]]] = []

    def release(
        self, mechanism: Mechanism, index: int, drawn: np.ndarray, exact: dict[str, Tensor], noisy: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        assert index == len(self.releases)
        self.releases.append((drawn, copy.deepcopy(mechanism.bound.module), exact))  # type: ignore[attr-defined]
        return noisy


class Seen(Context):
    """A context that stores the states of the method's loop."""

    def steps(self, total: int, *, phase: str = "train", **stateful: Any) -> Any:
        self.total, self.stateful = total, stateful
        return super().steps(total, phase=phase, **stateful)


def private(
    eps: float = math.inf, n: int = 12, watcher: Watcher | None = None, public_n: int | None = None
) -> PrivateData:
    budget = Budget(eps, 1e-5, "add_remove", "rdp")
    return PrivateData(
        *records(n), 10, Services(Ledger(budget, n), Key.seeded("test"), observer=watcher), public_n=public_n
    )


def fit(method: DPGAN, data: PrivateData, **context: Any) -> tuple[Generator, Seen]:
    ctx = Seen(3, services=data._services, **context)
    return method.fit(data, ctx), ctx


def gradient_loop(D: nn.Module, x: Tensor, y: Tensor, real: bool, C: float) -> dict[str, Tensor]:
    """Σ clip(∇ loss; C) in float64, one row at a time, loss written as in Algorithm 1, line 6."""
    D = copy.deepcopy(D).double()
    total = {name: torch.zeros_like(p) for name, p in D.named_parameters()}
    for row, label in zip(x.double(), y, strict=True):
        probability = torch.sigmoid(D(row[None], label[None])[0])
        loss = -torch.log(probability if real else 1 - probability)
        grads = torch.autograd.grad(loss, list(D.parameters()))
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads))
        for name, g in zip(total, grads, strict=True):
            total[name] += g * min(1.0, C / norm)
    return total


class Vivid(GeneratorNet):
    """Its images depend on their labels as clearly as a trained generator's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with torch.no_grad():
            self.label.weight.mul_(30.0)


@pytest.mark.parametrize("C", [0.05, math.inf])
def test_a_discriminator_step_is_algorithm_1(C: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines 4-8 without noise, n = 12 and B = 5: q = 1/3, round(qn) = 4 fakes, denominator 8 for every draw."""
    monkeypatch.setattr(dpgan, "GeneratorNet", Vivid)
    watcher = Watcher()
    noise_free = {} if math.isinf(C) else {"clip_norm": C, "sigma": 1e-20}
    method = build(DPGAN, **{**TINY, **noise_free, "batch_size": 5, "n_d": 5})
    torch.manual_seed(3)
    G0 = Vivid(*MNIST, width=2, latent_dim=3)
    _, ctx = fit(method, private(watcher=watcher))

    public = torch.Generator().manual_seed(3)
    z = torch.randn(4, 3, generator=public)
    y = torch.randint(10, (4,), generator=public)
    ((drawn, D0, _),) = watcher.releases
    assert 0 < len(drawn) < 12
    assert len(drawn) != 4, "the realised batch must differ from the expected one for the denominator to be tested"
    images, labels = records()
    real = gradient_loop(D0, images[drawn] / 255, labels[drawn], True, C)
    fake = gradient_loop(D0, G0(z, y).detach(), y, False, C)

    D = ctx.stateful["D"]
    expected = {name: (real[name] + fake[name]) / 8 for name in real}
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, parameter in D.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad.double(), expected[name], rtol=1e-4, atol=1e-5 * scale), name
    adam = torch.optim.Adam(D0.parameters(), 2e-4, (0.5, 0.999))
    for before, after in zip(D0.parameters(), D.parameters(), strict=True):
        before.grad = after.grad
    adam.step()
    for before, after in zip(D0.parameters(), D.parameters(), strict=True):
        assert torch.equal(before, after)


def test_a_generator_step_is_algorithm_1() -> None:
    """Lines 10-13, on fresh fakes, through the discriminator that the step before has just updated."""
    method = build(DPGAN, **{**TINY, "batch_size": 5}, lr_g=1e-3)
    torch.manual_seed(3)
    G0 = GeneratorNet(*MNIST, width=2, latent_dim=3)
    _, ctx = fit(method, private())
    G, D = ctx.stateful["G"], ctx.stateful["D"]
    q, b = 1 / 3, 4
    assert (method.sampling_rate(12), method.fake_batch_size(12)) == (q, b)

    public = torch.Generator().manual_seed(3)
    for size in (b, 5, b):  # fakes of the 𝒟 step; B fakes for the accuracy; fakes of the 𝒢 step
        z = torch.randn(size, 3, generator=public)
        y = torch.randint(10, (size,), generator=public)
        if size == 5:
            accuracy = float((torch.sigmoid(D(G0(z, y), y)) < 0.5).float().mean())
    loss = -torch.log(torch.sigmoid(D(G0(z, y), y))).mean()
    grads = torch.autograd.grad(loss, list(G0.parameters()))
    for before, after, grad in zip(G0.parameters(), G.parameters(), grads, strict=True):
        largest = float(grad.abs().max())
        assert torch.allclose(after.grad, grad, rtol=0.0, atol=1e-3 * largest)
        clear = grad.abs() > 0.1 * largest  # Adam's first step is -lr g / (|g| + 1e-8): downhill
        step = -1e-3 * grad / (grad.abs() + 1e-8)
        assert torch.allclose((after - before)[clear], step[clear], rtol=1e-2)
    assert ctx.history[-1]["d_accuracy_on_fakes"] == pytest.approx(accuracy)
    assert ctx.stateful["frequency"].ema == pytest.approx(accuracy)


def test_learning_rates_of_both_networks_are_separate() -> None:
    """Adam's first step moves the coordinate with the largest gradient by the learning rate."""
    torch.manual_seed(3)
    G0, D0 = GeneratorNet(*MNIST, 2, 3), DiscriminatorNet(*MNIST, 4)
    _, ctx = fit(build(DPGAN, **TINY, lr_d=1e-2, lr_g=3e-4), private())

    def moved(before: nn.Module, after: nn.Module) -> float:
        pairs = zip(after.state_dict().values(), before.state_dict().values(), strict=True)
        return max(float((a - b).abs().max()) for a, b in pairs)

    assert moved(D0, ctx.stateful["D"]) == pytest.approx(1e-2, rel=1e-2)
    assert moved(G0, ctx.stateful["G"]) == pytest.approx(3e-4, rel=1e-2)


def test_generator_steps_are_counted_and_the_average_is_logged_for_a_fixed_frequency() -> None:
    _, ctx = fit(build(DPGAN, **{**TINY, "steps": 11, "n_d": 3}, beta=0.5), private())
    rows = ctx.history
    assert [row["step"] for row in rows] == [2, 5, 8]
    average = None
    for row in rows:
        accuracy = row["d_accuracy_on_fakes"]
        average = accuracy if average is None else 0.5 * average + 0.5 * accuracy
        assert row["d_accuracy_ema"] == pytest.approx(average)
        assert row["n_d"] == 3


def test_an_adaptive_frequency_reaches_the_training_loop() -> None:
    """β = 0: grace 2, threshold 1 is always met; 𝒢 steps fall after 𝒟 steps 1, 2 | 4, 6 | 11, 16 | 26."""
    _, ctx = fit(build(DPGAN, **{**TINY, "steps": 30, "n_d": "adaptive"}, beta=0.0, threshold=1.0), private())
    assert [row["step"] + 1 for row in ctx.history] == [1, 2, 4, 6, 11, 16, 26]


# --- privacy ----------------------------------------------------------------------------------------------------


def planned(method: DPGAN, data: PrivateData) -> Mechanism:
    """The mechanism of a fit, whose training is limited to one step."""
    fit(method, data, scale=Scale("test", 1))
    (mechanism,) = data.mechanisms.values()
    return mechanism


def test_t_is_as_large_as_the_budget_allows() -> None:
    """Section 4.1: σ = 1, B = 128, n = 60,000 allow 450K steps at (10, 1e-5) by RDP (9.963 at exactly 450,000)."""
    data = private(10.0, public_n=60_000)
    mechanism = planned(build(DPGAN, **{**TINY, "batch_size": 128, "sigma": 1.0, "steps": None}), data)
    assert 450_000 <= mechanism.times < 456_000
    assert mechanism.std == 1.0
    assert mechanism.event.sampling.rate == 1 / 469


def test_noise_is_sigma_times_c_and_public_rows_are_fixed() -> None:
    mechanism = planned(build(DPGAN, **{**TINY, "sigma": 2.5}, clip_norm=0.3), private())
    assert mechanism.std == pytest.approx(0.75, rel=1e-12)
    assert mechanism.bound.C == 0.3
    assert mechanism.bound.public_rows == 4  # type: ignore[attr-defined]


def test_sigma_is_calibrated_from_steps() -> None:
    data = private(10.0)
    mechanism = planned(build(DPGAN, **TINY), data)
    spent = epsilon(data._services.ledger.events, 1e-5, "add_remove", "rdp")
    assert mechanism.std > 0
    assert 9.9 < spent <= 10.0


def test_an_infinite_budget_without_sigma_is_the_non_private_gan() -> None:
    mechanism = planned(build(DPGAN, **TINY), private())
    assert math.isinf(mechanism.bound.C)
    assert mechanism.std == 0.0


def test_an_infinite_budget_needs_steps() -> None:
    with pytest.raises(ValueError, match="expected `times` with an infinite budget"):
        fit(build(DPGAN, sigma=1.0, steps=None), private())


def test_over_budget_is_refused() -> None:
    with pytest.raises(BudgetExceeded):
        fit(build(DPGAN, **{**TINY, "sigma": 0.5, "steps": 1000}), private(1.0))


def test_empty_draws_are_ordinary() -> None:
    watcher = Watcher()
    generator, _ = fit(
        build(DPGAN, **{**TINY, "batch_size": 1, "steps": 12, "sigma": 1.0}), private(n=4, watcher=watcher)
    )
    sizes = [len(drawn) for drawn, _, _ in watcher.releases]
    assert 0 in sizes
    assert all(torch.isfinite(p).all() for p in generator.state().values())


def test_the_clipped_sum_obeys_its_bound() -> None:
    """Records and fakes together: |exact| <= C (|S| + b)."""
    watcher = Watcher()
    fit(build(DPGAN, **{**TINY, "steps": 4, "sigma": 1.0}, clip_norm=1e-3), private(watcher=watcher))
    assert watcher.releases
    for drawn, _, exact in watcher.releases:
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in exact.values()))
        assert norm <= 1e-3 * (len(drawn) + 4) * (1 + 1e-6)


# --- resuming and restarting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_d", [3, "adaptive"])
@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_fit_ends_like_an_uninterrupted_one(tmp_path: Path, stop: int, n_d: Any) -> None:
    method = build(DPGAN, **{**TINY, "steps": 7, "n_d": n_d, "sigma": 1.0}, beta=0.0, threshold=1.0)
    whole, undisturbed = fit(method, private())
    asked = iter(range(1, 100))
    with pytest.raises(Preempted):
        fit(method, private(), folder=tmp_path, should_stop=lambda: 15 if next(asked) == stop else None)
    resumed, ctx = fit(method, private(), folder=tmp_path)
    for name, weights in whole.state().items():
        assert torch.equal(weights, resumed.state()[name]), name
    assert ctx.stateful["frequency"].state_dict() == undisturbed.stateful["frequency"].state_dict()


def test_restart_takes_states_but_not_the_old_settings(tmp_path: Path) -> None:
    """Section 5: a new run from a non-private checkpoint, with noise, another n_𝒟 and other learning rates."""
    _, parent = fit(build(DPGAN, **{**TINY, "steps": 4, "n_d": 2}), private(), folder=tmp_path)
    watcher = Watcher()
    child = build(DPGAN, **{**TINY, "sigma": 1.0, "n_d": 5}, lr_d=1e-3, lr_g=2e-3, betas=(0.4, 0.9))
    _, ctx = fit(child, private(watcher=watcher), parent=tmp_path / "checkpoints" / "last.pt")
    ((_, D0, _),) = watcher.releases
    for name, weights in parent.stateful["D"].state_dict().items():
        assert torch.equal(weights, D0.state_dict()[name])
    for name, weights in parent.stateful["G"].state_dict().items():
        assert torch.equal(weights, ctx.stateful["G"].state_dict()[name])
    for key, lr, steps in (("opt_d", 1e-3, 5), ("opt_g", 2e-3, 2)):
        state = ctx.stateful[key].state_dict()
        assert state["param_groups"][0]["lr"] == lr
        assert state["param_groups"][0]["betas"] == (0.4, 0.9)
        assert int(state["state"][0]["step"]) == steps  # Adam's moments were taken over
    frequency = ctx.stateful["frequency"]
    assert (frequency.n_d, frequency.d_steps, frequency.ema) == (5, 1, None)


def test_a_saved_generator_samples_the_same(tmp_path: Path) -> None:
    generator, _ = fit(build(DPGAN, **TINY), private())
    generator.save(tmp_path)
    labels = torch.arange(7) % 10
    images = generator.sample(labels, 1)
    assert images.shape == (7, 1, 28, 28)
    assert images.dtype == torch.uint8
    assert torch.equal(Generator.load(tmp_path).sample(labels, 1), images)

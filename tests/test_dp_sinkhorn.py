"""DP-Sinkhorn against Algorithm 1, Definition 4.3 and the arithmetic of its three ways to clip.

Golden numbers: printed counts of appendix D.4 (10.05, 10.04) and of the earlier version (9.93), recomputed.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import Generator, NetGenerator
from dpgen_bench.method import Context, Scale
from dpgen_bench.nets.conv_generator import ConvGenerator
from dpgen_bench.nets.transport import semi_debiased
from dpgen_bench.privacy.accountants.calibration import BudgetExceeded
from dpgen_bench.privacy.bounds import PerRow, Whole
from dpgen_bench.privacy.events import Budget, Event
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.privacy.services import Services
from dpgen_bench.runs.config import build_method, compose_config
from dpgen_bench.testing import ConformanceError, check_method
from dpgen_bench.training.signals import Preempted
from methods import dp_sinkhorn
from methods.dp_sinkhorn import DPSinkhorn
from tests.defaults import build
from tests.toys import Watcher, records

TINY: dict[str, Any] = dict(batch_size=5, p=0.4, latent_dim=3, label_dim=2, width=2, sigma=None, steps=1)
SHAPE = (1, 28, 28)


class Seen(Context):
    """A context that remembers what the method put into its loop."""

    def steps(self, total: int, *, phase: str = "train", **stateful: Any) -> Any:
        self.stateful = stateful
        return super().steps(total, phase=phase, **stateful)


def private(eps: float = math.inf, n: int = 12, watcher: Watcher | None = None, **options: Any) -> PrivateData:
    ledger = Ledger(Budget(eps, 1e-5, "add_remove", "rdp"), n)
    return PrivateData(*records(n), 10, Services(ledger, Key.seeded("test"), observer=watcher, **options))


def fit(method: DPSinkhorn, data: PrivateData, **context: Any) -> tuple[Generator, Seen]:
    ctx = Seen(3, services=data._services, **context)
    return method.fit(data, ctx), ctx


def planned(method: DPSinkhorn, data: PrivateData) -> Mechanism:
    fit(method, data, scale=Scale("test", 1))
    (mechanism,) = data.mechanisms.values()
    return mechanism


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
    """(watcher, gradients that Adam was given in the first step)."""
    given: list[list[Tensor]] = []
    step = torch.optim.Adam.step
    monkeypatch.setattr(
        torch.optim.Adam,
        "step",
        lambda self: (given.append([p.grad.clone() for p in self.param_groups[0]["params"]]), step(self)),
    )
    watcher = Watcher()
    fit(method, private(watcher=watcher, **private_options))
    return watcher, given[0]


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
    watcher, given = grads_of_a_fit(method, monkeypatch)
    ((drawn, exact, noisy),) = watcher.releases
    step = FirstStep(method, drawn)
    close(exact, by_hand(step.G[:5], 0.05))
    noise = (noisy - exact).std()
    assert 0.9 < float(noise) / (2 * 0.05 * 0.7) < 1.1  # of 5 x 784 values known to 1.1%: false alarm below 1e-17
    for a, b in zip(given, step.backprop(torch.cat([noisy, by_hand(step.G[5:], 0.05)])), strict=True):
        close(a, b, 2e-3)


def test_without_privacy_nothing_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    method = build(DPSinkhorn, **TINY)
    watcher, given = grads_of_a_fit(method, monkeypatch)
    ((drawn, exact, noisy),) = watcher.releases
    assert torch.equal(exact, noisy)
    step = FirstStep(method, drawn)
    assert float(step.G.flatten(1).norm(dim=1).min()) > method.clip_norm  # it would have been clipped
    for a, b in zip(given, step.backprop(step.G), strict=True):
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
    watcher, given = grads_of_a_fit(method, monkeypatch)
    ((drawn, exact, noisy),) = watcher.releases
    step = FirstStep(method, drawn)
    slopes = torch.cat([slope.flatten() for slope in step.backprop(step.G)])
    close(exact, whole_clip(slopes, 0.03))
    assert torch.equal(torch.cat([grad.flatten() for grad in given]), noisy)


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


# --- privacy ----------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "per_row": {},
    "whole": {"clip": "whole"},
    "parameter": {"perturb": "parameter"},
    "parameter, biased": {"perturb": "parameter", "p": 0.0, "cost": "l2"},
    "biased": {"p": 0.0},
    "debiased, whole, repeated labels": {"p": 1.0, "clip": "whole", "debias_labels": "repeated"},
    "distances": {"cost": "l1"},
    "annealed by squares": {"lam": 5.0, "exponent": 2.0, "cost": "l2"},
}


FAST = ("per_row", "whole", "parameter")  # the ways to clip; the other variants with `make test-slow`


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=name, marks=() if name in FAST else pytest.mark.slow)
        for name, variant in VARIANTS.items()
    ],
)
def test_variants_conform(variant: dict[str, Any]) -> None:
    check_method(lambda: build(DPSinkhorn, **{**TINY, "steps": 5, **variant}))


@pytest.mark.slow
def test_biggan_conforms() -> None:
    make = partial(build, DPSinkhorn, **{**TINY, "batch_size": 4, "steps": 4}, generator="biggan", cost="l2", lam=5.0)
    check_method(make, image_shape=(3, 32, 32), num_classes=2)


class RowsOfTheBatch(DPSinkhorn):
    """As released: as many generated images as records were drawn."""

    def _mechanism(self, data: PrivateData, ctx: Context, num_parameters: int) -> Any:
        mechanism = super()._mechanism(data, ctx, num_parameters)

        class Follows:
            times, bound = mechanism.times, mechanism.bound

            def __call__(self, fn: Any) -> Tensor:
                return mechanism(lambda images, labels: fn(images, labels)[: len(labels)])

        return Follows()


class DebiasRowsFromInside(DPSinkhorn):
    """Keeps the last batch in a list and lets it choose the rows that leave without noise."""

    def _mechanism(self, data: PrivateData, ctx: Context, num_parameters: int) -> Any:
        mechanism = super()._mechanism(data, ctx, num_parameters)
        self.kept: list[Tensor] = []

        class Keeps:
            times, bound = mechanism.times, mechanism.bound

            def __call__(keeps, fn: Any) -> Tensor:
                def keeping(images: Tensor, labels: Tensor) -> Tensor:
                    self.kept.append(images.nan_to_num(0.0).clamp(0, 1).sum(dim=0))
                    return fn(images, labels)

                return mechanism(keeping)

        return Keeps()

    def _clipped(self, G: Tensor, C: float) -> Tensor:
        return super()._clipped(G + self.kept[-1], C)


class HalfTheNoise(DPSinkhorn):
    """The factor 2 of 2Δσ forgotten where rows may turn by 2Δ: more steps than it can pay for."""

    def _mechanism(self, data: PrivateData, ctx: Context, num_parameters: int) -> Any:
        mechanism = super()._mechanism(data, ctx, num_parameters)
        honest = Mechanism._add_noise
        half = lambda exact, key: exact + 0.5 * (honest(mechanism, exact, key) - exact)  # noqa: E731
        object.__setattr__(mechanism, "_add_noise", half)
        return mechanism


def test_rows_that_follow_the_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="may not depend on the draw"):
        check_method(lambda: build(RowsOfTheBatch, **{**TINY, "steps": 5}))


def test_debias_rows_that_know_the_batch_are_caught() -> None:
    with pytest.raises(ConformanceError, match=r"other than through releases|records outside of its draw"):
        check_method(lambda: build(DebiasRowsFromInside, **{**TINY, "steps": 5}))


def test_half_the_noise_is_caught() -> None:
    with pytest.raises(ConformanceError, match="used '_add_noise' of Mechanism"):
        check_method(lambda: build(HalfTheNoise, **{**TINY, "steps": 5}))


@pytest.mark.parametrize(
    ("change", "bound", "multiplier"),
    [
        ({"clip": "per_row"}, PerRow, 1.5 / math.sqrt(5)),
        ({"clip": "whole"}, Whole, 1.5),
        ({"clip": "whole", "perturb": "parameter"}, Whole, 1.5),
        ({"clip": "per_row", "perturb": "parameter"}, Whole, 1.5),
    ],
)
def test_noise_is_two_delta_sigma_and_rows_count_jointly(change: Any, bound: type, multiplier: float) -> None:
    mechanism = planned(build(DPSinkhorn, **{**TINY, "sigma": 1.5}, clip_norm=0.3, **change), private())
    assert type(mechanism.bound) is bound
    assert mechanism.bound.C == 0.3
    assert mechanism.std == pytest.approx(2 * 0.3 * 1.5, rel=1e-12)
    assert mechanism.event.sampling.rate == 5 / 12
    for relation in ("add_remove", "replace_one"):
        assert mechanism.event.multiplier(relation) == pytest.approx(multiplier, rel=1e-12)  # type: ignore[arg-type]


def event(bound: PerRow | Whole, sigma: float, steps: int) -> Event:
    return Event(Poisson(1 / 1200), bound.sensitivity, 2.0 * bound.C * sigma, steps)


@pytest.mark.parametrize(
    ("settings", "sigma", "steps", "claimed"),
    [
        ({"clip": "per_row"}, 1.5, 160_000, 10.05),  # MNIST, appendix D.4
        ({"clip": "per_row"}, 1.9, 280_000, 10.04),  # Fashion-MNIST
        ({"clip": "whole"}, 1.1, 3_400_000, 9.93),  # earlier version, D.4
        ({"clip": "per_row", "perturb": "parameter"}, 1.1, 3_400_000, 9.93),
    ],
)
def test_claims_are_the_papers_counts(settings: Any, sigma: float, steps: int, claimed: float) -> None:
    rows = settings["clip"] == "per_row" and "perturb" not in settings
    bound = PerRow(C=0.5, shape=(50, 784)) if rows else Whole(C=0.5, shape=(50, 784))
    count = build(DPSinkhorn, **settings).epsilon_claimed([event(bound, sigma, steps)], 1e-5)
    assert count == pytest.approx(claimed, abs=0.005)


def test_there_is_no_claim_for_inherited_releases_and_none_without_noise() -> None:
    one = event(Whole(C=0.5, shape=(1,)), 1.1, 10)
    assert build(DPSinkhorn, clip="whole").epsilon_claimed([one, one], 1e-5) is None
    free = Event(Poisson(0.5), Whole(C=math.inf, shape=(1,)).sensitivity, 0.0, 10)
    assert build(DPSinkhorn).epsilon_claimed([free], 1e-5) == math.inf


def test_budgets() -> None:
    assert planned(build(DPSinkhorn, **{**TINY, "steps": 100}), private(10.0)).std > 0.0
    assert planned(build(DPSinkhorn, **{**TINY, "sigma": 40.0, "steps": None}), private(10.0)).times > 10
    with pytest.raises(BudgetExceeded):
        fit(build(DPSinkhorn, **{**TINY, "sigma": 0.5, "steps": 1000}), private(1.0))
    with pytest.raises(ValueError, match="no limit on T"):
        fit(build(DPSinkhorn, batch_size=5, sigma=1.0, steps=None), private())
    with pytest.raises(ValueError, match=r"n <= N = 12 records"):
        fit(build(DPSinkhorn, batch_size=13), private())


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
def test_a_resumed_fit_ends_where_an_undisturbed_one_does(tmp_path: Path, variant: str) -> None:
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

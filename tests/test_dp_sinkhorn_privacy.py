"""DP-Sinkhorn's privacy: it conforms, planted faults are detected, and its claims are the papers' counts.

Golden numbers: printed counts of appendix D.4 (10.05, 10.04) and of the earlier version (9.93), recomputed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context, Scale
from dpgen_bench.privacy.accountants.calibration import BudgetExceeded
from dpgen_bench.privacy.bounds import PerRow, Whole
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.testing import ConformanceError, check_method
from methods.dp_sinkhorn import DPSinkhorn
from tests.defaults import build
from tests.dp_sinkhorn_toys import TINY, VARIANTS, fit, private


def planned(method: DPSinkhorn, data: PrivateData) -> Mechanism:
    fit(method, data, scale=Scale("test", 1))
    (mechanism,) = data.mechanisms.values()
    return mechanism


FAST = ("per_row", "whole")  # two of the three ways to clip; the other variants with `make test-slow`


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
    """Keeps the last batch in a list, and releases rows without noise that depend on it."""

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
    """The noise is Δσ instead of 2Δσ, although rows may change by 2Δ: the budget does not allow its steps."""

    def _mechanism(self, data: PrivateData, ctx: Context, num_parameters: int) -> Any:
        mechanism = super()._mechanism(data, ctx, num_parameters)
        honest = Mechanism._add_noise
        half = lambda exact, key: exact + 0.5 * (honest(mechanism, exact, key) - exact)  # noqa: E731
        object.__setattr__(mechanism, "_add_noise", half)
        return mechanism


def test_rows_that_follow_the_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="may not depend on the draw"):
        check_method(lambda: build(RowsOfTheBatch, **{**TINY, "steps": 5}))


def test_debias_rows_that_know_the_batch_are_detected() -> None:
    with pytest.raises(ConformanceError, match=r"other than through releases|records outside of its draw"):
        check_method(lambda: build(DebiasRowsFromInside, **{**TINY, "steps": 5}))


def test_half_the_noise_is_detected() -> None:
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
    with pytest.raises(ValueError, match="expected `times` with an infinite budget"):
        fit(build(DPSinkhorn, batch_size=5, sigma=1.0, steps=None), private())
    with pytest.raises(ValueError, match=r"n <= N = 12 records"):
        fit(build(DPSinkhorn, batch_size=13), private())

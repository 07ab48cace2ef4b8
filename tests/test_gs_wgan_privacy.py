"""Tests the proven and the claimed epsilons of GS-WGAN, and that planted faults are detected."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context
from dpgen_bench.nets.wasserstein import CriticTraining
from dpgen_bench.privacy.accountants.calibration import BudgetExceeded
from dpgen_bench.privacy.bounds import PerRow
from dpgen_bench.privacy.events import Budget, Event
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.sampling import OneShard
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state import PrivateState
from dpgen_bench.testing import ConformanceError, check_method
from methods.gs_wgan import GSWGAN
from tests.defaults import build
from tests.gs_wgan_toys import SHAPE, TINY, fit, private
from tests.toys import Watcher


def published(**changes: Any) -> GSWGAN:
    return build(GSWGAN, **{"sigma": 1.07, **changes})


def event(method: GSWGAN) -> Event:
    bound = PerRow(C=method.clip_norm, shape=(method.batch_size, *SHAPE))
    assert method.sigma is not None
    assert method.steps is not None
    std = 2 * method.clip_norm * method.sigma
    return Event(OneShard(method.shards, method.schedule), bound.sensitivity, std, method.steps)


@pytest.mark.parametrize(
    ("changes", "proven"),
    [
        ({}, 610.3),
        ({"sigma": 2.66}, 115.5),
        ({"sigma": 14.02}, 10.0),
        ({"schedule": "public_balanced"}, 379.4),
        ({"schedule": "public_balanced", "sigma": 2.66}, 85.0),
        ({"schedule": "public_balanced", "sigma": 12.65}, 10.0),
    ],
)
def test_proven_epsilons_of_the_published_settings(changes: dict[str, Any], proven: float) -> None:
    """Golden: computed by other code, see docs/accounting.md for the argument."""
    from dpgen_bench.privacy.accountants.proven import epsilon

    assert epsilon([event(published(**changes))], 1e-5, "replace_one", "pld") == pytest.approx(proven, rel=1e-3)


def test_the_papers_count_and_the_conditional_one() -> None:
    method = published()
    claimed = method.epsilon_claimed([event(method)], 1e-5)
    assert claimed == pytest.approx(9.993, abs=2e-3)
    conditional = method.epsilon_conditional([event(method)], 1e-5)
    assert conditional is not None
    assert conditional[0] == pytest.approx(329.4, abs=0.5)
    assert "earlier steps" in conditional[1]


def test_runs_without_noise_or_with_an_inherited_ledger_claim_nothing() -> None:
    method = build(GSWGAN, **TINY)
    without_noise = Event(OneShard(3), PerRow(C=1.0, shape=(4, *SHAPE)).sensitivity, 0.0, 4)
    assert method.epsilon_claimed([without_noise], 1e-5) == math.inf
    assert method.epsilon_conditional([without_noise], 1e-5) is None
    assert method.epsilon_claimed([without_noise, without_noise], 1e-5) is None
    balanced = published(schedule="public_balanced")
    assert balanced.epsilon_conditional([event(balanced)], 1e-5) is None, "no index is hidden"
    assert balanced.epsilon_claimed([event(balanced)], 1e-5) is None
    assert published(clip="whole").epsilon_claimed([event(published())], 1e-5) is None


@pytest.mark.parametrize(("schedule", "sigma"), [("random", 14.02), ("public_balanced", 12.65)])
def test_calibrated_noise_is_the_proven_one(schedule: str, sigma: float) -> None:
    data = PrivateData(
        torch.zeros(0, *SHAPE, dtype=torch.uint8),
        torch.zeros(0, dtype=torch.int64),
        10,
        Services(Ledger(Budget(10.0, 1e-5, "replace_one", "pld"), 60_000), Key.seeded("plan")),
        public_n=60_000,
    )
    release, _ = build(GSWGAN, schedule=schedule)._mechanism(data, Context(0, services=data._services))  # type: ignore[arg-type]
    assert release.std / 2 == pytest.approx(sigma, abs=0.006)


def test_too_little_noise_is_refused_before_any_record_is_seen() -> None:
    watcher = Watcher()
    data = private(eps=10.0, watcher=watcher)
    with pytest.raises(BudgetExceeded):
        fit(build(GSWGAN, **{**TINY, "sigma": 1.0}), data)
    assert not watcher.releases


def test_without_steps_there_are_as_many_as_the_noise_allows() -> None:
    data = private(eps=10.0)
    method = build(GSWGAN, **{**TINY, "steps": None, "sigma": 6.0, "schedule": "public_balanced"})
    release, _ = method._mechanism(data, Context(0, services=data._services))
    assert release.times % 3 == 0, "whole rounds"
    assert release.times > 3


VARIANTS: dict[str, dict[str, Any]] = {  # clipped by rows, a fit conforms where half of its noise is refused, below
    "whole": {"clip": "whole"},
}
MORE: dict[str, dict[str, Any]] = {
    "random": {},
    "balanced": {"schedule": "public_balanced"},
    "resnet": {"generator": "resnet", "latent": "normal", "batch_size": 2, "steps": 3},
    "stacked": {"stack": 2, "warm_start": 2},
    "cold": {"warm_start": 0, "n_critic": 2},
}


@pytest.mark.parametrize(
    "variant",
    [
        *(pytest.param(variant, id=name) for name, variant in VARIANTS.items()),
        *(pytest.param(variant, id=name, marks=pytest.mark.slow) for name, variant in MORE.items()),
    ],
)
def test_variants_conform(variant: dict[str, Any]) -> None:
    check_method(lambda: build(GSWGAN, **{**TINY, **variant}), records=20, budget=Budget(10.0, 1e-5, "replace_one"))


# Planted faults


def check(**settings: Any) -> None:
    check_method(lambda: build(GSWGAN, **{**TINY, **settings}), records=20)


def test_a_stale_index_that_always_draws_one_shard_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneShard, "shard", lambda self, key, index: 0)
    with pytest.raises(ConformanceError, match="one shard was drawn 14 times in 14 releases"):
        check(steps=14)


def test_a_stale_index_in_a_balanced_schedule_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneShard, "shard", lambda self, key, index: 0)
    with pytest.raises(ConformanceError, match="draws none more than 2 times"):
        check(schedule="public_balanced")


def test_one_critic_for_all_shards_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws are correct, but each release uses the state of shard 0, which depends on all records."""
    wrap, bind = PrivateState.wrap, PrivateState.bind
    monkeypatch.setattr(PrivateState, "wrap", lambda self, fn, shard, index, key: wrap(self, fn, 0, index, key))
    monkeypatch.setattr(PrivateState, "bind", lambda self, visits, key: bind(self, [0] * len(visits), key))
    with pytest.raises(ConformanceError, match="although the changed record was not in its draw"):
        check(schedule="public_balanced")


def test_shards_that_overlap_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(self: OneShard, ids: np.ndarray, key: Key, index: int) -> np.ndarray:
        shards = self.shard_of(ids)
        mine = np.flatnonzero(shards == self.shard(key, index))
        others = np.flatnonzero(shards != self.shard(key, index))
        return np.sort(np.concatenate([mine, others[:1]]))

    monkeypatch.setattr(OneShard, "draw", draw)
    with pytest.raises(ConformanceError, match=r"shards must not overlap|do not fit"):
        check()


def test_a_moving_partition_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards depend on the number of records: removing a record moves others to another shard."""
    monkeypatch.setattr(OneShard, "shard_of", lambda self, ids: np.arange(len(ids)) * self.shards // max(len(ids), 1))
    with pytest.raises(ConformanceError, match=r"the private state of shard 1 in release 1 of .* differs"):
        check()


def test_noise_without_the_factor_2_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    add_noise = Mechanism._add_noise

    def half(self: Mechanism, exact: Tensor, key: Key) -> Tensor:
        return (exact + add_noise(self, exact, key)) / 2

    monkeypatch.setattr(Mechanism, "_add_noise", half)
    with pytest.raises(ConformanceError, match="of the standard deviation in the ledger"):
        check()


@pytest.mark.slow
def test_a_method_that_asks_for_half_its_noise_is_refused() -> None:
    class Half(GSWGAN):
        def _mechanism(self, data: PrivateData, ctx: Context) -> Any:
            ask = data.mechanism
            data.mechanism = lambda *args, std, **kwargs: ask(*args, std=std / 2, **kwargs)  # type: ignore[method-assign]
            return super()._mechanism(data, ctx)

    sigma = 1.1  # of B = 4 rows, drawn once: ε is 10 at 1.0
    check(sigma=sigma, steps=3, schedule="public_balanced")
    with pytest.raises(BudgetExceeded):
        check_method(
            lambda: build(Half, **{**TINY, "sigma": sigma, "steps": 3, "schedule": "public_balanced"}), records=20
        )


def test_warm_starts_that_mix_shards_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_start = CriticTraining.warm_start

    def mixed(self: CriticTraining, *args: Any) -> dict[str, Tensor]:
        tensors = warm_start(self, *args)
        return {name: value.mean(0, keepdim=True).expand_as(value).clone() for name, value in tensors.items()}

    monkeypatch.setattr(CriticTraining, "warm_start", mixed)
    with pytest.raises(ConformanceError, match=r"the private state of shard 2 in release 0 of .* differs"):
        check(stack=3)


def test_warm_starts_from_public_randomness_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are computed or read from a cache must not change any later public draw."""
    warm_start = CriticTraining.warm_start

    def unseeded(self: CriticTraining, *args: Any) -> dict[str, Tensor]:
        torch.rand(3)
        return {name: value + 0.1 * torch.rand_like(value) for name, value in warm_start(self, *args).items()}

    monkeypatch.setattr(CriticTraining, "warm_start", unseeded)
    with pytest.raises(ValueError, match="drew from a global random generator"):
        check()


@pytest.mark.slow
def test_warm_starts_that_draw_from_the_context_are_detected() -> None:
    class Draws(GSWGAN):
        def _mechanism(self, data: PrivateData, ctx: Context) -> Any:
            ask = data.private_state

            def draw(*args: Any, start: Any, **kwargs: Any) -> PrivateState:
                def drawing(records: Any, rng: Any) -> dict[str, Tensor]:
                    torch.rand(3, generator=ctx.generator)
                    return start(records, rng)

                return ask(*args, start=drawing, **kwargs)

            data.private_state = draw  # type: ignore[method-assign]
            return super()._mechanism(data, ctx)

    with pytest.raises(ConformanceError, match="private state read from a cache led to other releases"):
        check_method(lambda: build(Draws, **TINY), records=20)

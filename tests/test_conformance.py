"""The conformance suite passes honest methods and fails every planted cheat for the expected reason."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dpgen_bench.cli import main
from dpgen_bench.privacy import bounds
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Invalidated
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.testing import ConformanceError, check_method
from dpgen_bench.utils.paths import CONF
from tests import toys

SMALL = {"image_shape": (1, 8, 8), "num_classes": 3}


@pytest.mark.parametrize("make", [toys.MeanImage, toys.GradientMethod])
def test_honest_methods_conform(make):
    lines = []
    check_method(make, **SMALL, echo=lines.append)
    assert sum("replay" in line for line in lines) == 14  # four other data sets, two changed records, one added


@pytest.mark.parametrize(
    ("cheat", "reason"),
    [
        (toys.MeanSmuggledOut, "other than through releases"),
        (toys.PrivateLog, "the log differs"),
        (toys.CoupledRows, "its declared sensitivity"),
        (toys.StaleDraw, "not in its draw"),
        (toys.QuietNoise, "of the standard deviation in the ledger"),
        (toys.MoreReleases, "were approved|was changed after approval"),
        (toys.CountsRecords, "releases were made instead of|extra release|control flow"),
        (toys.RandomnessLeak, "other than through releases"),
        (toys.RaisesTheBudget, "over the budget of 10"),
    ],
)
def test_cheating_methods_are_detected(cheat, reason):
    with pytest.raises(ConformanceError, match=reason):
        check_method(cheat, **SMALL)


@pytest.mark.parametrize("cheat", [toys.AsksByRaising, toys.RaisesAtTheEnd])
def test_a_function_that_raises_ends_the_fit_even_if_the_method_catches_it(cheat):
    with pytest.raises(Invalidated, match="an answer without noise"):
        check_method(cheat, **SMALL)


def test_an_unclipped_gradient_is_detected(monkeypatch):
    clipped = bounds.clipped_gradient_sum
    monkeypatch.setattr(
        bounds, "clipped_gradient_sum", lambda m, fn, rows, C, **kw: clipped(m, fn, rows, math.inf, **kw)
    )
    with pytest.raises(ConformanceError, match="its declared sensitivity"):
        check_method(toys.GradientMethod, **SMALL)


def test_unclipped_rows_are_detected(monkeypatch):
    monkeypatch.setattr(bounds, "clip_rows", lambda rows, C: rows)
    with pytest.raises(ConformanceError, match=r"its declared sensitivity"):
        check_method(toys.MeanImage, **SMALL)


def test_one_draw_used_for_every_release_is_detected(monkeypatch):
    fixed_key = Key.seeded("the same coins each time")
    fresh = Poisson.draw
    monkeypatch.setattr(Poisson, "draw", lambda self, ids, key, index: fresh(self, ids, fixed_key, index))
    with pytest.raises(ConformanceError, match="drawn twice in a row"):
        check_method(toys.MeanImage, **SMALL)


def test_a_wrong_sampling_rate_is_detected(monkeypatch):
    monkeypatch.setattr(
        Poisson, "draw", lambda self, ids, key, index: np.flatnonzero(key.generator("coins").random(len(ids)) < 0.9)
    )
    with pytest.raises(ConformanceError, match="do not fit the rate"):
        check_method(toys.MeanImage, **SMALL)


@pytest.mark.parametrize("factor", [0.0, 0.9, 1.1])
def test_wrongly_scaled_noise_is_detected(monkeypatch, factor):
    drawn = Key.normal
    monkeypatch.setattr(Key, "normal", lambda self, shape, std, device="cpu": drawn(self, shape, std, device) * factor)
    with pytest.raises(ConformanceError, match="of the standard deviation in the ledger"):
        check_method(lambda: toys.MeanImage(steps=60), **SMALL)


def test_noise_used_twice_is_detected(monkeypatch):
    monkeypatch.setattr(
        Key,
        "normal",
        lambda self, shape, std, device="cpu": std * torch.randn(shape, generator=torch.Generator().manual_seed(1)),
    )
    with pytest.raises(ConformanceError, match="correlated"):
        check_method(toys.MeanImage, **SMALL)


def test_draws_that_change_for_others_when_a_record_is_removed_are_detected(monkeypatch):
    monkeypatch.setattr(
        Poisson,
        "draw",
        lambda self, ids, key, index: np.flatnonzero(key.generator("coins").random(len(ids)) < self.rate),
    )
    with pytest.raises(ConformanceError, match="differs by"):
        check_method(toys.MeanImage, **SMALL)


@pytest.mark.parametrize("method", ["dp_merf", "dpgan"])
def test_methods_of_the_bench_conform(method, capsys):
    assert main(["check", f"method={method}"]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["replace_one", "add_remove"])
@pytest.mark.parametrize("method", sorted(path.stem for path in (CONF / "method").glob("*.yaml")))
def test_methods_of_the_bench_conform_thoroughly_on_more_records(method, relation, capsys):
    command = ["check", f"method={method}", f"privacy.relation={relation}", "--thorough", "--records=96"]
    assert main(command) == 0, capsys.readouterr().out

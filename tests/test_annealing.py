"""Temperatures that an accelerator computes without being waited for are those of the host."""

from __future__ import annotations

import pytest
import torch

from dpgen_bench.nets import transport
from dpgen_bench.nets.annealing import Annealing, temperatures
from dpgen_bench.nets.transport import Transport
from tests.test_transport import assert_same, clouds, every_cost


@every_cost
@pytest.mark.parametrize("within", [81.0, 300.0])
def test_temperatures_that_the_device_computes_give_the_same_solutions(cost, within, monkeypatch):
    """Also with steps for diameters that are far larger, and for several problems in one call."""
    t = Transport(cost, lam=0.05)
    problems = [clouds(kind, n, m, 3, seed) for seed, (kind, n, m) in enumerate([("small", 4, 9), ("far", 7, 2)])]
    problems.append((problems[0][0], problems[0][0]))
    expected = t.solve(*problems)
    monkeypatch.setattr(transport, "MAY_READ", frozenset())
    monkeypatch.setattr(transport, "diameters", lambda *_: pytest.fail("extents were read"))
    for got, known in zip(t.solve(*problems, within=within), expected, strict=True):
        assert_same((got.value, *got.in_both), (known.value, *known.in_both), 1e-11)
    for got, known in zip((t.solve(each, within=within)[0] for each in problems), expected, strict=True):
        assert_same((got.value, *got.in_both), (known.value, *known.in_both), 1e-11)


@pytest.mark.parametrize("exponent", [1.0, 2.0])
@pytest.mark.parametrize("scaling", [0.5, 0.9])
def test_as_many_temperatures_on_the_device(exponent, scaling):
    extents = [0.01, 0.04, 0.7, 5.3, 79.0, 80.0]
    annealing = Annealing.on_device(torch.tensor(extents, dtype=torch.float64), 80.0, 0.05, exponent, scaling)
    for k, extent in enumerate(extents):
        expected = temperatures(extent, 0.05, exponent, scaling)
        delay = int(annealing.delays[k])
        own = annealing.temperature[:, k].tolist()
        assert own[delay:] == pytest.approx(expected, rel=1e-12)
        assert own[: delay + 1] == pytest.approx([expected[0]] * (delay + 1), rel=1e-12)

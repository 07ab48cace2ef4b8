"""Tests the epsilon of releases by clients against closed forms, enumeration, other bounds and golden numbers."""

from __future__ import annotations

import itertools
import json
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.stats import norm

from dpgen_bench.privacy.accountants.calibration import calibrate_std, calibrate_times
from dpgen_bench.privacy.accountants.claims import _wor_log_moment, opacus_rdp, wor_rdp
from dpgen_bench.privacy.accountants.composition import Composition
from dpgen_bench.privacy.accountants.grid import grid_epsilon
from dpgen_bench.privacy.accountants.participations import (
    Participations,
    capped_law,
    mixture_delta,
    mixture_epsilon,
    participation_rdp,
    participations_rdp,
    shift_law,
)
from dpgen_bench.privacy.accountants.proven import NotCovered, _fixed_rdp, epsilon
from dpgen_bench.privacy.accountants.table import epsilon_table
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.ledger import Entry
from dpgen_bench.privacy.sampling import (
    CLIENT_SAMPLINGS,
    SAMPLINGS,
    FixedSize,
    Full,
    OneClient,
    OneShard,
    Poisson,
    Sampling,
    sampling_from_dict,
)

DELTA = 1e-5
UNIT = Sensitivity(1.0, 1.0)
SUM = Sensitivity(1.0, 2.0)  # a sum of one clipped row per client


def unit(sampling: Sampling, multiplier: float, times: int) -> Event:
    return Event(sampling, UNIT, multiplier, times)


def eps(sampling: Sampling, multiplier: float, times: int, name: str = "pld") -> float:
    return epsilon([unit(sampling, multiplier, times)], DELTA, "replace_one", name)


@pytest.mark.parametrize("sampling", [OneClient(7), OneClient(9, "public_balanced", 3, seed=2), FixedSize(3, 40)])
def test_client_samplings_can_be_read_back_from_a_ledger_and_are_not_for_records(sampling) -> None:
    entry = Entry("m", {"kind": "Whole", "C": 1.0}, unit(sampling, 2.0, 5))
    assert Entry.from_dict(json.loads(json.dumps(entry.to_dict()))) == entry
    assert sampling_from_dict(sampling.to_dict()) == sampling
    assert type(sampling) in CLIENT_SAMPLINGS
    assert type(sampling) not in SAMPLINGS


# --- one client in each round -----------------------------------------------------------------------------------------


def gauss_delta(epsilon: float, mu: float) -> float:
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) if mu else 0.0


@pytest.mark.parametrize(("rate", "times", "cap"), [(0.2, 20, 3), (0.2, 20, 20), (0.9, 9, 4), (0.01, 50, 1)])
def test_the_capped_law_is_the_clipped_binomial(rate, times, cap) -> None:
    participations, probabilities, beyond = capped_law(rate, times, cap, 1e-14)
    exact = np.zeros(cap + 1)
    for h in range(times + 1):
        exact[min(h, cap)] += math.comb(times, h) * rate**h * (1 - rate) ** (times - h)
    assert beyond <= 1e-14
    assert dict(zip(participations, probabilities, strict=True)) == pytest.approx(
        {h: p for h, p in enumerate(exact) if h in participations}, abs=1e-12
    )
    assert exact[[h for h in range(cap + 1) if h not in participations]].sum() < 1e-12


@pytest.mark.parametrize("eps_", [0.2, 1.0, 2.5])
def test_three_rounds_of_two_clients_with_one_answer_each_by_enumeration(eps_) -> None:
    """T = 3, N = 2, k_max = 1: enumerates all sequences of turns, with the density of their releases on a grid.

    Turns are published. The client in question changes its answer by 1, for every earlier answer.
    """
    multiplier = 0.8
    grid = np.linspace(-8.0, 9.0, 20_001)
    without, with_ = norm.pdf(grid, 0.0, multiplier), norm.pdf(grid, 1.0, multiplier)
    delta, answered = 0.0, 0
    for turns in itertools.product((0, 1), repeat=3):
        answers = min(turns.count(1), 1)
        answered += answers
        if answers:
            delta += np.maximum(with_ - math.exp(eps_) * without, 0.0).sum() * (grid[1] - grid[0]) / 8
    assert answered == 7  # of eight sequences
    law = shift_law(0.0, [Participations(0.5, multiplier, 3, 1)], 1e-14)
    assert math.exp(mixture_delta(eps_, *law)) == pytest.approx(delta, rel=1e-5)
    with mpmath.workdps(40):
        mu, e = mpmath.mpf(1) / mpmath.mpf(multiplier), mpmath.mpf(eps_)
        exact = mpmath.mpf(7) / 8 * (mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu))
        assert epsilon([unit(OneClient(2, "random", 1), multiplier, 3)], float(exact), "replace_one", "pld") == (
            pytest.approx(eps_, rel=1e-8)
        )


@pytest.mark.parametrize("order", [1.01, 1.5, 4.0, 30.0])
@pytest.mark.parametrize(("rate", "multiplier", "times", "cap"), [(0.1, 1.0, 40, 3), (0.02, 50.0, 90, 5)])
def test_rdp_of_capped_participations_against_the_plain_sum(rate, multiplier, times, cap, order) -> None:
    with mpmath.workdps(40):
        x, q = mpmath.mpf(order) * (mpmath.mpf(order) - 1) / (2 * mpmath.mpf(multiplier) ** 2), mpmath.mpf(rate)
        mean = sum(
            mpmath.binomial(times, h) * q**h * (1 - q) ** (times - h) * mpmath.exp(min(h, cap) * x)
            for h in range(times + 1)
        )
        exact = float(mpmath.log(mean) / (mpmath.mpf(order) - 1))
    assert participations_rdp(Participations(rate, multiplier, times, cap), order) == pytest.approx(exact, rel=1e-9)
    assert participations_rdp(Participations(rate, multiplier, times, cap), order) <= cap * order / (2 * multiplier**2)


@pytest.mark.parametrize("name", ["rdp", "pld"])
def test_without_a_reachable_limit_clients_are_shards(name) -> None:
    for cap in (None, 40, 99):
        assert eps(OneClient(10, "random", cap), 1.0, 40, name) == eps(OneShard(10), 1.0, 40, name)
    nearly = eps(OneClient(10, "random", 39), 1.0, 40, name)  # 40 participations have probability 1e-40
    assert nearly == pytest.approx(eps(OneShard(10), 1.0, 40, name), rel=1e-6)


@pytest.mark.parametrize("name", ["rdp", "pld"])
def test_one_answer_is_at_most_one_gaussian(name) -> None:
    plain = eps(Full(), 0.7, 1, name)
    rare, often, always = (eps(OneClient(10, "random", 1), 0.7, times, name) for times in (5, 50, 5000))
    assert rare < often < always <= plain * (1 + 1e-9)
    assert always == pytest.approx(plain, rel=1e-6)
    assert eps(OneClient(1, "random", 1), 0.7, 50, name) == plain


@pytest.mark.parametrize("name", ["rdp", "prv", "pld"])
@pytest.mark.parametrize(("times", "cap", "participations"), [(6, None, 1), (7, None, 2), (40, 3, 3), (7, 3, 2)])
def test_a_balanced_schedule_is_a_number_of_unsampled_answers(name, times, cap, participations) -> None:
    assert eps(OneClient(6, "public_balanced", cap), 3.0, times, name) == eps(Full(), 3.0, participations, name)


@given(st.integers(2, 60), st.floats(0.3, 9.0), st.integers(2, 300), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_more_answers_more_rounds_and_fewer_clients_cost_more(clients, multiplier, times, cap) -> None:
    for name in ("pld", "rdp"):
        here, slack = eps(OneClient(clients, "random", cap), multiplier, times, name), 1 + 1e-8
        assert eps(OneClient(clients, "random", cap + 1), multiplier, times, name) * slack >= here
        assert eps(OneClient(clients, "random", cap), multiplier, times + 5, name) * slack >= here
        assert eps(OneClient(clients + 3, "random", cap), multiplier, times, name) <= here * slack
        assert here <= eps(Full(), multiplier, min(cap, times), name) * slack
    assert eps(OneClient(clients, "random", cap), multiplier, times, "pld") <= here * slack  # rdp is looser


def test_limits_do_not_pool() -> None:
    """Two mechanisms with a limit of 1 each cost less than one with a limit of 2 and twice the rounds.

    In both cases a client answers at most twice.
    """
    one = unit(OneClient(3, "random", 1), 1.0, 4)
    both = epsilon([one, one], DELTA, "replace_one", "pld")
    law = {h: math.comb(2, h) * (1 - (2 / 3) ** 4) ** h * (2 / 3) ** (4 * (2 - h)) for h in range(3)}
    assert sum(p * gauss_delta(both, math.sqrt(h)) for h, p in law.items()) == pytest.approx(DELTA, rel=1e-6)
    assert both < eps(OneClient(3, "random", 2), 1.0, 8)
    composed = Composition.of([one, one], "replace_one")
    assert composed is not None
    assert composed.clients == (Participations(1 / 3, 1.0, 4, 1), Participations(1 / 3, 1.0, 4, 1))
    free = unit(OneClient(3), 1.0, 4)
    assert Composition.of([free, free], "replace_one") == Composition.of([unit(OneClient(3), 1.0, 8)], "replace_one")


# --- draws of a fixed size --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "of", "multiplier"), [(10, 3400, 0.5), (10, 100, 1.0), (9, 10, 1.0), (30, 100, 4.0)])
def test_fixed_size_rdp_is_at_most_the_general_bound(size, of, multiplier) -> None:
    """1808.00087: Theorem 9 (`claims`) for any mechanism; dp-accounting's Theorem 27 is sharper from order 3 on."""
    for order in range(2, 40):
        general = _wor_log_moment(size / of, multiplier, order) / (order - 1)
        assert _fixed_rdp(size, of, multiplier, float(order)) <= general * (1 + 1e-9)
    second = min(_wor_log_moment(size / of, multiplier, 2), participation_rdp(size / of, multiplier, 2.0))
    assert _fixed_rdp(size, of, multiplier, 2.0) == pytest.approx(second, rel=1e-9)


@pytest.mark.parametrize(("of", "std", "within"), [(3400, 1.0, 0.85), (100, 2.0, 0.85), (100, 6.0, 0.7)])
def test_fixed_size_epsilon_takes_the_replace_one_sensitivity(of, std, within) -> None:
    """Epsilon is below that of Theorem 9, which uses an older conversion, by at most 15%, or 30% with much noise."""
    size = 10
    found = epsilon([Event(FixedSize(size, of), SUM, std, 200)], DELTA, "replace_one", "rdp")
    general = wor_rdp(size / of, std / SUM.replace_one, 200, DELTA)
    assert within * general < found <= general


@pytest.mark.parametrize(("size", "of"), [(9, 10), (1, 2), (1, 10)])
@pytest.mark.parametrize("order", [1.5, 2.0, 6.0])
def test_fixed_size_rdp_is_no_less_than_the_truth(size, of, order) -> None:
    """Others hold nothing, the client +1 or -1. At 9 of 10 the add/remove multiplier would be below the truth."""
    q, std, x = size / of, 0.9, np.linspace(-12.0, 12.0, 48_001)
    p, r = ((1 - q) * norm.pdf(x, 0, std) + q * norm.pdf(x, mean, std) for mean in (1.0, -1.0))
    truth = math.log((p**order * r ** (1 - order)).sum() * (x[1] - x[0])) / (order - 1)
    assert _fixed_rdp(size, of, std / 2.0, order) >= truth
    if q == 0.9:
        assert _fixed_rdp(size, of, std, order) < truth


def test_everybody_in_every_round_is_no_sampling() -> None:
    for name in ("rdp", "prv", "pld"):
        assert eps(FixedSize(5, 5), 3.0, 4, name) == eps(Full(), 3.0, 4, name)


def test_fixed_size_is_covered_under_replace_one_alone() -> None:
    event = Event(FixedSize(10, 100), SUM, 1.0, 5)
    for name in ("rdp", "prv", "pld"):
        with pytest.raises(NotCovered, match="adding or removing a client would change"):
            epsilon([event], DELTA, "add_remove", name)
    with pytest.raises(NotCovered, match="no draws of a fixed size"):
        epsilon([event], DELTA, "replace_one", "prv")
    with pytest.raises(NotCovered, match="random number of participations, as OneShard and OneClient"):
        eps(OneClient(10, "random", 3), 1.0, 50, "prv")
    assert epsilon([Event(FixedSize(10, 100), SUM, 0.0, 5)], DELTA, "add_remove", "pld") == math.inf


# --- published participation ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Optimal order is the smallest")
def test_fed_avg_gans_published_noise() -> None:
    """Std 0.01 C on a sum of clipped clients, 10 of 3400 in each of 1000 rounds; the unit is the client.

    Add/remove: 5.4 million by Opacus' RDP with its own orders, 65 thousand with participation published. Replace-one
    moves the sum by 2C. dp-accounting's grid of 1e-3 would take gigabytes.
    """
    event = Event(Poisson(10 / 3400), SUM, 0.01, 1000)
    assert opacus_rdp(10 / 3400, 0.01, 1000, DELTA) == pytest.approx(5.436e6, rel=1e-3)
    assert epsilon([event], DELTA, "add_remove", "pld") == pytest.approx(64_763.5, rel=1e-5)
    assert epsilon([event], DELTA, "replace_one", "pld") == pytest.approx(259_528.0, rel=1e-5)
    fixed = Event(FixedSize(10, 3400), SUM, 0.01, 1000)
    assert epsilon([fixed], DELTA, "replace_one", "pld") == pytest.approx(259_528.0, rel=1e-5)
    first = sum(  # delta's first term, which at this epsilon is nearly all of it
        stats.binom.pmf(h, 1000, 10 / 3400) * norm.cdf(50 * h**0.5 - 64_763.5 / (100 * h**0.5)) for h in range(1, 60)
    )
    assert first == pytest.approx(DELTA, rel=0.01)
    with pytest.raises(NotCovered, match="even its grid of width"):
        grid_epsilon(Composition(0.0, ((10 / 3400, 0.01, 1000),)), DELTA, "add_remove", 1e-3)


def test_each_relation_moves_a_published_participation_by_its_own_sensitivity() -> None:
    """Participations in Poisson draws together with those of a client, against the mixture over both, written out."""
    for sensitivity, relation, moved in [
        (SUM, "add_remove", 1.0),
        (SUM, "replace_one", 2.0),
        (UNIT, "replace_one", 1.0),
    ]:
        events = [Event(Poisson(0.3), sensitivity, 2.0, 4), unit(OneClient(5, "random", 2), 1.5, 6)]
        found = epsilon(events, DELTA, relation, "pld")
        total = 0.0
        for h, k in itertools.product(range(5), range(7)):
            weight = stats.binom.pmf(h, 4, 0.3) * stats.binom.pmf(k, 6, 0.2)
            total += weight * gauss_delta(found, math.sqrt(h * (moved / 2.0) ** 2 + min(k, 2) / 1.5**2))
        assert total == pytest.approx(DELTA, rel=1e-6)


def test_epsilon_is_the_smaller_of_grid_and_published_participation() -> None:
    """PerRow at a high rate: both relations have one sensitivity, which dp-accounting's replace-one cannot use."""
    row = Event(Poisson(0.95), UNIT, 2.0, 10)
    composed = Composition.of([row], "replace_one")
    assert composed is not None
    published = mixture_epsilon(0.0, [Participations(0.95, 2.0, 10, 10)], DELTA)
    grid = grid_epsilon(composed, DELTA, "replace_one", 1e-3)
    assert epsilon([row], DELTA, "replace_one", "pld") == published < 0.6 * grid
    rare = Event(Poisson(0.01), SUM, 1.0, 100)
    assert epsilon([rare], DELTA, "add_remove", "pld") < 0.5 * mixture_epsilon(
        0.0, [Participations(0.01, 1.0, 100, 100)], DELTA
    )


def test_compositions_can_be_read_back_from_json_and_are_computed_in_a_process(tmp_path, monkeypatch) -> None:
    events = [
        *(Event(Poisson(0.01), sensitivity, 2.0, 30) for sensitivity in (SUM, UNIT)),
        unit(FixedSize(2, 50), 3.0, 9),
        unit(OneClient(9, "random", 4), 2.0, 50),
    ]
    composed = Composition.of(events, "replace_one")
    assert composed is not None
    assert composed.exposed == ((0.01, 1.0, 30), (0.01, 2.0, 30))
    assert Composition.from_dict(json.loads(json.dumps(composed.to_dict()))) == composed
    old = Composition.of(events[:1], "replace_one")
    assert old is not None
    assert old.to_dict() == {"gaussian": 0.0, "poisson": ((0.01, 2.0, 30),)}  # as caches have known it
    table = epsilon_table(events, DELTA, cache=tmp_path / "epsilon.json")["replace_one"]
    assert table["pld"] == epsilon(events, DELTA, "replace_one", "pld")
    assert "add/remove only" in str(table["rdp"])


# --- calibration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "times", "name"),
    [
        (OneClient(3400, "random", 20), 30_000, "pld"),
        (OneClient(50, "random", 4), 300, "rdp"),
        (OneClient(3400, "public_balanced"), 30_000, "pld"),
        (FixedSize(10, 100), 50, "rdp"),
        (FixedSize(10, 100), 50, "pld"),
    ],
)
def test_calibrated_noise_meets_the_budget_and_one_percent_less_exceeds_it(sampling, times, name) -> None:
    budget = Budget(10.0, DELTA, "replace_one", name)
    std = calibrate_std(budget, [], sampling, SUM, times)
    assert epsilon([Event(sampling, SUM, std, times)], DELTA, "replace_one", name) <= 10.0
    assert epsilon([Event(sampling, SUM, 0.99 * std, times)], DELTA, "replace_one", name) > 10.0
    most = calibrate_times(budget, [], sampling, SUM, 3.0 if sampling == FixedSize(10, 100) else 1.5)
    period = 3400 if sampling == OneClient(3400, "public_balanced") else 1
    assert most % period == 0
    event = Event(sampling, SUM, 3.0 if sampling == FixedSize(10, 100) else 1.5, most)
    assert epsilon([event], DELTA, "replace_one", name) <= 10.0
    assert epsilon([Event(sampling, SUM, event.std, most + 1)], DELTA, "replace_one", name) > 10.0

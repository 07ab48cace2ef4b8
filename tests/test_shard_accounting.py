"""Epsilon of draws of one shard, against closed forms, a simulation, other accountants and golden numbers.

The golden epsilons of GS-WGAN's published setting (K = 1000, B = 32, sigma 1.07 per row, T = 20,000, delta 1e-5) and of
its corrected settings, under replace-one, were computed by other code. autodp 0.2.3.1 gives the paper's own count.
"""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.stats import norm

from dpgen_bench.privacy.accountants.claims import memoryless, memoryless_event, wor_rdp
from dpgen_bench.privacy.accountants.participations import (
    capped_law,
    log_delta_gaussian,
    mixture_delta,
    mixture_epsilon,
    shard_rdp,
    shift_law,
)
from dpgen_bench.privacy.accountants.proven import Composition, NotCovered, epsilon
from dpgen_bench.privacy.events import RELATIONS, Event, Sensitivity
from dpgen_bench.privacy.sampling import Full, OneShard, Poisson, Sampling
from tests.shard_cases import DELTA, UNIT, unit

T = 20_000


def gs_wgan(sigma: float = 1.07, schedule: str = "random", rows: int = 32) -> Event:
    """T steps of `rows` images, each clipped to C = 1 and noised with std 2 C sigma."""
    joint = 2.0 * math.sqrt(rows)
    return Event(OneShard(1000, schedule), Sensitivity(joint, joint), 2.0 * sigma, T)  # type: ignore[arg-type]


# --- the closed form --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eps", "mu"), [(0.0, 1.0), (10.0, 0.5), (0.5, 1e-3), (1e-6, 1e-6), (3.0, 40.0), (1e5, 440.0), (1e5, 455.0)]
)
def test_delta_of_a_gaussian_against_arithmetic_of_300_digits(eps, mu) -> None:
    with mpmath.workdps(300):
        a, b, exp = mpmath.mpf(eps) / mu, mpmath.mpf(mu) / 2, mpmath.e ** mpmath.mpf(eps)
        exact = mpmath.log(mpmath.ncdf(b - a) - exp * mpmath.ncdf(-b - a))
    assert float(log_delta_gaussian(eps, np.array([mu]))[0]) == pytest.approx(float(exact), rel=1e-9, abs=1e-9)


@given(st.integers(2, 50), st.integers(1, 5000), st.sampled_from([1e-14, 1e-6, 1e-2]))
def test_the_law_of_participations_omits_at_most_the_stated_probability(shards, times, tail) -> None:
    participations, probabilities, beyond = capped_law(1 / shards, times, times, tail)
    assert beyond <= tail
    assert probabilities.sum() + beyond == pytest.approx(1.0, abs=1e-11)
    assert participations[-1] in (0, times) or stats.binom.sf(participations[-1] - 1, times, 1 / shards) > tail
    if tail == 1e-14:
        assert (probabilities @ participations) == pytest.approx(times / shards, rel=1e-9)


def brute_delta(eps: float, mechanisms: list[tuple[int, float, int]], gaussian: float = 0.0) -> float:
    """delta of the mixture, as a sum over every number of participations."""
    total = 0.0
    for participations in np.ndindex(*(times + 1 for *_, times in mechanisms)):
        weight, square = 1.0, gaussian
        for h, (shards, multiplier, times) in zip(participations, mechanisms, strict=True):
            weight *= math.comb(times, h) * (1 / shards) ** h * (1 - 1 / shards) ** (times - h)
            square += h / multiplier**2
        mu = math.sqrt(square)
        if mu > 0:
            total += weight * (norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu))
    return total


@pytest.mark.parametrize(
    ("mechanisms", "gaussian"),
    [([(5, 1.0, 20)], 0.0), ([(5, 1.0, 20)], 0.5), ([(3, 2.0, 9), (7, 0.8, 12)], 0.3), ([(9, 0.2, 4)], 0.0)],
)
@pytest.mark.parametrize("delta", [1e-2, 1e-6])
def test_epsilon_is_where_the_sum_over_participations_equals_delta(mechanisms, gaussian, delta) -> None:
    value = mixture_epsilon(gaussian, mechanisms, delta)
    assert brute_delta(value, mechanisms, gaussian) == pytest.approx(delta, rel=1e-6)
    events = [unit(*mechanism) for mechanism in mechanisms]
    events += [Event(Full(), UNIT, gaussian**-0.5, 1)] if gaussian else []
    assert epsilon(events, delta, "replace_one", "pld") == value


@pytest.mark.parametrize("eps", [0.5, 1.5, 3.0])
def test_delta_against_a_simulation_of_the_steps(eps) -> None:
    """delta = E (1 - e^(eps - loss))_+, for T steps with a record that changes each release of its shard the most.

    The tolerance is six standard errors: by Bernstein's inequality, the false-alarm probability is below 1e-7.
    """
    shards, multiplier, times, runs = 5, 1.2, 12, 200_000
    rng = np.random.default_rng(0)
    loss = np.zeros(runs)
    for _ in range(times):
        drawn = rng.integers(shards, size=runs) == 3
        release = drawn + multiplier * rng.standard_normal(runs)
        loss += np.where(drawn, (release - 0.5) / multiplier**2, 0.0)  # log N(1, m²) / N(0, m²)
    terms = np.maximum(-np.expm1(eps - loss), 0.0)
    exact = math.exp(mixture_delta(eps, *shift_law(0.0, [(shards, multiplier, times)], 1e-14)))
    assert abs(terms.mean() - exact) < 6.0 * terms.std() / math.sqrt(runs)
    assert exact > 50.0 / runs  # otherwise the simulation has too few events


@given(st.integers(2, 100), st.floats(0.2, 20.0), st.integers(1, 300), st.sampled_from([1e-2, 1e-5]))
@settings(max_examples=60)
def test_less_noise_more_draws_and_fewer_shards_cost_more(shards, multiplier, times, delta) -> None:
    def eps(*mechanism: float) -> float:
        return mixture_epsilon(0.0, [mechanism], delta)  # type: ignore[list-item]

    here, slack = eps(shards, multiplier, times), 1e-8
    assert eps(shards, 0.9 * multiplier, times) >= here * (1 - slack)
    assert eps(shards, multiplier, times + 1) >= here * (1 - slack)
    assert eps(shards + 1, multiplier, times) <= here * (1 + slack)
    # No more than if every draw contained the record.
    assert here <= get_epsilon_gaussian(multiplier / math.sqrt(times), delta) * (1 + slack) + slack
    assert mixture_epsilon(0.0, [(shards, multiplier, times)], delta / 2) >= here * (1 - slack)


def test_a_strict_increase_somewhere() -> None:
    chains = [
        [unit(shards, 1.0, 100) for shards in (200, 50, 10, 2, 1)],
        [unit(10, multiplier, 100) for multiplier in (9.0, 3.0, 1.0, 0.3)],
        [unit(10, 1.0, times) for times in (1, 2, 10, 100)],
    ]
    for chain in chains:
        values = [epsilon([event], DELTA, "add_remove", "pld") for event in chain]
        assert values == sorted(set(values))


@pytest.mark.parametrize("name", ["rdp", "prv", "pld"])
@pytest.mark.parametrize("schedule", ["random", "public_balanced"])
def test_one_shard_of_one_is_no_sampling(name, schedule) -> None:
    plain = epsilon([Event(Full(), UNIT, 3.0, 7)], DELTA, "replace_one", name)
    assert epsilon([unit(1, 3.0, 7, schedule)], DELTA, "replace_one", name) == plain


def test_the_mixture_itself_of_one_shard_is_the_gaussian() -> None:
    for multiplier in (0.1, 1.0, 30.0):
        exact = get_epsilon_gaussian(multiplier, DELTA)
        value = mixture_epsilon(0.0, [(1, 2.0 * multiplier, 4)], DELTA)
        assert exact <= value * (1 + 1e-12) + 1e-12
        assert value == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize("name", ["rdp", "prv", "pld"])
@pytest.mark.parametrize(("times", "participations"), [(1, 1), (6, 1), (7, 2), (12, 2), (13, 3)])
def test_a_balanced_schedule_is_so_many_unsampled_releases(name, times, participations) -> None:
    plain = epsilon([Event(Full(), UNIT, 3.0, participations)], DELTA, "replace_one", name)
    assert epsilon([unit(6, 3.0, times, "public_balanced")], DELTA, "replace_one", name) == plain


def test_each_balanced_mechanism_begins_a_round_of_its_own() -> None:
    half = unit(6, 3.0, 3, "public_balanced")
    assert Composition.of([half, half], "replace_one") == Composition(2 / 9, ())
    assert Composition.of([unit(6, 3.0, 6, "public_balanced")], "replace_one") == Composition(1 / 9, ())


def test_random_mechanisms_of_one_kind_are_one() -> None:
    parts = [unit(6, 3.0, 10), unit(4, 3.0, 1), unit(6, 3.0, 20)]
    assert Composition.of(parts, "add_remove") == Composition(0.0, (), ((4, 3.0, 1), (6, 3.0, 30)))


def test_each_relation_counts_its_own_sensitivity() -> None:
    event = Event(OneShard(10), Sensitivity(1.0, 2.0), 3.0, 50)
    removed, replaced = (epsilon([event], DELTA, relation, "pld") for relation in RELATIONS)
    assert removed == epsilon([unit(10, 3.0, 50)], DELTA, "replace_one", "pld")
    assert replaced == epsilon([unit(10, 1.5, 50)], DELTA, "add_remove", "pld")


def test_delta_alone_may_cover_a_rare_participation() -> None:
    """One draw of a million shards contains the record with probability 1e-6, a tenth of delta, for every noise."""
    assert mixture_epsilon(0.0, [(10**6, 0.01, 1)], DELTA) == 0.0
    # 20 draws contain it with probability 2e-5: at most half of the losses may exceed epsilon.
    assert mixture_epsilon(0.0, [(10**6, 0.01, 20)], DELTA) == pytest.approx(5000, rel=2e-3)  # mean loss 1 / (2 m²)


@pytest.mark.parametrize("relation", RELATIONS)
def test_no_draws_cost_nothing_and_no_noise_everything(relation) -> None:
    for name in ("rdp", "prv", "pld"):
        assert epsilon([unit(10, 1.0, 0)], DELTA, relation, name) == 0.0
        assert epsilon([unit(10, 0.0, 1)], DELTA, relation, name) == math.inf


# --- accountants ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shards", "multiplier"), [(1000, 0.19), (10, 1.0), (3, 8.0)])
@pytest.mark.parametrize("order", [1.01, 1.7, 2.0, 5.5])
def test_rdp_of_a_release_with_its_index_known_against_quadrature(shards, multiplier, order) -> None:
    x = np.linspace(-12 * multiplier, order + 12 * multiplier, 200_001)
    moment = np.exp(order * norm.logpdf(x, 1, multiplier) + (1 - order) * norm.logpdf(x, 0, multiplier))
    integral = moment.sum() * (x[1] - x[0])
    exact = math.log((1 - 1 / shards) + integral / shards) / (order - 1)
    assert shard_rdp(shards, multiplier, order) == pytest.approx(exact, rel=1e-6)


def test_rdp_is_stable_from_tiny_to_huge_exponents() -> None:
    assert shard_rdp(1000, 1e6, 1.005) == pytest.approx(1.005 / 2e12 / 1000, rel=1e-6)
    below, above = (shard_rdp(1000, 1.0, order) for order in (8.26208, 8.26210))  # exponents 29.9999 and 30.0001
    assert below == pytest.approx(above, rel=1e-4)
    assert below < above
    assert shard_rdp(1000, 0.01, 1e6) == pytest.approx(1e6 / 2e-4, rel=1e-6)  # the unsampled curve


@given(st.integers(2, 1000), st.floats(0.2, 20.0), st.integers(1, 2000))
@settings(max_examples=30, deadline=None)
def test_rdp_is_never_tighter_than_the_exact_mixture(shards, multiplier, times) -> None:
    event = unit(shards, multiplier, times)
    rdp, pld = (epsilon([event], DELTA, "add_remove", name) for name in ("rdp", "pld"))
    assert rdp >= pld * (1 - 1e-9)


def test_prv_refuses_a_random_number_of_participations() -> None:
    with pytest.raises(NotCovered, match=r"prv .*random number of participations"):
        epsilon([unit(10, 1.0, 5)], DELTA, "add_remove", "prv")


def test_poisson_draws_with_shards_are_covered_by_rdp_alone() -> None:
    shards, poisson = unit(10, 1.0, 50), Event(Poisson(0.01), UNIT, 1.0, 100)
    both = epsilon([shards, poisson], DELTA, "add_remove", "rdp")
    assert both > max(epsilon([event], DELTA, "add_remove", "rdp") for event in (shards, poisson))
    with pytest.raises(NotCovered, match="compose with unsampled releases alone"):
        epsilon([shards, poisson], DELTA, "add_remove", "pld")
    with pytest.raises(NotCovered, match="add/remove only"):
        epsilon([shards, poisson], DELTA, "replace_one", "rdp")


def test_too_many_numbers_of_participations_are_refused() -> None:
    wide = [unit(2 + number, 100.0, 10**6) for number in range(3)]
    with pytest.raises(NotCovered, match="3 sharded mechanisms have over 200,000 likely numbers"):
        epsilon(wide, DELTA, "add_remove", "pld")


def test_a_sampling_without_proof_is_refused() -> None:
    class Mine(Sampling):
        rate = 0.001

        def draw(self, ids, key, index):
            return ids

    with pytest.raises(TypeError, match="got Mine"):
        epsilon([Event(Mine(), UNIT, 1.0, 1)], DELTA, "add_remove", "pld")


# --- golden numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sigma", "schedule", "proven"),
    [
        (1.07, "random", 610.3),
        (2.66, "random", 115.5),
        (14.02, "random", 10.0),
        (1.07, "public_balanced", 379.4),
        (2.66, "public_balanced", 85.0),
        (12.65, "public_balanced", 10.0),
    ],
)
def test_gs_wgan_proven(sigma, schedule, proven) -> None:
    event = gs_wgan(sigma, schedule)
    assert event.multiplier("replace_one") == pytest.approx(sigma / math.sqrt(32))
    value = epsilon([event], DELTA, "replace_one", "pld")
    assert f"{value:.1f}" == f"{proven:.1f}"
    assert epsilon([event], DELTA, "add_remove", "pld") == value  # a row is any function of the batch
    assert value < epsilon([event], DELTA, "replace_one", "rdp") < 1.12 * value


def test_gs_wgan_if_steps_were_memoryless() -> None:
    assert memoryless(gs_wgan(), DELTA) == pytest.approx(329.4, abs=0.05)


@pytest.mark.slow
def test_gs_wgan_if_batches_were_28() -> None:
    assert memoryless(gs_wgan(rows=28), DELTA) == pytest.approx(264, abs=0.5)


def test_the_conditional_presets_noise_is_epsilon_10_by_rdp() -> None:
    """sigma 2.66 was calibrated by RDP; PLD gives epsilon 8.44."""
    event = memoryless_event(gs_wgan(2.66))
    assert epsilon([event], DELTA, "add_remove", "rdp") == pytest.approx(9.94, abs=0.01)
    assert epsilon([memoryless_event(gs_wgan(2.65))], DELTA, "add_remove", "rdp") > 10.0


def test_a_public_schedule_hides_no_index() -> None:
    for sampling in (OneShard(10, "public_balanced"), Full()):
        with pytest.raises(ValueError, match="without a secret index"):
            memoryless(Event(sampling, UNIT, 1.0, 5), DELTA)


@pytest.mark.parametrize(
    ("sigma", "compositions", "autodp"),
    [(1.07, 640_000, 9.992624), (1.07, 20_000, 1.572231), (1.07 / math.sqrt(32), 20_000, 296565.04)],
)
def test_gs_wgans_own_count(sigma, compositions, autodp) -> None:
    assert wor_rdp(1 / 1000, sigma, compositions, DELTA) == pytest.approx(autodp, rel=1e-6)


def test_the_own_count_without_sampling_is_the_gaussians() -> None:
    expected = min(order / 18.0 + math.log(1e5) / (order - 1) for order in range(2, 100))
    assert wor_rdp(1.0, 3.0, 1, DELTA) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="sampling rate"):
        wor_rdp(0.0, 1.0, 1, DELTA)


def test_state_that_remembers_indices_defeats_amplification_but_not_the_mixture() -> None:
    """The counterexample of docs/accounting.md, by quadrature: a and b state whether the record takes part; s = 1.

    Without the record the releases are (0, a), with it (a, a or b): at most 1 apart, given the indices.
    """
    rate, multiplier, eps = 1 / 1000, 0.47, 1.0
    grid = np.linspace(-4.0, 5.0, 901)
    density = [norm.pdf(grid, mean, multiplier) for mean in (0, 1)]

    def law(means) -> np.ndarray:
        total = np.zeros((len(grid), len(grid)))
        for a in (0, 1):
            for b in (0, 1):
                first, second = means(a, b)
                weight = (rate if a else 1 - rate) * (rate if b else 1 - rate)
                total += weight * np.outer(density[first], density[second])
        return total

    excess = law(lambda a, b: (a, max(a, b))) - math.exp(eps) * law(lambda a, b: (0, a))
    delta = float(np.maximum(excess, 0.0).sum() * (grid[1] - grid[0]) ** 2)
    fresh = privacy_loss_distribution.from_gaussian_mechanism(
        multiplier, sampling_prob=rate, value_discretization_interval=1e-4
    )
    composed = fresh.self_compose(2).get_delta_for_epsilon(eps)
    mixture = math.exp(mixture_delta(eps, *shift_law(0.0, [(1000, multiplier, 2)], 1e-14)))
    assert (delta, composed, mixture) == (
        pytest.approx(9.8e-5, rel=1e-2),
        pytest.approx(6.2e-6, rel=1e-2),
        pytest.approx(1.1e-3, rel=1e-2),
    )
    assert composed < delta <= mixture

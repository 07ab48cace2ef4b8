"""Attacks on mechanisms of known epsilon: what they certify is below it, and comes close with many trials."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest
from scipy import stats

from dpgen_bench.audit.count_test import certify_count, exact_epsilon, exceedances
from dpgen_bench.audit.distinguisher import Attacked, certify, choose_threshold, rejections
from dpgen_bench.audit.laws import GaussianLaw, Movement, NotAudited, draw_ratios, law_of
from dpgen_bench.privacy.accountants.calibration import calibrate_std
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.sampling import FixedSize, Full, OneClient, OneShard, Poisson

SENSITIVITY = Sensitivity(1.0, 2.0)
DELTA = 1e-5


def attacked(sampling, std, times=1, first=0.0, second=1.0, name="release"):
    return Attacked(name, Event(sampling, SENSITIVITY, std, times), Movement(first, second))


def ratios(sampling, std, times, world, trials=20_000, seed=0, first=0.0, second=1.0):
    event = Event(sampling, SENSITIVITY, std, times)
    return draw_ratios([law_of(event, Movement(first, second))], world, trials, np.random.default_rng(seed))


@pytest.mark.parametrize(("std", "proven"), [(3.7306, 1.0), (1.0812, 4.0), (0.4999, 10.0)])
def test_certified_approaches_proven_with_the_number_of_trials(std, proven):
    """One release on all records; the shares of epsilon are those of a computation for the exact trade-off curve."""
    few = [certify([attacked(Full(), std)], DELTA, "add_remove", trials=1000, seed=seed) for seed in range(20)]
    many = [certify([attacked(Full(), std)], DELTA, "add_remove", trials=100_000, seed=seed) for seed in range(20)]
    model_free = [np.median([each.epsilon for each in group]) for group in (few, many)]
    expected = {1.0: (0.03, 0.45), 4.0: (0.9, 2.2), 10.0: (2.8, 5.0)}[proven]
    assert model_free[0] > expected[0]
    assert expected[1] < model_free[1] < proven
    assert np.median([each.gdp for each in few]) > 0.6 * proven
    assert np.median([each.gdp for each in many]) > 0.95 * proven


def test_releases_on_all_records_compose_as_one_gaussian():
    """T releases with movement d and noise s are one with d sqrt(T) / s."""
    together = [attacked(Full(), 4.0, times=9), attacked(OneShard(3, "public_balanced"), 2.0, times=5, name="shards")]
    certificate = certify(together, DELTA, "add_remove", trials=200_000)
    mu = math.sqrt(9 / 16 + 2 / 4)
    assert certificate.gdp is not None
    exact = epsilon([Event(Full(), SENSITIVITY, 1.0 / mu, 1)], DELTA, "add_remove", "pld")
    assert 0.95 * exact < certificate.gdp < exact * 1.02
    assert certificate.epsilon < exact


@pytest.mark.parametrize(
    ("sampling", "std", "times", "movement"),
    [
        (Poisson(0.02), 1.0, 1000, (0.0, 1.0)),
        (Poisson(1 / 469), 1.0, 5_000, (0.0, 1.0)),
        (Poisson(0.1), 1.5, 50, (-1.0, 1.0)),
        (OneShard(20), 1.0, 60, (0.0, 2.0)),
        (FixedSize(2, 10), 2.0, 20, (-1.0, 1.0)),
        (OneClient(20), 1.0, 60, (0.0, 2.0)),
    ],
)
def test_hidden_participation_certifies_less_than_is_proven(sampling, std, times, movement):
    """The proof is that of Poisson draws: for one unit, hidden participation has the same law for these samplings."""
    relation = "add_remove" if movement[0] == 0.0 else "replace_one"
    sensitivity = Sensitivity(max(map(abs, movement)), movement[1] - movement[0])
    event = Event(Poisson(sampling.rate), sensitivity, std, times)
    proven = epsilon([event], DELTA, relation, "pld")
    certificate = certify([attacked(sampling, std, times, *movement)], DELTA, relation, trials=20_000)
    assert 0.2 * proven < certificate.epsilon < proven
    assert certificate.gdp is None


def test_counts_in_bins_lose_almost_nothing_of_the_likelihood_ratio():
    """Compared with trials that draw the noise and the participation of every release."""
    rate, std, times, trials = 0.05, 0.7, 200, 4000
    rng = np.random.default_rng(5)
    for world in (0, 1):
        noise = rng.standard_normal((trials, times))
        if world:
            noise += (rng.random((trials, times)) < rate) / std
        step = np.log1p(rate * np.expm1(noise / std - 0.5 / std**2))
        binned = ratios(Poisson(rate), std, times, world, trials)
        direct = step.sum(axis=1)
        assert stats.ks_2samp(binned, direct).pvalue > 1e-4
        assert np.mean(binned) == pytest.approx(np.mean(direct), abs=5 * np.std(direct) / math.sqrt(trials))


@pytest.mark.parametrize("sampling", [Full(), Poisson(0.3)])
def test_ratios_are_likelihood_ratios(sampling):
    """E_0 exp(ratio) = 1, and the laws of both worlds differ by exp(ratio): E_1 f = E_0 f exp(ratio)."""
    first = ratios(sampling, 2.0, 3, 0, 200_000)
    second = ratios(sampling, 2.0, 3, 1, 200_000, seed=1)
    assert np.mean(np.exp(first)) == pytest.approx(1.0, abs=0.02)
    assert np.mean(np.exp(first) * (first > 0.5)) == pytest.approx(np.mean(second > 0.5), abs=0.02)


def test_a_release_that_does_not_move_certifies_nothing():
    certificate = certify([attacked(Full(), 1.0, second=0.0)], DELTA, "add_remove", trials=1000)
    assert (certificate.epsilon, certificate.gdp) == (0.0, 0.0)


def test_a_release_without_noise_certifies_all_that_the_trials_allow():
    certificate = certify([attacked(Full(), 0.0)], DELTA, "add_remove", trials=1000)
    assert certificate.gdp == math.inf
    # No error in 1,000 trials of each world: both rates of error are at most 1 - 0.025^(1/1000).
    assert certificate.epsilon == pytest.approx(math.log((0.025**0.001 - DELTA) / (1 - 0.025**0.001)))
    assert certificate.to_dict()["gdp"] == "inf"


def test_the_limit_of_answers_is_not_audited():
    with pytest.raises(NotAudited, match="max_answers"):
        law_of(Event(OneClient(10, max_answers=2), SENSITIVITY, 1.0, 30), Movement.of(1.0))


def test_a_public_schedule_with_a_limit_is_a_number_of_certain_releases():
    law = law_of(Event(OneClient(10, "public_balanced", max_answers=2), SENSITIVITY, 1.0, 100), Movement.of(1.0))
    assert law == GaussianLaw(math.sqrt(2))


def test_the_threshold_is_fixed_without_the_trials_that_are_counted():
    """Rejections of fresh trials exceed the true rate of a certified epsilon no more often than 5 %."""
    wrong = 0
    for seed in range(200):
        certificate = certify([attacked(Full(), 3.7306)], DELTA, "add_remove", trials=2000, seed=seed)
        wrong += certificate.epsilon > 1.0
    assert stats.binomtest(wrong, 200, 0.05, alternative="greater").pvalue > 1e-4


def test_both_directions_are_tried():
    """The second world has a rare value that the first never has, or the other way round."""
    rng = np.random.default_rng(0)
    rare = np.where(rng.random(5000) < 0.02, 9.0, 0.0) + 0.1 * rng.standard_normal(5000)
    plain = 0.1 * rng.standard_normal(5000)
    threshold, rejects_first = choose_threshold(plain, rare, DELTA, 0.95)
    assert rejects_first
    assert rejections(plain, rare, threshold, rejects_first)[1] > 50
    threshold, rejects_first = choose_threshold(-rare, plain, DELTA, 0.95)
    assert not rejects_first


def test_the_record_of_an_attack_is_json():
    record = certify([attacked(Poisson(0.1), 1.0, 5)], DELTA, "add_remove", trials=500).to_dict()
    assert record["level"] == "c"
    assert record["mechanisms"][0]["moved"] == {"first": 0.0, "second": 1.0}
    assert record["mechanisms"][0]["sampling"]["kind"] == "Poisson"


@pytest.mark.parametrize("wrong", [{"trials": 1}, {"confidence": 1.0}, {"delta": 0.0}])
def test_arguments_are_checked(wrong):
    arguments = {"delta": DELTA, "trials": 100, **wrong}
    with pytest.raises(ValueError, match="expected"):
        certify([attacked(Full(), 1.0)], arguments.pop("delta"), "add_remove", **arguments)


GS_WGAN = attacked(OneShard(1000), 2.14, 20_000, 0.0, 2.0 * math.sqrt(32))


def test_the_exact_epsilon_of_a_count_is_that_of_a_closed_form():
    """25 or more of GS-WGAN's releases above 5.4 noise std: 225.8, by a computation for the reference pages."""
    rates = exceedances(GS_WGAN, 5.4)
    assert exact_epsilon(GS_WGAN.event, rates, DELTA) == pytest.approx(225.8, abs=0.1)
    assert stats.binom.sf(24, 20_000, rates[1]) == pytest.approx(1.03e-5, rel=0.01)


def test_a_count_certifies_less_than_its_exact_epsilon_and_agrees_with_the_likelihood_ratio():
    count = certify_count(GS_WGAN, 4.5, DELTA, "replace_one", trials=2_000_000)
    assert count.false == 0
    assert 12.0 < count.epsilon < count.exact < epsilon([GS_WGAN.event], DELTA, "replace_one", "pld") * 40
    assert count.strongest == count.exact
    assert count.second_trials == 1_000_000
    small = attacked(Poisson(0.02), 1.0, 1000)
    by_count = certify_count(small, 2.0, DELTA, "add_remove", trials=20_000)
    by_ratio = certify([small], DELTA, "add_remove", trials=20_000)
    proven = epsilon([small.event], DELTA, "add_remove", "pld")
    assert 0.2 * proven < by_count.epsilon <= 1.2 * by_ratio.epsilon
    assert by_count.exact < proven


def test_a_count_needs_a_hidden_participation():
    with pytest.raises(NotAudited, match="leave out `above`"):
        exceedances(attacked(Full(), 1.0), 3.0)


SIGMA = {1: 3.7306, 4: 1.0812, 10: 0.4999}  # exact, for one release at delta 1e-5
GDP_TRIALS = {
    1.1: (7531, 633, 136),  # an off-by-one class
    math.sqrt(2): (440, 37, 8),  # features of norm sqrt 2, votes for two bins
    2.0: (76, 7, 2),  # replace-one taken for add/remove, a clip of each of four tensors
    math.sqrt(32): (4, 2, 2),  # 32 joint rows
    2 * math.sqrt(32): (2, 2, 2),  # 32 joint rows that turn around
}


@pytest.mark.parametrize("factor", GDP_TRIALS, ids=lambda factor: f"{factor:.2f}")
def test_noise_that_is_too_small_is_refuted_at_the_stated_trials(factor):
    """At these numbers of trials, a fault is refuted about every second time (computed for the reference pages)."""
    for claim, trials in zip(SIGMA, GDP_TRIALS[factor], strict=True):
        mechanism = [attacked(Full(), SIGMA[claim] / factor)]
        found = sum(certify(mechanism, DELTA, "add_remove", trials=trials, seed=seed).gdp > claim for seed in range(40))
        assert found >= 10


@pytest.mark.parametrize(
    ("factor", "claim", "trials"),
    [(2.0, 1, 10_000), (math.sqrt(32), 1, 100), (math.sqrt(32), 4, 300), (2 * math.sqrt(32), 1, 30)],
)
def test_the_model_free_bound_refutes_large_faults_at_the_stated_trials(factor, claim, trials):
    mechanism = [attacked(Full(), SIGMA[claim] / factor)]
    found = sum(certify(mechanism, DELTA, "add_remove", trials=trials, seed=seed).epsilon > claim for seed in range(40))
    assert found >= 10


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("claim", [0.2, 1.0, 10.0, math.inf])
def test_honest_mechanisms_are_accused_no_more_often_than_the_confidence_allows(claim, relation, record_property):
    """20 repetitions of six honest settings whose movement is exactly the declared one, which is the worst case."""
    accused = total = 0
    for number, sampling in enumerate(
        (Full(), Full(), Poisson(0.05), Poisson(0.3), OneShard(4, "public_balanced"), OneShard(10))
    ):
        times = 1 if number == 0 else 12
        budget = Budget(claim, DELTA, relation)
        std = calibrate_std(budget, [], sampling, SENSITIVITY, times)
        distance = 1.0 if relation == "add_remove" else 2.0
        first = 0.0 if relation == "add_remove" or isinstance(sampling, OneShard) else -1.0
        mechanism = [attacked(sampling, std, times, first, first + distance)]
        for seed in range(20):
            own = zlib.crc32(f"{claim} {relation} {number} {seed}".encode())  # so that all audits are independent
            result = certify(mechanism, DELTA, relation, trials=1000, seed=own)
            accused += result.strongest > claim
            total += 1
    record_property("accused", f"{accused} of {total}")  # in the file of --junitxml, for docs/audit.md
    assert stats.binomtest(accused, total, 0.05, alternative="greater").pvalue > 1e-3

"""Calibration returns the least noise, or the most releases, that the budget's own accountant accepts."""

from __future__ import annotations

import math

import pytest
from dp_accounting import get_sigma_gaussian
from hypothesis import given
from hypothesis import strategies as st

from dpgen_bench.privacy.accountants.calibration import BudgetExceeded, calibrate_std, calibrate_times, round_up
from dpgen_bench.privacy.accountants.proven import NotCovered, epsilon
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.sampling import Full, OneShard, Poisson

RECORD = Sensitivity(1.0, 2.0)
ROWS = Sensitivity(2.0 * 32**0.5, 2.0 * 32**0.5)


def spend(budget: Budget, *events: Event) -> float:
    return epsilon(events, budget.delta, budget.relation, budget.accountant)


@given(st.floats(1e-9, 1e9))
def test_rounding_goes_up_and_by_little(value) -> None:
    rounded = round_up(value)
    assert value <= rounded <= value * (1.0 + 1.1e-4)
    assert round_up(rounded) == rounded


@pytest.mark.parametrize(
    ("value", "rounded"), [(0.4999, 0.4999), (0.499941, 0.49995), (1.000001, 1.0001), (99999.1, 1e5)]
)
def test_rounding_examples(value, rounded) -> None:
    assert round_up(value) == rounded


@pytest.mark.parametrize(("eps", "multiplier"), [(10.0, "0.4999"), (1.0, "3.7306"), (0.2, "16.30")])
def test_dp_merf_noise_is_exact(eps, multiplier) -> None:
    """One release of DP-MERF's mean embedding: the exact Gaussian, in terms of the replace-one sensitivity.

    The authors' 5.0 for epsilon 1 would be 0.7255 (test_accountants).
    """
    std = calibrate_std(Budget(eps, 1e-5, "replace_one", "pld"), [], Full(), RECORD, times=1)
    calibrated, exact = std / RECORD.replace_one, get_sigma_gaussian(eps, 1e-5)
    assert f"{exact:.{len(multiplier.split('.')[1])}f}" == multiplier
    assert exact <= calibrated <= exact * (1.0 + 1.1e-4)


CASES = [
    (Budget(10.0, 1e-5, "add_remove", "rdp"), [], Poisson(1 / 469), RECORD, 1000),
    (Budget(1.0, 1e-5, "add_remove", "rdp"), [], Full(), ROWS, 7),
    (Budget(10.0, 1e-5, "add_remove", "pld"), [], Poisson(1 / 469), RECORD, 1000),
    (Budget(0.5, 1e-6, "add_remove", "pld"), [], Poisson(0.05), RECORD, 1000),
    (Budget(3.0, 1e-5, "replace_one", "pld"), [], Poisson(0.05), RECORD, 200),
    (Budget(3.0, 1e-5, "replace_one", "pld"), [Event(Full(), RECORD, 4.0, 1)], Poisson(0.05), RECORD, 200),
    (Budget(2.0, 1e-5, "add_remove", "pld"), [Event(Full(), RECORD, 4.0, 1)], Full(), ROWS, 3),
    (Budget(1.0, 1e-5, "add_remove", "prv"), [], Poisson(0.05), RECORD, 100),
    (Budget(10.0, 1e-5, "replace_one", "pld"), [], OneShard(1000), ROWS, 20_000),
    (Budget(1.0, 1e-5, "replace_one", "pld"), [], OneShard(1000, "public_balanced"), ROWS, 20_000),
    (Budget(0.3, 1e-5, "add_remove", "pld"), [], OneShard(1000), ROWS, 1),  # a participation has probability 1e-3
    (Budget(200.0, 1e-5, "replace_one", "pld"), [Event(OneShard(9), RECORD, 1.0, 10)], OneShard(7), RECORD, 50),
    (Budget(2.0, 1e-5, "add_remove", "rdp"), [Event(Poisson(0.05), RECORD, 2.0, 10)], OneShard(10), ROWS, 30),
    (Budget(2.0, 1e-5, "replace_one", "prv"), [], OneShard(10, "public_balanced"), ROWS, 30),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_std_is_the_least_that_fits(case) -> None:
    budget, spent, sampling, sensitivity, times = CASES[case]
    std = calibrate_std(budget, spent, sampling, sensitivity, times)
    assert spend(budget, *spent, Event(sampling, sensitivity, std, times)) <= budget.epsilon
    assert spend(budget, *spent, Event(sampling, sensitivity, std * (1 - 1e-3), times)) > budget.epsilon
    assert round_up(std) == std


@pytest.mark.parametrize(
    ("budget", "spent", "sampling", "std"),
    [
        (Budget(10.0, 1e-5, "add_remove", "rdp"), [], Poisson(1 / 469), 1.0),
        (Budget(1.0, 1e-5, "add_remove", "pld"), [], Poisson(1 / 469), 1.0),
        (Budget(3.0, 1e-5, "replace_one", "pld"), [], Poisson(0.05), 4.0),
        (Budget(10.0, 1e-5, "add_remove", "pld"), [], Full(), 3.0),
        (Budget(10.0, 1e-5, "add_remove", "pld"), [Event(Full(), RECORD, 1.0, 1)], Poisson(0.05), 1.0),
        (Budget(2.0, 1e-5, "add_remove", "rdp"), [Event(Full(), RECORD, 4.0, 1)], Full(), 9.0),
        (Budget(10.0, 1e-5, "replace_one", "pld"), [], OneShard(1000), 5.0),
        (Budget(2.0, 1e-5, "replace_one", "pld"), [Event(OneShard(5), RECORD, 9.0, 2)], OneShard(20), 6.0),
        (Budget(2.0, 1e-5, "add_remove", "rdp"), [Event(Poisson(0.05), RECORD, 2.0, 10)], OneShard(10), 4.0),
        (Budget(10.0, 1e-5, "replace_one", "pld"), [], OneShard(1000, "public_balanced"), 5.0),
        (Budget(0.5, 1e-5, "replace_one", "pld"), [], OneShard(7, "public_balanced"), 500.0),
        (Budget(2.0, 1e-5, "replace_one", "prv"), [], OneShard(3, "public_balanced"), 30.0),
    ],
)
def test_times_is_the_most_that_fits(budget, spent, sampling, std) -> None:
    times = calibrate_times(budget, spent, sampling, RECORD, std)
    assert spend(budget, *spent, Event(sampling, RECORD, std, times)) <= budget.epsilon
    assert spend(budget, *spent, Event(sampling, RECORD, std, times + 1)) > budget.epsilon


@pytest.mark.parametrize(("schedule", "sigma"), [("random", 14.02), ("public_balanced", 12.65)])
def test_gs_wgan_noise_for_epsilon_10(schedule, sigma) -> None:
    """Per row of B = 32, K = 1000, T = 20,000: 2 C sigma is the noise of a row."""
    budget = Budget(10.0, 1e-5, "replace_one", "pld")
    std = calibrate_std(budget, [], OneShard(1000, schedule), ROWS, 20_000)
    assert f"{std / 2.0:.2f}" == f"{sigma:.2f}"
    assert calibrate_times(budget, [], OneShard(1000, schedule), ROWS, std) >= 20_000


@pytest.mark.parametrize(("shards", "std"), [(1000, 9.0), (7, 3.0), (50, 2.0), (10**5, 9.0)])
def test_a_balanced_schedule_fills_whole_rounds(shards, std) -> None:
    """Replace-one epsilon 10 allows multiplier 0.49989, hence so many rounds of K draws of multiplier std / 2."""
    budget = Budget(10.0, 1e-5, "replace_one", "pld")
    rounds = math.floor((std / 2.0 / 0.49989) ** 2)
    times = calibrate_times(budget, [], OneShard(shards, "public_balanced"), RECORD, std)
    assert times == rounds * shards >= shards


def test_dpgan_steps_from_noise() -> None:
    """The DPGAN paper fixes sigma = 1 and q = 1/469 and trains 450,000 steps for 'epsilon 10' by RDP."""
    by_rdp = calibrate_times(Budget(10.0, 1e-5, "add_remove", "rdp"), [], Poisson(1 / 469), RECORD, 1.0)
    assert 450_000 <= by_rdp < 455_000
    by_pld = calibrate_times(Budget(10.0, 1e-5, "add_remove", "pld"), [], Poisson(1 / 469), RECORD, 1.0)
    assert by_pld > 1.1 * by_rdp  # the tighter accountant allows more


def test_gaussian_times_have_a_closed_form() -> None:
    """T releases of multiplier 3 are one of 3 / sqrt(T); epsilon 10 allows multiplier 0.49989: T = 36."""
    budget = Budget(10.0, 1e-5, "add_remove", "pld")
    assert calibrate_times(budget, [], Full(), RECORD, 3.0) == math.floor((3.0 / 0.49989) ** 2) == 36


def test_std_scales_with_the_clipping_norm() -> None:
    budget = Budget(2.0, 1e-5, "add_remove", "rdp")
    std = calibrate_std(budget, [], Poisson(0.05), RECORD, 100)
    assert calibrate_std(budget, [], Poisson(0.05), Sensitivity(7.0, 14.0), 100) == pytest.approx(7.0 * std, rel=2e-4)


def test_spent_budget_raises_the_noise() -> None:
    budget = Budget(2.0, 1e-5, "add_remove", "rdp")
    alone = calibrate_std(budget, [], Poisson(0.05), RECORD, 100)
    assert calibrate_std(budget, [Event(Full(), RECORD, 5.0, 1)], Poisson(0.05), RECORD, 100) > 1.01 * alone


def test_an_infinite_budget_needs_no_noise() -> None:
    budget = Budget(math.inf)
    assert calibrate_std(budget, [], Poisson(0.05), RECORD, 100) == 0.0
    assert calibrate_std(budget, [], Poisson(0.05), Sensitivity(math.inf, math.inf), 100) == 0.0
    with pytest.raises(ValueError, match="state the number"):
        calibrate_times(budget, [], Poisson(0.05), RECORD, 1.0)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_an_exhausted_budget_is_refused(accountant) -> None:
    budget = Budget(1.0, 1e-5, "add_remove", accountant)
    spent = [Event(Full(), RECORD, 1.0, 1)]  # epsilon 4.4
    with pytest.raises(BudgetExceeded, match="already spend"):
        calibrate_std(budget, spent, Poisson(0.05), RECORD, 100)
    with pytest.raises(BudgetExceeded, match="not even one"):
        calibrate_times(budget, spent, Poisson(0.05), RECORD, 1.0)
    for std in (0.0, 0.3):
        with pytest.raises(BudgetExceeded, match="not even one"):
            calibrate_times(budget, [], Full(), RECORD, std)


def test_noise_must_be_stated_where_delta_covers_all_participations() -> None:
    for sampling in (Poisson(1e-7), OneShard(10**7)):
        with pytest.raises(ValueError, match="state the noise"):
            calibrate_std(Budget(1.0, 1e-5), [], sampling, RECORD, 10)


def test_a_very_large_number_of_releases_must_be_stated() -> None:
    with pytest.raises(ValueError, match="state their number"):
        calibrate_times(Budget(1.0), [], Full(), RECORD, std=1e9)
    with pytest.raises(ValueError, match="state their number"):
        calibrate_times(Budget(10.0), [], Poisson(1e-9), RECORD, std=1.0)
    with pytest.raises(ValueError, match="state their number"):
        calibrate_times(Budget(10.0), [], OneShard(1000, "public_balanced"), RECORD, std=1e5)


def test_an_unclipped_release_fits_no_budget() -> None:
    with pytest.raises(BudgetExceeded, match="finite clipping norm"):
        calibrate_std(Budget(1.0), [], Full(), Sensitivity(math.inf, math.inf), 1)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_a_relation_that_the_accountant_lacks_is_refused(accountant) -> None:
    budget = Budget(1.0, 1e-5, "replace_one", accountant)
    with pytest.raises(NotCovered):
        calibrate_std(budget, [], Poisson(0.05), RECORD, 100)
    with pytest.raises(NotCovered):
        calibrate_times(budget, [], Poisson(0.05), RECORD, 1.0)


def test_a_random_shard_is_not_calibrated_by_prv() -> None:
    budget = Budget(1.0, 1e-5, "add_remove", "prv")
    with pytest.raises(NotCovered, match="random number of participations"):
        calibrate_std(budget, [], OneShard(10), RECORD, 100)
    with pytest.raises(NotCovered, match="random number of participations"):
        calibrate_times(budget, [], OneShard(10), RECORD, 1.0)


@pytest.mark.slow
def test_prv_calibrates_dpgan_too() -> None:
    """Within 0.1% of the largest number: one more release changes epsilon by less than the error of PRV."""
    budget = Budget(10.0, 1e-5, "add_remove", "prv")
    times = calibrate_times(budget, [], Poisson(1 / 469), RECORD, 1.0)
    assert spend(budget, Event(Poisson(1 / 469), RECORD, 1.0, times)) <= 10.0
    assert spend(budget, Event(Poisson(1 / 469), RECORD, 1.0, round(times * 1.001))) > 10.0

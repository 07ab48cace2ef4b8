"""Means and spreads over seeds and repeats, by hand and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from dpgen_bench.store.statistics import Difference, difference, format_value, holm, p_value, summarise, t_interval


def test_one_value_has_no_spread():
    summary = summarise([[3.5]])
    assert (summary.mean, summary.seeds, summary.repeats) == (3.5, 1, 1)
    assert summary.std_seeds is summary.std_repeats is summary.ci95 is summary.ci_over is None
    assert summary.text() == "3.5"


def test_seeds_and_repeats_are_two_spreads():
    """Seeds' means 1 and 5; variances within 2 (one degree of freedom) and 1 (two): pooled (2 + 2·1) / 3."""
    summary = summarise([[0.0, 2.0], [4.0, 5.0, 6.0]])
    assert summary.mean == 3.0
    assert summary.std_seeds == pytest.approx(math.sqrt(8.0))
    assert summary.std_repeats == pytest.approx(math.sqrt(4.0 / 3.0))
    assert (summary.seeds, summary.repeats, summary.ci_over) == (2, 3, "seeds")
    assert summary.text() == "3.0 ± 2.8 (repeats ± 1.2)"


def test_repeats_of_one_generator_have_no_spread_over_seeds():
    summary = summarise([[1.0, 2.0, 3.0, 4.0, 5.0]])
    assert summary.std_seeds is None
    assert summary.std_repeats == pytest.approx(math.sqrt(2.5))
    assert summary.ci_over == "repeats"
    assert summary.text() == "3.0 (repeats ± 1.6)"


def test_the_interval_is_that_of_students_t():
    """t(0.975; 2 degrees of freedom) = 4.302653 (printed tables)."""
    low, high = t_interval([1.0, 2.0, 3.0])
    assert (high - low) / 2 == pytest.approx(4.302653 / math.sqrt(3.0), rel=1e-6)
    assert (low + high) / 2 == pytest.approx(2.0)


def test_the_interval_has_its_coverage():
    """1,000 sets of 3 seeds: 950 ± 4 standard errors (7 each) cover the mean."""
    rng = np.random.default_rng(0)
    intervals = [summarise([[x] for x in rng.normal(7.0, 2.0, 3)]).ci95 for _ in range(1000)]
    assert 922 <= sum(low <= 7.0 <= high for low, high in intervals) <= 978


def test_order_does_not_matter():
    one, two = summarise([[1.0, 2.0], [5.0, 9.0]]), summarise([[9.0, 5.0], [2.0, 1.0]])
    assert one == two


@pytest.mark.parametrize("values", [[], [[1.0], []]])
def test_no_values_have_no_summary(values):
    with pytest.raises(ValueError, match="expected one or more values"):
        summarise(values)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2272129.0, "2,272,129"),
        (8233.04, "8,233"),
        (999.96, "1,000"),
        (999.94, "999.9"),
        (123.456, "123.5"),
        (0.000423, "0.000423"),
        (1.0, "1"),
        (-0.5, "-0.5"),
    ],
)
def test_small_values_keep_their_digits(value, text):
    assert format_value(value) == text


def test_a_spread_has_the_format_of_its_mean():
    assert summarise([[92.0], [92.01]]).text() == "92.0 ± 0.0"
    assert summarise([[4.2e-4], [5.1e-4]]).text() == "0.000465 ± 6.36e-05"


def test_a_difference_has_welchs_interval():
    """Means 2 and 8 with variances 1/3 and 16/3; degrees of freedom by Welch and Satterthwaite."""
    found = difference([[1.0], [2.0], [3.0]], [[4.0], [8.0], [12.0]])
    assert found.mean == -6.0
    low, high = found.ci95
    assert (low + high) / 2 == pytest.approx(-6.0)
    freedom = (17 / 3) ** 2 / ((1 / 3) ** 2 / 2 + (16 / 3) ** 2 / 2)
    assert (high - low) / 2 == pytest.approx(scipy.stats.t.ppf(0.975, freedom) * math.sqrt(17 / 3), rel=1e-9)
    assert found.is_tie
    assert difference([[1.0], [2.0], [3.0]], [[21.0], [22.0], [23.0]]).is_tie is False


def test_repeats_are_averaged_within_their_seed():
    one = difference([[0.0, 2.0], [2.0], [3.0]], [[5.0], [6.0], [7.5]])
    assert one == difference([[1.0], [2.0], [3.0]], [[5.0], [6.0], [7.5]])
    assert difference([[1.0, 2.0, 3.0, 4.0]], [[9.0, 9.5, 8.0]]).ci95 is None  # repeats of one seed


@pytest.mark.parametrize(("a", "b"), [(2, 3), (3, 2), (1, 1)])
def test_with_fewer_than_three_seeds_there_is_no_interval_and_no_tie(a, b):
    found = difference([[float(i)] for i in range(a)], [[9.0 + i] for i in range(b)])
    assert found.ci95 is None
    assert found.is_tie is None


def test_values_without_spread_and_infinite_values():
    same, other, odd = [[5.0]] * 3, [[7.0]] * 3, [[math.inf], [1.0], [2.0]]
    assert difference(same, same) == Difference(0.0, (0.0, 0.0))
    assert (difference(same, same).is_tie, difference(same, other).is_tie) == (True, False)
    assert difference(odd, same).ci95 is None


def test_the_interval_of_a_difference_has_its_coverage():
    """1,000 pairs of 3 seeds with unequal variances; Welch's interval covers at least nearly 95% of the differences."""
    rng = np.random.default_rng(0)
    covered = 0
    for a, b in zip(rng.normal(7.0, 2.0, (1000, 3)), rng.normal(3.0, 6.0, (1000, 3)), strict=True):
        low, high = difference([[x] for x in a], [[x] for x in b]).ci95
        covered += low <= 4.0 <= high
    assert 930 <= covered <= 985


A, B = [[3.0], [5.0], [4.0]], [[1.0], [2.0], [1.5]]


@pytest.mark.parametrize("end", [0, 1])
def test_at_an_end_of_the_interval_the_p_value_is_5_percent(end):
    interval = difference(A, B).ci95
    assert interval is not None
    assert p_value(A, B, interval[end]) == pytest.approx(0.05)


def test_the_p_value_is_that_of_welchs_test():
    assert p_value(A, B) == pytest.approx(
        scipy.stats.ttest_ind([3.0, 5.0, 4.0], [1.0, 2.0, 1.5], equal_var=False).pvalue
    )
    assert p_value(A, B, difference(A, B).mean) == pytest.approx(1.0)
    assert [p_value([[1.0]] * 3, [[0.0]] * 3, threshold) for threshold in (1.0, 0.0)] == [1.0, 0.0]  # without spread


def test_two_seeds_have_no_p_value():
    with pytest.raises(ValueError, match="expected 3 finite seeds"):
        p_value(A, B[:2])


def test_holms_procedure_rejects_until_the_first_p_value_that_is_too_large():
    """0.01 ≤ 0.05 / 4 and 0.013 ≤ 0.05 / 3, but 0.03 > 0.05 / 2, so 0.04 ≤ 0.05 is not rejected either."""
    assert holm([0.04, 0.01, 0.03, 0.013]) == [False, True, False, True]
    assert holm([]) == []


def test_holms_procedure_holds_its_level_for_all_hypotheses_together():
    """Ten true hypotheses with uniform p-values: one is rejected in at most 5% of 4,000 trials, within four errors."""
    draws = np.random.default_rng(0).random((4000, 10))
    wrong = np.mean([any(holm(list(row))) for row in draws])
    assert wrong == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / 4000))

"""The number of discriminator steps for each generator step, fixed and adaptive."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from dpgen_bench.training.frequency import LADDER, StepFrequency


def g_step(frequency: StepFrequency, accuracy: float) -> int:
    """One period of n_𝒟 discriminator steps and its 𝒢 step; n_𝒟 afterwards."""
    due = [frequency.after_d_step() for _ in range(frequency.n_d)]
    assert due == [False] * (len(due) - 1) + [True]
    frequency.before_g_step(accuracy)
    frequency.after_g_step()
    return frequency.n_d


def test_ladder_by_hand() -> None:
    """β = 1/2, so a grace period of 4 𝒢 steps; threshold 0.6. All averages are exact in binary."""
    frequency = StepFrequency("adaptive", beta=0.5, threshold=0.6)
    script = [  # accuracy, average, n_𝒟 after the step
        (1.0, 1.0, 1),  # the average starts at its first value, not at 0.5
        (0.5, 0.75, 1),
        (0.25, 0.5, 1),  # weak, but within the grace period
        (0.5, 0.5, 2),  # 4th step: up
        (0.5, 0.5, 2),  # not reset: still 0.5
        (0.5, 0.5, 2),
        (1.0, 0.75, 2),
        (0.875, 0.8125, 2),  # grace is over, but 𝒟 is strong
        (0.0, 0.40625, 5),  # up as soon as it is weak
        (1.0, 0.703125, 5),
        (1.0, 0.8515625, 5),
        (1.0, 0.92578125, 5),
        (1.0, 0.962890625, 5),
        (1.0, 0.9814453125, 5),  # strong for long: it never moves down
    ]
    for accuracy, average, n_d in script:
        assert g_step(frequency, accuracy) == n_d
        assert frequency.ema == average


def test_the_average_keeps_beta_of_its_past() -> None:
    """β = 3/4, which is exact in binary, so that β and 1 - β differ."""
    frequency = StepFrequency(1, beta=0.75)
    assert [frequency.before_g_step(accuracy) for accuracy in (1.0, 0.0, 1.0, 0.5)] == [1.0, 0.75, 0.8125, 0.734375]


def test_an_average_at_the_threshold_moves_up() -> None:
    frequency = StepFrequency("adaptive", beta=0.5, threshold=0.75)
    assert [g_step(frequency, 0.75) for _ in range(4)] == [1, 1, 1, 2]


@pytest.mark.parametrize(("beta", "grace"), [(0.99, 200), (0.95, 40), (0.9, 20), (0.97, 67), (0.0, 2)])
def test_grace_period_is_two_over_one_minus_beta(beta: float, grace: int) -> None:
    frequency = StepFrequency("adaptive", beta=beta, threshold=0.6)
    rungs = [g_step(frequency, 0.0) for _ in range(grace)]
    assert rungs == [1] * (grace - 1) + [2]


def test_the_largest_value_is_not_exceeded() -> None:
    frequency = StepFrequency("adaptive", beta=0.0, threshold=0.6)
    visited = [1]
    for _ in range(2 * len(LADDER) + 4):
        frequency.before_g_step(0.0)
        frequency.after_g_step()
        if frequency.n_d != visited[-1]:
            visited.append(frequency.n_d)
    assert visited == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]


def test_fixed_frequency_divides_t_and_never_moves() -> None:
    frequency = StepFrequency(3)
    due = []
    for t in range(1, 14):
        if frequency.after_d_step():
            due.append(t)
            frequency.before_g_step(0.0)
            frequency.after_g_step()
    assert due == [3, 6, 9, 12]
    assert frequency.ema == 0.0


@pytest.mark.parametrize("n_d", ["adaptive", 7])
def test_frequency_continues_from_its_saved_state(n_d: Any) -> None:
    def run(frequency: StepFrequency, first: int, last: int) -> list[tuple[int, int, float | None]]:
        trace = []
        for t in range(first, last):
            if frequency.after_d_step():
                frequency.before_g_step(0.5 + 0.3 * math.sin(t))
                frequency.after_g_step()
            trace.append((frequency.n_d, frequency.d_steps, frequency.ema))
        return trace

    whole = run(StepFrequency(n_d, 0.75, 0.6), 0, 300)
    assert n_d != "adaptive" or whole[-1][0] > 2, "the ladder must be climbed for the test to mean anything"
    for cut in (1, 50, 123):
        before, after = StepFrequency(n_d, 0.75, 0.6), StepFrequency(n_d, 0.75, 0.6)
        head = run(before, 0, cut)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        assert head + run(after, cut, 300) == whole

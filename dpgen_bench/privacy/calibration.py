"""Noise from the number of releases, or the number of releases from the noise, by root-finding in an accountant.

No repaired sigma is typed anywhere: a method states its sampling, bound and plan, and what the budget leaves decides
the rest. Both searches start from opacus' RDP answer, which costs milliseconds, and move from there in the
accountant that the budget names; whatever they return has been evaluated by it and found within the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from scipy.optimize import brentq

from dpgen_bench.privacy.accountants import ACCOUNTANTS, NotCovered, epsilon
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.sampling import Full, Poisson

SIGNIFICANT_DIGITS = 5
# Searching further than this from a multiplier of 1, or for more releases, means that no answer exists.
LARGEST_MULTIPLIER = 1e9
MOST_RELEASES = 10**12


class BudgetExceeded(ValueError):
    """The planned releases cannot be had within the budget."""


def round_up(value: float, digits: int = SIGNIFICANT_DIGITS) -> float:
    """The smallest number of `digits` significant decimal digits that is >= value > 0."""
    exponent = math.floor(math.log10(value)) - digits + 1
    mantissa = math.ceil(value / 10.0**exponent * (1.0 - 1e-13))  # 4.9990 must not become 4.9991 by rounding error
    rounded = float(f"{mantissa}e{exponent}")
    return rounded if rounded >= value else float(f"{mantissa + 1}e{exponent}")


def _require_room(budget: Budget, spent: Sequence[Event]) -> None:
    used = epsilon(spent, budget.delta, budget.relation, budget.accountant)
    if used >= budget.epsilon:
        raise BudgetExceeded(
            f"earlier mechanisms already spend epsilon={used:.4g} of {budget.epsilon:g} (delta={budget.delta:g}, "
            f"{budget.relation}, {budget.accountant}): plan fewer releases, more noise or a larger budget."
        )


def calibrate_std(
    budget: Budget, spent: Sequence[Event], sampling: Full | Poisson, sensitivity: Sensitivity, times: int
) -> float:
    """The smallest noise std, rounded UP to 5 significant digits, for `times` releases after `spent`.

    Args:
        budget: epsilon, delta, relation and accountant that `spent` and the new releases must share.
        spent: everything already approved.
        sampling, sensitivity, times: the mechanism to be.

    Returns:
        Noise std in the units of the released sum, with epsilon(spent + new) <= budget.epsilon; 0.0 when the
        budget is infinite or `times` is 0.

    Raises:
        BudgetExceeded: `spent` leaves nothing, or the sensitivity is infinite (an unclipped release).
        NotCovered: the budget's accountant has no theory for this sampling under the budget's relation.
    """
    if math.isinf(budget.epsilon) or times == 0:
        return 0.0
    if math.isinf(sensitivity.add_remove):
        raise BudgetExceeded(
            f"an unclipped release has no finite sensitivity, so no noise fits epsilon={budget.epsilon:g}: "
            "give the bound a finite clipping norm, or set privacy.epsilon=inf."
        )
    _require_room(budget, spent)
    unit = getattr(sensitivity, budget.relation)

    def excess(accountant: str, events: Sequence[Event], multiplier: float) -> float:
        """log(epsilon / budget), floored: what a root-finder can interpolate."""
        event = Event(sampling, sensitivity, multiplier * unit, times)
        used = epsilon([*events, event], budget.delta, budget.relation, accountant)
        return math.log(max(used / budget.epsilon, 1e-3))

    def solve(accountant: str, events: Sequence[Event], guess: float, factor: float) -> float:
        """A multiplier within 1e-6 of the smallest one that fits."""

        def function(log_multiplier: float) -> float:
            return excess(accountant, events, math.exp(log_multiplier))

        low = high = math.log(guess)
        step = math.log(factor)
        while function(high) > 0.0:
            low, high = high, high + step
            if high > math.log(LARGEST_MULTIPLIER):
                raise BudgetExceeded(
                    f"no noise brings the total within epsilon={budget.epsilon:g} (delta={budget.delta:g}, "
                    f"{budget.relation}, {accountant}): earlier mechanisms have used it up."
                )
            step *= 2.0  # the guess was off: hurry
        while low == high or function(low) <= 0.0:
            low -= step
            step *= 2.0
            if low < -math.log(LARGEST_MULTIPLIER):
                return math.exp(low)  # even next to no noise fits
        return math.exp(brentq(function, low, high, xtol=1e-6, rtol=1e-12))

    # RDP never reports less than the others by more than their discretisation, so its answer is a close bracket.
    try:
        guess = solve("rdp", spent, 1.0, 2.0)
    except (NotCovered, BudgetExceeded):
        guess = 1.0
    std = unit * guess
    if budget.accountant != "rdp":
        std = unit * solve(budget.accountant, spent, guess, 1.1 if guess != 1.0 else 2.0)
    std = round_up(std)
    while excess(budget.accountant, spent, std / unit) > 0.0:
        std = round_up(std * (1.0 + 10.0**-SIGNIFICANT_DIGITS))
    return std


def calibrate_times(
    budget: Budget, spent: Sequence[Event], sampling: Full | Poisson, sensitivity: Sensitivity, std: float
) -> int:
    """The largest number of releases with noise `std` that the budget allows after `spent`.

    Raises:
        BudgetExceeded: not even one fits.
        NotCovered: the budget's accountant has no theory for this sampling under the budget's relation.
        ValueError: the budget is infinite, or the releases cost nothing that the accountant can see.
    """
    if math.isinf(budget.epsilon):
        raise ValueError("an infinite budget allows any number of releases: state the number (times).")

    def fits(accountant: str) -> Callable[[int], float]:
        def excess(times: int) -> float:
            events = [*spent, Event(sampling, sensitivity, std, times)]
            used = epsilon(events, budget.delta, budget.relation, accountant)
            return math.log(max(used / budget.epsilon, 1e-3)) if used else -math.log(1e3)

        return excess

    exact = fits(budget.accountant)
    if exact(1) > 0.0:
        raise BudgetExceeded(
            f"not even one release of noise std {std:g} at sensitivity {getattr(sensitivity, budget.relation):g} fits "
            f"epsilon={budget.epsilon:g} (delta={budget.delta:g}, {budget.relation}, {budget.accountant}) after what "
            "is already planned: use more noise, a smaller clipping norm or a larger budget."
        )
    try:
        guess = _largest(fits("rdp"), 1)
    except (NotCovered, ValueError):
        guess = 1
    return guess if budget.accountant == "rdp" and guess > 1 else _largest(exact, guess)


def _largest(excess: Callable[[int], float], guess: int) -> int:
    """The largest times >= 1 with excess(times) <= 0; 1 if there is none. Illinois' regula falsi in log(times)."""
    low, low_value = 1, -math.inf
    high, high_value = guess, excess(guess)
    factor = 1.25 if guess > 1 else 4.0
    while high_value <= 0.0:
        low, low_value = high, high_value
        if high >= MOST_RELEASES:
            raise ValueError(f"more than {MOST_RELEASES} releases fit the budget: state the number (times).")
        high = math.ceil(high * factor)
        high_value = excess(high)
        factor *= factor
    if low == 1:
        low_value = excess(1)
    side = 0
    while high - low > 1:
        share = low_value / (low_value - high_value) if low_value < high_value else 0.5
        middle = math.floor(math.exp(math.log(low) + share * math.log(high / low)))
        middle = min(max(middle, low + 1), high - 1)
        value = excess(middle)
        if value <= 0.0:
            low, low_value = middle, value
            high_value = high_value / 2.0 if side == -1 else high_value
            side = -1
        else:
            high, high_value = middle, value
            low_value = low_value / 2.0 if side == 1 else low_value
            side = 1
    return low


assert set(ACCOUNTANTS) == {"rdp", "prv", "pld"}  # what `Budget` accepts

"""Noise from the number of releases, or the number of releases from the noise, by root-finding in an accountant.

Methods state their sampling, bound and plan, and the noise follows from what the budget leaves. Searches start from
Opacus's RDP bound, which takes milliseconds, and end in the accountant that the budget names: every result was
evaluated by this accountant and is within the budget. docs/accountants.md defines shares of a budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from scipy.optimize import brentq

from dpgen_bench.privacy.accountants.proven import ACCOUNTANTS, Accountant, NotCovered, Pld
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.sampling import EveryShard, Full, Sampling

SIGNIFICANT_DIGITS = 5
LEAST_SHARE = 0.01  # a budget of which less than this share is left counts as spent
_UNIT = Sensitivity(1.0, 1.0)
# Searching further than this from the first guess, or for more releases, means that no answer exists.
LARGEST_FACTOR = 1e9
MOST_RELEASES = 10**8


class BudgetExceeded(ValueError):
    """Raised if the planned releases do not fit the budget."""


def round_up(value: float, digits: int = SIGNIFICANT_DIGITS) -> float:
    """The smallest number of `digits` significant decimal digits that is >= value > 0."""
    exponent = math.floor(math.log10(value)) - digits + 1
    mantissa = math.ceil(value / 10.0**exponent * (1.0 - 1e-13))  # 4.9990 must not become 4.9991 by rounding error
    rounded = float(f"{mantissa}e{exponent}")
    return rounded if rounded >= value else float(f"{mantissa + 1}e{exponent}")


def _overdraft(accountant: Accountant, budget: Budget, events: Sequence[Event]) -> float:
    """log(epsilon / budget), at least log(1e-3): positive over the budget, and smooth enough for interpolation."""
    used = accountant.epsilon(events, budget.delta, budget.relation)
    if budget.limit == 0.0:
        return math.inf if used > 0.0 else math.log(1e-3)
    return math.log(max(used / budget.limit, 1e-3))


def _ever_closer(budget: Budget) -> list[Accountant]:
    """The accountants of a search, the budget's own last: each is much faster than the next one and close to it."""
    own = ACCOUNTANTS[budget.accountant]
    cheap = [ACCOUNTANTS["rdp"], Pld(interval=1e-3)]
    return [own] if own is cheap[0] else [*cheap, own]


def _require_room(budget: Budget, spent: Sequence[Event]) -> None:
    used = ACCOUNTANTS[budget.accountant].epsilon(spent, budget.delta, budget.relation)
    if used >= budget.limit:
        raise BudgetExceeded(
            f"earlier mechanisms already spend epsilon={used:.4g} of {budget.limit:g} (delta={budget.delta:g}, "
            f"{budget.relation}, {budget.accountant}): plan fewer releases, more noise or a larger budget."
        )


def calibrate_std(
    budget: Budget, spent: Sequence[Event], sampling: Sampling, sensitivity: Sensitivity, times: int
) -> float:
    """The smallest noise std, rounded UP to 5 significant digits, for `times` releases after `spent`.

    Args:
        budget: epsilon, delta, relation and accountant that `spent` and the new releases must share.
        spent: everything already approved.
        sampling, sensitivity, times: of the new mechanism.

    Returns:
        Noise std in the units of the released sum, with epsilon(spent + new) <= budget.epsilon; 0.0 when the
        budget is infinite or `times` is 0.

    Raises:
        BudgetExceeded: if `spent` leaves nothing, or the sensitivity is infinite (an unclipped release).
        ValueError: if a record takes part so rarely that the budget's delta alone covers it.
        NotCovered: if the budget's accountant does not cover this sampling under the budget's relation.
    """
    _require_budget(budget)
    if math.isinf(budget.limit) or times == 0:
        return 0.0
    _require_clipping(budget, sensitivity)
    _require_room(budget, spent)
    if sampling.participation(times) <= budget.delta:
        raise ValueError(
            f"a record takes part in {times} draws at rate {sampling.rate:g} with probability below delta="
            f"{budget.delta:g}, so any noise meets the budget on paper: state the noise (std), or lower delta."
        )
    own = ACCOUNTANTS[budget.accountant]
    std = round_up(_smallest_std(budget, spent, sampling, sensitivity, times))
    while _overdraft(own, budget, [*spent, Event(sampling, sensitivity, std, times)]) > 0.0:
        std = round_up(std * (1.0 + 10.0**-SIGNIFICANT_DIGITS))
    return std


def _require_budget(budget: Budget) -> None:
    if budget.epsilon is None:
        raise ValueError(
            "expected a budget to calibrate noise or releases to, got privacy.epsilon=null; state both the noise and "
            "the number of releases, or set privacy.epsilon to a number."
        )


def _require_clipping(budget: Budget, sensitivity: Sensitivity) -> None:
    if math.isinf(sensitivity.add_remove):
        raise BudgetExceeded(
            f"an unclipped release has no finite sensitivity, so no noise fits epsilon={budget.limit:g}: "
            "give the bound a finite clipping norm, or set privacy.epsilon=inf."
        )


def _smallest_std(
    budget: Budget, spent: Sequence[Event], sampling: Sampling, sensitivity: Sensitivity, times: int
) -> float:
    """The smallest noise std within the budget, up to a relative 1e-6."""

    def excess(accountant: Accountant, std: float) -> float:
        return _overdraft(accountant, budget, [*spent, Event(sampling, sensitivity, std, times)])

    std, step, own = getattr(sensitivity, budget.relation), 2.0, ACCOUNTANTS[budget.accountant]
    for accountant in _ever_closer(budget):
        try:
            std, step = _smallest(partial(excess, accountant), std, step), 1.0 + (step - 1.0) / 10.0
        except (NotCovered, BudgetExceeded):
            if accountant is own:
                raise
    return std


@lru_cache(maxsize=256)
def gaussian_mu(budget: Budget) -> float:
    """The mu = sensitivity / std of the Gaussian mechanism that costs all of the budget by its accountant.

    Up to a relative 1e-6, `pld` gives the solution of delta_Gauss(epsilon; mu) = delta; `rdp` and `prv`, which are
    looser, give a smaller mu. See docs/accountants.md, "Budget shares".

    Raises:
        ValueError: for an infinite budget.
    """
    if math.isinf(budget.limit):
        raise ValueError("expected a finite budget, got epsilon = inf, to which no Gaussian mechanism is equivalent.")
    return 1.0 / _smallest_std(budget, (), Full(), _UNIT, 1)


def _gaussian(budget: Budget, share: float) -> Event:
    """The Gaussian mechanism of a share of the budget."""
    return Event(Full(), _UNIT, 1.0 / (gaussian_mu(budget) * math.sqrt(share)), 1)


def calibrate_share(budget: Budget, share: float, sampling: Sampling, sensitivity: Sensitivity, times: int) -> float:
    """The noise std, rounded UP to 5 significant digits, that costs `share` of the budget's mu².

    For releases on all records it is sensitivity * sqrt(times) / (mu sqrt(share)), mu that of `gaussian_mu`, and shares
    add up exactly. For others it is the smallest std at which their epsilon is at most that of a Gaussian mechanism of
    mu sqrt(share), by the budget's accountant, at its delta and under its relation; such shares add up approximately.
    See docs/accountants.md, "Budget shares".

    Returns:
        Noise std in the units of the released sum; 0.0 when the budget is infinite or `times` is 0.

    Raises:
        BudgetExceeded: for an infinite sensitivity (an unclipped release).
        ValueError: if delta alone covers the share, or a record takes part so rarely that delta alone covers it.
        NotCovered: as `calibrate_std`.
    """
    _require_budget(budget)
    if math.isinf(budget.limit) or times == 0:
        return 0.0
    _require_clipping(budget, sensitivity)
    whole = _gaussian(budget, share)
    if isinstance(sampling, Full | EveryShard):
        return round_up(getattr(sensitivity, budget.relation) * math.sqrt(times) * whole.std)
    own = ACCOUNTANTS[budget.accountant].epsilon([whole], budget.delta, budget.relation)
    if own <= 0.0:
        raise ValueError(
            f"delta={budget.delta:g} alone covers a share of {share:g} of epsilon={budget.limit:g}, so any noise "
            "meets it on paper: state the noise (std), raise the share, or lower delta."
        )
    return calibrate_std(replace(budget, epsilon=own), [], sampling, sensitivity, times)


def is_nearly_spent(budget: Budget, spent: Sequence[Event]) -> bool:
    """Whether `spent` leaves less than 1 % of the budget: no room for a Gaussian mechanism of 1 % of its mu²."""
    if math.isinf(budget.limit) or not spent:
        return False
    if budget.limit == 0.0:
        return True
    own = ACCOUNTANTS[budget.accountant]
    return own.epsilon([*spent, _gaussian(budget, LEAST_SHARE)], budget.delta, budget.relation) > budget.limit


def _smallest(excess: Callable[[float], float], guess: float, step: float) -> float:
    """A noise std within 1e-6 (relative) of the smallest one with excess <= 0, searched from `guess`."""

    def function(logarithm: float) -> float:
        return excess(math.exp(logarithm))

    low = high = math.log(guess)
    width, limit = math.log(step), math.log(guess * LARGEST_FACTOR)
    while function(high) > 0.0:
        low, high = high, high + width
        width *= 2.0  # the guess was far off, so the steps grow
        if high > limit:
            raise BudgetExceeded(
                f"expected some noise to fit the budget, got none of up to {LARGEST_FACTOR:g} times the first guess: "
                "the accountant cannot prove an epsilon this small, or earlier mechanisms have used it up; raise "
                "privacy.epsilon."
            )
    while low == high or function(low) <= 0.0:
        low, high = low - width, low
        width *= 2.0
    return math.exp(brentq(function, low, high, xtol=1e-6, rtol=1e-12))


def calibrate_times(
    budget: Budget, spent: Sequence[Event], sampling: Sampling, sensitivity: Sensitivity, std: float
) -> int:
    """The largest number of releases with noise `std` that the budget allows after `spent`.

    For a balanced schedule of K shards or clients the result is a multiple of K, because all releases of one pass
    through the schedule together cost as much as one of them. If the number of answers of a client is limited, any
    number of releases may fit.

    Raises:
        BudgetExceeded: if not even one release fits.
        NotCovered: if the budget's accountant does not cover this sampling under the budget's relation.
        ValueError: if the budget is infinite, or allows 100 million releases.
    """
    _require_budget(budget)
    if math.isinf(budget.limit):
        raise ValueError("an infinite budget allows any number of releases: state the number (times).")

    length = sampling.period

    def excess(accountant: Accountant, rounds: int) -> float:
        return _overdraft(accountant, budget, [*spent, Event(sampling, sensitivity, std, rounds * length)])

    own = ACCOUNTANTS[budget.accountant]
    if excess(own, 1) > 0.0:
        raise BudgetExceeded(
            f"not even one release of noise std {std:g} at sensitivity {getattr(sensitivity, budget.relation):g} fits "
            f"epsilon={budget.limit:g} (delta={budget.delta:g}, {budget.relation}, {budget.accountant}) after what "
            "is already planned: use more noise, a smaller sensitivity or a larger budget."
        )
    guess, step = 1, 4.0
    for accountant in _ever_closer(budget):
        try:
            # The first accountants only guide the search. For PRV, the last releases cost less than its interval is
            # wide, and finding them would take minutes.
            slack = 1e-3 if accountant is not own else 1e-4 if own.name == "prv" else 0.0
            most = max(MOST_RELEASES // length, 1)
            guess, step = _largest(partial(excess, accountant), guess, step, slack, most), 1.0 + (step - 1.0) / 10.0
        except NotCovered:
            if accountant is own:
                raise
    return guess * length


def _largest(excess: Callable[[int], float], guess: int, step: float, slack: float, most: int) -> int:
    """The largest times >= 1 with excess(times) <= 0 (within a factor 1 - slack), else 1.

    The Illinois variant of regula falsi in log(times), from a bracket around `guess` that grows by `step`.

    Raises:
        ValueError: if `most` fits.
    """
    low, high = 1, guess
    low_value, high_value = -math.inf, excess(guess)
    while high_value <= 0.0:
        low, low_value = high, high_value
        if high >= most:
            raise ValueError(f"at least {MOST_RELEASES:,} releases fit the budget: state their number (times).")
        high = min(math.ceil(high * step), most)
        high_value = excess(high)
        step *= step
    while math.isinf(low_value) and low < high:  # the guess was too high
        below = max(1, math.floor(high / step))
        value = excess(below)
        if value <= 0.0 or below == 1:
            low, low_value = below, value
        else:
            high, high_value = below, value
        step *= step
    halved = 0
    while high - low > max(1.0, slack * low):
        share = low_value / (low_value - high_value) if low_value < 0.0 < high_value else 0.5
        middle = math.floor(math.exp(math.log(low) + share * math.log(high / low)))
        middle = min(max(middle, low + 1), high - 1)
        value = excess(middle)
        if value <= 0.0:
            low, low_value = middle, value
            high_value, halved = (high_value / 2.0 if halved == 1 else high_value), 1
        else:
            high, high_value = middle, value
            low_value, halved = (low_value / 2.0 if halved == -1 else low_value), -1
    return low

"""Noise from the number of releases, or the number of releases from the noise, by root-finding in an accountant.

No repaired sigma is typed anywhere: a method states its sampling, bound and plan, and what the budget leaves decides
the rest. Both searches start from opacus' RDP answer, which costs milliseconds, and end in the accountant that the
budget names; whatever they return has been evaluated by it and found within the budget.

Shares of a budget are shares of mu². A Gaussian mechanism with noise std / sensitivity = 1 / mu has the privacy curve

    delta(epsilon; mu) = Phi(-epsilon / mu + mu / 2) - exp(epsilon) Phi(-epsilon / mu - mu / 2)

(Balle and Wang, 2018), and independent ones compose to mu² = mu_1² + mu_2² + ... (Dong, Roth and Su, 2022). So a budget
is worth the mu² of the Gaussian mechanism that costs all of it, and full-batch releases share it without loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from scipy.optimize import brentq

from dpgen_bench.privacy.accountants.proven import ACCOUNTANTS, Accountant, NotCovered, Pld
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.sampling import Full, Sampling

SIGNIFICANT_DIGITS = 5
LEAST_SHARE = 0.01  # of a budget, below which it counts as spent
_UNIT = Sensitivity(1.0, 1.0)
# Searching further than this from the first guess, or for more releases, means that no answer exists.
LARGEST_FACTOR = 1e9
MOST_RELEASES = 10**8


class BudgetExceeded(ValueError):
    """The planned releases cannot be had within the budget."""


def round_up(value: float, digits: int = SIGNIFICANT_DIGITS) -> float:
    """The smallest number of `digits` significant decimal digits that is >= value > 0."""
    exponent = math.floor(math.log10(value)) - digits + 1
    mantissa = math.ceil(value / 10.0**exponent * (1.0 - 1e-13))  # 4.9990 must not become 4.9991 by rounding error
    rounded = float(f"{mantissa}e{exponent}")
    return rounded if rounded >= value else float(f"{mantissa + 1}e{exponent}")


def _overdraft(accountant: Accountant, budget: Budget, events: Sequence[Event]) -> float:
    """log(epsilon / budget), floored at log(1e-3): positive over budget, and smooth enough to interpolate."""
    used = accountant.epsilon(events, budget.delta, budget.relation)
    return math.log(max(used / budget.limit, 1e-3))


def _ever_closer(budget: Budget) -> list[Accountant]:
    """Accountants that lead the search to the budget's own: each far cheaper than the next, and close to it."""
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
        sampling, sensitivity, times: the mechanism to be.

    Returns:
        Noise std in the units of the released sum, with epsilon(spent + new) <= budget.epsilon; 0.0 when the
        budget is infinite or `times` is 0.

    Raises:
        BudgetExceeded: `spent` leaves nothing, or the sensitivity is infinite (an unclipped release).
        ValueError: the record is drawn so rarely that delta alone covers it.
        NotCovered: the budget's accountant has no theory for this sampling under the budget's relation.
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
    """The mu of the Gaussian mechanism that costs all of the budget by its accountant (up to a relative 1e-6).

    By PLD that is the exact curve of a Gaussian mechanism; the bounds of RDP and PRV give a smaller mu.

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

    Of releases on all records, that is sensitivity * sqrt(times) / (mu sqrt(share)). Of others, it is the smallest std
    at which their epsilon is at most that of a Gaussian mechanism of mu sqrt(share), by the budget's accountant, at its
    delta, under its relation. Curves that agree there differ elsewhere, so such shares compose to the budget nearly,
    not exactly; what takes the remainder makes up for it.

    Returns:
        Noise std in the units of the released sum; 0.0 when the budget is infinite or `times` is 0.

    Raises:
        BudgetExceeded: for an infinite sensitivity (an unclipped release).
        ValueError: delta alone covers the share, or the record is drawn so rarely that delta alone covers it.
        NotCovered: as calibrate_std.
    """
    _require_budget(budget)
    if math.isinf(budget.limit) or times == 0:
        return 0.0
    _require_clipping(budget, sensitivity)
    whole = _gaussian(budget, share)
    if isinstance(sampling, Full):
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
        width *= 2.0  # the guess was off: hurry
        if high > limit:
            raise BudgetExceeded(
                "no amount of noise fits the budget: it is too small, or earlier mechanisms have used it up."
            )
    while low == high or function(low) <= 0.0:
        low, high = low - width, low
        width *= 2.0
    return math.exp(brentq(function, low, high, xtol=1e-6, rtol=1e-12))


def calibrate_times(
    budget: Budget, spent: Sequence[Event], sampling: Sampling, sensitivity: Sensitivity, std: float
) -> int:
    """The largest number of releases with noise `std` that the budget allows after `spent`.

    A balanced schedule of K shards or clients costs the same for every release of a round, so its answer is a multiple
    of K. A limit on answers may be all that the budget needs: then any number of releases fits.

    Raises:
        BudgetExceeded: not even one fits.
        NotCovered: the budget's accountant has no theory for this sampling under the budget's relation.
        ValueError: the budget is infinite, or allows 100 million releases.
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
            "is already planned: use more noise, a smaller clipping norm or a larger budget."
        )
    guess, step = 1, 4.0
    for accountant in _ever_closer(budget):
        try:
            # A guide need not be exact; PRV's last releases are far below its own interval, and cost it minutes.
            slack = 1e-3 if accountant is not own else 1e-4 if own.name == "prv" else 0.0
            most = max(MOST_RELEASES // length, 1)
            guess, step = _largest(partial(excess, accountant), guess, step, slack, most), 1.0 + (step - 1.0) / 10.0
        except NotCovered:
            if accountant is own:
                raise
    return guess * length


def _largest(excess: Callable[[int], float], guess: int, step: float, slack: float, most: int) -> int:
    """The largest times >= 1 with excess(times) <= 0 (within a factor 1 - slack), else 1.

    Illinois' regula falsi in log(times), started at `guess` and widened by `step`. ValueError if `most` fits.
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

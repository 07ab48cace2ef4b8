"""Plans of allowances: a method's request becomes an entry of the ledger, or is refused before a record is used.

A mechanism is calibrated when it is declared. Earlier mechanisms count as spent:

- `times` and `share`: noise that costs this share of the budget's mu² (docs/accountants.md, "Budget shares"). It is
  refused if the composition with earlier mechanisms exceeds the budget.
- `times` without `share`, or with the share that completes a sum of 1: noise that costs all that is left, by the
  budget's accountant. So the whole run costs the budget, up to the rounding of the noise.
- `times` and `std`, or `std` alone: as stated, if it fits what is left.

If privacy.epsilon is null there is no budget: `times` and `std` of every mechanism are stated, shares are refused, and
the epsilon that the releases prove is reported. Clipping and noise stay on, unlike with an infinite epsilon.

A run that was restarted from another run inherits the allowances of that run. Its own shares are still shares of the
whole budget, and the last mechanism takes what the parent and the other mechanisms left.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dpgen_bench.privacy.accountants.calibration import (
    LEAST_SHARE,
    BudgetExceeded,
    calibrate_share,
    calibrate_std,
    calibrate_times,
    is_nearly_spent,
)
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.bounds import Bound
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.expect import expect_integer, expect_name, expect_number
from dpgen_bench.privacy.ledger import Entry, Ledger
from dpgen_bench.privacy.rounded_normal import grid_step
from dpgen_bench.privacy.sampling import Sampling

FIRST_STAGE = "init_"  # how the names of a first stage's mechanisms begin
_ROUNDING = 1e-9  # tolerance of a sum of shares


@dataclass(frozen=True)
class Request:
    """A request of a method: `times` releases of values within `bound` on draws of `sample`, and their noise.

    It has copies of `sample` and `bound`, so that the method cannot change afterwards what was approved, not even by
    `object.__setattr__`.

    Raises:
        ValueError: for a name that cannot name a file, or `times`, `std` or `share` out of range.
    """

    name: str
    sample: Sampling
    bound: Bound
    times: int | None
    std: float | None
    share: float | None = None

    def __post_init__(self) -> None:
        who = f"mechanism {expect_name(self.name, 'a mechanism')!r}"
        object.__setattr__(self, "sample", copy.copy(self.sample))
        object.__setattr__(self, "bound", copy.copy(self.bound))
        if self.times is not None:
            advice = "give the number of releases, or leave it out and give std"
            object.__setattr__(self, "times", expect_integer(self.times, f"{who}, times", advice=advice))
        if self.std is not None:
            advice = "give the noise's standard deviation (0 for none), or leave it out and give times"
            limits = {"above": -math.ulp(0.0), "maximum": sys.float_info.max}
            object.__setattr__(self, "std", expect_number(self.std, f"{who}, std", **limits, advice=advice))
        if self.share is not None:
            advice = "give a share of the budget, or leave it out for all that is left"
            share = expect_number(self.share, f"{who}, share of the budget", above=0.0, maximum=1.0, advice=advice)
            object.__setattr__(self, "share", share)


def expect_no_release(ledger: Ledger, name: str) -> None:
    """Refuse a new mechanism after a release of this run; releases of a parent do not count.

    Its noise, its sampling or its number of releases could depend on what was released, and composition with such
    adaptive parameters is proven for Rényi DP, but not for all accountants (docs/accounting.md, assumption A1).
    """
    used = [earlier for earlier, entry in ledger.own.items() if entry.executed]
    if used:
        raise ValueError(
            f"expected all mechanisms to be requested before the first release, got a request for {name!r} after "
            f"releases of {', '.join(map(repr, used))}; request it at the beginning of `fit`, too."
        )


def plan_entry(ledger: Ledger, request: Request, spent: Sequence[Event] | None = None) -> Entry:
    """The entry for a request, within the ledger's budget; on resume, the entry that the ledger already holds.

    Args:
        spent: the events that were approved before, in the view of the adversary of the budget; None takes all events
            of the ledger.

    Raises:
        BudgetExceeded: if it would exceed the budget, or should take the rest of the budget and less than 1 % is left.
        ValueError: for a request that is incomplete or contradictory, differs from the approved one, or comes after a
            release of this run, or has noise that privacy.noise=os cannot sample.
    """
    approved = ledger.entries.get(request.name)
    if approved is not None:
        _expect_same(approved, request)
        return approved
    expect_no_release(ledger, request.name)
    if ledger.budget.epsilon is None:
        entry = _planned_without_budget(request)
    else:
        entry = _planned(ledger, request, ledger.events if spent is None else spent)
    if ledger.noise == "os" and entry.event.std > 0.0:
        grid_step(entry.event.std)  # raises here, because an error in a release marks the ledger
    return entry


def _planned(ledger: Ledger, request: Request, spent: Sequence[Event]) -> Entry:
    """The entry for a request within the ledger's budget; raises what `plan_entry` does."""
    if ledger.budget.epsilon == 0.0:
        raise BudgetExceeded(
            f"mechanism {request.name!r}: expected privacy.epsilon > 0 for a method that uses records, got 0, which no "
            "release fits; raise privacy.epsilon."
        )
    rest = _takes_the_rest(ledger, request)
    budget, sensitivity, times, std = ledger.budget, request.bound.sensitivity, request.times, request.std
    calibrated = "nothing"
    if std is None:
        assert times is not None
        # The noise is open: calibrate it to the rest of the budget, or to a share.
        if rest and times > 0 and is_nearly_spent(budget, spent):
            raise BudgetExceeded(
                f"mechanism {request.name!r} would take the rest of the budget (epsilon {budget.limit:g} at delta "
                f"{budget.delta:g}), which is less than {LEAST_SHARE:.0%} of it. {_remedy(ledger, request)}"
            )
        if rest:
            std = calibrate_std(budget, spent, request.sample, sensitivity, times)
        else:
            assert request.share is not None
            std = calibrate_share(budget, request.share, request.sample, sensitivity, times)
        calibrated = "std"
    elif times is None:
        if math.isinf(budget.limit):
            raise ValueError(
                f"mechanism {request.name!r}: expected `times` with an infinite budget, which does not limit the "
                "number of releases T, got None; give `times` (for the methods of the bench: method.steps)."
            )
        times, calibrated = calibrate_times(budget, spent, request.sample, sensitivity, std), "times"
    event = Event(request.sample, sensitivity, float(std), int(times))
    # What was calibrated to the rest of the budget fits by construction; everything else is checked.
    if (calibrated == "nothing" or not rest) and math.isfinite(budget.limit):
        cost = epsilon([*spent, event], budget.delta, budget.relation, budget.accountant)
        if cost > budget.limit:
            advice = "Make fewer releases, add more noise, or raise privacy.epsilon."
            raise BudgetExceeded(
                f"mechanism {request.name!r} ({times} releases, noise std {std:g}) would bring epsilon to {cost:.4g} "
                f"by {budget.accountant} under {budget.relation}; the budget is {budget.limit:g} at delta "
                f"{budget.delta:g}. {advice if request.share is None else _remedy(ledger, request)}"
            )
    return Entry(request.name, request.bound.describe(), event, calibrated=calibrated, share=request.share)


def _planned_without_budget(request: Request) -> Entry:
    """The entry for a request if privacy.epsilon is null: as stated, for any epsilon.

    Raises:
        ValueError: if the noise or the number of releases is not stated, or the release is not clipped or has no noise.
    """
    name, times, std = request.name, request.times, request.std
    if request.share is not None:
        raise ValueError(
            f"mechanism {name!r}: expected no share where privacy.epsilon is null, got share={request.share:g}: there "
            "is no budget to share. State std and times instead, or set privacy.epsilon to a number."
        )
    if times is None or std is None:
        raise ValueError(
            f"mechanism {name!r}: expected std and times where privacy.epsilon is null, got std={std} and "
            f"times={times}: without a budget, neither can be calibrated. State both (in a "
            "method's config: its noise multiplier and its steps), or set privacy.epsilon to a number."
        )
    sensitivity = request.bound.sensitivity
    if std == 0.0 or math.isinf(sensitivity.add_remove):
        what = "no noise (std=0)" if std == 0.0 else "a release that is not clipped"
        raise ValueError(
            f"mechanism {name!r}: expected clipping and noise where privacy.epsilon is null, got {what}, of which "
            "nothing is proven. State both, or set privacy.epsilon=inf to train without privacy."
        )
    event = Event(request.sample, sensitivity, std, times)
    return Entry(name, request.bound.describe(), event, calibrated="nothing", share=None)


def _takes_the_rest(ledger: Ledger, request: Request) -> bool:
    """Whether the request is for all that is left of the budget, not for a share of it; refuses what is neither."""
    name, share = request.name, request.share
    if share is None:
        if request.times is None and request.std is None:
            raise ValueError(
                f"mechanism {name!r}: expected `times`, `std` or both, got neither; one of them fixes the other "
                "through the budget."
            )
        return True
    if request.std is not None or request.times is None:
        raise ValueError(
            f"mechanism {name!r}: expected `times` and no `std` with share={share:g}, got times={request.times} and "
            f"std={request.std}: the share and the number of releases fix the noise."
        )
    others = own_shares(ledger)
    total = math.fsum([*others.values(), share])
    if total > 1.0 + _ROUNDING:
        stated = ", ".join(f"{other} {part:g}" for other, part in others.items())
        first_stage = any(other.startswith(FIRST_STAGE) for other in others)
        raise ValueError(
            f"mechanism {name!r}: expected shares of the budget that sum to at most 1, got {total:g} ({stated}, {name} "
            f"{share:g}). Lower one{' (that of the first stage is init.share)' if first_stage else ''}, or leave "
            "`share` out of the last mechanism, which then takes the rest."
        )
    return total >= 1.0 - _ROUNDING


def own_shares(ledger: Ledger) -> dict[str, float]:
    """Shares of the run's own mechanisms by name."""
    return {name: entry.share for name, entry in ledger.own.items() if entry.share is not None}


def _remedy(ledger: Ledger, request: Request) -> str:
    """A sentence for an error: which mechanisms use the budget, and how to leave a part of it for the request."""
    own = ledger.own.values()
    took_rest = [entry for entry in own if entry.share is None and entry.calibrated != "nothing"]
    stated = [entry for entry in own if entry.calibrated == "nothing"]
    inherited = sorted({entry.inherited_from for entry in ledger.entries.values() if entry.inherited_from is not None})
    if took_rest:
        name = took_rest[-1].name
        here = "no `share` here" if request.share is None else f"share={request.share:g} here"
        return (
            f"Mechanism {name!r} was declared without a share and took the rest of the budget. Give it a share: "
            f"data.mechanism({name!r}, ..., times={took_rest[-1].event.times}, share=0.5), and {here}."
        )
    if stated:
        names = ", ".join(f"{e.name!r} (std={e.event.std:g}, times={e.event.times})" for e in stated)
        return f"The noise of {names} was stated and uses the budget: state more noise, or give share=0.5 instead."
    if inherited:
        return f"The run restarts from {', '.join(inherited)}, which used the budget: raise privacy.epsilon."
    shares = ", ".join(f"{name} {share:g}" for name, share in own_shares(ledger).items())
    return (
        f"The shares of the others ({shares}) leave too little: lower them, or leave `share` out of the last "
        "mechanism, which then takes the rest."
    )


def _expect_same(entry: Entry, request: Request) -> None:
    """Refuse, on resume, a request that differs from the allowance that the ledger holds."""
    event = entry.event
    same = event.sampling == request.sample and event.sensitivity == request.bound.sensitivity
    same = same and request.times in (None, event.times) and request.std in (None, event.std)
    if not same or entry.share != request.share:
        raise ValueError(
            f"mechanism {entry.name!r} was approved as {entry.to_dict()} and is now requested with another plan; "
            "a resumed run must make the same requests. Start a new run instead."
        )

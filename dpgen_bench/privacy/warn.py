"""Warnings about settings, written into the ledger when a mechanism is approved or a fit has ended."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from dpgen_bench.privacy.accountants.calibration import LEAST_SHARE, is_nearly_spent
from dpgen_bench.privacy.accountants.proven import NotCovered
from dpgen_bench.privacy.events import RELATIONS, Relation
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.planning import own_shares
from dpgen_bench.privacy.sampling import EveryShard, OneShard

CHANGES: dict[Relation, str] = {
    "add_remove": "adding or removing a record",
    "replace_one": "exchanging a record for one of another content or class",
}


def warn_of_settings(ledger: Ledger, name: str, keep_ids: Sequence[Relation] = RELATIONS) -> None:
    """Write the warnings about the newly approved entry `name`; those about privacy only if the budget is finite.

    Args:
        keep_ids: the relations under which all other records keep their ids, see `Records`.
    """
    budget, entry = ledger.budget, ledger.entries[name]
    shards = sampling.shards if isinstance(sampling := entry.event.sampling, OneShard | EveryShard) else 0
    if shards > ledger.records > 0:
        ledger.warn(
            f"{name!r} divides {ledger.records} records into {shards} shards, so at least "
            f"{shards - ledger.records} of them have no record, and what is trained on these learns nothing "
            "from records. Set fewer shards."
        )
    if budget.without_privacy:
        return
    if ledger.records > 0 and budget.delta >= 1.0 / ledger.records:
        ledger.warn(
            f"delta = {budget.delta:g} is not below 1/n = {1.0 / ledger.records:.3g}, where n is the number of "
            f"{ledger.unit}s: a mechanism that publishes the data of one {ledger.unit} at random satisfies this "
            "(epsilon, delta). Set privacy.delta well below 1/n."
        )
    if shards and budget.relation not in keep_ids:
        instead = "Set privacy.relation=replace_one, or give" if "replace_one" in keep_ids else "Give"
        ledger.warn(
            f"{name!r} assigns records to shards by their place in the data set, so {CHANGES[budget.relation]} moves "
            f"later ones to other shards. Epsilon under {budget.relation} does not cover this: it holds for records "
            f"that keep their ids. {instead} records permanent ids (docs/extend/dataset.md#ids-of-records)."
        )
    if len(ledger.entries) > 1:
        _warn_of_small_rests(ledger)


def _warn_of_small_rests(ledger: Ledger) -> None:
    """Warn of each release for which the others leave less than 1 % of the budget, by `is_nearly_spent`."""
    for name in ledger.entries:
        others = [entry.event for other, entry in ledger.entries.items() if other != name]
        with contextlib.suppress(NotCovered):  # the budget cannot be enforced on these events either
            if is_nearly_spent(ledger.budget, others):
                ledger.warn(
                    f"the other releases leave less than {LEAST_SHARE:.0%} of the budget (a share of mu squared, see "
                    f"docs/privacy.md) to {name!r}, whose noise is therefore much larger than the whole budget would "
                    "need: divide the budget by share=... or by other noise."
                )


def warn_of_unused_shares(ledger: Ledger) -> None:
    """Warn, when a fit has ended, of shares that sum to less than 1 if at least 1 % of the budget was left unused.

    Only then is it known that no other mechanism takes the rest.
    """
    shares = own_shares(ledger)
    own = ledger.own.values()
    took_the_rest = any(entry.share is None and entry.calibrated != "nothing" for entry in own)
    if not shares or took_the_rest or math.isinf(ledger.budget.limit):
        return
    # The ledger does not say whether the adversary of the budget is the server; if so, the server's view is spent.
    views = [ledger.events, ledger.events_seen_by_server()]
    with contextlib.suppress(NotCovered):
        if not any(is_nearly_spent(ledger.budget, events) for events in views if events is not None):
            parts, total = ", ".join(f"{name} {share:g}" for name, share in shares.items()), math.fsum(shares.values())
            ledger.warn(
                f"the shares of the budget sum to {total:g} ({parts}) and no mechanism took the rest, so at least "
                f"{LEAST_SHARE:.0%} of the budget (a share of mu squared, see docs/privacy.md) is unused and the noise "
                "is larger than necessary: leave `share` out of the last mechanism, which then takes the rest, or "
                "raise the shares to a sum of 1."
            )

"""The privacy figures of a trained run, computed from its ledger and written into it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpgen_bench.method import Method
from dpgen_bench.privacy.accountants.proven import NotCovered, epsilon
from dpgen_bench.privacy.accountants.table import claimed_epsilon, conditional_epsilon, epsilon_table
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.runs.config import RunSpec
from dpgen_bench.runs.store import RunFolder


def account_run(spec: RunSpec, folder: RunFolder) -> None:
    """Write the privacy figures into the ledger: proven by the budget's accountant, claimed, conditional, the table.

    "proven" is "inf" and "reason" says why if the ledger is marked as unproven, or if the budget's accountant does not
    cover what was released (only an infinite budget lets that happen). "proven" is against outsiders, who see what the
    run releases; where the unit is the client, "server" has the value against the server.
    """
    ledger = Ledger.load(folder.path / "ledger.json")
    if ledger.epsilon is not None:
        return
    budget, events = ledger.budget, ledger.events
    method: Method = spec.method()
    proven, why = _proven(ledger, events)
    figures: dict[str, Any] = {"proven": proven, **why}
    if ledger.unit == "client":
        seen = ledger.events_seen_by_server()
        theirs, why = ("inf", {"reason": TRUSTED}) if seen is None else _proven(ledger, seen)
        figures["server"] = {"epsilon": theirs, **why}
    cache = Path(str(spec.config.results)) / "cache" / "epsilon.json"
    ledger.epsilon = {
        **figures,
        "claimed": _tried(lambda: claimed_epsilon(method, events, budget.delta)),
        "conditional": _tried(lambda: conditional_epsilon(method, events, budget.delta)),
        "delta": budget.delta,
        "relation": budget.relation,
        "accountant": budget.accountant,
        "table": epsilon_table(events, budget.delta, float(spec.config.runtime.account_s), cache=cache),
    }
    ledger.save()


TRUSTED = "the server is trusted: it adds the noise itself, to what it has seen"


def _proven(ledger: Ledger, events: Sequence[Event]) -> tuple[float | str | None, dict[str, str]]:
    """Epsilon of the events, or "inf" and {"reason": in words}."""
    budget = ledger.budget
    if ledger.unproven:
        return "inf", {"reason": "; ".join(ledger.unproven)}
    try:
        return _word(epsilon(events, budget.delta, budget.relation, budget.accountant)), {}
    except NotCovered as failure:
        return "inf", {"reason": str(failure)}


def _tried(figure: Callable[[], Any]) -> Any:
    """The figure, or how it failed: it is an ornament, for which a run must not be lost."""
    try:
        return figure()
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def _word(value: float | None) -> float | str | None:
    return "inf" if value is not None and math.isinf(value) else value

"""Computes the epsilons of a trained run from its ledger, and writes them into the ledger."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpgen_bench.config.spec import RunSpec
from dpgen_bench.method import Method
from dpgen_bench.privacy.accountants.proven import NotCovered, epsilon
from dpgen_bench.privacy.accountants.table import claimed_epsilon, conditional_epsilon, epsilon_table
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.store.folders import RunFolder
from dpgen_bench.utils.json_numbers import to_json


def account_run(spec: RunSpec, folder: RunFolder) -> None:
    """Write a run's epsilons into its ledger: proven by the budget's accountant, claimed, conditional, and a table.

    "proven" holds against outsiders, who see what the run releases. If the unit of privacy is the client, "server" has
    the epsilon against the server. Where nothing is proven, the value is "inf" and "reason" states why: the ledger is
    marked as unproven, or the budget's accountant does not cover the releases (possible only with an infinite budget).
    """
    ledger = Ledger.load(folder.path / "ledger.json")
    if ledger.epsilon is not None:
        return
    cache = Path(str(spec.config.results)) / "cache" / "epsilon.json"
    ledger.epsilon = epsilons(spec.method(), ledger, float(spec.config.runtime.account_s), cache)
    ledger.save()


def epsilons(method: Method, ledger: Ledger, timeout_s: float, cache: Path | None) -> dict[str, Any]:
    """All epsilons of a ledger's approved allowances, as `account_run` describes them.

    Args:
        timeout_s: limit in seconds of each cell of the table.
        cache: a file with epsilons that are known, or None.
    """
    budget, events = ledger.budget, ledger.events
    proven, reason = _proven(ledger, events)
    values: dict[str, Any] = {"proven": proven, **reason}
    if ledger.unit == "client":
        seen = ledger.events_seen_by_server()
        against_server, reason = ("inf", {"reason": TRUSTED}) if seen is None else _proven(ledger, seen)
        values["server"] = {"epsilon": against_server, **reason}
    return {
        **values,
        "claimed": _value_or_error(lambda: claimed_epsilon(method, events, budget.delta)),
        "conditional": _value_or_error(lambda: conditional_epsilon(method, events, budget.delta)),
        "delta": budget.delta,
        "relation": budget.relation,
        "accountant": budget.accountant,
        "table": epsilon_table(events, budget.delta, timeout_s, cache=cache),
    }


TRUSTED = "the server is trusted: it adds the noise itself, to what it has seen"


def _proven(ledger: Ledger, events: Sequence[Event]) -> tuple[float | str | None, dict[str, str]]:
    """Epsilon of the events and {}; or "inf" and {"reason": why nothing is proven}."""
    budget = ledger.budget
    if ledger.unproven:
        return "inf", {"reason": "; ".join(ledger.unproven)}
    try:
        return to_json(epsilon(events, budget.delta, budget.relation, budget.accountant)), {}
    except NotCovered as failure:
        return "inf", {"reason": str(failure)}


def spent_by(ledger: Ledger, executed: Mapping[str, int]) -> float:
    """Proven epsilon of a ledger's inherited entries and of the releases made so far; infinite if nothing is proven.

    It describes one moment of a run, for displays. It does not lower the epsilon of the run, whose allowances were
    approved in full.

    Args:
        executed: the number of releases of each mechanism.
    """
    if ledger.unproven:
        return math.inf
    made = [replace(entry.event, times=executed[name]) for name, entry in ledger.own.items() if executed.get(name)]
    inherited = [entry.event for entry in ledger.entries.values() if entry.inherited_from]
    budget = ledger.budget
    try:
        return epsilon([*inherited, *made], budget.delta, budget.relation, budget.accountant)
    except NotCovered:  # possible only with an infinite budget
        return math.inf


def _value_or_error(compute: Callable[[], Any]) -> Any:
    """The computed value, or "failed: ERROR": a failure here must not lose a trained run."""
    try:
        return compute()
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"

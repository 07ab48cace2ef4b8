"""What a run's ledger says of itself: whether it proves what was configured, and whether images may be given away."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from dpgen_bench.privacy.events import budget_text
from dpgen_bench.privacy.ledger import entry_modes, unproven_reasons
from dpgen_bench.runs.listing import epsilon_number


def budget_problem(ledger: Mapping[str, Any], privacy: DictConfig, unit: str | None = None) -> str:
    """Why a ledger, by its own words, does not prove the budget that the run was configured with; "" if it does.

    Its words are believed: whoever edits a ledger by hand can lie here.

    Args:
        privacy: the run's configuration of that name; with an infinite budget nothing needs to be proven, and
            without a budget (epsilon null) any finite epsilon will do.
        unit: whom the figures must protect; None: anyone.
    """
    if "unit" not in ledger or not isinstance(ledger.get("budget"), dict):
        return "its ledger says no unit or no budget"
    if unit is not None and ledger["unit"] != unit:
        return f"its epsilon protects a {ledger['unit']}, not a {unit}"
    epsilon = ledger.get("epsilon") or {}
    budget = None if privacy.epsilon is None else float(privacy.epsilon)
    said = ledger["budget"].get("epsilon")
    approved = None if said is None and "epsilon" in ledger["budget"] else _number(said)
    if approved != budget:
        return f"its ledger has a budget of {budget_text(approved)}, not {budget_text(budget)}"
    if budget is not None and math.isinf(budget):
        return ""
    if reasons := unproven_reasons(ledger):
        return f"nothing is proven: {'; '.join(reasons)}"
    if not epsilon:
        return "nothing is proven"
    for key in ("relation", "delta", "accountant"):
        # The budget is what was approved, and `epsilon` repeats what its figures were counted by.
        for said in (ledger["budget"], epsilon):
            if said.get(key) != privacy[key]:
                return f"its ledger counts by {key} {said.get(key, 'unknown')}, not {privacy[key]}"
    proven = epsilon_number(epsilon, "proven")
    if proven is None or not math.isfinite(proven):
        return "nothing is proven"
    return f"proven {proven:.4g} is above {budget:g}" if budget is not None and proven > budget else ""


def release_problems(ledger: Mapping[str, Any]) -> list[str]:
    """Why images of a run must not be given away as private, by all entries of its ledger; [] if they may.

    Args:
        ledger: the content of ledger.json. An entry that was inherited counts as much as one of the run's own.
    """
    reasons = []
    for entry in [{}, *ledger.get("entries", [])]:  # first the run itself, which may have no entry
        noise, diagnostics = entry_modes(entry, ledger)
        inherited = f" of {entry['name']!r}, which it inherited," if entry.get("inherited_from") else ""
        if noise == "seeded":
            reasons.append(f"its noise{inherited} is 'seeded', a function of the run id, and can be subtracted")
        elif noise != "os":
            reasons.append(f"its ledger, of an older version, does not say how the noise{inherited} was made")
        if diagnostics == "unsafe":
            reasons.append(f"private diagnostics{inherited} were kept")
    epsilon = ledger.get("epsilon")
    if not epsilon or epsilon.get("proven") in (None, "inf") or unproven_reasons(ledger):
        reasons.append("its proven epsilon is infinite" if epsilon else "its epsilon was not computed")
    return list(dict.fromkeys(reasons))


def diagnostics_kept(ledger: Mapping[str, Any]) -> bool:
    """Whether private diagnostics were kept of any release that the ledger has."""
    kept = [row["diagnostics"] for row in ledger.get("entries", []) if row.get("diagnostics") is not None]
    return any(mode != "off" for mode in [ledger.get("diagnostics"), *kept])


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan

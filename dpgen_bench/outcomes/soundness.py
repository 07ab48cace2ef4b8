"""Conclusions from a run's ledger: whether it proves the configured budget, and whether images may be released.

The functions take the content of ledger.json as it is. They cannot detect that a ledger was edited by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from dpgen_bench.config.display import relation_name
from dpgen_bench.outcomes.listing import epsilon_number
from dpgen_bench.privacy.events import budget_text
from dpgen_bench.privacy.ledger import entry_modes, unproven_reasons


def budget_problem(ledger: Mapping[str, Any], privacy: DictConfig, unit: str | None = None) -> str:
    """Why a ledger does not prove the budget that the run was configured with; "" if it does.

    Args:
        ledger: the content of ledger.json.
        privacy: the `privacy` group of the run's config. With an infinite budget nothing needs to be proven; without a
            budget (epsilon null) any finite epsilon is enough.
        unit: the unit of privacy that is required, "record" or "client"; None accepts either.
    """
    if "unit" not in ledger or not isinstance(ledger.get("budget"), dict):
        return "its ledger lacks the unit or the budget"
    if unit is not None and ledger["unit"] != unit:
        return f"its epsilon protects a {ledger['unit']}, not a {unit}"
    epsilon = ledger.get("epsilon") or {}
    budget = None if privacy.epsilon is None else float(privacy.epsilon)
    stated = ledger["budget"].get("epsilon")
    approved = None if stated is None and "epsilon" in ledger["budget"] else _number(stated)
    if approved != budget:
        return f"its ledger has a budget of {budget_text(approved)}, not {budget_text(budget)}"
    if budget is not None and math.isinf(budget):
        return ""
    if reasons := unproven_reasons(ledger):
        return f"nothing is proven: {'; '.join(reasons)}"
    if not epsilon:
        return "nothing is proven"
    for key in ("relation", "delta", "accountant"):
        # The budget was approved with these settings, and `epsilon` states those that it was computed with.
        for part in (ledger["budget"], epsilon):
            if part.get(key) != privacy[key]:
                stated, wanted = (relation_name(str(value)) for value in (part.get(key, "unknown"), privacy[key]))
                return f"its ledger counts by {key} {stated}, not {wanted}"
    proven = epsilon_number(epsilon, "proven")
    if proven is None or not math.isfinite(proven):
        return "nothing is proven"
    return f"proven {proven:.4g} is above {budget:g}" if budget is not None and proven > budget else ""


def release_problems(ledger: Mapping[str, Any]) -> list[str]:
    """Why images of a run must not be released as private; [] if they may be.

    Args:
        ledger: the content of ledger.json. Entries that were inherited from a parent run count as the run's own.
    """
    reasons = []
    for entry in [{}, *ledger.get("entries", [])]:  # {} stands for the run itself, which may have no entry
        noise, diagnostics = entry_modes(entry, ledger)
        inherited = f" of {entry['name']!r}, which it inherited," if entry.get("inherited_from") else ""
        if noise == "seeded":
            reasons.append(f"its noise{inherited} is 'seeded', a function of the run id, and can be subtracted")
        elif noise != "os":
            reasons.append(f"its ledger, of an older version, does not state the mode of the noise{inherited}")
        if diagnostics == "unsafe":
            reasons.append(f"private diagnostics{inherited} were kept")
    epsilon = ledger.get("epsilon")
    if not epsilon or epsilon.get("proven") in (None, "inf") or unproven_reasons(ledger):
        reasons.append("its proven epsilon is infinite" if epsilon else "its epsilon was not computed")
    return list(dict.fromkeys(reasons))


def diagnostics_kept(ledger: Mapping[str, Any]) -> bool:
    """Whether private diagnostics were kept for any release in the ledger."""
    entries = [entry["diagnostics"] for entry in ledger.get("entries", []) if entry.get("diagnostics") is not None]
    return any(mode != "off" for mode in [ledger.get("diagnostics"), *entries])


def _number(value: Any) -> float:
    """The value as a float; NaN if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan

"""Name a table's lines for readers: data set, method and epsilons, and whether a line is an end of the scale."""

from __future__ import annotations

import math
from typing import Any

from dpgen_bench.config.display import dataset_name, method_name
from dpgen_bench.outcomes.listing import (
    NOT_AUDITED,
    describe_audit,
    first_stage,
    format_certified,
    format_epsilon,
    least_certified,
)
from dpgen_bench.privacy.events import Relation, budget_text
from dpgen_bench.tables.lines import NONE, Line
from dpgen_bench.tables.rows import TableRow

REAL = "real_data"  # the method whose samples are the records themselves
REAL_ROWS = ("Real", "Real data")  # and the names of its rows in the papers
DATASETS = {"FashionMNIST": "Fashion-MNIST"}  # names in results/published that are not the ones for readers

METHODS = {"DP-Merf": "DP-MERF", "DP-Merf AE": "DP-MERF AE", "DataLens": "Datalens"}
VARIANTS = {"DP-MERF code_balanced rerun": "its authors' code, balanced labels"}
SYMBOLS = {"sigma": "σ", "Delta": "Δ", "FMNIST": "Fashion-MNIST"}  # in names of variants


def dataset_of(line: Line) -> str:
    """A line's data set for readers."""
    if line.printed is not None:
        return DATASETS.get(line.printed.dataset, line.printed.dataset)
    name, _, selection = line.head["dataset"].partition(" ")
    return " ".join(filter(None, [dataset_name(name), selection]))


def method_of(line: Line) -> str:
    """A line's method for readers: of a printed row its name there, in the spelling of its own paper."""
    if line.printed is not None:
        return METHODS.get(line.printed.method, line.printed.method)
    if line.row is None:
        return line.head["method"]
    config = line.row.specs[0].config
    stage = first_stage(config)
    return method_name(str(config.method.name)) + ("" if stage == "none" else f", init={stage}")


def variant_of(line: Line) -> str:
    """The variant of a printed row for readers; "" if it has none."""
    if line.printed is None:
        return ""
    variant = VARIANTS.get(line.printed.variant, line.printed.variant)
    for word, symbol in SYMBOLS.items():
        variant = variant.replace(word, symbol)
    return variant


def group_of(line: Line) -> str:
    """The epsilon that a reader compares lines at: the printed one, or else the budget."""
    if line.printed is not None:
        return line.printed.epsilon
    return line.head.get("ε budget", NONE)


def budget_of(line: Line) -> float | None:
    """The epsilon of the budget of a line's runs; None without runs or without a budget."""
    epsilon = line.row.specs[0].config.privacy.epsilon if line.row else None
    return None if epsilon is None else float(epsilon)


def is_real_data(line: Line) -> bool:
    """Whether the line measures the records themselves."""
    if line.row is not None and str(line.row.specs[0].config.method.name) == REAL:
        return True
    return line.printed is not None and line.printed.method in REAL_ROWS


def uses_no_records(line: Line) -> bool:
    """Whether the line's runs are proven to reveal nothing: their epsilon is 0."""
    if line.row is None:
        return False
    return line.row.epsilon_value("proven") == 0.0 or line.row.specs[0].config.privacy.epsilon == 0


def has_public_data_of(line: Line, other: Line) -> bool:
    """Whether the other line uses no public data, or the same as the line."""
    if line.row is None or other.row is None:
        return False
    return not other.row.public_data or _public_data(line.row) == _public_data(other.row)


def _public_data(row: TableRow) -> tuple[object, ...]:
    """What a row's method declares to use besides the records, and the digests of its files (the class's `places`)."""
    spec = row.specs[0]
    digests = getattr(spec.method_class(), "places", {}).values()
    return row.public_data, *(spec.config.method.get(digest) for digest in digests)


def rank_of(line: Line) -> int:
    """Real data is the upper end and comes first; what uses no records is the lower end and comes last."""
    return 0 if is_real_data(line) else 2 if uses_no_records(line) else 1


def is_measured(line: Line) -> bool:
    """Whether a run of the line has values."""
    return line.row is not None and bool(line.row.measured)


def epsilon_of(line: Line) -> str:
    """`10 → 888`: the epsilon that the paper claims, and the one that the ledgers of the runs prove.

    A line without a claim has a dash in its place, and so has one whose runs are not made. `∞` is without privacy. What
    other runs prove that stand in is marked, because their noise need not be that of the claim.
    """
    row = line.row
    if line.printed is not None:
        claimed = _infinite(line.printed.epsilon or NONE)
    elif is_measured(line) and row is not None:
        claimed = _infinite(_short(row.epsilon("claimed")))
    else:
        budget = _infinite(budget_text(row.specs[0].config.privacy.epsilon)) if row else NONE
        return budget if budget in ("∞", NONE) else f"{budget} (budget)"
    proven = _infinite(_short(row.epsilon("proven"))) if row is not None and is_measured(line) else NONE
    without = row is not None and row.specs[0].config.privacy.epsilon == math.inf
    if claimed == "∞" or (without and proven == "∞"):
        return "∞"
    return proven if proven == "0" and claimed in (NONE, "0") else f"{claimed} → {proven}{_mark(line)}"


def _mark(line: Line) -> str:
    return f" ({line.stands_in})" if line.is_of_other_runs else ""


def _infinite(text: str) -> str:
    return {"inf": "∞"}.get(text, text)


def _short(text: str) -> str:
    return "failed" if text.startswith("failed") else text


def epsilon_notes(line: Line) -> list[str]:
    """The other epsilons of a line's runs, and accounting that failed."""
    row = line.row
    if row is None or not row.measured:
        return []
    texts = []
    for name, text in (("server", "ε against the server"), ("conditional", "conditional ε")):
        value = row.epsilon_value(name)
        if value is not None:
            texts.append(f"{text}: {_infinite(format_epsilon(value))}")
    failed = [row.epsilon(name) for name in ("proven", "claimed")]
    return [*texts, *dict.fromkeys(text for text in failed if text.startswith("failed"))]


def proven_under(row: TableRow, relation: Relation) -> float | None:
    """The largest epsilon that the measured runs' ledgers prove under a relation, by the accountant of their budgets.

    None without a run, or if the ledger of none has a number for it.
    """
    found = [each.get("table", {}).get(relation, {}).get(each.get("accountant")) for each in row.epsilons]
    return max((float(value) for value in found if isinstance(value, float | int)), default=None)


def certified(row: TableRow | None) -> dict[str, Any]:
    """What audits certified for a row's settings: of its runs' values the least; {} if no run was audited."""
    return least_certified(row.epsilons) if row else {}


def certified_of(line: Line) -> str:
    """`≥ 0.64`: what audits showed the mechanisms of a line's runs to leak at least, or that they were not audited."""
    if not is_measured(line):
        return NONE
    bound = certified(line.row).get("epsilon")
    return _infinite(format_certified(bound)) + ("" if bound is None else _mark(line))


def certified_notes(line: Line) -> list[str]:
    """How the epsilon of `certified_of` was certified, or why there was nothing to audit."""
    audit = certified(line.row)
    if "reason" in audit:
        return [f"{NOT_AUDITED.capitalize()}: {audit['reason']}."]
    return [f"Certified {describe_audit(audit)}."] if audit else []

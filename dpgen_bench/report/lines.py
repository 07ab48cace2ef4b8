"""The report's leaderboard: finished runs grouped into lines, with the keys by which the page filters them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpgen_bench.report.runs import Run
from dpgen_bench.report.text import describe_value, described, flatten, once, plain
from dpgen_bench.runs.listing import describe_dataset, epsilon_entry, format_epsilon, is_changed
from dpgen_bench.runs.measurements import Measurement, Protocol, protocol_hash
from dpgen_bench.runs.soundness import budget_problem
from dpgen_bench.runs.statistics import summarise
from dpgen_bench.runs.values import metric_values
from dpgen_bench.training.cost import cost_values

# Headings of the columns by key. Metrics and costs come last.
TEXT_COLUMNS = {
    "method": "method",
    "dataset": "dataset",
    "epsilon": "ε budget",
    "proven": "ε proven",
    "claimed": "ε claimed",
    "relation": "relation, δ, by",
    "unit": "unit",
    "scale": "scale",
    "protocol": "protocol",
    "seeds": "seeds",
}
METRIC_COLUMNS = {
    "fid": "FID",
    "inception_score": "IS",
    "acc_logreg_pct": "logreg %",
    "acc_mlp_pct": "MLP %",
    "acc_cnn_pct": "CNN %",
    "acc_avg_pct": "average %",
    "seconds_total": "seconds",
    "parameters_released_generator": "generator's parameters",
}
NUMBERS = ("epsilon", "proven", "claimed", "seeds", *METRIC_COLUMNS)
FILTERS = {
    "dataset": "dataset",
    "epsilon": "ε budget",
    "protocol": "protocol",
    "scale": "scale",
    "unit": "unit",
    "relation": "relation",
    "method": "method",
}
# What lines must share to be comparable, by key, with the plural that the page shows. Budgets may differ.
TERMS = {
    "dataset": "data sets",
    "relation": "relations",
    "delta": "values of δ",
    "accountant": "accountants",
    "unit": "units",
    "protocol": "protocols",
    "scale": "scales",
}
COUNTED = ("relation", "delta", "accountant")  # the terms that a ledger has
NO_RELATION = "none (no privacy)"  # an infinite budget bounds no difference between neighbours

# Keys of the identity that have a column, or that are not settings of a method.
_ELSEWHERE = {
    *("seed", "method.name", "method._target_", "dataset.name", "dataset.select", "scale.name", "training_version"),
    *(f"privacy.{name}" for name in ("epsilon", "delta", "relation", "accountant")),
}


@dataclass(frozen=True)
class _Line:
    """Runs that differ in seed alone, with the measurement of each by one protocol (None: not measured)."""

    runs: tuple[Run, ...]
    measurements: tuple[Measurement | None, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def measurement(self) -> Measurement | None:
        return self.measurements[0]

    @property
    def family(self) -> tuple[str, ...]:
        """What a line shares with those from which its settings must distinguish it."""
        config = self.first.config
        return str(config.method.name), describe_dataset(config), str(config.scale.name), self.first.budget

    @property
    def settings(self) -> dict[str, str]:
        flat = flatten(self.first.identity)
        texts = {name: describe_value(value) for name, value in flat.items() if name not in _ELSEWHERE}
        return {**texts, "version": texts.get("version", "")[:6]}


def leaderboard(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One line per settings and protocol, by data set, protocol, epsilon, method, then settings; JSON-able.

    Each line has `filters` (the keys by which the page filters), `terms` (see `TERMS`; None for the terms of privacy in
    a line without privacy), `cells` {column: {"text", "value", "detail" if any}} where value is a number, "inf", a text
    or None, `settings` (those in which it differs from similar lines), `runs` [{"id", "seed"}] and `stale`.
    """
    grouped: dict[str, list[tuple[Run, Measurement | None]]] = {}
    for run in runs:
        if run.state == "finished":
            measurements: list[Measurement | None] = [*run.measurements]
            for measurement in measurements or [None]:
                key = [measurement and measurement["protocol"], {**run.identity, "seed": None}]
                grouped.setdefault(json.dumps(plain(key)), []).append((run, measurement))
    unnamed = []
    for pairs in grouped.values():
        ordered = sorted(pairs, key=lambda pair: (int(pair[0].config.seed), pair[0].id))
        unnamed.append(_Line(tuple(run for run, _ in ordered), tuple(measurement for _, measurement in ordered)))
    families: dict[tuple[str, ...], list[_Line]] = {}
    for each in unnamed:
        families.setdefault(each.family, []).append(each)
    lines = [_content(each, _varying(families[each.family])) for each in unnamed]
    return sorted(lines, key=_order)


def _order(line: Mapping[str, Any]) -> tuple[Any, ...]:
    filters = line["filters"]
    budget = math.inf if filters["epsilon"] == "none" else float(filters["epsilon"])
    key = filters["dataset"], filters["protocol"], budget, filters["method"]
    return *key, line["settings"], [run["id"] for run in line["runs"]]


def _varying(lines: Sequence[_Line]) -> set[str]:
    """Names of the settings that are not the same in all of these lines."""
    every = [line.settings for line in lines]
    names = {name for settings in every for name in settings}
    return {name for name in names if len({settings.get(name) for settings in every}) > 1}


def _content(line: _Line, varying: set[str]) -> dict[str, Any]:
    run, config = line.first, line.first.config
    private = run.budget != "inf"
    counted = {key: _together(_counted_by(each)[key] for each in line.runs) for key in COUNTED}
    relation = counted["relation"] if private else NO_RELATION
    record = line.measurement and line.measurement["protocol"]
    protocol = _protocol(record) if record else "not measured"
    # The seeds of a line may differ in what they proved; the line shows the largest epsilon.
    worst = max(line.runs, key=lambda each: _number(each.epsilon.get("proven"), math.inf))
    texts = {
        "method": str(config.method.name),
        "dataset": describe_dataset(config),
        "relation": ", ".join(counted.values()) if private else "–",
        "unit": _together(each.unit for each in line.runs),
        "scale": str(config.scale.name),
        "protocol": protocol,
    }
    # "text" is printed, "value" is what the column is sorted by.
    cells: dict[str, dict[str, Any]] = {name: {"text": text, "value": text} for name, text in texts.items()}
    terms = {**{name: texts.get(name) for name in TERMS}, **(counted if private else dict.fromkeys(counted))}
    cells["epsilon"] = {"text": run.budget, "value": None if run.budget == "none" else plain(float(run.budget))}
    cells["proven"] = {"text": _epsilon(worst, "proven"), "value": _sortable(worst, "proven")}
    cells["claimed"] = {"text": _epsilon(worst, "claimed"), "value": _sortable(worst, "claimed")}
    # Epsilons under other assumptions stand below the main ones, as details.
    for column, other, text_of in (
        ("proven", "server", "against the server"),
        ("claimed", "conditional", "conditional"),
    ):
        if private and epsilon_entry(worst.epsilon, other) is not None:
            cells[column]["detail"] = f"{_epsilon(worst, other)} {text_of}"
    if private and (why := _not_as_configured(line)):
        cells["proven"]["detail"] = "; ".join(filter(None, [cells["proven"].get("detail"), why]))
    cells["seeds"] = {"text": str(len(line.runs)), "value": len(line.runs)}
    cells.update(_metric_cells(line))
    return {
        "filters": {name: relation if name == "relation" else texts.get(name, run.budget) for name in FILTERS},
        "terms": terms,
        "cells": cells,
        "settings": ", ".join(
            f"{name.removeprefix('method.')}={text}" for name, text in sorted(line.settings.items()) if name in varying
        ),
        "stale": run.stale,
        "runs": [{"id": each.id, "seed": str(each.config.seed)} for each in line.runs],
    }


def _counted_by(run: Run) -> dict[str, str]:
    """The terms of `COUNTED` from the run's ledger, or from its config if the ledger lacks them."""
    terms: dict[str, str] = {}
    for key in COUNTED:
        sources = (run.epsilon, run.ledger.get("budget") or {}, run.identity["privacy"])
        values = (source.get(key) for source in sources)
        terms[key] = describe_value(next((value for value in values if value is not None), None))
    return terms


def _together(texts: Iterable[str]) -> str:
    """The text that the runs of a line share; all texts if they differ, which no comparable line has."""
    return " / ".join(once(texts))


def _not_as_configured(line: _Line) -> str:
    """The seeds whose ledgers fall short of the configured budget, and why; "" if there are none."""
    reasons: dict[str, list[str]] = {}
    for run in line.runs:
        if why := budget_problem(run.ledger, run.config.privacy):
            reasons.setdefault(why, []).append(str(run.config.seed))
    parts = (f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}: {why}" for why, seeds in reasons.items())
    return f"not as configured: {'; '.join(parts)}" if reasons else ""


def _protocol(record: Protocol) -> str:
    """The protocol's name; if its text has changed since, with a hash that tells changed texts apart."""
    if not is_changed(record):
        return str(record["name"])
    return f"{record['name']} (changed: {protocol_hash(record)})"


def _metric_cells(line: _Line) -> dict[str, dict[str, Any]]:
    """The cells of `METRIC_COLUMNS`: mean and spreads, and how many seeds have the metric if not all do."""
    known = [
        {
            **{name: [value] for name, value in cost_values(run.training).items()},
            **(metric_values(measurement) if measurement else {}),
        }
        for run, measurement in zip(line.runs, line.measurements, strict=True)
    ]
    cells: dict[str, dict[str, Any]] = {}
    for name in METRIC_COLUMNS:
        values = [each[name] for each in known if name in each]
        if not values:
            cells[name] = {"text": "–", "value": None}
            continue
        summary = summarise(values)
        some = f" ({summary.seeds} of {len(line.runs)} seeds)" if summary.seeds < len(line.runs) else ""
        cells[name] = {"text": described(summary) + some, "value": plain(summary.mean)}
    return cells


def _epsilon(run: Run, name: str) -> str:
    return format_epsilon(epsilon_entry(run.epsilon, name))


def _sortable(run: Run, name: str) -> float | str | None:
    value = _number(epsilon_entry(run.epsilon, name), math.nan)
    return None if math.isnan(value) else plain(value)


def _number(value: Any, otherwise: float) -> float:
    """The value as a number, or `otherwise` for None and for texts such as `failed: ...`."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return otherwise

"""The report's leaderboard: finished runs put into lines as a table's rows are, with what the page filters by."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpgen_bench.report.runs import Run
from dpgen_bench.report.text import describe_value, described, flatten, once, plain
from dpgen_bench.runs.listing import describe_dataset, epsilon_entry, format_epsilon, is_changed
from dpgen_bench.runs.measurements import Measurement, Protocol
from dpgen_bench.runs.soundness import budget_problem
from dpgen_bench.runs.statistics import summarise
from dpgen_bench.runs.values import metric_values
from dpgen_bench.training.cost import cost_values

# Columns by key: their heading, and how they sort. Figures come between `scale` and `runs`.
WORDS = {
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
FIGURES = {
    "fid": "FID",
    "inception_score": "IS",
    "acc_logreg_pct": "logreg %",
    "acc_mlp_pct": "MLP %",
    "acc_cnn_pct": "CNN %",
    "acc_avg_pct": "average %",
    "seconds_total": "seconds",
    "parameters_released_generator": "generator's parameters",
}
NUMBERS = ("epsilon", "proven", "claimed", "seeds", *FIGURES)
FILTERS = {
    "dataset": "dataset",
    "epsilon": "ε budget",
    "protocol": "protocol",
    "scale": "scale",
    "unit": "unit",
    "relation": "relation",
    "method": "method",
}
# What two lines must share to be compared, as the page names several of it; a budget is the reader's choice.
TERMS = {
    "dataset": "data sets",
    "relation": "relations",
    "delta": "values of δ",
    "accountant": "accountants",
    "unit": "units",
    "protocol": "protocols",
    "scale": "scales",
}
COUNTED = ("relation", "delta", "accountant")  # of those, what a ledger says
NO_RELATION = "none (no privacy)"  # an infinite budget bounds no difference between neighbours

# What a line has a column for, or what no setting of a method is.
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
        """Lines among which settings are compared, to say what tells them apart."""
        config = self.first.config
        return str(config.method.name), describe_dataset(config), str(config.scale.name), self.first.budget

    @property
    def settings(self) -> dict[str, str]:
        flat = flatten(self.first.identity)
        found = {name: describe_value(value) for name, value in flat.items() if name not in _ELSEWHERE}
        return {**found, "version": found.get("version", "")[:6]}


def leaderboard(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One line per settings and protocol, by data set, protocol, epsilon, method, then settings; JSON-able.

    Each has `filters` (what the page filters by), `terms` (by `TERMS`, what lines must share to be compared; None for
    what bounds no privacy where there is none), `cells` {column: {"text", "value", "detail" if any}} where value is a
    number, "inf", a word or None, `settings` (what tells it from its neighbours), `runs` [{"id", "seed"}] and `stale`.
    """
    grouped: dict[str, list[tuple[Run, Measurement | None]]] = {}
    for run in runs:
        if run.state == "finished":
            measurements: list[Measurement | None] = [*run.measurements]
            for measurement in measurements or [None]:
                alike = [measurement and measurement["protocol"], {**run.identity, "seed": None}]
                grouped.setdefault(json.dumps(plain(alike)), []).append((run, measurement))
    found = []
    for pairs in grouped.values():
        ordered = sorted(pairs, key=lambda pair: (int(pair[0].config.seed), pair[0].id))
        found.append(_Line(tuple(run for run, _ in ordered), tuple(measurement for _, measurement in ordered)))
    families: dict[tuple[str, ...], list[_Line]] = {}
    for each in found:
        families.setdefault(each.family, []).append(each)
    lines = [_content(each, _varying(families[each.family])) for each in found]
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
    protocol = _protocol(run, record) if record else "not measured"
    worst = max(line.runs, key=lambda each: _number(each.epsilon.get("proven"), math.inf))
    words = {
        "method": str(config.method.name),
        "dataset": describe_dataset(config),
        "relation": ", ".join(counted.values()) if private else "–",
        "unit": _together(each.unit for each in line.runs),
        "scale": str(config.scale.name),
        "protocol": protocol,
    }
    cells: dict[str, dict[str, Any]] = {name: {"text": text, "value": text} for name, text in words.items()}
    terms = {**{name: words.get(name) for name in TERMS}, **(counted if private else dict.fromkeys(counted))}
    cells["epsilon"] = {"text": run.budget, "value": None if run.budget == "none" else plain(float(run.budget))}
    cells["proven"] = {"text": _epsilon(worst, "proven"), "value": _sortable(worst, "proven")}
    cells["claimed"] = {"text": _epsilon(worst, "claimed"), "value": _sortable(worst, "claimed")}
    for column, other, text_of in (
        ("proven", "server", "against the server"),
        ("claimed", "conditional", "conditional"),
    ):
        if private and epsilon_entry(worst.epsilon, other) is not None:
            cells[column]["detail"] = f"{_epsilon(worst, other)} {text_of}"
    if private and (why := _not_as_configured(line)):
        cells["proven"]["detail"] = "; ".join(filter(None, [cells["proven"].get("detail"), why]))
    cells["seeds"] = {"text": str(len(line.runs)), "value": len(line.runs)}
    cells.update(_figures(line))
    return {
        "filters": {name: relation if name == "relation" else words.get(name, run.budget) for name in FILTERS},
        "terms": terms,
        "cells": cells,
        "settings": ", ".join(
            f"{name.removeprefix('method.')}={text}" for name, text in sorted(line.settings.items()) if name in varying
        ),
        "stale": run.stale,
        "runs": [{"id": each.id, "seed": str(each.config.seed)} for each in line.runs],
    }


def _counted_by(run: Run) -> dict[str, str]:
    """`COUNTED` of the run's epsilons, as its ledger says; as configured where the ledger is silent."""
    found: dict[str, str] = {}
    for key in COUNTED:
        said = (source.get(key) for source in (run.epsilon, run.ledger.get("budget") or {}, run.identity["privacy"]))
        value = next((word for word in said if word is not None), None)
        found[key] = describe_value(value)
    return found


def _together(words: Iterable[str]) -> str:
    """The words of a line's runs; several where the runs differ, so that it is like no other line."""
    return " / ".join(once(words))


def _not_as_configured(line: _Line) -> str:
    """Which seeds' ledgers do not prove what was configured, and why; "" if all do."""
    reasons: dict[str, list[str]] = {}
    for run in line.runs:
        if why := budget_problem(run.ledger, run.config.privacy):
            reasons.setdefault(why, []).append(str(run.config.seed))
    told = (f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}: {why}" for why, seeds in reasons.items())
    return f"not as configured: {'; '.join(told)}" if reasons else ""


def _protocol(run: Run, record: Protocol) -> str:
    """Its name; where its text is another than the one of that name now, also which: two changed ones are two."""
    if not is_changed(record):
        return str(record["name"])
    return f"{record['name']} (changed: {run.folder.measurements.file_of(record).stem.rsplit('-', 1)[-1]})"


def _figures(line: _Line) -> dict[str, dict[str, Any]]:
    """The cells of `FIGURES`: mean and spreads, and how many seeds have the figure if not all do."""
    known = [
        {
            **{name: [value] for name, value in cost_values(run.training).items()},
            **(metric_values(measurement) if measurement else {}),
        }
        for run, measurement in zip(line.runs, line.measurements, strict=True)
    ]
    cells: dict[str, dict[str, Any]] = {}
    for name in FIGURES:
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
    figure = _number(epsilon_entry(run.epsilon, name), math.nan)
    return None if math.isnan(figure) else plain(figure)


def _number(value: Any, otherwise: float) -> float:
    """The figure, or `otherwise` for None and for words such as `failed: ...`."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return otherwise

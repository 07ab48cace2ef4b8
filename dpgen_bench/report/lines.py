"""The lines of the report's leaderboards: finished runs that differ in seed alone, with their values by protocol."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dpgen_bench.config.display import counted, method_name, metric_name
from dpgen_bench.outcomes.listing import (
    NOT_AUDITED,
    describe_dataset,
    epsilon_entry,
    format_certified,
    format_epsilon,
    is_changed,
    least_certified,
)
from dpgen_bench.report.runs import Run
from dpgen_bench.report.text import describe_time, describe_value, described, flatten, once, plain
from dpgen_bench.store.measurements import Protocol, protocol_hash
from dpgen_bench.store.records import evidence
from dpgen_bench.store.statistics import summarise
from dpgen_bench.store.values import metric_values
from dpgen_bench.tables.naming import REAL
from dpgen_bench.tables.ranking import why_no_place
from dpgen_bench.training.cost import cost_values

LEDGERS = ("relation", "delta", "accountant")  # terms that a ledger has
TIME = "seconds_total"

# Keys of the identity that have a column, or that are not settings of a method.
_ELSEWHERE = {
    *("seed", "method.name", "method._target_", "dataset.name", "dataset.select", "scale.name", "training_version"),
    *(f"privacy.{name}" for name in ("epsilon", "delta", "relation", "accountant")),
}


@dataclass(frozen=True)
class Line:
    """Finished runs that differ in seed alone.

    expected: how many runs of these settings there are, finished or not.
    """

    runs: tuple[Run, ...]
    expected: int

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def method(self) -> str:
        return str(self.first.config.method.name)

    @property
    def dataset(self) -> str:
        return describe_dataset(self.first.config)

    @property
    def family(self) -> tuple[str, ...]:
        """What a line shares with those from which its settings must distinguish it."""
        return self.method, self.dataset, str(self.first.config.scale.name), self.first.budget

    @property
    def settings(self) -> dict[str, str]:
        flat = flatten(self.first.identity)
        texts = {name: describe_value(value) for name, value in flat.items() if name not in _ELSEWHERE}
        return {**texts, "version": texts.get("version", "")[:6]}

    @property
    def terms(self) -> dict[str, str]:
        """What lines of one leaderboard share; without privacy no relation, δ and accountant, which bound nothing."""
        counted_by = [] if self.first.budget == "inf" else [_counted_by(run) for run in self.runs]
        terms = {key: " / ".join(once(each[key] for each in counted_by)) for key in LEDGERS if counted_by}
        return {**terms, "unit": " / ".join(once(run.unit for run in self.runs))}

    @cached_property
    def values(self) -> dict[str, dict[str, list[list[float]]]]:
        """By metric and protocol the values [seed][repeat] of the runs that have them; costs have the protocol ""."""
        values: dict[str, dict[str, list[list[float]]]] = {}
        for run in self.runs:
            costs = {name: [value] for name, value in cost_values(run.training).items()}
            of_protocols = [("", costs)] + [
                (_protocol(each["protocol"]), metric_values(each)) for each in run.measurements
            ]
            for protocol, of_run in of_protocols:
                for name, repeats in of_run.items():
                    values.setdefault(name, {}).setdefault(protocol, []).append(repeats)
        return values

    @property
    def is_real(self) -> bool:
        """Whether its samples are the records themselves, the upper end for every method."""
        return self.method == REAL

    def why_no_line(self) -> str:
        """Why the line is in no leaderboard, whichever terms its lines share; "" if it may be in one."""
        if self.is_real:
            return "real images, no generator"
        if self.first.stale:
            return "its method has changed since"
        return "" if any(run.measurements for run in self.runs) else "not measured"

    def why_no_place(self, metric: str, protocol: str, unit: str) -> str:
        """Why the line has no place by that metric, protocol and unit of privacy; "" if it has one."""
        by_protocol = self.values.get(metric, {})
        if by_protocol and protocol not in by_protocol:
            return f"{metric_name(metric)} by protocol {', '.join(by_protocol)}, not {protocol}"
        ledgers = [(int(run.config.seed), run.ledger, run.config.privacy) for run in self.runs]
        return why_no_place(ledgers, by_protocol.get(protocol, []), self.expected, metric, unit)


def lines_of(runs: Sequence[Run]) -> list[Line]:
    """The lines of the finished runs, by method, then in the order of their settings."""
    grouped: dict[str, list[Run]] = {}
    expected: Counter[str] = Counter()
    for run in runs:
        if run.sound:
            settings = json.dumps(plain({**run.identity, "seed": None}))
            expected[settings] += 1
            if run.state == "finished":
                grouped.setdefault(settings, []).append(run)
    lines = [
        Line(tuple(sorted(several, key=lambda run: (int(run.config.seed), run.id))), expected[settings])
        for settings, several in grouped.items()
    ]
    return sorted(lines, key=lambda line: (line.family, sorted(line.settings.items())))


def varying_settings(lines: Sequence[Line]) -> list[str]:
    """For each line the settings in which it differs from the others of its family, as text."""
    families: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        families.setdefault(line.family, []).append(line)
    names = {family: _varying(several) for family, several in families.items()}
    return [
        ", ".join(
            f"{name.removeprefix('method.')} = {text}"
            for name, text in sorted(line.settings.items())
            if name in names[line.family]
        )
        for line in lines
    ]


def _varying(lines: Sequence[Line]) -> set[str]:
    """Names of the settings that are not the same in all of these lines."""
    every = [line.settings for line in lines]
    names = {name for settings in every for name in settings}
    return {name for name in names if len({settings.get(name) for settings in every}) > 1}


def line_content(line: Line, settings: str, protocols: Mapping[str, str]) -> dict[str, Any]:
    """A line as the page shows it, without its place.

    Args:
        settings: those that distinguish it from other lines.
        protocols: the metrics that are shown with the protocol of each.
    """
    # The seeds of a line may differ in what they proved; the line shows the largest epsilon.
    worst = max(line.runs, key=lambda run: _number(run.epsilon.get("proven"), math.inf))
    private = line.first.budget != "inf"
    others = [
        f"{format_epsilon(epsilon_entry(worst.epsilon, name))} {text}"
        for name, text in (
            ("claimed", "claimed"),
            ("server", "against the server"),
            ("conditional", "conditional"),
        )
        if private and epsilon_entry(worst.epsilon, name) is not None
    ]
    bound = least_certified(run.epsilon for run in line.runs).get("epsilon")
    others += [NOT_AUDITED if bound is None else f"{format_certified(bound)} certified"] if private else []
    scale = str(line.first.config.scale.name)
    public = line.first.ledger.get("public_data")
    notes = [f"{scale} scale", counted(len(line.runs), "seed"), _evidence(line)]
    return {
        "method": method_name(line.method),
        "settings": settings,
        "proven": format_epsilon(epsilon_entry(worst.epsilon, "proven")),
        "epsilons": others,
        "cells": {name: _cell(line, name, protocol) for name, protocol in protocols.items()},
        "notes": [*notes, *([f"public data: {public}"] if public else [])],
        "runs": [{"id": run.id, "seed": str(run.config.seed)} for run in line.runs],
    }


def _cell(line: Line, metric: str, protocol: str) -> dict[str, str]:
    """The value by that protocol or else by another one, which is then named, as {"text", "by"}."""
    by_protocol = line.values.get(metric, {})
    if not by_protocol:
        return {"text": "–", "by": ""}
    used = protocol if protocol in by_protocol else next(iter(by_protocol))
    if metric == TIME:
        return {"text": _time(line), "by": ""}
    summary, seeds = summarise(by_protocol[used]), len(line.runs)
    some = f" ({summary.seeds} of {counted(seeds, 'seed')})" if summary.seeds < seeds else ""
    return {"text": described(summary) + some, "by": "" if used == protocol else f"by {used}"}


def _time(line: Line) -> str:
    """The mean time of training and the devices: `18 min, CPU`."""
    devices = once(str(run.training.get("device", "")).upper() for run in line.runs)
    time = describe_time(summarise(line.values[TIME][""]).mean)
    return ", ".join(filter(None, [time, " / ".join(filter(None, devices))]))


def _evidence(line: Line) -> str:
    """Who measured the records of the line's runs and who verified them, or `not recorded`; each once."""
    return "; ".join(once(evidence(run.folder) or "not recorded" for run in line.runs))


def _counted_by(run: Run) -> dict[str, str]:
    """The terms of `LEDGERS` from the run's ledger, or from its config if the ledger lacks them."""
    terms: dict[str, str] = {}
    for key in LEDGERS:
        sources: Iterable[Mapping[str, Any]] = (run.epsilon, run.ledger.get("budget") or {}, run.identity["privacy"])
        values = (source.get(key) for source in sources)
        terms[key] = describe_value(next((value for value in values if value is not None), None))
    return terms


def _protocol(record: Protocol) -> str:
    """The protocol's name; if its settings have changed since, with a hash that tells changed ones apart."""
    if not is_changed(record):
        return str(record["name"])
    return f"{record['name']} (changed: {protocol_hash(record)})"


def _number(value: Any, otherwise: float) -> float:
    """The value as a number, or `otherwise` for None and for texts such as `failed: ...`."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return otherwise

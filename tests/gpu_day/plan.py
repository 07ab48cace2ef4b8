"""The plan of days on a GPU: checks and runs with their expected hours, and what of them is done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.overrides import quote_value
from dpgen_bench.config.spec import RunSpec, build_spec
from dpgen_bench.store.folders import RunFolder, Store
from dpgen_bench.store.records import record_file

PLAN = Path(__file__).with_name("plan.yaml")
SHARE_OF_A_FURTHER_SEED = 0.25
DAY = 24  # hours


@dataclass(frozen=True)
class Check:
    """A command that is executed once.

    Attributes:
        mark: the file that exists when it has succeeded.
    """

    name: str
    command: str
    hours: float
    mark: Path

    @property
    def done(self) -> bool:
        return self.mark.exists()


@dataclass(frozen=True)
class Run:
    """One seed of a run.

    Attributes:
        overrides: those of `dpgen run`, with the seed and the folder of results.
        hours: expected, or what the finished seeds of the same line took.
        value: of its line in a paper's table.
    """

    name: str
    overrides: tuple[str, ...]
    spec: RunSpec
    folder: RunFolder
    hours: float
    value: float

    @property
    def done(self) -> bool:
        return self.folder.done and self.folder.measurements.covered(self.spec.protocol_record())

    @property
    def recorded(self) -> bool:
        results = self.folder.path.parent.parent
        return record_file(results, str(self.spec.config.method.name), self.spec.id).exists()


def read(path: Path, results: Path) -> tuple[list[Check], list[Run]]:
    """The checks of a plan in its order, and its runs, those of the largest value per hour first."""
    plan = yaml.safe_load(path.read_text())
    marks = results / "gpu_day"
    checks = [
        Check(each["name"], each["command"], float(each["hours"]), marks / f"{_digest(each)}.done")
        for each in plan["checks"]
    ]
    runs = [run for entry in plan["runs"] for run in _seeds(entry, plan, results)]
    return checks, sorted(runs, key=lambda run: run.value / run.hours, reverse=True)  # equal ones in the plan's order


def _digest(check: dict[str, Any]) -> str:
    """Of the name and the command: a check that was changed is due again, wherever it stands in the plan."""
    return hashlib.sha256(f"{check['name']}\n{check['command']}".encode()).hexdigest()[:12]


def expected_hours(entry: dict[str, Any], gflops: float, launch_s: float) -> float:
    """Hours of one seed by the counted operations of its steps; see plan.yaml."""
    training = sum(steps * max(operations / gflops, launch_s) for steps, operations in entry["loops"])
    return float(training / 3600 + entry["more_hours"])


def _seeds(entry: dict[str, Any], plan: dict[str, Any], results: Path) -> Iterator[Run]:
    runs = []
    for number, seed in enumerate(entry["seeds"]):
        overrides = (*entry["run"].split(), f"seed={seed}", f"results={quote_value(str(results))}")
        spec = build_spec(compose_config(list(overrides)), planned=True)
        value = float(entry["value"]) * (SHARE_OF_A_FURTHER_SEED if number else 1.0)
        runs.append((overrides, spec, Store(results).folder(spec.id), value))
    measured = [hours for *_, folder, _ in runs if (hours := training_hours(folder)) is not None]
    hours = expected_hours(entry, float(plan["gflops"]), float(plan["launch_s"]))
    if measured:
        hours = sum(measured) / len(measured) + float(entry["more_hours"])
    for overrides, spec, folder, value in runs:
        yield Run(f"{entry['name']}, seed {spec.seed}", overrides, spec, folder, hours, value)


def training_hours(folder: RunFolder) -> float | None:
    """Hours of the training of a finished run, else None."""
    if not folder.done:
        return None
    cost = json.loads((folder.path / "training.json").read_text())
    return float(sum(cost["seconds"].values()) + cost["seconds_outside_loops"]) / 3600


def describe(checks: Sequence[Check], runs: Sequence[Run]) -> str:
    """What is done and what is left, with hours, in the order of execution, and what of it fits into a day."""
    lines: list[str] = []
    left = 0.0
    for each in (*checks, *runs):
        hours = 0.0 if each.done else each.hours
        if left <= DAY < left + hours:
            lines.append(f"  ----  {left:6.1f} h until here; what follows ends after more than {DAY} hours")
        left += hours
        state = "done" if each.done else "left"
        lines.append(f"  {state}  {each.hours:6.1f} h  {each.name}")
    count = sum(not each.done for each in (*checks, *runs))
    return "\n".join([*lines, f"{count} of {len(checks) + len(runs)} left, about {left:.1f} hours"])

"""Figures by name: what a report holds, once for each repeat, and what its run cost."""

from __future__ import annotations

from dpgen_bench.runs.measurements import Measurement
from dpgen_bench.runs.store import RunFolder
from dpgen_bench.training.cost import cost_values


def metric_values(measurement: Measurement) -> dict[str, list[float]]:
    """All measured values of a report by name, one for each repeat in which it was measured."""
    found: dict[str, list[float]] = {}
    for repeat in measurement.get("repeats", []):
        for result in repeat["metrics"].values():
            for name, value in result["values"].items() if result["status"] == "measured" else ():
                found.setdefault(name, []).append(value)
    return found


def cost(folder: RunFolder) -> dict[str, list[float]]:
    """What the run cost, see `dpgen_bench.training.cost.cost_values`; one figure each."""
    return {name: [value] for name, value in cost_values(folder.read_json("training.json")).items()}


def mean_values(measurement: Measurement) -> dict[str, float]:
    """The mean over repeats of each of `figures`."""
    return {name: sum(values) / len(values) for name, values in metric_values(measurement).items()}


def notes(measurement: Measurement) -> list[str]:
    """What must be known besides the figures: of the samples, and of each metric; why one was not measured. No line
    comes twice."""
    lines: dict[str, None] = {}
    for repeat in measurement.get("repeats", []):
        lines |= dict.fromkeys(repeat["samples"].get("notes", []))
        for key, result in repeat["metrics"].items():
            lines |= dict.fromkeys(f"{key}: {note}" for note in result["notes"])
            if result["status"] != "measured":
                lines[f"{key}: {result['status']}: {result['reason']}"] = None
    return list(lines)


def unmeasured(measurement: Measurement) -> list[str]:
    """Keys of the metrics that failed or could not be measured in some repeat."""
    repeats = measurement.get("repeats", [])
    missing = [key for repeat in repeats for key, result in repeat["metrics"].items() if result["status"] != "measured"]
    return list(dict.fromkeys(missing))

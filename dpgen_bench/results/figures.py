"""A run's figures by name: what a protocol measured, once for each repeat, and what the run cost."""

from __future__ import annotations

from dpgen_bench.cost import cost_values
from dpgen_bench.results.store import RunFolder


def figures(folder: RunFolder, protocol: str) -> dict[str, list[float]]:
    """All measured values of one protocol by name, one for each repeat in which it was measured; and the cost figures
    (see `dpgen_bench.cost.cost_values`), which are one each."""
    found = {name: [value] for name, value in cost_values(folder.read_json("training.json")).items()}
    for repeat in folder.read_json(f"metrics/{protocol}.json").get("repeats", []):
        for result in repeat["metrics"].values():
            for name, value in result["values"].items():
                found.setdefault(name, []).append(value)
    return found


def headline(folder: RunFolder, protocol: str) -> dict[str, float]:
    """The mean over repeats of each of `figures`."""
    return {name: sum(values) / len(values) for name, values in figures(folder, protocol).items()}


def notes(folder: RunFolder, protocol: str) -> list[str]:
    """What must be known besides the figures: of the samples, and of each metric; why one was not measured. No line
    comes twice."""
    lines: dict[str, None] = {}
    for repeat in folder.read_json(f"metrics/{protocol}.json").get("repeats", []):
        lines |= dict.fromkeys(repeat["samples"].get("notes", []))
        for key, result in repeat["metrics"].items():
            lines |= dict.fromkeys(f"{key}: {note}" for note in result["notes"])
            if result["status"] != "measured":
                lines[f"{key}: {result['status']}: {result['reason']}"] = None
    return list(lines)

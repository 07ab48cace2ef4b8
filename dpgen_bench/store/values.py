"""Values by name: the metric values of a measurement, and the costs of its run."""

from __future__ import annotations

from collections.abc import Collection

from dpgen_bench.store.folders import ReadableRun
from dpgen_bench.store.measurements import SETTLED, Measurement, cost_of_fit
from dpgen_bench.training.cost import cost_values


def metric_values(measurement: Measurement) -> dict[str, list[float]]:
    """All measured values of a measurement by name, one for each repeat in which the metric was measured."""
    values: dict[str, list[float]] = {}
    for repeat in measurement.get("repeats", []):
        for result in repeat["metrics"].values():
            if result["status"] != "measured":
                continue
            for name, value in result["values"].items():
                values.setdefault(name, []).append(value)
    return values


def cost(folder: ReadableRun, measurement: Measurement) -> dict[str, list[float]]:
    """The costs, by name, of the fit that a measurement is of, each a list of one value; see `cost_values`.

    It is the run's own fit unless the measurement says that the run was made again for it.
    """
    return {name: [value] for name, value in cost_values(cost_of_fit(measurement) or folder.cost).items()}


def mean_values(measurement: Measurement) -> dict[str, float]:
    """The mean over repeats of each of `metric_values`."""
    return {name: sum(values) / len(values) for name, values in metric_values(measurement).items()}


def notes(measurement: Measurement) -> list[str]:
    """Notes on the samples and on each metric, and why a metric was not measured. Equal lines are listed once."""
    lines: dict[str, None] = {}
    if "fit" in measurement:  # of the same id, but of other weights than the record's other measurements
        name = measurement["protocol"]["name"]
        lines[f"measured by {name} on a run made again with the same settings and seed"] = None
    repeats = measurement.get("repeats", [])
    of_another = [key for each in repeats for key, result in each["metrics"].items() if result.get("another_fit")]
    if of_another:
        lines[f"{', '.join(dict.fromkeys(of_another))}: of another fit with the same settings and seed"] = None
    for repeat in repeats:
        lines |= dict.fromkeys(repeat["samples"].get("notes", []))
        for key, result in repeat["metrics"].items():
            lines |= dict.fromkeys(f"{key}: {note}" for note in result["notes"])
            if result["status"] != "measured":
                lines[f"{key}: {result['status']}: {result['reason']}"] = None
    return list(lines)


def lost(earlier: Measurement, measurement: Measurement) -> list[str]:
    """Keys of the metrics that were measured in some repeat of an earlier measurement by this protocol, and not now."""
    repeats = zip(earlier.get("repeats", []), measurement["repeats"], strict=False)
    missing = [
        key
        for before, now in repeats
        for key, result in before["metrics"].items()
        if result["status"] == "measured" and now["metrics"][key]["status"] != "measured"
    ]
    return list(dict.fromkeys(missing))


def unmeasured(measurement: Measurement) -> list[str]:
    """Keys of the metrics that failed or could not be measured in some repeat."""
    return _without(measurement, ("measured",))


def to_try_again(measurement: Measurement) -> list[str]:
    """Keys of the `unmeasured` metrics that another machine, or another attempt, may measure."""
    return _without(measurement, SETTLED)


def _without(measurement: Measurement, statuses: Collection[str]) -> list[str]:
    """Keys of the metrics that have another status in some repeat."""
    repeats = measurement.get("repeats", [])
    missing = [key for each in repeats for key, result in each["metrics"].items() if result["status"] not in statuses]
    return list(dict.fromkeys(missing))

"""The measurements of a run: JSON files of metric values, one for each protocol by which the run was evaluated.

A measurement is

    {"protocol": {...}, "repeats": [{"seed": s, "samples": {...}, "metrics": {key: MetricResult}}],
     "made_with": {"packages": {name: version}, "inception_weights": SHA-256 or null}, "complete": true}

and its file is metrics/NAME-HASH.json, where HASH is that of the protocol's content. If a protocol was edited, for
example to draw another number of samples, values before and after the change are in different files and are never
mixed. An evaluation in progress is written to metrics/unfinished; an earlier measurement by the same protocol stays
until the new one is complete and has all of its values.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpgen_bench.utils.files import write_atomic

SETTLED = ("measured", "unmeasurable")  # statuses of results that measuring again would not change

Protocol = Mapping[str, Any]
Measurement = dict[str, Any]


def protocol_hash(protocol: Protocol) -> str:
    """The hash of a protocol's content, which is a part of the name of its measurements' files."""
    text = json.dumps(protocol, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


class Measured(ABC):
    """The measurements of one run; protocols are those of `RunSpec.protocol_record`."""

    @abstractmethod
    def all(self) -> list[Measurement]:
        """Every complete measurement, sorted by the protocol's name and hash."""

    def of(self, protocol: Protocol) -> Measurement:
        """The complete measurement by exactly this protocol, or {}."""
        return next((each for each in self.all() if each["protocol"] == protocol), {})

    def assembled(self, protocol: Protocol) -> Measurement:
        """The complete measurement by this protocol, completed from those by other protocols where it lacks metrics.

        A result of another protocol is used if that protocol draws the same samples (all entries but `name`, `metrics`
        and `repeats` are equal) and configures the metric in the same way. A metric that is combined from others (`of`)
        also needs those to be configured in the same way. The value is then the one that `protocol` itself would have
        measured. Of a protocol with fewer repeats it has the first ones, because the seed of a repeat follows from
        its number. A record may have results of several fits of its run. Those of one fit come first, and a metric that
        this fit lacks is taken from another one, with the entry `another_fit` in its results.

        Returns:
            The measurement, whose entry `parts` names the other protocols that results were taken from; {} if nothing
            is measured.
        """
        return _assembled(protocol, self.of(protocol), self.all())

    def covered(self, protocol: Protocol) -> bool:
        """Whether `assembled` has a settled result for every metric of every repeat of this protocol."""
        repeats = self.assembled(protocol).get("repeats", [])
        results = [repeat["metrics"].get(key, {}) for repeat in repeats for key in protocol["metrics"]]
        has_all_repeats = len(repeats) == int(protocol.get("repeats", 1))
        return has_all_repeats and all(result.get("status") in SETTLED for result in results)

    def fully_measured(self, protocol: Protocol) -> bool:
        """Whether there is a complete measurement by exactly this protocol, in which no metric would be tried again."""
        measurement = self.of(protocol)
        results = [result for repeat in measurement.get("repeats", []) for result in repeat["metrics"].values()]
        return bool(measurement) and all(result["status"] in SETTLED for result in results)


@dataclass(frozen=True)
class Measurements(Measured):
    """The measurements in the folder `path` of one run."""

    path: Path

    def file_of(self, protocol: Protocol) -> Path:
        """The file of the complete measurement by this protocol, which may not exist yet."""
        return self.path / "metrics" / f"{protocol['name']}-{protocol_hash(protocol)}.json"

    def of(self, protocol: Protocol) -> Measurement:
        return self._read(self.file_of(protocol), protocol)

    def unfinished(self, protocol: Protocol) -> Measurement:
        """What an interrupted evaluation by this protocol has measured, or {}."""
        return self._read(self._unfinished_file(protocol), protocol)

    def begun(self, protocol: Protocol) -> Measurement:
        """What an evaluation by this protocol need not measure, or {}: its own interrupted one if there is one.

        Otherwise it is `assembled` of complete measurements and of interrupted ones by other protocols.
        """
        if own := self.unfinished(protocol):
            return own
        interrupted = map(self._read, sorted((self.path / "metrics" / "unfinished").glob("*.json")))
        parts = [*self.all(), *(each for each in interrupted if each)]
        return _assembled(protocol, self.of(protocol), parts)

    def write(self, measurement: Measurement) -> None:
        """Write a measurement to the file of complete or of unfinished ones, as its entry `complete` says.

        A complete measurement replaces the unfinished one by the same protocol.
        """
        protocol = measurement["protocol"]
        complete = bool(measurement.get("complete"))
        content = json.dumps(measurement, indent=2)
        write_atomic(self.file_of(protocol) if complete else self._unfinished_file(protocol), content)
        if complete:
            self._unfinished_file(protocol).unlink(missing_ok=True)

    def all(self) -> list[Measurement]:
        measurements = [self._read(path) for path in sorted((self.path / "metrics").glob("*.json"))]
        return [measurement for measurement in measurements if measurement.get("complete")]

    def _unfinished_file(self, protocol: Protocol) -> Path:
        return self.path / "metrics" / "unfinished" / self.file_of(protocol).name

    def _read(self, path: Path, protocol: Protocol | None = None) -> Measurement:
        """A measurement; {} if the file is missing or, with a warning, if it is corrupt, since it can be made again."""
        if not path.exists():
            return {}
        try:
            measurement = json.loads(path.read_text())
            check_measurement(measurement)
            if protocol is None or measurement["protocol"] == protocol:
                return measurement
            problem = "is of another protocol than its name says"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"cannot be read ({type(error).__name__}: {error})"
        warnings.warn(f"the measurement {path} {problem}; it is ignored.", stacklevel=3)
        return {}


def check_measurement(measurement: Measurement) -> None:
    """Check that a measurement has all entries that readers use.

    Raises:
        KeyError, TypeError, AttributeError: if an entry is missing or of another type.
    """
    for repeat in measurement["repeats"]:
        for result in repeat["metrics"].values():
            _ = result["status"], result["values"].items(), result["notes"], result["reason"], repeat["samples"]


def sampling_settings(protocol: Protocol) -> dict[str, Any]:
    """The entries of a protocol that determine which samples are drawn, and how often."""
    return {key: value for key, value in protocol.items() if key not in ("name", "metrics")}


def _settings_of_a_repeat(protocol: Protocol) -> dict[str, Any]:
    """The entries of a protocol that determine which samples one repeat draws."""
    return {key: value for key, value in sampling_settings(protocol).items() if key != "repeats"}


def is_part(part: Protocol, whole: Protocol) -> bool:
    """Whether `part` is `whole` with none or some of its metrics left out."""
    same_samples = sampling_settings(part) == sampling_settings(whole)
    return same_samples and part["metrics"].keys() == set(_shared_metrics(part, whole))


def _shared_metrics(part: Protocol, protocol: Protocol) -> list[str]:
    """Keys of the metrics that both protocols configure in the same way, as well as all metrics they combine."""
    metrics = protocol["metrics"]
    equal = {key for key, metric in metrics.items() if part["metrics"].get(key) == metric}
    return [
        key
        for key in metrics
        if key in equal
        and all(other in equal for other, metric in metrics.items() if is_component(metric, metrics[key]))
    ]


def is_component(metric: Mapping[str, Any], combined: Mapping[str, Any]) -> bool:
    """Whether one metric of a protocol is combined from values of another one, which it names in `of`."""
    return "name" in metric and metric["name"] in (combined.get("of") or [])


def _assembled(protocol: Protocol, whole: Measurement, parts: Iterable[Measurement]) -> Measurement:
    """`whole`, which may be {}, completed by results of `parts` as `Measured.assembled` says."""
    settings, further = _settings_of_a_repeat(protocol), []
    for part in sorted(parts, key=lambda each: "fit" in each):  # the record's own fit comes first
        if part["protocol"] == protocol or _settings_of_a_repeat(part["protocol"]) != settings:
            continue
        fit, shared = {"fit": part["fit"]} if "fit" in part else {}, _shared_metrics(part["protocol"], protocol)
        if shared and (not whole or cost_of_fit(whole) == cost_of_fit(part)):
            whole = _add_part(whole or {"protocol": protocol, "repeats": [], "complete": True, **fit}, part, shared)
        elif shared:
            further.append(_of_another_fit(part))
    for part in further:
        lacking = set(_shared_metrics(part["protocol"], protocol)) - _settled(whole)
        whole = _add_part(whole, part, sorted(lacking))
    return whole if any(repeat["metrics"] for repeat in whole.get("repeats", [])) else {}


def _of_another_fit(part: Measurement) -> Measurement:
    """The measurement with a mark on each result: the weights of two fits of one run can differ by rounding."""
    repeats = [
        {**repeat, "metrics": {key: {**result, "another_fit": True} for key, result in repeat["metrics"].items()}}
        for repeat in part["repeats"]
    ]
    return {**part, "repeats": repeats}


def _settled(measurement: Measurement) -> set[str]:
    """The metrics with a settled result in some repeat: a mean over repeats is of one fit."""
    results = [item for repeat in measurement["repeats"] for item in repeat["metrics"].items()]
    return {key for key, result in results if result["status"] in SETTLED}


def cost_of_fit(measurement: Measurement) -> dict[str, Any] | None:
    """What identifies the fit of a measurement, whose seconds differ from any other's; None for the record's own."""
    cost: dict[str, Any] | None = measurement.get("fit", {}).get("cost")
    return cost


def _add_part(whole: Measurement, part: Measurement, shared: Collection[str]) -> Measurement:
    """A copy of `whole` in which settled results of the `shared` metrics are taken from `part` where `whole` has none.

    It has no more repeats than its protocol.
    """
    repeats, used = [], False
    most = int(whole["protocol"].get("repeats", 1))
    for number in range(min(max(len(whole["repeats"]), len(part["repeats"])), most)):
        source = part["repeats"][number] if number < len(part["repeats"]) else {"metrics": {}, "samples": {}}
        target = whole["repeats"][number] if number < len(whole["repeats"]) else {**source, "metrics": {}}
        metrics = dict(target["metrics"])
        for key in shared:
            result = source["metrics"].get(key)
            is_missing = key not in metrics or metrics[key]["status"] not in SETTLED
            if result and result["status"] in SETTLED and is_missing:
                metrics[key], used = result, True
        repeats.append({**target, "metrics": metrics})
    names = [*whole.get("parts", []), *([part["protocol"]["name"]] if used else [])]
    return {**whole, "repeats": repeats, "parts": names}

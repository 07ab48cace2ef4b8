"""A run's reports: one file for each text of a protocol by which the run was measured.

A report is

    {"protocol": {...}, "repeats": [{"seed": s, "samples": {...}, "metrics": {key: MetricResult}}], "complete": true}

and its file metrics/NAME-HASH.json, the hash being the protocol's: figures of two texts of one protocol, such as with
another number of samples, stand beside each other and are never mixed. While it is being made, a report lies in
metrics/unfinished; an earlier one of the same text stays until then.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpgen_bench.utils.files import write_atomic

Protocol = Mapping[str, Any]
Measurement = dict[str, Any]


@dataclass(frozen=True)
class Measurements:
    """The reports below one run's folder `path`; protocols are given as `RunSpec.protocol_record` gives them."""

    path: Path

    def file_of(self, protocol: Protocol) -> Path:
        """Where the complete report of this protocol is, or would be."""
        text = json.dumps(protocol, sort_keys=True, default=str)
        return self.path / "metrics" / f"{protocol['name']}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"

    def of(self, protocol: Protocol) -> Measurement:
        """The complete report of exactly this protocol, or {}."""
        return self._read(self.file_of(protocol), protocol)

    def unfinished(self, protocol: Protocol) -> Measurement:
        """What was measured by an evaluation that did not end, or {}."""
        return self._read(self._unfinished(protocol), protocol)

    def write(self, measurement: Measurement) -> None:
        """Keep a report: beside the complete ones if it is complete, and then no longer as unfinished."""
        protocol = measurement["protocol"]
        complete = bool(measurement.get("complete"))
        content = json.dumps(measurement, indent=2)
        write_atomic(self.file_of(protocol) if complete else self._unfinished(protocol), content)
        if complete:
            self._unfinished(protocol).unlink(missing_ok=True)

    def all(self) -> list[Measurement]:
        """Every complete report, by its protocol's name and hash."""
        found = [self._read(path) for path in sorted((self.path / "metrics").glob("*.json"))]
        return [measurement for measurement in found if measurement.get("complete")]

    def assembled(self, wanted: Protocol) -> Measurement:
        """The complete report of exactly this protocol; what it lacks is taken from complete ones of its parts. Or {}.

        A part draws the same samples (all but `name` and `metrics` agrees) and has a metric word for word; a metric
        made of others, `of` them, counts if those agree too. So what a part measured is what the whole would measure.
        `parts` names the protocols that something was taken from.
        """
        whole = self.of(wanted)
        for part in self.all():
            if part["protocol"] == wanted or sampling_settings(part["protocol"]) != sampling_settings(wanted):
                continue
            shared = _shared_metrics(part["protocol"], wanted)
            whole = _with_part(whole or {"protocol": wanted, "repeats": [], "complete": True}, part, shared)
        return whole if any(repeat["metrics"] for repeat in whole.get("repeats", [])) else {}

    def covered(self, wanted: Protocol) -> bool:
        """Whether complete reports of this protocol and of its parts have, together, every metric of every repeat."""
        repeats = self.assembled(wanted).get("repeats", [])
        kept = [repeat["metrics"].get(key, {}) for repeat in repeats for key in wanted["metrics"]]
        return len(repeats) == int(wanted.get("repeats", 1)) and all(each.get("status") == "measured" for each in kept)

    def fully_measured(self, protocol: Protocol) -> bool:
        """Whether there is a complete report of exactly this protocol in which every metric was measured."""
        measurement = self.of(protocol)
        results = [result for repeat in measurement.get("repeats", []) for result in repeat["metrics"].values()]
        return bool(measurement) and all(result["status"] == "measured" for result in results)

    def _unfinished(self, protocol: Protocol) -> Path:
        return self.path / "metrics" / "unfinished" / self.file_of(protocol).name

    def _read(self, path: Path, protocol: Protocol | None = None) -> Measurement:
        """A report; {} where there is none, or with a warning a damaged one, which can be made again."""
        if not path.exists():
            return {}
        try:
            measurement = json.loads(path.read_text())
            for repeat in measurement["repeats"]:
                for result in repeat["metrics"].values():
                    _ = result["status"], result["values"], result["notes"], result["reason"], repeat["samples"]
            if protocol is None or measurement["protocol"] == protocol:
                return measurement
            problem = "is of another protocol than its name says"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"cannot be read ({type(error).__name__}: {error})"
        warnings.warn(f"the measurement {path} {problem}; it is ignored.", stacklevel=3)
        return {}


def sampling_settings(protocol: Protocol) -> dict[str, Any]:
    """What says how samples are drawn, and how often."""
    return {key: value for key, value in protocol.items() if key not in ("name", "metrics")}


def _shared_metrics(part: Protocol, wanted: Protocol) -> list[str]:
    """Keys of the metrics that both have word for word, with the others that they are made of."""
    alike = {key for key, metric in wanted["metrics"].items() if part["metrics"].get(key) == metric}
    return [
        key
        for key in wanted["metrics"]
        if key in alike
        and all(
            other in alike for other, metric in wanted["metrics"].items() if _enters(metric, wanted["metrics"][key])
        )
    ]


def _enters(metric: Mapping[str, Any], combined: Mapping[str, Any]) -> bool:
    return "name" in metric and metric["name"] in (combined.get("of") or [])


def _with_part(whole: Measurement, part: Measurement, shared: list[str]) -> Measurement:
    """A copy of `whole` with the part's measured results of the shared metrics where it has none of its own."""
    repeats, used = [], False
    for number in range(max(len(whole["repeats"]), len(part["repeats"]))):
        theirs = part["repeats"][number] if number < len(part["repeats"]) else {"metrics": {}, "samples": {}}
        ours = whole["repeats"][number] if number < len(whole["repeats"]) else {**theirs, "metrics": {}}
        metrics = dict(ours["metrics"])
        for key in shared:
            result = theirs["metrics"].get(key)
            lacks = key not in metrics or metrics[key]["status"] != "measured"
            if result and result["status"] == "measured" and lacks:
                metrics[key], used = result, True
        repeats.append({**ours, "metrics": metrics})
    names = [*whole.get("parts", []), *([part["protocol"]["name"]] if used else [])]
    return {**whole, "repeats": repeats, "parts": names}

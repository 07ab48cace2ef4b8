"""Metrics that combine others, such as the average of accuracies, where a record has these of several measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hydra.utils import instantiate

from dpgen_bench.evaluate.protocol import combine
from dpgen_bench.store.measurements import Measurement, Protocol, is_component

SEVERAL_FITS = "of more than one fit with the same settings and seed"


def with_combined(measurement: Measurement, protocol: Protocol) -> Measurement:
    """A copy of an assembled measurement with each combined metric that it lacks, where all components are measured.

    A record may have the components of several fits of its run. A note of the result says so.

    Args:
        measurement: of `Measured.assembled`.
        protocol: by which it was assembled, and which names the classes of metrics.
    """
    metrics = protocol["metrics"]
    components = {
        key: [other for other, each in metrics.items() if is_component(each, metric)]
        for key, metric in metrics.items()
        if metric.get("of")
    }
    repeats = [
        {**repeat, "metrics": _completed(repeat["metrics"], metrics, components)} for repeat in measurement["repeats"]
    ]
    return {**measurement, "repeats": repeats}


def _completed(
    results: Mapping[str, Any], metrics: Mapping[str, Any], components: Mapping[str, list[str]]
) -> dict[str, Any]:
    """The results of one repeat by key, with those of combined metrics."""
    completed = dict(results)
    for key, others in components.items():
        parts = {other: results[other] for other in others if results.get(other, {}).get("status") == "measured"}
        if results.get(key, {}).get("status") == "measured" or len(parts) < len(others):
            continue
        result = combine(instantiate(metrics[key], _convert_="all"), parts)
        if result.status == "measured":
            mixed = any(part.get("another_fit") for part in parts.values())
            completed[key] = {**asdict(result), "notes": [*result.notes, *([SEVERAL_FITS] if mixed else [])]}
    return completed

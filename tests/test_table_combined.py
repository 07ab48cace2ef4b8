"""Combined metrics that tables compute from the results of several measurements of a record."""

from __future__ import annotations

from typing import Any

import pytest

from dpgen_bench.store.records import RecordedMeasurements
from dpgen_bench.store.values import metric_values, notes
from dpgen_bench.tables.combined import SEVERAL_FITS, with_combined

AVERAGE = {"_target_": "dpgen_bench.evaluate.utility.AverageAccuracy", "of": ["mlp", "cnn"]}
METRICS = {"mlp": {"name": "mlp"}, "cnn": {"name": "cnn"}, "average": AVERAGE}
WHOLE = {"name": "whole", "num_samples": 9, "metrics": METRICS}


def measured(keys: dict[str, float], seconds: float, name: str = "part") -> dict[str, Any]:
    """A measurement by a part of the protocol, of the fit that took `seconds`."""
    results = {
        key: {"status": "measured", "values": {f"acc_{key}_pct": value}, "reason": None, "notes": []}
        for key, value in keys.items()
    }
    return {
        "protocol": {**WHOLE, "name": name, "metrics": {key: METRICS[key] for key in keys}},
        "repeats": [{"seed": 0, "samples": {}, "metrics": results}],
        "complete": True,
        "fit": {"date": "2026-11-26", "cost": {"seconds": seconds}, "environment": {}},
    }


def completed(*parts: dict[str, Any]) -> dict[str, Any]:
    return with_combined(RecordedMeasurements(parts).assembled(WHOLE), WHOLE)


@pytest.mark.parametrize(("seconds", "of_several"), [(2.5, False), (3.5, True)])
def test_an_average_of_two_measurements(seconds, of_several):
    measurement = completed(measured({"mlp": 80.0}, 2.5), measured({"cnn": 90.0}, seconds))
    assert metric_values(measurement)["acc_avg_pct"] == [85.0]
    assert (f"average: {SEVERAL_FITS}" in notes(measurement)) == of_several


def test_no_average_without_all_components():
    assert metric_values(completed(measured({"mlp": 80.0}, 2.5))) == {"acc_mlp_pct": [80.0]}
    failed = measured({"cnn": 90.0}, 2.5)
    failed["repeats"][0]["metrics"]["cnn"] |= {"status": "failed", "values": {}, "reason": "no memory"}
    assert "acc_avg_pct" not in metric_values(completed(measured({"mlp": 80.0}, 2.5), failed))


def test_a_measured_average_stays():
    """Also if it was measured with other values than those that are shown."""
    whole = measured({"mlp": 80.0, "cnn": 90.0, "average": 0.0}, 2.5, "whole")
    whole["repeats"][0]["metrics"]["average"]["values"] = {"acc_avg_pct": 84.0}
    assert metric_values(completed(whole))["acc_avg_pct"] == [84.0]


def test_an_average_that_could_not_be_measured_is_completed():
    """The protocol measured one accuracy, so it had no average; the other is of another measurement."""
    first = measured({"mlp": 80.0, "cnn": 0.0, "average": 0.0}, 2.5, "whole")
    for key in ("cnn", "average"):
        first["repeats"][0]["metrics"][key] |= {"status": "not measured", "values": {}, "reason": "not here"}
    assert metric_values(completed(first, measured({"cnn": 90.0}, 3.5)))["acc_avg_pct"] == [85.0]


def test_protocols_without_combined_metrics_stay_as_they_are():
    protocol = {**WHOLE, "metrics": {"mlp": METRICS["mlp"]}}
    measurement = RecordedMeasurements((measured({"mlp": 80.0}, 2.5),)).assembled(protocol)
    assert with_combined(measurement, protocol) == measurement

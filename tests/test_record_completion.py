"""Tests that a further run adds to a record: measurements by its author, a verification by somebody else."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest

from dpgen_bench.outcomes import record_checks
from dpgen_bench.outcomes.recording import add_record, left_out, write_record
from dpgen_bench.store.folders import RunFolder, Store
from dpgen_bench.store.records import Record, RecordedMeasurements, evidence, read_record
from dpgen_bench.store.values import cost, mean_values, metric_values, notes
from tests.run_toys import recordable_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return recordable_run(tmp_path_factory.mktemp("results"))


def test_somebody_else_verifies_a_record(finished: RunFolder, tmp_path: Path) -> None:
    """The second run's values are kept as differences; those of the first stay."""
    shutil.copytree(finished.path, tmp_path / "runs" / finished.id)
    folder = Store(tmp_path).folder(finished.id)
    write_record(*add_record(folder, "Ada"))
    measurement = folder.measurements.all()[0]
    value = measurement["repeats"][0]["metrics"]["brightness"]["values"]["brightness"]
    measurement["repeats"][0]["metrics"]["brightness"]["values"]["brightness"] = value + 0.25
    folder.measurements.write(measurement)
    with pytest.raises(ValueError, match="by somebody else than 'ADA '"):
        add_record(folder, "ADA ")
    with pytest.raises(ValueError, match="got the run that 'Ada' recorded: its seconds are the same"):
        add_record(folder, "Grace")
    folder.write_json("training.json", {**folder.read_json("training.json"), "seconds_outside_loops": 1.25})
    for _ in range(2):  # a second verification by the same person replaces the first
        write_record(*add_record(folder, "Grace"))
    record = read_record(next((tmp_path / "records").glob("*/*.json")))
    (note,) = record.content["verified"]
    assert (note["name"], note["differences"]) == ("Grace", {"toy": {"brightness": pytest.approx(0.25)}})
    assert evidence(record) == "measured by Ada, verified by Grace"
    assert evidence(folder) == f"made again; its record: {evidence(record)}"
    assert evidence(finished) == ""
    record.path.write_text("{")
    assert evidence(folder) == "its record cannot be read"  # the values of the folder are shown nevertheless
    write_record(record, record.picture.read_bytes())
    stored = record.measurements.all()[0]["repeats"][0]["metrics"]["brightness"]["values"]["brightness"]
    assert stored == value
    write_record(*add_record(folder, "Ada", overwrite=True))
    assert read_record(record.path).content["verified"] == []


def test_a_further_measurement_completes_a_record(finished: RunFolder, tmp_path: Path) -> None:
    """The values that the record has stay, and what is added says of which fit it is, if of another one."""
    shutil.copytree(finished.path, tmp_path / "runs" / finished.id)
    folder = Store(tmp_path).folder(finished.id)
    write_record(*add_record(folder, "Ada"))
    record = read_record(next((tmp_path / "records").glob("*/*.json")))
    first = record.measurements.all()

    def measure(name: str, value: float) -> None:
        measurement = copy.deepcopy(folder.measurements.of(first[0]["protocol"]))
        measurement["protocol"]["name"] = name
        measurement["repeats"][0]["metrics"]["brightness"]["values"]["brightness"] = value
        folder.measurements.write(measurement)

    measure("second", 0.25)
    write_record(*add_record(folder, "Ada", log=["mean"]))
    training = folder.read_json("training.json")
    other_fit = {**training, "seconds_outside_loops": 1.25}
    folder.write_json("training.json", other_fit)
    measure("another", 0.5)
    measure("toy", 0.75)
    write_record(*add_record(folder, "Ada"))
    record = read_record(record.path)
    by_name = {each["protocol"]["name"]: each for each in record.measurements.all()}
    assert by_name["toy"] == first[0]
    assert {name: mean_values(each)["brightness"] for name, each in by_name.items() if name != "toy"} == {
        "second": 0.25,
        "another": 0.5,
    }
    assert [name for name, each in by_name.items() if "fit" in each] == ["another"]
    assert (by_name["another"]["fit"]["cost"], record.content["cost"]) == (other_fit, training)
    assert list(record.content["log"]) == ["mean"]
    with pytest.raises(ValueError, match=r"without its scalar 'mean'; .* --log"):
        add_record(folder, "Ada", overwrite=True)
    assert notes(by_name["another"]) == ["measured by another on a run made again with the same settings and seed"]
    assert notes(by_name["second"]) == []
    costs = {name: cost(record, by_name[name])["seconds_outside_loops"] for name in ("second", "another")}
    assert costs == {"second": [training["seconds_outside_loops"]], "another": [1.25]}  # of the fit that was measured
    assert [*record_checks._form(record)] == []
    assert record.measurements.assembled({**first[0]["protocol"], "name": "whole"})["parts"] == ["second"]  # one fit
    with pytest.raises(ValueError, match="or a measurement by a protocol that the record lacks"):
        add_record(folder, "Ada")
    with pytest.raises(ValueError, match="its seconds are the same"):
        add_record(folder, "Grace")  # the fit that Ada measured by `another`
    measurement = copy.deepcopy(folder.measurements.of(first[0]["protocol"]))
    for each in (measurement["protocol"]["metrics"], measurement["repeats"][0]["metrics"]):
        each["later"] = each.pop("brightness")  # a metric that takes hours, say, by the protocol that the record has
    folder.measurements.write(measurement)
    write_record(*add_record(folder, "Ada"))
    record = read_record(record.path)
    assert [list(each["protocol"]["metrics"]) for each in record.measurements.all()].count(["later"]) == 1
    with pytest.raises(ValueError, match="or a measurement by a protocol that the record lacks"):
        add_record(folder, "Ada")
    measure("fourth", 1.0)
    with pytest.raises(ValueError, match="expected --log of the fit that the record of"):
        add_record(folder, "Ada", log=["mean"])


def test_a_record_is_not_replaced_by_one_with_fewer_values(finished: RunFolder, tmp_path: Path) -> None:
    """A run that was made again is often measured by one protocol alone; the values by others would be lost."""
    shutil.copytree(finished.path, tmp_path / "runs" / finished.id)
    folder = Store(tmp_path).folder(finished.id)
    measurement = folder.measurements.all()[0]
    further = {**measurement, "protocol": {**measurement["protocol"], "name": "second"}}
    folder.measurements.write(further)
    write_record(*add_record(folder, "Ada"))
    (path,) = (tmp_path / "records").glob("*/*.json")
    before = path.read_bytes()
    shutil.rmtree(folder.path)
    shutil.copytree(finished.path, folder.path)
    with pytest.raises(ValueError, match=r"without its brightness by the protocol 'second'; measure .*`dpgen evaluate"):
        add_record(folder, "Ada", overwrite=True)
    assert path.read_bytes() == before
    failed = copy.deepcopy(further)
    failed["repeats"][0]["metrics"]["brightness"] |= {"status": "not measured", "values": {}, "reason": "no weights"}
    folder.measurements.write(failed)
    with pytest.raises(ValueError, match="without its brightness by the protocol 'second'"):
        add_record(folder, "Ada", overwrite=True)
    folder.measurements.write(further)
    write_record(*add_record(folder, "Ada", overwrite=True))
    path.write_text("{")  # nothing of a record that cannot be read is kept
    write_record(*add_record(finished, "Ada", overwrite=True))
    assert path.read_bytes() != before


def test_a_metric_of_another_fit_is_assembled_with_a_note() -> None:
    """Accuracies of one day and FID of the next are of one generator if their fits took the same seconds."""

    def part(key: str, seconds: float, date: str) -> dict[str, Any]:
        result = {"status": "measured", "values": {key: 1.0}, "reason": None, "notes": []}
        return {
            "protocol": {"name": key, "num_samples": 9, "metrics": {key: {"name": key}}},
            "repeats": [{"seed": 0, "samples": {}, "metrics": {key: result}}],
            "complete": True,
            "fit": {"date": date, "cost": {"seconds": seconds}, "environment": {}},
        }

    whole = {"name": "whole", "num_samples": 9, "metrics": {key: {"name": key} for key in ("acc", "fid")}}
    acc = part("acc", 2.5, "2026-11-26")
    one, another = part("fid", 2.5, "2026-11-27"), part("fid", 3.5, "2026-11-26")
    another["repeats"][0]["metrics"]["fid"]["values"] = {"fid": 2.0}
    for parts, fid, expected in (
        ((acc, one), 1.0, []),
        ((acc, another), 2.0, ["fid: of another fit with the same settings and seed"]),
        ((acc, another, one), 1.0, []),  # the fit that the accuracies are of comes first
    ):
        measurement = RecordedMeasurements(parts).assembled(whole)
        assert metric_values(measurement) == {"acc": [1.0], "fid": [fid]}
        assert notes(measurement)[1:] == expected


def test_repeats_of_two_fits_are_not_averaged() -> None:
    """Drawings of one generator are repeats, and those of two would have the spread of training in them."""

    def part(name: str, seconds: float, repeats: int) -> dict[str, Any]:
        result = {"status": "measured", "values": {"fid": seconds}, "reason": None, "notes": []}
        return {
            "protocol": {"name": name, "metrics": {"fid": {"name": "fid"}}, "repeats": repeats},
            "repeats": [{"seed": 0, "samples": {}, "metrics": {"fid": result}}] * repeats,
            "complete": True,
            "fit": {"date": "2026-11-26", "cost": {"seconds": seconds}, "environment": {}},
        }

    whole = {"name": "whole", "metrics": {"fid": {"name": "fid"}}, "repeats": 5}
    measurement = RecordedMeasurements((part("once", 2.5, 1), part("twice", 3.5, 2))).assembled(whole)
    assert metric_values(measurement) == {"fid": [2.5]}


def test_a_verified_record_is_not_completed(finished: RunFolder, tmp_path: Path) -> None:
    """The verification does not cover the further values."""
    shutil.copytree(finished.path, tmp_path / "runs" / finished.id)
    folder = Store(tmp_path).folder(finished.id)
    write_record(*add_record(folder, "Ada"))
    folder.write_json("training.json", {**folder.read_json("training.json"), "seconds_outside_loops": 1.25})
    write_record(*add_record(folder, "Grace"))
    measurement = folder.measurements.all()[0]
    folder.measurements.write({**measurement, "protocol": {**measurement["protocol"], "name": "second"}})
    with pytest.raises(ValueError, match=r"expected a record without a verification, got .* verified by 'Grace'"):
        add_record(folder, "Ada")


def test_a_record_is_not_replaced_by_one_without_its_kept_steps(finished: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(finished.path, tmp_path / "runs" / finished.id)
    folder = Store(tmp_path).folder(finished.id)
    step = folder.at_step(2)
    shutil.copytree(folder.path / "metrics", step.path / "metrics")
    step.write_json("step.json", {"step": 2, "epsilon": 0.5})
    write_record(*add_record(folder, "Ada"))
    write_record(*add_record(folder, "Ada", overwrite=True))
    shutil.rmtree(step.path / "metrics")
    for _ in range(2):  # a step without a measurement, and no step
        with pytest.raises(ValueError, match=r"without those of step 2; .* runtime\.measure_kept=true"):
            add_record(folder, "Ada", overwrite=True)
        shutil.rmtree(step.path, ignore_errors=True)


def test_what_an_edited_protocol_measured_before_is_left_out(finished: RunFolder, tmp_path: Path) -> None:
    """It would not be accepted, and another measurement by the protocol of now does not remove it."""
    shutil.copytree(finished.path, tmp_path / "runs" / finished.id)
    folder = Store(tmp_path).folder(finished.id)
    (measurement,) = folder.measurements.all()
    edited = {**measurement, "protocol": {**measurement["protocol"], "name": "quick"}}  # quick has other settings
    folder.measurements.write(edited)
    record, _ = add_record(folder, "Ada")
    assert [each["protocol"]["name"] for each in record.measurements.all()] == ["toy"]
    assert left_out(folder.measurements.all()) == [edited]
    folder.measurements.file_of(measurement["protocol"]).unlink()
    record, _ = add_record(folder, "Ada")
    assert any("settings of protocol quick have changed" in text for text in record_checks._protocols(record))


@pytest.mark.parametrize(
    ("device", "seconds", "threads", "expected"),
    [("cpu", 9.0, 1, 7.0), ("cpu", 3.0, 1, 3.0), ("cpu", 3.0, 2, 6.0), ("cuda", 9.0, 1, None)],
)
def test_processor_time_that_a_fit_did_not_count_is_of_another_one_on_such_a_device(
    device: str, seconds: float, threads: int, expected: float | None
) -> None:
    """A slower processor's time is cut at what the threads of the fit can have used at most."""
    own = {"seconds": {"train": seconds}, "device": "cpu"}
    another = {"seconds": {"train": 8.0}, "cpu_seconds": 7.0, "device": device}
    content = {
        "cost": own,
        "environment": {"machine": {"torch_threads": threads}},
        "measurements": [{"protocol": {}, "fit": {"cost": another}}],
    }
    assert Record(Path("x.json"), content).cost.get("cpu_seconds") == expected
    counted = {**own, "cpu_seconds": 1.0}
    assert Record(Path("x.json"), {**content, "cost": counted}).cost == counted

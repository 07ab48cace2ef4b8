"""A metric that has no value for a run on any machine is said so once; the run lacks nothing, and is not made again."""

from __future__ import annotations

from pathlib import Path

from dpgen_bench.store.folders import RunFolder
from dpgen_bench.store.values import notes, to_try_again, unmeasured
from tests.protocol_toys import metric, released, run, spec_for


def states(folder: RunFolder, spec: object) -> tuple[bool, bool]:
    record = spec.protocol_record()  # type: ignore[attr-defined]
    return folder.measurements.covered(record), folder.measurements.fully_measured(record)


def test_an_unmeasurable_metric_is_not_tried_again(tmp_path: Path) -> None:
    folder, tally = released(tmp_path), tmp_path / "tally"
    metrics = {"never": metric("Never", tally=str(tally)), "mean": metric("Mean")}
    spec = spec_for(tmp_path, metrics, repeats=2)
    measurement = run(spec, folder)
    assert states(folder, spec) == (True, True)
    assert (unmeasured(measurement), to_try_again(measurement)) == (["never"], [])
    assert "never: unmeasurable: it has no value for a set" in notes(measurement)
    assert run(spec, folder) == measurement
    other = spec_for(tmp_path, metrics, name="other", repeats=2)  # takes results of the first protocol
    assert states(folder, other) == (True, False)
    run(other, folder)
    assert tally.read_text().split() == ["never", "never"]


def test_what_this_machine_lacks_is_tried_again(tmp_path: Path) -> None:
    folder, file = released(tmp_path), tmp_path / "weights.pt"
    spec = spec_for(tmp_path, {"lacking": metric("NeedsFile", file=str(file))})
    assert to_try_again(run(spec, folder)) == ["lacking"]
    assert states(folder, spec) == (False, False)

"""Tests that a protocol measures each value once wherever it is interrupted, and never mixes two protocols."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import MetricResult
from dpgen_bench.evaluate.protocol import build_metrics, evaluate_each
from dpgen_bench.runs.measure import repeat_seed
from dpgen_bench.store.folders import RunFailed, RunFolder, Store
from dpgen_bench.store.measurements import Measurements, protocol_hash
from dpgen_bench.store.values import mean_values, metric_values, notes
from tests.protocol_toys import generator, metric, released, run, spec_for, the_measurement


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return released(tmp_path)


# Repeats


def test_each_repeat_draws_its_own_samples_from_one_generator(tmp_path, folder):
    measurement = run(spec_for(tmp_path, {"mean": metric("Mean")}, repeats=3), folder)
    seeds = [repeat["seed"] for repeat in measurement["repeats"]]
    assert seeds == [repeat_seed(0, r) for r in range(3)]
    assert seeds[0] == 0
    assert len(set(seeds)) == 3
    values = metric_values(the_measurement(folder))["mean_pixel"]
    expected = [float(generator().sample(torch.arange(40) % 10, seed).float().mean()) for seed in seeds]
    assert values == pytest.approx(expected, rel=1e-6)
    assert len(set(values)) == 3
    assert mean_values(the_measurement(folder))["mean_pixel"] == pytest.approx(np.mean(values))


def test_the_kept_samples_are_those_of_the_first_repeat(tmp_path, folder):
    spec = spec_for(tmp_path, {"mean": metric("Mean")}, repeats=2)
    run(spec, folder)
    with np.load(folder.path / "samples.npz") as kept:
        assert np.array_equal(kept["images"], generator().sample(torch.arange(40) % 10, 0).numpy())


def test_repeat_seeds_are_distinct_and_fixed():
    seeds = {repeat_seed(seed, repeat) for seed in range(50) for repeat in range(5)}
    assert len(seeds) == 250
    assert repeat_seed(0, 1) == 538808961  # pinned: another rule would change published values


# Interrupted


class Killed(BaseException):
    pass


def test_killed_after_any_write_every_metric_still_runs_once(tmp_path, monkeypatch):
    """Two repeats of three metrics are killed after each write of the measurement, and then resumed."""
    tally = tmp_path / "tally"
    metrics = {name: metric("Mean", name=name, tally=str(tally)) for name in ("one", "two", "three")}
    spec = spec_for(tmp_path, {**metrics, "sum": metric("Sum", of=["one", "two"])}, repeats=2)
    write = Measurements.write
    reference = None
    for kill_at in range(1, 10):
        folder = Store(tmp_path).folder(f"run{kill_at}")
        folder.path.mkdir(parents=True)
        generator().save(folder.path)
        tally.write_text("")
        written = 0

        def killing(self, content, kill_at=kill_at):
            nonlocal written
            write(self, content)
            written += 1
            if written == kill_at:
                raise Killed

        monkeypatch.setattr(Measurements, "write", killing)
        with pytest.raises(Killed):
            run(spec, folder)
        measurement = run(spec, folder)
        assert sorted(tally.read_text().split()) == sorted(["one", "two", "three"] * 2)
        without_times = json.loads(json.dumps(measurement))
        for repeat in without_times["repeats"]:
            for result in repeat["metrics"].values():
                result["seconds"] = 0
            repeat["metrics"] = dict(sorted(repeat["metrics"].items()))
        reference = reference or without_times
        assert without_times == reference
    assert reference["complete"]


def test_a_complete_measurement_is_not_changed(tmp_path, folder):
    tally = tmp_path / "tally"
    spec = spec_for(tmp_path, {"mean": metric("Mean", tally=str(tally))})
    first = run(spec, folder)
    assert run(spec, folder) == first
    assert tally.read_text().split() == ["mean_pixel"]


def test_what_a_part_of_a_protocol_has_measured_is_not_measured_again(tmp_path, folder):
    tally = tmp_path / "tally"
    metrics = {name: metric("Mean", name=name, tally=str(tally)) for name in ("one", "two")}
    whole = {**metrics, "sum": metric("Sum", of=["one", "two"])}
    part = run(spec_for(tmp_path, {"one": metrics["one"]}, repeats=2), folder)
    measured = run(spec_for(tmp_path, whole, repeats=2), folder)
    assert tally.read_text().split() == ["one", "one", "two", "two"]
    for of_part, of_whole in zip(part["repeats"], measured["repeats"], strict=True):
        assert of_whole["metrics"]["one"] == of_part["metrics"]["one"]
        assert {key: of_whole[key] for key in ("seed", "samples")} == {key: of_part[key] for key in ("seed", "samples")}
        assert of_whole["metrics"]["sum"]["values"]["sum"] == pytest.approx(
            sum(of_whole["metrics"][name]["values"][name] for name in ("one", "two"))
        )
    run(spec_for(tmp_path, whole, repeats=2), folder, again=True)
    assert len(tally.read_text().split()) == 8


def test_the_first_of_several_repeats_may_be_measured_on_its_own(tmp_path, folder):
    """Of a metric that takes hours, some tables have fewer repeats than the paper: as many as were measured."""
    tally = tmp_path / "tally"
    metrics = {name: metric("Mean", name=name, tally=str(tally)) for name in ("one", "two")}
    once = run(spec_for(tmp_path, {"one": metrics["one"]}, name="once", repeats=1), folder)
    run(spec_for(tmp_path, {"two": metrics["two"]}, repeats=3), folder)
    whole = spec_for(tmp_path, metrics, repeats=3)
    assembled = folder.measurements.assembled(whole.protocol_record())
    assert {name: len(values) for name, values in metric_values(assembled).items()} == {"one": 1, "two": 3}
    assert not folder.measurements.covered(whole.protocol_record())
    run(whole, folder)
    assert tally.read_text().split() == ["one", *3 * ["two"], "one", "one"]
    (measured,) = (each for each in folder.measurements.all() if each["protocol"] == whole.protocol_record())
    assert measured["repeats"][0]["metrics"]["one"] == once["repeats"][0]["metrics"]["one"]
    first = run(spec_for(tmp_path, metrics, name="first", repeats=1), folder)
    assert first["repeats"] == measured["repeats"][:1]
    assert len(tally.read_text().split()) == 6


def test_what_an_interrupted_protocol_has_measured_is_not_measured_again(tmp_path, folder, monkeypatch):
    """Of five repeats, two were measured before a machine was lost: they count for a protocol with one."""
    tally = tmp_path / "tally"
    metrics = {name: metric("Mean", name=name, tally=str(tally)) for name in ("one", "two")}
    write, writes = Measurements.write, []

    def stopped(self, measurement):
        write(self, measurement)
        writes.append(measurement)
        if len(writes) == 3:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Measurements, "write", stopped)
        with pytest.raises(Killed):
            run(spec_for(tmp_path, metrics, repeats=5), folder)
    assert tally.read_text().split() == ["one", "two", "one"]
    assert folder.measurements.all() == []
    first = run(spec_for(tmp_path, metrics, name="first", repeats=1), folder)
    run(spec_for(tmp_path, {"one": metrics["one"]}, name="others", repeats=2), folder)
    assert len(tally.read_text().split()) == 3
    assert first["complete"]
    whole = run(spec_for(tmp_path, metrics, repeats=5), folder)
    assert whole["repeats"][:1] == first["repeats"]
    assert len(tally.read_text().split()) == 10
    run(spec_for(tmp_path, metrics, name="first", repeats=1), folder, again=True)
    assert len(tally.read_text().split()) == 12


def test_only_failed_metrics_are_run_again(tmp_path, folder):
    tally, unless = tmp_path / "tally", tmp_path / "mended"
    metrics = {
        "mean": metric("Mean", tally=str(tally)),
        "fails": metric("Fails", name="failing", unless=str(unless)),
        "sum": metric("Sum", of=["mean_pixel", "failing"]),
    }
    spec = spec_for(tmp_path, metrics)
    results = run(spec, folder)["repeats"][0]["metrics"]
    assert results["fails"]["status"] == "failed"
    assert results["sum"]["status"] == "not measured"
    assert "sum: not measured: missing failing" in notes(the_measurement(folder))
    assert not folder.measurements.fully_measured(spec.protocol_record())
    unless.touch()
    results = run(spec, folder)["repeats"][0]["metrics"]
    assert results["sum"]["values"]["sum"] == pytest.approx(results["mean"]["values"]["mean_pixel"] + 1)
    assert folder.measurements.fully_measured(spec.protocol_record())
    assert tally.read_text().split() == ["mean_pixel"]


@pytest.mark.parametrize("change", [{"num_samples": 20}, {"labels": "uniform"}, {"floor": 128}, {"rounding": "none"}])
def test_values_of_another_setting_are_never_mixed_in(tmp_path, folder, change):
    tally = tmp_path / "tally"
    metrics = {"mean": metric("Mean", tally=str(tally))}
    first = run(spec_for(tmp_path, metrics), folder)
    changed = spec_for(tmp_path, metrics, **change)
    assert not folder.measurements.of(changed.protocol_record())
    second = run(changed, folder)
    assert len(tally.read_text().split()) == 2
    assert second["protocol"] != first["protocol"]


def test_another_revision_of_the_harness_measures_again(tmp_path, folder, monkeypatch):
    spec = spec_for(tmp_path, {"mean": metric("Mean")})
    run(spec, folder)
    monkeypatch.setattr("dpgen_bench.config.spec.EVALUATION_VERSION", -1)
    assert not folder.measurements.of(spec.protocol_record())


def test_measuring_again_keeps_the_old_measurement_until_the_new_one_is_complete(tmp_path, folder, monkeypatch):
    tally = tmp_path / "tally"
    metrics = {name: metric("Mean", name=name, tally=str(tally)) for name in ("one", "two")}
    spec = spec_for(tmp_path, metrics)
    old = run(spec, folder)
    write = Measurements.write

    def stopped(self, measurement):
        write(self, measurement)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Measurements, "write", stopped)
        with pytest.raises(Killed):
            run(spec, folder, again=True)
    assert the_measurement(folder) == old
    run(spec, folder, again=True)
    assert tally.read_text().split() == ["one", "two", "one", "two"]
    assert not folder.measurements.unfinished(spec.protocol_record())


def test_measuring_again_keeps_the_earlier_measurement_if_one_of_its_values_is_missing_now(tmp_path, folder):
    tally, weights, mended = (tmp_path / name for name in ("tally", "weights", "mended"))
    metrics = {
        "mean": metric("Mean", tally=str(tally)),
        "fid": metric("Fails", name="fid", unless=str(weights)),
        "kid": metric("Fails", name="kid", unless=str(mended)),
    }
    spec = spec_for(tmp_path, metrics, repeats=2)
    weights.touch()
    old = run(spec, folder)
    weights.unlink()
    before = folder.measurements.file_of(spec.protocol_record()).read_bytes()
    # KID had no value before, so that it is not among those that are missed.
    with pytest.raises(RunFailed, match=r"expected values of fid .*, got none .*earlier measurement are kept"):
        run(spec, folder, again=True)
    assert folder.measurements.file_of(spec.protocol_record()).read_bytes() == before
    mended.touch()
    assert run(spec, folder) == old  # also if `dpgen run` continues the evaluation
    assert folder.measurements.file_of(spec.protocol_record()).read_bytes() == before
    weights.touch()
    run(spec, folder, again=True)
    assert folder.measurements.fully_measured(spec.protocol_record())
    assert len(tally.read_text().split()) == 4


def test_a_metric_that_had_no_value_does_not_keep_the_earlier_measurement(tmp_path, folder):
    metrics = {"mean": metric("Mean"), "fails": metric("Fails")}
    spec = spec_for(tmp_path, metrics)
    run(spec, folder)
    folder.measurements.write(the_measurement(folder) | {"made_with": "an older version"})
    assert run(spec, folder, again=True)["made_with"] != "an older version"


@pytest.mark.parametrize(
    "corruption", ["", "{", "[]", "null", '{"complete": true}', '{"repeats": [{}], "complete": true}']
)
def test_a_damaged_measurement_is_reported_and_repeated(tmp_path, folder, corruption):
    spec = spec_for(tmp_path, {"mean": metric("Mean")})
    good = run(spec, folder)
    folder.measurements.file_of(spec.protocol_record()).write_text(corruption)
    with pytest.warns(UserWarning, match="it is ignored"):
        assert folder.measurements.all() == []
    with pytest.warns(UserWarning, match="it is ignored"):
        again = run(spec, folder)
    assert again["repeats"][0]["metrics"]["mean"]["values"] == good["repeats"][0]["metrics"]["mean"]["values"]


def test_measurements_of_two_versions_of_a_protocol_are_both_kept(tmp_path, folder):
    metrics = {"mean": metric("Mean")}
    first, second = spec_for(tmp_path, metrics), spec_for(tmp_path, metrics, num_samples=20)
    kept = run(first, folder)
    run(second, folder)
    assert folder.measurements.of(first.protocol_record()) == kept
    assert folder.measurements.fully_measured(first.protocol_record())
    assert folder.measurements.fully_measured(second.protocol_record())


# Several metrics


def test_two_metrics_with_a_value_of_one_name(tmp_path, folder):
    results = run(spec_for(tmp_path, {"a": metric("Mean"), "b": metric("Mean")}), folder)["repeats"][0]["metrics"]
    assert results["a"]["status"] == "measured"
    assert results["b"]["status"] == "failed"
    assert "['mean_pixel'] have the names of those of 'a'" in results["b"]["reason"]


def test_a_measurement_contains_no_path_of_this_machine(tmp_path, folder, capsys):
    file = str(tmp_path / "weights.pt")
    (result,) = run(spec_for(tmp_path, {"a": metric("NeedsFile", file=file)}), folder)["repeats"][0]["metrics"].values()
    assert result["notes"] == ["weights of [path]"]
    assert result["reason"] == "needs [path]; copy it there"
    assert f"needs {file}; copy it there" in capsys.readouterr().out  # printed on the terminal


def test_metrics_of_one_core_run_in_other_processes_and_others_here(tmp_path, folder):
    metrics = {"here": metric("Process", name="here", apart=False), "there": metric("Process", name="there")}
    run(spec_for(tmp_path, metrics, "runtime.workers=1"), folder)
    values = mean_values(the_measurement(folder))
    assert values["here_pid"] != values["there_pid"]


@pytest.mark.parametrize("others", [[], ["another protocol"]])
def test_the_scratch_folder_is_emptied(tmp_path, folder, others):
    """That of the protocol which is complete, and not what another one continues from."""
    spec = spec_for(tmp_path, {"mean": metric("Mean")})
    own = folder.path / "scratch" / protocol_hash(spec.protocol_record())
    for name in [own.name, *others]:
        (own.parent / name / "features").mkdir(parents=True)
    run(spec, folder)
    assert [path.name for path in own.parent.glob("*")] == others
    assert own.parent.exists() == bool(others)


def test_training_records_of_a_run_for_release_stay_closed(tmp_path, folder):
    metrics = {"train": metric("NeedsTrain"), "mean": metric("Mean")}
    spec = spec_for(tmp_path, metrics, "privacy.noise=os")
    results = run(spec, folder)["repeats"][0]["metrics"]
    assert results["train"]["status"] == "unmeasurable"
    assert folder.measurements.covered(spec.protocol_record())  # nothing is left to do
    assert "for release" in results["train"]["reason"]
    assert results["mean"]["status"] == "measured"
    for unprivate in ("privacy.noise=seeded", "privacy.diagnostics=unsafe"):
        other = Store(tmp_path).folder(unprivate)
        other.path.mkdir(parents=True)
        generator().save(other.path)
        noise = ["privacy.noise=os"] if "diagnostics" in unprivate else []
        results = run(spec_for(tmp_path, metrics, unprivate, *noise), other)["repeats"][0]["metrics"]
        assert results["train"]["values"] == {"train_size": 1437.0}


def test_a_metric_that_cannot_be_built_is_named_before_anything_is_measured():
    protocol = OmegaConf.create({"name": "toy", "metrics": {"typo": metric("Mean", nane="x")}})
    with pytest.raises(ValueError, match=r"metric 'typo' of protocol 'toy' cannot be built: .*nane"):
        build_metrics(protocol)


def test_combined_metrics_come_last_and_see_all_values(tmp_path):
    class Two:
        def combine(self, values, notes):
            return {"seen": float(len(values))}

    class One:
        def __call__(self, samples, real_test, ctx):
            return {"a": 1.0, "b": 2.0}

    from dpgen_bench.evaluate.metric import EvalContext

    records = Records(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]))
    ctx = EvalContext(0, "cpu", 2, tmp_path)
    done: dict = {}
    for key, result in evaluate_each({"two": Two(), "one": One()}, records, records, ctx, 1, done, "title"):
        assert isinstance(result, MetricResult)
        done[key] = {"values": result.values}
    assert list(done) == ["one", "two"]
    assert done["two"]["values"] == {"seen": 2.0}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_samples": 2.5}, "num_samples"),
        ({"num_samples": 0}, "num_samples"),
        ({"repeats": 0}, "repeats"),
        ({"repeats": True}, "repeats"),
        ({"rounding": "up"}, "rounding"),
        ({"labels": "sorted"}, "labels"),
        ({"floor": -1}, "floor"),
        ({"floor": 256}, "floor"),
        ({"floor": "abc"}, "floor"),
        ({"name": "../ledger"}, "name"),
        ({"name": None}, "name"),
    ],
)
def test_a_protocol_that_cannot_be_is_refused_before_training(tmp_path, change, complaint):
    with pytest.raises(ValueError, match=f"protocol.{complaint}"):
        spec_for(tmp_path, {}, **change)


def test_unknown_entries_of_a_protocol_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"in a protocol, got \['repeat'\]"):
        spec_for(tmp_path, {}, repeat=5)


@pytest.mark.parametrize("workers", ["0", "-1", "1.5", "many"])
def test_numbers_of_processes(tmp_path, workers):
    with pytest.raises(ValueError, match=r"runtime\.workers"):
        spec_for(tmp_path, {}, f"runtime.workers={workers}")

"""Tests of runs: their files and identity, skipping, measuring again, failures, restarts, and rules of release."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import RunSpec, build_spec
from dpgen_bench.generator import Generator
from dpgen_bench.outcomes.sample_command import NotForRelease, sample_run
from dpgen_bench.privacy.accountants.calibration import BudgetExceeded
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.runs.execute import RunFailed, evaluate_run, execute
from dpgen_bench.runs.plan import plan
from dpgen_bench.store.folders import Store
from tests.run_toys import config, contents, prepare, undisturbed_run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"))


def names(folder) -> list[str]:
    """The names of the protocols of a run's complete measurements."""
    return [measurement["protocol"]["name"] for measurement in folder.measurements.all()]


def test_a_finished_run_has_the_files_of_the_store(undisturbed):
    existing = {path.name for path in undisturbed.path.iterdir()}
    expected = (
        "config.yaml ledger.json metrics environment.json log.jsonl samples.npz samples.png generator.safetensors"
    )
    assert set(expected.split()) | {"checkpoints", "DONE", "status.json"} <= existing
    assert undisturbed.status() == "finished"
    ledger = json.loads((undisturbed.path / "ledger.json").read_text())
    assert 0 < float(ledger["epsilon"]["proven"]) <= 10
    assert ledger["noise"]["meaning"].startswith("NOT FOR RELEASE")
    assert any("floating-point" in line for line in ledger["out_of_scope"])
    assert ledger["entries"][0]["executed"] == ledger["entries"][0]["times"] == 6
    assert len((undisturbed.path / "log.jsonl").read_text().splitlines()) == 6


def test_two_runs_with_os_noise_differ(tmp_path):
    one, two = (execute(config(tmp_path / name, "privacy.noise=os")) for name in "ab")
    assert one.id == two.id
    assert contents(one)["generator.safetensors"] != contents(two)["generator.safetensors"]


def test_a_finished_run_is_skipped(undisturbed, capsys):
    before = (undisturbed.path / "DONE").stat().st_mtime_ns
    execute(config(undisturbed.path.parent.parent))
    assert "skipped" in capsys.readouterr().out
    assert (undisturbed.path / "DONE").stat().st_mtime_ns == before


def test_another_protocol_measures_without_training(undisturbed, tmp_path):
    shutil.copytree(undisturbed.path.parent.parent, tmp_path, dirs_exist_ok=True)
    trained = (tmp_path / "runs" / undisturbed.id / "generator.safetensors").stat().st_mtime_ns
    again = config(tmp_path, "protocol.name=other", "protocol.num_samples=20")
    folder = execute(again)
    assert names(folder) == ["other", "toy"]
    assert (folder.path / "generator.safetensors").stat().st_mtime_ns == trained


def test_a_run_can_be_measured_again_by_its_id(undisturbed, tmp_path):
    shutil.copytree(undisturbed.path.parent.parent, tmp_path, dirs_exist_ok=True)
    evaluate_run(tmp_path, undisturbed.id[:5], ["protocol=quick", "protocol.num_samples=60"])
    folder = Store(tmp_path).folder(undisturbed.id)
    (measurement,) = [each for each in folder.measurements.all() if each["protocol"]["name"] == "quick"]
    assert measurement["protocol"]["num_samples"] == 60


def test_changed_protocol_settings_are_measured_again(undisturbed, tmp_path, capsys):
    shutil.copytree(undisturbed.path.parent.parent, tmp_path, dirs_exist_ok=True)
    folder = execute(config(tmp_path, "protocol.num_samples=20"))
    assert "skipped" not in capsys.readouterr().out
    assert sorted(measurement["protocol"]["num_samples"] for measurement in folder.measurements.all()) == [20, 40]
    with np.load(folder.path / "samples.npz") as archive:
        assert len(archive["images"]) == 20


def test_an_evaluation_without_any_value_fails_with_the_names_of_its_metrics(undisturbed, tmp_path):
    shutil.copytree(undisturbed.path.parent.parent, tmp_path, dirs_exist_ok=True)
    others = ["~protocol.metrics.logreg", "~protocol.metrics.mlp"]
    broken = "+protocol.metrics.broken={_target_: tests.toy_metrics.Fails, %s}"
    with pytest.raises(RunFailed, match="expected a value of one of the metrics broken, got none"):
        evaluate_run(tmp_path, undisturbed.id, ["protocol=quick", *others, broken % "name: nothing"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=7"], "got seed"),
        (["protocol=quick", "dataset=mnist"], "got dataset"),
        (["privacy.noise=seeded"], "got privacy.noise"),
        (["protocol.repeats=2"], "expected protocol=NAME together with protocol.repeats"),
        (["protocol=quick", "protocol.num_samples=0"], "protocol.num_samples"),
        (["protocol=quick", "protocol.floor=300"], "protocol.floor"),
        (["protocol=quick", "protocol.name=../ledger"], "protocol.name"),
        (["protocol=quick", "protocol.metrics.mlp.classifier.estimator=sklearn.Nothing"], "metric 'mlp'"),
        (["protocol=quick", "runtime.workers=0"], "runtime.workers"),
    ],
)
def test_invalid_overrides_of_evaluate_change_no_file(undisturbed, tmp_path, overrides, message):
    shutil.copytree(undisturbed.path.parent.parent, tmp_path, dirs_exist_ok=True)
    folder = Store(tmp_path).folder(undisturbed.id)
    before = {path: path.read_bytes() for path in folder.path.rglob("*.json")}
    with pytest.raises(ValueError, match=message):
        evaluate_run(tmp_path, undisturbed.id, overrides)
    assert {path: path.read_bytes() for path in folder.path.rglob("*.json")} == before


def test_without_a_protocol_evaluate_uses_that_of_the_run(undisturbed, tmp_path):
    """The measurement of `evaluate` is the one that `run` and the tables look for, and vice versa."""
    shutil.copytree(undisturbed.path.parent.parent, tmp_path, dirs_exist_ok=True)
    folder = evaluate_run(tmp_path, undisturbed.id, [])
    (measurement,) = folder.measurements.all()
    assert measurement["protocol"] == build_spec(config(tmp_path)).protocol_record()
    small = ["protocol=standard_2k", "protocol.num_samples=20", "~protocol.metrics.fid", "~protocol.metrics.kid"]
    others = [
        key for key in compose_config(["protocol=standard_2k"]).protocol.metrics if key not in ("fid", "kid", "lda")
    ]
    small += [f"~protocol.metrics.{key}" for key in others]
    folder = evaluate_run(tmp_path, undisturbed.id, small)
    record = RunSpec(build_spec(compose_config(small)).config, training={}).protocol_record()
    assert folder.measurements.fully_measured(record)


def test_a_failed_metric_and_a_missing_generator_are_made_again(undisturbed, tmp_path):
    shutil.copytree(undisturbed.path.parent.parent, tmp_path, dirs_exist_ok=True)
    folder = Store(tmp_path).folder(undisturbed.id)
    (measurement,) = [each for each in folder.measurements.all() if each["protocol"]["num_samples"] == 40]
    measurement["repeats"][0]["metrics"]["brightness"] |= {"status": "failed", "values": {}, "reason": "no"}
    folder.measurements.write(measurement)
    assert not folder.measurements.fully_measured(measurement["protocol"])
    execute(config(tmp_path))
    assert folder.measurements.fully_measured(measurement["protocol"])
    (folder.path / "generator.safetensors").unlink()
    assert contents(execute(config(tmp_path))) == contents(undisturbed)


@pytest.mark.parametrize("cheat", ["AsksByRaising", "RaisesTheBudget"])
def test_cheats_that_a_run_itself_refuses(tmp_path, cheat):
    with pytest.raises(RunFailed, match=r"an answer without noise|expected the ledger's budget to be"):
        execute(config(tmp_path, target=f"tests.toys.{cheat}"))
    assert not Store(tmp_path).runs()[0].trained


def test_the_id_is_the_training_config_and_nothing_else(tmp_path):
    first = build_spec(config(tmp_path)).id
    same = ["runtime.checkpoint_s=5", "protocol.num_samples=7", "runtime.device=cpu", "privacy.population=staff"]
    assert {build_spec(config(tmp_path / "elsewhere", word)).id for word in same} == {first}
    other = ["seed=1", "privacy.epsilon=3", "privacy.noise=os", "scale.max_steps=2", "method.steps=5"]
    ids = {build_spec(config(tmp_path, word)).id for word in other}
    assert len(ids) == len(other)
    assert first not in ids
    assert build_spec(config(tmp_path, "privacy.epsilon=10.0")).id == first


def test_a_failed_run_keeps_its_error_and_is_tried_again(tmp_path):
    with pytest.raises(RunFailed, match="this method always fails"):
        execute(config(tmp_path, target="tests.toys.Broken"))
    folder = Store(tmp_path).runs()[0]
    assert folder.status() == "failed"
    status = folder.read_json("status.json")
    assert status["phase"] == "train"
    assert "this method always fails" in status["error"]
    assert "toys.py" in (folder.path / "private" / "traceback.txt").read_text()
    assert str(tmp_path) not in json.dumps(status)
    with pytest.raises(RunFailed):
        execute(config(tmp_path, target="tests.toys.Broken"))


def test_a_plan_over_budget_fails_and_releases_nothing(tmp_path):
    dpgan = config(tmp_path, "privacy.epsilon=1", small=False)
    dpgan.method = compose_config(["method=dpgan"]).method
    dpgan.method.update({"sigma": 0.5, "steps": 1000, "d_d": 8, "d_g": 8})
    with pytest.raises(RunFailed, match="would bring epsilon to") as caught:
        execute(dpgan)
    assert isinstance(caught.value.__cause__, BudgetExceeded)
    assert Ledger.load(Store(tmp_path).runs()[0].path / "ledger.json").entries == {}


def test_a_restart_inherits_the_ledger_and_the_weights_of_its_parent(tmp_path):
    small = ["method.batch_size=8", "method.d_d=8", "method.d_g=8", "method.n_d=1", "method.steps=4"]

    def gan(*overrides: str):
        dpgan = config(tmp_path, "privacy.epsilon=inf", small=False)
        dpgan.method = compose_config(["method=dpgan"]).method
        OmegaConf.update(dpgan, "runtime.keep_steps", [2])
        for override in [*small, *overrides]:
            key, value = override.split("=", 1)
            OmegaConf.update(dpgan, key, OmegaConf.create(f"v: {value}").v)
        return dpgan

    private = ["method.sigma=1.0", "method.clip_norm=1.0"]
    parent = execute(gan("method.sigma=null"))
    child = execute(
        gan("method.sigma=1.0", "method.clip_norm=1.0", f"restart={{run: '{parent.id[:6]}', checkpoint: step-2}}")
    )
    assert child.id != parent.id
    ledger = Ledger.load(child.path / "ledger.json")
    inherited = [entry for entry in ledger.entries.values() if entry.inherited_from]
    assert [entry.inherited_from for entry in inherited] == [parent.id]
    assert ledger.epsilon["proven"] == "inf"  # the releases of the parent, which is not private, count, too
    with pytest.raises(RunFailed, match="found \\['last', 'step-2'\\]"):
        execute(gan("seed=1", f"restart={{run: {parent.id}, checkpoint: step-3}}"))
    with pytest.raises(RunFailed, match="budget"):
        execute(gan("privacy.epsilon=10", *private, f"restart={{run: {parent.id}}}"))


def test_a_method_that_ignores_its_parent_is_refused_before_a_release(tmp_path):
    """One with releases, and one that makes none."""
    parent = execute(config(tmp_path))
    ignoring = config(tmp_path, "seed=1", "privacy.epsilon=40", f"restart={{run: {parent.id}}}")
    without_records = config(tmp_path, "seed=1", f"restart={{run: {parent.id}}}")
    without_records.method = compose_config(["method=uniform_noise"]).method
    for child in (ignoring, without_records):
        with pytest.raises(RunFailed, match=r"expected a method that loads its parent run \(ctx.warm_start\)"):
            execute(child)
    ledgers = [Ledger.load(folder.path / "ledger.json") for folder in Store(tmp_path).runs() if folder.id != parent.id]
    assert [entry.executed for ledger in ledgers for entry in ledger.own.values()] == [0]


def test_a_plan_needs_no_record():
    ledger = plan(["method=dp_merf", "dataset=digits", "privacy.epsilon=2", "method.features=20"])
    assert ledger.budget.epsilon == 2
    assert [event.times for event in ledger.events] == [1]
    assert ledger.events[0].std > 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=-1", r"seed to be an integer in \[0, 2\*\*63\)"),
        ("privacy.epsilon=-1", "privacy.epsilon > 0"),
        ("privacy.epsilon=much", "expected numbers for privacy.epsilon"),
        ("privacy.epsilon=1e9", "at most 1e5"),
        ("privacy.noise=foo", "privacy.noise in"),
        ("scale.max_steps=0", "scale.max_steps of at least 1"),
        ("protocol.num_samples=0", "protocol.num_samples to be an integer >= 1"),
        ("privacy.delta=2", r"privacy.delta in \(0, 1\)"),
        ("privacy.relation=both", "privacy.relation in"),
        ("method.colour=red", r"method.colour: expected a setting of the method .* \(.*steps.*got 'colour'; correct"),
    ],
)
def test_bad_configs_are_refused_before_anything_is_written(tmp_path, override, message):
    with pytest.raises(ValueError, match=message):
        execute(config(tmp_path, override))
    assert not list(tmp_path.iterdir())


def test_images_of_a_seeded_run_need_the_option_benchmark(undisturbed, tmp_path):
    results = undisturbed.path.parent.parent
    with pytest.raises(NotForRelease, match="can be subtracted"):
        sample_run(results, undisturbed.id, 5, 0, tmp_path / "a.npz", "balanced", benchmark=False)
    assert not (tmp_path / "a.npz").exists()
    sample_run(results, undisturbed.id, 5, 0, tmp_path / "a.npz", "balanced", benchmark=True)
    with np.load(tmp_path / "a.npz") as archive:
        assert archive["images"].shape == (5, 1, 8, 8)
        expected = Generator.load(undisturbed.path).sample(torch.from_numpy(archive["labels"]), 0)
        assert torch.equal(torch.from_numpy(archive["images"]), expected)
    sample_run(results, undisturbed.id, 3, 0, tmp_path / "pngs", "balanced", benchmark=True)
    assert [path.name for path in sorted((tmp_path / "pngs").iterdir())] == ["0", "1", "2"]
    with pytest.raises(ValueError, match="expected --out to name a new file or folder"):
        sample_run(results, undisturbed.id, 3, 0, tmp_path / "pngs", "balanced", benchmark=True)


def test_images_of_a_run_with_os_noise_may_be_released(tmp_path, undisturbed):
    prepare(tmp_path, undisturbed)
    folder = execute(config(tmp_path, "privacy.noise=os"))
    shutil.rmtree(tmp_path / "cache")  # nothing but the run's own folder is needed
    sample_run(tmp_path, folder.id, 4, 1, tmp_path / "out.npz", "uniform", benchmark=False)
    assert (tmp_path / "out.npz").exists()

"""The functions that `dpgen_bench` exports for notebooks and scripts."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dpgen_bench
from dpgen_bench import account, check_method, evaluate_images, export, load_generator, results, run
from dpgen_bench.api import _samples, _source
from dpgen_bench.config.compose import compose_config
from dpgen_bench.generator import NetGenerator
from dpgen_bench.nets.image_set import ImageSet
from dpgen_bench.outcomes.sample_command import sample_run
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.events import Event, Sensitivity
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.runs.samples import draw_samples
from dpgen_bench.store.folders import RunFolder
from dpgen_bench.utils.paths import CONF

LOGREG = ["~protocol.metrics.mlp", "protocol.num_samples=40", "runtime.workers=1"]
SMALL = ["method=dp_merf", "method.steps=3", "method.features=20", *LOGREG, "runtime.progress=false"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> RunFolder:
    where = tmp_path_factory.mktemp("results")
    return run(*SMALL, f"results={where}", "privacy.epsilon=2")


def test_importing_the_package_does_not_import_torch():
    code = "import sys, dpgen_bench; assert 'torch' not in sys.modules; assert 'run' in dir(dpgen_bench)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'runs_'; it has"):
        _ = dpgen_bench.runs_
    assert callable(check_method)


def test_a_run_is_made_and_its_values_are_read(folder):
    frame = results(folder.path.parent.parent)
    assert set(frame["run"]) == {folder.id}
    (row,) = frame[frame["name"] == "acc_logreg_pct"].to_dict("records")
    assert (row["method"], row["dataset"], row["protocol"], row["epsilon_budget"]) == (
        "dp_merf",
        "digits",
        "quick",
        2.0,
    )
    assert 1.9 < row["epsilon_proven"] <= 2.0
    assert 0.0 <= row["value"] <= 100.0


def test_results_are_read_from_a_folder_that_contains_runs(folder, tmp_path):
    for wrong in (tmp_path / "nothing", tmp_path, folder.path, folder.path.parent):
        with pytest.raises(ValueError, match="expected a folder of results, which contains runs/, got"):
            results(wrong)
    (tmp_path / "runs" / "0123456789ab").mkdir(parents=True)
    frame = results(tmp_path)
    assert frame.empty
    assert "epsilon_proven" in frame.columns


def test_a_folder_of_own_configs_is_read_and_its_path_is_not_stored(tmp_path):
    (tmp_path / "my_conf" / "method").mkdir(parents=True)
    shutil.copy(CONF / "method" / "dp_merf.yaml", tmp_path / "my_conf" / "method" / "mm.yaml")
    own = ["method=mm", *SMALL[1:], f"results={tmp_path}", "privacy.epsilon=2"]
    made = run("--config-dir", str(tmp_path / "my_conf"), *own)
    assert made.status() == "finished"
    assert made.read_json("environment.json")["overrides"] == [text for text in own if "results=" not in text]
    for option in (["--config-dir", "nothing"], ["--config-dir=nothing"], ["-cd", "nothing"]):
        with pytest.raises(ValueError, match="expected --config-dir to be a folder, got 'nothing'"):
            compose_config([*option, "method=mm"])
    for option in ("--config-dir", "--config-dir=", "-cd"):
        with pytest.raises(ValueError, match="expected a folder after -"):
            compose_config(["method=dp_merf", option])


def test_a_budget_of_none_is_nan_and_one_without_privacy_infinite(tmp_path):
    run(*SMALL, f"results={tmp_path}", "privacy.epsilon=inf")
    frame = results(tmp_path)
    assert all(math.isinf(value) for column in ("epsilon_budget", "epsilon_proven") for value in frame[column])


@pytest.mark.parametrize("kind", [str, Path, RunFolder])
def test_a_generator_is_loaded_by_its_path(folder, kind):
    images = load_generator(kind(folder.path)).sample(torch.arange(10), seed=3)
    assert (images.dtype, images.shape) == (torch.uint8, (10, 1, 28, 28))
    with pytest.raises(FileNotFoundError, match="expected a trained generator"):
        load_generator(kind(folder.path / "nothing"))


def test_arguments_of_another_type_are_refused():
    event = Event(Full(), Sensitivity(1.0, 2.0), 4.0, 3)
    for make in (run, account):
        with pytest.raises(TypeError, match=r"expected overrides as texts, .* got \['method=dp_merf'\]"):
            make(["method=dp_merf"])
    with pytest.raises(TypeError, match=r"expected overrides as texts, .* got 'runtime.device=cpu'"):
        evaluate_images(torch.zeros(1, 1, 28, 28), overrides="runtime.device=cpu")
    for wrong in (event, [event, "method=dp_merf"], iter([event])):
        with pytest.raises(TypeError, match=r"expected a list of events, .* got"):
            account(events=wrong, delta=1e-5)
    with pytest.raises(TypeError, match=r"expected make_method to be a function .* got 'dp_merf'"):
        check_method("dp_merf")


def test_account_of_events_and_of_a_run():
    events = [Event(Full(), Sensitivity(1.0, 2.0), 4.0, 3)]
    table = account(events=events, delta=1e-5)
    assert table.loc["pld", "replace_one"] == epsilon(events, 1e-5, "replace_one", "pld")
    planned = account("method=dp_merf", "privacy.epsilon=2", "method.features=20")
    assert planned.loc["pld", "add_remove"] <= 2.0
    for wrong in ({}, {"events": events}):
        with pytest.raises(ValueError, match=r"expected (overrides or events|delta together)"):
            account(**wrong)
    with pytest.raises(ValueError, match="not both"):
        account("method=dp_merf", events=events, delta=1e-5)


def test_images_are_measured_in_every_form(folder, tmp_path):
    expected = results(folder.path.parent.parent).set_index("name")["value"].to_dict()
    assert {"acc_logreg_pct", "acc_logreg_real_pct"} <= expected.keys()
    for out in (tmp_path / "samples.npz", tmp_path / "samples"):
        sample_run(folder.path.parent.parent, folder.id, 40, 0, out, "balanced", benchmark=True)
        assert evaluate_images(out, overrides=LOGREG).values == expected
    assert evaluate_images(folder.path, overrides=LOGREG).values == expected
    assert evaluate_images(folder, overrides=LOGREG).values == expected
    assert evaluate_images(load_generator(folder.path), overrides=LOGREG).values == expected
    exported = export(folder, tmp_path / "exported", benchmark=True)
    assert evaluate_images(exported, overrides=LOGREG).values == expected
    with np.load(tmp_path / "samples.npz") as file:
        assert evaluate_images(file["images"], file["labels"], overrides=LOGREG).values == expected


def test_metrics_that_cannot_be_measured_say_why(folder):
    measured = evaluate_images(folder.path, overrides=LOGREG[1:])
    assert measured.unmeasured.keys() == {"mlp"}
    assert "raise protocol.num_samples" in measured.unmeasured["mlp"]
    assert "acc_logreg_pct" in measured.values


def test_nothing_is_computed_from_training_records_for_a_run_for_release(tmp_path):
    folder = run(*SMALL, f"results={tmp_path}", "privacy.epsilon=2", "privacy.noise=os")
    for images in (folder, folder.path, str(folder.path)):
        measured = evaluate_images(images, overrides=LOGREG)
        assert measured.values.keys() == {"acc_logreg_pct"}
        assert any("without privacy accounting" in note for note in measured.notes)


def test_fid_of_a_generator_of_a_finite_set_is_not_measured():
    net = ImageSet((1, 28, 28), 10, 1, 2)
    generator = NetGenerator(net, {}, latent_dim=1, num_classes=10, image_shape=(1, 28, 28), latent="uniform")
    fid = ["+protocol.metrics.fid={_target_:dpgen_bench.evaluate.fidelity.Fid}", *LOGREG]
    assert "20 images: the generator is a finite set" in evaluate_images(generator, overrides=fid).unmeasured["fid"]


def test_images_of_another_form_are_refused(tmp_path):
    images, labels = torch.zeros(4, 1, 28, 28, dtype=torch.uint8), torch.arange(4)
    for wrong, message in (
        ((images,), "expected labels together with images"),
        ((images / 255.0, labels), "expected uint8 images"),
        ((images[..., :8, :8], labels), r"expected images of the shape of digits, \(1, 28, 28\), got \(1, 8, 8\)"),
        ((images, labels[:3]), r"expected int64 labels \[4\]"),
        ((images, labels + 0.5), "expected labels to be integers, got torch.float32"),
        ((images, labels.to(torch.float64).numpy()), "expected labels to be integers, got torch.float64"),
        ((images, labels > 1), "expected labels to be integers, got torch.bool"),
        ((images, labels + 7), r"expected labels of digits below 10, its number of classes, got 10"),
        ((images, labels - 1), "expected labels from 0 upwards, got -1"),
        ((images[:0], labels[:0]), "expected at least one image, got none"),
        ((tmp_path,), "a folder with class folders 0, 1, .*, 9 of PNG files"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate_images(*wrong)
    for seed in (1.5, "1", None, True, -1):
        with pytest.raises(ValueError, match="seed: expected a whole number >= 0, got"):
            evaluate_images(images, labels, seed=seed)


@pytest.mark.parametrize("setting", ["protocol.floor=120", "protocol.rounding=none", "protocol.labels=uniform"])
def test_a_generator_is_sampled_as_the_protocol_says(folder, setting):
    protocol = compose_config([*LOGREG, setting]).protocol
    expected = draw_samples(folder, protocol, seed=0, keep=False)
    samples = _samples(_source(folder.path), None, protocol, seed=0)
    assert torch.equal(samples.images, expected.images)
    assert torch.equal(samples.labels, expected.labels)

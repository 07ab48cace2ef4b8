"""Tests how a protocol draws and describes samples, and how the real metrics measure bad samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from dpgen_bench.config.spec import check_evaluation
from dpgen_bench.data.records import Records
from dpgen_bench.generator import NetGenerator
from dpgen_bench.runs.samples import describe_samples, draw_samples, sample_labels
from dpgen_bench.store.folders import RunFolder
from dpgen_bench.store.values import mean_values, notes
from tests.protocol_toys import metric, released, run, spec_for, the_measurement
from tests.toys import Painter


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return released(tmp_path)


def protocol(**changed):
    return OmegaConf.create({"name": "toy", "num_samples": 30, "labels": "balanced", "metrics": {}, **changed})


def test_unrounded_samples_round_to_the_rounded_ones(folder):
    rounded = draw_samples(folder, protocol(), 0)
    unrounded = draw_samples(folder, protocol(rounding="none"), 0)
    assert rounded.images.dtype == torch.uint8
    assert unrounded.images.dtype == torch.float32
    assert torch.equal(unrounded.images.round().to(torch.uint8), rounded.images)
    assert not torch.equal(unrounded.images, rounded.images.float())


def test_pixels_below_the_floor_become_0(folder):
    plain, floored = draw_samples(folder, protocol(), 0).images, draw_samples(folder, protocol(floor=128), 0).images
    assert torch.equal(floored, torch.where(plain < 128, 0, plain))
    assert (plain < 128).any()


def test_entries_that_a_protocol_leaves_out_have_the_defaults_of_its_check(tmp_path, folder):
    config = spec_for(tmp_path, {}).config
    del config.protocol["labels"]
    check_evaluation(config)
    drawn = draw_samples(folder, config.protocol, 0)
    assert torch.equal(drawn.labels, sample_labels(40, 10, "balanced", 0))
    assert drawn.images.dtype == torch.uint8
    assert torch.equal(draw_samples(folder, config.protocol, 0, keep=False).labels, drawn.labels)


def test_damaged_samples_are_drawn_again(folder):
    good = draw_samples(folder, protocol(), 0)
    path = folder.path / "samples.npz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(UserWarning, match=r"samples\.npz cannot be read .*computed again"):
        assert torch.equal(draw_samples(folder, protocol(), 0).images, good.images)
    assert torch.equal(draw_samples(folder, protocol(), 0).images, good.images)


def test_a_generator_with_its_own_labels_draws_them(folder, monkeypatch):
    monkeypatch.setattr(NetGenerator, "draw_labels", lambda self, n, seed: torch.tensor([7, 7, 3])[:n])
    assert draw_samples(folder, protocol(), 0).labels.tolist() == [7, 7, 3]


def test_the_description_of_collapsed_samples():
    images = torch.zeros(6, 1, 4, 4, dtype=torch.uint8)
    images[0, 0, 0, 0] = 9
    description = describe_samples(Records(images, torch.tensor([0, 0, 1, 1, 0, 1])), 4)
    assert (description["n"], description["distinct"], description["blank"], description["missing_classes"]) == (
        6,
        2,
        5,
        [2, 3],
    )
    assert description["notes"] == [
        "no sample of class 2, 3",
        "only 2 different images among 6 samples",
        "5 samples are of one colour",
    ]
    fine = torch.arange(64, dtype=torch.uint8).reshape(4, 1, 4, 4)
    assert describe_samples(Records(fine, torch.arange(4)), 4)["notes"] == []


def test_distributions_of_labels():
    assert sample_labels(5, 3, "balanced", 0).tolist() == [0, 1, 2, 0, 1]
    drawn = sample_labels(3000, 3, "uniform", 0)
    assert torch.equal(drawn, sample_labels(3000, 3, "uniform", 0))
    assert not torch.equal(drawn, sample_labels(3000, 3, "uniform", 1))
    assert all(abs(count - 1000) < 150 for count in drawn.bincount())
    with pytest.raises(ValueError, match="balanced or uniform"):
        sample_labels(5, 3, "sorted", 0)


# Bad samples and the real metrics

REAL_METRICS = {
    "logreg": {
        "_target_": "dpgen_bench.evaluate.utility.Accuracy",
        "name": "logreg",
        "classifier": {
            "_target_": "dpgen_bench.evaluate.classifiers.Sklearn",
            "estimator": "sklearn.linear_model.LogisticRegression",
            "params": {"max_iter": 20},
        },
    },
    "average": {"_target_": "dpgen_bench.evaluate.utility.AverageAccuracy", "of": ["logreg"]},
    "fid": {"_target_": "dpgen_bench.evaluate.fidelity.Fid"},
    "kid": {"_target_": "dpgen_bench.evaluate.kid.Kid", "subsets": 3, "subset_size": 50},
    "prdc": {"_target_": "dpgen_bench.evaluate.nearest.Prdc"},
    "memorisation": {"_target_": "dpgen_bench.evaluate.nearest.Memorisation"},
}


def coarse_features(
    records: Records, ctx, *, real: bool, tool: str = "pytorch_fid", precision: str = "fp32"
) -> np.ndarray:
    """Let features be means over 7x7 squares, in place of Inception's."""
    return torch.nn.functional.avg_pool2d(records.images.float() / 255.0, 7).flatten(1).numpy()


@pytest.fixture
def coarse(monkeypatch):
    for module in ("fidelity.features_of", "features.features_of"):
        monkeypatch.setattr(f"dpgen_bench.evaluate.{module}", coarse_features)


class Collapsed(Painter):
    """Draws the same image for every label."""

    def forward(self, z, y):
        return self.means[:1].expand(len(y), *self.image_shape)


def release(folder: RunFolder, net: torch.nn.Module) -> None:
    kind = f"{type(net).__module__}.{type(net).__qualname__}"
    config = {"_target_": kind, "num_classes": 10, "image_shape": [1, 28, 28]}
    NetGenerator(net, config, 4, 10, (1, 28, 28)).save(folder.path)


def test_a_collapsed_generator_is_measured_by_every_metric_and_notes_say_so(tmp_path, folder, coarse):
    release(folder, Collapsed(10, [1, 28, 28]))
    run(spec_for(tmp_path, REAL_METRICS, num_samples=100), folder)
    values = mean_values(the_measurement(folder))
    test_labels = spec_for(tmp_path, {}).dataset().load("test").labels
    assert values["acc_logreg_pct"] == pytest.approx(100 * float((test_labels == 0).double().mean()))
    assert values["acc_calibrated_pct"] == pytest.approx(100 * values["acc_logreg_pct"] / values["acc_logreg_real_pct"])
    assert values["coverage"] == values["precision"] == values["nn_copies_pct"] == 0.0
    assert values["fid"] > 0.1
    remarks = notes(the_measurement(folder))
    assert "only 1 different images among 100 samples" in remarks
    assert "100 samples are of one colour" in remarks


def test_a_generator_of_nan_is_an_error_and_gives_no_value(tmp_path, folder, coarse):
    net = Painter(10, [1, 28, 28])
    torch.nn.init.constant_(net.means, float("nan"))
    release(folder, net)
    with pytest.raises(ValueError, match="finite pixels, got NaN or infinite ones in 100 of 100 images"):
        run(spec_for(tmp_path, REAL_METRICS, num_samples=100), folder)
    assert folder.measurements.all() == []


def test_samples_too_few_for_one_metric_do_not_affect_the_others(tmp_path, folder, coarse):
    measurement = run(spec_for(tmp_path, REAL_METRICS, num_samples=30), folder)
    results = measurement["repeats"][0]["metrics"]
    assert results["kid"]["status"] == "failed"
    assert "expected at least subset_size=50 of the samples, got 30" in results["kid"]["reason"]
    assert {key for key, result in results.items() if result["status"] == "measured"} == set(REAL_METRICS) - {"kid"}


def test_a_class_without_samples_is_noted_and_measured(tmp_path, folder, coarse, monkeypatch):
    monkeypatch.setattr(NetGenerator, "draw_labels", lambda self, n, seed: torch.arange(n) % 9)
    run(spec_for(tmp_path, REAL_METRICS, num_samples=90), folder)
    assert "no sample of class 9" in notes(the_measurement(folder))
    assert set(mean_values(the_measurement(folder))) > {"acc_logreg_pct", "fid", "kid", "recall", "nn_train"}


def test_fewer_samples_than_asked_for_are_noted(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(NetGenerator, "draw_labels", lambda self, n, seed: torch.arange(min(n, 30)) % 10)
    run(spec_for(tmp_path, {"mean": metric("Mean")}), folder)
    remarks = "30 samples instead of the protocol's 40: the generator has no more"
    assert remarks in notes(the_measurement(folder))

"""Tests of accuracies on real test records, whose labels affect the score only, and of their averages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from dpgen_bench.data.datasets import Digits
from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.classifiers import Sklearn
from dpgen_bench.evaluate.metric import EvalContext, NotMeasured, evaluate
from dpgen_bench.evaluate.networks import Network
from dpgen_bench.evaluate.reference import predictions
from dpgen_bench.evaluate.utility import Accuracy, AverageAccuracy, distinct
from tests.accuracy_toys import FITS, Remember, context, of, plain
from tests.test_classifiers import ALL

EVERY = ALL | {"network": Network("paper_cnn", epochs=4, batch_size=20, holdout=0.1, keep="best", patience=3)}
every_classifier = pytest.mark.parametrize("classifier", EVERY.values(), ids=EVERY)


def test_a_protocols_yaml_builds_it():
    text = """
    xgboost:
      _target_: dpgen_bench.evaluate.utility.Accuracy
      name: xgboost
      classifier:
        _target_: dpgen_bench.evaluate.classifiers.Sklearn
        estimator: xgboost.XGBClassifier
        params: {n_estimators: 50, COLSAMPLE: 0.1}
    """
    built = instantiate(OmegaConf.create(text.replace("COLSAMPLE", "colsample_bytree")).xgboost, _convert_="all")
    params = {"n_estimators": 50, "colsample_bytree": 0.1}
    assert built == Accuracy("xgboost", Sklearn("xgboost.XGBClassifier", params), calibrate=True)
    with pytest.raises(InstantiationException, match="no parameter COLSAMPLE"):
        instantiate(OmegaConf.create(text).xgboost, _convert_="all")


def test_one_core_is_that_of_the_classifier():
    assert Accuracy("it", Remember()).one_core("cpu")
    assert not Accuracy("it", Remember()).one_core("cuda")
    assert Accuracy("it", ALL["lda"]).one_core("cuda")


# Test labels affect the score only


@dataclass(frozen=True, eq=False)
class Watched(Records):
    """Test records that append to `events` each time their labels are read."""

    events: list[str] = field(default_factory=list)

    def __getattribute__(self, name: str) -> Any:
        if name == "labels":
            object.__getattribute__(self, "events").append("labels")
        return object.__getattribute__(self, name)


@dataclass(frozen=True)
class Watching:
    """A classifier that records when it is fitted and predicts, and on which records it is trained."""

    inner: Any
    events: list[str] = field(default_factory=list)
    trained_on: list[Records] = field(default_factory=list)

    def fit(self, records: Records, ctx: EvalContext) -> Any:
        self.events.append("fit")
        self.trained_on.append(records)
        fitted, events = self.inner.fit(records, ctx), self.events
        self.events.append("fitted")

        class Asked:
            def predict(self, images: Tensor) -> Tensor:
                events.append("predict")
                return fitted.predict(images)

        return Asked()

    def one_core(self, device: Any) -> bool:
        return self.inner.one_core(device)


@pytest.fixture(scope="module")
def digits() -> tuple[Records, Records]:
    """Real digits at 14x14: 120 to train on, 60 to test."""
    return coarse(Digits().load("train"), 120), coarse(Digits().load("test"), 60)


def coarse(records: Records, n: int) -> Records:
    return Records(records.images[:n, :, ::2, ::2].contiguous(), records.labels[:n])


@every_classifier
def test_test_labels_are_read_once_and_after_everything_else(classifier, digits, tmp_path, monkeypatch):
    samples, test = digits
    real = Records(samples.images.flip(0), samples.labels.flip(0))
    watched = Watched(test.images, test.labels)
    watched.events.clear()
    watching = Watching(classifier, watched.events)
    monkeypatch.setattr("dpgen_bench.evaluate.reference.fingerprint", lambda _: "watched")
    values = Accuracy("it", watching)(samples, watched, context(tmp_path, real))
    assert len(values) == 3
    assert watched.events == ["fit", "fitted", "predict", "fit", "fitted", "predict", "labels"]
    assert watching.trained_on == [real, samples]


@every_classifier
def test_exchanged_test_labels_give_the_complement(classifier, digits, tmp_path):
    """Two classes: the same classifier is trained, so that correct predictions become wrong and vice versa."""

    def pair(records: Records, n: int) -> Records:
        keep = records.labels < 2
        return Records(records.images[keep][:n], records.labels[keep][:n])

    samples, test = pair(digits[0], 24), pair(digits[1], 12)
    score = of(plain(classifier), samples, test, context(tmp_path))
    exchanged = of(plain(classifier), samples, Records(test.images, 1 - test.labels), context(tmp_path))
    assert score + exchanged == pytest.approx(100.0)


@every_classifier
def test_samples_of_one_class_score_the_share_of_that_class(classifier, digits, tmp_path):
    sevens = Records(digits[0].images[:40], torch.full((40,), 7))
    share = 100.0 * float((digits[1].labels == 7).double().mean())
    if isinstance(classifier, Network):  # it has outputs for ten classes
        classifier = replace(classifier, epochs=10)
    assert of(plain(classifier), sevens, digits[1], context(tmp_path)) == pytest.approx(share)


@every_classifier
def test_constant_images_are_measured_near_chance(classifier, digits, tmp_path):
    grey = Records(torch.full_like(digits[0].images, 128), torch.arange(len(digits[0])) % 10)
    result = evaluate(plain(classifier), grey, digits[1], context(tmp_path))
    assert result.status == "measured"
    assert 0.0 <= result.values["acc_it_pct"] < 30.0


# Averages


def test_averages_are_means_of_the_named_ones():
    values = {"acc_mlp_pct": 60.0, "acc_cnn_pct": 90.0, "acc_lda_pct": 0.0}
    values |= {"acc_mlp_calibrated_pct": 64.0, "acc_cnn_calibrated_pct": 91.0, "fid": 3.0}
    notes: list[str] = []
    assert AverageAccuracy(["mlp", "cnn"]).combine(values, notes) == {"acc_avg_pct": 75.0, "acc_calibrated_pct": 77.5}
    assert notes == []
    assert AverageAccuracy(["mlp", "cnn", "lda"]).combine(values, notes) == {"acc_avg_pct": 50.0}
    assert notes == ["acc_calibrated_pct not measured: lda without a calibrated accuracy"]
    assert AverageAccuracy(["lda"]).combine(values) == {"acc_avg_pct": 0.0}


def test_an_average_needs_all_of_its_accuracies():
    with pytest.raises(NotMeasured, match="accuracy of cnn, svc, which"):
        AverageAccuracy(["mlp", "cnn", "svc"]).combine({"acc_mlp_pct": 60.0})


@pytest.mark.parametrize("names", [[], ["mlp", "cnn", "mlp"]])
def test_an_average_names_classifiers_once(names):
    with pytest.raises(ValueError, match="each once"):
        AverageAccuracy(names)


# GS-WGAN (Chen, Orekondy, Fritz 2020), Table A1 (MNIST): accuracies on real data and calibrated ones in percent, in the
# order of its rows; below each column, what it prints as its average.
PRINTED = {
    "mlp": {"Real": 0.98, "G-PATE": (0.25, 26), "DP-Merf": (0.63, 64), "GS-WGAN": (0.79, 81)},
    "cnn": {"Real": 0.99, "G-PATE": (0.51, 52), "DP-Merf": (0.63, 64), "GS-WGAN": (0.80, 81)},
    "adaboost": {"Real": 0.73, "G-PATE": (0.11, 16), "DP-Merf": (0.38, 52), "GS-WGAN": (0.21, 29)},
    "bagging": {"Real": 0.93, "G-PATE": (0.36, 38), "DP-Merf": (0.43, 46), "GS-WGAN": (0.45, 48)},
    "bernoulli_nb": {"Real": 0.84, "G-PATE": (0.71, 84), "DP-Merf": (0.76, 90), "GS-WGAN": (0.77, 92)},
    "decision_tree": {"Real": 0.88, "G-PATE": (0.13, 14), "DP-Merf": (0.29, 33), "GS-WGAN": (0.35, 40)},
    "gaussian_nb": {"Real": 0.56, "G-PATE": (0.61, 110), "DP-Merf": (0.57, 102), "GS-WGAN": (0.64, 114)},
    "gbm": {"Real": 0.91, "G-PATE": (0.11, 12), "DP-Merf": (0.36, 40), "GS-WGAN": (0.39, 43)},
    "lda": {"Real": 0.88, "G-PATE": (0.60, 68), "DP-Merf": (0.72, 82), "GS-WGAN": (0.78, 89)},
    "linear_svc": {"Real": 0.92, "G-PATE": (0.24, 26), "DP-Merf": (0.58, 63), "GS-WGAN": (0.76, 83)},
    "logreg": {"Real": 0.93, "G-PATE": (0.26, 28), "DP-Merf": (0.66, 71), "GS-WGAN": (0.79, 85)},
    "random_forest": {"Real": 0.97, "G-PATE": (0.33, 34), "DP-Merf": (0.66, 68), "GS-WGAN": (0.52, 54)},
    "xgboost": {"Real": 0.91, "G-PATE": (0.15, 16), "DP-Merf": (0.70, 77), "GS-WGAN": (0.50, 55)},
}
REAL_AVERAGE = 0.88
AVERAGES = {"G-PATE": (0.34, 40), "DP-Merf": (0.57, 66), "GS-WGAN": (0.60, 69)}


@pytest.mark.parametrize("column", AVERAGES)
def test_the_averages_are_those_of_gs_wgan(column):
    """The mean of ratios agrees with print; the ratio of means, which the same table also allows, does not."""
    values = {f"acc_{name}_pct": 100 * row[column][0] for name, row in PRINTED.items()}
    values |= {f"acc_{name}_calibrated_pct": float(row[column][1]) for name, row in PRINTED.items()}
    means = AverageAccuracy(list(PRINTED)).combine(values)
    accuracy, calibrated = AVERAGES[column]
    assert means["acc_avg_pct"] == pytest.approx(100 * accuracy, abs=1.0)  # cells are rounded to percents
    assert round(means["acc_calibrated_pct"]) == calibrated
    if column == "G-PATE":
        assert round(100 * accuracy / REAL_AVERAGE) == 39


# Real digits


def test_real_digits_and_their_calibration(tmp_path):
    """800 of the 1,437 training records as samples: nearly as good as all of them."""
    train, test = Digits().load("train"), Digits().load("test")
    ctx = EvalContext(seed=1, device="cpu", num_classes=10, cache=tmp_path, dataset=Digits())
    half = Records(train.images[:800], train.labels[:800])
    values = Accuracy("lda", ALL["lda"])(half, test, ctx)
    assert values["acc_lda_real_pct"] > 90.0
    assert 90.0 < values["acc_lda_calibrated_pct"] < 103.0
    exact = predictions(ALL["lda"], train, test.images, replace(ctx, seed=0))
    assert values["acc_lda_real_pct"] == pytest.approx(100.0 * float((exact == test.labels).double().mean()))


def test_a_missing_class_lowers_the_accuracy_by_its_share(tmp_path):
    train, test = coarse(Digits().load("train"), 1000), coarse(Digits().load("test"), 360)
    keep = train.labels != 3
    threes = 100.0 * float((test.labels == 3).double().mean())
    score = of(plain(ALL["lda"]), Records(train.images[keep], train.labels[keep]), test, context(tmp_path))
    assert 75.0 < score <= 100.0 - threes


def test_each_different_sample_is_trained_on_once(tmp_path):
    images = torch.tensor([5, 1, 5, 5, 1], dtype=torch.uint8)[:, None, None, None].expand(5, 1, 2, 2)
    labels = torch.tensor([0, 1, 0, 1, 1])
    once = distinct(Records(images, labels))
    assert once.images[:, 0, 0, 0].tolist() == [5, 1, 5]
    assert once.labels.tolist() == [0, 1, 1]
    unrounded = Records(images + torch.tensor([0.0, 0.0, 0.25, 0.0, 0.0])[:, None, None, None], labels)
    assert len(distinct(unrounded)) == 4
    metric = Accuracy("it", Remember(), calibrate=False, distinct=True)
    of(metric, Records(images, labels), Records(images, labels), context(tmp_path))
    trained_on, _ = FITS[-1]
    assert trained_on.content_hash == once.content_hash

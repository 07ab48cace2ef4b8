"""Accuracies: what may be looked at and when, the calibration and its cache, averages, known answers."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from dpgen_bench.data.datasets import Digits
from dpgen_bench.data.records import DatasetSpec, MissingData, Records, Split
from dpgen_bench.evaluate import classifiers
from dpgen_bench.evaluate.classifiers import Sklearn
from dpgen_bench.evaluate.metric import EvalContext, NotMeasured, evaluate
from dpgen_bench.evaluate.networks import Network
from dpgen_bench.evaluate.reference import predictions
from dpgen_bench.evaluate.utility import Accuracy, AverageAccuracy
from tests.test_classifiers import ALL

EVERY = ALL | {"network": Network("paper_cnn", epochs=4, batch_size=20, holdout=0.1, keep="best", patience=3)}
every_classifier = pytest.mark.parametrize("classifier", EVERY.values(), ids=EVERY)


@dataclass(frozen=True)
class Own(DatasetSpec):
    """Records of a test's own, as a dataset."""

    train: Records
    name: str = "own"
    root: str = "nowhere"
    image_shape = (1, 8, 8)
    class_names = ("dark", "bright")

    def load(self, split: Split) -> Records:
        assert split == "train"
        return self.train

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}


def shades(labels: list[int], seed: int = 0) -> Records:
    """Dark images of label 0, bright ones of label 1, as many as labels."""
    truth = torch.tensor(labels)
    noise = torch.randint(0, 100, (len(labels), 1, 8, 8), generator=torch.Generator().manual_seed(seed))
    return Records((noise + 150 * truth[:, None, None, None]).to(torch.uint8), truth)


def swap(records: Records, n: int) -> Records:
    """The first n labels wrong."""
    labels = records.labels.clone()
    labels[:n] = 1 - labels[:n]
    return Records(records.images, labels)


FITS: list[tuple[Records, int]] = []


@dataclass(frozen=True)
class Memory:
    """Knows the label of each image it was trained on, or else says `otherwise`."""

    known: dict[bytes, int]
    otherwise: int

    def predict(self, images: Tensor) -> Tensor:
        return torch.tensor([self.known.get(image.numpy().tobytes(), self.otherwise) for image in images])


@dataclass(frozen=True)
class Remember:
    """Its accuracy is arithmetic: of the test images, those among its records that have their true label."""

    otherwise: int = 2

    def fit(self, records: Records, ctx: EvalContext) -> Memory:
        FITS.append((records, ctx.seed))
        ctx.note("trained")
        pairs = zip(records.images, records.labels.tolist(), strict=True)
        return Memory({image.numpy().tobytes(): label for image, label in pairs}, self.otherwise)

    def one_core(self, device: Any) -> bool:
        return str(device) == "cpu"


@pytest.fixture
def fits() -> list[tuple[Records, int]]:
    FITS.clear()
    return FITS


@pytest.fixture
def test() -> Records:
    return shades([0, 1] * 10)


def context(tmp_path: Path, train: Records | None = None, seed: int = 0, **more: Any) -> EvalContext:
    dataset = None if train is None else Own(train)
    return EvalContext(seed=seed, device="cpu", num_classes=10, cache=tmp_path, dataset=dataset, **more)


def of(metric: Accuracy, samples: Records, real_test: Records, ctx: EvalContext) -> float:
    return metric(samples, real_test, ctx)[f"acc_{metric.name}_pct"]


def plain(classifier: Any) -> Accuracy:
    return Accuracy("it", classifier, calibrate=False)


# What it gives


def test_accuracies_are_the_shares_of_right_answers(test, tmp_path):
    """Samples: 15 of 20 right; real records: 16 of 20 right; calibrated: 15/16."""
    ctx = context(tmp_path, swap(test, 4))
    values = Accuracy("mlp", Remember())(swap(test, 5), test, ctx)
    assert values == {
        "acc_mlp_pct": pytest.approx(75.0),
        "acc_mlp_real_pct": pytest.approx(80.0),
        "acc_mlp_calibrated_pct": pytest.approx(93.75),
    }
    assert ctx.notes == ["trained"]  # the reference's own would come with the run that fills the cache and no other
    assert Accuracy("cnn", Remember(), calibrate=False)(swap(test, 5), test, ctx) == {
        "acc_cnn_pct": pytest.approx(75.0)
    }


def test_better_than_real_is_above_100(test, tmp_path):
    values = Accuracy("nb", Remember())(test, test, context(tmp_path, swap(test, 10)))
    assert values["acc_nb_calibrated_pct"] == pytest.approx(200.0)


def test_without_real_training_records_the_plain_accuracy_still_comes(test, tmp_path):
    for more, reason in (
        ({"train_closed": "this run's records were promised away"}, "records were promised away"),
        ({}, "given no dataset to load them from"),
    ):
        result = evaluate(Accuracy("mlp", Remember()), swap(test, 5), test, context(tmp_path, **more))
        assert result.status == "measured"
        assert result.values == {"acc_mlp_pct": pytest.approx(75.0)}
        (note,) = [note for note in result.notes if note != "trained"]
        assert note.startswith("acc_mlp_calibrated_pct not measured: ")
        assert reason in note
    assert not list(tmp_path.iterdir())


def test_a_reference_that_is_never_right_calibrates_nothing(test, tmp_path):
    result = evaluate(Accuracy("mlp", Remember()), test, test, context(tmp_path, swap(test, 20)))
    assert result.values == {"acc_mlp_pct": 100.0, "acc_mlp_real_pct": 0.0}
    assert any("right on no image" in note for note in result.notes)


def test_a_wrong_number_of_predictions_is_an_error(test, tmp_path):
    class OneShort(Remember):
        def fit(self, records, ctx):
            return self

        def predict(self, images):
            return torch.zeros(len(images) - 1, dtype=torch.int64)

    with pytest.raises(ValueError, match=r"expected 20 predicted labels, got \(19,\)"):
        plain(OneShort())(test, test, context(tmp_path))


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


def test_one_core_is_the_classifiers():
    assert Accuracy("it", Remember()).one_core("cpu")
    assert not Accuracy("it", Remember()).one_core("cuda")
    assert Accuracy("it", ALL["lda"]).one_core("cuda")


# Test labels decide nothing but the score


@dataclass(frozen=True, eq=False)
class Watched(Records):
    """Test records that write down each time their labels are read, and who the classifier answered before that."""

    events: list[str] = field(default_factory=list)

    def __getattribute__(self, name: str) -> Any:
        if name == "labels":
            object.__getattribute__(self, "events").append("labels")
        return object.__getattribute__(self, name)


@dataclass(frozen=True)
class Watching:
    """A classifier that writes down when it is fitted and asked, and holds what it was given."""

    inner: Any
    events: list[str] = field(default_factory=list)
    given: list[Records] = field(default_factory=list)

    def fit(self, records: Records, ctx: EvalContext) -> Any:
        self.events.append("fit")
        self.given.append(records)
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
    assert watching.given == [real, samples]


@every_classifier
def test_exchanged_test_labels_give_the_complement(classifier, digits, tmp_path):
    """Two classes: the same classifier, so what was right is wrong. Shows that no label decides when to stop."""

    def pair(records: Records, n: int) -> Records:
        keep = records.labels < 2
        return Records(records.images[keep][:n], records.labels[keep][:n])

    samples, test = pair(digits[0], 24), pair(digits[1], 12)
    score = of(plain(classifier), samples, test, context(tmp_path))
    exchanged = of(plain(classifier), samples, Records(test.images, 1 - test.labels), context(tmp_path))
    assert score + exchanged == pytest.approx(100.0)


@every_classifier
def test_one_class_scores_its_share(classifier, digits, tmp_path):
    sevens = Records(digits[0].images[:40], torch.full((40,), 7))
    share = 100.0 * float((digits[1].labels == 7).double().mean())
    if isinstance(classifier, Network):  # it starts with ten classes to choose from
        classifier = replace(classifier, epochs=10)
    assert of(plain(classifier), sevens, digits[1], context(tmp_path)) == pytest.approx(share)


@every_classifier
def test_constant_images_are_measured_near_chance(classifier, digits, tmp_path):
    grey = Records(torch.full_like(digits[0].images, 128), torch.arange(len(digits[0])) % 10)
    result = evaluate(plain(classifier), grey, digits[1], context(tmp_path))
    assert result.status == "measured"
    assert 0.0 <= result.values["acc_it_pct"] < 30.0


def test_the_metric_seeds_what_draws_from_global_generators(test, tmp_path):
    """A classifier without a seed of its own, called directly and not by `evaluate`; the reference has its own seed."""

    @dataclass(frozen=True)
    class Dice(Remember):
        def fit(self, records, ctx):
            draws = torch.randint(0, 2, (20,)).tolist()
            return Memory(dict(zip((image.numpy().tobytes() for image in test.images), draws, strict=True)), 0)

    def figures(seed: int, train: Records | None) -> dict[str, float]:
        ctx = context(tmp_path / str(torch.initial_seed()) / str(seed), train, seed)
        return Accuracy("it", Dice())(shades([0, 1]), test, ctx)

    torch.manual_seed(1)
    first = figures(7, shades([0, 1, 1]))
    torch.manual_seed(2)
    again, other = figures(7, shades([0, 1, 1])), figures(8, shades([0, 1, 1]))
    assert first == again
    assert first["acc_it_pct"] != other["acc_it_pct"]
    assert first["acc_it_real_pct"] == other["acc_it_real_pct"]


# The cache of what real records give


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "classifiers").glob("*.npz"))


def test_the_reference_is_trained_once_for_all_runs(test, tmp_path, fits):
    real = swap(test, 4)
    metric = Accuracy("mlp", Remember())
    first = metric(swap(test, 5), test, context(tmp_path, real, seed=3))
    assert [seed for _, seed in fits] == [0, 3]
    fits.clear()
    again = metric(swap(test, 6), test, context(tmp_path, real, seed=4))
    assert [seed for _, seed in fits] == [4]
    assert again["acc_mlp_real_pct"] == first["acc_mlp_real_pct"]
    # Another name is the same classifier; and kept predictions are scored with whatever labels the test set has.
    renamed = Accuracy("cnn", Remember())(test, swap(test, 1), context(tmp_path, real))
    assert [seed for _, seed in fits] == [4, 0]
    assert renamed["acc_cnn_real_pct"] == pytest.approx(85.0)
    assert len(cached(tmp_path)) == 1


def test_whatever_decides_is_in_the_key(test, tmp_path, fits, monkeypatch):
    real = swap(test, 4)

    def references(metric: Accuracy, train: Records, real_test: Records) -> int:
        """How many files there are when this one is among them."""
        metric(shades([0]), real_test, context(tmp_path, train, seed=1))
        return len(cached(tmp_path))

    assert references(Accuracy("it", Remember()), real, test) == 1
    assert references(Accuracy("it", Remember(otherwise=1)), real, test) == 2
    assert references(Accuracy("it", Remember()), swap(test, 5), test) == 3  # the labels of the training records
    assert references(Accuracy("it", Remember()), real, shades([0, 1] * 10, seed=9)) == 4
    svc = "sklearn.svm.LinearSVC"
    assert references(Accuracy("it", Sklearn(svc)), real, test) == 5
    assert references(Accuracy("it", Sklearn(svc, {"C": 2.0})), real, test) == 6
    monkeypatch.setattr(classifiers, "REVISION", -1)
    assert references(Accuracy("it", Sklearn(svc)), real, test) == 7
    assert references(Accuracy("it", Remember()), real, test) == 7


def test_a_run_of_real_data_fills_the_cache_and_is_filled_by_it(test, tmp_path, fits):
    real = swap(test, 4)
    same = Records(real.images.clone(), real.labels.clone())
    metric = Accuracy("mlp", Remember())
    values = metric(same, test, context(tmp_path, real))
    assert [seed for _, seed in fits] == [0]
    assert values == {"acc_mlp_pct": 80.0, "acc_mlp_real_pct": 80.0, "acc_mlp_calibrated_pct": 100.0}
    assert metric(same, test, context(tmp_path, real)) == values
    assert [seed for _, seed in fits] == [0]
    metric(same, test, context(tmp_path, real, seed=2))  # another seed is another training
    metric(Records(real.images, 1 - real.labels), test, context(tmp_path, real))  # same images, other labels
    assert [seed for _, seed in fits] == [0, 2, 0]


def test_a_cache_that_cannot_be_used_costs_no_figure(test, tmp_path, fits):
    (tmp_path / "classifiers").write_text("a file in the folder's place")
    metric, ctx = Accuracy("mlp", Remember()), context(tmp_path, swap(test, 4), seed=1)
    with pytest.warns(UserWarning, match="cannot be kept"):
        values = metric(swap(test, 5), test, ctx)
    assert set(values) == {"acc_mlp_pct", "acc_mlp_real_pct", "acc_mlp_calibrated_pct"}


def test_missing_training_files_cost_the_calibration_alone(test, tmp_path):
    class Missing(Own):
        def load(self, split):
            raise MissingData("no files at PLACE")

    ctx = replace(context(tmp_path, test, seed=1), dataset=Missing(test))
    result = evaluate(Accuracy("mlp", Remember()), test, test, ctx)
    assert set(result.values) == {"acc_mlp_pct"}
    assert "no files at PLACE" in result.notes[0]


def test_real_data_measured_without_calibration_share_the_reference_too(test, tmp_path, fits):
    real = swap(test, 4)
    plain = Accuracy("mlp", Remember(), calibrate=False)
    assert plain(Records(real.images.clone(), real.labels), test, context(tmp_path, real)) == {"acc_mlp_pct": 80.0}
    Accuracy("mlp", Remember())(swap(test, 5), test, context(tmp_path, real, seed=1))
    assert [seed for _, seed in fits] == [0, 1]
    plain(
        swap(test, 5), test, context(tmp_path, real)
    )  # other samples are trained on, and no reference is made for them
    assert [seed for _, seed in fits] == [0, 1, 0]
    assert len(cached(tmp_path)) == 1


def spoil(path: Path, how: str) -> None:
    if how == "cut":
        path.write_bytes(path.read_bytes()[:40])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        with np.load(path) as kept:
            content = dict(kept)
        content |= {
            "foreign": {"key": np.array("another")},
            "short": {"predictions": content["predictions"][:-1]},
            "fractions": {"predictions": content["predictions"] / 2},
        }[how]
        np.savez(path, **content)


@pytest.mark.parametrize("how", ["cut", "empty", "foreign", "short", "fractions"])
def test_a_damaged_cache_is_reported_and_mended(how, test, tmp_path, fits):
    metric, ctx = Accuracy("mlp", Remember()), context(tmp_path, swap(test, 4), seed=1)
    good = metric(test, test, ctx)
    (path,) = cached(tmp_path)
    spoil(path, how)
    with pytest.warns(UserWarning, match=r"cached predictions .*made anew"):
        assert metric(test, test, ctx) == good
    assert [seed for _, seed in fits] == [0, 1, 0, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert metric(test, test, ctx) == good
    assert [seed for _, seed in fits] == [0, 1, 0, 1, 1]


def test_an_interrupted_training_leaves_nothing(test, tmp_path):
    class Stopped(Remember):
        def fit(self, records, ctx):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Accuracy("mlp", Stopped())(test, test, context(tmp_path, swap(test, 4)))
    assert not cached(tmp_path)
    values = Accuracy("mlp", Remember())(test, test, context(tmp_path, swap(test, 4)))
    assert values["acc_mlp_real_pct"] == pytest.approx(80.0)


@dataclass(frozen=True)
class Slow(Remember):
    """Writes a line for each training, and takes long enough for another process to come."""

    diary: str = ""

    def fit(self, records: Records, ctx: EvalContext) -> Memory:
        with open(self.diary, "a") as file:
            file.write(f"{ctx.seed}\n")
        time.sleep(0.5)
        return super().fit(records, ctx)


def measure_slowly(diary: str, cache: Path, gate: Any, answers: Any, seed: int) -> None:
    test = shades([0, 1] * 10)
    gate.wait(timeout=60)
    metric = Accuracy("it", Slow(diary=diary))
    answers.put(metric(test, test, context(cache, swap(test, 4), seed=seed))["acc_it_real_pct"])


def test_two_processes_train_the_reference_once(tmp_path):
    diary, start = tmp_path / "diary", multiprocessing.get_context("fork")  # others import torch anew: half a minute
    gate, answers = start.Barrier(2), start.SimpleQueue()
    both = [
        start.Process(target=measure_slowly, args=(str(diary), tmp_path, gate, answers, seed), daemon=True)
        for seed in (1, 2)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=60)
    assert [process.exitcode for process in both] == [0, 0]
    assert [answers.get(), answers.get()] == [pytest.approx(80.0)] * 2
    assert sorted(diary.read_text().split()) == ["0", "1", "2"]
    assert len(cached(tmp_path)) == 1


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


def test_an_average_without_all_of_its_parts_is_none():
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
def test_the_averages_are_gs_wgans(column):
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


def test_a_missing_class_costs_its_share(tmp_path):
    train, test = coarse(Digits().load("train"), 1000), coarse(Digits().load("test"), 360)
    keep = train.labels != 3
    threes = 100.0 * float((test.labels == 3).double().mean())
    score = of(plain(ALL["lda"]), Records(train.images[keep], train.labels[keep]), test, context(tmp_path))
    assert 75.0 < score <= 100.0 - threes

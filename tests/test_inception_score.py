"""Tests of the Inception Score: the formula, the metric with a stub of its classifier, and with a real network."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor
from torch_fidelity.metric_isc import isc_features_to_metric

from dpgen_bench.data.records import DatasetSpec, Records
from dpgen_bench.evaluate.inception_score import InceptionScore, expected_bias, inception_score
from dpgen_bench.evaluate.metric import EvalContext, evaluate
from dpgen_bench.evaluate.networks import Network
from dpgen_bench.evaluate.reference import reference_network
from tests.classifier_stub import TEST, Stub, context, one_hot, shown


def random_rows(n: int, classes: int, seed: int, scale: float = 3.0) -> Tensor:
    """Probabilities [n, classes], whose rows have different entropies."""
    logits = torch.randn(n, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (scale * logits).softmax(dim=1)


# The score


@pytest.mark.parametrize(("classes", "splits"), [(2, 1), (10, 1), (10, 4), (36, 10)])
def test_certain_and_uniform_predictions_score_the_number_of_classes(classes, splits):
    assert inception_score(one_hot(torch.arange(classes * splits) % classes, classes), splits) == pytest.approx(
        (classes, 0.0)
    )


@pytest.mark.parametrize("row", [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
def test_one_and_the_same_prediction_scores_one(row):
    assert inception_score(torch.tensor([row] * 12, dtype=torch.float64), 3) == pytest.approx((1.0, 0.0), abs=1e-12)


def test_a_mixture_by_hand():
    """Half of the rows (1, 0), half (1/2, 1/2): marginal (3/4, 1/4), KL log(4/3) and log(4/3)/2, mean 3/4 log(4/3)."""
    rows = torch.tensor([[1.0, 0.0], [0.5, 0.5]] * 5, dtype=torch.float64)
    assert inception_score(rows, 1)[0] == pytest.approx((4 / 3) ** 0.75, rel=1e-12)
    assert inception_score(rows.numpy(), 5) == pytest.approx(((4 / 3) ** 0.75, 0.0), rel=1e-12)


def test_parts_are_contiguous_and_their_deviation_is_over_all_of_them():
    """Four parts that score 4, 1, 1 and 4: mean 2.5, deviation 1.5."""
    even, constant = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    rows = one_hot(torch.cat([even, constant, constant, even]), 4)
    assert inception_score(rows, 4) == pytest.approx((2.5, 1.5), rel=1e-12)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**31), st.sampled_from([0.1, 3.0, 300.0]), st.data())
def test_between_one_and_the_number_of_classes(n, classes, seed, scale, data):
    splits = data.draw(st.integers(1, n))
    mean, std = inception_score(random_rows(n, classes, seed, scale), splits)
    assert 1 - 1e-12 <= mean <= min(classes, -(-n // splits)) * (1 + 1e-12)
    assert 0 <= std <= classes


def test_neither_the_names_of_classes_nor_the_order_within_a_part_matter():
    rows = random_rows(60, 7, seed=0)
    score = inception_score(rows, 3)
    assert inception_score(rows.flip(1), 3) == pytest.approx(score, rel=1e-12)
    parts = [part[torch.randperm(20, generator=torch.Generator().manual_seed(1))] for part in rows.split(20)]
    assert inception_score(torch.cat(parts), 3) == pytest.approx(score, rel=1e-12)
    assert inception_score(rows[torch.randperm(60, generator=torch.Generator().manual_seed(1))], 3)[1] != score[1]


@pytest.mark.parametrize(("n", "splits"), [(1000, 10), (1003, 10), (50, 1), (12, 12), (17, 4)])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_equal_to_torch_fidelity(n, splits, scale):
    logits = scale * torch.randn(n, 10, generator=torch.Generator().manual_seed(n))
    expected = isc_features_to_metric(logits, splits=splits, shuffle=False)
    measured = inception_score(logits.double().softmax(dim=1), splits)
    assert measured == pytest.approx(
        (expected["inception_score_mean"], expected["inception_score_std"]), rel=1e-9, abs=1e-9
    )


def test_a_class_that_is_never_predicted_changes_nothing():
    """Its marginal is 0, too: 0·log(0/0) counts as 0, where torch-fidelity returns NaN."""
    rows = random_rows(30, 4, seed=0)
    padded = torch.cat([rows, torch.zeros(30, 2, dtype=torch.float64)], dim=1)
    assert inception_score(padded, 3) == pytest.approx(inception_score(rows, 3), rel=1e-12)


@pytest.mark.parametrize(
    ("rows", "splits", "complaint"),
    [
        (torch.ones(3, 1), 4, r"n of at least 4 splits, got \(3, 1\)"),
        (torch.ones(3, 1), 0, "n of at least 0 splits"),
        (torch.ones(3), 1, r"\[n, classes\]"),
        (torch.tensor([[0.5, 0.6]]), 1, "sum 1"),
        (torch.tensor([[1.5, -0.5]]), 1, "none below 0"),
        (torch.tensor([[float("nan"), 1.0]]), 1, "or NaN"),
    ],
)
def test_rows_that_are_not_distributions_are_refused(rows, splits, complaint):
    with pytest.raises(ValueError, match=complaint):
        inception_score(rows, splits)


@pytest.mark.parametrize(("samples", "classes"), [(45, 10), (200, 10), (100, 3)])
def test_few_samples_bias_the_log_score_downwards_by_what_the_note_says(samples, classes):
    """Certain predictions of classes drawn uniformly: the true score is the number of classes."""
    labels = torch.randint(classes, (1000, samples), generator=torch.Generator().manual_seed(0))
    shortfall = np.mean([np.log(classes / inception_score(one_hot(row, classes), 1)[0]) for row in labels])
    assert shortfall == pytest.approx(expected_bias(samples, classes), rel=0.1)


# The metric, with a stub of the classifier


@pytest.fixture
def ctx(tmp_path) -> EvalContext:
    return context(tmp_path)


def test_values_and_their_names(ctx):
    samples = shown(torch.arange(4000) % 4)
    wrong = Records(TEST.images, torch.zeros(12, dtype=torch.int64))  # a quarter of these labels is correct
    assert InceptionScore(Stub(), splits=4)(samples, wrong, ctx) == {
        "inception_score": pytest.approx(4.0, rel=0.01),
        "inception_score_std_splits": pytest.approx(0.0, abs=0.02),
        "inception_score_classifier_acc_pct": 25.0,
        "inception_score_num_samples": 4000.0,
    }


def test_uncertain_predictions_score_the_closed_form(ctx):
    """Uniform classes, 0.7 for the predicted one and 0.1 for each other: log 4 + 0.7 log 0.7 + 0.3 log 0.1."""
    values = InceptionScore(Stub(sure=0.7), splits=1)(shown(torch.arange(40) % 4), TEST, ctx)
    expected = 4 * 0.7**0.7 * 0.1**0.3
    assert values["inception_score"] == pytest.approx(expected, rel=1e-6)  # the stub stores 0.7 in single precision


@pytest.mark.parametrize("order", ["sorted", "cyclic"])
def test_the_order_of_samples_changes_nothing(order, ctx):
    """Without a permutation, parts would score 1 for samples sorted by class, and exactly 4 for cyclic ones."""
    labels = torch.arange(4000) % 4
    samples = shown(labels.sort().values if order == "sorted" else labels)
    values = InceptionScore(Stub(), splits=4)(samples, TEST, ctx)
    assert 3.97 < values["inception_score"] < 4.0
    assert values["inception_score_std_splits"] > 0
    assert InceptionScore(Stub(), splits=4)(samples, TEST, ctx) == values
    other = InceptionScore(Stub(), splits=4)(samples, TEST, replace(ctx, seed=4))
    assert other["inception_score"] != values["inception_score"]


def test_few_samples_are_refused_or_noted(ctx):
    metric = InceptionScore(Stub(), splits=10)
    result = evaluate(metric, shown(torch.arange(9) % 4), TEST, ctx)
    assert (result.status, metric.classifier.fits) == ("failed", [])
    assert "expected at least 10 samples, one for each split, got 9" in result.reason
    few = evaluate(metric, shown(torch.arange(1000) % 4), TEST, ctx)  # (4 - 1) / (2 · 100) = 1.5%
    assert few.status == "measured"
    assert "100 samples for each of 10 splits and 4 classes: biased downwards, by up to about 2%" in few.notes[0]
    assert evaluate(metric, shown(torch.arange(2000) % 4), TEST, ctx).notes == []
    with pytest.raises(ValueError, match="1 split or more, got 0"):
        InceptionScore(Stub(), splits=0)


# With real networks


@dataclass(frozen=True)
class SmallDigits(DatasetSpec):
    """scikit-learn's digits at their own 8x8, the first 1,000 for training."""

    name: str = "small_digits"
    root: str = "nowhere"

    @property
    def image_shape(self):
        return (1, 8, 8)

    @property
    def class_names(self):
        return tuple("0123456789")

    def load(self, split):
        from sklearn.datasets import load_digits

        scans = load_digits()
        rows = slice(1000) if split == "train" else slice(1000, None)
        images = torch.from_numpy(scans.images[rows] * 15).to(torch.uint8).unsqueeze(1)
        return Records(images, torch.from_numpy(scans.target[rows].astype(np.int64)))

    def identity(self):
        return {"name": self.name}


def test_digits_score_high_and_noise_and_one_image_low(tmp_path):
    """From a yaml, through a cache: the score and accuracy of real digits are a good classifier's.

    Trained from 20 seeds, the classifier is right in 89.6% to 93.2% (standard deviation 0.8), real digits score 4.4
    to 7.5 (0.8), and noise scores 0.27 to 0.34 of that.
    """
    yaml = """
      _target_: dpgen_bench.evaluate.inception_score.InceptionScore
      splits: 2
      classifier:
        _target_: dpgen_bench.evaluate.networks.Network
        net: paper_mlp
        epochs: 20
        batch_size: 16
        holdout: 0.1
        keep: best
    """
    metric = instantiate(OmegaConf.create(yaml), _convert_="all")
    assert metric == InceptionScore(Network("paper_mlp", epochs=20, batch_size=16, holdout=0.1, keep="best"), splits=2)
    dataset = SmallDigits()
    test = dataset.load("test")
    ctx = EvalContext(seed=0, device="cpu", num_classes=10, cache=tmp_path, dataset=dataset)
    rng = torch.Generator().manual_seed(0)
    noise = torch.randint(256, test.images.shape, generator=rng, dtype=torch.uint8)
    repeated = test.images[:1].expand_as(test.images)
    scores = {
        name: evaluate(metric, Records(images, test.labels), test, ctx)
        for name, images in {"real": test.images, "noise": noise, "repeated": repeated}.items()
    }
    assert {result.status for result in scores.values()} == {"measured"}
    real, noisy, same = (scores[name].values["inception_score"] for name in ("real", "noise", "repeated"))
    assert 3.5 < real < 10
    assert noisy < 0.6 * real
    assert same == pytest.approx(1.0, abs=1e-6)
    kept = reference_network(metric.classifier, dataset.load("train"), ctx)
    accuracy = 100 * float((kept.predict(test.images) == test.labels).double().mean())
    assert accuracy > 85
    assert {result.values["inception_score_classifier_acc_pct"] for result in scores.values()} == {accuracy}


def test_one_core_is_that_of_the_classifier():
    metric = InceptionScore(Network("paper_mlp"))
    assert metric.one_core("cpu")
    assert not metric.one_core("cuda")

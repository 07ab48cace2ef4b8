"""Tests of the cache of classifiers: one training for all runs of a dataset, damaged files, concurrent trainings."""

from __future__ import annotations

import threading
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.inception_score import InceptionScore
from dpgen_bench.evaluate.metric import EvalContext, evaluate
from dpgen_bench.evaluate.reference import reference_network, reference_predictions
from dpgen_bench.evaluate.utility import Accuracy
from dpgen_bench.utils.cache import read_arrays
from tests.classifier_stub import TEST, FittedStub, Shown, Stub, context, shown


@pytest.fixture
def ctx(tmp_path) -> EvalContext:
    return context(tmp_path)


def test_one_training_for_all_runs_of_a_dataset(ctx, tmp_path):
    metric = InceptionScore(Stub(sure=0.7), splits=1)
    samples = shown(torch.arange(40) % 4)
    first = metric(samples, TEST, ctx)
    assert metric.classifier.fits == [0]  # trained with seed 0, whichever run is measured
    again = InceptionScore(Stub(sure=0.7), splits=1)
    assert again(samples, TEST, replace(ctx, seed=9)) == pytest.approx(first)
    assert again.classifier.fits == []
    files = sorted(path.suffix for path in (tmp_path / "classifiers").iterdir())
    assert files == [".lock", ".lock", ".npz", ".npz"]  # predictions and weights


@pytest.mark.parametrize(
    ("sure", "changes"),
    [(0.6, {}), (1.0, {"dataset": Shown(n=9)}), (1.0, {"num_classes": 5})],
    ids=["settings", "records", "classes"],
)
def test_other_settings_records_or_classes_are_another_training(sure, changes, ctx):
    InceptionScore(Stub(), splits=1)(TEST, TEST, ctx)
    metric = InceptionScore(Stub(sure=sure), splits=1)
    metric(TEST, TEST, replace(ctx, **changes))
    assert metric.classifier.fits == [0]


def accuracy_of(classifier, test: Records, ctx: EvalContext) -> float:
    return InceptionScore(classifier, splits=1)(TEST, test, ctx)["inception_score_classifier_acc_pct"]


def test_another_test_set_another_accuracy_without_a_training(ctx):
    classifier = Stub()
    half = Records(TEST.images, TEST.labels.clamp(max=1))
    assert [accuracy_of(classifier, test, ctx) for test in (TEST, half, TEST)] == [100.0, 50.0, 100.0]
    assert classifier.fits == [0]


def test_the_test_images_are_predicted_once(ctx, monkeypatch):
    first = reference_predictions(Stub(), ctx.train(), TEST.images, ctx)
    monkeypatch.setattr(FittedStub, "predict", lambda self, images: pytest.fail("the test images were predicted again"))
    assert torch.equal(reference_predictions(Stub(), ctx.train(), TEST.images, ctx), first)


def test_a_calibrated_accuracy_and_a_score_share_one_training(ctx):
    classifier = Stub(sure=0.7)
    values = Accuracy("it", classifier)(TEST, TEST, replace(ctx, seed=0))
    assert classifier.fits == [0, 0]  # on the real records, and on the samples
    assert accuracy_of(classifier, TEST, ctx) == values["acc_it_real_pct"]
    assert classifier.fits == [0, 0]


@pytest.mark.parametrize("corruption", ["truncated", "bit", "missing", "another network"])
def test_a_damaged_file_of_weights_is_replaced(corruption, ctx):
    samples = shown(torch.arange(40) % 4)
    good = InceptionScore(Stub(sure=0.7), splits=1)(samples, TEST, ctx)
    weights = weights_file(ctx)
    content = weights.read_bytes()
    if corruption == "truncated":
        weights.write_bytes(content[:-2])
    elif corruption == "bit":
        position = content.index(np.float32(0.7).tobytes())
        weights.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
    elif corruption == "missing":
        weights.unlink()
    else:
        other = replace(ctx, cache=ctx.cache / "other")
        InceptionScore(Stub(sure=0.6), splits=1)(samples, TEST, other)
        weights_file(other).replace(weights)
    retrained = Stub(sure=0.7)
    with nullcontext() if corruption == "missing" else pytest.warns(UserWarning, match="computed again"):
        assert InceptionScore(retrained, splits=1)(samples, TEST, ctx) == good
    assert retrained.fits == [0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert InceptionScore(retrained, splits=1)(samples, TEST, ctx) == good
    assert retrained.fits == [0]


def weights_file(ctx: EvalContext) -> Path:
    (path,) = (path for path in (ctx.cache / "classifiers").glob("*.npz") if "sure" in (read_arrays(path) or {}))
    return path


def test_of_two_concurrent_trainings_one_runs(ctx):
    stubs = [Stub(pause=0.3), Stub(pause=0.3)]
    threads = [threading.Thread(target=reference_network, args=(stub, shown(TEST.labels), ctx)) for stub in stubs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(stub.fits) for stub in stubs) == [0, 1]


def test_an_interrupted_training_leaves_nothing_to_load(ctx, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    metric = InceptionScore(Stub(), splits=1)
    with monkeypatch.context() as patched:
        patched.setattr(Stub, "fit", stopped)
        with pytest.raises(KeyboardInterrupt):
            metric(TEST, TEST, ctx)
    with monkeypatch.context() as patched:  # killed after the training, before the test images
        patched.setattr(FittedStub, "predict", stopped)
        with pytest.raises(KeyboardInterrupt):
            metric(TEST, TEST, ctx)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert metric(TEST, TEST, ctx)["inception_score"] == pytest.approx(4.0)
    assert metric.classifier.fits == [0]  # the first training was stopped before it began, the second one was kept


def test_closed_training_records_stay_closed_even_with_a_classifier_in_the_cache(ctx):
    metric = InceptionScore(Stub(), splits=1)
    metric(TEST, TEST, ctx)
    result = evaluate(metric, TEST, TEST, replace(ctx, train_closed="this run's records are not to be looked at"))
    assert (result.status, result.reason) == ("unmeasurable", "this run's records are not to be looked at")
    assert evaluate(metric, TEST, TEST, replace(ctx, dataset=None)).status == "not measured"

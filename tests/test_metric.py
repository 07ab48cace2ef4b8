"""Tests that metrics do not affect each other: their errors, missing weights and randomness; and the protocols."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.fidelity import Fid
from dpgen_bench.evaluate.metric import EvalContext, NotMeasured, evaluate
from dpgen_bench.evaluate.networks import Network
from dpgen_bench.evaluate.protocol import build_metrics, evaluate_each

CONF = Path(__file__).resolve().parents[1] / "conf"


@pytest.fixture
def ctx(tmp_path) -> EvalContext:
    return EvalContext(seed=3, device="cpu", num_classes=2, cache=tmp_path)


def grey(n: int, side: int = 8, labels: int = 2) -> Records:
    return Records(torch.zeros(n, 1, side, side, dtype=torch.uint8), torch.arange(n) % labels)


def draws(samples, real_test, ctx):
    """A metric that reads all three global generators."""
    return {"torch": torch.rand(()).item(), "numpy": np.random.rand(), "python": random.random()}  # noqa: NPY002


def missing(samples, real_test, ctx):
    raise NotMeasured("weights missing at SOMEWHERE")


def broken(samples, real_test, ctx):
    raise ZeroDivisionError("one over nothing")


def undefined(samples, real_test, ctx):
    return {"fine": 1.0, "nothing": float("nan")}


def test_a_failing_metric_does_not_affect_the_others(ctx):
    metrics = {"missing": missing, "broken": broken, "undefined": undefined, "empty": lambda *_: {}, "draws": draws}
    results = {name: evaluate(metric, grey(4), grey(4), ctx) for name, metric in metrics.items()}
    assert results["missing"].status == "not measured"
    assert results["missing"].reason == "weights missing at SOMEWHERE"
    assert results["broken"].status == "failed"
    assert results["broken"].reason == "ZeroDivisionError: one over nothing"
    assert results["undefined"].status == results["empty"].status == "failed"
    assert "'nothing': nan" in results["undefined"].reason
    assert results["draws"].status == "measured"
    assert results["draws"].reason is None
    assert all(result.values == {} for name, result in results.items() if name != "draws")
    assert all(result.seconds >= 0 for result in results.values())


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "TypeError: expected values by name, such as {'brightness_gap': 0.1}, got None"),
        ([1.0], "got [1.0]"),
        ({"a": "much"}, "TypeError: expected a number for 'a', got 'much'"),
        ({"a": torch.zeros(2)}, "TypeError: expected a number for 'a', got tensor([0., 0.])"),
    ],
)
def test_a_metric_that_returns_something_else_says_what_is_expected(returned, reason, ctx):
    result = evaluate(lambda *_: returned, grey(4), grey(4), ctx)
    assert result.status == "failed"
    assert reason in result.reason


def test_a_metric_that_changes_its_images_does_not_change_those_of_the_next_one(ctx):
    def darkens(samples, real_test, ctx):
        samples.images.zero_()
        real_test.labels.zero_()
        return {"dark": float(samples.images.sum())}

    def sums(samples, real_test, ctx):
        return {"pixels": float(samples.images.sum()), "labels": float(real_test.labels.sum())}

    white = Records(torch.full((4, 1, 8, 8), 255, dtype=torch.uint8), torch.ones(4, dtype=torch.int64))
    values = {}
    for key, result in evaluate_each({"dark": darkens, "sums": sums}, white, white, ctx, 1, {}, "test"):
        values[key] = result.values
    assert values == {"dark": {"dark": 0.0}, "sums": {"pixels": 4 * 64 * 255.0, "labels": 4.0}}


def test_a_keyboard_interrupt_is_raised(ctx):
    def interrupted(samples, real_test, ctx):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(interrupted, grey(4), grey(4), ctx)


def test_metrics_use_the_seed_only_and_global_generators_are_restored(ctx, tmp_path):
    torch.manual_seed(11)
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())  # noqa: NPY002
    first = evaluate(draws, grey(4), grey(4), ctx).values
    after = (torch.get_rng_state(), np.random.get_state()[1], random.getstate())  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])
    assert before[2] == after[2]
    torch.rand(5)
    assert evaluate(draws, grey(4), grey(4), ctx).values == first
    other = EvalContext(seed=4, device="cpu", num_classes=2, cache=tmp_path)
    assert all(value != first[name] for name, value in evaluate(draws, grey(4), grey(4), other).values.items())


def test_results_go_to_json_and_numbers_become_floats(ctx):
    result = evaluate(lambda *_: {"a": np.float32(1.5), "b": torch.tensor(2)}, grey(4), grey(4), ctx)
    assert json.loads(json.dumps(asdict(result)))["values"] == {"a": 1.5, "b": 2.0}


@pytest.mark.parametrize(
    ("samples", "complaint"),
    [
        (grey(4, side=9), r"shaped like the real images, \(1, 8, 8\), got \(1, 9, 9\)"),
        (grey(4, labels=3), "labels below 2 in the samples, got 2"),
        (grey(0), "at least one of the samples"),
    ],
)
def test_sets_that_do_not_match_are_refused(ctx, samples, complaint):
    result = evaluate(draws, samples, grey(4), ctx)
    assert result.status == "failed"
    with pytest.raises(ValueError, match=complaint):
        raise ValueError(result.reason)


def notes(samples, real_test, ctx):
    ctx.note("few")
    return {"a": 1.0}


def test_notes_belong_to_one_metric(ctx):
    assert evaluate(notes, grey(4), grey(4), ctx).notes == ["few"]
    assert evaluate(notes, grey(4), grey(4), ctx).notes == ["few"]
    assert evaluate(draws, grey(4), grey(4), ctx).notes == []
    assert ctx.notes == []


def test_without_a_dataset_there_are_no_training_records(ctx):
    with pytest.raises(NotMeasured, match="no dataset"):
        ctx.train()


# The protocols of conf/protocol

THIRTEEN = {
    "mlp",
    "cnn",
    "adaboost",
    "bagging",
    "bernoulli_nb",
    "decision_tree",
    "gaussian_nb",
    "gbm",
    "lda",
    "linear_svc",
    "logreg",
    "random_forest",
    "xgboost",
}
FIDELITY = {"fid", "kid", "prdc", "inception_score", "memorisation"}


def protocol(name: str):
    with initialize_config_dir(config_dir=str(CONF), version_base=None):
        return compose(overrides=[f"+protocol={name}"]).protocol


@pytest.mark.parametrize(
    ("name", "num_samples", "labels", "rounding", "repeats", "metrics"),
    [
        ("quick", 2000, "balanced", "uint8", 1, {"logreg", "mlp"}),
        ("standard", 60_000, "balanced", "uint8", 1, THIRTEEN | FIDELITY | {"average"}),
        ("standard_10k", 10_000, "balanced", "uint8", 1, THIRTEEN | FIDELITY | {"average"}),
        ("standard_2k", 2_000, "balanced", "uint8", 1, THIRTEEN | FIDELITY | {"average"}),
        ("standard_utility", 60_000, "balanced", "uint8", 1, THIRTEEN | {"average"}),
        ("standard_10k_fidelity", 10_000, "balanced", "uint8", 1, FIDELITY),
        ("dpgan_revisited_utility", 60_000, "uniform", "uint8", 1, {"cnn"}),
        ("dp_sinkhorn_cpu", 60_000, "uniform", "uint8", 1, {"logreg", "mlp", "cnn"}),
        ("gs_wgan_cpu", 60_000, "balanced", "none", 1, THIRTEEN - {"cnn"}),
        ("dpgan_revisited", 60_000, "uniform", "uint8", 1, {"cnn", "fid"}),
        ("dp_sinkhorn", 60_000, "uniform", "uint8", 5, {"logreg", "mlp", "cnn", "fid"}),
        ("dp_sinkhorn_once", 60_000, "uniform", "uint8", 1, {"logreg", "mlp", "cnn", "fid"}),
        ("dp_sinkhorn_authors", 60_000, "uniform", "uint8", 5, {"logreg", "mlp", "cnn", "fid"}),
        ("dp_sinkhorn_authors_classifiers", 60_000, "uniform", "uint8", 1, {"logreg", "mlp", "cnn"}),
        ("dp_hp", 6_000, "balanced", "none", 1, (THIRTEEN - {"cnn"}) | {"average"}),
        ("gs_wgan", 60_000, "balanced", "none", 1, THIRTEEN | {"average", "inception_score", "fid"}),
    ],
)
def test_protocols_have_their_settings_and_metrics(name, num_samples, labels, rounding, repeats, metrics):
    config = protocol(name)
    assert (config.name, config.num_samples, config.labels) == (name, num_samples, labels)
    assert (config.get("rounding", "uint8"), config.get("repeats", 1)) == (rounding, repeats)
    built = build_metrics(config)
    assert set(built) == metrics
    if "average" in built:
        assert set(built["average"].of) == THIRTEEN & metrics
    for key in THIRTEEN & metrics:
        assert built[key].name == key


def test_the_papers_references():
    """References and tools of FID: DPGAN and DP-Sinkhorn compare with the test set; GS-WGAN 20,000 samples with the
    training set. Tools: pytorch-fid for DPGAN and our protocols, the TensorFlow 1 graph for the others."""
    assert build_metrics(protocol("dpgan_revisited"))["fid"] == Fid()
    for name in ("dp_sinkhorn", "dp_sinkhorn_authors"):
        assert build_metrics(protocol(name))["fid"] == Fid(tool="tensorflow1")
    for name in ("gs_wgan", "federated"):
        assert build_metrics(protocol(name))["fid"] == Fid("train", num_samples=20_000, tool="tensorflow1")
    for name in ("standard", "standard_1k_cpu", "dp_sinkhorn_2k", "gs_wgan_2k", "federated_2k"):
        assert build_metrics(protocol(name))["fid"] == Fid()


def test_the_standard_score_is_by_the_standard_cnn():
    metrics = build_metrics(protocol("standard"))
    assert metrics["inception_score"].classifier == metrics["cnn"].classifier


def test_the_cnn_of_dpgan_has_its_authors_settings():
    cnn = build_metrics(protocol("dpgan_revisited"))["cnn"].classifier
    assert cnn == Network("dpgan_cnn", learning_rate=1e-3, batch_size=64, epochs=10, holdout=5000, keep="best")


def test_the_classifiers_of_dp_sinkhorns_authors_are_those_of_their_code():
    """src/train_mnist_classifier.py and finalize_result.py, read at commit 2571a60."""
    metrics = build_metrics(protocol("dp_sinkhorn_authors"))
    common = {"batch_size": 512, "holdout": 0.1, "keep": "best", "normalise": (0.5, 0.5)}
    adam = {"learning_rate": 1e-4, "weight_decay": 1e-6, "epochs": 300}
    sgd = {"optimiser": "sgd", "learning_rate": 1e-3, "epochs": 500}
    assert metrics["logreg"].classifier == Network("linear", **common, **adam, patience=10)
    assert metrics["mlp"].classifier == Network("paper_mlp", {"hidden": 100}, **common, **adam, patience=30)
    assert metrics["cnn"].classifier == Network("sinkhorn_cnn", **common, **sgd, patience=60)
    assert not any(metrics[name].calibrate for name in ("logreg", "mlp", "cnn"))

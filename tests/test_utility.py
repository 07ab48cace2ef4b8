"""Classifiers trained on samples: golden sizes, determinism, what they may look at, and degenerate samples."""

from __future__ import annotations

import pytest
import torch

from dpgen_bench.data.datasets import Digits, Mnist
from dpgen_bench.data.records import Records
from dpgen_bench.evaluate import utility
from dpgen_bench.evaluate.metric import EvalContext, evaluate
from dpgen_bench.evaluate.utility import DpganCnn, DpganNet, LogisticRegression, Mlp

ALL = [LogisticRegression(max_iter=100), Mlp(max_iter=20), DpganCnn(epochs=1)]


@pytest.fixture(scope="module")
def digits() -> tuple[Records, Records]:
    train, test = Digits().load("train"), Digits().load("test")
    return Records(train.images[:400], train.labels[:400]), test


def context(tmp_path, seed: int = 0, num_classes: int = 10) -> EvalContext:
    return EvalContext(seed=seed, device="cpu", num_classes=num_classes, cache=tmp_path)


def accuracy(metric, samples: Records, test: Records, ctx: EvalContext) -> float:
    (value,) = metric(samples, test, ctx).values()
    return value


# Golden sizes, from "Private GANs, Revisited": its released classifier at both image sizes


@pytest.mark.parametrize(
    ("shape", "classes", "parameters"), [((1, 28, 28), 10, 1_199_882), ((3, 32, 32), 2, 1_625_410)]
)
def test_cnn_has_the_papers_size(shape, classes, parameters):
    net = DpganNet(shape, classes)
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    assert net(torch.zeros(2, *shape)).shape == (2, classes)


def test_cnn_drops_out_in_training_alone():
    net, images = DpganNet((1, 28, 28), 10), torch.rand(2, 1, 28, 28)
    assert not torch.equal(net(images), net(images))
    net.eval()
    assert torch.equal(net(images), net(images))


# What all of them must do


def test_names_and_real_accuracy_on_digits(digits, tmp_path):
    """Trained on 400 real digits each is far above chance, which is 10%."""
    metrics = [LogisticRegression(max_iter=100), Mlp(max_iter=60), DpganCnn(epochs=4, batch_size=32)]
    values: dict[str, float] = {}
    for metric in metrics:
        values |= metric(*digits, context(tmp_path))
    assert sorted(values) == ["acc_cnn_pct", "acc_logreg_pct", "acc_mlp_pct"]
    assert all(80.0 < value <= 100.0 for value in values.values())


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: type(metric).__name__)
def test_deterministic_in_the_seed(metric, digits, tmp_path):
    small = Records(digits[0].images[:120], digits[0].labels[:120])
    torch.manual_seed(0)
    first = accuracy(metric, small, digits[1], context(tmp_path, seed=5))
    torch.manual_seed(1)
    assert accuracy(metric, small, digits[1], context(tmp_path, seed=5)) == first


@pytest.mark.parametrize("metric", [Mlp(max_iter=20), DpganCnn(epochs=1)], ids=lambda metric: type(metric).__name__)
def test_another_seed_is_another_training(metric, digits, tmp_path):
    small = Records(digits[0].images[:120], digits[0].labels[:120])
    values = {accuracy(metric, small, digits[1], context(tmp_path, seed=seed)) for seed in range(4)}
    assert len(values) > 1


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: type(metric).__name__)
def test_test_labels_decide_nothing_but_the_score(metric, digits, tmp_path):
    """Exactly two classes, test labels exchanged: the same classifier scores the complement."""

    def pair(records: Records) -> Records:
        keep = records.labels < 2
        return Records(records.images[keep][:80], records.labels[keep][:80])

    samples, test = pair(digits[0]), pair(digits[1])
    ctx = context(tmp_path, num_classes=2)
    score = accuracy(metric, samples, test, ctx)
    exchanged = accuracy(metric, samples, Records(test.images, 1 - test.labels), ctx)
    assert score + exchanged == pytest.approx(100.0)


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: type(metric).__name__)
def test_one_class_scores_its_share(metric, digits, tmp_path):
    """All samples are sevens: whatever is learned, the answer is seven."""
    sevens = Records(digits[0].images[:40], torch.full((40,), 7))
    share = 100.0 * float((digits[1].labels == 7).double().mean())
    trained = DpganCnn(epochs=10) if isinstance(metric, DpganCnn) else metric
    assert accuracy(trained, sevens, digits[1], context(tmp_path)) == pytest.approx(share)


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: type(metric).__name__)
def test_a_missing_class_costs_its_share(metric, digits, tmp_path):
    keep = digits[0].labels != 3
    samples = Records(digits[0].images[keep], digits[0].labels[keep])
    threes = 100.0 * float((digits[1].labels == 3).double().mean())
    result = evaluate(metric, samples, digits[1], context(tmp_path))
    assert result.status == "measured"
    (value,) = result.values.values()
    assert 20.0 < value <= 100.0 - threes


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: type(metric).__name__)
def test_constant_images_are_measured_near_chance(metric, digits, tmp_path):
    """Grey samples teach nothing, so each classifier is left with about 10%."""
    grey = Records(torch.full_like(digits[0].images[:200], 128), torch.arange(200) % 10)
    result = evaluate(metric, grey, digits[1], context(tmp_path))
    assert result.status == "measured"
    (value,) = result.values.values()
    assert 0.0 <= value < 30.0


def test_too_few_samples_are_an_error_that_says_so(digits, tmp_path):
    few = Records(digits[0].images[:11], torch.arange(11) % 10)
    cnn = evaluate(DpganCnn(), few, digits[1], context(tmp_path))
    assert (cnn.status, "at least 12 samples" in cnn.reason) == ("failed", True)
    mlp = evaluate(Mlp(), few, digits[1], context(tmp_path))
    assert (mlp.status, "set early_stopping=false" in mlp.reason) == ("failed", True)
    assert evaluate(Mlp(early_stopping=False, max_iter=5), few, digits[1], context(tmp_path)).status == "measured"
    assert evaluate(LogisticRegression(max_iter=5), few, digits[1], context(tmp_path)).status == "measured"


def test_mlp_guard_is_where_scikit_learn_fails(digits, tmp_path):
    """The smallest set the guard lets through can be fitted: 10 classes, 10 of 100 held out, two of each at least."""
    rows = Records(digits[0].images[:100], torch.arange(100) % 10)
    assert evaluate(Mlp(max_iter=2), rows, digits[1], context(tmp_path)).status == "measured"
    rows = Records(digits[0].images[:90], torch.arange(90) % 10)
    assert evaluate(Mlp(max_iter=2), rows, digits[1], context(tmp_path)).status == "failed"


# The CNN's choice of epoch


@pytest.mark.parametrize(
    ("n", "holdout", "held"), [(60_000, 5000, 5000), (2401, 5000, 200), (2400, 100, 100), (12, 5000, 1)]
)
def test_cnn_holds_out_samples_of_every_class(n, holdout, held, tmp_path, monkeypatch):
    """Counts and labels of what is held out, seen through the function that scores it; samples sorted by class."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(utility, "count_correct", lambda net, images, labels, ctx: seen.append(labels) or 0)
    labels = (torch.arange(n) * 10 // n).clamp(max=9)
    samples = Records(torch.zeros(n, 1, 6, 6, dtype=torch.uint8), labels)
    metric = DpganCnn(epochs=1, batch_size=n, holdout=holdout)
    metric._train(samples, context(tmp_path))
    assert [len(labels) for labels in seen] == [held]
    assert n == 12 or len(seen[0].unique()) == 10


def test_cnn_keeps_the_first_best_epoch(digits, tmp_path, monkeypatch):
    """Scripted held-out scores 1, 5, 5, 2: the network of the second epoch comes back."""
    scores, states = iter([1, 5, 5, 2]), []

    def scripted(net, images, labels, ctx):
        states.append({name: value.clone() for name, value in net.state_dict().items()})
        return next(scores)

    monkeypatch.setattr(utility, "count_correct", scripted)
    small = Records(digits[0].images[:48], digits[0].labels[:48])
    kept = DpganCnn(epochs=4)._train(small, context(tmp_path)).state_dict()
    assert all(torch.equal(kept[name], states[1][name]) for name in kept)
    assert not torch.equal(kept["fc2.weight"], states[2]["fc2.weight"])


@pytest.mark.slow
def test_cnn_on_real_mnist(data_root, tmp_path):
    """Trained on MNIST itself, two epochs: above 98%, as every CNN of this size."""
    spec = Mnist(root=str(data_root))
    assert accuracy(DpganCnn(epochs=2), spec.load("train"), spec.load("test"), context(tmp_path)) > 98.0

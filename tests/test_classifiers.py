"""Tests of scikit-learn's and XGBoost's classifiers: predictions, degenerate samples, seeds, threads, settings."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn
import torch
import xgboost
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_info, threadpool_limits
from torch import Tensor

from dpgen_bench.data.datasets import Digits
from dpgen_bench.data.records import Records
from dpgen_bench.evaluate import classifiers
from dpgen_bench.evaluate.classifiers import FittedSklearn, Sklearn, fingerprint, pixel_rows
from dpgen_bench.evaluate.metric import EvalContext

# All that the protocols use, with settings that make them fast on a few hundred small images.
ALL = {
    "adaboost": Sklearn("sklearn.ensemble.AdaBoostClassifier", {"n_estimators": 20}),
    "bagging": Sklearn("sklearn.ensemble.BaggingClassifier", {"max_samples": 0.5}),
    "bernoulli_nb": Sklearn("sklearn.naive_bayes.BernoulliNB", {"binarize": 0.5}),
    "decision_tree": Sklearn("sklearn.tree.DecisionTreeClassifier", {"class_weight": "balanced"}),
    "gaussian_nb": Sklearn("sklearn.naive_bayes.GaussianNB"),
    "gbm": Sklearn("sklearn.ensemble.GradientBoostingClassifier", {"n_estimators": 5, "subsample": 0.5}),
    "lda": Sklearn(
        "sklearn.discriminant_analysis.LinearDiscriminantAnalysis", {"solver": "eigen", "tol": 1e-8, "shrinkage": 0.5}
    ),
    "linear_svc": Sklearn("sklearn.svm.LinearSVC", {"max_iter": 100}),
    "logreg": Sklearn("sklearn.linear_model.LogisticRegression", {"max_iter": 100}),
    "mlp": Sklearn(
        "sklearn.neural_network.MLPClassifier", {"max_iter": 60, "early_stopping": True, "learning_rate_init": 0.01}
    ),
    "random_forest": Sklearn("sklearn.ensemble.RandomForestClassifier", {"n_estimators": 20}),
    "xgboost": Sklearn("xgboost.XGBClassifier", {"n_estimators": 15, "colsample_bytree": 0.5}),
}
all_of_them = pytest.mark.parametrize("classifier", ALL.values(), ids=ALL)


def context(seed: int = 0, num_classes: int = 10) -> EvalContext:
    return EvalContext(seed=seed, device="cpu", num_classes=num_classes, cache=Path("never-used"))


def corners(n: int, labels: tuple[int, ...] = (0, 1, 2), seed: int = 0) -> Records:
    """Faint noise, 6x6, with one bright corner for each class, which every classifier predicts correctly."""
    noise = np.random.default_rng(seed).integers(0, 20, (n, 1, 6, 6))
    number = np.arange(n) % len(labels)
    for row, k in enumerate(number):
        noise[row, 0, 5 * (k // 2), 5 * (k % 2)] = 255
    return Records(torch.from_numpy(noise.astype(np.uint8)), torch.tensor(labels)[torch.from_numpy(number)])


@pytest.fixture(scope="module")
def digits() -> tuple[Records, Records]:
    """Real digits of 8x8 pixels: 150 to train on, 200 to test."""

    def small(records: Records, n: int) -> Records:
        return Records(records.images[:n, :, ::4, ::4].contiguous(), records.labels[:n])

    return small(Digits().load("train"), 150), small(Digits().load("test"), 200)


# Predictions


@all_of_them
def test_separable_classes_are_separated_even_with_gaps_in_the_labels(classifier):
    """Labels 1, 4 and 9 of 10, and 3 and 7: every prediction is a label, not its rank."""
    for labels in ((1, 4, 9), (3, 7)):
        train, test = corners(90, labels, seed=1), corners(60, labels, seed=2)
        predicted = classifier.fit(train, context()).predict(test.images)
        assert predicted.dtype == torch.int64
        assert torch.equal(predicted, test.labels)


@all_of_them
def test_real_digits_are_far_above_chance(classifier, digits):
    """Chance is 10%. In 20 seeds, 20 boosted stumps reached at least 33.5%, the others at least 47%."""
    train, test = digits
    right = (classifier.fit(train, context()).predict(test.images) == test.labels).double().mean()
    assert right > 0.2


@all_of_them
def test_a_single_class_is_always_predicted(classifier, digits):
    train, test = digits
    sevens = Records(train.images, torch.full_like(train.labels, 7))
    assert classifier.fit(sevens, context()).predict(test.images).unique().tolist() == [7]


@all_of_them
def test_equal_images_give_the_most_frequent_label(classifier, digits):
    grey = Records(torch.full((30, 1, 7, 7), 128, dtype=torch.uint8), torch.tensor([2, 5, 8] * 9 + [5, 5, 2]))
    assert classifier.fit(grey, context()).predict(digits[1].images).unique().tolist() == [5]
    tied = Records(grey.images, torch.tensor([9, 4, 6] * 10))
    assert classifier.fit(tied, context()).predict(digits[1].images).unique().tolist() == [4]


# Arguments of the estimator


@dataclass
class Seen:
    rows: np.ndarray
    numbers: np.ndarray
    threads: list[int]
    settings: dict[str, Any]


SEEN: list[Seen] = []


class Spy(ClassifierMixin, BaseEstimator):
    """Records its training data and the number of threads, and predicts its last class number."""

    def __init__(self, random_state=None, n_jobs=None, early_stopping=False, validation_fraction=0.1):
        self.random_state, self.n_jobs = random_state, n_jobs
        self.early_stopping, self.validation_fraction = early_stopping, validation_fraction

    def fit(self, rows, numbers):
        warnings.warn("limit reached", ConvergenceWarning, stacklevel=1)
        SEEN.append(Seen(rows, numbers, [pool["num_threads"] for pool in threadpool_info()], self.get_params()))
        self.last = numbers.max()
        return self

    def predict(self, rows):
        SEEN.append(Seen(rows, np.empty(0), [pool["num_threads"] for pool in threadpool_info()], self.get_params()))
        return np.full(len(rows), self.last, dtype=np.int32)


@pytest.fixture
def seen() -> list[Seen]:
    SEEN.clear()
    return SEEN


def spy(**params: Any) -> Sklearn:
    return Sklearn(f"{__name__}.Spy", params)


def test_the_estimator_sees_shuffled_rows_of_the_samples_and_nothing_else(seen):
    samples = corners(60, (2, 5, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a ConvergenceWarning is part of the definition
        fitted = spy().fit(samples, context(seed=4))
    assert fitted.predict(samples.images).tolist() == [6] * 60
    (fit, predict) = seen
    rows, expected = pixel_rows(samples.images), samples.images.flatten(1).numpy() / np.float32(255)
    assert (rows.dtype, fit.rows.dtype) == (np.float32, np.float32)
    assert np.array_equal(rows, expected)
    assert np.array_equal(predict.rows, expected)

    def together(rows: np.ndarray, numbers: np.ndarray) -> list[list[float]]:
        return np.column_stack([rows, numbers]).tolist()

    assert sorted(together(fit.rows, fit.numbers)) == sorted(together(expected, np.arange(60) % 3))
    # Cyclic labels went in; a hold-out of the last ten rows would now see every class, and not in turn.
    assert set(fit.numbers[-10:]) == {0, 1, 2}
    assert not np.array_equal(fit.numbers, np.arange(60) % 3)
    assert fit.settings["random_state"] == 4
    assert fit.settings["n_jobs"] == 1


def test_the_order_is_drawn_by_the_seed(seen):
    samples = corners(60)
    for seed in (3, 3, 2**40 + 5):
        spy().fit(samples, context(seed))
    assert np.array_equal(seen[0].rows, seen[1].rows)
    assert not np.array_equal(seen[0].rows, seen[2].rows)
    assert seen[2].settings["random_state"] == 5  # scikit-learn takes seeds below 2**32


def test_everything_runs_on_one_thread(seen):
    with threadpool_limits(limits=2):
        spy().fit(corners(30), context()).predict(corners(30).images)
        assert max(pool["num_threads"] for pool in threadpool_info()) == 2
    assert [set(call.threads) for call in seen] == [{1}, {1}]


@all_of_them
def test_unrounded_samples_are_read_on_the_same_scale_and_left_alone(classifier, digits):
    train, test = digits
    pixels = train.images.float()
    fitted = classifier.fit(Records(pixels, train.labels), context(seed=1))
    assert torch.equal(pixels, train.images.float())
    expected = classifier.fit(train, context(seed=1)).predict(test.images)
    assert torch.equal(fitted.predict(test.images), expected)
    assert torch.equal(fitted.predict(test.images.float()), expected)


# Seeds and threads


def scores(classifier: Sklearn, digits: tuple[Records, Records], seed: int) -> np.ndarray:
    """Scores, if the estimator has any, else predictions; more sensitive than accuracies."""
    fitted = classifier.fit(digits[0], context(seed))
    assert isinstance(fitted, FittedSklearn)
    score: Callable = getattr(fitted.model, "predict_proba", None) or fitted.model.decision_function
    with threadpool_limits(limits=1):
        return np.asarray(score(pixel_rows(digits[1].images)))


@all_of_them
def test_predictions_depend_on_the_seed_only(classifier, digits):
    """And not on the global generators or the number of threads."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    first = scores(classifier, digits, seed=5)
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    with threadpool_limits(limits=2):
        assert np.array_equal(scores(classifier, digits, seed=5), first)


@pytest.mark.parametrize("name", ["bagging", "decision_tree", "gbm", "mlp", "random_forest", "xgboost"])
def test_another_seed_is_another_training(name, digits):
    first = scores(ALL[name], digits, seed=0)
    assert any(not np.array_equal(first, scores(ALL[name], digits, seed=seed)) for seed in (1, 2))


def test_all_of_them_may_run_next_to_others():
    assert all(classifier.one_core("cuda") for classifier in ALL.values())


# Holding out of too few samples


def rows_of(n: int, classes: int) -> Records:
    images = torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, 1, 2, 2).contiguous()
    return Records(images, torch.arange(n) % classes)


def mlp(**params: Any) -> Sklearn:
    return Sklearn("sklearn.neural_network.MLPClassifier", {"max_iter": 2, "early_stopping": True, **params})


def test_too_few_samples_to_hold_out_are_an_error_that_says_so():
    with pytest.raises(ValueError, match=r"90 of 10 classes, 9 in the smallest.*early_stopping: false"):
        mlp().fit(rows_of(90, 10), context())
    lonely = Records(rows_of(100, 9).images, (torch.arange(100) % 9).index_fill(0, torch.tensor([50]), 9))
    with pytest.raises(ValueError, match="1 in the smallest"):
        mlp().fit(lonely, context())
    mlp(early_stopping=False).fit(rows_of(90, 10), context())


def test_the_guard_is_where_a_hold_out_by_class_fails(monkeypatch):
    """The smallest sets that the check accepts can be fitted; the largest that it refuses cannot."""
    linear = Sklearn("sklearn.linear_model.SGDClassifier", {"early_stopping": True, "max_iter": 2})
    for classifier in (mlp(), linear):
        classifier.fit(rows_of(91, 10), context())
    mlp(validation_fraction=0.5).fit(rows_of(20, 10), context())
    monkeypatch.setattr(Sklearn, "_check_holdout", lambda *_: None)
    with pytest.raises(ValueError, match="number of classes"):
        linear.fit(rows_of(90, 10), context())


# Settings


@pytest.mark.parametrize(
    ("estimator", "params", "complaint"),
    [
        ("LinearSVC", {}, "such as sklearn.svm.LinearSVC, got 'LinearSVC'"),
        ("sklearn.swm.LinearSVC", {}, r"sklearn\.swm\.LinearSVC cannot be imported"),
        ("sklearn.svm.LinearSVD", {}, r"at sklearn\.svm\.LinearSVD, got None"),
        ("sklearn.preprocessing.StandardScaler", {}, "with fit and predict"),
        ("sklearn.svm.LinearSVC", {"maxiter": 3}, "no parameter maxiter; it has C, .*max_iter"),
        ("xgboost.XGBClassifier", {"colsample": 0.1}, "no parameter colsample;"),
        ("sklearn.svm.LinearSVC", {"loss": "hing"}, "'loss' parameter of LinearSVC"),
        ("sklearn.ensemble.BaggingClassifier", {"n_jobs": 2, "random_state": 1}, "n_jobs, random_state must not be"),
        ("sklearn.ensemble.VotingClassifier", {}, "expected a classifier with scikit-learn's interface"),
    ],
)
def test_wrong_settings_are_refused_at_once(estimator, params, complaint):
    with pytest.raises(ValueError, match=complaint):
        Sklearn(estimator, params)


# Fingerprints


def test_a_fingerprint_names_all_that_predictions_depend_on():
    text = fingerprint(Sklearn("sklearn.svm.LinearSVC", {"max_iter": 7}))
    assert json.loads(text) == {
        "class": "dpgen_bench.evaluate.classifiers.Sklearn",
        "fields": {"estimator": "sklearn.svm.LinearSVC", "params": {"max_iter": 7}},
        "revision": classifiers.REVISION,
        "versions": {"sklearn": sklearn.__version__},
    }
    boosted = json.loads(fingerprint(Sklearn("xgboost.XGBClassifier")))
    assert boosted["versions"] == {"sklearn": sklearn.__version__, "xgboost": xgboost.__version__}


def test_fingerprints_are_equal_for_equal_classifiers_only(monkeypatch):
    def svc(**params: Any) -> str:
        return fingerprint(Sklearn("sklearn.svm.LinearSVC", params))

    assert svc(C=1.0, tol=0.1) == svc(tol=0.1, C=1.0)
    texts = [svc(), svc(C=1.0), svc(C=2.0), fingerprint(Sklearn("sklearn.svm.SVC"))]
    monkeypatch.setattr(classifiers, "REVISION", -1)
    texts.append(svc())
    monkeypatch.setattr(sklearn, "__version__", "0.0")
    texts.append(svc())
    assert len(set(texts)) == len(texts)


def test_a_base_estimator_enters_by_its_settings():
    def boosted(depth: int) -> str:
        base = sklearn.tree.DecisionTreeClassifier(max_depth=depth)
        return fingerprint(Sklearn("sklearn.ensemble.AdaBoostClassifier", {"estimator": base}))

    assert boosted(2) == boosted(2)
    assert boosted(2) != boosted(3)


def test_settings_without_a_json_form_have_no_fingerprint():
    class Plain:
        def fit(self, records: Records, ctx: EvalContext) -> Any: ...

        def one_core(self, device: Any) -> bool: ...

    @dataclass(frozen=True)
    class Odd(Plain):
        weights: Tensor

    with pytest.raises(TypeError, match="a dataclass"):
        fingerprint(Plain())
    with pytest.raises(TypeError, match="numbers, texts"):
        fingerprint(Odd(torch.zeros(2)))


@dataclass(frozen=True)
class Own:
    """A classifier of a user, in a module without a REVISION."""

    depth: int = 3

    def fit(self, records: Records, ctx: EvalContext) -> Any: ...

    def one_core(self, device: Any) -> bool:
        return False


def test_a_users_classifier_has_a_fingerprint():
    parts = json.loads(fingerprint(Own()))
    assert parts["fields"] == {"depth": 3}
    assert parts["versions"] == {"torch": torch.__version__}
    assert fingerprint(Own(4)) != fingerprint(Own())

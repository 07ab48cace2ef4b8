"""Classifiers that `utility.Accuracy` trains on samples and evaluates on the real test images.

A classifier is a frozen dataclass: its fields are its settings, and `fingerprint` makes them part of a cache's key. To
add one, write a dataclass with `fit` and `one_core` (see `Classifier`) in a module on the Python path, with a constant
`REVISION` in that module; raise it when the predictions change for other reasons than the fields.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import math
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits
from torch import Tensor

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import EvalContext

# Raise it when `Sklearn` gives other predictions for the same settings, so that cached ones are not used.
REVISION = 1


class Fitted(Protocol):
    """A trained classifier."""

    def predict(self, images: Tensor) -> Tensor:
        """Labels int64 [n] of images [n, c, h, w], uint8 or float32 within [0, 255]."""
        ...


class Classifier(Protocol):
    """Settings of a classifier, and its training."""

    def fit(self, records: Records, ctx: EvalContext) -> Fitted:
        """Train on `records` only, from which samples for early stopping are held out. Randomness is from ctx.seed."""
        ...

    def one_core(self, device: Any) -> bool:
        """Whether it may run in a separate process, with one thread and without the device."""
        ...


def pixel_rows(images: Tensor) -> np.ndarray:
    """Images as rows of pixels in [0, 1], float32 [n, c·h·w]; `images` are not changed."""
    return (images.flatten(1).cpu().float() / 255.0).numpy()


@dataclass(frozen=True)
class Constant:
    """Predicts the same label for every image."""

    label: int

    def predict(self, images: Tensor) -> Tensor:
        return torch.full((len(images),), self.label, dtype=torch.int64)


@dataclass(frozen=True)
class FittedSklearn:
    """A fitted estimator that predicts class numbers 0..k-1, and the labels `classes` [k] of these numbers."""

    model: Any
    classes: np.ndarray

    def predict(self, images: Tensor) -> Tensor:
        with threadpool_limits(limits=1):
            numbers = self.model.predict(pixel_rows(images))
        return torch.from_numpy(self.classes[np.asarray(numbers, dtype=np.int64)])


@dataclass(frozen=True)
class Sklearn:
    """Any classifier with scikit-learn's interface, on pixels in [0, 1].

    Samples are sorted or cyclic by class, so they are shuffled by the seed: estimators that hold out the last rows, or
    process rows in order, would depend on that order. All randomness derives from the seed, and everything runs on one
    thread, so that predictions do not depend on the number of cores. The estimator gets class numbers 0..k-1, which
    `predict` maps back to labels. If all samples have one class or are the same image, the most frequent label is
    predicted (the smallest one of several). Reaching the limit of iterations is part of the classifier's definition and
    issues no warning.

    Args:
        estimator: path of the class, such as sklearn.ensemble.RandomForestClassifier or xgboost.XGBClassifier.
        params: its settings, without random_state and n_jobs, which are set here. Others are the library's defaults.

    Raises:
        ValueError: if there is no such class, or it refuses the settings.
    """

    estimator: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.build(seed=0)

    def build(self, seed: int) -> Any:
        """The estimator, not yet fitted."""
        kind = _class_at(self.estimator)
        try:
            known = kind().get_params(deep=False)
        except Exception as error:
            raise ValueError(
                f"expected a classifier with scikit-learn's interface, got {self.estimator}: {error}"
            ) from error
        if reserved := sorted({"random_state", "n_jobs"} & set(self.params)):
            raise ValueError(f"{self.estimator}: {', '.join(reserved)} must not be in params; the evaluation sets it.")
        if unknown := sorted(set(self.params) - set(known)):
            raise ValueError(
                f"{self.estimator} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(known))}."
            )
        model = kind(**copy.deepcopy(dict(self.params)))
        if "random_state" in known:
            model.set_params(random_state=seed % 2**32)
        # scikit-learn runs one job by default, and warns if n_jobs has no effect; other libraries use all cores.
        if "n_jobs" in known and not self.estimator.startswith("sklearn."):
            model.set_params(n_jobs=1)
        if hasattr(model, "_parameter_constraints"):  # Private to scikit-learn, which otherwise checks values in `fit`.
            try:
                model._validate_params()
            except ValueError as error:
                raise ValueError(f"{self.estimator} refuses params {dict(self.params)}: {error}") from error
        return model

    def fit(self, records: Records, ctx: EvalContext) -> Fitted:
        """Train a new estimator on `records`.

        Raises:
            ValueError: if there are too few samples to hold out for early stopping.
        """
        classes, numbers = np.unique(records.labels.cpu().numpy(), return_inverse=True)
        counts = np.bincount(numbers)
        if len(classes) == 1 or bool((records.images == records.images[:1]).all()):
            return Constant(int(classes[counts.argmax()]))
        model = self.build(ctx.seed)
        self._check_holdout(model.get_params(deep=False), counts)
        order = np.random.default_rng(ctx.seed).permutation(len(records))
        with threadpool_limits(limits=1), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(pixel_rows(records.images)[order], numbers[order])
        return FittedSklearn(model, classes)

    def one_core(self, device: Any) -> bool:
        return True

    def _check_holdout(self, params: dict[str, Any], counts: np.ndarray) -> None:
        """Check that early stopping can hold out samples of every class.

        That needs two samples of each class, and as many held-out samples as classes. Where scikit-learn splits by
        class, it raises an error below these numbers that does not say what to do; where it does not (its perceptron,
        depending on the version), a few samples would decide when training stops.

        Raises:
            ValueError: if there are too few samples.
        """
        if params.get("early_stopping") is not True or "validation_fraction" not in params:
            return
        held_out = math.ceil(params["validation_fraction"] * counts.sum())
        if counts.min() < 2 or held_out < len(counts):
            raise ValueError(
                f"too few samples to hold out {params['validation_fraction']:.0%} for early stopping: {counts.sum()} "
                f"of {len(counts)} classes, {counts.min()} in the smallest. Expected 2 or more in each class and "
                f"{len(counts)} or more held out: raise protocol.num_samples or set early_stopping: false."
            )


def fingerprint(classifier: Classifier) -> str:
    """JSON text of all that a classifier's predictions depend on besides the records; the same in every process.

    It contains its class, its fields, the REVISION of the class's module if it has one, and versions of libraries:
    those of the estimator for `Sklearn`, PyTorch for others.

    Raises:
        TypeError: if it is not a dataclass, or a field cannot be written as JSON.
    """
    kind = type(classifier)
    if not dataclasses.is_dataclass(classifier):
        raise TypeError(f"expected a classifier that is a dataclass, so that its fields name its settings, got {kind}.")
    libraries = {classifier.estimator.split(".")[0], "sklearn"} if isinstance(classifier, Sklearn) else {"torch"}
    parts = {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "fields": {field.name: getattr(classifier, field.name) for field in dataclasses.fields(classifier)},
        "revision": getattr(sys.modules[kind.__module__], "REVISION", None),
        "versions": {name: getattr(importlib.import_module(name), "__version__", None) for name in libraries},
    }
    return json.dumps(parts, sort_keys=True, default=_plain)


def training_key(classifier: Classifier, records: Records, ctx: EvalContext) -> str:
    """All that a classifier trained on `records` depends on. The device, which changes rounding only, is left out."""
    return "\n".join(map(str, (records.content_hash, fingerprint(classifier), ctx.seed, ctx.num_classes)))


def _plain(value: Any) -> Any:
    """A JSON-able form of mappings, nested dataclasses and estimators (such as a base estimator in `params`)."""
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"class": f"{type(value).__module__}.{type(value).__qualname__}", "fields": vars(value)}
    if hasattr(value, "get_params") and not isinstance(value, type):
        return {"class": f"{type(value).__module__}.{type(value).__qualname__}", "params": value.get_params(deep=False)}
    raise TypeError(f"expected settings made of numbers, texts, lists, mappings and estimators, got {value!r}.")


def _class_at(path: str) -> Any:
    """The class at a dotted path.

    Raises:
        ValueError: if the module cannot be imported or has no such class.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ValueError(f"expected an estimator's path such as sklearn.svm.LinearSVC, got {path!r}.")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"the estimator {path} cannot be imported: {error}.") from error
    kind = getattr(module, name, None)
    if not isinstance(kind, type) or not hasattr(kind, "fit") or not hasattr(kind, "predict"):
        raise ValueError(f"expected a class with fit and predict at {path}, got {kind!r}.")
    return kind

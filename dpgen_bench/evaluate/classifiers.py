"""Classifiers that `utility.Accuracy` trains on samples and asks about the real test images.

A classifier is a frozen dataclass: its fields are its settings, and `fingerprint` makes them part of a cache's key.
One's own needs `fit` and `one_core` as in `Classifier` below, anywhere on the Python path, and a `REVISION` in its
module, to be raised when its answers change for other reasons than its fields.
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

# Raise when `Sklearn` gives other answers for the same settings: cached figures of the old one are then left alone.
REVISION = 1


class Fitted(Protocol):
    """A trained classifier."""

    def predict(self, images: Tensor) -> Tensor:
        """Labels int64 [n] of images [n, c, h, w], uint8 or float32 within [0, 255]."""
        ...


class Classifier(Protocol):
    """Settings of a classifier, and its training."""

    def fit(self, records: Records, ctx: EvalContext) -> Fitted:
        """Train on `records` alone; whatever is held out to stop by is held out of them. Randomness is ctx.seed's."""
        ...

    def one_core(self, device: Any) -> bool:
        """Whether it may run in a process of its own, with one thread and without the device."""
        ...


def pixel_rows(images: Tensor) -> np.ndarray:
    """Images as rows of pixels in [0, 1], float32 [n, c·h·w]; `images` themselves stay as they are."""
    return (images.flatten(1).cpu().float() / 255.0).numpy()


@dataclass(frozen=True)
class Constant:
    """Answers with one label, whatever it is shown."""

    label: int

    def predict(self, images: Tensor) -> Tensor:
        return torch.full((len(images),), self.label, dtype=torch.int64)


@dataclass(frozen=True)
class FittedSklearn:
    """A fitted estimator that knows class numbers 0..k-1; `classes` [k] are the labels they stand for."""

    model: Any
    classes: np.ndarray

    def predict(self, images: Tensor) -> Tensor:
        with threadpool_limits(limits=1):
            numbers = self.model.predict(pixel_rows(images))
        return torch.from_numpy(self.classes[np.asarray(numbers, dtype=np.int64)])


@dataclass(frozen=True)
class Sklearn:
    """Any classifier with scikit-learn's interface, on pixels in [0, 1].

    It is fitted to the samples in an order drawn from the seed: samples come sorted or cyclic by class, and an
    estimator that holds out its last rows, or takes rows in turn, would see an accident of that order. All randomness
    is the seed's, everything runs on one thread, and so a figure does not depend on the number of cores. Class numbers
    without gaps are made for the estimator and undone in `predict`. Samples of one class, or of one and the same image,
    leave nothing to learn: the answer is then the most frequent label (the smallest of them, if there are more).
    An iteration limit that is reached is part of the classifier's definition and no cause for a warning.

    Args:
        estimator: the class's path, such as sklearn.ensemble.RandomForestClassifier or xgboost.XGBClassifier.
        params: its settings, without random_state and n_jobs, which are set here; the library's defaults for the rest.

    Raises:
        ValueError: at once, if there is no such class or it refuses the settings.
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
            raise ValueError(f"{self.estimator} is no classifier with scikit-learn's interface: {error}") from error
        if ours := sorted({"random_state", "n_jobs"} & set(self.params)):
            raise ValueError(f"{self.estimator}: {', '.join(ours)} must not be in params; the evaluation sets it.")
        if unknown := sorted(set(self.params) - set(known)):
            raise ValueError(
                f"{self.estimator} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(known))}."
            )
        model = kind(**copy.deepcopy(dict(self.params)))
        if "random_state" in known:
            model.set_params(random_state=seed % 2**32)
        # Unset, n_jobs means one job to scikit-learn, which warns of it where it has no effect; to others, all cores.
        if "n_jobs" in known and not self.estimator.startswith("sklearn."):
            model.set_params(n_jobs=1)
        if hasattr(model, "_parameter_constraints"):  # private to scikit-learn, which else looks at values when it fits
            try:
                model._validate_params()
            except ValueError as error:
                raise ValueError(f"{self.estimator} refuses params {dict(self.params)}: {error}") from error
        return model

    def fit(self, records: Records, ctx: EvalContext) -> Fitted:
        """Raises ValueError if there are too few samples to hold out for an early stopping."""
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
        """A hold-out that sees every class needs two samples of each, and as many rows held out as there are classes.

        Where scikit-learn splits by class it fails below that, without saying what to do; where it does not (its
        perceptron, by version), it would stop by a handful of rows.
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
    """JSON text, the same for the same classifier in any process, of all that its answers depend on but the records.

    That is its class, its fields, the REVISION of the class's module if it has one, and the versions of the libraries
    that compute: those of the estimator for `Sklearn`, PyTorch for others.

    Raises:
        TypeError: if it is no dataclass, or a field has no text of its own.
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


def _plain(value: Any) -> Any:
    """What JSON has no form for: mappings, nested dataclasses and estimators (a base estimator among the params)."""
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
    found = getattr(module, name, None)
    if not isinstance(found, type) or not hasattr(found, "fit") or not hasattr(found, "predict"):
        raise ValueError(f"expected a class with fit and predict at {path}, found {found!r}.")
    return found

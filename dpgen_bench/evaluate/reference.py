"""Classifiers that are trained on the real training records, once for all runs of a data set.

`utility.Accuracy` compares with their accuracy; `inception_score.InceptionScore` uses their predictions for samples.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.classifiers import Classifier, fingerprint, training_key
from dpgen_bench.evaluate.metric import EvalContext, hash_images
from dpgen_bench.utils.cache import Arrays, cached_arrays
from dpgen_bench.utils.randomness import seeded

log = logging.getLogger(__name__)

# The seed of all these trainings, so that they do not depend on the run that is measured.
REFERENCE_SEED = 0


def predictions(classifier: Classifier, records: Records, images: Tensor, ctx: EvalContext) -> Tensor:
    """Labels int64 [n] predicted for `images` [n, c, h, w] by the classifier trained on `records` with `ctx.seed`."""
    with seeded(ctx.seed):
        return classifier.fit(records, ctx).predict(images).cpu()


def reference_predictions(classifier: Classifier, train: Records, images: Tensor, ctx: EvalContext) -> Tensor:
    """`predictions` for real test images [n, c, h, w] of the classifier trained on `train` with `REFERENCE_SEED`.

    They are kept in ctx.cache/classifiers (see `utils.cache`). Predictions are kept and not an accuracy, so that no
    test label is read here. The key is the content of the records and the images, the number of classes, and the
    classifier's fingerprint. The device is not part of it, because it changes results by rounding only.
    """

    def predict() -> Arrays:
        if hasattr(classifier, "restore"):
            return {"predictions": reference_network(classifier, train, ctx).predict(images).cpu().numpy()}
        return {"predictions": predictions(classifier, train, images, _as_reference(ctx)).numpy()}

    def fits(kept: Arrays) -> bool:
        labels = kept.get("predictions", np.empty(0))
        return labels.shape == (len(images),) and labels.dtype == np.int64

    parts = train.content_hash, hash_images(images), ctx.num_classes, REFERENCE_SEED, fingerprint(classifier)
    cached = cached_arrays(ctx.cache / "classifiers", "\n".join(map(str, parts)), predict, fits)
    return torch.from_numpy(cached["predictions"])


def reference_network(classifier: Any, train: Records, ctx: EvalContext) -> Any:
    """A network (`networks.Network`, or a class with its `fit` and `restore`) trained on `train` by `REFERENCE_SEED`.

    Its weights are kept in ctx.cache/classifiers (see `utils.cache`).
    """

    as_reference = _as_reference(ctx)

    def train_network() -> Arrays:
        log.info("training %s on %d real records, once for this dataset", classifier, len(train))
        with seeded(REFERENCE_SEED):
            state = classifier.fit(train, as_reference).state
        return {name: value.numpy() for name, value in state.items()}

    key = training_key(classifier, train, as_reference)
    state = cached_arrays(ctx.cache / "classifiers", key, train_network)
    tensors = {name: torch.from_numpy(value) for name, value in state.items()}
    return classifier.restore(tensors, train.images.shape, ctx.num_classes, ctx.device)


def percent_correct(predicted: Tensor, truth: Tensor) -> float:
    """Percentage of `predicted` labels [n] that equal `truth` [n].

    Raises:
        ValueError: if the shapes differ.
    """
    if predicted.shape != truth.shape:
        raise ValueError(f"expected {len(truth)} predicted labels, got {tuple(predicted.shape)}.")
    return 100.0 * float((predicted == truth).double().mean())


def _as_reference(ctx: EvalContext) -> EvalContext:
    """The context of a reference's training, without notes: only the run that fills the cache would get them.

    An unfinished training is kept in the cache, where the next run that needs it continues it.
    """
    return replace(ctx, seed=REFERENCE_SEED, notes=[], scratch=ctx.cache / "classifiers")

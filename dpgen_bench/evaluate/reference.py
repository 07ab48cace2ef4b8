"""Classifiers trained on the real training records, once for all runs of a data set: they calibrate, and they score."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from filelock import FileLock
from safetensors import SafetensorError
from torch import Tensor

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.classifiers import Classifier, fingerprint
from dpgen_bench.evaluate.metric import EvalContext, seeded
from dpgen_bench.utils.files import atomic, write_atomic

log = logging.getLogger(__name__)

# Every reference is trained with this seed, whichever run is measured.
REFERENCE_SEED = 0


def predictions(classifier: Classifier, records: Records, images: Tensor, ctx: EvalContext) -> Tensor:
    """Labels int64 [n] that the classifier, trained on `records`, gives `images` [n, c, h, w]."""
    with seeded(ctx.seed):
        return classifier.fit(records, ctx).predict(images).cpu()


def reference_predictions(classifier: Classifier, train: Records, images: Tensor, ctx: EvalContext) -> Tensor:
    """`predictions` for real test images [n, c, h, w] of the classifier trained on `train` with `REFERENCE_SEED`.

    They come from ctx.cache/classifiers, if they were made before, else they are made and kept there. Predictions are
    kept and no accuracy, so that no test label is looked at here. The key is the content of the records and the images,
    the number of classes, and the classifier's fingerprint; the device is not in it, it decides about rounding alone.
    Of several processes that need the same one, one trains and the others wait. A file that cannot be read, or holds
    something else, is reported by a warning and made anew.
    """
    shown = Records(images, torch.zeros(len(images), dtype=torch.int64)).images_hash
    key = _key(train.content_hash, shown, str(ctx.num_classes), str(REFERENCE_SEED), fingerprint(classifier))
    path = ctx.cache / "classifiers" / f"{key[:32]}.npz"
    if not _usable(path.parent):
        return predictions(classifier, train, images, _as_reference(ctx))
    with FileLock(path.with_suffix(".lock")):
        kept = _kept_predictions(path, key, len(images))
        if kept is not None:
            return kept
        if hasattr(classifier, "restore"):
            made = reference_network(classifier, train, ctx).predict(images).cpu()
        else:
            made = predictions(classifier, train, images, _as_reference(ctx))
        with atomic(path) as temporary:
            np.savez_compressed(temporary, predictions=made.numpy(), key=np.array(key))
        return made


def reference_network(classifier: Any, train: Records, ctx: EvalContext) -> Any:
    """A network (`networks.Network`, or what has its `fit` and `restore`) trained on `train` with `REFERENCE_SEED`.

    Its weights come from ctx.cache/classifiers, on the terms of `reference_predictions`.
    """
    key = _key(train.content_hash, fingerprint(classifier), str(REFERENCE_SEED), str(ctx.num_classes))
    weights = ctx.cache / "classifiers" / f"{key[:32]}.safetensors"
    if not _usable(weights.parent):
        with seeded(REFERENCE_SEED):
            return classifier.fit(train, _as_reference(ctx))
    about = weights.with_suffix(".json")
    with FileLock(f"{weights}.lock"):
        state = _kept_weights(weights, about, key)
        if state is not None:
            return classifier.restore(state, train.images.shape, ctx.num_classes, ctx.device)
        log.info("training %s on %d real records, once for this dataset", classifier, len(train))
        with seeded(REFERENCE_SEED):
            fitted = classifier.fit(train, _as_reference(ctx))
        content = safetensors.torch.save(fitted.state)
        write_atomic(weights, content)
        facts = {"key": key, "sha256": hashlib.sha256(content).hexdigest(), "classifier": fingerprint(classifier)}
        write_atomic(about, json.dumps(facts, indent=1))  # last: where it is, the weights are too
        return fitted


def percent_correct(predicted: Tensor, truth: Tensor) -> float:
    """How many of `predicted` are right, in percent.

    Raises:
        ValueError: if they are not one for each image.
    """
    if predicted.shape != truth.shape:
        raise ValueError(f"expected {len(truth)} predicted labels, got {tuple(predicted.shape)}.")
    return 100.0 * float((predicted == truth).double().mean())


def _as_reference(ctx: EvalContext) -> EvalContext:
    """Notes of the training are dropped: they would come with the run that happened to fill the cache alone."""
    return replace(ctx, seed=REFERENCE_SEED, notes=[])


def _usable(folder: Path) -> bool:
    """Whether files can be kept in a folder; a warning if not, since what was to be kept is then made each time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(folder, os.W_OK) else "it cannot be written to"
    except OSError as error:
        problem = str(error)
    if problem:
        warnings.warn(f"classifiers of real records cannot be kept in {folder}: {problem}.", stacklevel=3)
    return not problem


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _kept_predictions(path: Path, key: str, n: int) -> Tensor | None:
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as kept:
            made = kept["predictions"]
            if str(kept["key"]) == key and made.shape == (n,) and made.dtype == np.int64:
                return torch.from_numpy(made)
            problem = "hold something else than their name says"
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        problem = f"cannot be read ({type(error).__name__}: {error})"
    warnings.warn(f"cached predictions {path} {problem}; made anew.", stacklevel=3)
    return None


def _kept_weights(weights: Path, about: Path, key: str) -> dict[str, Tensor] | None:
    if not about.exists():
        return None
    try:
        facts = json.loads(about.read_text())
        content = weights.read_bytes()
        if facts["key"] == key and facts["sha256"] == hashlib.sha256(content).hexdigest():
            return safetensors.torch.load(content)
        problem = "do not hold what their names say"
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        problem = f"cannot be read ({type(error).__name__}: {error})"
    warnings.warn(f"the classifier {weights} and its json {problem}; trained anew.", stacklevel=3)
    return None

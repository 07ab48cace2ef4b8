"""Readers of the two layouts of Federated EMNIST's files, which check the records of each writer.

`Writers` is {id: (images uint8 [n, 28, 28], ink bright on black; labels int64 [n], 0..61)}. In the files, pixels go
from 0.0 for ink to 1.0 for the background.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dpgen_bench.data.records import DatasetSpec

Writers = dict[str, tuple[np.ndarray, np.ndarray]]
CLASSES = 62


def read_tff(spec: DatasetSpec, path: Path) -> Writers:
    """One split from TensorFlow Federated's HDF5: examples / id / {pixels float [n, 28, 28], label int [n]}.

    Args:
        spec: The dataset, for messages.

    Raises:
        ValueError: If the file is damaged.
    """
    import h5py  # not at the top of the module: it takes a tenth of a second

    writers: Writers = {}
    try:
        with h5py.File(path, "r") as file:
            for user, group in file["examples"].items():
                writers[user] = _checked(spec, path, user, group["pixels"][()], group["label"][()])
    except (OSError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise spec.damaged_error(path, f"it is not an HDF5 file of examples / id / pixels, label ({error})") from error
    return writers


def read_leaf(spec: DatasetSpec, paths: tuple[Path, ...]) -> Writers:
    """One split from LEAF's JSON files: {"users": [...], "user_data": {id: {"x": [[784 numbers]...], "y": [...]}}}.

    Raises:
        ValueError: If a file is damaged, or two files have the same writer. This happens if the folder has files of
            two runs of LEAF's script.
    """
    writers: Writers = {}
    for path in paths:
        for user, data in _read_leaf_file(spec, path).items():
            if user in writers:
                raise spec.damaged_error(
                    path, f"another file of its folder has the user {user!r}, too; keep the files of one run"
                )
            try:
                x, y = np.array(data["x"], dtype=np.float64), np.array(data["y"])
            except (KeyError, TypeError, ValueError) as error:
                raise spec.damaged_error(
                    path, f"user {user!r}: expected x, lists of 784 numbers, and y ({error})"
                ) from error
            writers[user] = _checked(spec, path, user, x, y)
    return writers


def users_of(spec: DatasetSpec, paths: tuple[Path, ...]) -> tuple[str, ...]:
    """The ids of all writers in the files of one split. The suffix of the files gives their layout.

    The ids are cached as long as the files do not change.

    Raises:
        ValueError: If a file is damaged; its records are not checked.
    """
    return _users(spec, paths, _stamp(paths))


def digest(paths: tuple[Path, ...]) -> str:
    """SHA-256 (16 hex digits) of the files' names and contents."""
    return _digest(paths, _stamp(paths))


def _stamp(paths: tuple[Path, ...]) -> tuple[tuple[int, int], ...]:
    """Size and modification time of each file, so that caches are not used for changed files."""
    return tuple((path.stat().st_size, path.stat().st_mtime_ns) for path in paths)


@lru_cache(maxsize=4)
def _digest(paths: tuple[Path, ...], stamp: tuple[tuple[int, int], ...]) -> str:
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256")
        whole.update(f"{path.parent.name}/{path.name}\n".encode() + content.digest())
    return whole.hexdigest()[:16]


@lru_cache(maxsize=4)
def _users(spec: DatasetSpec, paths: tuple[Path, ...], stamp: tuple[tuple[int, int], ...]) -> tuple[str, ...]:
    if paths[0].suffix == ".json":
        return tuple(user for path in paths for user in _read_leaf_file(spec, path))
    import h5py

    try:
        with h5py.File(paths[0], "r") as file:
            return tuple(file["examples"].keys())
    except (OSError, RuntimeError, KeyError, AttributeError) as error:
        raise spec.damaged_error(
            paths[0], f"it is not an HDF5 file of examples / id / pixels, label ({error})"
        ) from error


def _read_leaf_file(spec: DatasetSpec, path: Path) -> dict[str, Any]:
    """The data of each writer in one JSON file, by id."""
    try:
        with path.open() as file:
            content = json.load(file)
        users, data = content["users"], content["user_data"]
        if sorted(users) != sorted(data):
            raise ValueError("its users and its user_data have different ids")
    except (ValueError, KeyError, TypeError) as error:  # JSON and Unicode errors are ValueErrors
        raise spec.damaged_error(path, f"it is not a file of LEAF ({type(error).__name__}: {error})") from error
    return data


def _checked(
    spec: DatasetSpec, path: Path, user: str, pixels: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One writer's images and labels as `Writers` has them.

    Raises:
        ValueError: For other shapes, a label outside 0..61, or a pixel outside [0, 1].
    """
    n = len(labels) if labels.ndim else 0
    if n == 0 == pixels.size:
        return np.empty((0, 28, 28), np.uint8), np.empty(0, np.int64)
    if pixels.shape not in ((n, 28, 28), (n, 784)) or labels.shape not in ((n,), (n, 1)) or labels.dtype.kind != "i":
        raise spec.damaged_error(
            path,
            f"user {user!r}: expected images [n, 28, 28] (or [n, 784]) and integer labels [n], got {pixels.shape} and "
            f"{labels.dtype} {labels.shape}",
        )
    labels = labels.reshape(n).astype(np.int64)
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise spec.damaged_error(path, f"user {user!r}: expected labels 0..61, got {labels.min()}..{labels.max()}")
    if not ((pixels >= 0) & (pixels <= 1)).all():  # this form of the condition is false for NaN, too
        raise spec.damaged_error(path, f"user {user!r}: expected pixels within [0, 1], got others (or NaN)")
    return np.rint(255 * (1 - pixels)).astype(np.uint8).reshape(n, 28, 28), labels

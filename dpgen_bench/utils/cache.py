"""Caches in files, for values that take long to compute: they are computed once, and checked when they are read.

`cached_arrays` keeps arrays in a folder, one npz file for each key; `read_values` and `add_values` keep small values in
one JSON file. Their guarantees:

- A reader sees the old file or the new one, never a part of it: files are written atomically.
- A damaged file is reported by a warning and its content is computed again. Damage is found by a checksum: zip's CRC-32
  of each array in an npz file, SHA-256 in a JSON file.
- Reading a file executes no code: pickled objects are refused.
- Of several processes that need the same arrays, one computes them and the others wait.
- If a file cannot be written, a warning says so, and the values are computed again next time.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from dpgen_bench.utils.files import atomic, write_atomic

Arrays = dict[str, np.ndarray]


def cached_arrays(
    folder: Path | None, key: str, compute: Callable[[], Arrays], fits: Callable[[Arrays], bool] = lambda arrays: True
) -> Arrays:
    """The arrays that `compute()` returns, read from a file in `folder` if they were computed before.

    Args:
        folder: where files are kept; None keeps nothing.
        key: names all that the arrays depend on. Its hash is the file's name, and is stored in the file, too.
        compute: returns arrays by name; no name may be "key".
        fits: whether arrays from a file have the expected names, shapes and types; if not, they are computed again.
    """
    if folder is None:
        return compute()
    digest = hashlib.sha256(key.encode()).hexdigest()
    path = folder / f"{digest[:32]}.npz"
    with _locked(path) as locked:
        kept = read_arrays(path)
        if kept is not None:
            if str(kept.pop("key", "")) == digest and fits(kept):
                return kept
            _warn(f"{path} holds other arrays than its name says; they are computed again.")
        arrays = compute()
        assert "key" not in arrays
        if locked:
            try:
                write_arrays(path, {**arrays, "key": np.array(digest)})
            except OSError as error:  # A full disk must not stop a run.
                _warn(f"{path} cannot be written ({error}); its content will be computed again.")
        return arrays


def read_arrays(path: Path) -> Arrays | None:
    """The arrays of an npz file by name. None if there is no such file, and, with a warning, if it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as content:
            return {name: content[name] for name in content.files}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # NumPy and zipfile raise errors of many classes for a damaged archive.
        _warn(f"{path} cannot be read ({type(error).__name__}: {error}); its content is computed again.")
        return None


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], *, compress: bool = False) -> None:
    """Write arrays by name to an npz file, atomically.

    Raises:
        OSError: if the file cannot be written.
    """
    save: Callable[..., None] = np.savez_compressed if compress else np.savez
    with atomic(path) as temporary:
        save(temporary, **arrays)


def read_values(path: Path) -> dict[str, Any]:
    """The values of a JSON file by key. {} if there is no such file, and, with a warning, if it is damaged."""
    try:
        content = json.loads(path.read_text())
        if "sha256" not in content:  # Files of earlier versions contain the values only.
            return dict(content)
        if content["sha256"] != _checksum(content["values"]):
            raise ValueError("its checksum differs")
        return dict(content["values"])
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        _warn(f"{path} cannot be read ({type(error).__name__}: {error}); its values are computed again.")
        return {}


def add_values(path: Path, values: Mapping[str, Any]) -> None:
    """Add JSON-able values by key to those of a JSON file, next to those that other processes add."""
    with _locked(path) as locked:
        if locked:
            merged = {**read_values(path), **values}
            try:
                write_atomic(path, json.dumps({"sha256": _checksum(merged), "values": merged}, indent=1))
            except OSError as error:
                _warn(f"{path} cannot be written ({error}); its values will be computed again.")


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Wait for the lock of a file and hold it inside the block; False, with a warning, if it cannot be created."""
    lock = FileLock(f"{path}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        _warn(f"{path.parent} cannot be written to ({error}); what is computed is not kept there.")
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)

"""Digests of what must be equal bit by bit: state dicts by path, rows of a log, and the entries that are clocks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Digests = dict[str, str]

# What an entry must be called to be a clock, or a rate per time. It must also be a number >= 0 (a float, or an int, as
# `time.time_ns` gives; both are kept readable behind FLOAT), and differ in a second fit on the same data.
CLOCK = re.compile(r"second|time|elapsed|duration|clock|_s$|_ms$|_us$|_ns$|per_sec$")
FLOAT = "float "


def digests(value: Any, path: str = "") -> Digests:
    """Path -> hash of every leaf of nested mappings, lists and plain objects; tensors by type, shape and bits.

    The order of a mapping's keys does not count, and a tuple equals a list, because a checkpoint may exchange them.
    """
    return dict(_leaves(value, path, set()))


def _leaves(value: Any, path: str, above: set[int]) -> Iterator[tuple[str, str]]:
    if id(value) in above:
        yield path, "a cycle"
        return
    inner: Mapping[Any, Any] | None = None
    if isinstance(value, Mapping):
        inner = value
    elif isinstance(value, list | tuple):
        inner = dict(enumerate(value))
    elif isinstance(value, set | frozenset):
        inner = dict(enumerate(sorted(value, key=repr)))
    elif not _is_leaf(value) and hasattr(value, "__dict__"):
        inner = vars(value)
    if inner is None:
        yield path, _hash(value)
        return
    yield f"{path}/", f"{len(inner)} entries"
    for key in sorted(inner, key=repr):
        yield from _leaves(inner[key], f"{path}/{key}", above | {id(value)})


def _is_leaf(value: Any) -> bool:
    plain = bool | int | float | complex | str | bytes | None | Tensor | np.ndarray | np.generic
    return isinstance(value, plain) or callable(value)


def _hash(value: Any) -> str:
    if type(value) is int:
        return f"{FLOAT}{value}"  # no float is written like that: 1.0 keeps its point
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        kind, content = f"{value.dtype}{tuple(value.shape)}", flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        kind, content = f"{array.dtype}{array.shape}", np.ascontiguousarray(array).tobytes()
    elif callable(value):  # its address is another one in each fit
        kind, content = "callable", getattr(value, "__qualname__", type(value).__qualname__).encode()
    elif isinstance(value, float):
        return f"{FLOAT}{value!r}"
    elif isinstance(value, bool | int | complex | str | bytes | None):
        kind, content = type(value).__name__, repr(value).encode()
    else:
        kind, content = type(value).__qualname__, b""
    return hashlib.blake2b(kind.encode() + b"\0" + content, digest_size=16).hexdigest()


def different(one: Digests, other: Digests) -> list[str]:
    """The paths at which two sets of digests differ, those that only one of them has included; sorted."""
    return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


def clocks(one: list[Digests], again: list[Digests]) -> set[str]:
    """The paths that hold times: named so, numbers >= 0, and different in a second fit on the same data.

    An entry that is the same twice is compared like any other, so that a private value cannot pass by its name alone.
    """
    found = set()
    for a, b in zip(one, again, strict=False):
        for path in different(a, b):
            both = _is_time(a.get(path, "")) and _is_time(b.get(path, ""))
            if both and CLOCK.search(path.rsplit("/", 1)[-1]):
                found.add(path)
    return found


def _is_time(digest: str) -> bool:
    return digest.startswith(FLOAT) and float(digest.removeprefix(FLOAT)) >= 0.0


def without(rows: list[Digests], paths: set[str]) -> list[Digests]:
    """The same digests without these paths."""
    return [{path: value for path, value in row.items() if path not in paths} for row in rows]

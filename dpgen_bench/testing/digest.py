"""Digests by which state dicts, rows of a log and other public values are compared bit by bit, and times are exempt."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpgen_bench.testing.errors import ConformanceError

Digests = dict[str, str]

# Names of entries that may be times or rates per time. The value of such an entry must be a number >= 0 (a float, or an
# int such as that of `time.time_ns`) and must differ in a second fit on the same data.
CLOCK = re.compile(r"second|time|elapsed|duration|clock|_s$|_ms$|_us$|_ns$|per_sec$")
FLOAT = "float "  # begins the digest of a number, which is kept readable
ORDER = "/(type and order)"  # ends the path of a container's type and key order


def digests(value: Any, path: str = "") -> Digests:
    """The digest of every leaf of nested dicts, lists and tuples, by its path.

    The digest of a tensor depends on its type, shape, strides and bits. The type of a container and the order of its
    keys have an entry of their own, whose path ends in ORDER.

    Raises:
        TypeError: for a leaf that is not a tensor, text, bytes, number, dtype, device or None.
    """
    return dict(_leaves(value, path))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        inner: Mapping[Any, Any] = value
    elif isinstance(value, list | tuple):
        inner = dict(enumerate(value))
    else:
        yield path, _hash(value)
        return
    yield f"{path}/", f"{len(inner)} entries"
    yield f"{path}{ORDER}", _digest(type(value).__qualname__, repr([(type(key), key) for key in inner]).encode())
    for key, within in inner.items():
        yield from _leaves(within, f"{path}/{key}")


def _hash(value: Any) -> str:
    if type(value) is int:
        return f"{FLOAT}{value}"  # differs from every float, since 1.0 is written with its point
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        trained = value.requires_grad if isinstance(value, nn.Parameter) else None
        kind = f"{value.dtype}{tuple(value.shape)}{value.stride()}{trained}"
        return _digest(kind, flat.view(torch.uint8).numpy().tobytes())
    if isinstance(value, float):
        # The text "nan" is the same for all NaNs, whose bits may differ.
        return f"{FLOAT}{value!r}" + (struct.pack(">d", value).hex() if value != value else "")
    if isinstance(value, bool | int | complex | str | bytes | torch.dtype | torch.device | None):
        return _digest(type(value).__name__, repr(value).encode())
    raise TypeError(f"expected a tensor, a text or a number, got {type(value).__qualname__}.")


def _digest(kind: str, content: bytes) -> str:
    return hashlib.blake2b(kind.encode() + b"\0" + content, digest_size=16).hexdigest()


def as_json(value: Any, what: str) -> str:
    """The JSON text of `value`, with its keys in their own order.

    Args:
        value: what a public file will contain.
        what: names the value in the message of the error.

    Raises:
        ConformanceError: if the value cannot be written as JSON.
    """
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConformanceError(f"expected {what} that can be written as JSON, got one that cannot: {error}.") from error


def different(one: Digests, other: Digests) -> list[str]:
    """The sorted paths at which two sets of digests differ, including those that only one of them has."""
    return sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


def clocks(one: list[Digests], again: list[Digests]) -> set[str]:
    """Paths of entries that have the name of a time, are numbers >= 0, and differ between two fits on the same data.

    An entry that is the same in both fits is compared like any other, so that a private value is not exempt because of
    its name alone.
    """
    times = set()
    for a, b in zip(one, again, strict=False):
        for path in different(a, b):
            both = _is_time(a.get(path, "")) and _is_time(b.get(path, ""))
            if both and CLOCK.search(path.rsplit("/", 1)[-1]):
                times.add(path)
    return times


def _is_time(digest: str) -> bool:
    return digest.startswith(FLOAT) and "nan" not in digest and float(digest.removeprefix(FLOAT)) >= 0.0


def without(rows: list[Digests], paths: set[str]) -> list[Digests]:
    """The same digests without these paths."""
    return [{path: value for path, value in row.items() if path not in paths} for row in rows]


def without_order(rows: list[Digests]) -> list[Digests]:
    """The same digests without types of containers and the order of keys, which a resumed optimiser may change."""
    return [{path: value for path, value in row.items() if not path.endswith(ORDER)} for row in rows]

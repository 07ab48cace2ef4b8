"""`plain`: a deep copy of states for a checkpoint, which has their values and no other memory of their objects."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

SCALARS = (bool, int, float, complex, bytes, type(None), torch.dtype, torch.device)


def plain(value: Any, path: str = "") -> Any:
    """A deep copy of nested dicts, lists, tuples, tensors and scalars, for `torch.save`.

    A checkpoint is public, and `torch.save` writes more than values: the whole storage of a slice, attributes of a
    tensor or a mapping, and whether two equal strings are the same object. A tensor of the copy owns exactly its
    entries.

    Args:
        value: The states.
        path: The position of `value` in the states, for the message.

    Raises:
        ValueError: For an object of another type, which could not be loaded without unpickling code.
    """
    return _plain(value, path, ())


def _plain(value: Any, path: str, ancestors: tuple[int, ...]) -> Any:
    """See `plain`. `ancestors` has the id of each container around `value`, so that a cycle is found."""
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is str:
        return sys.intern(value)
    if kind in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        copied = value.detach().resolve_conj().resolve_neg().clone()
        return nn.Parameter(copied, value.requires_grad) if kind is nn.Parameter else copied
    if kind in (dict, OrderedDict, Counter, list, tuple, torch.Size) and id(value) not in ancestors:
        ancestors = (*ancestors, id(value))
        if isinstance(value, dict):
            return kind({_plain(k, path, ancestors): _plain(v, f"{path}/{k}", ancestors) for k, v in value.items()})
        return kind([_plain(item, f"{path}/{position}", ancestors) for position, item in enumerate(value)])
    what = "a container within itself" if id(value) in ancestors else f"{kind.__module__}.{kind.__qualname__}"
    raise ValueError(
        "expected states of dicts, lists, tuples, dense tensors, strings and numbers, which a checkpoint can hold, got "
        f"{what} at {path!r}: let state_dict() return its content as one of these, and load_state_dict rebuild it."
    )


def fingerprint(value: Any) -> str:
    """A hash of nested dicts, lists, tuples, tensors and scalars, equal for equal bits on any device."""
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            digest.update(b"{")
            for key, item in part.items():
                add(key)
                add(item)
        elif isinstance(part, list | tuple):
            digest.update(f"[{len(part)}".encode())
            for item in part:
                add(item)
        else:
            text = repr(part).encode()
            digest.update(len(text).to_bytes(8, "big") + text)

    add(value)
    return digest.hexdigest()

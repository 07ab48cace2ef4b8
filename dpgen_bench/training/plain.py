"""`plain`: a copy of what a checkpoint is to hold, that has its values and nothing else of the objects they lie in."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

SCALARS = (bool, int, float, complex, bytes, type(None), torch.dtype, torch.device)


def plain(value: Any, path: str = "") -> Any:
    """A deep copy of nested dicts, lists, tuples, tensors and scalars, for `torch.save`.

    A checkpoint is public, and `torch.save` writes more than values: the whole memory under a slice, attributes set on
    a tensor or a mapping, which of two equal texts are one object. A tensor of the copy owns exactly its entries.

    Args:
        path: where `value` lies, for the message.

    Raises:
        ValueError: for anything else, which a checkpoint could not hand back: it is loaded without unpickling code.
    """
    return _plain(value, path, ())


def _plain(value: Any, path: str, above: tuple[int, ...]) -> Any:
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is str:
        return sys.intern(value)
    if kind in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        copied = value.detach().resolve_conj().resolve_neg().clone()
        return nn.Parameter(copied, value.requires_grad) if kind is nn.Parameter else copied
    if kind in (dict, OrderedDict, Counter, list, tuple, torch.Size) and id(value) not in above:
        above = (*above, id(value))
        if isinstance(value, dict):
            return kind({_plain(k, path, above): _plain(v, f"{path}/{k}", above) for k, v in value.items()})
        return kind([_plain(inner, f"{path}/{place}", above) for place, inner in enumerate(value)])
    what = "a container within itself" if id(value) in above else f"{kind.__module__}.{kind.__qualname__}"
    raise ValueError(
        "expected states of dicts, lists, tuples, dense tensors, texts and numbers, which a checkpoint can hold, got "
        f"{what} at {path!r}: let state_dict() return its content as one of these, and load_state_dict rebuild it."
    )

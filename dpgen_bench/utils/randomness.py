"""The global random generators of Python, NumPy and PyTorch: their states, and code that must not change them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def global_randomness() -> dict[str, Any]:
    """The states of all global generators, as plain tensors, numbers and lists, which load without unpickling code."""
    kind, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (kind, torch.from_numpy(np.asarray(key).astype(np.int64)), position, has_gauss, gauss),
        "python": (version, list(internal), gauss_next),
    }


def restore_global_randomness(state: dict[str, Any]) -> None:
    """Set all global generators to the states that `global_randomness` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, key, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, key.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))


def seed_everything(seed: int) -> None:
    """Seed all global generators."""
    torch.manual_seed(seed)  # of accelerators, too
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all global generators inside the block, and restore them after it."""
    with kept():
        seed_everything(seed)
        yield


@contextmanager
def kept() -> Iterator[list[bool]]:
    """Restore all global generators after the block, also after an error.

    Yields:
        an empty list, to which it is appended at the end whether the block changed one of them.
    """
    before, changed = global_randomness(), list[bool]()
    try:
        yield changed
    finally:
        changed.append(not _same(before, global_randomness()))
        restore_global_randomness(before)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)

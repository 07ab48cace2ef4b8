"""The global random generators of Python, NumPy and PyTorch: their states, and code that must not change them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def _states() -> dict[str, Any]:
    """The states as the libraries return them; of GPUs, if this process uses them."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": np.random.get_state(legacy=True),
        "python": random.getstate(),
    }


def _set_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    (kind, key, *rest), (other_kind, other_key, *other_rest) = one["numpy"], other["numpy"]
    return (
        torch.equal(one["torch"], other["torch"])
        and len(one["cuda"]) == len(other["cuda"])
        and all(map(torch.equal, one["cuda"], other["cuda"]))
        and (kind, rest) == (other_kind, other_rest)
        and np.array_equal(key, other_key)
        and one["python"] == other["python"]
    )


def global_randomness() -> dict[str, Any]:
    """The states of all global generators, as plain tensors, numbers and lists, which load without unpickling code."""
    states = _states()
    kind, key, *rest = states["numpy"]
    version, internal, gauss_next = states["python"]
    return {
        **states,
        "numpy": (kind, torch.from_numpy(np.asarray(key).astype(np.int64)), *rest),
        "python": (version, list(internal), gauss_next),
    }


def restore_global_randomness(state: dict[str, Any]) -> None:
    """Set all global generators to the states that `global_randomness` returned."""
    kind, key, *rest = state["numpy"]
    version, internal, gauss_next = state["python"]
    numpy, python = (kind, key.numpy().astype(np.uint32), *rest), (version, tuple(internal), gauss_next)
    _set_states({**state, "numpy": numpy, "python": python})


def seed_everything(seed: int) -> None:
    """Seed all global generators."""
    torch.manual_seed(seed)  # also those of GPUs
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
        an empty list. At the end of the block, True is appended to it if the block changed a generator, else False.
    """
    before, changed = _states(), list[bool]()
    try:
        yield changed
    finally:
        changed.append(not _same(before, _states()))
        if changed[0]:
            _set_states(before)

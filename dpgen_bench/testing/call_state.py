"""Saves and resets the state that a call of a private function may change: networks and random generators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpgen_bench.method import Context
from dpgen_bench.privacy.bounds import Bound
from dpgen_bench.utils.randomness import global_randomness, restore_global_randomness

LIBRARIES = ("torch", "numpy", "dpgen_bench")  # packages whose objects a function of a plugin does not change


@contextmanager
def restored(fn: Callable[..., Any], bound: Bound) -> Iterator[Callable[[torch.dtype], None]]:
    """Yields restore(dtype), which resets all state that a call of `fn` may change and a later call may read.

    This state consists of the parameters and buffers of every module that `fn` can use (floating-point ones are cast to
    dtype), of its random generators, and of the global ones. On exit all of it is as it was before.
    """
    modules = [value for value in _within_reach([fn, getattr(bound, "module", None)]) if isinstance(value, nn.Module)]
    streams = [value for value in _within_reach([fn]) if isinstance(value, torch.Generator)]
    tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
    saved = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
    states = [(stream, stream.get_state()) for stream in streams]
    global_states = global_randomness()

    def restore(dtype: torch.dtype | None) -> None:
        for tensor, before in saved:
            tensor.data = before.to(dtype, copy=True) if dtype and before.is_floating_point() else before.clone()
        for stream, state in states:
            stream.set_state(state)
        restore_global_randomness(global_states)

    try:
        yield restore
    finally:
        restore(None)


def _within_reach(roots: list[Any], depth: int = 6) -> list[Any]:
    """Objects that functions can use, up to `depth` references away, each once."""
    reached: dict[int, Any] = {}
    edge = roots
    for _ in range(depth):
        edge = [value for value in edge if value is not None and id(value) not in reached]
        reached |= {id(value): value for value in edge}
        edge = [inner for value in edge for inner in _referenced_by(value)]
    return list(reached.values())


def _referenced_by(value: Any) -> list[Any]:
    """Objects that a container holds, or that a function uses: its closure, defaults, owner and the globals it names.

    None for objects of libraries and for modules, which a function of a plugin does not change in other ways.
    """
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set):
        return list(value)
    if hasattr(value, "__func__"):  # a bound method
        return [value.__func__, value.__self__]
    if isinstance(value, Context):
        return [value.generator]
    if str(getattr(value, "__module__", "")).split(".")[0] in LIBRARIES:
        return []
    if hasattr(value, "__code__"):
        named = [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        own = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return own + [inner for inner in named if not isinstance(inner, type(math))]
    if isinstance(value, nn.Module | Tensor | np.ndarray | type | type(math) | torch.Generator):
        return []
    module = type(value).__module__.split(".")[0]
    return list(vars(value).values()) if hasattr(value, "__dict__") and module not in LIBRARIES else []


def _is_filled(cell: Any) -> bool:
    """Whether a variable of a closure has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True

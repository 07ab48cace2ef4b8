"""Resets a plugin's modules before each fit, as if each fit had its own process.

Otherwise a statistic that the first fit computes and keeps in a global, a class attribute, a default argument or a
cache would be the same in all replays, and no comparison of fits could show that it depends on the first data set.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpgen_bench.utils.source import own_modules

Restore = Callable[[], Any]


class Pristine:
    """Saves the globals, class attributes, default arguments and caches of a plugin's modules.

    The modules of a plugin are those of `own_modules`: the module of its class, and what this imports of user code.

    Args:
        plugin: the class of the method.
    """

    def __init__(self, plugin: type) -> None:
        self._restores: list[Restore] = []
        self._seen: set[int] = set()
        self._names = {name for name in own_modules(plugin.__module__) if name in sys.modules}
        for name in sorted(self._names):
            self._keep_names(sys.modules[name])

    def restore(self) -> None:
        """Reset all of them, in place, to their values at the construction of this object."""
        for restore in self._restores:
            restore()

    def _keep_names(self, owner: Any) -> None:
        """Save the names of a module or class, and their values."""
        before = {name: value for name, value in vars(owner).items() if not _is_special(name)}

        def restore() -> None:
            for name in [name for name in vars(owner) if name not in before and not _is_special(name)]:
                delattr(owner, name)
            for name, value in before.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)

        self._restores.append(restore)
        for value in before.values():
            self._keep(value)

    def _keep(self, value: Any) -> None:
        """Save the content of a value, and of what it holds."""
        if id(value) in self._seen or isinstance(value, bool | int | float | str | bytes | None):
            return
        self._seen.add(id(value))
        if isinstance(value, staticmethod | classmethod):
            self._keep(value.__func__)
        elif hasattr(value, "cache_clear") and callable(value):
            self._restores.append(value.cache_clear)
        elif isinstance(value, type):
            if value.__module__ in self._names:
                self._keep_names(value)
        elif hasattr(value, "__code__"):
            if value.__module__ in self._names:
                for inner in _held_by(value):
                    self._keep(inner)
        elif (restore := _restore_content(value)) is not None:
            self._restores.append(restore)
            for inner in _inside(value):
                self._keep(inner)
        elif type(value).__module__ in self._names and hasattr(value, "__dict__"):
            self._keep(vars(value))


def _is_special(name: str) -> bool:
    return (name.startswith("__") and name.endswith("__")) or name == "_abc_impl"


def _held_by(function: Any) -> Iterator[Any]:
    """The default arguments of a function, and the values in its closure."""
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | set) else []


def _restore_content(value: Any) -> Restore | None:
    """A function that resets the content of a container, tensor, array or network; None for anything else."""
    if isinstance(value, list | dict | set) and value is not sys.modules:
        return partial(_fill, value, copy.copy(value))
    if isinstance(value, Tensor):
        return partial(_set_data, value, value.detach().clone())
    if isinstance(value, np.ndarray) and value.flags.writeable:
        return partial(np.copyto, value, value.copy())
    if isinstance(value, nn.Module):
        return partial(value.load_state_dict, copy.deepcopy(value.state_dict()))
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    return None


def _fill(container: Any, content: Any) -> None:
    container.clear()
    container.extend(content) if isinstance(container, list) else container.update(content)


def _set_data(tensor: Tensor, data: Tensor) -> None:
    tensor.data = data.clone()

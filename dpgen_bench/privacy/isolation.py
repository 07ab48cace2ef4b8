"""Keeps private values from a method's code in this process: noise while it is added, and records in error texts."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack, _pop_mode, _push_mode

UNNAMED = "an exception type of the plugin"

# Built when this module is imported, which is before a method's code is, and keyed by id: a class of the method may
# return anything as its name, its hash, or the result of a comparison.
_KNOWN = {
    id(kind): kind.__name__
    for module in (torch, torch.linalg, np.exceptions, np.linalg, builtins)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}


@contextmanager
def isolated_from_modes() -> Iterator[None]:
    """A context whose computations no active TorchDispatchMode or TorchFunctionMode can see or change."""
    # PyTorch's _disable_current_modes does the same, but takes seconds to import.
    modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack())]
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def public_type(error: BaseException) -> str:
    """The name of the error's type, for public text; `UNNAMED` for a type that the method may have made.

    A type that is made while records are seen may have records in its name. So only types of Python, PyTorch and NumPy,
    and types that a module of dpgen_bench defines, are named.
    """
    kind = type(error)
    if known := _KNOWN.get(id(kind)):
        return known
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != __name__.split(".")[0]:
            continue
        spec = getattr(module, "__spec__", None)
        code = spec.loader.get_code(name) if spec is not None and hasattr(spec.loader, "get_code") else None
        # Only names in the module's source count, because a method can add attributes to a module.
        for defined in code.co_names if code is not None else ():
            if vars(module).get(defined) is kind:
                return str(defined)
    return UNNAMED


def expect_plain(value: object, what: str) -> Tensor:
    """`value`, if it is a tensor whose operations run no code but PyTorch's.

    A subclass of Tensor can run its own code in each operation, and would see the noise and the exact value.

    Raises:
        ValueError: for anything but a torch.Tensor or a torch.nn.Parameter, and for their subclasses.
    """
    if type(value) not in (Tensor, nn.Parameter):
        raise ValueError(
            f"{what}: expected a plain torch.Tensor, got {type(value).__name__}; for a subclass of Tensor, "
            "give tensor.as_subclass(torch.Tensor)."
        )
    assert isinstance(value, Tensor)
    return value

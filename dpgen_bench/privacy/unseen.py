"""What a method's code in this process must not see: noise while it is added, and records in public error texts."""

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
def unseen() -> Iterator[None]:
    """No TorchDispatchMode and no TorchFunctionMode that is active sees or changes what is computed in the block."""
    # As PyTorch's _disable_current_modes, which takes seconds to import the tracers that it knows.
    modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack())]
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def public_type(error: BaseException) -> str:
    """The name of the error's type, for public text; `UNNAMED` for a type that the method may have made.

    A name that is made while records are seen may contain what was seen. Types of Python, PyTorch and NumPy are named,
    and those that a module of dpgen_bench defines.
    """
    kind = type(error)
    if known := _KNOWN.get(id(kind)):
        return known
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != __name__.split(".")[0]:
            continue
        spec = getattr(module, "__spec__", None)
        code = spec.loader.get_code(name) if spec is not None and hasattr(spec.loader, "get_code") else None
        for word in code.co_names if code is not None else ():  # what the source names, not what was put in later
            if vars(module).get(word) is kind:
                return str(word)
    return UNNAMED


def expect_plain(given: object, what: str) -> Tensor:
    """`given`, if it is a tensor on which PyTorch alone computes.

    A subclass of Tensor can run code of its own in each operation, and would see the noise and what it is added to.

    Raises:
        ValueError: for anything but a torch.Tensor or a torch.nn.Parameter, and for their subclasses.
    """
    if type(given) not in (Tensor, nn.Parameter):
        raise ValueError(
            f"{what}: expected a plain torch.Tensor, got {type(given).__name__}; of a subclass of Tensor give "
            "tensor.as_subclass(torch.Tensor)."
        )
    assert isinstance(given, Tensor)
    return given

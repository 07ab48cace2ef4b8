"""Training steps as compiled graphs (`runtime.compile`): fewer and larger kernels, equal up to rounding.

The setting belongs to the process, as the number of threads does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_backend: str = "none"


def backend() -> str:
    """How steps of this process are compiled."""
    return _backend


def use(name: str) -> None:
    """Set how steps of this process are compiled: a `Backend`, or "graph", which executes graphs as recorded."""
    global _backend
    _backend = name


def expect_compiler(name: str, device: torch.device) -> None:
    """Check that the machine can compile in this way for the device, before anything is computed.

    Raises:
        ValueError: for cudagraphs on a CPU, and for inductor on a CPU without a C++ compiler.
    """
    if name == "cudagraphs" and device.type != "cuda":
        raise ValueError(
            f"expected a GPU for runtime.compile=cudagraphs, got the device {device}; use inductor or none, or another "
            "device."
        )
    if name == "inductor" and device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler  # slow to import
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise ValueError(
                "expected a C++ compiler for runtime.compile=inductor on a CPU, got none: install g++ or clang++, or "
                "name one in the environment variable CXX, or leave out runtime.compile."
            ) from None


def import_compiler() -> None:
    """Import PyTorch's compiler, as the first optimizer of a process does: two seconds that belong to no training."""
    import_module("torch._dynamo")


@contextmanager
def using(name: str) -> Iterator[None]:
    """`use` within a block."""
    before = _backend
    use(name)
    try:
        yield
    finally:
        use(before)


class Compiled:
    """A function of tensors, whose operations are recorded once for each set of shapes and then compiled.

    Operations are recorded on tensors without values. So a function whose course depends on values is refused, and so
    is one that reads another tensor than its arguments, whose value would be that of the recording for ever. What
    `item` and `nonzero` give is computed in each call. Numbers of Python that the function reads are constants of the
    recording.

    Args:
        fn: a function of nested tuples, lists and dicts of tensors that returns such a structure. It may differentiate;
            arguments that are parameters require gradients.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._graphs: dict[Any, Callable[..., Any]] = {}

    @property
    def recorded(self) -> int:
        """The number of graphs."""
        return len(self._graphs)

    def __call__(self, *args: Any) -> Any:
        leaves, structure = pytree.tree_flatten(args)
        key = (str(structure), *((tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad) for leaf in leaves))
        key = (backend(), *key)
        if key not in self._graphs:
            self._graphs[key] = self._record(args)
        with torch.no_grad():
            return self._graphs[key](pytree.tree_map(_without_gradient, args))

    def _record(self, args: Any) -> Callable[..., Any]:
        from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

        graph = make_fx(lambda args: self._fn(*args), tracing_mode="fake")(args)
        if backend() == "graph":
            return graph
        run = torch.compile(graph, backend=backend(), dynamic=False, fullgraph=True)
        return _kept(run) if backend() == "cudagraphs" else run


def _without_gradient(value: Tensor) -> Tensor:
    return value.detach()


def _kept(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, whose results the next call does not overwrite, as it does with the memory of a CUDA graph."""

    def call(args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return pytree.tree_map_only(Tensor, torch.clone, run(args))

    return call


def network(net: nn.Module) -> Callable[..., Tensor]:
    """`net`, to be called in steps: compiled by `runtime.compile=inductor`, with the parameters of `net`.

    Not by cudagraphs, which PyTorch's compiler starts so slowly that a step of DP-Sinkhorn took longer on an H200.
    """
    if backend() != "inductor":
        return net
    return torch.compile(net, backend="inductor", dynamic=False)

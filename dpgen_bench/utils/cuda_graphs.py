"""Functions of tensors that a GPU replays as one CUDA graph, without the time that it takes to launch each kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpgen_bench.utils import compiled

# Each set of shapes needs a graph of its own, and memory for its arguments and results.
_MOST_SHAPES = 128


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    arguments: list[Tensor]
    results: list[Tensor]


class Replayed:
    """`fn`, whose kernels are captured once for each set of shapes and then replayed, bit by bit as without a graph.

    This is so on a GPU with `runtime.compile=cudagraphs`. Elsewhere, and for further sets of shapes after the first
    128, `fn` is called. The tensors in which a graph finds its arguments and leaves its results are erased after each
    replay, because those of a private function could be read there later.

    Args:
        fn: a function of tensors that returns a tuple of tensors. It must not wait for the device, draw random numbers,
            or read tensors that change other than its arguments; numbers of Python that it reads are constants.
    """

    def __init__(self, fn: Callable[..., tuple[Tensor, ...]]) -> None:
        self._fn = fn
        self._graphs: dict[Any, _Graph] = {}
        self._pool: Any = None

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        if compiled.backend() != "cudagraphs" or any(each.device.type != "cuda" for each in arguments):
            return self._fn(*arguments)
        key = tuple((each.shape, each.dtype, each.device) for each in arguments)
        if key not in self._graphs and len(self._graphs) >= _MOST_SHAPES:
            return self._fn(*arguments)
        with torch.no_grad(), torch.cuda.device(arguments[0].device):
            if key not in self._graphs:
                self._graphs[key] = self._capture(arguments)
            captured = self._graphs[key]
            for own, given in zip(captured.arguments, arguments, strict=True):
                own.copy_(given)
            captured.graph.replay()
            results = tuple(each.clone() for each in captured.results)
            for each in (*captured.arguments, *captured.results):
                each.zero_()
        return results

    def _capture(self, arguments: tuple[Tensor, ...]) -> _Graph:
        """Capture the kernels of a call, whose results no one reads."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        own = [each.detach().clone(memory_format=torch.contiguous_format) for each in arguments]
        # A library sets itself up in its first call, which a capture does not allow.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._fn(*own)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = list(self._fn(*own))
        return _Graph(graph, own, results)

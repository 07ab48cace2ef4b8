"""Counts, on a CPU, the operations of a training step for which a program would wait for an accelerator.

Work on an accelerator is queued. The program waits for all of it when it reads a number on the host (`item`, `bool`,
`tolist`, `cpu`), when the shape of a result depends on values (`nonzero`, an index of booleans), when a library checks
values on the host (`linalg.inv`), and when ordinary memory of the host is copied to the accelerator.

On a CPU all tensors have the same device. Here `torch.device("cpu", 0)` stands for the accelerator, and "cpu" for the
host: what is made without a device, as by `torch.from_numpy`, is marked as on the host, and so is what is computed from
it; `x.device` says where x would be. Tensors without a mark are on the accelerator.

What this does not see: operations of libraries other than PyTorch; tensors of the host that are not made by a function
in MADE_ON_HOST; copies within functions of PyTorch that are written in Python; and copies of other storage than a
tensor's (`x.untyped_storage().cpu()`). `x.numpy()` and `np.asarray(x)` are not counted, because an accelerator does not
wait for them: it raises an error. What is counted once may wait several times, such as `repr`.
"""

from __future__ import annotations

import ast
import linecache
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from dpgen_bench.config.building import build_dataset, build_method
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.small import make_small
from dpgen_bench.config.spec import RunSpec
from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context, fit_method
from dpgen_bench.nets import transport
from dpgen_bench.privacy import clipping, isolation, noise
from dpgen_bench.privacy.key import Key, NoiseMode
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from dpgen_bench.testing.suite import random_data
from dpgen_bench.training.loop import Loop

MADE_ON_HOST = frozenset(
    """
    tensor as_tensor asarray from_numpy frombuffer zeros ones full empty arange linspace logspace eye rand randn
    randint randperm normal get_rng_state get_state tril_indices triu_indices
    """.split()  # noqa: SIM905
)
ACCELERATOR, HOST = torch.device("cpu", 0), torch.device("cpu")
# Operations without the tag that say so in PyTorch, which check values on the host or make a shape of them.
ALSO_WAIT = frozenset(
    """
    aten::_linalg_check_errors aten::_linalg_eigh aten::_linalg_svd aten::linalg_eig aten::linalg_eigvals
    aten::linalg_pinv aten::multinomial aten::histc aten::histogram aten::is_nonzero
    """.split()  # noqa: SIM905
)
TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
# Methods of a tensor that read its values on the host, and that no mode sees inside.
READS = frozenset({"tolist", "__repr__"})


class Stalls:
    """Where code of the bench waited, as "file: line of code", with how often; and which tensors are on the host.

    Attributes:
        places: All places but those of the log.
        logged: Places in the arguments of `ctx.log(...)`.
        drawn: Where code drew from the accelerator's global generator, whose numbers are others than the host's.
    """

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        self.logged: Counter[str] = Counter()
        self.drawn: Counter[str] = Counter()
        self.paused = False
        self._on_host: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def add(self) -> None:
        if self.paused:
            return
        last = _innermost_of_the_bench()
        if _file(last).endswith("utils/upload.py"):  # it copies through page-locked memory
            return
        counter = self.logged if _is_logged(last) else self.places
        counter[_place(last)] += 1

    def add_draw(self) -> None:
        self.drawn[_place(_innermost_of_the_bench())] += 1

    def all_places(self) -> Counter[str]:
        """Both, with "log of " before the places of the log."""
        return self.places + Counter({f"log of {place}": count for place, count in self.logged.items()})

    def total(self) -> int:
        return self.places.total() + self.logged.total()

    def is_on_host(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value in self._on_host

    def mark(self, values: Any, on_host: bool) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                if on_host:
                    self._on_host[value] = True
                else:
                    self._on_host.pop(value, None)


class _Operations(TorchDispatchMode):
    """Counts what waits below autograd, and says of each result whether it is on the host."""

    def __init__(self, stalls: Stalls) -> None:
        super().__init__()
        self.stalls = stalls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # A tensor with no dimensions can be on the host in an operation on tensors of the device.
        sized = [each for each in tensors if each.dim()] or tensors
        on_host = bool(sized) and all(self.stalls.is_on_host(each) for each in sized)
        if not on_host and self._waits(func, name, args, kwargs):
            self.stalls.add()
        there = not on_host if tensors else kwargs.get("device") == ACCELERATOR
        given = any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values()))
        if there and not given and torch.Tag.nondeterministic_seeded in func.tags:
            self.stalls.add_draw()
        result = func(*args, **kwargs)
        if name == "aten::copy_":
            if self.stalls.is_on_host(args[0]) != self.stalls.is_on_host(args[1]) and args[1].dim():
                self.stalls.add()
        elif tensors:
            device = kwargs.get("device") if name.endswith("_like") else None
            self.stalls.mark(result, on_host if device is None else device.index is None)
        return result

    def _waits(self, func: Any, name: str, args: Any, kwargs: Any) -> bool:
        if name in INDEXING:  # by booleans, or by an index that is copied from the host
            return any(
                isinstance(index, Tensor)
                and (index.dtype in (torch.bool, torch.uint8) or (index.dim() > 0 and self.stalls.is_on_host(index)))
                for index in args[1]
            )
        if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
            return False
        return name in ALSO_WAIT or any(tag in func.tags for tag in TAGS)


class _Functions(TorchFunctionMode):
    """Counts copies between host and device, and marks what is made on the host."""

    def __init__(self, stalls: Stalls) -> None:
        super().__init__()
        self.stalls = stalls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, stalls = kwargs or {}, self.stalls
        name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
        if name == "__get__" and owner is Tensor.device:
            return HOST if stalls.is_on_host(args[0]) else ACCELERATOR
        if name == "__set__" and owner is Tensor.data:  # as in `Module.to`
            func(*args, **kwargs)
            stalls.mark(args[0], stalls.is_on_host(args[1]))
            return None
        if name in ("__getitem__", "__setitem__") and _has_list(args[1]) and not stalls.is_on_host(args[0]):
            stalls.add()  # the list becomes a tensor of the host
        if name == "tensor_split" and isinstance(args[1], Tensor) and not stalls.is_on_host(args[1]):
            stalls.add()
        if (name in READS or (name == "__format__" and args[0].dim())) and not stalls.is_on_host(args[0]):
            stalls.add()
        if name == "one_hot":
            return self._one_hot(func, args, kwargs)
        if name == "new_tensor":  # like torch.tensor, on the device of args[0]
            device = kwargs.get("device") or (HOST if stalls.is_on_host(args[0]) else ACCELERATOR)
            return self._made("tensor", func, args, {**kwargs, "device": device}, args[1])
        if name == "type":
            return self._moved(func, args, kwargs, _target_of_type([*args[1:], *kwargs.values()]))
        if name == "cpu":
            return self._moved(func, args, kwargs, HOST)
        if name == "to":
            return self._moved(func, args, kwargs, _target([*args[1:], *kwargs.values()]))
        if name not in MADE_ON_HOST:
            return func(*args, **kwargs)
        return self._made(name, func, args, kwargs, args[0] if args else None)

    def _one_hot(self, func: Any, args: Any, kwargs: Any) -> Any:
        """It checks its argument on a CPU only, and elsewhere reads the number of classes if none is given."""
        if len(args) < 2 and "num_classes" not in kwargs and not self.stalls.is_on_host(args[0]):
            self.stalls.add()
        self.stalls.paused = True
        try:
            return func(*args, **kwargs)
        finally:
            self.stalls.paused = False

    def _moved(self, func: Any, args: Any, kwargs: Any, target: torch.device | Tensor | None) -> Any:
        """One tensor, put on a device or where another tensor is."""
        result = func(*args, **kwargs)
        if target is None:
            return result
        was_on_host = self.stalls.is_on_host(args[0])
        to_host = self.stalls.is_on_host(target) if isinstance(target, Tensor) else target.index is None
        if was_on_host != to_host:
            self.stalls.add()
            result = result.view_as(result)  # on a CPU this is the tensor itself, which stays where it is
        self.stalls.mark(result, to_host)
        return result

    def _made(self, name: str, func: Any, args: Any, kwargs: Any, data: Any) -> Any:
        copied, device = name in ("tensor", "as_tensor", "asarray"), kwargs.get("device")
        to_host = device is None or torch.device(device).index is None
        if copied and isinstance(data, Tensor):
            if self.stalls.is_on_host(data) is not to_host and device is not None:
                self.stalls.add()
            result = func(*args, **kwargs)
            self.stalls.mark(result, self.stalls.is_on_host(data) if device is None else to_host)
            return result
        if copied and isinstance(data, list | tuple):  # each tensor in it is read
            for each in tree_leaves(data):
                if isinstance(each, Tensor) and not self.stalls.is_on_host(each):
                    self.stalls.add()
        result = func(*args, **kwargs)
        if copied and not to_host:
            self.stalls.add()
        self.stalls.mark(result, to_host)
        return result


def _target(arguments: list[Any]) -> torch.device | Tensor | None:
    """Of `x.to(...)`: where x goes; None if it stays where it is."""
    for each in arguments:
        if isinstance(each, torch.device | Tensor):
            return each
        if isinstance(each, str):
            return torch.device(each)
    return None


def _target_of_type(arguments: list[Any]) -> torch.device | None:
    """Of `x.type(...)`: where x goes; None if it stays where it is, as for a dtype."""
    for each in arguments:
        if isinstance(each, str | type):
            return ACCELERATOR if ".cuda." in str(each) else HOST
    return None


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _innermost_of_the_bench() -> FrameType:
    """The innermost frame of the bench's code, or else of code that is neither PyTorch's nor in this module."""
    frames = [frame for frame, _ in traceback.walk_stack(None)]  # the innermost first
    own = [frame for frame in frames if any(part in _file(frame) for part in ("dpgen_bench/", "/methods/"))]
    return (own or [frame for frame in frames if _file(frame) != __file__ and "/torch/" not in _file(frame)])[0]


def _place(frame: FrameType) -> str:
    """The name of its file, and the line of code."""
    return f"{_file(frame).rsplit('/', 1)[-1]}: {linecache.getline(_file(frame), frame.f_lineno).strip()}"


def _is_logged(frame: FrameType) -> bool:
    """Whether a frame is at an expression in the arguments of `ctx.log(...)`."""
    line, last_line, column, last_column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if line is None or column is None:
        return False
    calls = _calls_of_log(_file(frame))
    return any(start < (line, column) and (last_line, last_column) <= end for start, end in calls)


@cache
def _calls_of_log(file: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where the calls of `ctx.log` in a file begin and end."""
    if not file.endswith(".py"):
        return []
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ctx.log"
    ]


def _has_list(index: Any) -> bool:
    return any(isinstance(each, list | np.ndarray) for each in (index if isinstance(index, tuple) else (index,)))


@contextmanager
def counted() -> Iterator[Stalls]:
    """Count within the block."""
    stalls = Stalls()
    from_numpy, new_parameter = torch.from_numpy, torch.nn.Parameter.__new__
    rng_state, reduction = torch.get_rng_state, Tensor._reduce_ex_internal

    def marked_rng_state() -> Tensor:  # no mode sees these four
        result = rng_state()
        stalls.mark(result, on_host=True)
        return result

    def marked_array(array: np.ndarray) -> Tensor:
        result = from_numpy(array)
        stalls.mark(result, on_host=True)
        return result

    def marked_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Tensor:
        result = new_parameter(cls, data, requires_grad)
        stalls.mark(result, stalls.is_on_host(data))
        return result

    def counted_reduction(tensor: Tensor, protocol: int) -> Any:  # of pickle and torch.save
        if not stalls.is_on_host(tensor):
            stalls.add()
        return reduction(tensor, protocol)

    with _Operations(stalls), _Functions(stalls), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "from_numpy", marked_array)
        patch.setattr(torch, "get_rng_state", marked_rng_state)
        patch.setattr(torch.nn.Parameter, "__new__", marked_parameter)
        patch.setattr(Tensor, "_reduce_ex_internal", counted_reduction)
        yield stalls


def stalls_of_a_step(name: str, *overrides: str, **options: Any) -> Counter[str]:
    """Where a step of the last loop of a small fit waits, as on an accelerator: each place as often as in the step that
    waits there most. The first step, which may make what later ones keep, counts only if it is the only one.

    Places whose text begins with "log of " are in the arguments of `ctx.log`.
    """
    _, of_steps = stalls_of_a_fit(name, *overrides, **options)
    worst: Counter[str] = Counter()
    for counts in of_steps[1:] or of_steps:
        worst |= counts
    return worst


def stalls_of_a_fit(
    name: str, *overrides: str, padded: bool = True, mode: NoiseMode = "seeded", on_host: bool = False
) -> tuple[Stalls, list[Counter[str]]]:
    """What was counted in a small fit on made-up records, and where each step of its last loop waited.

    Draws are padded as on an accelerator, and the harness takes the branch-free ways.

    Args:
        padded: whether draws are padded.
        mode: of the noise.
        on_host: noise for release is made on the host, as on a CPU.
    """
    config = compose_config([f"method={name}", "dataset=mnist", *overrides])
    make_small(config, kept=())
    dataset = build_dataset(config)
    records = random_data(dataset.image_shape, 48, dataset.num_classes, 8, seed=0)
    services = Services(
        Ledger(RunSpec(config, training={}).budget(), len(records), mode),
        Key.seeded("stalls") if mode == "seeded" else Key.from_os(bytes(32)),
        padded=padded,
        device=ACCELERATOR,
    )
    data = PrivateData(
        records.images,
        records.labels,
        dataset.num_classes,
        services,
        ids=records.ids,
        public_n=len(records),
        clients=records.clients,
        num_clients=8,
        class_names=dataset.class_names,
    )
    before: list[Counter[str]] = []  # two of each step: when it begins and when it ends
    count_steps = Loop.steps

    def steps(loop: Loop, *args: Any, **kwargs: Any) -> Iterator[int]:
        before.clear()
        for t in count_steps(loop, *args, **kwargs):
            before.append(stalls.all_places())
            yield t
            before.append(stalls.all_places())

    with counted() as stalls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "steps", steps)
        patch.setattr(clipping, "MAY_BRANCH", frozenset())
        patch.setattr(transport, "MAY_READ", frozenset())
        patch.setattr(noise, "ON_HOST", frozenset({"cpu"} if on_host else ()))
        patch.setattr(isolation, "_len_torch_dispatch_stack", lambda: 0)  # noise and clipping are counted, too
        patch.setattr(torch._C, "DisableTorchFunction", nullcontext)
        fit_method(build_method(config), data, Context(0, str(ACCELERATOR), services=services))
    return stalls, [after - earlier for earlier, after in zip(before[::2], before[1::2], strict=True)]

"""Counts, on a CPU, the operations of a training step for which a program would wait for an accelerator.

Work on an accelerator is queued. The program waits for all of it when it reads a number on the host (`item`, `bool`,
`tolist`, `cpu`), when the shape of a result depends on values (`nonzero`, an index of booleans), when a library checks
values on the host (`linalg.inv`), and when ordinary memory of the host is copied to the accelerator.

On a CPU all tensors have the same device. Here `torch.device("cpu", 0)` stands for the accelerator, and "cpu" for the
host: what is made without a device, as by `torch.from_numpy`, is marked as on the host, and so is what is computed from
it; `x.device` says where x would be. Tensors without a mark are on the accelerator. What this does not see: operations
of libraries other than PyTorch, and tensors of the host that are not made by a function in MADE_ON_HOST.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context, fit_method
from dpgen_bench.nets import transport
from dpgen_bench.privacy import clipping, isolation, noise
from dpgen_bench.privacy.key import Key, NoiseMode
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from dpgen_bench.runs.config import RunSpec, build_dataset, build_method, compose_config
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
# Code whose waits do not count: one_hot checks its argument on a CPU only, and values for the log are read in any case.
# `upload` copies through page-locked memory.
EXCUSED = ("one_hot(", "ctx.log(")


class Stalls:
    """Where code of the bench waited, as "file: line of code", with how often; and which tensors are on the host."""

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        self._on_host: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def add(self) -> None:
        frames = traceback.extract_stack()
        own = [frame for frame in frames if "dpgen_bench/" in frame.filename or "/methods/" in frame.filename]
        last = (own or [frame for frame in frames if frame.filename != __file__])[-1]
        if any(mark in (last.line or "") for mark in EXCUSED) or last.filename.endswith("utils/upload.py"):
            return
        self.places[f"{last.filename.rsplit('/', 1)[-1]}: {last.line}"] += 1

    def total(self) -> int:
        return sum(self.places.values())

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
        result = func(*args, **kwargs)
        if name == "aten::copy_":
            if self.stalls.is_on_host(args[0]) != self.stalls.is_on_host(args[1]) and args[1].dim():
                self.stalls.add()
        elif tensors:
            self.stalls.mark(result, on_host)
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
        if name == "tolist" and not stalls.is_on_host(args[0]):
            stalls.add()
        if name == "cpu":
            return self._moved(func, args, kwargs, HOST)
        if name == "to":
            return self._moved(func, args, kwargs, _target([*args[1:], *kwargs.values()]))
        if name not in MADE_ON_HOST:
            return func(*args, **kwargs)
        return self._made(name, func, args, kwargs)

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

    def _made(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        copied, device = name in ("tensor", "as_tensor", "asarray"), kwargs.get("device")
        to_host = device is None or torch.device(device).index is None
        if copied and isinstance(args[0], Tensor):
            return self._moved(func, args, kwargs, None if device is None else torch.device(device))
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


def _has_list(index: Any) -> bool:
    return any(isinstance(each, list | np.ndarray) for each in (index if isinstance(index, tuple) else (index,)))


@contextmanager
def counted() -> Iterator[Stalls]:
    """Count within the block."""
    stalls = Stalls()
    from_numpy, new_parameter = torch.from_numpy, torch.nn.Parameter.__new__

    def marked_array(array: np.ndarray) -> Tensor:  # no mode sees either of these two
        result = from_numpy(array)
        stalls.mark(result, on_host=True)
        return result

    def marked_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Tensor:
        result = new_parameter(cls, data, requires_grad)
        stalls.mark(result, stalls.is_on_host(data))
        return result

    with _Operations(stalls), _Functions(stalls), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "from_numpy", marked_array)
        patch.setattr(torch.nn.Parameter, "__new__", marked_parameter)
        yield stalls


def stalls_of_a_step(
    name: str, *overrides: str, padded: bool = True, mode: NoiseMode = "seeded", on_host: bool = False
) -> Counter[str]:
    """Where a step of the last loop of a small fit on made-up records waits, as on an accelerator: each place as often
    as in the step that waits there most. The first step, which may make what later ones keep, counts only if it is
    the only one.

    Draws are padded as there, and the harness takes the branch-free ways. Rows of the log are not counted.

    Args:
        padded: whether draws are padded.
        mode: of the noise.
        on_host: noise for release is made on the host, as on a CPU.
    """
    config = compose_config([f"method={name}", "dataset=mnist", *overrides])
    for key, value in (config.method.get("check") or {}).items():
        OmegaConf.update(config, key if key.startswith("privacy.") else f"method.{key}", value)
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
            before.append(stalls.places.copy())
            yield t
            before.append(stalls.places.copy())

    with counted() as stalls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "steps", steps)
        patch.setattr(clipping, "MAY_BRANCH", frozenset())
        patch.setattr(transport, "MAY_READ", frozenset())
        patch.setattr(noise, "ON_HOST", frozenset({"cpu"} if on_host else ()))
        patch.setattr(isolation, "_len_torch_dispatch_stack", lambda: 0)  # noise and clipping are counted, too
        patch.setattr(torch._C, "DisableTorchFunction", nullcontext)
        fit_method(build_method(config), data, Context(0, str(ACCELERATOR), services=services))
    of_steps = [after - earlier for earlier, after in zip(before[::2], before[1::2], strict=True)]
    worst: Counter[str] = Counter()
    for counts in of_steps[1:] or of_steps:
        worst |= counts
    return worst

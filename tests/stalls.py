"""Counts, on a CPU, the operations of a training step for which a program would wait for an accelerator.

Work on an accelerator is queued. The program waits for all of it when it reads a number on the host (`item`, `bool`,
`tolist`, `cpu`), and when the shape of a result depends on values (`nonzero`, an index of booleans).
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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

READS = ("cpu", "tolist")  # `numpy` refuses tensors of an accelerator; `to("cpu", ...)` reads, too
VALUE_DEPENDENT = ("aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::bincount", "aten::equal")
# On an accelerator these do not wait: optimisers keep their number of steps on the host, one_hot checks its argument
# on a CPU only, and the state of the host's generators is no work of an accelerator.
# Values that are written to the log are read in any case.
ON_THE_HOST = ("torch/optim/", "one_hot(", "get_rng_state(", "ctx.log(")


class Stalls:
    """Where code of the bench waited, as "file: line of code", with how often."""

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()

    def add(self) -> None:
        frames = traceback.extract_stack()
        if any(mark in frame.filename or mark in (frame.line or "") for frame in frames for mark in ON_THE_HOST):
            return
        own = [frame for frame in frames if "dpgen_bench/" in frame.filename or "/methods/" in frame.filename]
        last = (own or frames[:-2])[-1]
        self.places[f"{last.filename.rsplit('/', 1)[-1]}: {last.line}"] += 1

    def total(self) -> int:
        return sum(self.places.values())


class _Operations(TorchDispatchMode):
    def __init__(self, stalls: Stalls) -> None:
        super().__init__()
        self.stalls = stalls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        by_booleans = name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
            isinstance(index, Tensor) and not index.dtype.is_floating_point and index.element_size() == 1
            for index in args[1]
        )
        if name == "aten::_local_scalar_dense" or name in VALUE_DEPENDENT or by_booleans:
            self.stalls.add()
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self, stalls: Stalls) -> None:
        super().__init__()
        self.stalls = stalls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS or (name == "to" and "cpu" in (*args[1:], *(kwargs or {}).values())):
            self.stalls.add()
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Stalls]:
    """Count within the block."""
    stalls = Stalls()
    with _Operations(stalls), _Functions(stalls):
        yield stalls


def stalls_of_last_step(
    name: str, *overrides: str, padded: bool = True, mode: NoiseMode = "seeded", on_host: bool = False
) -> Counter[str]:
    """Where the last step of the last loop of a small fit on made-up records waits, as on an accelerator.

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
    before: list[Counter[str]] = []
    count_steps = Loop.steps

    def steps(loop: Loop, *args: Any, **kwargs: Any) -> Iterator[int]:
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
        fit_method(build_method(config), data, Context(0, "cpu", services=services))
    return before[-1] - before[-2]

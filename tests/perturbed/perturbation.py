"""Simulates the rounding of another machine: matrix products and convolutions change by a few units in the last place.

BLAS and oneDNN sum the terms of a product in an order that depends on the processor, so two machines agree in a
product up to rounding only. `pytest --perturb SEED` multiplies each entry of such a result by 1 + scale * u, with u
uniform on [-1, 1]. A test that fails under it depends on the bits of one machine.

Products of whole numbers are left alone while float32 or float64 holds them exactly, as they are the same everywhere.
u depends on the seed, the operation and the shape of the result alone. A computation that is repeated with the same
shapes therefore has the same bits, as on a real machine, and tests of resuming and replaying hold as they are. A
computation that is batched differently has other bits, again as on a real machine. PyTorch's generators are not used.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

SEED = "DPGEN_TEST_PERTURB"  # the variable that passes the seed to processes that tests start

# Relative sizes: about 8 units of float32's rounding, which a product of a few hundred terms loses, and 45 units of
# float64's. 1e-6 would be too large for float64, in which tests check closed forms.
# Narrower types are rounded from a perturbed float32 result, as kernels that accumulate in float32 do.
SCALE, SCALE_FLOAT64 = 1e-6, 1e-14

# With autograd active, composite operations reach the mode as their parts; in inference mode they reach it whole.
PARTS = (
    *("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "_trilinear"),
    *("convolution", "convolution_backward", "_cdist_forward", "_cdist_backward", "_euclidean_dist"),
    *(f"_scaled_dot_product_flash_attention_for_cpu{suffix}" for suffix in ("", "_backward")),
)
COMPOSITE = (
    *("matmul", "linear", "bilinear", "einsum", "inner", "tensordot", "chain_matmul", "cdist", "_convolution"),
    *(f"conv{kind}{d}d" for kind in ("", "_transpose") for d in (1, 2, 3)),
    *("linalg_multi_dot", "linalg_vecdot", "scaled_dot_product_attention"),
)
OPERATIONS = frozenset(PARTS + COMPOSITE)
LENGTH = 1 << 20  # of the stored noise, which is repeated for larger results


class Perturbation(TorchDispatchMode):
    """Perturbs the floating-point results of OPERATIONS on the CPU in the thread in which it is active."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.noise = torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, LENGTH))
        self.factors: dict[tuple[str, torch.Size, torch.dtype], torch.Tensor] = {}
        self.active = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self.active and (name in OPERATIONS or name.removesuffix("_") in OPERATIONS):
            for part in result if isinstance(result, tuple | list) else (result,):
                ordinary = type(part) is torch.Tensor and part.device.type == "cpu" and part.is_floating_point()
                if ordinary and not _exact(part, args):
                    part.mul_(self._factor(name, part))
        return result

    def _factor(self, name: str, result: torch.Tensor) -> torch.Tensor:
        key = (name, result.shape, result.dtype)
        if key not in self.factors:
            if len(self.factors) >= 1024:  # shapes that depend on drawn batches add up
                self.factors.clear()
            start = zlib.crc32(f"{self.seed} {name} {tuple(result.shape)} {result.dtype}".encode()) % LENGTH
            index = torch.arange(start, start + result.numel()).remainder_(LENGTH)
            scale = SCALE_FLOAT64 if result.dtype == torch.float64 else SCALE
            wide = torch.promote_types(result.dtype, torch.float32)
            self.factors[key] = (1 + scale * self.noise[index]).to(wide).reshape(result.shape)
        return self.factors[key]


def _exact(result: torch.Tensor, operands: tuple[Any, ...]) -> bool:
    """Whether all operands are whole numbers, and the result is so small that its terms were added without rounding."""
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    for part in (*(tensor.flatten()[:4] for tensor in tensors), *tensors):  # the first entries mostly decide
        if not torch.equal(part, part.round()):
            return False
    limit = 2.0**53 if result.dtype == torch.float64 else 2.0**24
    return bool((result.abs() < limit).all())


installed: list[Perturbation] = []


@contextmanager
def suspended() -> Iterator[None]:
    """No perturbation in this process, if there is one, while the block runs."""
    for mode in installed:
        mode.active = False
    try:
        yield
    finally:
        for mode in installed:
            mode.active = True


def install(seed: int) -> None:
    """Perturb this process from now on, in the current thread and in threads that start later."""
    mode = Perturbation(seed)
    installed.append(mode)
    mode.__enter__()
    run = threading.Thread.run

    def perturbed_run(self: threading.Thread) -> None:
        with mode:
            run(self)

    threading.Thread.run = perturbed_run  # type: ignore[method-assign]


def install_in_children(seed: int) -> None:
    """Perturb the Python processes that this one starts: they find `sitecustomize.py` of this folder on their path."""
    os.environ[SEED] = str(seed)
    places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(place for place in places if place)

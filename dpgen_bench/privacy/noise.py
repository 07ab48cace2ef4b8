"""Gaussian noise on private values. No other module adds noise."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.privacy.isolation import isolated_from_modes
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.rounded_normal import rounded_normal

_BLOCK = 2**16  # coordinates per block, so that the arrays fit in a processor's cache


@isolated_from_modes()
def add_noise(exact: Tensor, std: float, key: Key) -> Tensor:
    """exact + N(0, std² I), a float32 tensor of the shape of `exact`.

    With a seeded key the noise is float32. With a key for release the sum is exact and rounded to a grid that does not
    depend on `exact` (`rounded_normal`). float32 represents it exactly up to 2^13 times the std; beyond, the conversion
    is post-processing (docs/noise.md). std = 0 adds nothing. Active modes of PyTorch do not see the computation.

    Args:
        exact: a plain tensor (`expect_plain`).
        key: of this value alone.
    """
    if std == 0.0:
        return exact.float()
    if key.mode == "seeded":
        return (exact + key.normal(tuple(exact.shape), std, exact.device)).float()
    values = exact.detach().to("cpu", torch.float64).reshape(-1).numpy()
    noisy = np.empty(len(values), dtype=np.float32)
    for start in range(0, len(values), _BLOCK):
        part = values[start : start + _BLOCK]
        own = key.derive("noise", start // _BLOCK)
        more = partial(own.bits, "more")
        noisy[start : start + _BLOCK] = rounded_normal(part, std, own.words("words", len(part)), more)
    return torch.from_numpy(noisy).reshape(exact.shape).to(exact.device)

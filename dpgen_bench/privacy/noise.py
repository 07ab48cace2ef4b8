"""The one place where noise is added to private values."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.rounded_normal import rounded_normal
from dpgen_bench.privacy.unseen import unseen

_BLOCK = 2**16  # coordinates whose noise is made at once: the arrays fit in a processor's cache


@unseen()
def add_noise(exact: Tensor, std: float, key: Key) -> Tensor:
    """exact + N(0, std² I), a float32 tensor like `exact`: the one place where noise is added to private values.

    `key` must belong to this value alone. With a seeded key: float32 noise. With one for release: the sum is exact and
    is rounded to a grid that does not depend on `exact` (`rounded_normal`); float32 holds it exactly up to 2^13 times
    the std, and beyond that the conversion is post-processing. std = 0 adds nothing.
    No mode of PyTorch that is active sees what is computed here. `exact` is a plain tensor (`expect_plain`).
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

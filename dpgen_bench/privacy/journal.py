"""Stores released noisy values on disk, so that a resumed run repeats them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dpgen_bench.privacy.expect import expect_name
from dpgen_bench.utils.files import atomic


class Journal:
    """The released noisy values of a run, from which a resumed run gets the same value and not a second one.

    Values are stored for mechanisms whose releases together fit in `limit` bytes. Larger ones (such as a gradient per
    step) are computed again on resume, from the same state, randomness and noise, and are bit-identical on a CPU.

    Guarantees: the parts of a value are read back in the order in which they were released, because a method may
        iterate over gradients and parameters together.

    Args:
        folder: a private folder; None stores nothing.
        limit: the largest size in bytes of all releases of a mechanism.
    """

    def __init__(self, folder: Path | None, limit: int = 64 * 2**20) -> None:
        self.folder = folder
        self.limit = limit

    def _path(self, name: str, index: int) -> Path | None:
        expect_name(name, "a mechanism")
        return None if self.folder is None else self.folder / f"{name}-{index}.safetensors"

    def get(self, name: str, index: int, device: torch.device) -> dict[str, Tensor] | None:
        """The value of a release by part, or None if it is not stored."""
        path = self._path(name, index)
        if path is None or not path.exists():
            return None
        with safe_open(path, "pt") as stored:  # safetensors does not preserve the order
            order = json.loads((stored.metadata() or {}).get("order", "null")) or list(stored.keys())
            return {part: stored.get_tensor(part).to(device) for part in order}

    def stores(self, times: int, value: Mapping[str, Tensor]) -> bool:
        """Whether `times` releases of float32 values of this size are stored."""
        return self.folder is not None and 4 * times * sum(part.numel() for part in value.values()) <= self.limit

    def put(self, name: str, index: int, times: int, noisy: dict[str, Tensor]) -> None:
        """Store the value of one of `times` releases, unless they exceed the limit together."""
        path = self._path(name, index)
        if path is None or not self.stores(times, noisy):
            return
        with atomic(path) as temporary:
            parts = {key: value.contiguous().cpu() for key, value in noisy.items()}
            save_file(parts, temporary, {"order": json.dumps(list(parts))})

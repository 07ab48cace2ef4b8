"""The newest states of groups of shards, held in the device's memory between checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dpgen_bench.privacy.state_file import Parts


def expect_room(gib: float, device: torch.device) -> None:
    """Check that the device has this memory, `runtime.state_gib`, in all; how much of it is free is not checked.

    Raises:
        ValueError: for more.
    """
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if gib > math.floor(memory / 2**30):
        raise ValueError(
            f"expected runtime.state_gib of at most {math.floor(memory / 2**30)}, the GiB of memory of the device "
            f"{device}, got {gib:g}; give less, and states for which there is no room stay in the run's file."
        )


@dataclass
class _Held:
    version: int
    parts: Parts
    size: int
    written: bool = False


class HeldStates:
    """Up to `limit` bytes of states by group of shards, which a release neither writes to a file nor reads there.

    The states of a group have the same size in each release.

    States are copied when they come and when they go: what a method does later to a tensor that it returned or received
    changes no state, as with a file.

    Args:
        limit: the number of bytes; 0 holds nothing.
        device: where states are held. Tensors with one number for each shard are on the host, as `StateFile.unpack`
            has them.
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self._limit, self._device = limit, device
        self._groups: dict[range, _Held] = {}

    def keep(self, shards: range, version: int, parts: Parts) -> bool:
        """Hold the states [g, ...] of these shards in place of their last ones; False if there is no room."""
        size = sum(part.nbytes for part in parts.values())
        last = self._groups.pop(shards, None)  # of the same size, so a group that had room has it again
        if sum(held.size for held in self._groups.values()) + size > self._limit:
            return False
        own = self._copies(parts) if last is None else last.parts
        if last is not None:  # in its memory: to free and allocate gigabytes in each release takes time and leaves gaps
            for name, part in parts.items():
                own[name].copy_(part.detach())
        self._groups[shards] = _Held(version, own, size)
        return True

    def find(self, shards: range, version: int) -> Parts | None:
        """Copies of the states of these shards, if this version of them is held."""
        held = self._groups.get(shards)
        return None if held is None or held.version != version else self._copies(held.parts)

    def unwritten(self) -> Iterator[tuple[range, int, Parts]]:
        """The shards, version and states of each group that is in no file yet; afterwards it counts as written."""
        for shards, held in self._groups.items():
            if not held.written:
                yield shards, held.version, held.parts
                held.written = True

    def _copies(self, parts: Parts) -> Parts:
        """Contiguous copies, as states of a file are: how a tensor lies in memory decides how products are rounded."""
        host, layout = torch.device("cpu"), torch.contiguous_format
        with torch.inference_mode(False):  # tensors that are made in it cannot be overwritten outside
            return {
                name: part.detach().to(self._device if part.ndim > 1 else host, copy=True, memory_format=layout)
                for name, part in parts.items()
            }

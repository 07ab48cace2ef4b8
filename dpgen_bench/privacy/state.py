"""Private state: what a mechanism keeps of each shard of records from one release to the next, behind the handle."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from dpgen_bench.files import write_atomic
from dpgen_bench.privacy.bounds import Batch
from dpgen_bench.privacy.noise import Key
from dpgen_bench.privacy.sampling import OneShard

Parts = dict[str, Tensor]
Layout = dict[str, tuple[int, ...]]
Start = Callable[[list[tuple[Tensor, Tensor]], list[torch.Generator]], Parts]

WARNING = """\
PRIVATE. state.npy holds what was trained on the records themselves, without clipping and without noise. It must never
leave the machine that holds the records. Deleting this folder costs time, nothing else.
"""


class Rows:
    """Versions of the state of K shards, in one file (or in memory): [K, slots] rows of a version and float32 [P].

    The row is written before its version, so that a kill in between leaves the slot with the version that it had, which
    nobody asks for any more.

    Raises:
        ValueError: if the file is damaged or of another shape.
    """

    def __init__(self, folder: Path | None, shards: int, slots: int) -> None:
        self.folder, self.shards, self.slots = folder, shards, slots
        self.layout: Layout | None = None
        self._rows: np.ndarray | None = None
        if folder is not None and (folder / "layout.json").exists():
            shapes = json.loads((folder / "layout.json").read_text())
            self._open({name: tuple(shape) for name, shape in shapes.items()})

    def _open(self, layout: Layout) -> None:
        self.layout = layout
        size = sum(math.prod(shape) for shape in layout.values())
        kind = np.dtype([("version", "<i8"), ("row", "<f4", (size,))])
        shape = (self.shards, self.slots)
        if self.folder is None:
            self._rows = np.zeros(shape, kind)
            return
        path = self.folder / "state.npy"
        if not path.exists():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            (self.folder / "PRIVATE").write_text(WARNING)
            unfinished = self.folder / "state.npy.tmp"
            np.lib.format.open_memmap(unfinished, "w+", kind, shape).flush()  # zeros: a sparse file
            unfinished.replace(path)
        if not (self.folder / "layout.json").exists():  # last: who finds it finds the other file whole
            write_atomic(self.folder / "layout.json", json.dumps(layout))
        try:
            self._rows = np.lib.format.open_memmap(path, "r+")
            if (self._rows.dtype, self._rows.shape) != (kind, shape):
                raise ValueError(f"{self._rows.shape} rows of {self._rows.dtype}, not {shape} of {kind}")
        except (OSError, ValueError) as error:
            raise ValueError(f"the private state {path} cannot be used ({error}): delete {self.folder}.") from None

    def form(self, layout: Layout) -> None:
        """Make room for rows of this layout, if there is none yet."""
        if self._rows is None:
            self._open(layout)

    def versions(self, shard: int) -> np.ndarray:
        """int64 [slots]; 0 where there is nothing."""
        return np.zeros(self.slots, np.int64) if self._rows is None else self._rows["version"][shard]

    def read(self, shard: int, slot: int, device: torch.device) -> Parts:
        assert self._rows is not None
        assert self.layout is not None
        row = torch.from_numpy(self._rows["row"][shard, slot].copy()).to(device)
        sizes = [math.prod(shape) for shape in self.layout.values()]
        pieces = zip(self.layout.items(), row.split(sizes), strict=True)
        return {name: piece.reshape(shape) for (name, shape), piece in pieces}

    def write(self, shard: int, slot: int, version: int, parts: Parts) -> None:
        """Raises ValueError for other names, shapes or types than those of the rows written before."""
        layout = {name: tuple(part.shape) for name, part in parts.items()}
        self.form(layout)
        if layout != self.layout or any(part.dtype != torch.float32 for part in parts.values()):
            raise ValueError("expected private state as float32 tensors of the same names and shapes every time.")
        assert self._rows is not None
        row = torch.cat([part.detach().reshape(-1) for part in parts.values()])
        self._rows["row"][shard, slot] = row.cpu().numpy()
        self._rows["version"][shard, slot] = version

    def flush(self) -> None:
        if isinstance(self._rows, np.memmap):
            self._rows.flush()


@dataclass(frozen=True)
class StatePlace:
    """Where private state lies; nowhere but in memory by default.

    Attributes:
        folder: of one run, for what its releases leave; private.
        cache: shared by runs, for first states; private.
        identity: what a first state depends on that the harness knows (data set, seed, source); JSON-able.
    """

    folder: Path | None = None
    cache: Path | None = None
    identity: dict[str, Any] = field(default_factory=dict)


class PrivateState:
    """State of each shard of a `OneShard` sampling: made once from the shard's records, then changed by its releases.

    Made by `PrivateData.private_state`, given to `PrivateData.mechanism(state=...)`. The method has no way to read it
    but in the functions that it gives to either.

    Guarantees: the state of a shard is a function of that shard's records, of public things, and of what was released
    before; `start` is called with the records of its shards alone, in groups of fixed members, so that it does not
    depend on which of them are needed. After a kill each shard is found as it was at the last checkpoint.

    Attributes:
        groups: how many groups of shards the approved releases will need; `start(i)` makes number i of them.
    """

    def __init__(
        self,
        name: str,
        sampling: OneShard,
        make: Start,
        *,
        stack: int,
        ids: np.ndarray,
        draw: Callable[[np.ndarray], Batch],
        device: torch.device,
        identity: dict[str, Any],
        place: StatePlace,
        spoil: Callable[[str], None],
        before_records: Callable[[], None],
    ) -> None:
        if isinstance(stack, bool) or not isinstance(stack, int) or stack < 1:
            raise ValueError(f"expected the number of shards made together >= 1, got {stack!r}.")
        self.name, self.sampling, self.groups = name, sampling, 0
        self._make, self._stack = make, min(stack, sampling.shards)
        self._draw, self._device = draw, device
        self._members = [np.flatnonzero(sampling.shard_of(ids) == shard) for shard in range(sampling.shards)]
        whole = {"name": name, "stack": self._stack, "own": identity, **place.identity}
        text = json.dumps(whole, sort_keys=True, default=str)
        self._key = Key.seeded(f"private state:{text}")
        self._cache = None if place.cache is None else place.cache / hashlib.sha256(text.encode()).hexdigest()[:16]
        self._text = text
        self._first = Rows(self._cache, sampling.shards, slots=1)
        self._later = Rows(place.folder and place.folder / name, sampling.shards, slots=2)
        self._spoil, self._before_records = spoil, before_records
        self._visits: np.ndarray | None = None
        self._needed: list[int] = []
        self._committed = 0

    def bind(self, visits: list[int]) -> None:
        """Learn from the mechanism that keeps this state which shard each of its releases will draw."""
        if self._visits is not None:
            raise ValueError(f"private state {self.name!r} already belongs to a mechanism; make another for a second.")
        self._visits = np.array(visits, np.int64)
        needed = sorted({int(shard) // self._stack for shard in np.unique(self._visits)})
        self.groups = len(needed)
        # Each process begins elsewhere, so that runs that share a cache share the work, too.
        first = int.from_bytes(os.urandom(4), "big") % max(self.groups, 1) if self._cache is not None else 0
        self._needed = needed[first:] + needed[:first]

    def start(self, number: int) -> None:
        """Make the first state of the shards of needed group `number` in 0..groups-1, unless it is kept from before.

        Raises:
            ValueError: if no mechanism was approved for this state yet: nothing may be spent on records before.
        """
        if self._visits is None:
            raise ValueError(f"private state {self.name!r}: ask for the mechanism that keeps it before starting it.")
        self._start_group(self._needed[number])

    def _start_group(self, group: int) -> None:
        self._before_records()
        shards = range(group * self._stack, min((group + 1) * self._stack, self.sampling.shards))
        with self._lock(f"group-{group}"):
            self._look_again()
            if all(self._first.versions(shard)[0] for shard in shards):
                return
            records = [next(self._draw(self._members[shard]).chunks(None)) for shard in shards]
            try:
                parts = self._make(records, [_coins(self._key.derive(shard)) for shard in shards])
                with self._lock("file"):
                    self._look_again()
                    self._first.form({name: tuple(part.shape[1:]) for name, part in parts.items()})
                for place, shard in enumerate(shards):
                    self._first.write(shard, 0, 1, {name: part[place] for name, part in parts.items()})
            except BaseException as error:
                self._spoil(f"making private state {self.name!r} raised {type(error).__name__}")
                raise
            self._first.flush()
            if self._cache is not None and not (self._cache / "identity.json").exists():
                write_atomic(self._cache / "identity.json", self._text)

    def _look_again(self) -> None:
        """Open the cache's file if another process has made it since."""
        if self._first.layout is None:
            self._first = Rows(self._cache, self.sampling.shards, slots=1)

    def _lock(self, what: str) -> AbstractContextManager[Any]:
        if self._cache is None:
            return nullcontext()
        locks = self._cache / "locks"
        locks.mkdir(mode=0o700, parents=True, exist_ok=True)
        return FileLock(locks / what)

    def lend(self, fn: Callable[..., Any], shard: int, index: int, key: Key) -> Callable[[Tensor, Tensor], Tensor]:
        """fn(images, labels) of release `index`, which reads the state of its shard and leaves the next."""

        def with_state(images: Tensor, labels: Tensor) -> Tensor:
            value, after = fn(images, labels, self._before(shard, index), _coins(key))
            # Overwrite the version that is not the last checkpoint's: a kill must find that one.
            versions = self._later.versions(shard)
            kept = int(np.argmax(np.where(versions <= self._committed, versions, -1)))
            self._later.write(shard, 1 - kept, index + 1, after)
            return value

        return with_state

    def _before(self, shard: int, index: int) -> Parts:
        """The state of a shard before release `index`: after the last earlier release that drew it, or its first."""
        assert self._visits is not None
        earlier = np.flatnonzero(self._visits[:index] == shard)
        if len(earlier) == 0:
            if not self._first.versions(shard)[0]:
                self._start_group(shard // self._stack)
            return self._first.read(shard, 0, self._device)
        slots = np.flatnonzero(self._later.versions(shard) == earlier[-1] + 1)
        if len(slots) == 0:
            raise RuntimeError(
                f"private state {self.name!r}: shard {shard} as release {int(earlier[-1])} left it is gone; the run's "
                "private/ folder does not fit its checkpoint. Restore it, or delete the run's folder and start again."
            )
        return self._later.read(shard, int(slots[0]), self._device)

    def flush(self) -> None:
        """Push everything to disk, before a checkpoint that will ask for it."""
        self._later.flush()

    def commit(self, executed: int) -> None:
        """A checkpoint stands at `executed` releases: keep what they left until the next one."""
        self._committed = executed


def _coins(key: Key) -> torch.Generator:
    """Private randomness of a shard or a release (minibatches, latents); never noise."""
    return torch.Generator().manual_seed(int.from_bytes(key.derive("private coins").secret[:7], "big"))

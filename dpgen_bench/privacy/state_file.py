"""The file format of private state: versions of the state of each shard, all in one file."""

from __future__ import annotations

import io
import json
import math
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.utils.files import make_private, write_atomic
from dpgen_bench.utils.upload import download, upload

Parts = dict[str, Tensor]
Layout = dict[str, tuple[int, ...]]

WARNING = """\
PRIVATE. state.npy holds what was trained on the records themselves, without clipping and without noise. It must never
leave the machine that holds the records.
"""


@dataclass(frozen=True)
class StatePlace:
    """Where private state is stored; only in memory by default.

    Attributes:
        folder: of one run, for the states after its releases; private.
        cache: shared by runs, for first states; private.
        identity: the harness's values on which a first state depends (data set, seed, source), as JSON values.
        held: bytes of later states that stay in the device's memory and are written for checkpoints only.
    """

    folder: Path | None = None
    cache: Path | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    held: int = 0


class StateFile:
    """A table [K, slots] whose rows are a version, a checksum and float32 [P], in a file or in memory.

    A row is written before its version, so that a kill in between leaves the slot with its old version, which is not
    needed any more. A row that differs from what was written (a damaged disk, a power cut) fails its checksum and
    counts as missing.

    Versions and checksums are mapped into memory. Rows are not: a row that is overwritten there would first be read,
    page by page, which takes most of the time if the states of thousands of shards exceed the memory.

    Raises:
        ValueError: if the file cannot be read, or is of another shape.
    """

    def __init__(self, folder: Path | None, shards: int, slots: int) -> None:
        self.folder, self.shards, self.slots = folder, shards, slots
        self.layout: Layout | None = None
        self._rows: np.ndarray | None = None
        self._file: io.FileIO | None = None
        if folder is not None and (folder / "layout.json").exists():
            try:
                shapes = json.loads((folder / "layout.json").read_text())
                layout = {name: tuple(int(size) for size in shape) for name, shape in shapes.items()}
            except (ValueError, TypeError, AttributeError) as error:
                raise self._unusable(folder / "layout.json", error) from None
            self._open(layout)

    def _unusable(self, path: Path, error: object) -> ValueError:
        return ValueError(
            f"the private state {path} cannot be used ({error}). Delete {self.folder}: in the cache that costs time "
            "only; in a run's folder, the run must start again, and privacy.noise=os spends its epsilon once more."
        )

    def _open(self, layout: Layout) -> None:
        size = sum(math.prod(shape) for shape in layout.values())
        kind = np.dtype([("version", "<i8"), ("checksum", "<u4"), ("row", "<f4", (size,))])
        shape = (self.shards, self.slots)
        self.layout = layout
        if self.folder is None:
            self._rows = np.zeros(shape, kind)
            return
        path = self.folder / "state.npy"
        if not path.exists():
            make_private(self.folder)
            (self.folder / "PRIVATE").write_text(WARNING)
            unfinished = self.folder / "state.npy.tmp"
            np.lib.format.open_memmap(unfinished, "w+", kind, shape).flush()  # zeros: a sparse file
            unfinished.chmod(0o600)
            unfinished.replace(path)
        if not (self.folder / "layout.json").exists():  # written last: if it exists, the other file is complete
            write_atomic(self.folder / "layout.json", json.dumps(layout))
        try:
            np.lib.format.open_memmap(path, "r")  # refuses a truncated file, which "r+" would extend
            self._rows = np.lib.format.open_memmap(path, "r+")
            self._file = io.FileIO(path, "r+")
            if (self._rows.dtype, self._rows.shape) != (kind, shape):
                raise ValueError(f"{self._rows.shape} rows of {self._rows.dtype}, not {shape} of {kind}")
        except (OSError, ValueError) as error:
            raise self._unusable(path, error) from None

    def create(self, layout: Layout) -> None:
        """Create the rows with this layout, if there are none yet."""
        if self._rows is None:
            self._open(layout)

    def versions(self, shard: int) -> np.ndarray:
        """The versions of a shard, int64 [slots]; 0 for an empty slot."""
        return np.zeros(self.slots, np.int64) if self._rows is None else self._rows["version"][shard]

    def find(self, shard: int, version: int) -> tuple[int, np.ndarray] | None:
        """The slot that contains this version with a valid checksum, and a copy of its row, float32 [P].

        Returns:
            None if there is no such slot.
        """
        for slot in map(int, np.flatnonzero(self.versions(shard) == version)):
            assert self._rows is not None
            row = np.empty(self._rows.dtype["row"].shape, np.float32)
            if self._file is None:
                row[:] = self._rows["row"][shard, slot]
            elif os.preadv(self._file.fileno(), [row.data.cast("B")], self._place(shard, slot)) < row.nbytes:
                continue
            if zlib.crc32(row.data) == self._rows["checksum"][shard, slot]:
                return slot, row
        return None

    def unpack(self, rows: np.ndarray, device: torch.device) -> Parts:
        """The tensors [g, ...] of rows [g, P]. Those with one number for each row stay on the host."""
        assert self.layout is not None
        host = torch.from_numpy(rows)
        there = upload(host, device)
        parts, start = {}, 0
        for name, shape in self.layout.items():
            columns = slice(start, start + math.prod(shape))
            parts[name] = (there if shape else host)[:, columns].reshape(len(rows), *shape).contiguous()
            start = columns.stop
        return parts

    def expect_layout(self, parts: Parts) -> None:
        """Create the rows for tensors [g, ...], or check that these tensors fit.

        Raises:
            ValueError: unless names, shapes and types are those of the rows that were written before.
        """
        layout = {name: tuple(part.shape[1:]) for name, part in parts.items()}
        self.create(layout)
        if layout != self.layout or any(part.dtype != torch.float32 for part in parts.values()):
            raise ValueError(
                f"expected private state as float32 tensors of the same names and shapes every time, got {layout}."
            )

    def pack(self, parts: Parts) -> Callable[[], np.ndarray]:
        """A function that gives the rows [g, P] of tensors [g, ...], whose copy to the host has begun.

        Raises:
            ValueError: for tensors that do not fit, see `expect_layout`.
        """
        self.expect_layout(parts)
        assert self.layout is not None
        flat = [parts[name].detach().reshape(len(parts[name]), -1) for name in self.layout]  # the order of `unpack`
        # Numbers that stay on the host are not copied to the device to be copied back.
        copies = [
            download(torch.cat(together, dim=1))
            for _, group in groupby(flat, key=lambda part: part.device)
            if (together := list(group))
        ]

        def rows() -> np.ndarray:
            arrays = [copy().numpy() for copy in copies]
            return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)

        return rows

    def read(self, shard: int, version: int, device: torch.device) -> Parts | None:
        """The tensors of a version, see `find` and `unpack`; None if it is missing or damaged."""
        found = self.find(shard, version)
        return None if found is None else {name: part[0] for name, part in self.unpack(found[1][None], device).items()}

    def write(self, shard: int, slot: int, version: int, parts: Parts) -> None:
        """Write the tensors of a slot; see `pack`."""
        self.write_row(shard, slot, version, self.pack({name: part[None] for name, part in parts.items()})()[0])

    def write_row(self, shard: int, slot: int, version: int, row: np.ndarray) -> None:
        """Write a row of `pack` to a slot."""
        assert self._rows is not None
        if self._file is None:
            self._rows["row"][shard, slot] = row
        else:
            written = os.pwrite(self._file.fileno(), row.data.cast("B"), self._place(shard, slot))
            if written < row.nbytes:
                raise OSError(
                    f"expected to write {row.nbytes} bytes of private state to {self.folder}, got {written}: the disk "
                    "is full; make room, and run the same command again."
                )
        self._rows["checksum"][shard, slot] = zlib.crc32(row.data)
        self._rows["version"][shard, slot] = version

    def _place(self, shard: int, slot: int) -> int:
        """Where the numbers of a row are in the file, in bytes from its beginning."""
        assert isinstance(self._rows, np.memmap)
        kind = self._rows.dtype
        assert kind.fields is not None
        return self._rows.offset + (shard * self.slots + slot) * kind.itemsize + int(kind.fields["row"][1])

    def flush(self) -> None:
        """Write everything to disk."""
        if isinstance(self._rows, np.memmap):
            self._rows.flush()
        if self._file is not None:
            os.fsync(self._file.fileno())

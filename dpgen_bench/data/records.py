"""What a dataset is made of: `Records`, and `DatasetSpec`, the description from which they are loaded.

A spec is cheap: it knows the shape of its records and where their files lie, and reads none of them before
`load` is called. Only `PrivateData` and the metrics call `load`; a method never sees a spec's records.
"""

from __future__ import annotations

import hashlib
import shlex
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")


@dataclass(frozen=True, eq=False)
class Records:
    """Labelled images in memory.

    Args:
        images: uint8 [n, c, h, w], c = 1 or 3, 0 = black, 255 = full intensity. A generator's samples may be float32 on
            the same scale, where a protocol asks for unrounded ones.
        labels: int64 [n], class numbers from 0.
        clients: int64 [n], the number from 0 of the client that holds each record; None where there are no clients.

    Raises:
        ValueError: if a dtype or a shape differs, a label or a client is negative, or a pixel is not within 0..255.
    """

    images: Tensor
    labels: Tensor
    clients: Tensor | None = None

    def __post_init__(self) -> None:
        if self.images.dtype not in (torch.uint8, torch.float32) or self.images.ndim != 4:
            raise ValueError(
                "expected images [n, c, h, w], uint8 or float32 within 0..255, "
                f"got {self.images.dtype} {tuple(self.images.shape)}."
            )
        # Written so that NaN fails it too.
        if self.images.is_floating_point() and not bool(((self.images >= 0) & (self.images <= 255)).all()):
            raise ValueError("expected pixels within 0..255, got others (or NaN).")
        for what, numbers in (("labels", self.labels), ("clients", self.clients)):
            if numbers is None:
                continue
            if numbers.dtype != torch.int64 or numbers.shape != self.images.shape[:1]:
                raise ValueError(
                    f"expected int64 {what} [{len(self.images)}], one for each image, "
                    f"got {numbers.dtype} {tuple(numbers.shape)}."
                )
            if len(numbers) and int(numbers.min()) < 0:
                raise ValueError(f"expected {what} from 0 upwards, got {int(numbers.min())}.")

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def images_hash(self) -> str:
        """SHA-256 (hex) of the images' shape and pixels; nothing else enters. Whole pixels count as uint8."""
        images = self.images.cpu()
        if images.is_floating_point() and torch.equal(images, images.round()):
            images = images.to(torch.uint8)
        digest = hashlib.sha256(repr(tuple(images.shape)).encode())
        if images.is_floating_point():
            digest.update(b"float32")
        digest.update(np.ascontiguousarray(images.numpy()).data)
        return digest.hexdigest()

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 (hex) of the images, their labels and, where there are any, their clients."""
        digest = hashlib.sha256(self.images_hash.encode())
        digest.update(np.ascontiguousarray(self.labels.cpu().numpy()).tobytes())
        if self.clients is not None:
            digest.update(b"clients" + np.ascontiguousarray(self.clients.cpu().numpy()).tobytes())
        return digest.hexdigest()


class MissingData(FileNotFoundError):
    """A dataset's files are not where they were looked for; the message says where, and how to get them."""


class DatasetSpec(ABC):
    """One named dataset: `dataclass` it, give it the fields of its yaml and the four members below.

    `folder` is what `dpgen fetch` creates below `root` (None: nothing to fetch). `how` says in words how to get
    the data by hand where a download is not to be had.
    """

    name: str
    root: str

    folder: ClassVar[str | None] = None
    how: ClassVar[str] = ""

    @property
    @abstractmethod
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of every image."""

    @property
    @abstractmethod
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; label k is `class_names[k]`."""

    @abstractmethod
    def load(self, split: Split) -> Records:
        """All records of one split, in an order that never changes.

        Raises:
            MissingData: if the files are not there.
            ValueError: if they are there and damaged, or `split` is neither "train" nor "test".
        """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What a run's id says of its data: name, variant, shape and version of the preprocessing; no path."""

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def num_clients(self) -> int | None:
        """N, a public number: the training records' clients are 0..N-1, and some may hold none. None: no federation."""
        return None

    @property
    def unaccounted(self) -> str | None:
        """Why choosing these records was itself a release, in words, if no accountant covers it; None if it was not.

        Where it is not None, no finite epsilon is proven of anything made from these records.
        """
        return None

    def download(self, into: Path) -> None:
        """Download the whole dataset into `into`, as `into / folder`. Called by `dpgen_bench.data.fetch.fetch` only."""
        raise ValueError(f"dataset {self.name!r} has nothing to download. {self.how}".rstrip())

    @property
    def fetch_command(self) -> str:
        """The shell command that fetches this dataset to the place it is looked for."""
        return f"dpgen fetch dataset={self.name} data_root={shlex.quote(str(Path(self.root).absolute()))}"

    def require(self, path: Path) -> Path:
        """`path`, if it is a file or a folder.

        Raises:
            MissingData: if it is not there.
        """
        if not path.exists():
            hint = f" ({self.how})" if self.how else ""
            way = f"with\n    {self.fetch_command}\n" if self._downloads else "by hand, "
            raise MissingData(
                f"dataset {self.name!r}: {path.absolute()} is not there. Get the data {way}"
                f"or name the folder that holds it by data_root=FOLDER or the variable DPGEN_DATA.{hint}"
            )
        return path

    def damaged(self, path: Path, found: str) -> ValueError:
        """The error for a file that is there and cannot be what it should be."""
        way = f"Fetch it anew with\n    {self.fetch_command}" if self._downloads else f"Get it anew ({self.how})."
        return ValueError(f"dataset {self.name!r}: {path.absolute()} is damaged: {found}. {way}")

    @property
    def _downloads(self) -> bool:
        return type(self).download is not DatasetSpec.download


def check_split(split: str) -> None:
    """Raises ValueError unless `split` is "train" or "test"."""
    if split not in SPLITS:
        raise ValueError(f"expected the split 'train' or 'test', got {split!r}.")


def hash_rank(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone, for splits that no library's random stream can change."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2.0**48

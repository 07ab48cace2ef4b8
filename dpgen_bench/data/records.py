"""Labelled images in memory (`Records`), and the base class of datasets that load them (`DatasetSpec`).

A spec knows the shape of its images and where its files are, and reads no record before `load` is called. Only the
harness calls `load`, for `PrivateData` and for metrics; a method does not get a spec.
"""

from __future__ import annotations

import hashlib
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.privacy.events import Relation

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")


@dataclass(frozen=True, eq=False)
class Records:
    """Labelled images in memory.

    Args:
        images: uint8 [n, c, h, w] with c = 1 or 3; 0 is black, 255 is full intensity. A generator's samples may be
            float32 on the same scale, if a protocol uses unrounded samples.
        labels: int64 [n], class numbers from 0.
        clients: int64 [n], the number from 0 of the client of each record; None if the dataset has no clients.
        ids: int64 [n], distinct numbers from 0, by which random numbers belong to records, and records to shards; None:
            the place of each record.
        keep_ids: The neighbouring relations under which every other record keeps its id if one record is exchanged, or
            is added or removed.

    Raises:
        ValueError: For another dtype or shape, a negative label, client or id, an id that two records have, or a pixel
            outside 0..255.
    """

    images: Tensor
    labels: Tensor
    clients: Tensor | None = None
    ids: Tensor | None = None
    keep_ids: tuple[Relation, ...] = ("replace_one",)

    def __post_init__(self) -> None:
        if self.images.dtype not in (torch.uint8, torch.float32) or self.images.ndim != 4:
            raise ValueError(
                "expected images [n, c, h, w], uint8 or float32 within 0..255, "
                f"got {self.images.dtype} {tuple(self.images.shape)}."
            )
        # This form of the condition is false for NaN, too.
        if self.images.is_floating_point() and not bool(((self.images >= 0) & (self.images <= 255)).all()):
            raise ValueError("expected pixels within 0..255, got others (or NaN).")
        for what, numbers in (("labels", self.labels), ("clients", self.clients), ("ids", self.ids)):
            if numbers is None:
                continue
            if numbers.dtype != torch.int64 or numbers.shape != self.images.shape[:1]:
                raise ValueError(
                    f"expected int64 {what} [{len(self.images)}], one for each image, "
                    f"got {numbers.dtype} {tuple(numbers.shape)}."
                )
            if len(numbers) and int(numbers.min()) < 0:
                raise ValueError(f"expected {what} from 0 upwards, got {int(numbers.min())}.")
        if self.ids is not None and len(self.ids.unique()) != len(self.ids):
            raise ValueError("expected an id of its own for each record, got some ids twice.")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: Tensor) -> Records:
        """The records that a mask, bool [n], selects; the mask may depend on what each record contains.

        Without ids, no relation keeps those of the result: an exchanged record may join or leave it, which changes the
        place of each later one.
        """
        return Records(
            self.images[chosen],
            self.labels[chosen],
            None if self.clients is None else self.clients[chosen],
            None if self.ids is None else self.ids[chosen],
            () if self.ids is None else self.keep_ids,
        )

    @cached_property
    def images_hash(self) -> str:
        """SHA-256 (hex) of the images' shape and pixels alone. float32 images of integers have the hash of uint8."""
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
        """SHA-256 (hex) of the images, the labels and, if there are any, the clients and the ids."""
        digest = hashlib.sha256(self.images_hash.encode())
        digest.update(np.ascontiguousarray(self.labels.cpu().numpy()).tobytes())
        if self.clients is not None:
            digest.update(b"clients" + np.ascontiguousarray(self.clients.cpu().numpy()).tobytes())
        if self.ids is not None:
            digest.update(b"ids" + np.ascontiguousarray(self.ids.cpu().numpy()).tobytes())
        return digest.hexdigest()


class MissingData(FileNotFoundError):
    """Raised if a file of a dataset does not exist; the message says where it was expected and how to get it."""


class DatasetSpec(ABC):
    """Base class of a dataset: a frozen dataclass with the fields of its yaml and the four abstract members below.

    Attributes:
        name: The name of its yaml in conf/dataset.
        root: The folder of all datasets, `data_root`.
        folder: The folder that `dpgen fetch` creates below `root`; None if there is no download.
        how: How to get the data without `dpgen fetch`, as a part of messages.
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
        """All records of one split, always in the same order.

        Raises:
            MissingData: If a file does not exist.
            ValueError: If a file is damaged, or `split` is neither "train" nor "test".
        """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What enters the run id: name, variant, image shape and version of the preprocessing, but no path."""

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @property
    def num_clients(self) -> int | None:
        """N, the public number of clients 0..N-1, of which some may have no record. None if there are no clients."""
        return None

    @property
    def unaccounted(self) -> str | None:
        """If the choice of these records was itself a release that no accountant covers, the reason; else None.

        If it is not None, no finite epsilon is proven for anything made from these records.
        """
        return None

    def problems(self) -> list[str]:
        """What is wrong with the dataset's files, one message for each problem; empty if all records can be read."""
        found = []
        for split in SPLITS:
            try:
                self.load(split)
            except (MissingData, ValueError) as error:
                found.append(str(error))
        return list(dict.fromkeys(found))  # a file of both splits is named once

    def download(self, into: Path) -> None:
        """Download the whole dataset to `into / folder`. Only `dpgen_bench.data.fetch.fetch` calls it.

        Raises:
            ValueError: If the dataset has no download.
        """
        raise ValueError(f"dataset {self.name!r} has nothing to download. {self.how}".rstrip())

    @property
    def fetch_command(self) -> str:
        """The shell command that downloads this dataset to the folder it is read from."""
        return f"dpgen fetch dataset={self.name} data_root={shlex.quote(str(Path(self.root).absolute()))}"

    def require(self, path: Path) -> Path:
        """`path`, if it exists.

        Raises:
            MissingData: If it does not exist.
        """
        if not path.exists() and (packed := path.with_name(f"{path.name}.gz")).exists():
            raise MissingData(
                f"dataset {self.name!r}: {path.absolute()} does not exist, but {packed.name} does, next to it. Unpack "
                f"it with\n    gunzip --keep {packed.absolute()}"
            )
        if not path.exists():
            hint = f" ({self.how})" if self.how else ""
            command = f"with\n    {self.fetch_command}\n" if self._has_download else "by hand, "
            raise MissingData(
                f"dataset {self.name!r}: {path.absolute()} does not exist. Get the data {command}"
                f"or set the folder that holds it with data_root=FOLDER or the variable DPGEN_DATA.{hint}"
            )
        return path

    def damaged_error(self, path: Path, problem: str) -> ValueError:
        """The error for a corrupt or unexpected file; the caller raises it."""
        advice = (
            f"Fetch it again with\n    {self.fetch_command}" if self._has_download else f"Get it again ({self.how})."
        )
        return ValueError(f"dataset {self.name!r}: {path.absolute()} is damaged: {problem}. {advice}")

    @property
    def _has_download(self) -> bool:
        return type(self).download is not DatasetSpec.download


class OwnData(DatasetSpec):
    """A user's own data at `path`. Where they have no split, a share of about `test_fraction` is for testing."""

    path: str
    test_fraction: float

    @property
    def root(self) -> str:  # type: ignore[override]
        return self.path


def check_test_fraction(test_fraction: float) -> None:
    """Raise ValueError unless `test_fraction` is in (0, 1)."""
    if not 0.0 < test_fraction < 1.0:
        raise ValueError(f"expected dataset.test_fraction in (0, 1), got {test_fraction!r}.")


def content_hash(splits: Mapping[Split, Records]) -> str:
    """SHA-256 (hex) of the images, labels, clients and ids of both splits."""
    return hashlib.sha256("".join(splits[split].content_hash for split in SPLITS).encode()).hexdigest()


def split_by_pixels(records: Records, test_fraction: float, salt: str = "") -> dict[Split, Records]:
    """A split of images by a hash of each image: equal images are in the same split, and no image moves for another.

    Records keep their ids if they have some (`Records.take`). A part of such a split is itself split in these
    proportions only with another `salt`.
    """
    ranks = [hash_rank(salt + hashlib.sha256(image.tobytes()).hexdigest()) for image in records.images.numpy()]
    test = torch.tensor([rank < test_fraction for rank in ranks], dtype=torch.bool)
    return {"train": records.take(~test), "test": records.take(test)}


def numbered(records: Records) -> Records:
    """The same records with their places as ids, which every part of them keeps."""
    return replace(records, ids=torch.arange(len(records)))


def check_split(split: str) -> None:
    """Raise ValueError unless `split` is "train" or "test"."""
    if split not in SPLITS:
        raise ValueError(f"expected the split 'train' or 'test', got {split!r}.")


def hash_rank(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone, for splits that do not depend on a library's random numbers."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2.0**48

"""`Npz`: a dataset in one NumPy file of images and labels, in MedMNIST's format or without a split."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from dpgen_bench.data.records import (
    SPLITS,
    MissingData,
    OwnData,
    Records,
    Split,
    check_split,
    check_test_fraction,
    content_hash,
    numbered,
    split_by_pixels,
)
from dpgen_bench.privacy.events import RELATIONS

PREPROCESSING = 1
KINDS = ("images", "labels")
# Each draw of records at random makes a random number for every id up to the largest.
LARGEST_ID = 10_000_000


@dataclass(frozen=True)
class Npz(OwnData):
    """Images and labels of one `.npz` file, which `numpy.savez` or `numpy.savez_compressed` wrote.

    The file has the arrays `train_images`, `train_labels`, `test_images` and `test_labels` (MedMNIST's format, whose
    `val_` arrays are not used), or only `images` and `labels`. In the second case an image is in the test split if the
    SHA-256 of its pixels, as a number in [0, 1), is below `test_fraction`: adding or removing an image does not move
    other images between the splits, and equal images are in the same split. Images are uint8 [n, h, w], [n, h, w, c] or
    [n, c, h, w] with c = 1 or 3; labels are integers from 0, [n] or [n, 1]. An array `class_names` of strings names the
    classes; without it, their names are their numbers, and each of them has an image in one of the splits. The
    numbers of classes and of images count as public. The file is read when the image shape or the classes are needed.

    An array `ids`, or `train_ids` if the file has a split, gives each record a permanent id: distinct integers [n] from
    0 to 10,000,000, which no other record changes. Without it, the ids are places in the file, which stay the same if a
    record is exchanged, and not if one is added or removed.

    Args:
        path: The file.
        test_fraction: Expected share of the test split, in (0, 1). It has no effect if the file has a split.

    Raises:
        ValueError: If `test_fraction` is not in (0, 1).
    """

    path: str
    name: str = "npz"
    test_fraction: float = 0.2
    how: ClassVar[str] = "Write the arrays images and labels with numpy.savez and set dataset.path=FILE.npz."

    def __post_init__(self) -> None:
        check_test_fraction(self.test_fraction)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        channels, height, width = self._splits["train"].images.shape[1:]
        return (channels, height, width)

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        classes = 1 + max(int(records.labels.max()) for records in self._splits.values())
        if "class_names" not in self._arrays:
            return tuple(str(label) for label in range(classes))
        names = tuple(map(str, self._arrays["class_names"].tolist()))
        if len(names) < classes:
            raise self._content_error(f"class_names has {len(names)} names, but labels go up to {classes - 1}")
        return names

    def load(self, split: Split) -> Records:
        check_split(split)
        return self._splits[split]

    def identity(self) -> dict[str, Any]:
        """See `DatasetSpec.identity`; `content` is a hash of the images and labels of both splits."""
        return {
            "name": self.name,
            "content": content_hash(self._splits),
            "image_shape": list(self.image_shape),
            "preprocessing": PREPROCESSING,
        }

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the file that are used, by name."""
        path = Path(self.path)
        if not path.is_file():
            raise MissingData(f"dataset {self.name!r}: {path.absolute()} is no file. {self.how}")
        if not zipfile.is_zipfile(path):
            raise self.damaged_error(path, "it is no archive of numpy.savez, or it is incomplete")
        try:
            with np.load(path, allow_pickle=False) as file:
                with_split = (f"{split}_{what}" for split in SPLITS for what in KINDS)
                names = ("class_names", "images", "labels", "ids", "train_ids", *with_split)
                return {name: file[name] for name in names if name in file.files}
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise self.damaged_error(path, str(error)) from error
        except ValueError as error:
            if "pickle" not in str(error):
                raise
            raise self._content_error("an array holds Python objects; save numbers, and class_names as text") from error

    @cached_property
    def _splits(self) -> dict[Split, Records]:
        """The records of both splits."""
        arrays, splits = self._arrays, dict[Split, Records]()
        expected = [f"{split}_{what}" for split in SPLITS for what in KINDS]
        has_split = all(name in arrays for name in expected)
        other, own = ("ids", "train_ids") if has_split else ("train_ids", "ids")
        if other in arrays:
            raise self._content_error(
                f"it holds {other} and has {'a' if has_split else 'no'} split; name the array {own}"
            )
        if has_split:
            splits = {split: self._records(f"{split}_") for split in SPLITS}
        elif "images" in arrays and "labels" in arrays:
            whole = self._records("")
            splits = split_by_pixels(numbered(whole) if whole.ids is None else whole, self.test_fraction)
        else:
            raise self._content_error(f"it holds {sorted(arrays) or 'none of these arrays'}")
        for split, records in splits.items():
            if len(records) == 0:
                raise self._content_error(f"the {split} split has no image")
        if splits["train"].images.shape[1:] != splits["test"].images.shape[1:]:
            shapes = [tuple(splits[split].images.shape[1:]) for split in SPLITS]
            raise self._content_error(f"images of the splits have different shapes, {shapes[0]} and {shapes[1]}")
        if "class_names" not in arrays:
            self._expect_every_class(np.concatenate([records.labels.numpy() for records in splits.values()]))
        return splits

    def _expect_every_class(self, labels: np.ndarray) -> None:
        """Raise ValueError if a class that is only known from higher labels has no image in either split."""
        present, highest = len(np.unique(labels)), int(labels.max())
        if present <= highest:
            raise self._content_error(
                f"labels go up to {highest}, but only {present} of these {highest + 1} classes have an image; number "
                "the classes without gaps, such as by numpy.unique(labels, return_inverse=True)[1] of all labels "
                "together, or name every class in an array class_names"
            )

    def _records(self, prefix: str) -> Records:
        """The records of the arrays whose names have this prefix, after a check of their shapes and types."""
        images_name, labels_name = f"{prefix}images", f"{prefix}labels"
        images, labels = self._arrays[images_name], self._arrays[labels_name]
        if images.dtype != np.uint8 or images.ndim not in (3, 4):
            raise self._content_error(
                f"{images_name} is {images.dtype} {images.shape}; scale pixels to 0..255 and round them"
            )
        if images.ndim == 3:
            images = images[:, None]
        elif images.shape[-1] in (1, 3):
            images = images.transpose(0, 3, 1, 2)
        elif images.shape[1] not in (1, 3):
            raise self._content_error(f"{images_name} has shape {images.shape}, without an axis of 1 or 3 channels")
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or len(labels) != len(images):
            raise self._content_error(
                f"{labels_name} is {labels.dtype} {labels.shape}; give one integer for each of the {len(images)} images"
            )
        if len(labels) and int(labels.min()) < 0:
            raise self._content_error(f"{labels_name} has negative labels; count classes from 0")
        pixels, classes = torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.astype(np.int64))
        if (ids := self._arrays.get(f"{prefix}ids")) is None:
            return Records(pixels, classes)
        if ids.shape != labels.shape or not np.issubdtype(ids.dtype, np.integer):
            raise self._content_error(
                f"{prefix}ids is {ids.dtype} {ids.shape}; give one integer for each of the {len(images)} images"
            )
        repeated, outside = len(ids) - len(np.unique(ids)), int(((ids < 0) | (ids > LARGEST_ID)).sum())
        if repeated or outside:  # the message has no id, which may be that of a person
            raise self._content_error(
                f"{prefix}ids has {repeated} repeated ids and {outside} outside 0..{LARGEST_ID}; number the records "
                f"once, from 0 to at most {LARGEST_ID}, and keep these numbers"
            )
        return Records(pixels, classes, ids=torch.from_numpy(ids.astype(np.int64)), keep_ids=RELATIONS)

    def _content_error(self, problem: str) -> ValueError:
        """The error for a file with other arrays than expected; the caller raises it."""
        return ValueError(
            f"dataset {self.name!r}: expected {Path(self.path).absolute()} to hold train_images, train_labels, "
            f"test_images and test_labels, or images and labels (uint8 [n, h, w], [n, h, w, c] or [n, c, h, w] with "
            f"c = 1 or 3; integers [n] from 0): {problem}."
        )

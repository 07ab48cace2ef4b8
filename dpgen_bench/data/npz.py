"""A user's own arrays: one NumPy file of images and labels, in MedMNIST's form or without a split."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from dpgen_bench.data.records import SPLITS, DatasetSpec, MissingData, Records, Split, check_split, hash_rank

PREPROCESSING = 1
KINDS = ("images", "labels")


@dataclass(frozen=True)
class Npz(DatasetSpec):
    """Images and labels of one `.npz` file, as `numpy.savez` or `numpy.savez_compressed` writes it.

    The file holds `train_images`, `train_labels`, `test_images` and `test_labels` (MedMNIST's form; its `val_` arrays
    are not used), or `images` and `labels` alone. Then an image is for testing if the SHA-256 of its pixels, read as a
    number in [0, 1), is under `test_fraction`: adding or removing one image moves no other one, and equal images are in
    the same split. Images are uint8 [n, h, w], [n, h, w, c] or [n, c, h, w] with c = 1 or 3; labels are integers from
    0, [n] or [n, 1]. An array `class_names` of text names the classes; otherwise their names are their numbers. The
    number of classes and of images count as public. The file is read when its shape or its classes are asked for.

    Args:
        path: the file.
        test_fraction: expected share of the test split, in (0, 1); of no effect where the file has a split.
    """

    path: str
    name: str = "npz"
    test_fraction: float = 0.2
    how: ClassVar[str] = "Write the arrays images and labels with numpy.savez and set dataset.path=FILE.npz."

    def __post_init__(self) -> None:
        if not 0.0 < self.test_fraction < 1.0:
            raise ValueError(f"expected dataset.test_fraction in (0, 1), got {self.test_fraction!r}.")

    @property
    def root(self) -> str:  # type: ignore[override]
        return self.path

    @property
    def image_shape(self) -> tuple[int, int, int]:
        channels, height, width = self._splits["train"].images.shape[1:]
        return (channels, height, width)

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        number = 1 + max(int(records.labels.max()) for records in self._splits.values())
        if "class_names" not in self._arrays:
            return tuple(str(label) for label in range(number))
        names = tuple(map(str, self._arrays["class_names"].tolist()))
        if len(names) < number:
            raise self._wrong(f"class_names has {len(names)} names, but labels go up to {number - 1}")
        return names

    def load(self, split: Split) -> Records:
        check_split(split)
        return self._splits[split]

    def identity(self) -> dict[str, Any]:
        """As for every spec, with `content`: a hash of the images and labels of both splits."""
        content = "".join(self._splits[split].content_hash for split in SPLITS)
        return {
            "name": self.name,
            "content": hashlib.sha256(content.encode()).hexdigest(),
            "image_shape": list(self.image_shape),
            "preprocessing": PREPROCESSING,
        }

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        path = Path(self.path)
        if not path.is_file():
            raise MissingData(f"dataset {self.name!r}: {path.absolute()} is no file. {self.how}")
        if not zipfile.is_zipfile(path):
            raise self.damaged(path, "it is no archive of numpy.savez (or is cut short)")
        try:
            with np.load(path, allow_pickle=False) as file:
                names = ("class_names", "images", "labels", *(f"{s}_{what}" for s in SPLITS for what in KINDS))
                return {name: file[name] for name in names if name in file.files}
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise self.damaged(path, str(error)) from error
        except ValueError as error:
            if "pickle" not in str(error):
                raise
            raise self._wrong("an array holds Python objects; save numbers, and class_names as text") from error

    @cached_property
    def _splits(self) -> dict[Split, Records]:
        arrays, splits = self._arrays, dict[Split, Records]()
        expected = [f"{split}_{what}" for split in SPLITS for what in KINDS]
        if all(name in arrays for name in expected):
            splits = {split: self._records(f"{split}_images", f"{split}_labels") for split in SPLITS}
        elif "images" in arrays and "labels" in arrays:
            everything = self._records("images", "labels")
            ranks = [hash_rank(hashlib.sha256(image.tobytes()).hexdigest()) for image in everything.images.numpy()]
            test = torch.tensor([rank < self.test_fraction for rank in ranks], dtype=torch.bool)
            splits["train"] = Records(everything.images[~test], everything.labels[~test])
            splits["test"] = Records(everything.images[test], everything.labels[test])
        else:
            raise self._wrong(f"it holds {sorted(arrays) or 'none of these arrays'}")
        for split, records in splits.items():
            if len(records) == 0:
                raise self._wrong(f"the {split} split has no image")
        if splits["train"].images.shape[1:] != splits["test"].images.shape[1:]:
            shapes = [tuple(splits[split].images.shape[1:]) for split in SPLITS]
            raise self._wrong(f"images of the splits have different shapes, {shapes[0]} and {shapes[1]}")
        return splits

    def _records(self, images_name: str, labels_name: str) -> Records:
        images, labels = self._arrays[images_name], self._arrays[labels_name]
        if images.dtype != np.uint8 or images.ndim not in (3, 4):
            raise self._wrong(f"{images_name} is {images.dtype} {images.shape}; scale pixels to 0..255 and round them")
        if images.ndim == 3:
            images = images[:, None]
        elif images.shape[-1] in (1, 3):
            images = images.transpose(0, 3, 1, 2)
        elif images.shape[1] not in (1, 3):
            raise self._wrong(f"{images_name} has shape {images.shape}, without an axis of 1 or 3 channels")
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or len(labels) != len(images):
            raise self._wrong(
                f"{labels_name} is {labels.dtype} {labels.shape}; give one integer for each of the {len(images)} images"
            )
        if len(labels) and int(labels.min()) < 0:
            raise self._wrong(f"{labels_name} has negative labels; count classes from 0")
        pixels = torch.from_numpy(np.ascontiguousarray(images))
        return Records(pixels, torch.from_numpy(labels.astype(np.int64)))

    def _wrong(self, found: str) -> ValueError:
        return ValueError(
            f"dataset {self.name!r}: expected {Path(self.path).absolute()} to hold train_images, train_labels, "
            f"test_images and test_labels, or images and labels (uint8 [n, h, w], [n, h, w, c] or [n, c, h, w] with "
            f"c = 1 or 3; integers [n] from 0): {found}."
        )

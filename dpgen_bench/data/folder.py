"""`ImageFolder`: a dataset of image files, with one folder for each class."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from dpgen_bench.data.images import BadImage, Crop, check_channels, check_crop, count_channels, read_images, unreadable
from dpgen_bench.data.records import (
    SPLITS,
    MissingData,
    OwnData,
    Records,
    Split,
    check_split,
    check_test_fraction,
    hash_rank,
)

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
PREPROCESSING = 2


@dataclass(frozen=True)
class ImageFolder(OwnData):
    """Images below `path`. The classes are the names of their folders in sorted order.

    There are two layouts: `path`/train/CLASS/... with `path`/test/CLASS/..., or only `path`/CLASS/.... In the second
    layout an image is in the test split if the SHA-256 of its path below `path`, as a number in [0, 1), is below
    `test_fraction`: adding or removing a file does not move other files between the splits. Class names, the
    number of images and the number of channels count as public: set `channels` if one image must not decide for all.

    If no two images (with train/ and test/, no two training images) have the same file name without their folders, ids
    of records are the places of the names in their sorted order, so that an image which is exchanged for one of another
    class changes no other id. Otherwise, ids are places in the order of paths, which such an exchange changes.

    Args:
        path: The folder.
        image_size: Side of the square images, in pixels.
        channels: 1 (grey) or 3 (RGB). By default it is 1 if red, green and blue are equal in every pixel of all images,
            those of both splits, else 3.
        crop: "center" crops the central square before resizing, "none" resizes the whole image.
        test_fraction: Expected share of the test split, in (0, 1). It has no effect with train/ and test/.

    Raises:
        ValueError: For a setting outside its range.
    """

    path: str
    image_size: int
    name: str = "image_folder"
    channels: Literal[1, 3] | None = None
    crop: Crop = "center"
    test_fraction: float = 0.2
    how: ClassVar[str] = "Put your images into one folder for each class and set dataset.path=FOLDER."

    def __post_init__(self) -> None:
        check_crop(self.crop)
        check_channels(self.channels)
        if self.image_size < 1:
            raise ValueError(f"expected dataset.image_size of at least 1 pixel, got {self.image_size!r}.")
        check_test_fraction(self.test_fraction)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (self._channels, self.image_size, self.image_size)

    @cached_property
    def _channels(self) -> int:
        if self.channels is not None:
            return self.channels
        with self._hint_at_check():
            return count_channels([path for split in SPLITS for path in self._files[split]])

    @property
    def class_names(self) -> tuple[str, ...]:
        base = self._base
        return tuple(_subfolders(base / "train" if self._split_by_folders else base))

    def load(self, split: Split) -> Records:
        check_split(split)
        paths = self._files[split]
        labels = [self.class_names.index(self._class_of(path)) for path in paths]
        with self._hint_at_check():
            images = read_images(paths, self.image_size, self._channels, self.crop)
        records = Records(images, torch.tensor(labels, dtype=torch.int64), keep_ids=())
        numbered = paths if self._split_by_folders else self._files["train"] + self._files["test"]
        places = {name: place for place, name in enumerate(sorted(path.name for path in numbered))}
        if len(places) < len(numbered):
            return records
        return replace(records, ids=torch.tensor([places[path.name] for path in paths]), keep_ids=("replace_one",))

    def identity(self) -> dict[str, Any]:
        """See `DatasetSpec.identity`; `content` is a hash of each image's path below `path` and its bytes."""
        digest = hashlib.sha256()
        for split, paths in sorted(self._files.items()):
            for path in paths:
                digest.update(f"{split}\n{path.relative_to(self._base).as_posix()}\n".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        return {
            "name": self.name,
            "content": digest.hexdigest(),
            "image_shape": list(self.image_shape),
            "crop": self.crop,
            "test_fraction": None if self._split_by_folders else self.test_fraction,
            "preprocessing": PREPROCESSING,
        }

    def problems(self) -> list[str]:
        """See `DatasetSpec.problems`: what is wrong with the folders, and every image file that cannot be read."""
        found = []
        try:
            paths = [path for split in SPLITS for path in self._files[split]]
        except MissingData as error:
            return [str(error)]
        except ValueError as error:
            found, paths = [str(error)], _images(self._base)  # also of train/ and test/, at any depth
        return found + [f"dataset {self.name!r}: {error}" for error in unreadable(paths)]

    @contextmanager
    def _hint_at_check(self) -> Iterator[None]:
        """A context in which the error for an unreadable image names the command that finds all of them."""
        try:
            yield
        except BadImage as error:
            command = f"dpgen fetch --check dataset=image_folder dataset.path={shlex.quote(str(self._base.absolute()))}"
            raise ValueError(
                f"dataset {self.name!r}: {error} Repair or remove it. All unreadable files are listed by\n    {command}"
            ) from error

    @property
    def _base(self) -> Path:
        base = Path(self.path)
        if not base.is_dir():
            raise MissingData(f"dataset {self.name!r}: expected a folder at {base.absolute()}, found none. {self.how}")
        return base

    @cached_property
    def _split_by_folders(self) -> bool:
        """Whether there are folders train/ and test/.

        Raises:
            ValueError: If there is only one of them.
        """
        present = [split for split in ("train", "test") if (self._base / split).is_dir()]
        if len(present) == 1:
            raise ValueError(
                f"dataset {self.name!r}: expected both or none of the folders train/ and test/ in "
                f"{self._base.absolute()}, got {present[0]!r} without its counterpart. Make both, or class folders "
                "only."
            )
        return bool(present)

    def _class_of(self, path: Path) -> str:
        return path.relative_to(self._base).parts[1 if self._split_by_folders else 0]

    @cached_property
    def _files(self) -> dict[Split, list[Path]]:
        """The image files of each split, sorted by path.

        Raises:
            ValueError: If a class or a split has no image, or the test split has a class that is not in train/.
        """
        base, files = self._base, {}
        if self._split_by_folders:
            extra = set(_subfolders(base / "test")) - set(self.class_names)
            if extra:
                raise ValueError(
                    f"dataset {self.name!r}: {(base / 'test').absolute()} has classes that are not in train/: "
                    f"{', '.join(sorted(extra))}. Add training images of these classes, or remove them from test/."
                )
            files = {split: _images(base / split) for split in ("train", "test")}
        else:
            paths = _images(base)
            ranks = [hash_rank(path.relative_to(base).as_posix()) for path in paths]
            pairs = list(zip(paths, ranks, strict=True))
            files = {
                "train": [path for path, rank in pairs if rank >= self.test_fraction],
                "test": [path for path, rank in pairs if rank < self.test_fraction],
            }
        self._expect_images(files)
        return files

    def _expect_images(self, files: dict[Split, list[Path]]) -> None:
        """Raise ValueError if a class or a split has no image."""
        base = self._base
        nonempty = {self._class_of(path) for paths in files.values() for path in paths}
        empty = [name for name in self.class_names if name not in nonempty]
        if empty or not nonempty:
            where = f" in the class folder {empty[0]!r}" if empty else ""
            raise ValueError(
                f"dataset {self.name!r}: expected one folder of images for each class below {base.absolute()}, found "
                f"no image{where} (file types: {' '.join(sorted(SUFFIXES))})."
            )
        for split, paths in files.items():
            if not paths:
                raise ValueError(
                    f"dataset {self.name!r}: expected images in both splits, got none in the {split} split of "
                    f"{base.absolute()}. Add images, make folders train/ and test/, or change dataset.test_fraction."
                )


def _subfolders(folder: Path) -> list[str]:
    """Names of the folders in `folder`, sorted, without hidden ones."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    """Image files inside the class folders of `folder`, at any depth, sorted by path, without hidden ones."""
    paths = [
        path
        for name in _subfolders(folder)
        for path in (folder / name).rglob("*")
        if path.suffix.lower() in SUFFIXES and path.is_file() and not path.name.startswith(".")
    ]
    return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())

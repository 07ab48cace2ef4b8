"""`Torchvision`: any dataset of torchvision that has images with one class each, by the name of its class there.

torchvision's classes differ in how they name their splits, in the size of their images, and in what they call their
classes. This module hides these differences. `PREPROCESSING` is a part of the run id: raise it whenever a change gives
other pixels or labels.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image

from dpgen_bench.data.images import Crop, check_channels, check_crop, is_grey, prepare
from dpgen_bench.data.records import (
    SPLITS,
    DatasetSpec,
    MissingData,
    Records,
    Split,
    check_split,
    check_test_fraction,
    content_hash,
    numbered,
    split_by_pixels,
)
from dpgen_bench.utils.validation import closest

PREPROCESSING = 1

# Classes of torchvision that have no single class for each image, or none that a test set shares. Classes without the
# argument `target_transform` (optical flow, stereo, video) or with other required arguments are left out by themselves.
NO_CLASSIFICATION = frozenset(
    {
        *("CelebA", "Cityscapes", "CLEVRClassification", "ImageFolder", "INaturalist", "Kitti", "LFWPairs", "LSUN"),
        *("LSUNClass", "Omniglot", "SBU", "VisionDataset", "VOCDetection", "VOCSegmentation", "WIDERFace"),
    }
)
# What the argument `split` of a class is for training and testing, where it is not "train" and "test".
SPLIT_NAMES = {
    "ImageNet": ("train", "val"),
    "Imagenette": ("train", "val"),
    "OxfordIIITPet": ("trainval", "test"),
    "Places365": ("train-standard", "val"),
}


@dataclass(frozen=True)
class Torchvision(DatasetSpec):
    """A dataset of torchvision, such as KMNIST, QMNIST, EMNIST, USPS, SVHN, CIFAR100, STL10, GTSRB or EuroSAT.

    The files are read from `root`/torchvision/`name`, where `dpgen fetch` puts them, or else from `root`, as
    torchvision itself does it; nothing is downloaded by a run. The splits are those of torchvision's class. If it has
    none (EuroSAT, SEMEION, Caltech101), an image is in the test split if the SHA-256 of its pixels, as a number in
    [0, 1), is below `test_fraction`. The class names, the shape of the images and their number count as public.
    EMNIST's images, which torchvision gives transposed, are upright here, as with `dataset=emnist`.

    Args:
        name: The name of a class in `torchvision.datasets`.
        split: Which part of a dataset of several parts, such as EMNIST: balanced, letters, ...
        image_size: Side of the square images, in pixels. By default the images keep their own size, which must be one.
        channels: 1 (grey) or 3 (RGB). By default it is 1 if red, green and blue are equal in every pixel of all images,
            those of both splits, else 3.
        crop: With `image_size`: "center" crops the central square before resizing, "none" resizes the whole image.
        test_fraction: Expected share of the test split, in (0, 1), if torchvision has none.

    Raises:
        ValueError: For a name that torchvision does not have, and for a setting outside its range.
    """

    name: str
    root: str = "data"
    split: str | None = None
    image_size: int | None = None
    channels: Literal[1, 3] | None = None
    crop: Crop = "center"
    test_fraction: float = 0.2
    how: ClassVar[str] = "by hand: into the layout that torchvision's class of this name reads"

    def __post_init__(self) -> None:
        check_crop(self.crop)
        check_channels(self.channels)
        if self.image_size is not None and self.image_size < 1:
            raise ValueError(f"expected dataset.image_size of at least 1 pixel, or null, got {self.image_size!r}.")
        check_test_fraction(self.test_fraction)
        if (self.split is not None) != self._has_parts:
            raise ValueError(
                f"expected dataset.split to name a part of {self.name}, got none; set it, such as "
                "dataset.split=balanced for EMNIST."
                if self._has_parts
                else f"expected no dataset.split for {self.name}, which has no parts (training and testing are chosen "
                f"by the bench), got {self.split!r}; leave it out."
            )

    @property
    def folder(self) -> str:  # type: ignore[override]
        return f"torchvision/{self.name}"

    @property
    def fetch_command(self) -> str:
        part = f" dataset.split={self.split}" if self.split else ""
        root = shlex.quote(str(Path(self.root).absolute()))
        return f"dpgen fetch dataset=torchvision dataset.name={self.name}{part} data_root={root}"

    @property
    def image_shape(self) -> tuple[int, int, int]:
        channels, height, width = self._splits["train"].images.shape[1:]
        return (channels, height, width)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self._read[1]

    def load(self, split: Split) -> Records:
        check_split(split)
        return self._splits[split]

    def identity(self) -> dict[str, Any]:
        """See `DatasetSpec.identity`; `content` is a hash of the prepared images and the labels of both splits."""
        return {
            "name": f"torchvision.{self.name}",
            "split": self.split,
            "content": content_hash(self._splits),
            "image_shape": list(self.image_shape),
            "crop": None if self.image_size is None else self.crop,
            "test_fraction": self.test_fraction if len(self._arguments) == 1 else None,
            "preprocessing": PREPROCESSING,
        }

    def download(self, into: Path) -> None:
        place = into / self.folder
        place.mkdir(parents=True)
        if not self._can_download:
            raise ValueError(f"torchvision has no download of {self.name}; see its documentation for where to get it")
        for arguments in self._arguments.values():
            self._reader(str(place), download=True, **arguments)

    @property
    def _splits(self) -> dict[Split, Records]:
        return self._read[0]

    @cached_property
    def _reader(self) -> type:
        """torchvision's class.

        Raises:
            ValueError: If it has no class of images with labels of this name.
        """
        from torchvision import datasets

        readers = {name: getattr(datasets, name) for name in datasets.__all__}
        names = sorted(name for name, reader in readers.items() if _has_labelled_images(name, reader))
        if self.name not in names:
            close = closest(self.name.lower(), [name.lower() for name in names])
            meant = "".join(f" (did you mean {name!r}?)" for name in names if name.lower() == close)
            raise ValueError(
                f"expected dataset.name to be a dataset of torchvision with one class for each image, got {self.name!r}"
                f"{meant}; choose one of {', '.join(names)}."
            )
        return readers[self.name]

    @property
    def _can_download(self) -> bool:
        return "download" in _parameters(self._reader)

    @property
    def _has_parts(self) -> bool:
        """Whether both `train` and `split` are arguments of torchvision's class, so that `split` is something else."""
        return {"train", "split"} <= _parameters(self._reader).keys()

    @property
    def _arguments(self) -> dict[str, dict[str, Any]]:
        """The arguments of torchvision's class for each split; for "all", if the class has no splits."""
        parameters = _parameters(self._reader)
        if "train" in parameters:
            part = {} if self.split is None else {"split": self.split}
            return {split: {"train": split == "train", **part} for split in SPLITS}
        if "split" in parameters:
            return {split: {"split": SPLIT_NAMES.get(self.name, SPLITS)[split == "test"]} for split in SPLITS}
        return {"all": {}}

    @cached_property
    def _read(self) -> tuple[dict[Split, Records], tuple[str, ...]]:
        """The records of both splits, and the names of the classes."""
        place = Path(self.root) / self.folder
        place = place if place.is_dir() else Path(self.root)
        parts: dict[str, tuple[list[np.ndarray], list[int]]] = {}
        names: tuple[str, ...] = ()
        for split, arguments in self._arguments.items():
            own = self._open(place, arguments)
            parts[split] = self._images_and_labels(own, place)
            names = names or _class_names(own)
        self._expect_one_size(parts.values(), place)
        # An image without a colour has one channel here, of which red, green and blue are copies.
        channels = self.channels or max(len(image) for images, _ in parts.values() for image in images)
        first = int(names[:1] == ("N/A",))  # EMNIST's letters are numbered from 1
        records = {}
        for split, (images, labels) in parts.items():
            stacked = np.stack([np.broadcast_to(image, (channels, *image.shape[1:])) for image in images])
            records[split] = Records(torch.from_numpy(stacked), torch.tensor(labels, dtype=torch.int64) - first)
        classes = 1 + max(int(part.labels.max()) for part in records.values())
        names = names[first:] if len(names) - first >= classes else tuple(map(str, range(classes)))
        if "all" in records:
            return split_by_pixels(numbered(records["all"]), self.test_fraction), names
        return {split: records[split] for split in SPLITS}, names

    def _expect_one_size(self, parts: Iterable[tuple[list[np.ndarray], list[int]]], place: Path) -> None:
        """Raise ValueError if a split has no image, or if the images differ in size."""
        every = [images for images, _ in parts]
        if not all(every):
            raise self.damaged_error(place, "a split has no image")
        sizes = {image.shape[1:] for images in every for image in images}
        if len(sizes) > 1:
            raise ValueError(
                f"dataset {self.name!r}: expected images of one size, got sizes from {min(sizes)} to {max(sizes)} "
                "(height, width); set dataset.image_size, such as dataset.image_size=32."
            )

    def _open(self, place: Path, arguments: Mapping[str, Any]) -> Any:
        """torchvision's dataset, which checks that its files exist, and for some datasets their checksums.

        Raises:
            MissingData: If torchvision does not find the files.
            ValueError: If it cannot read them.
        """
        no_download = {"download": False} if self._can_download else {}
        try:
            return self._reader(str(place), **no_download, **arguments)
        except Exception as error:  # torchvision's readers raise all kinds of errors for corrupt files
            if "argument split" in str(error):
                raise ValueError(f"dataset.split: {error}") from error
            if isinstance(error, FileNotFoundError) or re.search("not (found|present|exist)", str(error)):
                raise self._missing(place, error) from error
            raise self.damaged_error(place, f"torchvision cannot read it ({type(error).__name__})") from error

    def _missing(self, place: Path, error: Exception) -> MissingData:
        """The error for files that torchvision does not find, or whose checksums differ; the caller raises it."""
        problem = str(error).split(" You can use")[0].rstrip(".")  # without torchvision's own advice
        command = f"with\n    {self.fetch_command}\n" if self._can_download else f"{self.how}, "
        return MissingData(
            f"dataset {self.name!r}: torchvision finds no complete files in {place.absolute()} ({problem}). Get the "
            f"data {command}or set the folder that holds it with data_root=FOLDER or the variable DPGEN_DATA."
        )

    def _images_and_labels(self, own: Any, place: Path) -> tuple[list[np.ndarray], list[int]]:
        """The prepared images, each uint8 [1 or 3, h, w], and the labels of a dataset of torchvision.

        Raises:
            ValueError: If it has something other than images with class numbers, or a file cannot be read.
        """
        images, labels = [], []
        for i in range(len(own)):
            try:
                image, label = own[i]
            except Exception as error:  # as in `_open`
                raise self.damaged_error(
                    place, f"torchvision cannot read image {i} ({type(error).__name__})"
                ) from error
            if not isinstance(image, Image.Image) or not isinstance(label, int | np.integer) or label < 0:
                raise ValueError(
                    f"dataset {self.name!r}: expected each record of torchvision's class to be an image and a class "
                    f"number, got {type(image).__name__} and {type(label).__name__}; write a class for it, see "
                    "docs/extend/dataset.md."
                )
            if self.name == "EMNIST":
                image = image.transpose(Image.Transpose.TRANSPOSE)
            channels = self.channels or (1 if is_grey(image) else 3)
            images.append(prepare(image, self.image_size, channels, self.crop))
            labels.append(int(label))
        return images, labels


def _parameters(reader: type) -> dict[str, inspect.Parameter]:
    """The arguments of a class; where it passes others on (`**kwargs`), also those of its base classes."""
    found: dict[str, inspect.Parameter] = {}
    for base in reader.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        own = inspect.signature(vars(base)["__init__"]).parameters
        found = {**{name: each for name, each in own.items() if name != "self"}, **found}
        if not any(each.kind is each.VAR_KEYWORD for each in own.values()):
            break
    return found


def _has_labelled_images(name: str, reader: Any) -> bool:
    """Whether the members of torchvision's class are images with a class, as far as its arguments say it."""
    from torchvision.datasets import VisionDataset

    if name in NO_CLASSIFICATION or not (isinstance(reader, type) and issubclass(reader, VisionDataset)):
        return False
    own = {key: each for key, each in _parameters(reader).items() if each.kind is each.POSITIONAL_OR_KEYWORD}
    required = {key for key, each in own.items() if each.default is each.empty}
    return "root" in required and required <= {"root", "split"} and "target_transform" in own


def _class_names(own: Any) -> tuple[str, ...]:
    """The names of the classes of a dataset of torchvision; () if it has none."""
    names = getattr(own, "classes", None) or getattr(own, "categories", None) or ()
    return tuple(name if isinstance(name, str) else str(name[0]) for name in names)  # ImageNet's are synonyms

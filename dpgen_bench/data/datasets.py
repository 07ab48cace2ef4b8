"""The datasets of the papers, and scikit-learn's `Digits`, which needs no download.

Each class is the `_target_` of a yaml in conf/dataset. torchvision is imported inside functions, because its import is
as slow as that of torch, and commands that list runs or tables need the specs alone. `PREPROCESSING` enters the run id:
raise it whenever a change gives other pixels.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.data.images import BadImage, Crop, check_crop, read_images
from dpgen_bench.data.records import DatasetSpec, Records, Split, check_split, hash_rank

PREPROCESSING = 1


def enlarge_8_to_28(images: Tensor) -> Tensor:
    """Bilinear enlargement of uint8 [n, 8, 8] with values 0..16 to uint8 [n, 28, 28] with values 0..255.

    The weights are those of torch's `interpolate(..., mode="bilinear", align_corners=False)`, but computed with
    integers: the centre of output pixel i is at (4 i - 5) / 14 in input pixels, so each weight is a multiple of 1/14.
    Pixels therefore do not depend on the processor's rounding. Halves are rounded up (value 8 is 127.5, hence 128).
    """
    weights = torch.zeros(28, 8, dtype=torch.int64)  # in units of 1/14
    for i in range(28):
        position = min(max(4 * i - 5, 0), 7 * 14)
        left, remainder = divmod(position, 14)
        weights[i, left] += 14 - remainder
        weights[i, min(left + 1, 7)] += remainder
    enlarged = weights @ images.long() @ weights.T
    largest = 14 * 14 * 16
    return ((enlarged * 2 * 255 + largest) // (2 * largest)).to(torch.uint8)


def stratified_test_mask(labels: np.ndarray, size: int) -> np.ndarray:
    """Which records (bool [n]) belong to a test set of `size` records with the class proportions of `labels`.

    Each class has its share of `size`, rounded down; the classes with the largest remainders (ties: the lower class
    number first) have one more. Within a class, the records whose index has the smallest SHA-256 are chosen.
    """
    classes, counts = np.unique(labels, return_counts=True)
    quota, remainder = np.divmod(counts * size, len(labels))
    quota[np.argsort(-remainder, kind="stable")[: size - quota.sum()]] += 1
    chosen = np.zeros(len(labels), dtype=bool)
    for label, count in zip(classes, quota, strict=True):
        members = np.flatnonzero(labels == label)
        chosen[sorted(members, key=lambda i: hash_rank(f"digits/{i}"))[:count]] = True
    return chosen


@dataclass(frozen=True)
class Digits(DatasetSpec):
    """scikit-learn's 1,797 scanned digits, enlarged from 8x8 to 28x28: 1,437 for training, 360 for testing.

    The data is part of scikit-learn. `stratified_test_mask` chooses the test records, always the same ones.
    """

    name: str = "digits"
    root: str = "data"
    how: ClassVar[str] = "It comes with scikit-learn."
    test_size: ClassVar[int] = 360

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (1, 28, 28)

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(str(digit) for digit in range(10))

    def load(self, split: Split) -> Records:
        check_split(split)
        from sklearn.datasets import load_digits  # not at the top of the module: it takes half a second

        scans = load_digits()
        keep = stratified_test_mask(scans.target, self.test_size) == (split == "test")
        images = enlarge_8_to_28(torch.from_numpy(scans.images[keep].astype(np.uint8)))
        return Records(images.unsqueeze(1), torch.from_numpy(scans.target[keep].astype(np.int64)))

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "image_shape": list(self.image_shape), "preprocessing": PREPROCESSING}


@dataclass(frozen=True)
class Mnist(DatasetSpec):
    """MNIST: 60,000 training and 10,000 test images, 1x28x28.

    The files are read from `root`/MNIST/raw, torchvision's layout. Their checksums must be those of the four published
    idx files.
    """

    name: str = "mnist"
    root: str = "data"
    folder: ClassVar[str] = "MNIST"
    names: ClassVar[tuple[str, ...]] = tuple(str(digit) for digit in range(10))
    md5: ClassVar[dict[str, str]] = {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    }

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (1, 28, 28)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.names

    def load(self, split: Split) -> Records:
        from torchvision.datasets.mnist import read_image_file, read_label_file

        check_split(split)
        prefix = "train" if split == "train" else "t10k"
        images = read_image_file(str(self._file(f"{prefix}-images-idx3-ubyte")))
        labels = read_label_file(str(self._file(f"{prefix}-labels-idx1-ubyte")))
        return Records(images.unsqueeze(1), labels)

    def _file(self, name: str) -> Path:
        from torchvision.datasets.utils import check_integrity

        path = self.require(Path(self.root) / self.folder / "raw" / name)
        if check_integrity(str(path), self.md5[name]):
            return path
        problem = f"its MD5 checksum is not {self.md5[name]} ({path.stat().st_size} bytes)"
        # The other files, too, so that all can be mended at once.
        others = {path.with_name(other): md5 for other, md5 in self.md5.items() if other != name}
        also = [other.name for other, md5 in others.items() if other.exists() and not check_integrity(str(other), md5)]
        raise self.damaged_error(path, problem + (f", and neither are those of {', '.join(also)}" if also else ""))

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "image_shape": list(self.image_shape), "preprocessing": PREPROCESSING}

    def download(self, into: Path) -> None:
        import torchvision

        getattr(torchvision.datasets, self.folder)(str(into), download=True)


@dataclass(frozen=True)
class FashionMnist(Mnist):
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothes, 1x28x28, read from `root`/FashionMNIST/raw."""

    name: str = "fashion_mnist"
    folder: ClassVar[str] = "FashionMNIST"
    names: ClassVar[tuple[str, ...]] = (
        "t-shirt/top",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    )
    md5: ClassVar[dict[str, str]] = {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    }


@dataclass(frozen=True)
class Cifar10(DatasetSpec):
    """CIFAR-10: 50,000 training and 10,000 test images, 3x32x32, read from `root`/cifar-10-batches-py.

    The files are pickles, which can execute code when they are loaded. Their checksums are therefore compared with
    torchvision's before torchvision reads them.
    """

    name: str = "cifar10"
    root: str = "data"
    folder: ClassVar[str] = "cifar-10-batches-py"

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (3, 32, 32)

    @property
    def class_names(self) -> tuple[str, ...]:
        return ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def load(self, split: Split) -> Records:
        import torchvision
        from torchvision.datasets.utils import check_integrity

        check_split(split)
        reader = torchvision.datasets.CIFAR10
        files = [*reader.train_list, *reader.test_list, (reader.meta["filename"], reader.meta["md5"])]
        for name, md5 in files:
            path = self.require(Path(self.root) / self.folder / name)
            if not check_integrity(str(path), md5):
                raise self.damaged_error(path, f"its MD5 checksum is not {md5} ({path.stat().st_size} bytes)")
        data = reader(self.root, train=split == "train", download=False)
        images = torch.from_numpy(np.ascontiguousarray(data.data.transpose(0, 3, 1, 2)))
        return Records(images, torch.tensor(data.targets, dtype=torch.int64))

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "image_shape": list(self.image_shape), "preprocessing": PREPROCESSING}

    def download(self, into: Path) -> None:
        import torchvision

        torchvision.datasets.CIFAR10(str(into), download=True)


@dataclass(frozen=True)
class CelebaGender(DatasetSpec):
    """CelebA at 3x32x32 (19,962 test images), labelled by its attribute Male (0 female, 1 male).

    The files are read from `root`/celeba, torchvision's layout: img_align_celeba/, list_attr_celeba.txt and
    list_eval_partition.txt. torchvision's own loader needs three more lists.

    Args:
        variant: "train" trains on the official training partition (162,770 images, DP-Sinkhorn), "trainval" also on the
            validation partition (182,637 images together, DPGAN).
        crop: "none" resizes the whole aligned 178x218 image to 32x32, bilinearly with antialiasing, as both papers do.
            "center" first crops the central 178x178, which keeps the proportions and is another dataset.
        subset: Accept lists of another length, for tests on a part of CelebA. A hash of the lists then enters the
            identity, so that such runs are not taken for runs on the whole dataset.
    """

    name: str = "celeba_gender"
    root: str = "data"
    variant: Literal["train", "trainval"] = "train"
    crop: Crop = "none"
    subset: bool = False
    folder: ClassVar[str] = "celeba"
    how: ClassVar[str] = (
        "by hand: img_align_celeba.zip, list_attr_celeba.txt and list_eval_partition.txt from "
        "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html into the folder celeba below data_root, and unpack the zip "
        "there"
    )
    partitions: ClassVar[dict[int, int]] = {0: 162_770, 1: 19_867, 2: 19_962}

    def __post_init__(self) -> None:
        check_crop(self.crop)
        if self.variant not in ("train", "trainval"):
            raise ValueError(f"expected dataset.variant 'train' or 'trainval', got {self.variant!r}.")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (3, 32, 32)

    @property
    def class_names(self) -> tuple[str, ...]:
        return ("female", "male")

    @property
    def _base(self) -> Path:
        return Path(self.root) / self.folder

    def load(self, split: Split) -> Records:
        check_split(split)
        partition_of, is_male = self._read_partitions(), self._read_labels()
        partitions = (2,) if split == "test" else (0,) if self.variant == "train" else (0, 1)
        files = [file for number in partitions for file, own in partition_of.items() if own == number]
        unlabelled = next((file for file in files if file not in is_male), None)
        if unlabelled is not None:
            raise self.damaged_error(self._base / "list_attr_celeba.txt", f"it has no line for {unlabelled}")
        if not files:
            raise self.damaged_error(self._base / "list_eval_partition.txt", f"it has no image of the {split} split")
        folder = self.require(self._base / "img_align_celeba")
        paths = [folder / file for file in files]
        for path in paths:
            self.require(path)
        try:
            images = read_images(paths, size=self.image_shape[1], channels=3, crop=self.crop)
        except BadImage as error:
            raise self.damaged_error(error.path, error.problem) from error
        return Records(images, torch.tensor([is_male[file] for file in files], dtype=torch.int64))

    def _read_partitions(self) -> dict[str, int]:
        """The partition of each image file: 0 training, 1 validation, 2 test."""
        path = self.require(self._base / "list_eval_partition.txt")
        rows = [line.split() for line in path.read_text().splitlines() if line.strip()]
        if not all(len(row) == 2 and row[1] in ("0", "1", "2") for row in rows):
            raise self.damaged_error(path, "expected lines 'FILE 0|1|2'")
        partition_of = {file: int(number) for file, number in rows}
        counts = {number: sum(own == number for own in partition_of.values()) for number in self.partitions}
        if counts != self.partitions and not self.subset:
            raise self.damaged_error(
                path,
                f"expected {self.partitions} images in partitions 0, 1, 2, got {counts} (to use a part of CelebA, set "
                "dataset.subset=true)",
            )
        return partition_of

    def _read_labels(self) -> dict[str, int]:
        """The label of each image file: 1 if its attribute Male is 1, 0 if it is -1.

        Line 1 of the list has the number of images, line 2 the names of the attributes.
        """
        path = self.require(self._base / "list_attr_celeba.txt")
        lines = path.read_text().splitlines()
        names = lines[1].split() if len(lines) > 1 else []
        if "Male" not in names:
            raise self.damaged_error(path, "its second line does not name the attribute Male")
        column = 1 + names.index("Male")
        rows = [line.split() for line in lines[2:] if line.strip()]
        if lines[0].strip() != str(len(rows)):
            raise self.damaged_error(path, f"its first line says {lines[0].strip()!r} images, {len(rows)} lines follow")
        if not all(len(row) == len(names) + 1 and row[column] in ("-1", "1") for row in rows):
            raise self.damaged_error(path, f"expected lines of a file name and {len(names)} values -1 or 1")
        return {row[0]: int(row[column] == "1") for row in rows}

    def identity(self) -> dict[str, Any]:
        identity: dict[str, Any] = {
            "name": self.name,
            "variant": self.variant,
            "crop": self.crop,
            "image_shape": list(self.image_shape),
            "preprocessing": PREPROCESSING,
        }
        if self.subset:
            digest = hashlib.sha256()
            for file in ("list_eval_partition.txt", "list_attr_celeba.txt"):
                digest.update(self.require(self._base / file).read_bytes())
            identity["subset"] = digest.hexdigest()[:16]
        return identity

    def download(self, into: Path) -> None:
        import torchvision

        torchvision.datasets.CelebA(str(into), download=True)
        (into / self.folder / "img_align_celeba.zip").unlink(missing_ok=True)

"""The datasets of the papers, and the two that need no download: `Digits` and (in `folder`) `ImageFolder`.

Each class is the `_target_` of a yaml in conf/dataset. torchvision is imported where it is used, because that takes as
long as importing torch, and listing runs or tables needs the specs alone. `PREPROCESSING` enters the run id: it is
raised whenever the pixels that a spec gives change.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.data.folder import ImageFolder
from dpgen_bench.data.images import BadImage, Crop, check_crop, read_images
from dpgen_bench.data.records import DatasetSpec, MissingData, Records, Split, check_split, hash_rank

__all__ = [
    "CelebaGender",
    "Cifar10",
    "DatasetSpec",
    "Digits",
    "FashionMnist",
    "ImageFolder",
    "MissingData",
    "Mnist",
    "Records",
]

PREPROCESSING = 1


def enlarge_8_to_28(images: Tensor) -> Tensor:
    """Bilinear enlargement of uint8 [n, 8, 8] with values 0..16 to uint8 [n, 28, 28] with values 0..255.

    The weights of torch's `interpolate(..., mode="bilinear", align_corners=False)`, here in whole numbers: pixel i of
    28 lies at (4 i - 5) / 14 of 8, so that each weight is a multiple of 1/14, and no processor's rounding can change
    a pixel (value 8 lies exactly between 127 and 128; halves go up).
    """
    weights = torch.zeros(28, 8, dtype=torch.int64)
    for i in range(28):
        position = min(max(4 * i - 5, 0), 7 * 14)
        left, share = divmod(position, 14)
        weights[i, left] += 14 - share
        weights[i, min(left + 1, 7)] += share
    enlarged = weights @ images.long() @ weights.T
    full = 14 * 14 * 16
    return ((enlarged * 2 * 255 + full) // (2 * full)).to(torch.uint8)


def stratified_test_ids(labels: np.ndarray, size: int) -> np.ndarray:
    """Positions (bool [n]) of a test set of `size` records with every class in proportion.

    Each class gives its share of `size` rounded down, and the classes with the largest remainders (the lower class
    number first) one more; within a class those records whose position has the smallest SHA-256 are taken.
    """
    classes, counts = np.unique(labels, return_counts=True)
    quota, remainder = np.divmod(counts * size, len(labels))
    quota[np.argsort(-remainder, kind="stable")[: size - quota.sum()]] += 1
    chosen = np.zeros(len(labels), dtype=bool)
    for label, take in zip(classes, quota, strict=True):
        members = np.flatnonzero(labels == label)
        chosen[sorted(members, key=lambda i: hash_rank(f"digits/{i}"))[:take]] = True
    return chosen


@dataclass(frozen=True)
class Digits(DatasetSpec):
    """scikit-learn's 1,797 scanned digits, 8x8 enlarged to 28x28: 1,437 for training, 360 for testing.

    Ships with scikit-learn, so it is always there. The split is by `stratified_test_ids`, fixed for good.
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
        from sklearn.datasets import load_digits  # half a second, which the other datasets need not wait for

        scans = load_digits()
        keep = stratified_test_ids(scans.target, self.test_size) == (split == "test")
        images = enlarge_8_to_28(torch.from_numpy(scans.images[keep].astype(np.uint8)))
        return Records(images.unsqueeze(1), torch.from_numpy(scans.target[keep].astype(np.int64)))

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "image_shape": list(self.image_shape), "preprocessing": PREPROCESSING}


@dataclass(frozen=True)
class Mnist(DatasetSpec):
    """MNIST: 60,000 training and 10,000 test images, 1x28x28, as published.

    Read from `root`/MNIST/raw, torchvision's layout. The checksums are those of the four canonical idx files, so a
    mixed-up or shortened file is an error and not another benchmark.
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
        if not check_integrity(str(path), self.md5[name]):
            raise self.damaged(path, f"its MD5 checksum is not {self.md5[name]} ({path.stat().st_size} bytes)")
        return path

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "image_shape": list(self.image_shape), "preprocessing": PREPROCESSING}

    def download(self, into: Path) -> None:
        import torchvision

        getattr(torchvision.datasets, self.folder)(str(into), download=True)


@dataclass(frozen=True)
class FashionMnist(Mnist):
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothes, 1x28x28, below `root`/FashionMNIST/raw."""

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
    """CIFAR-10: 50,000 training and 10,000 test images, 3x32x32, below `root`/cifar-10-batches-py.

    Read by torchvision, after its own checksums: the batches are pickles, which must not be opened unchecked.
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
                raise self.damaged(path, f"its MD5 checksum is not {md5} ({path.stat().st_size} bytes)")
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
    """CelebA at 3x32x32, labelled by its attribute Male (0 female, 1 male).

    `variant="train"` trains on the official training partition (162,770, DP-Sinkhorn); `"trainval"` adds the validation
    partition to it (182,637, DPGAN). Both test on the official test partition (19,962). As both papers do, the aligned
    178x218 image is squashed to 32x32 whole (`crop="none"`, bilinear with antialiasing); `crop="center"` cuts the
    central 178x178 first, which keeps the proportions and gives another dataset.

    Read from `root`/celeba, torchvision's layout: img_align_celeba/, list_attr_celeba.txt and list_eval_partition.txt.
    torchvision's own loader asks for three more lists that are not needed here. `subset=True` accepts lists of another
    length, for trials; the lists' checksum then enters the identity, so that no such run passes for the real one.
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
        partition, male = self._partition(), self._male()
        wanted = (2,) if split == "test" else (0,) if self.variant == "train" else (0, 1)
        files = [file for number in wanted for file, own in partition.items() if own == number]
        unlabelled = next((file for file in files if file not in male), None)
        if unlabelled is not None:
            raise self.damaged(self._base / "list_attr_celeba.txt", f"it has no line for {unlabelled}")
        if not files:
            raise self.damaged(self._base / "list_eval_partition.txt", f"it has no image of the {split} split")
        folder = self.require(self._base / "img_align_celeba")
        paths = [folder / file for file in files]
        for path in paths:
            self.require(path)
        try:
            images = read_images(paths, size=self.image_shape[1], channels=3, crop=self.crop)
        except BadImage as error:
            raise self.damaged(error.path, error.problem) from error
        return Records(images, torch.tensor([male[file] for file in files], dtype=torch.int64))

    def _partition(self) -> dict[str, int]:
        """{image file: 0 train, 1 valid, 2 test}."""
        path = self.require(self._base / "list_eval_partition.txt")
        rows = [line.split() for line in path.read_text().splitlines() if line.strip()]
        if not all(len(row) == 2 and row[1] in ("0", "1", "2") for row in rows):
            raise self.damaged(path, "expected lines 'FILE 0|1|2'")
        partition = {file: int(number) for file, number in rows}
        counts = {number: sum(own == number for own in partition.values()) for number in self.partitions}
        if counts != self.partitions and not self.subset:
            raise self.damaged(
                path,
                f"expected {self.partitions} images in partitions 0, 1, 2, got {counts} (for a trial on a part of "
                "CelebA set dataset.subset=true)",
            )
        return partition

    def _male(self) -> dict[str, int]:
        """{image file: 1 if its attribute Male is 1, 0 if it is -1}. Line 1 is the count, line 2 the names."""
        path = self.require(self._base / "list_attr_celeba.txt")
        lines = path.read_text().splitlines()
        names = lines[1].split() if len(lines) > 1 else []
        if "Male" not in names:
            raise self.damaged(path, "its second line does not name the attribute Male")
        column = 1 + names.index("Male")
        rows = [line.split() for line in lines[2:] if line.strip()]
        if lines[0].strip() != str(len(rows)):
            raise self.damaged(path, f"its first line says {lines[0].strip()!r} images, {len(rows)} lines follow")
        if not all(len(row) == len(names) + 1 and row[column] in ("-1", "1") for row in rows):
            raise self.damaged(path, f"expected lines of a file name and {len(names)} values -1 or 1")
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

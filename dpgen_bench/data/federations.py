"""Datasets whose training records belong to clients: Federated EMNIST by writer, and any dataset split over clients.

`Records.clients` of the training split says which client holds each record; test splits have no clients. EMNIST without
its writers is here, too. `PREPROCESSING` enters the run id: raise it whenever a change gives other pixels, labels or
clients.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch

from dpgen_bench.data import partition
from dpgen_bench.data.datasets import Cifar10, Digits, FashionMnist, Mnist
from dpgen_bench.data.records import DatasetSpec, MissingData, Records, Split, check_split
from dpgen_bench.data.writers import Writers, digest, read_leaf, read_tff, users_of

PREPROCESSING = 1
DIGITS, UPPER, LOWER = "0123456789", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class FederatedEmnist(DatasetSpec):
    """Handwritten digits and letters, 1x28x28, by writer: 3,400 clients, 671,585 training and 77,483 test images.

    Client k is the k-th writer in the order of the id strings. Records of a client keep their order, and both splits
    have records of every writer. Unlike MNIST's, the images are not centred. In the files, 1.0 is the white background
    and 0.0 is ink (TensorFlow Federated's documentation of `emnist.load_data`). Here ink is bright on black as in
    MNIST: pixel = round(255 * (1 - value)).

    Args:
        layout: "tff": TensorFlow Federated's HDF5 files, `root`/fed_emnist/fed_emnist_{train,test}.h5. "leaf": the
            files of LEAF's script, `root`/femnist/{train,test}/*.json, which splits the records in another way.
        classes: 62: digits, upper case and lower case, as published. 36: upper and lower case are one class. 10: digits
            only; other records are dropped, and a writer without digits is a client without records.
        complete: Whether the files must have the numbers above. If false, a part is accepted, and a hash of the files
            enters the identity, so that such runs are not taken for runs on the whole dataset.
    """

    name: str = "federated_emnist"
    root: str = "data"
    layout: Literal["tff", "leaf"] = "tff"
    classes: Literal[62, 36, 10] = 62
    complete: bool = True
    users: ClassVar[int] = 3_400
    examples: ClassVar[dict[str, int]] = {"train": 671_585, "test": 77_483}

    def __post_init__(self) -> None:
        for field, options in (("layout", ("tff", "leaf")), ("classes", (62, 36, 10))):
            if getattr(self, field) not in options:
                raise ValueError(
                    f"expected dataset.{field} {' or '.join(map(repr, options))}, got {getattr(self, field)!r}."
                )

    @property
    def how(self) -> str:  # type: ignore[override]
        if self.layout == "tff":
            return (
                "by hand: unpack https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2 and put "
                "fed_emnist_train.h5 and fed_emnist_test.h5 into the folder fed_emnist below data_root"
            )
        return (
            "by hand: run `preprocess.sh -s niid --sf 1.0 -k 0 -t sample` in data/femnist of "
            "https://github.com/TalwalkarLab/leaf and copy data/train and data/test into the folder femnist below "
            "data_root"
        )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (1, 28, 28)

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple((DIGITS + UPPER + LOWER)[: self.classes])

    @property
    def num_clients(self) -> int:
        return self.users if self.complete else len(users_of(self, self._files("train")))

    def load(self, split: Split) -> Records:
        check_split(split)
        files = self._files(split)
        writers = read_tff(self, files[0]) if self.layout == "tff" else read_leaf(self, files)
        self._check_counts(split, writers)
        images, labels, clients = [], [], []
        for client, user in enumerate(sorted(writers)):
            pixels, classes = writers.pop(user)  # pop frees the images, which would otherwise be in memory twice
            classes = np.where(classes >= 36, classes - 26, classes) if self.classes == 36 else classes
            kept = classes < self.classes
            images.append(pixels[kept])
            labels.append(classes[kept])
            clients.append(np.full(int(kept.sum()), client, dtype=np.int64))
        return Records(
            torch.from_numpy(np.concatenate(images)).unsqueeze(1),
            torch.from_numpy(np.concatenate(labels)),
            torch.from_numpy(np.concatenate(clients)) if split == "train" else None,
        )

    def _files(self, split: Split) -> tuple[Path, ...]:
        """The one HDF5 file of a split, or all its JSON files in the order of their names."""
        if self.layout == "tff":
            return (self.require(Path(self.root) / "fed_emnist" / f"fed_emnist_{split}.h5"),)
        folder = self.require(Path(self.root) / "femnist" / split)
        files = tuple(sorted(folder.glob("*.json")))
        if not files:
            raise self.damaged_error(folder, "it holds no .json file")
        return files

    def _check_counts(self, split: Split, writers: Writers) -> None:
        """Raise ValueError if there is no record, or if `complete` and the numbers are not the published ones."""
        examples = sum(len(labels) for _, labels in writers.values())
        if not examples:
            raise self.damaged_error(self._files(split)[0], "it holds no record")
        if self.complete and (len(writers), examples) != (self.users, self.examples[split]):
            raise self.damaged_error(
                self._files(split)[0],
                f"expected {self.users} users with {self.examples[split]} examples in the {split} split, got "
                f"{len(writers)} with {examples} (to use a part, or other writers chosen by LEAF's script, set "
                "dataset.complete=false)",
            )

    def identity(self) -> dict[str, Any]:
        identity: dict[str, Any] = {
            "name": self.name,
            "layout": self.layout,
            "classes": self.classes,
            "image_shape": list(self.image_shape),
            "preprocessing": PREPROCESSING,
        }
        if not self.complete:
            identity["content"] = digest(self._files("train") + self._files("test"))
        return identity


@dataclass(frozen=True)
class Emnist(DatasetSpec):
    """EMNIST without its writers, 1x28x28, in one of its six published splits.

    The files are read from `root`/EMNIST/raw, torchvision's layout. They hold transposed images, which are transposed
    back, and the labels of "letters" start at 1, which is subtracted.

    Args:
        split: "byclass" (62 classes; 697,932 training and 116,323 test images), "bymerge" (47; the same images),
            "balanced" (47; 112,800 and 18,800), "letters" (26; 124,800 and 20,800), "digits" (10; 240,000 and
            40,000) or "mnist" (10; 60,000 and 10,000).
    """

    name: str = "emnist"
    root: str = "data"
    split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"] = "balanced"
    folder: ClassVar[str] = "EMNIST"
    names: ClassVar[dict[str, str]] = {
        "byclass": DIGITS + UPPER + LOWER,
        "bymerge": DIGITS + UPPER + "abdefghnqrt",
        "balanced": DIGITS + UPPER + "abdefghnqrt",
        "letters": LOWER,
        "digits": DIGITS,
        "mnist": DIGITS,
    }
    sizes: ClassVar[dict[str, dict[str, int]]] = {
        "byclass": {"train": 697_932, "test": 116_323},
        "bymerge": {"train": 697_932, "test": 116_323},
        "balanced": {"train": 112_800, "test": 18_800},
        "letters": {"train": 124_800, "test": 20_800},
        "digits": {"train": 240_000, "test": 40_000},
        "mnist": {"train": 60_000, "test": 10_000},
    }

    def __post_init__(self) -> None:
        if self.split not in self.names:
            raise ValueError(f"expected dataset.split among {', '.join(self.names)}, got {self.split!r}.")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (1, 28, 28)

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.names[self.split])

    def load(self, split: Split) -> Records:
        from torchvision.datasets.mnist import read_image_file, read_label_file

        check_split(split)
        base = Path(self.root) / self.folder / "raw"
        paths = [base / f"emnist-{self.split}-{split}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
        tensors = []
        for path, reader in zip(paths, (read_image_file, read_label_file), strict=True):
            try:
                tensor = reader(str(self.require(path)))
            except (RuntimeError, ValueError, TypeError, AssertionError, KeyError, IndexError) as error:
                raise self.damaged_error(path, f"it is not a complete idx file ({type(error).__name__})") from error
            expected = (self.sizes[self.split][split], 28, 28)[: tensor.ndim]
            if tuple(tensor.shape) != expected:
                raise self.damaged_error(path, f"expected the shape {expected}, got {tuple(tensor.shape)}")
            tensors.append(tensor)
        images, labels = tensors[0], tensors[1] - int(self.split == "letters")
        if int(labels.min()) < 0 or int(labels.max()) >= self.num_classes:
            raise self.damaged_error(paths[1], f"expected labels of {self.num_classes} classes")
        return Records(images.transpose(1, 2).unsqueeze(1).contiguous(), labels)

    def identity(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "split": self.split,
            "image_shape": list(self.image_shape),
            "preprocessing": PREPROCESSING,
        }

    def download(self, into: Path) -> None:
        import torchvision

        torchvision.datasets.EMNIST(str(into), split=self.split, download=True)
        (into / self.folder / "raw" / "gzip.zip").unlink(missing_ok=True)


class Derived(DatasetSpec):
    """A dataset made from another one, `source`, with the same image shape, classes and download."""

    @property
    @abstractmethod
    def source(self) -> DatasetSpec:
        """The dataset whose records are used."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.source.image_shape

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.source.class_names

    @property
    def unaccounted(self) -> str | None:
        return self.source.unaccounted

    @property
    def folder(self) -> str | None:  # type: ignore[override]
        return self.source.folder

    @property
    def how(self) -> str:  # type: ignore[override]
        return self.source.how

    def download(self, into: Path) -> None:
        self.source.download(into)


def with_root(spec: DatasetSpec, root: str) -> DatasetSpec:
    """`spec` with another root; unchanged if `root` is empty, or if `spec` has no such field (an `ImageFolder`)."""
    has_root = any(field.name == "root" for field in fields(cast(Any, spec)))
    return dataclasses.replace(cast(Any, spec), root=root) if root and has_root else spec


BASES: Mapping[str, type[Any]] = {cls.name: cls for cls in (Mnist, FashionMnist, Digits, Cifar10, Emnist)}


def base_of(base: DatasetSpec | str, root: str) -> DatasetSpec:
    """The dataset that `dataset.base` states by itself or by its name in `BASES`, with its files in `root`, if given.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(base, str):
        if base not in BASES:
            raise ValueError(f"expected dataset.base among {', '.join(BASES)}, or a dataset, got {base!r}.")
        base = BASES[base]()
    if not isinstance(base, DatasetSpec):
        raise ValueError(f"expected dataset.base to be a dataset or the name of one, got {base!r}.")
    return with_root(base, root)


@dataclass(frozen=True)
class Clients(Derived):
    """A simulated federation: the training records of any dataset, split over N clients.

    The partition depends on `partition_seed` and the labels alone; see `dpgen_bench.data.partition`. It counts as part
    of the dataset, not as a release. The test split is that of `base`.

    Args:
        base: "mnist", "fashion_mnist", "digits", "cifar10" or "emnist" with its default settings, or another dataset.
        clients: N.
        partition: "iid": each client has the same number of records. "dirichlet": each class is divided by proportions
            drawn from a symmetric Dirichlet(alpha); some clients may have no record. "classes": each client has
            `classes_per_client` classes; with too few clients, the records of some classes are not used.
        alpha: Concentration of "dirichlet".
        classes_per_client: Number of classes of "classes".
        partition_seed: Seed of the partition.
        root: Folder of the base's files; if empty, the root of `base`.

    Raises:
        ValueError: For a setting outside its range.
    """

    base: DatasetSpec | str
    clients: int
    name: str = "clients"
    root: str = ""
    partition: Literal["iid", "dirichlet", "classes"] = "iid"
    alpha: float = 0.5
    classes_per_client: int = 2
    partition_seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", base_of(self.base, self.root))
        object.__setattr__(self, "root", self.source.root)
        if self.partition not in ("iid", "dirichlet", "classes"):
            raise ValueError(f"expected dataset.partition iid, dirichlet or classes, got {self.partition!r}.")
        # Partition an empty list to raise errors of settings at once. It fails if the classes are in missing files.
        with contextlib.suppress(MissingData):
            self._owners(np.empty(0, np.int64))

    @property
    def source(self) -> DatasetSpec:
        return cast(DatasetSpec, self.base)

    @property
    def num_clients(self) -> int:
        return self.clients

    def load(self, split: Split) -> Records:
        records = self.source.load(split)
        if split == "test":
            return records
        if records.clients is not None:
            raise ValueError(
                f"expected a base dataset without clients, got {self.source.name!r}, which has clients already; use it "
                "directly (dataset=NAME)."
            )
        owners = torch.from_numpy(self._owners(records.labels.numpy()))
        used = owners != partition.UNUSED
        if bool(used.all()):
            return replace(records, clients=owners)
        return replace(records.take(used), clients=owners[used])

    def _owners(self, labels: np.ndarray) -> np.ndarray:
        """The client of each record, int64 [n], or `partition.UNUSED`."""
        if self.partition == "iid":
            return partition.iid(labels, self.clients, self.partition_seed)
        if self.partition == "dirichlet":
            return partition.dirichlet(labels, self.clients, self.alpha, self.partition_seed)
        return partition.by_classes(
            labels, self.clients, self.num_classes, self.classes_per_client, self.partition_seed
        )

    def identity(self) -> dict[str, Any]:
        partition_settings: dict[str, dict[str, Any]] = {
            "dirichlet": {"alpha": self.alpha},
            "classes": {"classes_per_client": self.classes_per_client},
        }
        return {
            "name": self.name,
            "base": self.source.identity(),
            "clients": self.clients,
            "partition": self.partition,
            **partition_settings.get(self.partition, {}),
            "partition_seed": self.partition_seed,
            "revision": partition.REVISION,
        }

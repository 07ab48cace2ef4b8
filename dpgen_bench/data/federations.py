"""Datasets whose training records belong to clients: Federated EMNIST by writer, and any other, split.

`Records.clients` of the training split says which client holds each record; test splits know no clients. EMNIST
without its writers is here, too. `PREPROCESSING` enters the run id: it is raised whenever the pixels, labels or
clients that a spec gives change.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
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

    Client k is the k-th writer in the order of the id strings; a client's records keep their order. Both splits have
    records of every writer. Unlike MNIST's, the images are neither cut to size nor centred, and both layouts have 1.0
    for the white background and 0.0 for ink (TensorFlow Federated's documentation of `emnist.load_data`). Here ink is
    bright on black, as MNIST's: pixel = round(255 * (1 - value)).

    Args:
        layout: "tff": TensorFlow Federated's HDF5, `root`/fed_emnist/fed_emnist_{train,test}.h5. "leaf": the files of
            LEAF's own script, `root`/femnist/{train,test}/*.json. Its split is another, and so is what is trained on.
        classes: 62: digits, upper case, lower case, as published. 36: upper and lower case are one class. 10: digits
            alone; other records are left out, and a writer without digits is a client without records.
        complete: demand the numbers above. If false, any part will do, for trials, and a hash of the files enters the
            identity, so that no such run passes for the real one.
    """

    name: str = "federated_emnist"
    root: str = "data"
    layout: Literal["tff", "leaf"] = "tff"
    classes: Literal[62, 36, 10] = 62
    complete: bool = True
    users: ClassVar[int] = 3_400
    examples: ClassVar[dict[str, int]] = {"train": 671_585, "test": 77_483}

    def __post_init__(self) -> None:
        for field, known in (("layout", ("tff", "leaf")), ("classes", (62, 36, 10))):
            if getattr(self, field) not in known:
                raise ValueError(
                    f"expected dataset.{field} {' or '.join(map(repr, known))}, got {getattr(self, field)!r}."
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
        self._expect_all(split, writers)
        images, labels, clients = [], [], []
        for client, user in enumerate(sorted(writers)):
            pixels, own = writers.pop(user)  # so that no image is kept twice
            own = np.where(own >= 36, own - 26, own) if self.classes == 36 else own
            kept = own < self.classes
            images.append(pixels[kept])
            labels.append(own[kept])
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
            raise self.damaged(folder, "it holds no .json file")
        return files

    def _expect_all(self, split: Split, writers: Writers) -> None:
        found = sum(len(labels) for _, labels in writers.values())
        if not found:
            raise self.damaged(self._files(split)[0], "it holds no record")
        if self.complete and (len(writers), found) != (self.users, self.examples[split]):
            raise self.damaged(
                self._files(split)[0],
                f"expected {self.users} users with {self.examples[split]} examples in the {split} split, got "
                f"{len(writers)} with {found} (for a trial on a part, or on LEAF's own choice of writers, set "
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
    """EMNIST without its writers, 1x28x28, in one of its six published splits; upright, as MNIST.

    Read from `root`/EMNIST/raw, torchvision's layout. The files hold each image transposed, which is undone, and the
    labels of "letters" from 1, which are made to count from 0.

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
        read = []
        for path, reader in zip(paths, (read_image_file, read_label_file), strict=True):
            try:
                read.append(reader(str(self.require(path))))
            except (RuntimeError, ValueError, TypeError, AssertionError, KeyError, IndexError) as error:
                raise self.damaged(path, f"it is no whole idx file ({type(error).__name__})") from error
            expected = (self.sizes[self.split][split], 28, 28)[: read[-1].ndim]
            if tuple(read[-1].shape) != expected:
                raise self.damaged(path, f"expected the shape {expected}, got {tuple(read[-1].shape)}")
        images, labels = read[0], read[1] - int(self.split == "letters")
        if int(labels.min()) < 0 or int(labels.max()) >= self.num_classes:
            raise self.damaged(paths[1], f"expected labels of {self.num_classes} classes")
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
    """A dataset made of another one, `part`: its test records, shape and classes, and fetched where it is."""

    @property
    @abstractmethod
    def part(self) -> DatasetSpec: ...

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.part.image_shape

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.part.class_names

    @property
    def unaccounted(self) -> str | None:
        return self.part.unaccounted

    @property
    def folder(self) -> str | None:  # type: ignore[override]
        return self.part.folder

    @property
    def how(self) -> str:  # type: ignore[override]
        return self.part.how

    def download(self, into: Path) -> None:
        self.part.download(into)


def placed(part: DatasetSpec, root: str) -> DatasetSpec:
    """`part`, looked for below `root`; unchanged if that is empty, or if its place is no root (an `ImageFolder`'s)."""
    rooted = root and any(field.name == "root" for field in fields(cast(Any, part)))
    return dataclasses.replace(cast(Any, part), root=root) if rooted else part


BASES: Mapping[str, type[Any]] = {cls.name: cls for cls in (Mnist, FashionMnist, Digits, Cifar10, Emnist)}


@dataclass(frozen=True)
class Clients(Derived):
    """Any dataset, its training records split over N clients; only a simulation of a federation.

    The split is public and drawn from `partition_seed` alone; see `dpgen_bench.data.partition` for its laws. One by
    labels depends on them, which is part of making the data set and no release. The test split is that of `base`.

    Args:
        base: "mnist", "fashion_mnist", "digits", "cifar10" or "emnist" with its default settings, or another dataset.
        clients: N.
        partition: "iid": equally many records each. "dirichlet": each class by proportions drawn from a symmetric
            Dirichlet(alpha); some clients may hold nothing. "classes": `classes_per_client` classes each; if N times
            that is less than the number of classes, the records of some classes are not used.
        alpha: of "dirichlet" only.
        classes_per_client: of "classes" only.
        root: where the base's files are; empty: wherever the base says.
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
        base = self.base
        if isinstance(base, str):
            if base not in BASES:
                raise ValueError(f"expected dataset.base among {', '.join(BASES)}, or a dataset, got {base!r}.")
            base = BASES[base]()
        if not isinstance(base, DatasetSpec):
            raise ValueError(f"expected dataset.base to be a dataset or the name of one, got {base!r}.")
        object.__setattr__(self, "base", placed(base, self.root))
        object.__setattr__(self, "root", self.part.root)
        if self.partition not in ("iid", "dirichlet", "classes"):
            raise ValueError(f"expected dataset.partition iid, dirichlet or classes, got {self.partition!r}.")
        # On no record yet, so that bad settings are said at once, unless the classes are known from files alone.
        with contextlib.suppress(MissingData):
            self._owners(np.empty(0, np.int64))

    @property
    def part(self) -> DatasetSpec:
        return cast(DatasetSpec, self.base)

    @property
    def num_clients(self) -> int:
        return self.clients

    def load(self, split: Split) -> Records:
        records = self.part.load(split)
        if split == "test":
            return records
        if records.clients is not None:
            raise ValueError(f"dataset {self.part.name!r} already has clients; take it as it is (dataset=NAME).")
        owners = torch.from_numpy(self._owners(records.labels.numpy()))
        used = owners != partition.UNUSED
        if bool(used.all()):
            return Records(records.images, records.labels, owners)
        return Records(records.images[used], records.labels[used], owners[used])

    def _owners(self, labels: np.ndarray) -> np.ndarray:
        if self.partition == "iid":
            return partition.iid(labels, self.clients, self.partition_seed)
        if self.partition == "dirichlet":
            return partition.dirichlet(labels, self.clients, self.alpha, self.partition_seed)
        return partition.by_classes(
            labels, self.clients, self.num_classes, self.classes_per_client, self.partition_seed
        )

    def identity(self) -> dict[str, Any]:
        of_partition: dict[str, dict[str, Any]] = {
            "dirichlet": {"alpha": self.alpha},
            "classes": {"classes_per_client": self.classes_per_client},
        }
        return {
            "name": self.name,
            "base": self.part.identity(),
            "clients": self.clients,
            "partition": self.partition,
            **of_partition.get(self.partition, {}),
            "partition_seed": self.partition_seed,
            "revision": partition.REVISION,
        }

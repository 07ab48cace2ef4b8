"""`dataset=torchvision`: files in the formats of several datasets, written by hand, are read through torchvision."""

from __future__ import annotations

import bz2
import inspect
import json
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image
from torchvision import datasets

from dpgen_bench.cli import main
from dpgen_bench.config.building import build_dataset
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.data.federations import Emnist
from dpgen_bench.data.fetch import FetchFailed, fetch
from dpgen_bench.data.from_torchvision import Torchvision, _has_labelled_images
from dpgen_bench.data.records import MissingData

RNG = np.random.default_rng(0)
NAMES = sorted(name for name in datasets.__all__ if _has_labelled_images(name, getattr(datasets, name)))
LABELS = {"train": np.arange(20) % 10, "test": np.arange(10)[::-1].copy()}
GREY = {split: RNG.integers(0, 256, (len(labels), 28, 28), dtype=np.uint8) for split, labels in LABELS.items()}


def idx(path: Path, array: np.ndarray) -> None:
    """The format of MNIST: two zeros, the type (8 uint8, 12 int32), the number of axes, their lengths, the values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {"uint8": 8, "int32": 12}[array.dtype.name]
    header = bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    path.write_bytes(header + array.astype(array.dtype.newbyteorder(">")).tobytes())


def write_kmnist(root: Path) -> Path:
    for split, prefix in (("train", "train"), ("test", "t10k")):
        idx(root / "KMNIST" / "raw" / f"{prefix}-images-idx3-ubyte", GREY[split])
        idx(root / "KMNIST" / "raw" / f"{prefix}-labels-idx1-ubyte", LABELS[split].astype(np.uint8))
    return root


def kmnist(root: Path, **settings) -> Torchvision:
    return Torchvision("KMNIST", root=str(root), **settings)


@pytest.mark.parametrize("place", ["", "torchvision/KMNIST"])
def test_kmnist(tmp_path, place):
    """Its files are found in torchvision's layout, and where `dpgen fetch` puts them."""
    write_kmnist(tmp_path / place)
    spec = kmnist(tmp_path)
    for split in ("train", "test"):
        records = spec.load(split)
        assert torch.equal(records.images[:, 0], torch.from_numpy(GREY[split]))
        assert records.labels.tolist() == LABELS[split].tolist()
    assert spec.image_shape == (1, 28, 28)
    assert spec.class_names == tuple(datasets.KMNIST.classes)
    assert spec.class_names[0] == "o"


def test_qmnist(tmp_path):
    """Its labels have eight columns, the first of which is the class."""
    for split in ("train", "test"):
        columns = RNG.integers(0, 100, (len(LABELS[split]), 8), dtype=np.int32)
        columns[:, 0] = LABELS[split]
        idx(tmp_path / "QMNIST" / "raw" / f"qmnist-{split}-images-idx3-ubyte", GREY[split])
        idx(tmp_path / "QMNIST" / "raw" / f"qmnist-{split}-labels-idx2-int", columns)
    spec = Torchvision("QMNIST", root=str(tmp_path))
    assert spec.load("test").labels.tolist() == LABELS["test"].tolist()
    assert torch.equal(spec.load("train").images[:, 0], torch.from_numpy(GREY["train"]))


@pytest.mark.parametrize("part", ["letters", "digits"])
def test_emnist_is_the_one_of_the_bench(tmp_path, part, monkeypatch):
    """Upright images, and letters numbered from 0, as `dataset=emnist` reads them from the same files."""
    first = int(part == "letters")
    for split in ("train", "test"):
        stem = tmp_path / "EMNIST" / "raw" / f"emnist-{part}-{split}"
        idx(stem.with_name(f"{stem.name}-images-idx3-ubyte"), GREY[split])
        idx(stem.with_name(f"{stem.name}-labels-idx1-ubyte"), (LABELS[split] + first).astype(np.uint8))
    monkeypatch.setattr(Emnist, "sizes", {part: {split: len(labels) for split, labels in LABELS.items()}})
    spec, own = Torchvision("EMNIST", root=str(tmp_path), split=part), Emnist(root=str(tmp_path), split=part)
    for split in ("train", "test"):
        assert spec.load(split).content_hash == own.load(split).content_hash
    assert spec.class_names == own.class_names


def test_usps(tmp_path):
    for split, name in (("train", "usps.bz2"), ("test", "usps.t.bz2")):
        lines = [
            f"{label + 1} " + " ".join(f"{k + 1}:{2 * int(pixel) / 255 - 1:.6f}" for k, pixel in enumerate(image.flat))
            for image, label in zip(GREY[split][:, :16, :16], LABELS[split], strict=True)
        ]
        (tmp_path / name).write_bytes(bz2.compress("\n".join(lines).encode()))
    spec = Torchvision("USPS", root=str(tmp_path))
    assert (spec.image_shape, spec.class_names) == ((1, 16, 16), tuple(map(str, range(10))))
    difference = spec.load("train").images[:, 0].int() - torch.from_numpy(GREY["train"][:, :16, :16]).int()
    assert difference.abs().max() <= 1  # torchvision rounds down


def test_svhn_is_coloured_and_its_splits_are_named(tmp_path, monkeypatch):
    colours = RNG.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    files = {split: [f"http://x/{split}.mat", f"{split}.mat", None] for split in ("train", "test")}
    monkeypatch.setattr(datasets.SVHN, "split_list", files)
    for split in ("train", "test"):
        labels = np.where(LABELS[split] == 0, 10, LABELS[split])  # the files number 0 as 10
        scipy.io.savemat(
            tmp_path / f"{split}.mat", {"X": colours[: len(labels)].transpose(1, 2, 3, 0), "y": labels[:, None]}
        )
    spec = Torchvision("SVHN", root=str(tmp_path))
    assert spec.image_shape == (3, 32, 32)
    assert torch.equal(spec.load("test").images, torch.from_numpy(colours[:10].transpose(0, 3, 1, 2)))
    assert spec.load("test").labels.tolist() == LABELS["test"].tolist()
    grey = Torchvision("SVHN", root=str(tmp_path), channels=1, image_size=8)
    assert grey.image_shape == (1, 8, 8)
    assert grey.identity() != spec.identity()


def test_gtsrb_has_images_of_many_sizes(tmp_path):
    base = tmp_path / "gtsrb"
    lines = ["Filename;ClassId"]
    for split, folder in (("train", base / "GTSRB" / "Training"), ("test", base / "GTSRB" / "Final_Test" / "Images")):
        for i, label in enumerate(LABELS[split]):
            place = folder / f"{label:05d}" if split == "train" else folder
            place.mkdir(parents=True, exist_ok=True)
            pixels = np.full((15 + i, 20, 3), 20 * label, dtype=np.uint8)
            pixels[0, 0] = (0, 0, 9)
            Image.fromarray(pixels).save(place / f"{i:05d}.ppm")
            lines += [f"{i:05d}.ppm;{label}"] * (split == "test")
    (base / "GT-final_test.csv").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"images of one size, got sizes from \(15, 20\) to \(34, 20\).*image_size=32"):
        Torchvision("GTSRB", root=str(tmp_path)).load("train")
    spec = Torchvision("GTSRB", root=str(tmp_path), image_size=8)
    assert spec.image_shape == (3, 8, 8)
    train = spec.load("train")
    assert torch.equal(train.images[:, 0, 7, 7], 20 * train.labels)
    assert spec.load("test").labels.tolist() == LABELS["test"].tolist()


def test_a_dataset_without_a_split_gets_one(tmp_path, monkeypatch):
    """SEMEION: one file of 256 pixels and ten columns for the class; torchvision would download it by default."""
    monkeypatch.setattr(datasets.SEMEION, "md5_checksum", None)
    pixels = RNG.integers(0, 2, (60, 256))
    rows = np.concatenate([pixels, np.eye(10, dtype=int)[np.arange(60) % 10]], axis=1)
    np.savetxt(tmp_path / "semeion.data", rows, fmt="%d")
    spec = Torchvision("SEMEION", root=str(tmp_path))
    train, test = spec.load("train"), spec.load("test")
    assert len(train) + len(test) == 60
    assert 2 <= len(test) <= 25
    assert spec.identity()["test_fraction"] == 0.2
    assert Torchvision("SEMEION", root=str(tmp_path), test_fraction=0.5).identity() != spec.identity()
    both = np.concatenate([train.images.numpy(), test.images.numpy()]).reshape(60, 256) // 255
    assert sorted(map(bytes, both.astype(np.uint8))) == sorted(map(bytes, pixels.astype(np.uint8)))


# All datasets


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_opened_by_its_own_signature_and_never_downloaded(name, tmp_path, monkeypatch):
    def no_network(*_args):
        pytest.fail("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    spec = Torchvision(name, root=str(tmp_path), split="letters" if name == "EMNIST" else None)
    for arguments in spec._arguments.values():
        inspect.signature(getattr(datasets, name)).bind("root", **arguments)
    with pytest.raises(MissingData, match=rf"dataset '{name}': torchvision finds no complete files in {tmp_path}"):
        spec.load("train")
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_the_datasets_that_researchers_use_are_among_them():
    expected = {"KMNIST", "QMNIST", "EMNIST", "USPS", "SVHN", "CIFAR10", "CIFAR100", "STL10", "GTSRB", "EuroSAT"}
    assert expected <= set(NAMES)
    assert not {"CelebA", "FakeData", "ImageFolder", "VOCDetection", "Kitti", "MovingMNIST"} & set(NAMES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "KMINST"}, r"got 'KMINST' \(did you mean 'KMNIST'\?\); choose one of CIFAR10, "),
        ({"name": "kmnist"}, r"got 'kmnist' \(did you mean 'KMNIST'\?\)"),
        ({"name": "FakeData"}, "one class for each image, got 'FakeData'"),
        ({"name": "EMNIST"}, r"dataset\.split to name a part of EMNIST, got none"),
        ({"name": "KMNIST", "split": "train"}, r"no dataset\.split for KMNIST, .* got 'train'; leave it out"),
        ({"name": "SVHN", "split": "extra"}, r"no dataset\.split for SVHN"),
        ({"name": "KMNIST", "channels": 2}, r"expected dataset\.channels 1 \(grey\), 3 \(RGB\) or null"),
        ({"name": "KMNIST", "image_size": 0}, r"dataset\.image_size of at least 1 pixel, or null, got 0"),
        ({"name": "KMNIST", "test_fraction": 1.0}, r"test_fraction in \(0, 1\)"),
        ({"name": "KMNIST", "crop": "left"}, "crop"),
    ],
)
def test_wrong_settings_are_refused_when_the_config_is_read(settings, message):
    with pytest.raises(ValueError, match=message):
        Torchvision(**settings)
    overrides = [f"dataset.{key}={value}" for key, value in settings.items()]
    with pytest.raises(
        ValueError, match=message if "channels" not in settings else "dataset.channels: expected 1 or 3"
    ):
        build_dataset(compose_config(["dataset=torchvision", *overrides]))


def test_an_unknown_part_of_emnist_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"dataset\.split: .*'lettres'.*letters"):
        Torchvision("EMNIST", root=str(tmp_path), split="lettres").load("train")


# Damage


@pytest.mark.parametrize("damage", ["cut", "text", "label"])
def test_damaged_files_are_named_with_the_command_that_fetches_them(tmp_path, damage):
    path = write_kmnist(tmp_path) / "KMNIST" / "raw" / "train-images-idx3-ubyte"
    if damage == "label":
        path = path.with_name("train-labels-idx1-ubyte")
        idx(path, LABELS["train"][:5].astype(np.uint8))
    else:
        path.write_bytes(path.read_bytes()[:-40] if damage == "cut" else b"text")
    with pytest.raises(ValueError, match=r"torchvision cannot read") as caught:
        kmnist(tmp_path).load("train")
    command = f"dpgen fetch dataset=torchvision dataset.name=KMNIST data_root={tmp_path}"
    assert command in str(caught.value)
    shutil.rmtree(tmp_path / "KMNIST")
    with pytest.raises(MissingData) as missing:
        kmnist(tmp_path).load("test")
    assert command in str(missing.value)
    assert "download=True" not in str(missing.value)  # torchvision's advice, which a user of the bench cannot follow


def test_a_class_with_other_members_is_refused(tmp_path, monkeypatch):
    write_kmnist(tmp_path)
    monkeypatch.setattr(datasets.KMNIST, "__getitem__", lambda self, i: (self.data[i], {"boxes": []}))
    with pytest.raises(
        ValueError, match="to be an image and a class number, got Tensor and dict; write a class for it"
    ):
        kmnist(tmp_path).load("train")


# Identity, fetching, commands


def test_the_identity_is_that_of_the_content_and_the_settings(tmp_path):
    write_kmnist(tmp_path / "one")
    write_kmnist(tmp_path / "two" / "torchvision" / "KMNIST")
    identity = json.loads(json.dumps(kmnist(tmp_path / "one").identity()))
    assert kmnist(tmp_path / "two").identity() == identity
    assert kmnist(tmp_path / "one", channels=1).identity() == identity  # what is decided by looking, too
    assert str(tmp_path) not in json.dumps(identity)
    others = [{"channels": 3}, {"image_size": 8}, {"image_size": 8, "crop": "none"}, {"image_size": 28}]
    assert len({json.dumps(kmnist(tmp_path / "one", **other).identity()) for other in [{}, *others]}) == 5
    idx(tmp_path / "one" / "KMNIST" / "raw" / "t10k-labels-idx1-ubyte", LABELS["test"][::-1].astype(np.uint8))
    assert kmnist(tmp_path / "one").identity() != identity


def test_fetch_downloads_into_a_folder_of_its_own(tmp_path, monkeypatch, capsys):
    calls = []

    def download(self) -> None:
        calls.append(self.train)
        if not self._check_exists():
            write_kmnist(Path(self.root))

    monkeypatch.setattr(datasets.KMNIST, "download", download)
    spec = kmnist(tmp_path)
    assert fetch(spec) == tmp_path / "torchvision" / "KMNIST"
    assert calls == [True, False]
    assert len(spec.load("train")) == 20
    # It is complete, so it is not downloaded again.
    assert main(["fetch", "dataset=torchvision", "dataset.name=KMNIST", f"data_root={tmp_path}"]) == 0
    assert capsys.readouterr().out == f"dataset 'KMNIST' is in {tmp_path}/torchvision/KMNIST\n"
    assert calls == [True, False]
    assert [path.name for path in (tmp_path / "torchvision").iterdir()] == ["KMNIST"]


def test_fetch_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def download(self) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(datasets.KMNIST, "download", download)
    with pytest.raises(FetchFailed, match="no route to host"):
        fetch(kmnist(tmp_path))
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    with pytest.raises(FetchFailed, match="torchvision has no download of FER2013"):
        fetch(Torchvision("FER2013", root=str(tmp_path)))


def test_commands_take_the_dataset_by_name(tmp_path, capsys, monkeypatch):
    write_kmnist(tmp_path)
    chosen = ["dataset=torchvision", "dataset.name=KMNIST", f"data_root={tmp_path}"]
    spec = build_spec(compose_config(["method=dp_merf", *chosen]))
    assert spec.training["dataset"]["name"] == "torchvision.KMNIST"
    assert spec.config.dataset.name == "KMNIST"
    assert main(["fetch", "--check", *chosen]) == 0
    assert "dataset 'KMNIST': 20 images for training and 10 for testing, 10 classes, prepared as 1x28x28" in (
        capsys.readouterr().out
    )
    (tmp_path / "KMNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"text")
    assert main(["fetch", "--check", *chosen]) == 1
    assert capsys.readouterr().err.count("torchvision cannot read") == 1
    assert main(["fetch", "--check", "dataset=torchvision", "dataset.name=KMNITS"]) == 2
    assert "did you mean 'KMNIST'?" in capsys.readouterr().err

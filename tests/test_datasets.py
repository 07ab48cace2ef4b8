"""Records, the digits, MNIST, Fashion-MNIST and CIFAR-10: counts, checksums, splits, and how files are fetched."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from sklearn.datasets import load_digits

from dpgen_bench.data.datasets import CelebaGender, Cifar10, Digits, FashionMnist, Mnist, enlarge_8_to_28
from dpgen_bench.data.fetch import FetchFailed, fetch
from dpgen_bench.data.folder import ImageFolder
from dpgen_bench.data.records import MissingData, Records

# Records


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 1, 4, 4).double(), torch.zeros(2, dtype=torch.int64), "uint8 or float32"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), "n, c, h, w"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), "int64 labels"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int32), "int64 labels"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, -1]), "from 0"),
    ],
)
def test_records_refuse_other_types_and_shapes(images, labels, message):
    with pytest.raises(ValueError, match=message):
        Records(images, labels)


def test_images_hash_sees_every_pixel_and_the_shape():
    images = torch.arange(32, dtype=torch.uint8).reshape(2, 1, 4, 4)
    labels = torch.zeros(2, dtype=torch.int64)
    moved = images.clone()
    moved[1, 0, 3, 3] += 1
    hashes = {Records(x, labels[: len(x)]).images_hash for x in (images, moved, images.reshape(2, 1, 2, 8))}
    assert len(hashes) == 3
    assert Records(images.clone(), labels + 1).images_hash == Records(images, labels).images_hash


def test_pixels_have_one_hash_for_all_types():
    whole = torch.arange(32, dtype=torch.uint8).reshape(2, 1, 4, 4)
    labels = torch.tensor([0, 1])
    records = Records(whole, labels)
    assert Records(whole.float(), labels).content_hash == records.content_hash
    assert Records(whole.float() + 0.25, labels).images_hash != records.images_hash
    assert Records(whole.reshape(1, 2, 4, 4), labels[:1]).images_hash != records.images_hash
    assert Records(whole, labels.flip(0)).images_hash == records.images_hash
    assert Records(whole, labels.flip(0)).content_hash != records.content_hash


@pytest.mark.parametrize("pixel", [-0.5, 255.5, float("nan"), float("inf")])
def test_unrounded_pixels_stay_within_range(pixel):
    images = torch.zeros(1, 1, 4, 4)
    images[0, 0, 1, 2] = pixel
    with pytest.raises(ValueError, match=r"within 0\.\.255"):
        Records(images, torch.tensor([0]))


# Digits


def test_digits_counts_and_golden_checksum():
    """Golden: computed once from scikit-learn's digits; a change of split or pixels needs a new PREPROCESSING."""
    train, test = Digits().load("train"), Digits().load("test")
    assert (len(train), len(test)) == (1437, 360)
    assert train.images.shape[1:] == Digits().image_shape
    assert np.bincount(test.labels).tolist() == [36, 37, 35, 37, 36, 36, 36, 36, 35, 36]
    assert int(train.images.min()) == 0
    assert int(train.images.max()) == 255
    assert test.images_hash == "a3557614d140473db2b38522d5656f6c9b11449bb19388dc13447073e3e77146"
    assert train.images_hash == "5e877b1c5651a1bbb9afdfbc36cbdff1b8c9ff260cf7c4c6013f73ead661c8d9"


def test_digits_split_is_a_partition_of_the_scans():
    whole = enlarge_8_to_28(torch.from_numpy(load_digits().images.astype(np.uint8)))
    parts = torch.cat([Digits().load("train").images, Digits().load("test").images]).squeeze(1)
    assert sorted(image.numpy().tobytes() for image in whole) == sorted(image.numpy().tobytes() for image in parts)


def test_enlargement_is_torchs_bilinear():
    generator = torch.Generator().manual_seed(0)
    scans = torch.randint(0, 17, (50, 8, 8), generator=generator, dtype=torch.uint8)
    expected = torch.nn.functional.interpolate(
        scans[:, None].double() * 255 / 16, size=(28, 28), mode="bilinear", align_corners=False
    ).squeeze(1)
    # Half a grey level is the rounding; the rest is float64's own.
    assert (enlarge_8_to_28(scans).double() - expected).abs().max() <= 0.5 + 1e-9


@pytest.mark.parametrize("value", [0, 1, 8, 16])
def test_enlargement_keeps_constant_scans_constant(value):
    enlarged = enlarge_8_to_28(torch.full((1, 8, 8), value, dtype=torch.uint8))
    assert enlarged.unique().tolist() == [int(value * 255 / 16 + 0.5)]


def test_unknown_split_is_refused(tmp_path):
    for spec in (Digits(), Mnist(root=str(tmp_path)), CelebaGender(root=str(tmp_path)), Cifar10(root=str(tmp_path))):
        with pytest.raises(ValueError, match="'train' or 'test', got 'valid'"):
            spec.load("valid")


# MNIST and Fashion-MNIST

MNIST_HISTOGRAMS = {  # counts of the published label files, classes 0..9
    "train": [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    "test": [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
}


@pytest.mark.parametrize("split", ["train", "test"])
def test_mnist_counts(data_root, split):
    if not (data_root / "MNIST").is_dir():
        pytest.skip(f"no MNIST below {data_root}")
    records = Mnist(root=str(data_root)).load(split)
    assert records.images.shape == ({"train": 60_000, "test": 10_000}[split], 1, 28, 28)
    assert np.bincount(records.labels).tolist() == MNIST_HISTOGRAMS[split]


def test_mnist_pixels_are_torchvisions(data_root):
    if not (data_root / "MNIST").is_dir():
        pytest.skip(f"no MNIST below {data_root}")
    loaded = Mnist(root=str(data_root)).load("test")
    reference = torchvision.datasets.MNIST(str(data_root), train=False)
    assert torch.equal(loaded.images[:, 0], reference.data)
    assert torch.equal(loaded.labels, reference.targets)
    # The mean intensity every MNIST tutorial normalises by.
    assert Mnist(root=str(data_root)).load("train").images.double().mean() / 255 == pytest.approx(0.1307, abs=5e-5)


@pytest.mark.parametrize("split", ["train", "test"])
def test_fashion_mnist_is_balanced(data_root, split):
    if not (data_root / "FashionMNIST").is_dir():
        pytest.skip(f"no FashionMNIST below {data_root}")
    records = FashionMnist(root=str(data_root)).load(split)
    assert np.bincount(records.labels).tolist() == [{"train": 6000, "test": 1000}[split]] * 10


def write_idx(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """The four idx files of MNIST's layout, for train and test."""
    folder.mkdir(parents=True, exist_ok=True)
    for prefix in ("train", "t10k"):
        head = b"\x00\x00\x08\x03" + b"".join(size.to_bytes(4, "big") for size in images.shape)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        head = b"\x00\x00\x08\x01" + len(labels).to_bytes(4, "big")
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    """A 20-record MNIST whose checksums `Mnist` is patched to expect: (root, images, labels)."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (20, 28, 28), dtype=np.uint8)
    labels = np.arange(20, dtype=np.uint8) % 10
    raw = tmp_path / "MNIST" / "raw"
    write_idx(raw, images, labels)
    monkeypatch.setattr(Mnist, "md5", {file.name: hashlib.md5(file.read_bytes()).hexdigest() for file in raw.iterdir()})
    return tmp_path, images, labels


def test_mnist_reads_idx_files(small_mnist):
    root, images, labels = small_mnist
    records = Mnist(root=str(root)).load("train")
    assert np.array_equal(records.images[:, 0].numpy(), images)
    assert np.array_equal(records.labels.numpy(), labels)


def test_missing_mnist_names_the_path_and_the_command(tmp_path):
    with pytest.raises(MissingData) as caught:
        Mnist(root=str(tmp_path)).load("train")
    assert str(tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte") in str(caught.value)
    assert f"dpgen fetch dataset=mnist data_root={tmp_path}" in str(caught.value)


@pytest.mark.parametrize("corruption", ["truncate", "flip"])
def test_damaged_mnist_names_the_path_and_the_command(small_mnist, corruption):
    root, _, _ = small_mnist
    file = root / "MNIST" / "raw" / "train-images-idx3-ubyte"
    content = file.read_bytes()
    file.write_bytes(
        content[:-1] if corruption == "truncate" else content[:100] + bytes([content[100] ^ 1]) + content[101:]
    )
    with pytest.raises(ValueError, match="damaged") as caught:
        Mnist(root=str(root)).load("train")
    assert str(file) in str(caught.value)
    assert "dpgen fetch dataset=mnist" in str(caught.value)
    assert len(Mnist(root=str(root)).load("test")) == 20


def test_all_damaged_files_of_mnist_are_named_at_once(small_mnist):
    raw = small_mnist[0] / "MNIST" / "raw"
    for name in ("train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"):
        (raw / name).write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte is damaged.* neither are those of t10k-images-idx3"):
        Mnist(root=str(small_mnist[0])).load("train")


def test_fashion_mnist_in_the_folder_of_mnist_is_refused(small_mnist):
    root, _, _ = small_mnist
    (root / "MNIST").rename(root / "FashionMNIST")
    with pytest.raises(ValueError, match=r"fashion_mnist.*damaged"):
        FashionMnist(root=str(root)).load("test")


# CIFAR-10


@pytest.fixture
def small_cifar(tmp_path, monkeypatch):
    """Two images in each batch of CIFAR-10's layout, with the checksums that torchvision is patched to expect."""
    reader = torchvision.datasets.CIFAR10
    folder = tmp_path / reader.base_folder
    folder.mkdir()
    rng = np.random.default_rng(0)

    def write(name: str, content: dict) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    def batch(name: str, label: int) -> list[str]:
        data = rng.integers(0, 256, (2, 3072), dtype=np.uint8)
        return write(name, {"data": data, "labels": [label, 9 - label]})

    monkeypatch.setattr(reader, "train_list", [batch(f"data_batch_{i}", i) for i in range(1, 6)])
    monkeypatch.setattr(reader, "test_list", [batch("test_batch", 0)])
    name, md5 = write("batches.meta", {"label_names": list(Cifar10().class_names)})
    monkeypatch.setattr(reader, "meta", {"filename": name, "key": "label_names", "md5": md5})
    return tmp_path


def test_cifar_keeps_channel_order_and_labels(small_cifar):
    records = Cifar10(root=str(small_cifar)).load("train")
    assert records.images.shape == (10, 3, 32, 32)
    assert records.labels.tolist() == [1, 8, 2, 7, 3, 6, 4, 5, 5, 4]
    batch = pickle.loads((small_cifar / Cifar10.folder / "data_batch_1").read_bytes())
    # The format: 1,024 red values by rows, then green, then blue.
    assert np.array_equal(records.images[0].numpy().reshape(-1), batch["data"][0])
    assert len(Cifar10(root=str(small_cifar)).load("test")) == 2


def test_missing_and_damaged_cifar(small_cifar):
    file = small_cifar / Cifar10.folder / "data_batch_3"
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    with pytest.raises(ValueError, match=r"data_batch_3 is damaged[\s\S]*dpgen fetch dataset=cifar10"):
        Cifar10(root=str(small_cifar)).load("train")
    file.unlink()
    with pytest.raises(MissingData, match=r"data_batch_3[\s\S]*dpgen fetch dataset=cifar10"):
        Cifar10(root=str(small_cifar)).load("train")


# Fetching


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_fetch_downloads_the_whole_folder(small_mnist, monkeypatch, tmp_path_factory):
    source, images, _ = small_mnist
    root = tmp_path_factory.mktemp("fresh") / "data"

    def download(self: Mnist, into: Path) -> None:
        (source / "MNIST").rename(into / "MNIST")

    monkeypatch.setattr(Mnist, "download", download)
    assert fetch(Mnist(root=str(root))) == root / "MNIST"
    assert np.array_equal(Mnist(root=str(root)).load("train").images[:, 0].numpy(), images)
    assert [path.name for path in root.iterdir()] == ["MNIST"]
    # A readable dataset is not fetched again: the source was removed, so a second download would fail.
    assert fetch(Mnist(root=str(root))) == root / "MNIST"


@pytest.mark.parametrize("stop", [RuntimeError("cable cut"), KeyboardInterrupt()])
def test_fetch_that_fails_leaves_no_files(tmp_path, monkeypatch, stop):
    def download(self: Mnist, into: Path) -> None:
        (into / "MNIST" / "raw").mkdir(parents=True)
        (into / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"half")
        raise stop

    monkeypatch.setattr(Mnist, "download", download)
    with pytest.raises(FetchFailed if isinstance(stop, Exception) else KeyboardInterrupt) as caught:
        fetch(Mnist(root=str(tmp_path)))
    assert contents(tmp_path) == []
    if isinstance(stop, Exception):
        assert "cable cut" in str(caught.value)
        assert str(tmp_path / "MNIST") in str(caught.value)


def test_fetch_refuses_a_damaged_download(small_mnist, monkeypatch, tmp_path_factory):
    _, images, labels = small_mnist
    root = tmp_path_factory.mktemp("fresh")
    monkeypatch.setattr(Mnist, "download", lambda self, into: write_idx(into / "MNIST" / "raw", images + 1, labels))
    with pytest.raises(FetchFailed, match="MD5"):
        fetch(Mnist(root=str(root)))
    assert contents(root) == []


def test_fetch_renames_damaged_data(small_mnist, monkeypatch):
    root, images, labels = small_mnist
    broken = root / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    broken.write_bytes(b"broken")
    monkeypatch.setattr(Mnist, "download", lambda self, into: write_idx(into / "MNIST" / "raw", images, labels))
    fetch(Mnist(root=str(root)))
    assert len(Mnist(root=str(root)).load("test")) == 20
    assert (root / "MNIST.damaged" / "raw" / broken.name).read_bytes() == b"broken"


def test_fetch_without_network_names_the_manual_way(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.datasets, "CelebA", unreachable)
    with pytest.raises(FetchFailed, match=r"no route to host[\s\S]*network[\s\S]*by hand"):
        fetch(CelebaGender(root=str(tmp_path)))
    assert contents(tmp_path) == []


def test_fetch_of_data_without_a_download(tmp_path):
    with pytest.raises(ValueError, match="comes with scikit-learn"):
        fetch(Digits())
    with pytest.raises(ValueError, match=r"dataset\.path"):
        fetch(ImageFolder(path=str(tmp_path), image_size=8))


def test_a_packed_file_of_mnist_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"packed")
    with pytest.raises(MissingData, match=r"train-images-idx3-ubyte\.gz does, next to it\. Unpack[\s\S]*gunzip"):
        Mnist(root=str(tmp_path)).load("train")

"""Counts, checksums and splits of the datasets, and what is said when their files are not as they should be."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from PIL import Image
from sklearn.datasets import load_digits

from dpgen_bench.data.datasets import (
    CelebaGender,
    Cifar10,
    Digits,
    FashionMnist,
    ImageFolder,
    MissingData,
    Mnist,
    Records,
    enlarge_8_to_28,
)
from dpgen_bench.data.fetch import FetchFailed, fetch

CONF = Path(__file__).resolve().parents[1] / "conf"


# Records


@pytest.mark.parametrize(
    ("images", "labels", "complaint"),
    [
        (torch.zeros(2, 1, 4, 4).double(), torch.zeros(2, dtype=torch.int64), "uint8 or float32"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), "n, c, h, w"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), "int64 labels"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int32), "int64 labels"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, -1]), "from 0"),
    ],
)
def test_records_refuse_what_are_no_labelled_images(images, labels, complaint):
    with pytest.raises(ValueError, match=complaint):
        Records(images, labels)


def test_images_hash_sees_every_pixel_and_the_shape():
    images = torch.arange(32, dtype=torch.uint8).reshape(2, 1, 4, 4)
    labels = torch.zeros(2, dtype=torch.int64)
    moved = images.clone()
    moved[1, 0, 3, 3] += 1
    hashes = {Records(x, labels[: len(x)]).images_hash for x in (images, moved, images.reshape(2, 1, 2, 8))}
    assert len(hashes) == 3
    assert Records(images.clone(), labels + 1).images_hash == Records(images, labels).images_hash


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
    ours = Mnist(root=str(data_root)).load("test")
    theirs = torchvision.datasets.MNIST(str(data_root), train=False)
    assert torch.equal(ours.images[:, 0], theirs.data)
    assert torch.equal(ours.labels, theirs.targets)
    # The mean intensity every MNIST tutorial normalises by.
    assert Mnist(root=str(data_root)).load("train").images.double().mean() / 255 == pytest.approx(0.1307, abs=5e-5)


@pytest.mark.parametrize("split", ["train", "test"])
def test_fashion_mnist_is_balanced(data_root, split):
    if not (data_root / "FashionMNIST").is_dir():
        pytest.skip(f"no FashionMNIST below {data_root}")
    records = FashionMnist(root=str(data_root)).load(split)
    assert np.bincount(records.labels).tolist() == [{"train": 6000, "test": 1000}[split]] * 10


def write_idx(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """The four idx files of MNIST's layout, train and test alike."""
    folder.mkdir(parents=True, exist_ok=True)
    for prefix in ("train", "t10k"):
        head = b"\x00\x00\x08\x03" + b"".join(size.to_bytes(4, "big") for size in images.shape)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        head = b"\x00\x00\x08\x01" + len(labels).to_bytes(4, "big")
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    """A 20-record MNIST whose checksums `Mnist` is made to expect: (root, images, labels)."""
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


@pytest.mark.parametrize("harm", ["truncate", "flip"])
def test_damaged_mnist_names_the_path_and_the_command(small_mnist, harm):
    root, _, _ = small_mnist
    file = root / "MNIST" / "raw" / "train-images-idx3-ubyte"
    content = file.read_bytes()
    file.write_bytes(content[:-1] if harm == "truncate" else content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(ValueError, match="damaged") as caught:
        Mnist(root=str(root)).load("train")
    assert str(file) in str(caught.value)
    assert "dpgen fetch dataset=mnist" in str(caught.value)
    assert len(Mnist(root=str(root)).load("test")) == 20


def test_fashion_in_mnists_place_is_noticed(small_mnist):
    root, _, _ = small_mnist
    (root / "MNIST").rename(root / "FashionMNIST")
    with pytest.raises(ValueError, match=r"fashion_mnist.*damaged"):
        FashionMnist(root=str(root)).load("test")


# CIFAR-10


@pytest.fixture
def small_cifar(tmp_path, monkeypatch):
    """Two images in each batch of CIFAR-10's layout, with the checksums torchvision is made to expect."""
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


# CelebA

PARTITION = [0] * 6 + [1] * 3 + [2] * 4  # of the made images 000001.jpg, 000002.jpg, ...
MALE = [1, -1, -1, 1, -1, 1, -1, 1, 1, -1, -1, 1, 1]


@pytest.fixture
def small_celeba(tmp_path):
    """13 made images, 178x218, grey level 10 + 10 i on the left half and 0 on the right, with CelebA's two lists."""
    base = tmp_path / "celeba"
    (base / "img_align_celeba").mkdir(parents=True)
    files = [f"{i:06}.jpg" for i in range(1, 14)]
    for i, file in enumerate(files):
        pixels = np.zeros((218, 178, 3), dtype=np.uint8)
        pixels[:, :89] = 10 + 10 * i
        Image.fromarray(pixels).save(base / "img_align_celeba" / file, quality=95)
    (base / "list_eval_partition.txt").write_text(
        "".join(f"{file} {part}\n" for file, part in zip(files, PARTITION, strict=True))
    )
    attributes = ["Smiling", "Male", "Young"]
    lines = [f"{file}  1 {male:2d} -1" for file, male in zip(files, MALE, strict=True)]
    (base / "list_attr_celeba.txt").write_text("\n".join([str(len(files)), " ".join(attributes), *lines]) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("variant", "split", "rows"),
    [
        ("train", "train", slice(0, 6)),
        ("trainval", "train", slice(0, 9)),
        ("train", "test", slice(9, 13)),
        ("trainval", "test", slice(9, 13)),
    ],
)
def test_celeba_variants_labels_and_order(small_celeba, variant, split, rows):
    records = CelebaGender(root=str(small_celeba), variant=variant, subset=True).load(split)
    assert records.images.shape[1:] == (3, 32, 32)
    assert records.labels.tolist() == [int(male == 1) for male in MALE[rows]]
    # The grey level says which file a row came from; JPEG moves it by a level or two.
    levels = records.images[:, :, 16, 4].double().mean(dim=1)
    expected = torch.arange(13, dtype=torch.float64)[rows] * 10 + 10
    assert (levels - expected).abs().max() < 3


def test_celeba_classes_are_female_then_male():
    assert CelebaGender().class_names == ("female", "male")
    assert CelebaGender.partitions[0] == 162_770
    assert CelebaGender.partitions[0] + CelebaGender.partitions[1] == 182_637
    assert CelebaGender.partitions[2] == 19_962


def test_celeba_crop_changes_pixels_and_identity(small_celeba):
    base = small_celeba / "celeba" / "img_align_celeba" / "000001.jpg"
    pixels = np.zeros((218, 178, 3), dtype=np.uint8)
    pixels[:20] = 255  # a white band that the central square leaves out
    Image.fromarray(pixels).save(base, quality=95)
    whole = CelebaGender(root=str(small_celeba), subset=True)
    square = dataclasses.replace(whole, crop="center")
    assert whole.load("train").images[0, :, 0].min() > 200
    assert square.load("train").images[0].max() < 60
    assert whole.identity() != square.identity()


def test_a_part_of_celeba_is_no_celeba_unless_asked_for(small_celeba):
    with pytest.raises(ValueError, match=r"162770[\s\S]*subset=true"):
        CelebaGender(root=str(small_celeba)).load("train")


def test_missing_celeba_files_are_named_with_the_manual_way(small_celeba):
    spec = CelebaGender(root=str(small_celeba), subset=True)
    image = small_celeba / "celeba" / "img_align_celeba" / "000003.jpg"
    content = image.read_bytes()
    image.unlink()
    with pytest.raises(MissingData, match=r"000003\.jpg is not there[\s\S]*dpgen fetch dataset=celeba_gender"):
        spec.load("train")
    image.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"000003\.jpg is damaged"):
        spec.load("train")
    (small_celeba / "celeba" / "list_attr_celeba.txt").unlink()
    with pytest.raises(MissingData, match=r"list_attr_celeba\.txt[\s\S]*mmlab\.ie\.cuhk\.edu\.hk"):
        spec.load("train")


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("list_attr_celeba.txt", "13\n", "14\n", "13 lines follow"),
        ("list_attr_celeba.txt", "Male", "Female", "does not name the attribute Male"),
        ("list_attr_celeba.txt", "000002.jpg  1 -1 -1", "000002.jpg  1 -1", "expected lines of a file name"),
        ("list_attr_celeba.txt", "000002.jpg  1 -1 -1", "000002.jpg  1 0 -1", "values -1 or 1"),
        ("list_attr_celeba.txt", "000002.jpg", "999999.jpg", "no line for 000002.jpg"),
        ("list_eval_partition.txt", "000002.jpg 0", "000002.jpg 3", "expected lines 'FILE 0"),
        ("list_eval_partition.txt", "000002.jpg 0", "000002.jpg", "expected lines 'FILE 0"),
    ],
)
def test_damaged_celeba_lists(small_celeba, file, old, new, complaint):
    path = small_celeba / "celeba" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=complaint) as caught:
        CelebaGender(root=str(small_celeba), subset=True).load("train")
    assert str(path) in str(caught.value)


# A user's own images


def save_image(path: Path, level: int, size: tuple[int, int] = (20, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (level, 0, 255 - level)).save(path)


@pytest.fixture
def own_images(tmp_path):
    """30 images for each of the classes cats and dogs, one of them in a deeper folder."""
    for i in range(30):
        save_image(tmp_path / "own" / "cats" / f"{i}.png", level=i)
        save_image(tmp_path / "own" / "dogs" / ("deep" if i == 0 else "") / f"{i}.jpeg", level=255 - i)
    (tmp_path / "own" / "dogs" / "notes.txt").write_text("not an image")
    (tmp_path / "own" / ".hidden").mkdir()
    return tmp_path / "own"


@pytest.mark.parametrize("channels", [1, 3])
def test_image_folder_labels_shapes_and_split(own_images, channels):
    spec = ImageFolder(path=str(own_images), image_size=16, channels=channels)
    train, test = spec.load("train"), spec.load("test")
    assert spec.class_names == ("cats", "dogs")
    assert train.images.shape[1:] == test.images.shape[1:] == (channels, 16, 16)
    assert torch.bincount(torch.cat([train.labels, test.labels])).tolist() == [30, 30]
    assert 0 < len(test) < len(train)
    if channels == 3:  # dogs are red, cats are blue
        assert torch.equal(train.labels == 1, train.images[:, 0, 8, 8] > 128)


def test_image_folder_split_moves_no_other_file(own_images):
    before = ImageFolder(path=str(own_images), image_size=8, test_fraction=0.3)
    test_before, content_before = set(before._files["test"]), before.identity()["content"]
    (own_images / "cats" / "7.png").unlink()
    save_image(own_images / "cats" / "new.png", level=3)
    after = ImageFolder(path=str(own_images), image_size=8, test_fraction=0.3)
    changed = test_before ^ set(after._files["test"])
    assert changed <= {own_images / "cats" / "7.png", own_images / "cats" / "new.png"}
    assert content_before != after.identity()["content"]


def test_image_folder_takes_given_splits(tmp_path):
    for split, count in (("train", 3), ("test", 2)):
        for label in ("a", "b"):
            for i in range(count):
                save_image(tmp_path / split / label / f"{i}.png", level=i)
    spec = ImageFolder(path=str(tmp_path), image_size=8)
    assert spec.load("train").labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert spec.load("test").labels.tolist() == [0, 0, 1, 1]
    save_image(tmp_path / "test" / "c" / "0.png", level=0)
    with pytest.raises(ValueError, match="classes that train/ has not: c"):
        ImageFolder(path=str(tmp_path), image_size=8).load("test")


def test_image_folder_center_crop_keeps_proportions(tmp_path):
    pixels = np.zeros((10, 30, 3), dtype=np.uint8)
    pixels[:, 10:20] = 255  # the central square is white
    for name in ("train/a/0.png", "test/a/0.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / name)
    square = ImageFolder(path=str(tmp_path), image_size=5, crop="center").load("train")
    whole = ImageFolder(path=str(tmp_path), image_size=5, crop="none").load("train")
    assert square.images.min() == 255
    assert whole.images[0, 0, 2, 0] == 0


def test_image_folder_errors_say_where(tmp_path):
    with pytest.raises(MissingData, match="nowhere is no folder"):
        ImageFolder(path=str(tmp_path / "nowhere"), image_size=8).load("train")
    with pytest.raises(ValueError, match="expected one folder of images for each class"):
        ImageFolder(path=str(tmp_path), image_size=8).load("train")
    save_image(tmp_path / "full" / "0.png", level=1)
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match="no image in the class folder 'bare'"):
        ImageFolder(path=str(tmp_path), image_size=8).load("train")
    (tmp_path / "bare").rmdir()
    with pytest.raises(ValueError, match=r"gives no image to the (train|test) split"):
        ImageFolder(path=str(tmp_path), image_size=8).load("train")
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match="'train' without its counterpart"):
        ImageFolder(path=str(tmp_path), image_size=8).load("train")


@pytest.mark.parametrize("content", ["text", "cut", "16 bit"])
def test_image_folder_names_the_bad_image(own_images, content):
    bad = own_images / "cats" / "0.png"
    if content == "text":
        bad.write_text("no pixels here")
    elif content == "cut":
        bad.write_bytes(bad.read_bytes()[:-30])
    else:
        Image.fromarray(np.full((9, 9), 40_000, dtype=np.uint16)).save(bad)
    spec = ImageFolder(path=str(own_images), image_size=8)
    split = "test" if bad in spec._files["test"] else "train"
    with pytest.raises(ValueError, match=r"cats/0\.png"):
        spec.load(split)


@pytest.mark.parametrize("wrong", [{"channels": 2}, {"image_size": 0}, {"test_fraction": 1.0}, {"crop": "left"}])
def test_image_folder_options_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ImageFolder(**{"path": "x", "image_size": 8, **wrong})


# Identity and configuration


def test_identity_is_stable_and_holds_no_path(own_images, small_celeba, tmp_path_factory):
    specs = [
        Digits(root=str(own_images)),
        Mnist(root=str(own_images)),
        FashionMnist(root=str(own_images)),
        Cifar10(root=str(own_images)),
        CelebaGender(root=str(own_images)),
        CelebaGender(root=str(small_celeba), subset=True),
        ImageFolder(path=str(own_images), image_size=8),
    ]
    texts = [json.dumps(spec.identity(), sort_keys=True) for spec in specs]
    assert len(set(texts)) == len(specs)
    assert not any(str(own_images.parent) in text for text in texts)
    moved = tmp_path_factory.mktemp("elsewhere") / "images"
    own_images.rename(moved)
    assert ImageFolder(path=str(moved), image_size=8).identity() == json.loads(texts[-1])


@pytest.mark.parametrize(
    ("choice", "kind", "train_size"),
    [
        ("digits", Digits, None),
        ("mnist", Mnist, None),
        ("fashion_mnist", FashionMnist, None),
        ("cifar10", Cifar10, None),
        ("celeba_gender", CelebaGender, "train"),
        ("celeba_gender_trainval", CelebaGender, "trainval"),
    ],
)
def test_yamls_instantiate(choice, kind, train_size):
    with initialize_config_dir(config_dir=str(CONF), version_base=None):
        config = compose(overrides=[f"+dataset={choice}", "+data_root=some/where"])
    spec = instantiate(config.dataset)
    assert type(spec) is kind
    assert (spec.name, spec.root) == (choice, "some/where")
    assert spec.identity()["name"] == choice
    assert getattr(spec, "variant", None) == train_size
    assert len(spec.class_names) == spec.num_classes


def test_image_folder_yaml_wants_path_and_size(own_images):
    with initialize_config_dir(config_dir=str(CONF), version_base=None):
        config = compose(
            overrides=["+dataset=image_folder", f"dataset.path={own_images}", "dataset.image_size=8", "+data_root=x"]
        )
    assert instantiate(config.dataset).num_classes == 2


# Fetching


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_fetch_brings_the_whole_folder(small_mnist, monkeypatch, tmp_path_factory):
    source, images, _ = small_mnist
    root = tmp_path_factory.mktemp("fresh") / "data"

    def download(self: Mnist, into: Path) -> None:
        (source / "MNIST").rename(into / "MNIST")

    monkeypatch.setattr(Mnist, "download", download)
    assert fetch(Mnist(root=str(root))) == root / "MNIST"
    assert np.array_equal(Mnist(root=str(root)).load("train").images[:, 0].numpy(), images)
    assert [path.name for path in root.iterdir()] == ["MNIST"]
    # What is there and sound is not fetched again: the source is gone, so a second download would fail.
    assert fetch(Mnist(root=str(root))) == root / "MNIST"


@pytest.mark.parametrize("stop", [RuntimeError("cable cut"), KeyboardInterrupt()])
def test_fetch_that_fails_midway_leaves_nothing(tmp_path, monkeypatch, stop):
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


def test_fetch_refuses_what_arrived_damaged(small_mnist, monkeypatch, tmp_path_factory):
    _, images, labels = small_mnist
    root = tmp_path_factory.mktemp("fresh")
    monkeypatch.setattr(Mnist, "download", lambda self, into: write_idx(into / "MNIST" / "raw", images + 1, labels))
    with pytest.raises(FetchFailed, match="MD5"):
        fetch(Mnist(root=str(root)))
    assert contents(root) == []


def test_fetch_puts_damaged_data_aside(small_mnist, monkeypatch):
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


def test_fetch_of_what_is_never_downloaded(tmp_path):
    with pytest.raises(ValueError, match="comes with scikit-learn"):
        fetch(Digits())
    with pytest.raises(ValueError, match=r"dataset\.path"):
        fetch(ImageFolder(path=str(tmp_path), image_size=8))


def test_pixels_have_one_hash_whatever_their_type():
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

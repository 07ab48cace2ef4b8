"""CelebA and a user's own images, then the identities and the configuration files of all datasets."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from PIL import Image

from dpgen_bench.data.datasets import CelebaGender, Cifar10, Digits, FashionMnist, Mnist
from dpgen_bench.data.folder import ImageFolder
from dpgen_bench.data.records import MissingData

CONF = Path(__file__).resolve().parents[1] / "conf"


# CelebA

PARTITION = [0] * 6 + [1] * 3 + [2] * 4  # of the generated images 000001.jpg, 000002.jpg, ...
MALE = [1, -1, -1, 1, -1, 1, -1, 1, 1, -1, -1, 1, 1]


@pytest.fixture
def small_celeba(tmp_path):
    """13 images, 178x218, grey level 10 + 10 i on the left half and 0 on the right, with CelebA's two lists."""
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


def test_a_part_of_celeba_is_refused_by_default(small_celeba):
    with pytest.raises(ValueError, match=r"162770[\s\S]*subset=true"):
        CelebaGender(root=str(small_celeba)).load("train")


def test_missing_celeba_files_are_named_with_the_manual_way(small_celeba):
    spec = CelebaGender(root=str(small_celeba), subset=True)
    image = small_celeba / "celeba" / "img_align_celeba" / "000003.jpg"
    content = image.read_bytes()
    image.unlink()
    with pytest.raises(MissingData, match=r"000003\.jpg does not exist[\s\S]*dpgen fetch dataset=celeba_gender"):
        spec.load("train")
    image.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"000003\.jpg is damaged"):
        spec.load("train")
    (small_celeba / "celeba" / "list_attr_celeba.txt").unlink()
    with pytest.raises(MissingData, match=r"list_attr_celeba\.txt[\s\S]*mmlab\.ie\.cuhk\.edu\.hk"):
        spec.load("train")


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
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
def test_damaged_celeba_lists(small_celeba, file, old, new, message):
    path = small_celeba / "celeba" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as caught:
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


def test_image_folder_uses_train_and_test_folders(tmp_path):
    for split, count in (("train", 3), ("test", 2)):
        for label in ("a", "b"):
            for i in range(count):
                save_image(tmp_path / split / label / f"{i}.png", level=i)
    spec = ImageFolder(path=str(tmp_path), image_size=8)
    assert spec.load("train").labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert spec.load("test").labels.tolist() == [0, 0, 1, 1]
    save_image(tmp_path / "test" / "c" / "0.png", level=0)
    with pytest.raises(ValueError, match="classes that are not in train/: c"):
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
    with pytest.raises(MissingData, match=r"expected a folder at .*nowhere"):
        ImageFolder(path=str(tmp_path / "nowhere"), image_size=8).load("train")
    with pytest.raises(ValueError, match="expected one folder of images for each class"):
        ImageFolder(path=str(tmp_path), image_size=8).load("train")
    save_image(tmp_path / "full" / "0.png", level=1)
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match="no image in the class folder 'bare'"):
        ImageFolder(path=str(tmp_path), image_size=8).load("train")
    (tmp_path / "bare").rmdir()
    with pytest.raises(ValueError, match=r"got none in the (train|test) split"):
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


def test_image_folder_yaml_needs_path_and_size(own_images):
    with initialize_config_dir(config_dir=str(CONF), version_base=None):
        config = compose(
            overrides=["+dataset=image_folder", f"dataset.path={own_images}", "dataset.image_size=8", "+data_root=x"]
        )
    assert instantiate(config.dataset).num_classes == 2

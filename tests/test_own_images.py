"""A folder of a user's own images: whether it is grey or colour; `dpgen fetch --check` names what is wrong."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpgen_bench.cli import main
from dpgen_bench.data.folder import ImageFolder
from dpgen_bench.data.images import BadImage, read_image

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (9, 9), dtype=np.uint8)


def folder(tmp_path: Path, images: dict[str, Image.Image]) -> Path:
    """A folder train/a, train/b, test/a of grey images in different modes, and further images."""
    grey = Image.fromarray(GREY)
    usual = {"train/a/0.png": grey, "train/b/0.png": grey.convert("RGB"), "test/a/0.png": grey.convert("LA")}
    for name, image in {**usual, **images}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(tmp_path / name)
    return tmp_path


def channels_of(path: Path) -> int:
    return ImageFolder(path=str(path), image_size=9).image_shape[0]


def coloured(level: int) -> Image.Image:
    """A grey image with one pixel whose blue differs by `level`."""
    pixels = np.repeat(GREY[..., None], 3, axis=2)
    pixels[4, 4] = (100, 100, 100 + level)
    return Image.fromarray(pixels)


def test_a_folder_without_a_coloured_pixel_is_grey(tmp_path):
    grey = Image.fromarray(GREY)
    others = {
        "train/a/1.jpg": grey.convert("RGB"),
        "train/a/2.png": grey.convert("P"),
        "train/a/3.png": grey.convert("1"),
        "train/a/4.png": grey.convert("RGBA"),
        "train/a/5.png": coloured(0),
    }
    path = folder(tmp_path, others)
    spec = ImageFolder(path=str(path), image_size=9)
    assert spec.image_shape == (1, 9, 9)
    train = spec.load("train").images
    assert torch.equal(train[0, 0], torch.from_numpy(GREY))
    assert torch.equal(train[-1], train[0])  # train/b/0.png, the same pixels in a file of three channels
    assert spec.identity()["image_shape"] == [1, 9, 9]


@pytest.mark.parametrize("name", ["train/a/00.png", "train/b/zz.png", "test/b/0.png"])
def test_one_coloured_pixel_of_any_file_decides(tmp_path, name):
    path = folder(tmp_path, {name: coloured(1)})
    assert channels_of(path) == 3
    assert ImageFolder(path=str(path), image_size=9).load("train").images.shape[1] == 3
    (path / name).unlink()
    assert channels_of(path) == 1


def test_the_setting_channels_wins_and_gives_the_same_identity(tmp_path):
    path = str(folder(tmp_path, {}))
    decided, grey, colour = (ImageFolder(path=path, image_size=9, channels=c) for c in (None, 1, 3))
    assert decided.identity() == grey.identity() != colour.identity()
    assert colour.load("test").images.shape[1] == 3


FORMATS = {"PNG": {}, "JPEG": {}, "BMP": {}, "WEBP": {}, "TIFF": {"compression": "tiff_lzw"}, "PPM": {}}


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("kind", FORMATS)
def test_corrupt_files_of_every_format_raise_bad_image_only(tmp_path, kind):
    """Truncated at many lengths, and with changed bytes. Some corrupt files can be read, none raises another error."""
    buffer = io.BytesIO()
    coloured(90).save(buffer, kind, **FORMATS[kind])
    content, path, refused = buffer.getvalue(), tmp_path / f"x.{kind.lower()}", 0
    damaged = [content[:n] for n in range(0, len(content), 9)]
    for _ in range(80):
        changed = bytearray(content)
        changed[int(RNG.integers(len(content)))] = int(RNG.integers(256))
        damaged.append(bytes(changed))
    for each in damaged:
        path.write_bytes(each)
        try:
            assert read_image(path, 4, 3, "center").shape == (3, 4, 4)
        except BadImage:
            refused += 1
    assert refused > 5


# dpgen fetch --check


def check(*overrides: str) -> int:
    return main(["fetch", "--check", *overrides])


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder with three unreadable files in both splits: no image, one that is cut off, one of 16 bits."""
    path = folder(tmp_path / "own images", {"test/b/0.png": coloured(5)})
    (path / "train/a/no image.png").write_text("text")
    (path / "train/b/cut.png").write_bytes((path / "train/b/0.png").read_bytes()[:-30])
    Image.fromarray(GREY.astype(np.uint16) * 200).save(path / "test/a/wide.png")
    return path


def test_check_names_every_unreadable_file_at_once(broken, capsys):
    assert check("dataset=image_folder", f"dataset.path='{broken}'") == 1
    lines = capsys.readouterr().err.splitlines()
    named = [str(broken / name) in line for name, line in zip(NAMES, lines, strict=True)]
    assert named == [True] * 3
    assert "not 8-bit" in lines[2]


NAMES = ("train/a/no image.png", "train/b/cut.png", "test/a/wide.png")


def test_the_error_of_a_run_names_the_command_that_finds_all_files(broken):
    spec = ImageFolder(path=str(broken), image_size=9, channels=3)
    with pytest.raises(ValueError, match=r"dpgen fetch --check dataset=image_folder dataset\.path=") as caught:
        spec.load("train")
    assert f"'{broken}'" in str(caught.value)  # quoted, because it has a space
    with pytest.raises(ValueError, match="dpgen fetch --check"):
        _ = ImageFolder(path=str(broken), image_size=9).image_shape


def test_check_names_wrong_folders_together_with_unreadable_files(broken, capsys):
    (broken / "test/c").mkdir()
    assert check("dataset=image_folder", f"dataset.path='{broken}'") == 1
    error = capsys.readouterr().err
    assert "classes that are not in train/: c" in error
    assert all(str(broken / name) in error for name in NAMES)


def test_check_describes_a_good_folder(tmp_path, capsys):
    path = folder(tmp_path, {})
    assert check("dataset=image_folder", f"dataset.path={path}", "dataset.image_size=9") == 0
    assert capsys.readouterr().out == (
        "dataset 'image_folder': 2 images for training and 1 for testing, 2 classes, prepared as 1x9x9; all files can "
        "be read\n"
    )


def test_check_of_other_data_sets(tmp_path, capsys):
    assert check("dataset=digits") == 0
    assert "1,437 images for training and 360 for testing, 10 classes, prepared as 1x28x28" in capsys.readouterr().out
    assert check("dataset=image_folder", f"dataset.path={tmp_path / 'none'}") == 1
    assert "expected a folder at" in capsys.readouterr().err
    assert check("dataset=mnist", f"data_root={tmp_path}") == 1
    shown = capsys.readouterr().err  # both splits lack files, and each is named
    assert [f"{split}-images-idx3-ubyte does not exist" in shown for split in ("train", "t10k")] == [True, True]
    np.savez(tmp_path / "x.npz", images=GREY[None].repeat(9, 0), labels=np.arange(8))
    assert check("dataset=npz", f"dataset.path={tmp_path / 'x.npz'}") == 1
    assert capsys.readouterr().err.count("one integer for each of the 9 images") == 1
    assert check("dataset=image_folder") == 2  # a usage error: no path
    assert check("dataset=nothing") == 2

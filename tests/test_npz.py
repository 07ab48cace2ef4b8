"""A user's own arrays in one .npz file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from dpgen_bench.config.compose import compose_config
from dpgen_bench.data.npz import Npz
from dpgen_bench.data.records import MissingData, Records
from dpgen_bench.runs.execute import execute

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (40, 8, 6), dtype=np.uint8)
LABELS = np.arange(40) % 4
MEDMNIST = {
    f"{split}_images": IMAGES[rows] for split, rows in (("train", slice(30)), ("val", [1]), ("test", slice(30, 40)))
}
MEDMNIST |= {f"{split}_labels": LABELS[rows, None] for split, rows in (("train", slice(30)), ("test", slice(30, 40)))}


def written(tmp_path: Path, **arrays: np.ndarray) -> Npz:
    np.savez(tmp_path / "own.npz", **arrays)
    return Npz(str(tmp_path / "own.npz"))


def rows(records: Records) -> set[tuple[bytes, int]]:
    return {(image.numpy().tobytes(), int(label)) for image, label in zip(records.images, records.labels, strict=True)}


def test_the_split_of_a_file_is_kept(tmp_path):
    spec = written(tmp_path, **MEDMNIST)
    train, test = spec.load("train"), spec.load("test")
    assert torch.equal(train.images[:, 0], torch.from_numpy(IMAGES[:30]))
    assert torch.equal(test.labels, torch.from_numpy(LABELS[30:]))
    assert (spec.image_shape, spec.class_names) == ((1, 8, 6), ("0", "1", "2", "3"))


def test_a_class_may_be_missing_in_one_split_or_be_named_without_images(tmp_path):
    absent_in_training = {**MEDMNIST, "train_labels": MEDMNIST["train_labels"] % 3}
    assert written(tmp_path, **absent_in_training).class_names == ("0", "1", "2", "3")
    sparse = {**MEDMNIST, "train_labels": MEDMNIST["train_labels"] * 2, "test_labels": MEDMNIST["test_labels"] * 2}
    with pytest.raises(ValueError, match="only 4 of these 7 classes have an image"):
        written(tmp_path, **sparse).load("train")
    assert written(tmp_path, **sparse, class_names=np.array(list("abcdefg"))).num_classes == 7


@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 3, 1, 2)])
@pytest.mark.parametrize("channels", [1, 3])
def test_channels_may_be_last_or_first(layout, channels, tmp_path):
    last = RNG.integers(0, 256, (20, 8, 6, channels), dtype=np.uint8)
    spec = written(tmp_path, images=last.transpose(layout), labels=LABELS[:20])
    expected = Records(torch.from_numpy(last.transpose(0, 3, 1, 2).copy()), torch.from_numpy(LABELS[:20]))
    assert spec.image_shape == (channels, 8, 6)
    assert rows(spec.load("train")) | rows(spec.load("test")) == rows(expected)


def test_an_image_keeps_its_split_when_others_come_or_go(tmp_path):
    whole = written(tmp_path, images=IMAGES, labels=LABELS)
    test, identity = rows(whole.load("test")), whole.identity()
    assert 1 <= len(test) <= 20
    order = RNG.permutation(39)
    fewer = written(tmp_path, images=IMAGES[order], labels=LABELS[order])
    assert rows(fewer.load("test")) == test - rows(Records(whole_image(39), torch.from_numpy(LABELS[39:])))
    assert fewer.identity() != identity


def whole_image(number: int) -> torch.Tensor:
    return torch.from_numpy(IMAGES[number : number + 1, None])


def test_the_identity_is_that_of_the_content(tmp_path):
    spec = written(tmp_path, **MEDMNIST)
    identity = json.loads(json.dumps(spec.identity()))
    np.savez_compressed(tmp_path / "moved.npz", **MEDMNIST)
    assert Npz(str(tmp_path / "moved.npz")).identity() == identity
    changed = {**MEDMNIST, "train_labels": MEDMNIST["train_labels"][::-1]}
    assert written(tmp_path, **changed).identity() != identity


def test_names_of_classes_may_be_stored(tmp_path):
    names = np.array(["a", "b", "c", "d", "e"])
    assert written(tmp_path, **MEDMNIST, class_names=names).class_names == tuple("abcde")
    with pytest.raises(ValueError, match="class_names has 2 names, but labels go up to 3"):
        _ = written(tmp_path, **MEDMNIST, class_names=names[:2]).class_names


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"x": IMAGES}, "it holds none of these arrays"),
        ({"images": IMAGES}, "it holds ['images']"),
        ({"images": IMAGES / 255, "labels": LABELS}, "images is float64 (40, 8, 6); scale pixels to 0..255"),
        ({"images": IMAGES[0], "labels": LABELS[:8]}, "images is uint8 (8, 6)"),
        ({"images": IMAGES.reshape(20, 2, 8, 6), "labels": LABELS[:20]}, "without an axis of 1 or 3 channels"),
        ({"images": IMAGES, "labels": LABELS[:30]}, "one integer for each of the 40 images"),
        ({"images": IMAGES, "labels": np.eye(40)}, "labels is float64 (40, 40)"),
        ({"images": IMAGES, "labels": LABELS - 1}, "negative labels; count classes from 0"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, "the train split has no image"),
        ({**MEDMNIST, "test_images": IMAGES[30:, :4]}, "different shapes, (1, 8, 6) and (1, 4, 6)"),
        ({"images": np.array([None]), "labels": LABELS}, "an array holds Python objects"),
    ],
)
def test_arrays_that_are_no_dataset_are_refused(arrays, problem, tmp_path):
    with pytest.raises(ValueError, match=rf"expected .*own\.npz to hold train_images.*{re.escape(problem)}"):
        written(tmp_path, **arrays).load("train")


def test_files_that_are_no_archive_are_refused(tmp_path):
    with pytest.raises(MissingData, match=r"nowhere\.npz is no file\. Write the arrays"):
        Npz(str(tmp_path / "nowhere.npz")).load("train")
    np.save(tmp_path / "one.npy", IMAGES)
    with pytest.raises(ValueError, match=r"one\.npy is damaged: it is no archive"):
        Npz(str(tmp_path / "one.npy")).load("train")
    spec = written(tmp_path, **MEDMNIST)
    content = Path(spec.path).read_bytes()
    Path(spec.path).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"own\.npz is damaged"):
        Npz(spec.path).load("train")
    with pytest.raises(ValueError, match=r"test_fraction in \(0, 1\), got 1"):
        Npz("x.npz", test_fraction=1)


@pytest.mark.parametrize(
    ("shape", "method", "message"),
    [
        ((14, 40), ["method=dp_merf"], "multiples of 4, got 14x40; choose another dataset.image_size, or pad"),
        ((14, 40), ["method=dp_ntk"], "multiples of 4, got 14x40"),
        ((14, 40), ["method=dp_hp", "method.generator=conv"], "multiples of 4, got 14x40"),
        ((1, 1), ["method=dp_hp"], "at least two pixels, for the pairs of the product kernel"),
        ((128, 128), ["method=dp_gauss"], "at most 16,383 pixels in all channels"),
    ],
)
def test_images_that_a_method_cannot_make_are_refused_before_a_run_exists(tmp_path, shape, method, message):
    """Otherwise releases would spend the budget first."""
    images = np.arange(200, dtype=np.uint8)[:, None, None] + np.zeros(shape, np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=np.arange(200) % 2)
    words = ["dataset=npz", f"dataset.path={tmp_path / 'own.npz'}", f"results={tmp_path / 'results'}", *method]
    with pytest.raises(ValueError, match=message):
        execute(compose_config(words))
    assert not (tmp_path / "results" / "runs").exists()

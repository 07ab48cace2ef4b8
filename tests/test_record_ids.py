"""Ids of records in users' own data: an exchanged record must not move others to other shards."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpgen_bench.data.folder import ImageFolder
from dpgen_bench.data.npz import LARGEST_ID, Npz
from dpgen_bench.data.private import PrivateData
from dpgen_bench.data.records import DatasetSpec, Records, split_by_pixels
from dpgen_bench.data.validation import Validation
from dpgen_bench.privacy.events import RELATIONS, Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import EveryShard
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.votes import Votes

RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.integers(0, 256, (60, 4, 4), dtype=np.uint8), np.arange(60) % 3
PERMANENT = {"ids": 1000 + RNG.permutation(60)}


def npz(folder: Path, images: np.ndarray, labels: np.ndarray, **more: np.ndarray) -> Npz:
    folder.mkdir(exist_ok=True)
    np.savez(folder / "own.npz", images=images, labels=labels, **more)
    return Npz(str(folder / "own.npz"))


def image_folder(
    folder: Path, images: np.ndarray, labels: np.ndarray, train: str = "", name: str = "{i}"
) -> ImageFolder:
    """A file for each record, in the folder of its class; with `train`, the first class is also in test/."""
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = folder / train / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{name.format(i=i, rank=int((labels[:i] == label).sum()))}.png")
    if train:
        (folder / "test" / "0").mkdir(parents=True)
        Image.fromarray(images[0]).save(folder / "test" / "0" / "0.png")
    return ImageFolder(str(folder), image_size=4, channels=1)


def shard_of_each(spec: DatasetSpec) -> dict[bytes, int]:
    """The shard of each training record, by its pixels."""
    records = spec.load("train")
    ids = np.arange(len(records)) if records.ids is None else records.ids.numpy()
    shards = EveryShard(7).shard_of(ids)
    return {image.numpy().tobytes(): int(shard) for image, shard in zip(records.images, shards, strict=True)}


def moved(before: DatasetSpec, after: DatasetSpec) -> int:
    """The number of training records of both that are in different shards."""
    first, second = shard_of_each(before), shard_of_each(after)
    common = first.keys() & second.keys()
    assert len(common) > 30
    return sum(first[image] != second[image] for image in common)


def exchanged(number: int) -> tuple[np.ndarray, np.ndarray]:
    """The records, of which one has another image and another class."""
    images, labels = IMAGES.copy(), LABELS.copy()
    images[number], labels[number] = 255 - images[number], (labels[number] + 1) % 3
    return images, labels


FORMS = {
    "npz": npz,
    "npz with ids": lambda folder, *arrays: npz(folder, *arrays, **PERMANENT),
    "folder": image_folder,
    "folder with a split": lambda folder, *arrays: image_folder(folder, *arrays, train="train"),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_exchanged_record_moves_no_other_to_another_shard(form, tmp_path):
    before = FORMS[form](tmp_path / "before", IMAGES, LABELS)
    assert "replace_one" in before.load("train").keep_ids
    sizes = set()
    for number in range(0, 60, 5):
        after = FORMS[form](tmp_path / f"after{number}", *exchanged(number))
        assert moved(before, after) == 0
        sizes.add(len(after.load("train")))
    assert len(sizes) > 1 or form == "folder with a split"  # some left or joined the training records, all the same


def test_permanent_ids_are_kept_if_a_record_is_removed_and_places_are_not(tmp_path):
    chosen = np.arange(60), np.delete(np.arange(60), 3)
    ids = PERMANENT["ids"]
    given = [npz(tmp_path / f"given{len(n)}", IMAGES[n], LABELS[n], ids=ids[n]) for n in chosen]
    assert moved(*given) == 0
    assert given[0].load("train").keep_ids == RELATIONS
    places = [npz(tmp_path / f"places{len(n)}", IMAGES[n], LABELS[n]) for n in chosen]
    assert moved(*places) > 0
    assert places[0].load("train").keep_ids == ("replace_one",)


@pytest.mark.parametrize("train", ["", "train"])
def test_names_that_two_images_have_are_no_ids(train, tmp_path):
    """Each class numbers its own files, so an image that changes its class changes places of others."""
    records = image_folder(tmp_path, IMAGES, LABELS, train, name="{rank}").load("train")
    assert (records.ids, records.keep_ids) == (None, ())


def test_a_part_by_pixels_of_records_without_ids_keeps_no_place():
    whole = Records(torch.from_numpy(IMAGES[:, None]), torch.from_numpy(LABELS))
    assert whole.keep_ids == ("replace_one",)
    assert split_by_pixels(whole, 0.2)["train"].keep_ids == ()


def test_validation_records_of_ones_own_data_keep_their_ids(tmp_path):
    before = Validation(npz(tmp_path / "a", IMAGES, LABELS, **PERMANENT))
    assert before.load("train").keep_ids == RELATIONS
    assert moved(before, Validation(npz(tmp_path / "b", *exchanged(3), **PERMANENT))) == 0


def test_other_ids_are_another_data_set(tmp_path):
    identities = [
        npz(tmp_path / "places", IMAGES, LABELS).identity(),
        npz(tmp_path / "ids", IMAGES, LABELS, **PERMANENT).identity(),
        npz(tmp_path / "others", IMAGES, LABELS, ids=PERMANENT["ids"][::-1]).identity(),
    ]
    assert len({identity["content"] for identity in identities}) == 3


@pytest.mark.parametrize(
    "ids",
    [np.zeros(60, int), np.arange(60) - 1, np.arange(60) + LARGEST_ID, np.arange(59), np.arange(60.0)],
    ids=["twice", "negative", "large", "few", "float"],
)
def test_bad_ids_are_refused(ids, tmp_path):
    with pytest.raises(ValueError, match=r"own\.npz.*: ids (has \d+ repeated ids and \d+ outside|is (int|float)64) "):
        npz(tmp_path, IMAGES, LABELS, ids=ids).load("train")


@pytest.mark.parametrize(
    ("relation", "keep_ids", "words"),
    [
        ("replace_one", (), "exchanging a record for one of another content or class moves later ones.* Give records"),
        ("add_remove", (), "adding or removing a record moves later ones.* Give records permanent ids"),
        ("add_remove", ("replace_one",), "adding or removing.* Set privacy.relation=replace_one, or give"),
        ("replace_one", ("replace_one",), None),
        ("add_remove", RELATIONS, None),
    ],
)
def test_a_run_warns_of_shards_of_records_that_do_not_keep_their_ids(relation, keep_ids, words):
    ledger = Ledger(Budget(10.0, relation=relation), 60)
    services = Services(ledger, Key.seeded("ids"))
    data = PrivateData(torch.from_numpy(IMAGES[:, None]), torch.from_numpy(LABELS), 3, services, keep_ids=keep_ids)
    data.mechanism("votes", sample=EveryShard(3), bound=Votes(bins=4, k=2, voters="shards"), times=1)
    if words is None:
        assert ledger.warnings == []
    else:
        (warning,) = ledger.warnings
        assert re.search(words, warning)


SPLIT = {
    f"{split}_{what}": part for split in ("train", "test") for what, part in (("images", IMAGES), ("labels", LABELS))
}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"images": IMAGES, "labels": LABELS, "train_ids": np.arange(60)},
            "holds train_ids and has no split; name .* ids",
        ),
        ({**SPLIT, "ids": np.arange(60)}, "holds ids and has a split; name the array train_ids"),
    ],
)
def test_ids_that_would_be_ignored_are_refused(arrays, message, tmp_path):
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        Npz(str(tmp_path / "own.npz")).load("train")

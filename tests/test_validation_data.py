"""`Validation`: settings are chosen on training records alone, and no record decides the split of another one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.data.datasets import Digits
from dpgen_bench.data.federations import Clients
from dpgen_bench.data.npz import Npz
from dpgen_bench.data.records import Records, Split
from dpgen_bench.data.validation import Validation


@dataclass(frozen=True)
class Part(Digits):
    """Digits without the training record `left_out`. Reading its test records is an error."""

    left_out: int = -1

    def load(self, split: Split) -> Records:
        assert split == "train", "test records of the base were read"
        records = super().load("train")
        kept = torch.arange(len(records)) != self.left_out
        return Records(records.images[kept], records.labels[kept])


def rows(records: Records) -> list[bytes]:
    return [image.numpy().tobytes() for image in records.images]


def test_both_splits_are_the_training_records_of_the_base():
    validation, base = Validation(Part()), Digits().load("train")
    train, test = validation.load("train"), validation.load("test")
    assert sorted(rows(train) + rows(test)) == sorted(rows(base))
    assert not set(rows(train)) & set(rows(test))
    # The number of test records is binomial: 1,437 of probability 1/6, a standard deviation of 14.
    assert len(test) == pytest.approx(len(base) / 6, abs=60)
    label = dict(zip(rows(base), base.labels.tolist(), strict=True))
    assert all(label[row] == y for row, y in zip(rows(test), test.labels.tolist(), strict=True))


@pytest.mark.parametrize("left_out", [0, 700])
def test_a_record_that_is_removed_moves_no_other(left_out):
    before, after = Validation(Part()), Validation(Part(left_out=left_out))
    gone = rows(Digits().load("train"))[left_out]
    for split in ("train", "test"):
        assert rows(after.load(split)) == [row for row in rows(before.load(split)) if row != gone]


@pytest.mark.parametrize("fraction", [0.1, 1 / 6, 0.5])
def test_the_fraction_holds_for_a_base_whose_own_split_is_by_pixels(tmp_path, fraction):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "all.npz", images=rng.integers(0, 256, (2000, 8, 8), np.uint8), labels=np.arange(2000) % 3)
    base = Npz(str(tmp_path / "all.npz"))
    part = len(Validation(base, fraction=fraction).load("test")) / len(base.load("train"))
    assert abs(part - fraction) < 4 * (fraction * (1 - fraction) / 1600) ** 0.5


def test_what_enters_the_run_id():
    identities = [each.identity() for each in (
        Validation("digits"), Validation("mnist"), Validation("digits", fraction=0.3), Validation("digits", name="x")
    )]  # fmt: skip
    assert len({str(each) for each in identities}) == 4
    spec = build_spec(compose_config(["method=dp_gauss", "dataset=validation_digits", "privacy.epsilon=1"]))
    assert spec.training["dataset"]["base"] == Digits().identity()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base": "mnits"}, "expected dataset.base among mnist, fashion_mnist, digits, cifar10, emnist, or a dataset"),
        ({"base": 3}, "expected dataset.base to be a dataset or the name of one, got 3"),
        ({"base": Clients("digits", 4)}, "expected dataset.base without clients, got 'clients'"),
        ({"base": "digits", "fraction": 1.0}, r"expected dataset.fraction in \(0, 1\), got 1.0"),
    ],
)
def test_wrong_settings_are_refused_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        Validation(**settings)


def test_a_split_without_records_is_refused():
    with pytest.raises(
        ValueError, match=r"expected test records, got none: choose another dataset.fraction than 1e-09"
    ):
        Validation("digits", fraction=1e-9).load("test")


def test_an_image_folder_of_ones_own(tmp_path):
    from PIL import Image

    for number in range(40):
        folder = tmp_path / "images" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 6 * number).save(folder / f"{number}.png")
    base = f"dataset.base.path={tmp_path / 'images'}"
    words = ["method=dp_gauss", "dataset=validation_image_folder", base, "dataset.base.image_size=8"]
    dataset = build_spec(compose_config([*words, "privacy.epsilon=1"])).dataset()
    assert len(dataset.load("train")) + len(dataset.load("test")) == len(dataset.source.load("train")) < 40

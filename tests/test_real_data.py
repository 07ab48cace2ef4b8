"""The method real_data: its records are exact and in order, and a finite budget is refused."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor

from dpgen_bench.config.building import build_dataset
from dpgen_bench.config.compose import compose_config
from dpgen_bench.data.private import PrivateData
from dpgen_bench.data.records import Records
from dpgen_bench.generator import Generator
from dpgen_bench.method import Context
from dpgen_bench.privacy.accountants.calibration import BudgetExceeded
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from dpgen_bench.runs.execute import RunFailed, execute
from dpgen_bench.store.folders import Store
from dpgen_bench.testing import check_method
from methods.real_data import RealData, RealRecords


def numbered(labels: list[int] | Tensor) -> RealRecords:
    """Records whose pixels are the record's number."""
    labels = torch.as_tensor(labels, dtype=torch.int64)
    number = torch.arange(len(labels))
    images = torch.stack([number // 256, number % 256], dim=1).to(torch.uint8).reshape(-1, 1, 1, 2)
    return RealRecords(images, labels, int(labels.max()) + 1 if len(labels) else 1)


def numbers(images: Tensor) -> list[int]:
    """The numbers of the records that these images show."""
    return (images[:, 0, 0, 0].long() * 256 + images[:, 0, 0, 1].long()).tolist()


def fit(images: Tensor, labels: Tensor, *, epsilon: float = math.inf, public_n: int | None = None) -> RealRecords:
    n = len(labels) if public_n is None else public_n
    data = PrivateData(images, labels, 4, Services(Ledger(Budget(epsilon), n), Key.seeded("test")), public_n=public_n)
    return RealData().fit(data, Context(0, "cpu", services=data._services))


def configured(results, *overrides: str):
    config = compose_config(
        ["method=real_data", "dataset=digits", f"results={results}", "runtime.progress=false", *overrides]
    )
    OmegaConf.set_struct(config, False)
    config.protocol = {
        "name": "toy",
        "num_samples": 40,
        "labels": "balanced",
        "metrics": {"brightness": {"_target_": "tests.toys.Brightness"}},
    }
    return config


label_lists = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@given(label_lists, st.booleans(), st.integers(0, 5), st.integers(0, 3))
def test_the_whole_set_is_in_its_own_order_for_any_seed(labels, in_classes, seed, more):
    real = numbered(sorted(labels) if in_classes else labels)
    drawn = real.draw_labels(len(labels) + more, seed)
    assert torch.equal(drawn, real.labels)
    assert torch.equal(real.sample(drawn, seed), real.images)


@given(label_lists, st.booleans(), st.integers(0, 5), st.floats(0, 1))
def test_a_part_is_of_distinct_records(labels, in_classes, seed, part):
    real = numbered(sorted(labels) if in_classes else labels)
    n = int(part * (len(labels) - 1))
    drawn = real.draw_labels(n, seed)
    chosen = numbers(real.sample(drawn, seed))
    assert len(set(chosen)) == n
    assert torch.equal(real.labels[chosen], drawn)


def test_a_part_has_the_classes_in_their_proportions_and_another_seed_takes_others():
    """Class counts of a random half of 3,000: hypergeometric, deviation at most 13.7; false alarm below 1e-6."""
    real = numbered([0] * 1500 + [1] * 1000 + [2] * 500)  # in classes, like a folder of folders
    parts = [numbers(real.sample(real.draw_labels(1500, seed), seed)) for seed in range(4)]
    for part in parts:
        counts = Counter(real.labels[part].tolist())
        assert [counts[k] for k in range(3)] == pytest.approx([750, 500, 250], abs=75)
    assert len({tuple(sorted(part)) for part in parts}) == 4


def test_an_image_depends_on_the_seed_its_position_and_its_label_alone():
    rng = torch.Generator().manual_seed(0)
    real = numbered(torch.randint(4, (100,), generator=rng))
    labels = torch.randint(4, (130,), generator=rng)  # more than there are records
    images = real.sample(labels, 1)
    assert torch.equal(real.labels[numbers(images)], labels)
    for n in (0, 1, 99, 100, 101):
        assert torch.equal(real.sample(labels[:n], 1), images[:n])
    for i in (0, 50, 129):
        others = (labels + 1) % 4
        others[i] = labels[i]
        assert torch.equal(real.sample(others, 1)[i], images[i])
    assert not torch.equal(real.sample(labels, 2), images)
    assert torch.equal(real.sample_unrounded(labels, 1), images.float())


def test_labels_of_the_protocol_give_most_records_of_a_class():
    """1,000 balanced labels of 10,000 records: were each drawn with replacement, 95% would be distinct."""
    real = numbered(torch.arange(10_000) // 1000)
    labels = torch.arange(1000) % 10
    chosen = numbers(real.sample(labels, 0))
    assert torch.equal(real.labels[chosen], labels)
    assert len(set(chosen)) > 930


@pytest.mark.parametrize("wrong", [1, 3, -1])
def test_a_class_without_records_is_an_error(wrong):
    real = RealRecords(torch.zeros(4, 1, 1, 1, dtype=torch.uint8), torch.tensor([0, 2, 2, 0]), 4)
    with pytest.raises(ValueError, match=rf"have training records \(\[0, 2\]\), got \[{wrong}\]"):
        real.sample(torch.tensor([0, wrong]), 0)
    assert len(real.sample(torch.tensor([2, 0]), 0)) == 2


def test_every_pixel_value_is_released_exactly():
    images = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)
    released = fit(images, torch.tensor([3, 0, 1, 3]))
    assert torch.equal(released.images, images)
    assert released.images.dtype == torch.uint8
    by_another_division = torch.nextafter(images.float() / 255.0, torch.tensor(0.0))  # as an accelerator's may be
    assert torch.equal(fit(by_another_division, torch.tensor([3, 0, 1, 3])).images, images)
    assert released.labels.tolist() == [3, 0, 1, 3]
    assert released.image_shape == (1, 8, 8)


@pytest.mark.parametrize(("public_n", "left"), [(6, 4), (4, 4), (3, 3)])
def test_a_draw_whose_size_differs_from_the_public_one(public_n, left):
    images = torch.randint(256, (4, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    released = fit(images, torch.tensor([0, 1, 2, 3]), public_n=public_n)
    assert torch.equal(released.images, images[:left])
    assert released.labels.tolist() == [0, 1, 2, 3][:left]


def test_the_records_survive_saving(tmp_path):
    real = numbered([2, 0, 1, 1, 0, 2, 2])
    real.save(tmp_path)
    loaded = Generator.load(tmp_path)
    assert isinstance(loaded, RealRecords)
    assert loaded.num_classes == 3
    labels = torch.tensor([1, 1, 0, 2, 2, 2, 0, 1])
    assert torch.equal(loaded.sample(labels, 4), real.sample(labels, 4))
    assert torch.equal(loaded.draw_labels(3, 4), real.draw_labels(3, 4))


def test_it_has_no_trained_parameter():
    assert numbered([0, 1]).num_parameters == 0


def test_a_finite_budget_is_refused_before_any_record_is_read(tmp_path):
    with pytest.raises(BudgetExceeded, match=r"got privacy.epsilon=10; set privacy.epsilon=inf"):
        fit(torch.zeros(2, 1, 1, 1, dtype=torch.uint8), torch.tensor([0, 1]), epsilon=10.0)
    with pytest.raises(RunFailed, match=r"releases the records themselves.*set privacy.epsilon=inf"):
        execute(configured(tmp_path, "privacy.epsilon=10"))
    run = Store(tmp_path).runs()[0]
    assert Ledger.load(run.path / "ledger.json").entries == {}
    assert not run.trained


def test_a_run_gives_the_training_set_back(tmp_path):
    config = configured(tmp_path, "privacy.epsilon=inf")
    folder = execute(config)
    ledger = Ledger.load(folder.path / "ledger.json")
    assert ledger.epsilon is not None
    assert ledger.epsilon["proven"] == "inf"
    train = build_dataset(config).load("train")
    real = Generator.load(folder.path)
    labels = real.draw_labels(10**6, 7)
    assert labels is not None
    assert Records(real.sample(labels, 7), labels).content_hash == train.content_hash


def test_it_conforms():
    check_method(RealData, budget=Budget(math.inf))

"""Accuracies calibrated by that of real training records, which a cache keeps for all runs."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpgen_bench.data.records import MissingData, Records
from dpgen_bench.evaluate import classifiers
from dpgen_bench.evaluate.classifiers import Sklearn
from dpgen_bench.evaluate.metric import EvalContext, evaluate
from dpgen_bench.evaluate.utility import Accuracy
from tests.accuracy_toys import FITS, Memory, Own, Remember, context, plain, shades, swap


@pytest.fixture
def fits() -> list[tuple[Records, int]]:
    FITS.clear()
    return FITS


@pytest.fixture
def test() -> Records:
    return shades([0, 1] * 10)


# What it gives


def test_accuracies_are_the_shares_of_right_answers(test, tmp_path):
    """Samples: 15 of 20 right; real records: 16 of 20 right; calibrated: 15/16."""
    ctx = context(tmp_path, swap(test, 4))
    values = Accuracy("mlp", Remember())(swap(test, 5), test, ctx)
    assert values == {
        "acc_mlp_pct": pytest.approx(75.0),
        "acc_mlp_real_pct": pytest.approx(80.0),
        "acc_mlp_calibrated_pct": pytest.approx(93.75),
    }
    assert ctx.notes == ["trained"]  # the reference's own would come with the run that fills the cache and no other
    assert Accuracy("cnn", Remember(), calibrate=False)(swap(test, 5), test, ctx) == {
        "acc_cnn_pct": pytest.approx(75.0)
    }


def test_better_than_real_is_above_100(test, tmp_path):
    values = Accuracy("nb", Remember())(test, test, context(tmp_path, swap(test, 10)))
    assert values["acc_nb_calibrated_pct"] == pytest.approx(200.0)


def test_without_real_training_records_the_plain_accuracy_still_comes(test, tmp_path):
    for more, reason in (
        ({"train_closed": "this run's records were promised away"}, "records were promised away"),
        ({}, "the context has no dataset to load them from"),
    ):
        result = evaluate(Accuracy("mlp", Remember()), swap(test, 5), test, context(tmp_path, **more))
        assert result.status == "measured"
        assert result.values == {"acc_mlp_pct": pytest.approx(75.0)}
        (note,) = [note for note in result.notes if note != "trained"]
        assert note.startswith("acc_mlp_calibrated_pct not measured: ")
        assert reason in note
    assert not list(tmp_path.iterdir())


def test_a_reference_that_is_never_right_calibrates_nothing(test, tmp_path):
    result = evaluate(Accuracy("mlp", Remember()), test, test, context(tmp_path, swap(test, 20)))
    assert result.values == {"acc_mlp_pct": 100.0, "acc_mlp_real_pct": 0.0}
    assert any("after training on real records is 0" in note for note in result.notes)


def test_a_wrong_number_of_predictions_is_an_error(test, tmp_path):
    class OneShort(Remember):
        def fit(self, records, ctx):
            return self

        def predict(self, images):
            return torch.zeros(len(images) - 1, dtype=torch.int64)

    with pytest.raises(ValueError, match=r"expected 20 predicted labels, got \(19,\)"):
        plain(OneShort())(test, test, context(tmp_path))


def test_the_metric_seeds_what_draws_from_global_generators(test, tmp_path):
    """A classifier without a seed of its own, called directly and not by `evaluate`; the reference has its own seed."""

    @dataclass(frozen=True)
    class Dice(Remember):
        def fit(self, records, ctx):
            draws = torch.randint(0, 2, (20,)).tolist()
            return Memory(dict(zip((image.numpy().tobytes() for image in test.images), draws, strict=True)), 0)

    def figures(seed: int, train: Records | None) -> dict[str, float]:
        ctx = context(tmp_path / str(torch.initial_seed()) / str(seed), train, seed)
        return Accuracy("it", Dice())(shades([0, 1]), test, ctx)

    torch.manual_seed(1)
    first = figures(7, shades([0, 1, 1]))
    torch.manual_seed(2)
    again, other = figures(7, shades([0, 1, 1])), figures(8, shades([0, 1, 1]))
    assert first == again
    assert first["acc_it_pct"] != other["acc_it_pct"]
    assert first["acc_it_real_pct"] == other["acc_it_real_pct"]


# The cache of what real records give


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "classifiers").glob("*.npz"))


def test_the_reference_is_trained_once_for_all_runs(test, tmp_path, fits):
    real = swap(test, 4)
    metric = Accuracy("mlp", Remember())
    first = metric(swap(test, 5), test, context(tmp_path, real, seed=3))
    assert [seed for _, seed in fits] == [0, 3]
    fits.clear()
    again = metric(swap(test, 6), test, context(tmp_path, real, seed=4))
    assert [seed for _, seed in fits] == [4]
    assert again["acc_mlp_real_pct"] == first["acc_mlp_real_pct"]
    # Another name is the same classifier; and kept predictions are scored with whatever labels the test set has.
    renamed = Accuracy("cnn", Remember())(test, swap(test, 1), context(tmp_path, real))
    assert [seed for _, seed in fits] == [4, 0]
    assert renamed["acc_cnn_real_pct"] == pytest.approx(85.0)
    assert len(cached(tmp_path)) == 1


def test_whatever_decides_is_in_the_key(test, tmp_path, fits, monkeypatch):
    real = swap(test, 4)

    def references(metric: Accuracy, train: Records, real_test: Records) -> int:
        """How many files there are when this one is among them."""
        metric(shades([0]), real_test, context(tmp_path, train, seed=1))
        return len(cached(tmp_path))

    assert references(Accuracy("it", Remember()), real, test) == 1
    assert references(Accuracy("it", Remember(otherwise=1)), real, test) == 2
    assert references(Accuracy("it", Remember()), swap(test, 5), test) == 3  # the labels of the training records
    assert references(Accuracy("it", Remember()), real, shades([0, 1] * 10, seed=9)) == 4
    svc = "sklearn.svm.LinearSVC"
    assert references(Accuracy("it", Sklearn(svc)), real, test) == 5
    assert references(Accuracy("it", Sklearn(svc, {"C": 2.0})), real, test) == 6
    monkeypatch.setattr(classifiers, "REVISION", -1)
    assert references(Accuracy("it", Sklearn(svc)), real, test) == 7
    assert references(Accuracy("it", Remember()), real, test) == 7


def test_a_run_of_real_data_fills_the_cache_and_is_filled_by_it(test, tmp_path, fits):
    real = swap(test, 4)
    same = Records(real.images.clone(), real.labels.clone())
    metric = Accuracy("mlp", Remember())
    values = metric(same, test, context(tmp_path, real))
    assert [seed for _, seed in fits] == [0]
    assert values == {"acc_mlp_pct": 80.0, "acc_mlp_real_pct": 80.0, "acc_mlp_calibrated_pct": 100.0}
    assert metric(same, test, context(tmp_path, real)) == values
    assert [seed for _, seed in fits] == [0]
    metric(same, test, context(tmp_path, real, seed=2))  # another seed is another training
    metric(Records(real.images, 1 - real.labels), test, context(tmp_path, real))  # same images, other labels
    assert [seed for _, seed in fits] == [0, 2, 0]


def test_a_cache_that_cannot_be_used_costs_no_figure(test, tmp_path, fits):
    (tmp_path / "classifiers").write_text("a file in the folder's place")
    metric, ctx = Accuracy("mlp", Remember()), context(tmp_path, swap(test, 4), seed=1)
    with pytest.warns(UserWarning, match="is not kept there"):
        values = metric(swap(test, 5), test, ctx)
    assert set(values) == {"acc_mlp_pct", "acc_mlp_real_pct", "acc_mlp_calibrated_pct"}


def test_missing_training_files_cost_the_calibration_alone(test, tmp_path):
    class Missing(Own):
        def load(self, split):
            raise MissingData("no files at PLACE")

    ctx = replace(context(tmp_path, test, seed=1), dataset=Missing(test))
    result = evaluate(Accuracy("mlp", Remember()), test, test, ctx)
    assert set(result.values) == {"acc_mlp_pct"}
    assert "no files at PLACE" in result.notes[0]


def test_real_data_measured_without_calibration_share_the_reference_too(test, tmp_path, fits):
    real = swap(test, 4)
    plain = Accuracy("mlp", Remember(), calibrate=False)
    assert plain(Records(real.images.clone(), real.labels), test, context(tmp_path, real)) == {"acc_mlp_pct": 80.0}
    Accuracy("mlp", Remember())(swap(test, 5), test, context(tmp_path, real, seed=1))
    assert [seed for _, seed in fits] == [0, 1]
    plain(
        swap(test, 5), test, context(tmp_path, real)
    )  # other samples are trained on, and no reference is made for them
    assert [seed for _, seed in fits] == [0, 1, 0]
    assert len(cached(tmp_path)) == 1


def spoil(path: Path, how: str) -> None:
    if how == "cut":
        path.write_bytes(path.read_bytes()[:40])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        with np.load(path) as kept:
            content = dict(kept)
        content |= {
            "foreign": {"key": np.array("another")},
            "short": {"predictions": content["predictions"][:-1]},
            "fractions": {"predictions": content["predictions"] / 2},
        }[how]
        np.savez(path, **content)


@pytest.mark.parametrize("how", ["cut", "empty", "foreign", "short", "fractions"])
def test_a_damaged_cache_is_reported_and_mended(how, test, tmp_path, fits):
    metric, ctx = Accuracy("mlp", Remember()), context(tmp_path, swap(test, 4), seed=1)
    good = metric(test, test, ctx)
    (path,) = cached(tmp_path)
    spoil(path, how)
    with pytest.warns(UserWarning, match=r"classifiers.*computed again"):
        assert metric(test, test, ctx) == good
    assert [seed for _, seed in fits] == [0, 1, 0, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert metric(test, test, ctx) == good
    assert [seed for _, seed in fits] == [0, 1, 0, 1, 1]


def test_an_interrupted_training_leaves_nothing(test, tmp_path):
    class Stopped(Remember):
        def fit(self, records, ctx):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Accuracy("mlp", Stopped())(test, test, context(tmp_path, swap(test, 4)))
    assert not cached(tmp_path)
    values = Accuracy("mlp", Remember())(test, test, context(tmp_path, swap(test, 4)))
    assert values["acc_mlp_real_pct"] == pytest.approx(80.0)


@dataclass(frozen=True)
class Slow(Remember):
    """Writes a line for each training, and takes long enough for another process to come."""

    diary: str = ""

    def fit(self, records: Records, ctx: EvalContext) -> Memory:
        with open(self.diary, "a") as file:
            file.write(f"{ctx.seed}\n")
        time.sleep(0.5)
        return super().fit(records, ctx)


def measure_slowly(diary: str, cache: Path, gate: Any, answers: Any, seed: int) -> None:
    test = shades([0, 1] * 10)
    gate.wait(timeout=60)
    metric = Accuracy("it", Slow(diary=diary))
    answers.put(metric(test, test, context(cache, swap(test, 4), seed=seed))["acc_it_real_pct"])


def test_two_processes_train_the_reference_once(tmp_path):
    diary, start = tmp_path / "diary", multiprocessing.get_context("fork")  # others import torch anew: half a minute
    gate, answers = start.Barrier(2), start.SimpleQueue()
    both = [
        start.Process(target=measure_slowly, args=(str(diary), tmp_path, gate, answers, seed), daemon=True)
        for seed in (1, 2)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=60)
    assert [process.exitcode for process in both] == [0, 0]
    assert [answers.get(), answers.get()] == [pytest.approx(80.0)] * 2
    assert sorted(diary.read_text().split()) == ["0", "1", "2"]
    assert len(cached(tmp_path)) == 1

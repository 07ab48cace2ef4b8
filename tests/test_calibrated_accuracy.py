"""Tests of accuracies calibrated by that of the real training records, whose predictions are cached for all runs."""

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


# Values


def test_accuracies_are_the_shares_of_right_answers(test, tmp_path):
    """15 of 20 predictions are correct after training on samples, 16 after training on real records: 15/16."""
    ctx = context(tmp_path, swap(test, 4))
    values = Accuracy("mlp", Remember())(swap(test, 5), test, ctx)
    assert values == {
        "acc_mlp_pct": pytest.approx(75.0),
        "acc_mlp_real_pct": pytest.approx(80.0),
        "acc_mlp_calibrated_pct": pytest.approx(93.75),
    }
    assert ctx.notes == ["trained"]  # only the run that fills the cache would get the notes of the reference
    assert Accuracy("cnn", Remember(), calibrate=False)(swap(test, 5), test, ctx) == {
        "acc_cnn_pct": pytest.approx(75.0)
    }


def test_better_than_real_is_above_100(test, tmp_path):
    values = Accuracy("nb", Remember())(test, test, context(tmp_path, swap(test, 10)))
    assert values["acc_nb_calibrated_pct"] == pytest.approx(200.0)


def test_without_real_training_records_the_plain_accuracy_is_measured(test, tmp_path):
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


def test_a_reference_with_accuracy_0_gives_no_calibrated_accuracy(test, tmp_path):
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
    """A classifier that uses global generators, not called by `evaluate`; the reference has its own seed."""

    @dataclass(frozen=True)
    class Dice(Remember):
        def fit(self, records, ctx):
            draws = torch.randint(0, 2, (20,)).tolist()
            return Memory(dict(zip((image.numpy().tobytes() for image in test.images), draws, strict=True)), 0)

    def values_of(seed: int, train: Records | None) -> dict[str, float]:
        ctx = context(tmp_path / str(torch.initial_seed()) / str(seed), train, seed)
        return Accuracy("it", Dice())(shades([0, 1]), test, ctx)

    torch.manual_seed(1)
    first = values_of(7, shades([0, 1, 1]))
    torch.manual_seed(2)
    again, other = values_of(7, shades([0, 1, 1])), values_of(8, shades([0, 1, 1]))
    assert first == again
    assert first["acc_it_pct"] != other["acc_it_pct"]
    assert first["acc_it_real_pct"] == other["acc_it_real_pct"]


# The cache of predictions after training on real records


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
    # The name is not part of the key; kept predictions are scored with the labels of the present test set.
    renamed = Accuracy("cnn", Remember())(test, swap(test, 1), context(tmp_path, real))
    assert [seed for _, seed in fits] == [4, 0]
    assert renamed["acc_cnn_real_pct"] == pytest.approx(85.0)
    assert len(cached(tmp_path)) == 1


def test_all_that_predictions_depend_on_is_in_the_key(test, tmp_path, fits, monkeypatch):
    real = swap(test, 4)

    def references(metric: Accuracy, train: Records, real_test: Records) -> int:
        """The number of cached files after this measurement."""
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


def test_a_run_of_real_data_fills_the_cache_and_reads_it(test, tmp_path, fits):
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


def test_a_cache_that_cannot_be_used_costs_no_value(test, tmp_path, fits):
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
    # Training on other samples needs no reference.
    plain(swap(test, 5), test, context(tmp_path, real))
    assert [seed for _, seed in fits] == [0, 1, 0]
    assert len(cached(tmp_path)) == 1


def corrupt(path: Path, how: str) -> None:
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
def test_a_damaged_cache_is_reported_and_replaced(how, test, tmp_path, fits):
    metric, ctx = Accuracy("mlp", Remember()), context(tmp_path, swap(test, 4), seed=1)
    good = metric(test, test, ctx)
    (path,) = cached(tmp_path)
    corrupt(path, how)
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
    """Writes a line for each training, which takes long enough for another process to start."""

    trainings_log: str = ""

    def fit(self, records: Records, ctx: EvalContext) -> Memory:
        with open(self.trainings_log, "a") as file:
            file.write(f"{ctx.seed}\n")
        time.sleep(0.5)
        return super().fit(records, ctx)


def measure_slowly(trainings_log: str, cache: Path, gate: Any, answers: Any, seed: int) -> None:
    test = shades([0, 1] * 10)
    gate.wait(timeout=60)
    metric = Accuracy("it", Slow(trainings_log=trainings_log))
    answers.put(metric(test, test, context(cache, swap(test, 4), seed=seed))["acc_it_real_pct"])


def test_two_processes_train_the_reference_once(tmp_path):
    trainings_log, start = (
        tmp_path / "trainings_log",
        multiprocessing.get_context("fork"),
    )  # other methods import torch again, for half a minute
    gate, answers = start.Barrier(2), start.SimpleQueue()
    both = [
        start.Process(target=measure_slowly, args=(str(trainings_log), tmp_path, gate, answers, seed), daemon=True)
        for seed in (1, 2)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=60)
    assert [process.exitcode for process in both] == [0, 0]
    assert [answers.get(), answers.get()] == [pytest.approx(80.0)] * 2
    assert sorted(trainings_log.read_text().split()) == ["0", "1", "2"]
    assert len(cached(tmp_path)) == 1

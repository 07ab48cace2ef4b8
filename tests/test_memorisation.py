"""Tests of nearest images and memorisation against direct implementations, planted copies and laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate import nearest as neighbours
from dpgen_bench.evaluate.metric import EvalContext, NotMeasured, evaluate
from dpgen_bench.evaluate.nearest import Memorisation, nearest, random_positions
from tests.image_toys import context, images

# Nearest images


def written_out_nearest(queries: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    gaps = queries.double().flatten(1)[:, None] - references.double().flatten(1)[None]
    return gaps.square().sum(-1).amin(1)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 5, 5), (3, 32, 32)])
@pytest.mark.parametrize("unrounded", [False, True])
def test_nearest_is_the_smallest_of_all_distances(shape, unrounded, monkeypatch):
    monkeypatch.setattr(neighbours, "REFERENCES", 13)
    monkeypatch.setattr(neighbours, "PAIRS", 13 * 8)
    queries, references = images(30, 2, shape).images, images(45, 3, shape).images
    if unrounded:
        queries = (queries + torch.rand(queries.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 255)
    measured = nearest(queries, references)
    assert measured.dtype == torch.float64
    expected = written_out_nearest(queries, references)
    if unrounded:
        torch.testing.assert_close(measured, expected, rtol=1e-12, atol=0.0)
    else:
        assert torch.equal(measured, expected)


def test_a_copy_is_at_zero_and_one_level_off_is_not():
    """Bright, similar images of 3x32x32: |a|² is 2e8, where the last place of float32 is 16."""
    references = images(50, 4, (3, 32, 32), low=250).images
    queries = references.clone()[:20]
    queries[10:, 0, 0, 0] -= 1
    assert nearest(queries, references).tolist() == [0.0] * 10 + [1.0] * 10
    assert nearest(queries[:10].float(), references).tolist() == [0.0] * 10
    assert (nearest(queries[:10].float() - 0.001, references) > 0).all()


def test_nearest_needs_a_reference():
    with pytest.raises(ValueError, match="at least one reference"):
        nearest(images(3, 0).images, images(0, 0).images)


# Memorisation

NAMES = [
    "nn_train",
    "nn_test",
    "nn_closer_to_train_pct",
    "nn_train_all",
    "nn_test_to_train",
    "nn_copies_pct",
    "nn_num_samples",
    "nn_num_reference",
]


def blobs(n: int, seed: int) -> Records:
    """Images 1x6x6 of one distribution: a random mixture of two patterns, with noise."""
    rng = np.random.default_rng(seed)
    patterns = np.random.default_rng(0).random((2, 36))
    rows = rng.random((n, 2)) @ patterns * 90 + rng.random((n, 36)) * 40
    return Records(torch.from_numpy(rows.astype(np.uint8).reshape(n, 1, 6, 6)), torch.arange(n) % 5)


def test_equal_to_the_definitions_written_out(tmp_path):
    """60 training and 20 test images, so that three parts contain each training image once."""
    samples, train, test = images(15, 5), images(60, 6), images(20, 7)
    ctx = context(tmp_path, train)
    values = Memorisation()(samples, test, ctx)
    assert list(values) == NAMES
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    parts = torch.stack([written_out_nearest(samples.images, train.images[order[i : i + 20]]) for i in (0, 20, 40)])
    to_test = written_out_nearest(samples.images, test.images)
    closer = (parts < to_test).double() + 0.5 * (parts == to_test).double()
    expected = {
        "nn_train": parts.sqrt().mean() / 255,
        "nn_test": to_test.sqrt().mean() / 255,
        "nn_closer_to_train_pct": 100 * closer.mean(),
        "nn_train_all": written_out_nearest(samples.images, train.images).sqrt().mean() / 255,
        "nn_test_to_train": written_out_nearest(test.images, train.images).sqrt().mean() / 255,
        "nn_copies_pct": 0.0,
        "nn_num_samples": 15,
        "nn_num_reference": 20,
    }
    assert values == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-12)
    assert values["nn_train_all"] < values["nn_train"]
    assert ctx.notes == []


def test_samples_that_are_training_images(tmp_path):
    train, test = blobs(300, 1), blobs(100, 2)
    values = Memorisation()(train, test, context(tmp_path, train))
    assert (values["nn_copies_pct"], values["nn_train_all"]) == (100.0, 0.0)
    # A copy is nearer to its own part only; for the two others the expectation is 50: (100 + 50 + 50) / 3.
    assert values["nn_closer_to_train_pct"] == pytest.approx(200 / 3, abs=6)
    one_part = Memorisation()(test, blobs(100, 3), context(tmp_path, test))
    assert (one_part["nn_closer_to_train_pct"], one_part["nn_train"]) == (100.0, 0.0)


def test_copies_are_counted_one_by_one(tmp_path):
    """Three copies of 12 samples; a fourth differs from a training image by one level of one pixel."""
    train, test, samples = images(40, 8), images(40, 9), images(12, 10)
    samples.images[:4] = train.images[[3, 30, 3, 17]]
    samples.images[3, 0, 2, 2] ^= 1
    assert Memorisation()(samples, test, context(tmp_path, train))["nn_copies_pct"] == 25.0


@pytest.mark.parametrize(("num_train", "num_test"), [(300, 300), (1500, 300), (1650, 300), (300, 1500)])
def test_new_draws_of_one_distribution_score_50_at_any_sizes(num_train, num_test, tmp_path):
    """Twenty triples of sets; comparing 1,500 with 300 images would give 83. t-tests with p-value 2e-7 each."""
    measured = []
    for i in range(20):
        samples, train, test = (blobs(n, 1000 * i + n + j) for j, n in enumerate((200, num_train, num_test)))
        measured.append(Memorisation()(samples, test, context(tmp_path, train, seed=i))["nn_closer_to_train_pct"])
    values = np.array(measured)
    assert stats.ttest_1samp(values, 50).pvalue > 2e-7
    assert values.std() < 8


def test_sizes_that_do_not_divide_are_noted(tmp_path):
    samples, test, train = images(10, 11), images(30, 12), images(100, 13)
    ctx = context(tmp_path, train)
    values = Memorisation()(samples, test, ctx)
    assert values["nn_num_reference"] == 30
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    parts = [written_out_nearest(samples.images, train.images[order[i : i + 30]]) for i in (0, 30, 60)]
    assert values["nn_train"] == pytest.approx(float(torch.stack(parts).sqrt().mean()) / 255, rel=1e-12)
    (note,) = ctx.notes
    assert "3 x 30 of the 100 training images" in note
    assert "only nn_train_all and nn_copies_pct use the other 10" in note
    ctx = context(tmp_path, images(20, 13))
    assert Memorisation()(samples, test, ctx)["nn_num_reference"] == 20
    (note,) = ctx.notes
    assert "20 of the 30 test images" in note


def test_copies_of_the_remainder_are_counted(tmp_path):
    """Of 100 training images 10 are in no part of 30; copies of them are counted, too."""
    train = images(100, 13)
    assert Memorisation()(train, images(30, 12), context(tmp_path, train))["nn_copies_pct"] == 100.0


def test_exchanging_train_and_test_exchanges_the_values(tmp_path):
    """For equal sizes the distances are exchanged, and the percentage becomes its complement."""
    samples, one, two = blobs(80, 4), blobs(100, 5), blobs(100, 6)
    there = Memorisation()(samples, two, context(tmp_path, one))
    back = Memorisation()(samples, one, context(tmp_path, two))
    assert (there["nn_train"], there["nn_test"]) == (back["nn_test"], back["nn_train"])
    assert there["nn_closer_to_train_pct"] + back["nn_closer_to_train_pct"] == pytest.approx(100)
    assert there["nn_closer_to_train_pct"] != 50


def test_training_images_that_are_the_test_images_tie(tmp_path):
    records = blobs(60, 7)
    for samples in (blobs(40, 8), Records(blobs(40, 8).images + torch.rand(40, 1, 6, 6), torch.zeros(40).long())):
        values = Memorisation()(samples, records, context(tmp_path, records))
        assert values["nn_closer_to_train_pct"] == 50.0
        assert values["nn_train"] == values["nn_test"] > 0
        assert values["nn_test_to_train"] == 0.0


def test_order_of_samples_and_test_images_changes_nothing(tmp_path):
    samples, train, test = blobs(70, 9), blobs(200, 10), blobs(90, 11)
    ctx = context(tmp_path, train)
    values = Memorisation()(samples, test, ctx)

    def turned(records: Records) -> Records:
        return Records(records.images.flip(0), records.labels.flip(0))

    assert Memorisation()(turned(samples), turned(test), ctx) == pytest.approx(values, rel=1e-12)


def test_unrounded_whole_pixels_are_the_same_samples(tmp_path):
    samples, train, test = blobs(70, 9), blobs(200, 10), blobs(90, 11)
    ctx = context(tmp_path, train)
    unrounded = Records(samples.images.float(), samples.labels)
    assert Memorisation()(unrounded, test, ctx) == Memorisation()(samples, test, ctx)


def test_max_samples_are_chosen_by_the_seed(tmp_path):
    samples, train, test = blobs(70, 9), blobs(200, 10), blobs(90, 11)
    values = [Memorisation(max_samples=20)(samples, test, context(tmp_path, train, seed)) for seed in (0, 0, 1)]
    assert values[0]["nn_num_samples"] == 20
    assert values[0] == values[1]
    assert values[0]["nn_test"] != values[2]["nn_test"]
    chosen = random_positions(70, 20, seed=0)
    expected = written_out_nearest(samples.images[chosen], test.images).sqrt().mean() / 255
    assert values[0]["nn_test"] == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4, 4)])
def test_single_images_pixels_and_constant_sets_are_finite(n, shape, tmp_path):
    zeros = Records(torch.zeros(n, *shape, dtype=torch.uint8), torch.zeros(n).long())
    result = evaluate(Memorisation(), zeros, zeros, context(tmp_path, zeros))
    assert result.status == "measured"
    assert [result.values[name] for name in NAMES[:6]] == [0.0, 0.0, 50.0, 0.0, 0.0, 100.0]
    full = Records(torch.full_like(zeros.images, 255), zeros.labels)
    values = Memorisation()(full, zeros, context(tmp_path, zeros))
    assert values["nn_train"] == pytest.approx(np.sqrt(np.prod(shape)), rel=1e-12)
    assert values["nn_copies_pct"] == 0.0


def test_without_training_records_it_is_not_measured(tmp_path):
    assert evaluate(Memorisation(), images(5, 0), images(5, 1), context(tmp_path)).status == "not measured"
    closed = EvalContext(seed=0, device="cpu", num_classes=5, cache=tmp_path, train_closed="closed for a reason")
    with pytest.raises(NotMeasured, match="closed for a reason"):
        Memorisation()(images(5, 0), images(5, 1), closed)
    empty = context(tmp_path, images(0, 2))
    with pytest.raises(ValueError, match="got 0 and 5"):
        Memorisation()(images(5, 0), images(5, 1), empty)

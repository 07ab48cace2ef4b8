"""Precision, recall, density, coverage and memorisation: written-out definitions, closed forms, laws, two libraries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from prdc import compute_prdc
from scipy import stats
from torch_fidelity.metric_prc import prc_features_to_metric

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate import features
from dpgen_bench.evaluate import nearest as neighbours
from dpgen_bench.evaluate.metric import EvalContext, NotMeasured, evaluate
from dpgen_bench.evaluate.nearest import Memorisation, Prdc, nearest, picked, prdc, squared_radii, whole_numbers


def gaussian(n: int, d: int, seed: int, shift: float = 0.0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n, d)) * scale + shift).astype(np.float32)


def lattice(n: int, d: int, seed: int) -> np.ndarray:
    """Points of a small grid: copies and equal distances everywhere."""
    return np.random.default_rng(seed).integers(0, 3, (n, d)).astype(np.float32)


def written_out(made: np.ndarray, real: np.ndarray, k: int, precision_k: int) -> dict[str, float]:
    """The four definitions, pair by pair, on squared distances of whole numbers."""

    def distance(a, b):
        return float(((a.astype(np.float64) - b.astype(np.float64)) ** 2).sum())

    def radii(rows, k):
        return [sorted(distance(a, b) for j, b in enumerate(rows) if j != i)[k - 1] for i, a in enumerate(rows)]

    real_radii, made_radii, real_radii_k = radii(real, precision_k), radii(made, precision_k), radii(real, k)
    held = [[distance(x, y) < radius for y in made] for x, radius in zip(real, real_radii_k, strict=True)]
    return {
        "precision": np.mean([any(distance(x, y) <= r for x, r in zip(real, real_radii, strict=True)) for y in made]),
        "recall": np.mean([any(distance(x, y) <= r for y, r in zip(made, made_radii, strict=True)) for x in real]),
        "density": np.sum(held) / (k * len(made)),
        "coverage": np.mean([any(row) for row in held]),
    }


def by_torch_fidelity(made: np.ndarray, real: np.ndarray, k: int, save_cpu_ram: bool = False) -> dict[str, float]:
    """In float64: in float32 its distance between copies is not 0."""
    sets = (torch.from_numpy(rows.astype(np.float64)) for rows in (made, real))
    return prc_features_to_metric(
        *sets, prc_neighborhood=k, prc_batch_size=70, save_cpu_ram=save_cpu_ram, verbose=False
    )


# Precision, recall, density, coverage


def test_by_hand_on_a_line():
    """Real 0, 1, 3, 7; samples 1, 3.5, 10, 20. k = 1: real radii 1, 1, 2, 4 and sample radii 2.5, 2.5, 6.5, 10.

    <=: of the samples 1 and 3.5 lie in real balls, and 10, which is 3 from 7; recall: 20's ball ends at 10, 10's
    reaches from 3.5 to 16.5, so 0 (1's: -1.5 to 3.5), 1, 3 and 7 are all in one. <: 0's ball ends at 1, which is on its
    surface; 1's holds 1; 3's, up to 5, holds 3.5 but not 1, on its surface; 7's from 3 to 11 holds 3.5 and 10.
    """
    real, made = (np.array(rows, dtype=np.float32)[:, None] for rows in ([0, 1, 3, 7], [1, 3.5, 10, 20]))
    expected = {"precision": 3 / 4, "recall": 1.0, "density": 4 / 4, "coverage": 3 / 4}
    assert prdc(made, real, k=1, precision_k=1) == expected


@pytest.mark.parametrize(("n", "m", "d", "k", "precision_k"), [(40, 30, 3, 5, 3), (25, 45, 6, 2, 4), (6, 6, 2, 5, 5)])
def test_equal_to_the_definitions_written_out_with_ties(n, m, d, k, precision_k):
    made, real = lattice(n, d, 0), lattice(m, d, 1)
    assert prdc(made, real, k, precision_k) == pytest.approx(written_out(made, real, k, precision_k), rel=1e-12)


@pytest.mark.parametrize("save_cpu_ram", [False, True])
@pytest.mark.parametrize(("n", "m", "d", "shift"), [(200, 200, 64, 0.0), (150, 260, 5, 0.7), (300, 100, 300, 0.1)])
def test_precision_and_recall_are_torch_fidelitys(n, m, d, shift, save_cpu_ram):
    made, real = gaussian(n, d, 2, shift), gaussian(m, d, 3)
    values, expected = prdc(made, real, precision_k=3), by_torch_fidelity(made, real, 3, save_cpu_ram)
    assert values["precision"] == pytest.approx(expected["precision"], abs=1e-6)
    assert values["recall"] == pytest.approx(expected["recall"], abs=1e-6)


@pytest.mark.parametrize(("n", "m", "d", "shift"), [(200, 200, 64, 0.0), (150, 260, 5, 0.7), (300, 100, 300, 0.1)])
@pytest.mark.parametrize("k", [3, 5])
def test_all_four_are_prdcs_where_no_distances_are_equal(n, m, d, shift, k):
    made, real = gaussian(n, d, 4, shift), gaussian(m, d, 5)
    expected = compute_prdc(real.astype(np.float64), made.astype(np.float64), nearest_k=k)
    assert prdc(made, real, k=k, precision_k=k) == pytest.approx(expected, abs=1e-12)


def test_with_ties_each_pair_follows_its_own_authors():
    """On a grid precision and recall count a ball's surface (torch-fidelity), density and coverage do not (prdc)."""
    made, real = lattice(80, 4, 6), lattice(90, 4, 7)
    values = prdc(made, real, k=3, precision_k=3)
    fidelity, package = by_torch_fidelity(made, real, 3), compute_prdc(real, made, nearest_k=3)
    assert [values["precision"], values["recall"]] == pytest.approx([fidelity["precision"], fidelity["recall"]])
    assert [values["density"], values["coverage"]] == pytest.approx([package["density"], package["coverage"]])
    assert values["precision"] > package["precision"]
    assert values["recall"] > package["recall"]


def test_the_real_images_themselves():
    """Each ball holds its centre and k - 1 others, the k-th is on its surface: density is 1 exactly, in any width."""
    for d in (1, 10, 2048):
        rows = gaussian(120, d, 8)
        assert prdc(rows[::-1].copy(), rows) == {"precision": 1.0, "recall": 1.0, "density": 1.0, "coverage": 1.0}


def test_sets_far_apart_score_nothing():
    values = prdc(gaussian(50, 8, 9, shift=100.0), gaussian(50, 8, 10))
    assert values == {"precision": 0.0, "recall": 0.0, "density": 0.0, "coverage": 0.0}


def test_precision_and_recall_change_places_with_the_sets():
    one, two = gaussian(90, 6, 11, scale=0.8), gaussian(70, 6, 12)
    there, back = prdc(one, two), prdc(two, one)
    assert there["precision"] == back["recall"] < 1
    assert there["recall"] == back["precision"] < 1


@pytest.mark.parametrize(("n", "m"), [(400, 400), (200, 500)])
def test_expected_density_and_coverage_under_one_law(n, m):
    """Every order of distances from a real image is equally likely: density 1, and coverage 1 less the chance that its
    k nearest of m - 1 + n are all real. Means of 20 pairs of sets, by a t-test with a false alarm of 2e-7 each."""
    values = [prdc(gaussian(n, 4, 2 * i), gaussian(m, 4, 2 * i + 1)) for i in range(100, 120)]
    expected = {"density": 1.0, "coverage": 1.0 - np.prod([(m - j) / (m + n - j) for j in range(1, 6)])}
    for name, mean in expected.items():
        found = np.array([value[name] for value in values])
        assert stats.ttest_1samp(found, mean).pvalue > 2e-7
        assert found.std() < 0.1
    if n == m:
        assert expected["coverage"] == pytest.approx(1 - 2**-5, abs=1e-3)


def test_order_and_chunks_change_nothing(monkeypatch):
    made, real = gaussian(90, 20, 13, 0.1), gaussian(130, 20, 14)
    values = prdc(made, real)
    assert 0 < values["recall"] < 1
    shuffle = np.random.default_rng(0)
    assert prdc(shuffle.permutation(made), shuffle.permutation(real)) == values
    shapes = []
    whole = neighbours.squared_distances

    def watched(a, b):
        shapes.append((len(a), len(b)))
        return whole(a, b)

    monkeypatch.setattr(neighbours, "squared_distances", watched)
    for pairs in (1, 700, 2000):
        monkeypatch.setattr(neighbours, "PAIRS", pairs)
        shapes.clear()
        assert prdc(made, real) == values
        assert all(rows == 1 or rows * columns <= pairs for rows, columns in shapes)
        assert sum(rows for rows, _ in shapes) == 90 + 130 + 130


def test_scale_changes_nothing():
    made, real = gaussian(60, 20, 15), gaussian(60, 20, 16)
    assert prdc(made * 2.0**-40, real * 2.0**-40) == prdc(made, real) == prdc(made * 1024, real * 1024)


def test_distances_are_exact_and_copies_at_zero():
    """Large, nearly equal rows, where float32's |a|² + |b|² - 2 a·b has no correct digit."""
    rows = (1000.0 + gaussian(50, 2048, 17)).astype(np.float32)
    rows = np.concatenate([rows, rows[:10]])
    (whole,) = whole_numbers(rows)
    assert whole.abs().max() == 2**20
    distances = neighbours.squared_distances(whole, whole)
    assert torch.equal(distances, distances.T)
    assert torch.equal(distances, (whole[:, None].long() - whole[None].long()).square().sum(-1).double())
    assert torch.equal(distances[torch.arange(10), torch.arange(50, 60)], torch.zeros(10, dtype=torch.float64))
    (radius,) = squared_radii(whole, (1,))
    assert (radius == 0).sum() == 20


def test_rounding_features_moves_distances_by_less_than_a_millionth():
    rows = np.random.default_rng(18).gamma(0.5, 0.6, (40, 2048)).astype(np.float32)
    (whole,) = whole_numbers(rows)
    exact = np.linalg.norm(rows[:, None].astype(np.float64) - rows[None], axis=-1)[np.triu_indices(40, 1)]
    found = neighbours.squared_distances(whole, whole).sqrt().numpy()[np.triu_indices(40, 1)]
    np.testing.assert_allclose(found * (rows.max() / 2**20), exact, rtol=1e-6)


@pytest.mark.parametrize(("value", "precision", "recall"), [(0.0, 1.0, 1 / 60), (50.0, 0.0, 0.0)])
def test_constant_samples_are_defined(value, precision, recall):
    """All samples one point: at a real image, which alone is recalled, or far from all."""
    real = gaussian(60, 5, 19)
    real[7] = 0.0
    values = prdc(np.full((30, 5), value, dtype=np.float32), real)
    assert (values["precision"], values["recall"]) == (precision, pytest.approx(recall))
    assert (values["density"] > 0, values["coverage"] > 0) == (precision > 0, precision > 0)


def test_two_constant_sets_are_defined():
    """Balls of radius 0 around one point: the surface is all there is of them."""
    zeros = np.zeros((10, 3), dtype=np.float32)
    assert prdc(zeros, zeros) == {"precision": 1.0, "recall": 1.0, "density": 0.0, "coverage": 0.0}


def test_refusals():
    with pytest.raises(ValueError, match="at least 6 of the samples, each with 5 neighbours, got 5"):
        prdc(gaussian(5, 2, 0), gaussian(6, 2, 1))
    with pytest.raises(ValueError, match="at least 8 of the real images, each with 7 neighbours, got 7"):
        prdc(gaussian(9, 2, 0), gaussian(7, 2, 1), k=2, precision_k=7)
    prdc(gaussian(6, 2, 0), gaussian(6, 2, 1))
    with pytest.raises(ValueError, match="finite"):
        prdc(np.full((6, 2), np.nan, dtype=np.float32), gaussian(6, 2, 1))


# The metric in features


@dataclass(frozen=True)
class Given:
    """Stands for a dataset: `load` gives the training records it was made with."""

    records: Records

    def load(self, split: str) -> Records:
        assert split == "train"
        return self.records


def images(n: int, seed: int, shape: tuple[int, ...] = (1, 6, 6), low: int = 0, high: int = 256) -> Records:
    drawn = np.random.default_rng(seed).integers(low, high, (n, *shape), dtype=np.uint8)
    return Records(torch.from_numpy(drawn), torch.arange(n) % 5)


def context(tmp_path, train: Records | None = None, seed: int = 0) -> EvalContext:
    dataset = None if train is None else Given(train)
    return EvalContext(seed=seed, device="cpu", num_classes=5, cache=tmp_path, dataset=dataset)


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, bool]]:
    """Features are the pixels; the list gets (images, real) of each call."""
    calls: list[tuple[int, bool]] = []

    def features_of(records: Records, ctx: EvalContext, *, real: bool) -> np.ndarray:
        calls.append((len(records), real))
        return records.images.flatten(1).numpy().astype(np.float32)

    monkeypatch.setattr(features, "features_of", features_of, raising=False)
    return calls


def test_prdc_names_and_numbers(tmp_path, asked):
    samples, test, ctx = images(50, 0), images(40, 1), context(tmp_path)
    values = Prdc()(samples, test, ctx)
    assert list(values) == ["precision", "recall", "density", "coverage", "prdc_num_samples", "prdc_num_reference"]
    assert asked == [(50, False), (40, True)]
    rows = [records.images.flatten(1).numpy().astype(np.float32) for records in (samples, test)]
    assert values == prdc(*rows, 5, 3) | {"prdc_num_samples": 50, "prdc_num_reference": 40}
    assert ctx.notes == []


def test_prdc_chooses_among_more_images_by_the_seed(tmp_path, asked, monkeypatch):
    seen = []
    monkeypatch.setattr(neighbours, "prdc", lambda made, real, *_: seen.append((made, real)) or {})
    samples, test = images(50, 0), images(30, 1)
    for seed in (0, 0, 1):
        values = Prdc(max_images=20)(samples, test, context(tmp_path, seed=seed))
        assert values == {"prdc_num_samples": 20, "prdc_num_reference": 20}
    for made, real in seen:
        for rows, records in ((made, samples), (real, test)):
            among = {row.tobytes() for row in records.images.flatten(1).float().numpy()}
            assert len({row.tobytes() for row in rows} & among) == 20
    assert np.array_equal(seen[0][0], seen[1][0])
    assert not np.array_equal(seen[0][0], seen[2][0])


def test_a_choice_is_spread_over_all_positions():
    chosen = picked(1000, 400, seed=0)
    assert len(chosen.unique()) == 400
    assert 450 < float(chosen.double().mean()) < 550
    assert not torch.equal(chosen, picked(1000, 400, seed=1))
    assert torch.equal(picked(10, 10, seed=0), torch.arange(10))


def test_copies_are_noted(tmp_path, asked):
    test = images(40, 1)
    grey = Records(torch.full((30, 1, 6, 6), 128, dtype=torch.uint8), torch.arange(30) % 5)
    ctx = context(tmp_path)
    result = evaluate(Prdc(), grey, test, ctx)
    assert result.status == "measured"
    assert result.values["recall"] == 0.0
    (note,) = result.notes
    assert "30 of the 30 samples used equal 3 or more others (1 are distinct)" in note
    three = Records(test.images.repeat(3, 1, 1, 1), test.labels.repeat(3))
    assert evaluate(Prdc(), three, test, ctx).notes == []
    (note,) = evaluate(Prdc(2, 2), three, test, ctx).notes
    assert "120 of the 120 samples used equal 2 or more others (40 are distinct)" in note
    (note,) = evaluate(Prdc(2, 2), test, three, ctx).notes
    assert "120 of the 120 real test images used equal 2 or more" in note


def test_prdc_too_few_images_are_an_error_before_any_feature(tmp_path, asked):
    result = evaluate(Prdc(max_images=5), images(50, 0), images(40, 1), context(tmp_path))
    assert result.status == "failed"
    assert "at least 6 of the samples" in result.reason
    assert asked == []


@pytest.mark.parametrize("make", [lambda: Prdc(k=0), lambda: Prdc(precision_k=0), lambda: Memorisation(max_samples=0)])
def test_settings_are_checked(make):
    with pytest.raises(ValueError, match="expected"):
        make()


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
    found = nearest(queries, references)
    assert found.dtype == torch.float64
    expected = written_out_nearest(queries, references)
    if unrounded:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
    else:
        assert torch.equal(found, expected)


def test_a_copy_is_at_zero_and_one_level_off_is_not():
    """Bright, alike images of 3x32x32: |a|² is 2e8, and float32's last place 16."""
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
    """Images 1x6x6 of one law: a random mixture of two patterns, with noise."""
    rng = np.random.default_rng(seed)
    patterns = np.random.default_rng(0).random((2, 36))
    rows = rng.random((n, 2)) @ patterns * 90 + rng.random((n, 36)) * 40
    return Records(torch.from_numpy(rows.astype(np.uint8).reshape(n, 1, 6, 6)), torch.arange(n) % 5)


def test_equal_to_the_definitions_written_out(tmp_path):
    """60 training and 20 test images, so three parts that hold each training image once."""
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
    # A copy is nearer to its own part alone; to the two others it is as any image: (100 + 50 + 50) / 3.
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
def test_new_draws_of_one_law_score_50_at_any_sizes(num_train, num_test, tmp_path):
    """Twenty triples of sets; a plain comparison of 1,500 with 300 would give 83. t-tests, false alarm of 2e-7 each."""
    found = []
    for i in range(20):
        samples, train, test = (blobs(n, 1000 * i + n + j) for j, n in enumerate((200, num_train, num_test)))
        found.append(Memorisation()(samples, test, context(tmp_path, train, seed=i))["nn_closer_to_train_pct"])
    values = np.array(found)
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
    assert "the other 10 are in nn_train_all" in note
    ctx = context(tmp_path, images(20, 13))
    assert Memorisation()(samples, test, ctx)["nn_num_reference"] == 20
    (note,) = ctx.notes
    assert "20 of the 30 test images" in note


def test_a_copy_of_what_is_left_over_is_found(tmp_path):
    """Of 100 training images 10 are in no part of 30; copies of all are copies still."""
    train = images(100, 13)
    assert Memorisation()(train, images(30, 12), context(tmp_path, train))["nn_copies_pct"] == 100.0


def test_train_and_test_change_places(tmp_path):
    """Equal sizes: distances change places, and the share its complement."""
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
    chosen = picked(70, 20, seed=0)
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

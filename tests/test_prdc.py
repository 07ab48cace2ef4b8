"""Tests of precision, recall, density and coverage against direct implementations, closed forms and two libraries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prdc import compute_prdc
from scipy import stats
from torch_fidelity.metric_prc import prc_features_to_metric

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate import features
from dpgen_bench.evaluate import nearest as neighbours
from dpgen_bench.evaluate.metric import EvalContext, evaluate
from dpgen_bench.evaluate.nearest import Memorisation, Prdc, prdc, random_positions, squared_radii, whole_numbers
from tests.image_toys import context, images


def gaussian(n: int, d: int, seed: int, shift: float = 0.0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n, d)) * scale + shift).astype(np.float32)


def lattice(n: int, d: int, seed: int) -> np.ndarray:
    """Points of a small grid, with many copies and equal distances."""
    return np.random.default_rng(seed).integers(0, 3, (n, d)).astype(np.float32)


def written_out(generated: np.ndarray, real: np.ndarray, k: int, precision_k: int) -> dict[str, float]:
    """The four definitions, pair by pair, on squared distances of whole numbers."""

    def distance(a, b):
        return float(((a.astype(np.float64) - b.astype(np.float64)) ** 2).sum())

    def radii(rows, k):
        return [sorted(distance(a, b) for j, b in enumerate(rows) if j != i)[k - 1] for i, a in enumerate(rows)]

    real_radii, generated_radii, real_radii_k = radii(real, precision_k), radii(generated, precision_k), radii(real, k)
    held = [[distance(x, y) < radius for y in generated] for x, radius in zip(real, real_radii_k, strict=True)]
    return {
        "precision": np.mean(
            [any(distance(x, y) <= r for x, r in zip(real, real_radii, strict=True)) for y in generated]
        ),
        "recall": np.mean(
            [any(distance(x, y) <= r for y, r in zip(generated, generated_radii, strict=True)) for x in real]
        ),
        "density": np.sum(held) / (k * len(generated)),
        "coverage": np.mean([any(row) for row in held]),
    }


def by_torch_fidelity(generated: np.ndarray, real: np.ndarray, k: int, save_cpu_ram: bool = False) -> dict[str, float]:
    """In float64, because in float32 its distance between copies is not 0."""
    sets = (torch.from_numpy(rows.astype(np.float64)) for rows in (generated, real))
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
    real, generated = (np.array(rows, dtype=np.float32)[:, None] for rows in ([0, 1, 3, 7], [1, 3.5, 10, 20]))
    expected = {"precision": 3 / 4, "recall": 1.0, "density": 4 / 4, "coverage": 3 / 4}
    assert prdc(generated, real, k=1, precision_k=1) == expected


@pytest.mark.parametrize(("n", "m", "d", "k", "precision_k"), [(40, 30, 3, 5, 3), (25, 45, 6, 2, 4), (6, 6, 2, 5, 5)])
def test_equal_to_the_definitions_written_out_with_ties(n, m, d, k, precision_k):
    generated, real = lattice(n, d, 0), lattice(m, d, 1)
    assert prdc(generated, real, k, precision_k) == pytest.approx(
        written_out(generated, real, k, precision_k), rel=1e-12
    )


@pytest.mark.parametrize("save_cpu_ram", [False, True])
@pytest.mark.parametrize(("n", "m", "d", "shift"), [(200, 200, 64, 0.0), (150, 260, 5, 0.7), (300, 100, 300, 0.1)])
def test_precision_and_recall_equal_those_of_torch_fidelity(n, m, d, shift, save_cpu_ram):
    generated, real = gaussian(n, d, 2, shift), gaussian(m, d, 3)
    values, expected = prdc(generated, real, precision_k=3), by_torch_fidelity(generated, real, 3, save_cpu_ram)
    assert values["precision"] == pytest.approx(expected["precision"], abs=1e-6)
    assert values["recall"] == pytest.approx(expected["recall"], abs=1e-6)


@pytest.mark.parametrize(("n", "m", "d", "shift"), [(200, 200, 64, 0.0), (150, 260, 5, 0.7), (300, 100, 300, 0.1)])
@pytest.mark.parametrize("k", [3, 5])
def test_all_four_equal_those_of_prdc_if_no_distances_are_equal(n, m, d, shift, k):
    generated, real = gaussian(n, d, 4, shift), gaussian(m, d, 5)
    expected = compute_prdc(real.astype(np.float64), generated.astype(np.float64), nearest_k=k)
    assert prdc(generated, real, k=k, precision_k=k) == pytest.approx(expected, abs=1e-12)


def test_with_ties_each_pair_equals_that_of_its_authors():
    """On a grid, precision and recall include a ball's surface (torch-fidelity), density and coverage do not (prdc)."""
    generated, real = lattice(80, 4, 6), lattice(90, 4, 7)
    values = prdc(generated, real, k=3, precision_k=3)
    fidelity, package = by_torch_fidelity(generated, real, 3), compute_prdc(real, generated, nearest_k=3)
    assert [values["precision"], values["recall"]] == pytest.approx([fidelity["precision"], fidelity["recall"]])
    assert [values["density"], values["coverage"]] == pytest.approx([package["density"], package["coverage"]])
    assert values["precision"] > package["precision"]
    assert values["recall"] > package["recall"]


def test_the_real_images_themselves():
    """Each ball contains its centre and k - 1 others; the k-th is on its surface: density is exactly 1, for any d."""
    for d in (1, 10, 2048):
        rows = gaussian(120, d, 8)
        assert prdc(rows[::-1].copy(), rows) == {"precision": 1.0, "recall": 1.0, "density": 1.0, "coverage": 1.0}


def test_sets_far_apart_score_nothing():
    values = prdc(gaussian(50, 8, 9, shift=100.0), gaussian(50, 8, 10))
    assert values == {"precision": 0.0, "recall": 0.0, "density": 0.0, "coverage": 0.0}


def test_exchanging_the_sets_exchanges_precision_and_recall():
    one, two = gaussian(90, 6, 11, scale=0.8), gaussian(70, 6, 12)
    there, back = prdc(one, two), prdc(two, one)
    assert there["precision"] == back["recall"] < 1
    assert there["recall"] == back["precision"] < 1


@pytest.mark.parametrize(("n", "m"), [(400, 400), (200, 500)])
def test_expected_density_and_coverage_of_equal_distributions(n, m):
    """Every order of distances from a real image is equally likely: density is 1, and coverage 1 minus the probability
    that its k nearest of m - 1 + n are all real. Means of 20 pairs of sets, by t-tests with p-value 2e-7 each."""
    values = [prdc(gaussian(n, 4, 2 * i), gaussian(m, 4, 2 * i + 1)) for i in range(100, 120)]
    expected = {"density": 1.0, "coverage": 1.0 - np.prod([(m - j) / (m + n - j) for j in range(1, 6)])}
    for name, mean in expected.items():
        measured = np.array([value[name] for value in values])
        assert stats.ttest_1samp(measured, mean).pvalue > 2e-7
        assert measured.std() < 0.1
    if n == m:
        assert expected["coverage"] == pytest.approx(1 - 2**-5, abs=1e-3)


def test_order_and_chunks_change_nothing(monkeypatch):
    generated, real = gaussian(90, 20, 13, 0.1), gaussian(130, 20, 14)
    values = prdc(generated, real)
    assert 0 < values["recall"] < 1
    shuffle = np.random.default_rng(0)
    assert prdc(shuffle.permutation(generated), shuffle.permutation(real)) == values
    shapes = []
    whole = neighbours.squared_distances

    def watched(a, b):
        shapes.append((len(a), len(b)))
        return whole(a, b)

    monkeypatch.setattr(neighbours, "squared_distances", watched)
    for pairs in (1, 700, 2000):
        monkeypatch.setattr(neighbours, "PAIRS", pairs)
        shapes.clear()
        assert prdc(generated, real) == values
        assert all(rows == 1 or rows * columns <= pairs for rows, columns in shapes)
        assert sum(rows for rows, _ in shapes) == 90 + 130 + 130


def test_scale_changes_nothing():
    generated, real = gaussian(60, 20, 15), gaussian(60, 20, 16)
    assert prdc(generated * 2.0**-40, real * 2.0**-40) == prdc(generated, real) == prdc(generated * 1024, real * 1024)


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
    distances = neighbours.squared_distances(whole, whole).sqrt().numpy()[np.triu_indices(40, 1)]
    np.testing.assert_allclose(distances * (rows.max() / 2**20), exact, rtol=1e-6)


@pytest.mark.parametrize(("value", "precision", "recall"), [(0.0, 1.0, 1 / 60), (50.0, 0.0, 0.0)])
def test_constant_samples_are_defined(value, precision, recall):
    """All samples are one point: at a real image, which is the only recalled one, or far from all."""
    real = gaussian(60, 5, 19)
    real[7] = 0.0
    values = prdc(np.full((30, 5), value, dtype=np.float32), real)
    assert (values["precision"], values["recall"]) == (precision, pytest.approx(recall))
    assert (values["density"] > 0, values["coverage"] > 0) == (precision > 0, precision > 0)


def test_two_constant_sets_are_defined():
    """Balls have radius 0 around one point, which is their surface."""
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


@pytest.fixture
def asked(monkeypatch) -> list[tuple[int, bool]]:
    """Let `features_of` return the pixels; the list gets (images, real) of each call."""
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


def test_prdc_draws_a_subset_of_more_images_by_the_seed(tmp_path, asked, monkeypatch):
    seen = []
    monkeypatch.setattr(neighbours, "prdc", lambda generated, real, *_: seen.append((generated, real)) or {})
    samples, test = images(50, 0), images(30, 1)
    for seed in (0, 0, 1):
        values = Prdc(max_images=20)(samples, test, context(tmp_path, seed=seed))
        assert values == {"prdc_num_samples": 20, "prdc_num_reference": 20}
    for generated, real in seen:
        for rows, records in ((generated, samples), (real, test)):
            among = {row.tobytes() for row in records.images.flatten(1).float().numpy()}
            assert len({row.tobytes() for row in rows} & among) == 20
    assert np.array_equal(seen[0][0], seen[1][0])
    assert not np.array_equal(seen[0][0], seen[2][0])


def test_random_positions_are_spread_over_all_positions():
    chosen = random_positions(1000, 400, seed=0)
    assert len(chosen.unique()) == 400
    assert 450 < float(chosen.double().mean()) < 550
    assert not torch.equal(chosen, random_positions(1000, 400, seed=1))
    assert torch.equal(random_positions(10, 10, seed=0), torch.arange(10))


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

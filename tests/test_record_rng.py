"""Private randomness per record: `RecordRng` equals NumPy's generator and has the right distributions.

Each statistical test rejects a correct generator with probability below 1e-6; the keys are fixed, so no test is random.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.record_rng import RecordRng, _log, names_rng

KEY = Key.seeded("rows")
IDS = torch.tensor([0, 7, 2**31, 2**40 + 1, -1, -5])


def numpy_stream(key: Key, call_number: int, record: int) -> np.random.Generator:
    words = np.frombuffer(key.derive("private randomness").secret[:16], dtype=np.uint64)
    counter = np.array([0, call_number, record % 2**64, 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=words, counter=counter))


def test_uniform_rows_are_numpys_philox_bit_by_bit() -> None:
    rng = RecordRng(KEY, IDS)
    for number, shape in enumerate([(), (3, 5), 8, (2, 0), 21]):
        rows = rng.uniform(shape).flatten(1) if shape != () else rng.uniform(())[:, None]
        assert rows.dtype == torch.float32
        for record, row in zip(IDS.tolist(), rows, strict=True):
            expected = numpy_stream(KEY, number, record).random(rows.shape[1], dtype=np.float32)
            assert np.array_equal(row.numpy(), expected)


def test_normal_rows_are_the_box_muller_transform_of_the_same_random_words() -> None:
    rows = RecordRng(KEY, IDS).normal((3, 5)).flatten(1)
    for record, row in zip(IDS.tolist(), rows, strict=True):
        words = numpy_stream(KEY, 0, record).bit_generator.random_raw(8).view(np.uint32).reshape(2, 8)
        u, turn = (words[:, :4] + 0.5) / 2**32, words[:, 4:] / 2**32
        radius = np.sqrt(-2 * np.log(u))
        exact = np.concatenate([radius * np.cos(2 * np.pi * turn), radius * np.sin(2 * np.pi * turn)], axis=1)
        np.testing.assert_allclose(row.numpy(), exact.flatten()[:15], rtol=1e-6, atol=1e-9)


def test_the_logarithm_is_exact_at_both_ends() -> None:
    powers = 2.0 ** -torch.arange(1, 34, dtype=torch.float64)
    u = torch.cat([powers, 1 - powers, torch.rand(10_000, dtype=torch.float64).clamp_min(2.0**-33)])
    torch.testing.assert_close(_log(u), u.log(), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("draw", "law"), [("normal", stats.norm.cdf), ("uniform", stats.uniform.cdf)])
def test_rows_have_their_law_across_records_and_calls(draw, law) -> None:
    rng = RecordRng(KEY, torch.arange(3000))
    across = torch.stack([getattr(rng, draw)(()) for _ in range(10)], dim=1)  # [record, call]
    within = getattr(RecordRng(KEY, torch.arange(30)), draw)(1000)
    for sample in (across, across[:, 0], across.T, within):
        assert stats.kstest(sample.flatten().numpy(), law).pvalue > 1e-6
    # Correlations of records, calls and places; each is about N(0, 1 / size).
    for pairs in ((across[1:], across[:-1]), (across[:, 1:], across[:, :-1]), (within[:, 1:], within[:, :-1])):
        one, other = (part.double().flatten() for part in pairs)
        correlation = float(torch.corrcoef(torch.stack([one, other]))[0, 1])
        assert abs(correlation) * math.sqrt(len(one)) < stats.norm.isf(1e-6 / 2) * 1.01


@pytest.mark.parametrize(("low", "high"), [(0, 2), (-3, 7), (5, 6), (-(2**30), 2**30)])
def test_integers_are_uniform_on_their_range(low, high) -> None:
    drawn = RecordRng(KEY, torch.arange(2000)).integers(low, high, 5).flatten().numpy()
    assert drawn.dtype == np.int64
    bins = min(high - low, 10)
    if bins > 1:
        counts = np.bincount((drawn - low) * bins // (high - low), minlength=bins)
        assert len(counts) == bins
        assert stats.chisquare(counts).pvalue > 1e-6
    else:
        assert (drawn == low).all()


def test_invalid_ranges_and_shapes_are_refused() -> None:
    rng = RecordRng(KEY, IDS)
    for low, high in ((3, 3), (0, 2**31 + 1)):
        with pytest.raises(ValueError, match="expected low < high"):
            rng.integers(low, high)
    with pytest.raises(ValueError, match="whole number >= 0, got -1"):
        rng.normal((2, -1))


@pytest.mark.parametrize(
    "draw", [lambda rng: rng.uniform(700), lambda rng: rng.normal((7, 100)), lambda rng: rng.integers(0, 9, 700)]
)
def test_a_row_is_the_same_bits_for_all_other_records_in_the_batch(draw) -> None:
    ids = torch.arange(400)  # 400 rows of 700 numbers are more than one block
    whole = draw(RecordRng(KEY, ids))
    some = torch.tensor([399, 3, 77])
    assert torch.equal(draw(RecordRng(KEY, some)), whole[some])
    assert draw(RecordRng(KEY, ids[:0])).shape == (0, *whole.shape[1:])
    assert not torch.equal(draw(RecordRng(Key.seeded("other"), some)), whole[some])


class Row:
    def __call__(self, x, y, rng):
        return x

    def method(self, x, y, *, rng=None):
        return x


def with_rng(x, y, rng):
    return x


@pytest.mark.parametrize(
    ("fn", "named"),
    [
        (with_rng, True),
        (lambda x, y, rng: x, True),
        (functools.partial(with_rng), True),
        (functools.partial(lambda scale, x, y, rng: x, 2.0), True),
        (Row(), True),
        (Row().method, True),
        (lambda x, y: x, False),
        (lambda x, y, **kwargs: x, False),
        (lambda x, *rng: x, False),
        (functools.partial(with_rng, rng=None), False),
        (torch.mul, False),
    ],
)
def test_a_function_receives_rng_if_it_names_it(fn, named) -> None:
    assert names_rng(fn) is named

"""The detector of inverted images: a score that is linear in the mean intensity, as a metric of a protocol."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpgen_bench.config.compose import compose_config
from dpgen_bench.data.datasets import Digits
from dpgen_bench.data.debugging import DebuggingClients
from dpgen_bench.data.federations import Clients
from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.inversion import Inversion, inverted_score, mean_intensity, verdict
from dpgen_bench.evaluate.metric import EvalContext
from dpgen_bench.evaluate.protocol import build_metrics
from dpgen_bench.tables.load import load_table
from tests.table_toys import table_rows

CLIENTS = DebuggingClients(Clients("digits", 20))


@given(st.lists(st.integers(0, 255), min_size=1, max_size=40))
def test_intensity_of_inverted_images_is_the_complement(pixels):
    images = torch.tensor(pixels, dtype=torch.uint8).reshape(-1, 1, 1, 1)
    e = mean_intensity(images)
    assert e == pytest.approx(np.mean(pixels) / 255)
    assert mean_intensity(255 - images) == pytest.approx(1 - e)
    assert mean_intensity(images.float()) == pytest.approx(e)
    if abs(1 - 2 * e) > 1e-6:
        assert inverted_score(e, e) == 0
        assert inverted_score(mean_intensity(255 - images), e) == pytest.approx(1)
        assert not verdict(e, e)
        assert verdict(mean_intensity(255 - images), e)


def test_intensity_counts_every_pixel_exactly():
    """Sums are integers or float64: exact for 2 ** 25 pixels, which float32 cannot count."""
    images = torch.ones(4097, 1, 128, 64, dtype=torch.uint8)
    assert mean_intensity(images) == 1 / 255
    assert mean_intensity(torch.full((1, 1, 1, 2), 127.5)) == 0.5


@pytest.mark.parametrize(
    ("mean", "expected", "score"),
    [(0.13, 0.13, 0), (0.87, 0.13, 1), (0.5, 0.13, 0.5), (0.2, 0.1, 0.125), (0.1, 0.9, 1)],
)
def test_score_is_linear_between_the_two_intensities(mean, expected, score):
    assert inverted_score(mean, expected) == pytest.approx(score)
    if score != 0.5:
        assert verdict(mean, expected) == (score > 0.5)


def test_a_half_is_no_verdict_of_inversion():
    assert not verdict(0.5, 0.25)
    assert verdict(0.5 + 1e-9, 0.25)


def test_detector_on_real_clients():
    """The mean of a client's images shows whether it has the bug: ink covers at most a third of a digit's image."""
    records, expected = CLIENTS.load("train"), mean_intensity(Digits().load("test").images)
    bugs = set(CLIENTS.inverted_clients().tolist())
    detected = {k for k in range(20) if verdict(mean_intensity(records.images[records.clients == k]), expected)}
    assert detected == bugs


@pytest.mark.parametrize(("mean", "expected"), [(0.3, 0.5), (-0.1, 0.2), (0.2, 1.1), (float("nan"), 0.2)])
def test_meaningless_intensities_are_refused(mean, expected):
    with pytest.raises(ValueError, match="intensity"):
        inverted_score(mean, expected)


def test_no_images_have_no_intensity():
    with pytest.raises(ValueError, match="at least one image"):
        mean_intensity(torch.zeros(0, 1, 2, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"within 0\.\.255"):
        mean_intensity(torch.full((1, 1, 2, 2), 300.0))


def test_the_metric_takes_the_expected_intensity_from_the_test_images(tmp_path):
    test = Digits().load("test")
    e = mean_intensity(test.images)
    labels = torch.zeros(3, dtype=torch.int64)
    for pixel, bug in ((0, 0.0), (255, 1.0)):
        samples = Records(torch.full((3, 1, 28, 28), pixel, dtype=torch.uint8), labels)
        values = Inversion()(samples, test, EvalContext(seed=0, device="cpu", num_classes=10, cache=tmp_path))
        assert values["mean_intensity"] == pixel / 255
        assert values["inverted_score"] == pytest.approx((pixel / 255 - e) / (1 - 2 * e))
        assert values["inverted_verdict"] == bug


@pytest.mark.parametrize(("name", "pairs"), [("debugging", 4), ("debugging_digits", 1)])
def test_the_tables_of_the_debugging_task_have_pairs_of_runs_and_show_the_verdict(tmp_path, name, pairs):
    table = load_table(name)
    rows = table_rows(table, tmp_path)
    assert [str(row.specs[0].config.dataset.select) for row in rows] == ["suspected", "others"] * pairs
    metrics = build_metrics(compose_config([f"protocol={table.protocol}"]).protocol)
    assert Inversion in map(type, metrics.values())
    assert {"inverted_score", "inverted_verdict"} < set(table.metrics)


def test_accuracies_of_the_protocol_quick_are_those_of_the_debugging_tables():
    quick, debugging = (compose_config([f"protocol={name}"]).protocol for name in ("quick", "debugging"))
    assert {**debugging, "name": "quick", "metrics": quick.metrics} == quick
    assert {**debugging.metrics, **quick.metrics} == debugging.metrics

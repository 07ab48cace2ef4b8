"""The table of real images' FID is what `python docs/make_real_fid.py` measured, and agrees with records and papers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from docs import make_real_fid as made
from docs.page_records import records_of
from dpgen_bench.tables.published import published_rows

VALUES = pd.read_csv(made.VALUES).set_index(["dataset", "images", "reference"])["fid"]


def printed(paper: str, dataset: str) -> float | None:
    """The FID of real data in Table 1 of a paper."""
    rows = published_rows(paper, "1")
    (row,) = (each for each in rows if each.method.startswith("Real") and each.dataset == dataset)
    return row.cells["fid"].value


def test_the_table_is_made_from_the_values() -> None:
    assert made.PAGE.read_text() == made.page()


@pytest.mark.parametrize("dataset", made.DATASETS)
def test_all_images_have_the_recorded_value(dataset: str) -> None:
    """The record's value was computed by the metric, from the samples of a run."""
    recorded = {
        repeat["metrics"]["fid"]["values"]["fid"]
        for record in records_of("real_data")
        for measurement in record.measurements.all()
        if measurement["protocol"]["name"] == "dp_sinkhorn" and record.config["dataset"]["name"] == dataset
        for repeat in measurement["repeats"]
        if "fid" in repeat["metrics"]
    }
    assert recorded
    assert list(recorded) == pytest.approx([VALUES[dataset, "all 60,000", "test images"]] * len(recorded), abs=1e-4)


@pytest.mark.parametrize(("dataset", "name"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_the_papers_printed_what_the_page_says(dataset: str, name: str) -> None:
    assert round(VALUES[dataset, "all 60,000", "test images"], 2) == printed("gs_wgan", name)
    assert round(VALUES[dataset, "the first 10,000", "test images"], 1) == printed("dp_sinkhorn_final", name)


def test_images_and_their_references() -> None:
    """Features are 0 in the first 10,000 images and 1 in the others, so FIDs are differences of means and variances."""
    train = np.repeat([0.0, 1.0], [10_000, 50_000])[:, None]
    test = np.zeros((100, 1))
    of_all, of_first, *drawn = made.measured(train, test)
    mean, variance = 5 / 6, 5 / 36
    assert of_all == ("all 60,000", "test images", [pytest.approx(mean**2 + variance, abs=1e-4)])
    assert of_first == ("the first 10,000", "test images", [0.0])
    assert [len(values) for *_, values in drawn] == [made.DRAWINGS] * 3
    assert all(len(set(values)) > 1 for *_, values in drawn)
    assert drawn[0][2] == pytest.approx([mean**2 + variance] * made.DRAWINGS, abs=0.02)
    assert max(drawn[1][2] + drawn[2][2]) < 1e-3

"""Tests of the norms that a run writes with privacy.diagnostics=unsafe, and of their plot."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from dpgen_bench.data.private import PrivateData
from dpgen_bench.privacy.bounds import PerRecord, PerRow, Whole
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.privacy.services import Services
from dpgen_bench.runs.diagnostics import draw_norms, read_norms

ROWS = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])


@pytest.mark.parametrize(
    ("bound", "norms"),
    [
        (PerRow(C=1.0, shape=(3, 2)), [5.0, 0.5, 0.0]),
        (Whole(C=1.0, shape=(3, 2)), [5.0, 0.5, 0.0]),
        (PerRecord(C=1.0, shape=(2,), microbatch=2), [5.0, 0.5, 0.0]),
        (PerRow(C=1.0, shape=(3,)), [3.0, 0.3, 0.0]),
    ],
)
def test_norms_are_of_rows_before_they_are_clipped(tmp_path, bound, norms):
    path = tmp_path / "private" / "diagnostics.jsonl"
    images, labels = torch.zeros(3, 1, 1, 1), torch.arange(3)
    data = PrivateData(images, labels, 3, Services(Ledger(Budget(math.inf), 3), Key.seeded("x"), diagnostics=path))
    release = data.mechanism("query", sample=Full(), bound=bound, times=2, std=1.0)
    for _ in range(2):
        release(lambda images, labels: ROWS[labels] if bound.shape != (3,) else ROWS[labels, 0])
    (first, second) = read_norms(path)["query"].values()
    assert np.allclose(first, norms)
    assert np.allclose(second, norms)
    assert draw_norms(path, {"query": 1.0}, tmp_path / "private" / "norms.png")
    assert Image.open(tmp_path / "private" / "norms.png").width > 500


def test_a_draw_without_records_has_no_norms(tmp_path):
    path = tmp_path / "private" / "diagnostics.jsonl"
    no_records = (torch.zeros(0, 1, 1, 1), torch.zeros(0, dtype=torch.int64))
    data = PrivateData(*no_records, 3, Services(Ledger(Budget(math.inf), 0), Key.seeded("x"), diagnostics=path))
    bound = PerRecord(C=1.0, shape=(2,))
    data.mechanism("query", sample=Full(), bound=bound, times=1, std=1.0)(lambda images, labels: ROWS[labels])
    assert json.loads(path.read_text())["norms_before_clipping"] == []
    assert not draw_norms(path, {"query": 1.0}, tmp_path / "norms.png")


def test_of_a_repeated_release_the_last_counts_and_an_incomplete_line_is_skipped(tmp_path):
    path = tmp_path / "diagnostics.jsonl"
    rows = [(0, [1.0]), (1, [2.0]), (1, [3.0]), (2, [math.nan, math.inf])]
    lines = [json.dumps({"mechanism": "m", "release": i, "norms_before_clipping": norms}) for i, norms in rows]
    path.write_text("\n".join([*lines, '{"mechanism": "m", "rel']))
    assert {release: list(norms) for release, norms in read_norms(path)["m"].items()}[1] == [3.0]
    assert draw_norms(path, {"m": math.inf}, tmp_path / "norms.png")


@pytest.mark.parametrize("content", [None, "", '{"mechanism": "m", "release": 0, "exact_norm": 1.0}\n'])
def test_nothing_to_draw(tmp_path, content):
    path = tmp_path / "diagnostics.jsonl"
    if content is not None:
        path.write_text(content)
    assert not draw_norms(path, {}, tmp_path / "norms.png")
    assert not (tmp_path / "norms.png").exists()

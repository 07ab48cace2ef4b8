"""A saved generator draws the same samples in a new process, which has no network, processes, data or newer files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from dpgen_bench.generator import NetGenerator
from dpgen_bench.testing.fresh import FreshSamples, NotSampled, now
from tests.cheats_outside import Reading

LABELS = torch.arange(12) % 3
SHAPE = (1, 8, 8)


def generator(where: str, path: Path | str = "") -> NetGenerator:
    config = {"_target_": "tests.cheats_outside.Reading", "num_classes": 3, "image_shape": [*SHAPE]}
    net = Reading(3, [*SHAPE], where, str(path))
    return NetGenerator(net, {**config, "where": where, "path": str(path)}, 4, 3, SHAPE)


def fresh(saved: NetGenerator, started: float, closed: list[str]) -> torch.Tensor:
    samples = FreshSamples(saved, LABELS, 5, started, closed)
    try:
        return samples.result()
    finally:
        samples.close()


def test_samples_are_those_of_this_process():
    saved = generator("constant")
    assert torch.equal(fresh(saved, now(), []), saved.sample(LABELS, 5))


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("network", "sampling used socket.getaddrinfo"),
        ("connection", "sampling used socket."),
        ("process", "sampling used subprocess.Popen"),
        ("release", "IndexError"),  # the global of this process does not exist there
    ],
)
def test_refused_access_is_an_error_that_names_it(where, why):
    with pytest.raises(NotSampled, match=why):
        fresh(generator(where), now(), [])


def test_files_are_read_unless_they_are_new_or_data(tmp_path):
    path = tmp_path / "number.txt"
    path.write_text("0.25")
    saved = generator("written", path)
    with pytest.raises(NotSampled, match="a file written since the fit began"):
        fresh(saved, now(), [])
    later = time.time() + 60.0
    assert torch.equal(fresh(saved, later, []), saved.sample(LABELS, 5))
    with pytest.raises(NotSampled, match="a file of the data"):
        fresh(saved, later, [str(tmp_path)])


def test_a_new_file_is_refused_whatever_time_it_states_and_whatever_its_name(tmp_path):
    path = tmp_path / "number.txt"
    path.write_text("0.25")
    hour_ago = time.time() - 3600
    os.utime(path, (hour_ago, hour_ago))
    with pytest.raises(NotSampled, match="a file written since the fit began"):
        fresh(generator("written", path), now(), [])
    (tmp_path / "number.py").write_text("0.25")
    with pytest.raises(NotSampled, match="a file written since the fit began"):
        fresh(generator("written", tmp_path / "number.py"), now(), [])


def test_the_source_of_the_plugin_may_be_new(tmp_path):
    path = tmp_path / "number.py"
    path.write_text("0.25")
    saved = generator("written", path)
    samples = FreshSamples(saved, LABELS, 5, now(), [], [path])
    try:
        assert torch.equal(samples.result(), saved.sample(LABELS, 5))
    finally:
        samples.close()

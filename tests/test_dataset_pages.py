"""The pages on own datasets and on sample formats: their commands work with the files that they describe."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpgen_bench.cli import main
from dpgen_bench.cli.parser import build_parser
from dpgen_bench.config.building import build_dataset
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.data.from_torchvision import Torchvision
from tests.test_from_torchvision import write_kmnist
from tests.test_page_examples import ROOT, examples, execute, own_modules  # noqa: F401  (a fixture)

PAGE, SAMPLES = ROOT / "docs" / "extend" / "dataset.md", ROOT / "docs" / "samples.md"


def commands(page: Path) -> list[list[str]]:
    return [shlex.split(line) for line in re.findall(r"^    dpgen (.*)$", page.read_text(), re.MULTILINE)]


@pytest.fixture
def own_data(own_modules, monkeypatch) -> Path:  # noqa: F811
    """A working directory with the files that the page names."""
    execute(PAGE, own_modules, ("run",))
    write_kmnist(own_modules / "data")
    for i in range(20):
        for name in ("cat", "dog"):
            path = own_modules / "my_images" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((9, 9), i, dtype=np.uint8)).save(path)
    monkeypatch.setenv("DPGEN_DATA", "data")
    return own_modules


def test_the_commands_of_the_page_on_datasets(own_data, capsys):
    """Checks are executed, and configs of runs are composed, with their identity, except for data that is not here."""
    kinds = []
    for verb, *rest in commands(PAGE):
        kinds.append(verb)
        if verb == "fetch" and "--check" in rest:
            assert main([verb, *rest]) == 0, rest
            continue
        overrides = [each for each in rest if each != "--data"]
        if any(name in " ".join(overrides) for name in ("EMNIST", "GTSRB")):
            assert isinstance(build_dataset(compose_config(overrides)), Torchvision)
        else:
            build_spec(compose_config(overrides))
    assert {"fetch", "run", "check"} == set(kinds)
    shown = capsys.readouterr().out
    assert "prepared as 1x32x32" in shown  # my_images is grey
    assert "dataset 'shapes': 500 images for training and 100 for testing, 2 classes, prepared as 1x16x16" in shown
    assert build_dataset(compose_config(["--config-dir", "my_conf", "dataset=shape_clients"])).num_clients == 20


def test_the_class_on_the_page_has_at_most_25_lines_of_code():
    (example,) = [each for each in examples(PAGE) if each.marker == "my_shapes.py"]
    assert len(example.code.splitlines()) <= 26


def test_a_missing_file_of_the_own_dataset_is_named_with_its_advice(own_data, capsys):
    (own_data / "data" / "shapes.npz").unlink()
    assert main(["fetch", "--check", "--config-dir", "my_conf", "dataset=shapes"]) == 1
    assert re.search(r"shapes\.npz does not exist.*Make shapes.npz with make_shapes\.py", capsys.readouterr().err)


def test_the_own_dataset_is_identified_by_its_content(own_data):
    chosen = ["--config-dir", "my_conf", "dataset=shapes", "method=dp_merf"]
    first = build_spec(compose_config(chosen)).id
    with np.load("data/shapes.npz") as file:
        arrays = dict(file)
    arrays["train_labels"] = 1 - arrays["train_labels"]
    np.savez("data/shapes.npz", **arrays)
    assert build_spec(compose_config(chosen)).id != first


def test_the_commands_of_the_page_on_samples_are_parsed():
    _, verbs = build_parser()
    parsed = [verbs[verb].parse(rest) for verb, *rest in commands(SAMPLES)]
    assert [options.out.suffix for options in parsed] == [".npz", "", ".zip", ".parquet"]
    assert [options.overwrite for options in parsed] == [False, False, False, True]

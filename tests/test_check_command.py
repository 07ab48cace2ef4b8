"""`dpgen check`: the size and the data that were asked for, what it says of them, warnings, and its exit status."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dpgen_bench.runs import check as command
from dpgen_bench.runs.check import LIMITS, check_configured_method
from dpgen_bench.testing.bench import DataSet


@pytest.fixture
def conf(tmp_path: Path) -> list[str]:
    (tmp_path / "method").mkdir()
    for name, target, more in [
        ("toy", "tests.toys.MeanImage", "steps: 90\ncheck: {steps: 3}"),
        ("door", "tests.cheats.PrivateAttribute", "route: name"),
        ("broken", "tests.toys.Broken", ""),
    ]:
        text = f"name: {name}\n_target_: {target}\n{more}\n"
        (tmp_path / "method" / f"{name}.yaml").write_text(text)
    return ["--config-dir", str(tmp_path)]


def test_it_says_what_it_ran_at_and_what_it_cannot_see(conf, capsys):
    assert check_configured_method([*conf, "method=toy", "dataset=digits", "--records", "20", "seed=3"]) == 0
    told = capsys.readouterr().out
    assert "20 made-up records 1x28x28, 10 classes; epsilon 10, delta 1e-05, add_remove; seed 3" in told
    assert "releases: 3 of 'sum'" in told
    assert "unit: one record;" in told
    assert "client" not in told.partition("toy conforms")[0]
    assert "toy conforms" in told
    assert told.partition("The suite cannot detect:\n")[2] == "".join(f"  - {limit}\n" for limit in LIMITS)


def test_the_page_lists_the_same_limits():
    page = (Path(__file__).parent.parent / "docs" / "conformance.md").read_text()
    section = page.split("## What it cannot detect\n")[1].split("\n## ")[0]
    bullets = [re.sub(r"\s+", " ", item) for item in re.findall(r"^- (.*\n(?:  .*\n)*)", section, re.MULTILINE)]
    assert [item.replace("`", "").strip().removesuffix(".") for item in bullets] == list(LIMITS)


@pytest.mark.parametrize(("threads", "said"), [(1, "1 thread;"), (2, "2 threads;")])
def test_threads_are_counted(threads, said, conf, seen, monkeypatch, capsys):
    monkeypatch.setattr(command.torch, "get_num_threads", lambda: threads)
    check_configured_method([*conf, "method=toy", "dataset=digits"])
    assert said in capsys.readouterr().out


@pytest.fixture
def seen(monkeypatch) -> list[tuple[DataSet, dict]]:
    """What the suite would be given."""
    calls: list[tuple[DataSet, dict]] = []
    monkeypatch.setattr(command, "check_method", lambda make, **given: calls.append((given["data"], vars(make()))))
    return calls


def test_real_records_are_those_of_the_dataset(conf, seen):
    from dpgen_bench.data.datasets import Digits

    train = Digits().load("train")
    assert check_configured_method([*conf, "method=toy", "dataset=digits", "--data"]) == 0
    assert check_configured_method([*conf, "method=toy", "dataset=digits", "--data", "--records", "40"]) == 0
    (whole, _), (some, _) = seen
    assert (whole.images * 255).round().byte().equal(train.images)
    assert whole.labels.equal(train.labels)
    assert len(some) == 40
    assert len(some.labels.unique()) > 5  # not the first ones of a sorted data set
    rows = {image.numpy().tobytes() for image in whole.images}
    assert all(image.numpy().tobytes() in rows for image in some.images)


def test_settings_of_the_yaml_yield_to_overrides_and_to_the_switch(conf, seen):
    for more in ([], ["method.steps=5"], ["--as-configured"]):
        check_configured_method([*conf, "method=toy", "dataset=digits", *more])
    assert [settings["steps"] for _, settings in seen] == [3, 5, 90]


@pytest.mark.parametrize(("name", "why"), [("door", "used '_draw' of a Mechanism"), ("broken", "RuntimeError: this")])
def test_a_method_that_fails_gives_status_1_and_its_warnings(name, why, conf, capsys):
    assert check_configured_method([*conf, f"method={name}", "dataset=digits"]) == 1
    told = capsys.readouterr().out
    assert f"FAILED  {why}" in told or (name == "door" and why in told)
    assert "conforms" not in told
    if name == "door":
        assert "cheats.py:" in told.split("WARNING")[1]


@pytest.mark.parametrize("records", ["0", "1", "99999"])
def test_sizes_that_cannot_be_are_refused(records, conf):
    with pytest.raises(ValueError, match="expected --records of at"):
        check_configured_method([*conf, "method=toy", "dataset=digits", "--data", "--records", records])

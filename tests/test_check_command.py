"""Tests of `dpgen check`: its records and settings, its output and warnings, and its exit status."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dpgen_bench.cli import main
from dpgen_bench.config.identity import source_fingerprint
from dpgen_bench.runs import check as command
from dpgen_bench.runs.check import LIMITS
from dpgen_bench.store.checks import checks_of
from dpgen_bench.testing.bench import DataSet
from tests.toys import MeanImage


@pytest.fixture
def conf(tmp_path: Path, monkeypatch) -> list[str]:
    monkeypatch.setenv("DPGEN_RESULTS", str(tmp_path / "results"))
    (tmp_path / "method").mkdir()
    for name, target, more in [
        ("toy", "tests.toys.MeanImage", "steps: 90\ncheck: {steps: 3}"),
        ("door", "tests.cheats.PrivateAttribute", "route: name"),
        ("broken", "tests.toys.Broken", ""),
    ]:
        text = f"name: {name}\n_target_: {target}\n{more}\n"
        (tmp_path / "method" / f"{name}.yaml").write_text(text)
    return ["--config-dir", str(tmp_path)]


def test_the_output_states_the_settings_and_the_limits(conf, capsys):
    assert main(["check", *conf, "method=toy", "dataset=digits", "--records", "20", "seed=3"]) == 0
    output = capsys.readouterr().out
    assert "20 made-up records 1x28x28, 10 classes; epsilon 10, delta 1e-05, add/remove; seed 3" in output
    assert "releases: 3 of 'sum'" in output
    assert "unit: one record;" in output
    assert "client" not in output.partition("toy conforms")[0]
    assert "toy conforms" in output
    assert output.partition("The suite cannot detect:\n")[2] == "".join(f"  - {limit}\n" for limit in LIMITS)


def test_the_page_lists_the_same_limits():
    page = (Path(__file__).parent.parent / "docs" / "conformance.md").read_text()
    section = page.split("## What it cannot detect\n")[1].split("\n## ")[0]
    bullets = [re.sub(r"\s+", " ", item) for item in re.findall(r"^- (.*\n(?:  .*\n)*)", section, re.MULTILINE)]
    assert [item.replace("`", "").strip().removesuffix(".") for item in bullets] == list(LIMITS)


@pytest.mark.parametrize(("threads", "expected"), [(1, "1 thread;"), (2, "2 threads;")])
def test_threads_are_counted(threads, expected, conf, seen, monkeypatch, capsys):
    monkeypatch.setattr(command.torch, "get_num_threads", lambda: threads)
    main(["check", *conf, "method=toy", "dataset=digits"])
    assert expected in capsys.readouterr().out


@pytest.fixture
def seen(monkeypatch) -> list[tuple[DataSet, dict]]:
    """The data and the method's settings of each call of the suite, which is not executed."""
    calls: list[tuple[DataSet, dict]] = []
    monkeypatch.setattr(
        command, "check_method", lambda make_method, **options: calls.append((options["data"], vars(make_method())))
    )
    return calls


def test_real_records_are_those_of_the_dataset(conf, seen):
    from dpgen_bench.data.datasets import Digits

    train = Digits().load("train")
    assert main(["check", *conf, "method=toy", "dataset=digits", "--data"]) == 0
    assert main(["check", *conf, "method=toy", "dataset=digits", "--data", "--records", "40"]) == 0
    (whole, _), (part, _) = seen
    assert (whole.images * 255).round().byte().equal(train.images)
    assert whole.labels.equal(train.labels)
    assert len(part) == 40
    assert len(part.labels.unique()) > 5  # not the first records of a sorted dataset
    rows = {image.numpy().tobytes() for image in whole.images}
    assert all(image.numpy().tobytes() in rows for image in part.images)


def test_overrides_and_as_configured_take_precedence_over_the_yaml(conf, seen):
    for more in ([], ["method.steps=5"], ["--as-configured"]):
        main(["check", *conf, "method=toy", "dataset=digits", *more])
    assert [settings["steps"] for _, settings in seen] == [3, 5, 90]


@pytest.mark.parametrize(
    ("name", "message"), [("door", "used '_draw' of a Mechanism"), ("broken", "RuntimeError: this")]
)
def test_a_method_that_fails_gives_status_1_and_its_warnings(name, message, conf, capsys):
    assert main(["check", *conf, f"method={name}", "dataset=digits"]) == 1
    output = capsys.readouterr().out
    assert f"FAILED  {message}" in output or (name == "door" and message in output)
    assert "conforms" not in output
    if name == "door":
        assert "cheats.py:" in output.split("WARNING")[1]


def test_the_last_result_for_a_source_is_kept_and_not_those_of_the_bench(conf, tmp_path, capsys):
    source = source_fingerprint(MeanImage)
    main(["check", *conf, "method=toy", "dataset=digits", "--records", "20"])
    (check,) = checks_of(tmp_path / "results", source)
    assert (check.method, check.passed) == ("tests.toys.MeanImage", True)
    assert check.settings.startswith("20 made-up records 1x28x28, 10 classes; epsilon 10")
    assert check.settings.endswith("; fast")
    main(["check", *conf, "method=toy", "dataset=digits", "method.steps=0"])
    failed = checks_of(tmp_path / "results", source)[-1]
    assert (failed.passed, failed.arguments["steps"]) == (False, 0)
    main(["check", *conf, "method=uniform_noise", "dataset=digits"])
    assert len(list((tmp_path / "results" / "checks").iterdir())) == 1  # MeanImage and Broken are in one module


def test_a_plugin_with_the_name_of_a_method_of_the_bench_is_refused(tmp_path, capsys):
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "own.yaml").write_text("name: dpgan\n_target_: tests.toys.MeanImage\n")
    for verb in ("check", "account"):
        assert main([verb, "--config-dir", str(tmp_path), "method=own", "dataset=digits"]) == 2
        errors = capsys.readouterr().err
        assert "a name of its own for the method tests.toys.MeanImage, got method.name='dpgan'" in errors


@pytest.mark.parametrize("records", ["0", "1", "99999"])
def test_invalid_numbers_of_records_are_refused(records, conf, capsys):
    assert main(["check", *conf, "method=toy", "dataset=digits", "--data", "--records", records]) == 2
    assert "expected --records of at" in capsys.readouterr().err


def test_a_check_has_the_settings_that_can_select_other_code(conf, tmp_path, seen):
    """A number that is smaller is not one of them; zero where a run has a number is, also if `check` sets it."""
    path = tmp_path / "method" / "toy.yaml"
    path.write_text("name: toy\n_target_: tests.toys.MeanImage\nsteps: 90\nrate: 0.5\ncheck: {steps: 3, rate: 0.0}\n")
    main(["check", *conf, "method=toy", "dataset=digits"])
    (check,) = checks_of(tmp_path / "results", source_fingerprint(MeanImage))
    assert check.arguments == {"rate": 0.0, "C": 5.0}

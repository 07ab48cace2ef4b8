"""Tests of `make_small`: which settings the `check` mapping of a yaml replaces, and how `dpgen check` reports them."""

from __future__ import annotations

import copy
import math

import pytest
from omegaconf import OmegaConf

from dpgen_bench.cli import main
from dpgen_bench.config.small import Replaced, make_small


def config_with(check, **more):
    method = {"name": "own", "steps": 90, "width": 4, "pretraining": {"sigma": None, "steps": 50}, "check": check}
    return OmegaConf.create({"method": method, "privacy": {"epsilon": 10}, **more})


def test_settings_are_replaced_and_returned_with_both_values():
    config = config_with({"steps": 3, "width": 4, "privacy.epsilon": math.inf})
    assert make_small(config, kept=["method"]) == [
        Replaced("method.steps", 90, 3),
        Replaced("privacy.epsilon", 10, math.inf),
    ]
    assert (config.method.steps, config.method.width, config.privacy.epsilon) == (3, 4, math.inf)


@pytest.mark.parametrize("kept", ["method.steps", "method.pretraining.steps", "method.pretraining"])
def test_a_setting_of_the_user_is_kept(kept):
    config = config_with({"steps": 3, "pretraining": {"steps": 2}}, init={"name": "gauss"})
    before = copy.deepcopy(OmegaConf.select(config, kept))
    make_small(config, kept=[kept])
    assert OmegaConf.select(config, kept) == before


def test_pretraining_is_small_where_there_is_a_first_stage():
    check = {"pretraining": {"steps": 2, "batch_size": 8}}
    config = config_with(check, init={"name": "gauss", "dim": 50, "check": {"dim": 5}})
    assert [each.path for each in make_small(config, kept=())] == [
        "method.pretraining.steps",
        "method.pretraining.batch_size",
        "init.dim",
    ]
    assert config.method.pretraining == {"sigma": None, "steps": 2, "batch_size": 8}
    assert make_small(config_with(check, init={"name": "none"}), kept=()) == []


@pytest.mark.parametrize(
    ("configured", "small", "switch"),
    [
        (90, 3, False),
        (1.5, 1, False),
        ([1, 2], [1, 1], False),
        (10, math.inf, False),
        ("resnet", "dcgan", True),
        (True, False, True),
        (None, 4, True),
        (1.1, None, True),
        (0, 3, True),
        (3, 0, True),
    ],
)
def test_values_that_may_select_other_code_are_switches(configured, small, switch):
    assert Replaced("method.a", configured, small).is_switch is switch


def test_a_check_that_is_no_mapping_is_refused():
    with pytest.raises(ValueError, match=r"method\.check: expected a mapping .* got 'steps=3'"):
        make_small(config_with("steps=3"), kept=())


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """A function that checks a toy method whose yaml ends with this text, and returns status, output and errors."""

    monkeypatch.setenv("DPGEN_RESULTS", str(tmp_path / "results"))

    def check(more, *options):
        (tmp_path / "method").mkdir(exist_ok=True)
        (tmp_path / "method" / "toy.yaml").write_text(f"name: toy\n_target_: tests.toys.MeanImage\n{more}\n")
        status = main(["check", "--config-dir", str(tmp_path), "method=toy", "dataset=digits", *options])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return check


def test_the_output_says_what_was_replaced(run):
    more = "steps: 90\ncheck: {steps: 3, privacy.relation: replace_one}"
    status, output, _ = run(more)
    assert status == 0
    relation = "privacy.relation replace_one instead of add_remove"
    assert f"small, by `check` of the yaml: method.steps 3 instead of 90; {relation}" in output
    assert f"WARNING  `check` of the yaml sets {relation}: code that" in output
    _, output, _ = run(more, "method.steps=3", "--as-configured")
    assert "by `check`" not in output
    assert "of the yaml sets" not in output


def test_a_misspelt_key_is_named_with_the_mapping(run):
    status, _, errors = run("steps: 90\ncheck: {stepz: 3}")
    assert status == 2
    assert "did you mean 'steps'?" in errors
    assert "`check` in its yaml that sets method.stepz 3 instead of null" in errors


def test_the_error_of_a_method_is_followed_by_its_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DPGEN_RESULTS", str(tmp_path / "results"))
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "broken.yaml").write_text("name: broken\n_target_: tests.toys.Broken\n")
    assert main(["check", "--config-dir", str(tmp_path), "method=broken", "dataset=digits"]) == 1
    output = capsys.readouterr().out
    assert "RuntimeError: this method always fails (" in output
    file, _, line = output.partition("always fails (")[2].partition(")")[0].partition(", line ")
    assert file.endswith("toys.py")
    with open(file) as source:
        assert "this method always fails" in source.read().splitlines()[int(line) - 1]

"""Folders of a user's own: `--config-dir` with every verb that reads tables, and remembered by the results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dpgen_bench.cli import main
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.identity import is_stale
from dpgen_bench.runs.remembered import file_of, remember, remembered
from dpgen_bench.tables import sweeps
from dpgen_bench.utils.own_folders import misnamed_methods, own_folders, using
from tests.table_toys import fake_run

RUN = ["method=dp_merf", "dataset=digits", "protocol=mine"]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a protocol, a table and a leaderboard of the user's own."""
    folder = tmp_path / "own"
    for group in ("protocol", "table", "method"):
        (folder / group).mkdir(parents=True)
    metrics = {"logreg": {"_target_": "dpgen_bench.evaluate.classifiers.LogisticRegression"}}
    OmegaConf.save({"name": "mine", "num_samples": 10, "metrics": metrics}, folder / "protocol" / "mine.yaml")
    table = {
        "title": "A table of my own",
        "protocol": "mine",
        "sweeps": ["method=dp_merf dataset=digits"],
        "metrics": ["acc_logreg_pct"],
    }
    OmegaConf.save(table, folder / "table" / "mine.yaml")
    OmegaConf.save({**table, "leaderboard": {"by": "acc_logreg_pct"}}, folder / "table" / "my_board.yaml")
    return folder


@pytest.fixture
def results(tmp_path: Path, own: Path) -> Path:
    """A folder of results with one run that was measured by the protocol of the user's own."""
    with using([own]):
        fake_run(tmp_path / "results", RUN, 91.5)
    return tmp_path / "results"


@pytest.mark.parametrize("table", ["mine", "my_board"])
def test_a_table_of_ones_own_is_written(table, own, results, capsys):
    assert main(["tables", table, f"--results={results}"]) == 2
    assert f"got '{table}'" in capsys.readouterr().err
    assert main(["tables", table, f"--results={results}", "--config-dir", str(own)]) == 0
    assert "91.5" in (results / "tables" / f"{table}.md").read_text()
    assert own_folders() == ()


def test_a_sweep_passes_the_folder_on_to_its_runs(own, results, capsys, monkeypatch):
    launched: list[list[str]] = []
    monkeypatch.setattr(sweeps, "run_stoppable", lambda command, *_: (launched.append([*command]), (0, None))[1])
    (results / "runs").rename(results / "elsewhere")
    arguments = ["sweep", "mine", f"--results={results}", f"--config-dir={own}"]
    assert main([*arguments, "--dry-run"]) == 0
    assert f"dpgen run -m --config-dir={own}" in capsys.readouterr().out.replace("\n", "")
    assert main(arguments) == 0
    assert f"--config-dir={own}" in launched[0]


def test_folders_are_remembered_by_the_results(own, results, capsys):
    remember(results, [own], own.parent)
    remember(results, [own], own.parent)
    assert file_of(results).read_text().splitlines() == [f"config {own}", f"modules {own.parent}"]
    assert main(["tables", "mine", f"--results={results}"]) == 0
    assert main(["runs", f"--results={results}"]) == 0
    assert "(changed)" not in capsys.readouterr().out
    own.rename(own.with_name("moved"))
    assert main(["runs", f"--results={results}"]) == 0
    assert f"{own}, which has yamls of runs in" in capsys.readouterr().err
    assert remembered(results).config == ()


def test_runs_without_folders_of_their_own_write_no_file(tmp_path):
    remember(tmp_path, [], tmp_path)
    assert not file_of(tmp_path).exists()
    assert remembered(tmp_path).notes == ()


def test_modules_are_found_where_the_command_was_started(tmp_path):
    (tmp_path / "my_plugin_of_this_test.py").write_text("class Mine:\n    version = 3\n")
    config = OmegaConf.create({"method": {"_target_": "my_plugin_of_this_test.Mine"}})
    before = list(sys.path)
    assert is_stale(config, {"version": 3}) is None
    with using([], [tmp_path]):
        assert is_stale(config, {"version": 3}) is False
    assert sys.path == before


def test_the_benchs_own_yaml_is_used_if_both_have_one(own, capsys):
    OmegaConf.save({"name": "dpgan", "_target_": "nowhere.Nothing"}, own / "method" / "dpgan.yaml")
    with using([own]):
        assert compose_config(["method=dpgan"]).method["_target_"] == "methods.dpgan.DPGAN"
    assert main(["list", "methods", "--config-dir", str(own)]) == 0
    assert f"{own / 'method' / 'dpgan.yaml'} is not used" in capsys.readouterr().err


def test_several_folders_may_be_given(own, tmp_path, capsys):
    (tmp_path / "other" / "method").mkdir(parents=True)
    (tmp_path / "other" / "method" / "another.yaml").write_text("# Another one.\n")
    assert main(["list", "methods", "tables", "-cd", str(own), "-cd", str(tmp_path / "other")]) == 0
    shown = capsys.readouterr().out
    assert "Another one" in shown
    assert "A table of my own" in shown


def test_a_method_whose_file_has_another_name_is_noted(tmp_path):
    (tmp_path / "method").mkdir()
    for name, text in {"own": "name: own", "file": "name: 'other'  # why", "broken": "name: [", "none": "C: 1"}.items():
        (tmp_path / "method" / f"{name}.yaml").write_text(f"# A method\n{text}\n")
    (note,) = misnamed_methods([tmp_path])
    assert note.startswith(f"results of {tmp_path / 'method' / 'file.yaml'} have the name 'other'")

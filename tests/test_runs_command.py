"""`dpgen runs` with filters, an order, progress and JSON, and `dpgen rm`, which keeps what was spent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpgen_bench.cli import main
from dpgen_bench.config import identity
from dpgen_bench.outcomes import overview, spent
from dpgen_bench.outcomes.overview import KEYS, ordered, overviews, row
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.runs.execute import execute
from dpgen_bench.store.checks import Check, keep_check
from dpgen_bench.store.folders import RunFolder, Store
from dpgen_bench.training import progress
from tests.run_toys import config
from tests.table_toys import fake_run

DIGITS = ["method=dp_merf", "dataset=digits", "protocol=quick"]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Three runs: two finished ones with different accuracies, and a failed one."""
    for seed, accuracy in ((0, 80.0), (1, 90.0)):
        fake_run(tmp_path, [*DIGITS, f"seed={seed}"], accuracy)
    failed = Store(tmp_path).folder(fake_run(tmp_path, ["method=dpgan", "dataset=digits", "protocol=quick"], 10.0))
    (failed.path / "DONE").unlink()
    failed.mark("failed", "train", ValueError("no luck"))
    return tmp_path


def listed(capsys, results: Path, *arguments: str) -> list[dict]:
    assert main(["runs", "--json", f"--results={results}", *arguments]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_json_has_the_documented_keys(results, capsys):
    runs = listed(capsys, results)
    assert [tuple(run) for run in runs] == [KEYS] * 3
    page = (Path(__file__).parent.parent / "docs" / "commands.md").read_text()
    assert [key for key in KEYS if f"`{key}`" not in page] == []
    assert runs == sorted(runs, key=lambda run: run["id"])
    failed = next(run for run in runs if run["status"] == "failed")
    assert (failed["phase"], failed["error"], failed["budget"]) == ("train", "ValueError: no luck", "10")
    assert failed["date"].endswith("+00:00")


@pytest.mark.parametrize(
    ("filters", "number"),
    [
        (["status=failed"], 1),
        (["method=dp_merf"], 2),
        (["method=dp_merf", "seed=1"], 1),
        (["status=failed,finished", "dataset=dig*"], 3),
        (["dataset=mnist"], 0),
        (["protocol=quick"], 3),
        (["privacy.epsilon=10"], 3),
        (["privacy.epsilon=10.0"], 3),
        (["privacy.delta=1e-5", "delta=0.00001"], 3),
        (["delta=1e-6,1e-4"], 0),
        (["privacy.noise=os"], 0),
        (["stale=true"], 0),
    ],
)
def test_filters(filters, number, results, capsys):
    assert len(listed(capsys, results, *filters)) == number


def test_runs_are_sorted_by_a_metric(results, capsys):
    def accuracies(*arguments: str) -> list[float]:
        runs = listed(capsys, results, "--sort", "acc_logreg_pct", *arguments)
        return [run["metrics"]["quick"]["acc_logreg_pct"] for run in runs]

    assert accuracies() == [10.0, 80.0, 90.0]
    assert accuracies("--reverse") == [90.0, 80.0, 10.0]
    assert [run["method"] for run in listed(capsys, results, "--sort=method")] == ["dp_merf", "dp_merf", "dpgan"]


def test_a_metric_that_several_protocols_measured_is_sorted_by_one_of_them():
    runs = [{"id": 0, "metrics": {"long": {"fid": 3.0}, "short": {"fid": 9.0}}}, {"id": 1, "metrics": {}}]
    runs += [{"id": 2, "metrics": {"short": {"fid": 5.0}}}, {"id": 3, "metrics": {"long": {"fid": 1.0}}}]
    with pytest.raises(ValueError, match=r"such as long:fid, got 'fid', which the runs have by long, short"):
        ordered(runs, "fid")
    assert [run["id"] for run in ordered(runs, "short:fid")] == [2, 0, 1, 3]
    assert [run["id"] for run in ordered(runs, "long:fid", reverse=True)] == [0, 3, 1, 2]


def test_runs_with_nan_are_the_last_ones():
    """Values of an overview are JSON's, so NaN is text there."""
    runs = [{"metrics": {"quick": {"loss": value}}} for value in (3.0, "nan", 0.5, "inf")] + [{"metrics": {}}]
    assert [run["metrics"].get("quick", {}).get("loss") for run in ordered(runs, "loss")] == [
        0.5,
        3.0,
        "inf",
        "nan",
        None,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["metod=dpgan"], "(did you mean 'method'?)"),
        (["failed"], "expected filters KEY=VALUE, got 'failed'"),
        (["--sort", "dat"], "(did you mean 'date'?)"),
        (["--sort", "acc_logreg"], "(did you mean 'acc_logreg_pct'?)"),
        (["--spent", "--json"], "expected --spent without"),
    ],
)
def test_filters_and_orders_that_do_not_exist_are_refused(arguments, message, results, capsys):
    assert main(["runs", f"--results={results}", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_filters_that_nothing_matches_are_named(results, capsys):
    assert main(["runs", f"--results={results}", "method=dpgann", "seed=0"]) == 0
    assert "matches method=dpgann seed=0; `dpgen runs` lists all" in capsys.readouterr().out
    (results / "other" / "runs").mkdir(parents=True)
    assert main(["runs", f"--results={results / 'other'}"]) == 0
    assert "start one with `dpgen run`" in capsys.readouterr().out


def test_what_is_known_of_the_source_of_a_plugin_is_listed(tmp_path, capsys):
    for seed in (0, 1):
        execute(config(tmp_path, f"seed={seed}"))
    capsys.readouterr()
    known = "the class tests.toys.MeanImage is not of the bench, and ε proven rests on its source, which "
    assert [run["plugin"] for run in listed(capsys, tmp_path)] == [f"{known}`dpgen check` has not checked here"] * 2
    keep_check(
        tmp_path,
        (Store(tmp_path).runs()[0].path / "source").read_text(),
        Check("tests.toys.MeanImage", False, "2026-11-30", "-"),
    )
    assert main(["runs", f"--results={tmp_path}"]) == 0
    assert capsys.readouterr().out.count(f"note: {known}FAILED `dpgen check` on 2026-11-30") == 1


def test_infinite_numbers_are_texts_in_json(results, capsys):
    folder = Store(results).runs()[0]
    ledger = folder.read_json("ledger.json")
    folder.write_json("ledger.json", {**ledger, "epsilon": {"proven": float("inf"), "claimed": float("nan")}})
    runs = {run["id"]: run for run in listed(capsys, results)}
    assert (runs[folder.id]["proven"], runs[folder.id]["claimed"]) == ("inf", "nan")


def test_the_settings_of_a_run_are_shown(results, capsys):
    own = ["experiment=demo/dp_merf", "++method.features=30", "privacy.epsilon=3", "privacy.delta=1e-6", "seed=4"]
    folder = Store(results).folder(fake_run(results, [*own, "protocol=quick"], 50.0))
    folder.write_json("environment.json", {"overrides": own})
    (run,) = listed(capsys, results, "seed=4")
    assert run["settings"] == ["experiment=demo/dp_merf", "method.features=30", "privacy.delta=1e-6"]
    assert row(run)[1].splitlines() == ["dp_merf digits seed 4", *run["settings"]]


def test_a_running_run_shows_its_step(results):
    folder = next(folder for folder in Store(results).runs() if folder.status() == "failed")
    recorded = progress.RecordedProgress(folder.path / "progress.json", progress.NoProgress())
    with folder.locked():
        folder.mark("running", "train")
        recorded.start("critic", 4000)
        recorded._written -= progress.RECORD_S
        recorded.step(1200)
        (run,) = (run for run in overviews(results) if run["id"] == folder.id)
        assert (run["status"], run["step"], run["steps"]) == ("running", 1200, 4000)
        assert "running (train 1,200 of 4,000)" in row(run)
        assert run["duration_s"] >= 0
        (folder.path / "progress.json").write_text('{"step": 12')
        (run,) = (run for run in overviews(results) if run["id"] == folder.id)
        assert run["step"] is None
        recorded.finish()
    assert not (folder.path / "progress.json").exists()


def test_the_source_of_a_method_is_read_once_for_all_its_runs(tmp_path, monkeypatch):
    for seed in (0, 1):
        execute(config(tmp_path, f"seed={seed}"))
    calls: list[type] = []
    original = identity.source_fingerprint
    monkeypatch.setattr(identity, "source_fingerprint", lambda cls: calls.append(cls) or original(cls))
    assert [run["stale"] for run in overviews(tmp_path)] == [False, False]
    assert len(calls) == 1
    assert overview.overview(Store(tmp_path).runs()[0])["stale"] is False


# dpgen rm


def test_rm_lists_asks_and_removes(results, capsys, monkeypatch):
    arguments = ["rm", "--failed", f"--results={results}"]
    assert main(arguments) == 2
    assert "expected --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert main(arguments) == 0
    assert len(Store(results).runs()) == 3
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert main(arguments) == 0
    assert "dpgan digits seed 0, failed" in capsys.readouterr().out
    assert [folder.status() for folder in Store(results).runs()] == ["finished", "finished"]
    assert [path.name for path in results.glob(".*")] == []
    assert main(arguments) == 0
    assert "no run to remove" in capsys.readouterr().out


def test_rm_removes_stale_runs_and_those_named(results, capsys, monkeypatch):
    first, second = (folder for folder in Store(results).runs() if folder.config.method.name == "dp_merf")
    for folder in (first, second):
        (folder.path / "ledger.json").unlink()  # the made-up ones cannot be read, and would be kept
    assert main(["rm", first.id[:8], "--yes", f"--results={results}"]) == 0
    assert not first.path.exists()
    monkeypatch.setattr("methods.dp_merf.DPMERF.version", 99)
    assert main(["rm", "--stale", "--yes", f"--results={results}"]) == 0
    assert not second.path.exists()
    assert len(Store(results).runs()) == 1


def test_rm_refuses_running_runs_and_unknown_ones(results, capsys):
    folder = Store(results).runs()[0]
    with folder.locked():
        folder.mark("running", "train")
        assert main(["rm", folder.id, "--yes", f"--results={results}"]) == 2
        assert f"got {folder.id}, which is running" in capsys.readouterr().err
    wrong = folder.id[:-1] + ("0" if folder.id[-1] != "0" else "1")
    assert main(["rm", wrong, "--yes", f"--results={results}"]) == 2
    assert f"did you mean '{folder.id}'?" in capsys.readouterr().err
    assert main(["rm", f"--results={results}"]) == 2
    assert len(Store(results).runs()) == 3


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.yaml", "method: [unclosed"), ("config.yaml", ""), ("config.yaml", "[]"), ("status.json", "{")],
)
def test_rm_removes_an_unreadable_run_by_its_name_alone(name, content, results, capsys):
    (failed,) = (folder for folder in Store(results).runs() if folder.status() == "failed")
    damaged = Store(results).folder(
        fake_run(results, ["method=dpgan", "dataset=digits", "protocol=quick", "seed=1"], None)
    )
    (damaged.path / name).write_text(content)
    assert main(["rm", "--failed", "--yes", f"--results={results}"]) == 0
    assert damaged.id not in capsys.readouterr().out
    assert (failed.path.exists(), damaged.path.exists()) == (False, True)
    assert main(["rm", damaged.id, "--yes", f"--results={results}"]) == 0
    assert f"{damaged.id}  unreadable: {name}" in capsys.readouterr().out
    assert not damaged.path.exists()


def test_rm_keeps_the_ledger_of_an_unreadable_run(tmp_path, capsys):
    run = execute(config(tmp_path, "privacy.noise=os", "privacy.population=people"))
    run.write_json("ledger.json", {**run.read_json("ledger.json"), "population": None})  # as in older runs
    (run.path / "config.yaml").write_text("")
    assert main(["rm", run.id, "--yes", f"--results={tmp_path}"]) == 0
    assert "unreadable" in capsys.readouterr().out
    assert sorted(path.name for path in run.path.iterdir() if path.name != ".lock") == ["REMOVED", "ledger.json"]


def test_rm_says_which_runs_restart_from_a_run(results, capsys):
    parent, child = Store(results).runs()[:2]
    child.write_json("identity.json", {**child.read_json("identity.json"), "restart": {"run": parent.id}})
    assert main(["rm", parent.id, f"--results={results}"]) == 2
    assert f"{child.id} restarts from it" in capsys.readouterr().out


def test_rm_keeps_the_ledger_of_a_run_that_spent(tmp_path, capsys):
    run = execute(config(tmp_path, "privacy.noise=os", "privacy.population=people"))
    before = spent.read_spent(tmp_path)
    assert main(["rm", run.id, "--yes", f"--results={tmp_path}"]) == 0
    assert "its ledger is kept" in capsys.readouterr().out
    assert sorted(path.name for path in run.path.iterdir() if path.name != ".lock") == ["REMOVED", "ledger.json"]
    assert Store(tmp_path).runs() == []
    assert spent.read_spent(tmp_path) == before
    assert Ledger.load(run.path / "ledger.json").population == "people"
    with pytest.raises(ValueError, match="was removed by `dpgen rm`"):
        execute(config(tmp_path, "privacy.noise=os", "privacy.population=people"))
    assert RunFolder(run.path).removed

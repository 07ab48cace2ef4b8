"""Tests of the command line: sweeps, listing, sampling, the README's example, invalid input, and written results."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dpgen_bench.cli import main
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.outcomes.overview import overview, row
from dpgen_bench.store.folders import Store
from dpgen_bench.utils.paths import CONF
from methods.dp_merf import DPMERF
from tests.table_toys import ROW, RUN, fake_run, measured, paper_table

ROOT = Path(__file__).resolve().parent.parent

# Training and evaluation take a moment.
TINY = [
    "method=dp_merf", "method.features=20", "method.steps=2", "protocol.num_samples=200", "runtime.progress=false",
    "+protocol.metrics.brightness={_target_: tests.toys.Brightness}", "~protocol.metrics.mlp",
    "~protocol.metrics.logreg", "runtime.account_s=0.01",
]  # fmt: skip


def dpgen(*arguments: str, cwd: Path = ROOT, results: Path | None = None) -> subprocess.CompletedProcess:
    """`dpgen` in a process of its own, as the console script starts it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if results is not None:
        environment["DPGEN_RESULTS"] = str(results)
    command = [sys.executable, "-m", "dpgen_bench.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A multirun of four runs, two of which must fail (a learning rate that float32 cannot represent)."""
    results = tmp_path_factory.mktemp("swept")
    done = dpgen("run", "-m", *TINY, "seed=0,1", "method.lr=1e39,0.01", results=results)
    return results, done


def test_a_failing_job_is_reported_and_does_not_stop_the_sweep(swept):
    results, done = swept
    status = sorted(folder.status() for folder in Store(results).runs())
    assert status == ["failed", "failed", "finished", "finished"]
    assert done.returncode == 1
    assert "failed during training" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_run_stores_the_overrides_that_reproduce_it_without_folders(swept):
    results, _ = swept
    for folder in Store(results).runs():
        overrides = folder.read_json("environment.json")["overrides"]
        assert build_spec(compose_config(overrides)).id == folder.id
        assert str(results) not in " ".join(overrides)


def test_runs_lists_them_all(swept, capsys, monkeypatch):
    results, _ = swept
    assert main(["runs", "--results", str(results)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("finished") == 2
    assert shown.count("failed (train)") == 2
    assert "stale" not in shown
    monkeypatch.setattr(DPMERF, "version", 99)
    main(["runs", "--results", str(results)])
    assert capsys.readouterr().out.count("stale") == 4


def test_an_unreadable_run_hides_no_other(swept, tmp_path, capsys):
    results, _ = swept
    shutil.copytree(results, tmp_path, dirs_exist_ok=True)
    unreadable = next(folder for folder in Store(tmp_path).runs() if folder.done)
    (unreadable.path / "ledger.json").write_text("{bad")
    assert main(["runs", "--results", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "damaged: " in shown
    assert "finished" in shown


def test_a_sample_from_the_command_line(swept, tmp_path, capsys):
    results, _ = swept
    run = next(folder for folder in Store(results).runs() if folder.done)
    arguments = [
        "sample",
        run.id,
        "--n",
        "3",
        "--seed",
        "1",
        "--out",
        str(tmp_path / "x.npz"),
        "--results",
        str(results),
    ]
    assert main(arguments) == 2
    assert "is not for release" in capsys.readouterr().err
    assert main([*arguments, "--benchmark"]) == 0
    assert (tmp_path / "x.npz").exists()


def test_runs_marks_values_of_a_changed_protocol(tmp_path):
    first = ["experiment=demo/dp_merf", "privacy.epsilon=10", "protocol=quick"]
    record = build_spec(compose_config([*first, "protocol.num_samples=50"])).protocol_record()
    run = Store(tmp_path).folder(fake_run(tmp_path, first, 92.0, record))
    assert "quick (changed): Acc. log. reg. 92.0%" in "".join(row(overview(run)))
    other = Store(tmp_path).folder(fake_run(tmp_path, [*first, "seed=3"], [92.0, 93.0]))
    assert "quick: Acc. log. reg. 92.5% (mean of 2)" in "".join(row(overview(other)))


@pytest.mark.parametrize(
    "preset",
    [
        "demo/dp_merf",
        "demo/dpgan",
        "demo/dp_sinkhorn",
        "demo/gs_wgan",
        "demo/dp_gauss",
        "demo/sim_pe",
        "dp_sinkhorn/reduced_whole",
        "gs_wgan/reduced_proven",
    ],
)
def test_a_presets_runtime_wins_over_the_defaults_and_loses_to_the_command_line(preset):
    assert compose_config([f"experiment={preset}"]).runtime.threads == 1
    assert compose_config([f"experiment={preset}", "runtime.threads=3"]).runtime.threads == 3


def test_the_readmes_method_conforms_and_runs(tmp_path):
    """The example is read from the README, written to files as a reader would, and used by its commands."""
    readme = (ROOT / "README.md").read_text()
    examples = dict(re.findall(r"<!-- example: (\S+) -->\n```\w+\n(.*?)```", readme, flags=re.DOTALL))
    (tmp_path / "mean_image.py").write_text(examples["mean_image.py"])
    (tmp_path / "my_conf" / "method").mkdir(parents=True)
    (tmp_path / "my_conf" / "method" / "mean_image.yaml").write_text(examples["my_conf/method/mean_image.yaml"])
    conf = ["--config-dir", "my_conf", "method=mean_image"]
    checked = dpgen("check", *conf, cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "mean_image conforms" in checked.stdout
    quick = ["~protocol.metrics.mlp", "runtime.account_s=0.01"]
    made = dpgen("run", *conf, "privacy.epsilon=10", *quick, cwd=tmp_path)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "ε proven rests on its source, which passed `dpgen check` on 20" in made.stderr
    (run,) = Store(tmp_path / "results").runs()
    (measurement,) = run.measurements.all()
    measured = measurement["repeats"][0]["metrics"]
    assert measured["logreg"]["values"]["acc_logreg_pct"] > 50  # ten noisy mean images, against chance at 10
    assert json.loads((run.path / "ledger.json").read_text())["epsilon"]["proven"] <= 10
    listing = ["runs", "--results", str(tmp_path / "results")]  # from another folder than that of mean_image.py
    listed = dpgen(*listing)
    assert "finished" in listed.stdout
    assert "method not" not in listed.stdout  # the results name the folders of mean_image.py and its yaml
    (tmp_path / "my_conf").rename(tmp_path / "renamed")
    (tmp_path / "mean_image.py").unlink()
    listed = dpgen(*listing)
    assert "my_conf, which has yamls of runs in" in listed.stderr
    assert "finished, method not" in listed.stdout
    assert "stale" not in listed.stdout + listed.stderr
    assert "Error getting class" not in listed.stdout + listed.stderr


def test_the_readme_names_files_that_exist():
    readme = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    presets, files = re.findall(r"experiment=([\w/]+)", readme), re.findall(r"\]\(([\w./]+)\)", readme)
    assert presets
    assert files
    assert [name for name in presets if not (CONF / "experiment" / f"{name}.yaml").exists()] == []
    assert [name for name in files if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["paint"], "expected one of run"),
        (["run", "method=nothing"], "nothing"),
        (["run", "privacy.epsilon=0"], "privacy.epsilon > 0"),
        (["account", "dataset=npz", "method=dp_merf"], "expected a value of dataset.path, got none"),
        (["fetch", "dataset=npz"], "dpgen: expected a value of dataset.path, got none"),
        (["run", "dataset=mnist", "data_root=/nowhere"], "dpgen fetch dataset=mnist"),
        (
            ["tables", "nothing"],
            "expected the name of a table in conf/table, or in table/ of --config-dir, got 'nothing'",
        ),
        (["sample", "zzz", "--n", "1", "--out", "x.npz"], "found none"),
        (["evaluate", "zzz"], "found none"),
    ],
)
def test_invalid_input_gets_one_clear_line(arguments, message, tmp_path, monkeypatch, capsys):
    if arguments[0] == "run":  # Hydra's logging outlives a call, so it gets a process of its own
        done = dpgen(*arguments, results=tmp_path)
        code, shown = done.returncode, done.stdout + done.stderr
    else:
        monkeypatch.setenv("DPGEN_RESULTS", str(tmp_path))
        code = main(arguments)
        captured = capsys.readouterr()
        shown = captured.out + captured.err
    assert code not in (0, None)
    assert message in shown
    assert "Traceback" not in shown


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Path:
    """A results folder with two measured runs, and a conf/table whose only table asks for them."""
    (tmp_path / "conf" / "table").mkdir(parents=True)
    OmegaConf.save(
        OmegaConf.create(paper_table({"of": ROW, "run": f"{RUN} seed=0,1"})), tmp_path / "conf" / "table" / "toy.yaml"
    )
    monkeypatch.setattr("dpgen_bench.tables.names.CONF", tmp_path / "conf")
    for seed in (0, 1):
        measured(tmp_path, RUN, "dpgan_revisited", {"fid": {"fid": 260.0}}, seed)
    return tmp_path


def test_files_are_written_again_from_what_the_results_hold_now(toy, capsys):
    """No guard keeps an old file: values that must last are in records."""
    written = [toy / "tables" / "toy.md", toy / "tables" / "toy.csv", toy / "report.html"]
    assert [main([*verb, "--results", str(toy)]) for verb in (["tables", "--all"], ["report"])] == [0, 0]
    before = [path.read_bytes() for path in written]
    captured = capsys.readouterr()
    assert "[1/1] toy" in captured.err
    assert all(str(path) in captured.out for path in written)
    shutil.rmtree(toy / "runs")
    assert [main([*verb, f"--results={toy}"]) for verb in (["tables", "toy", "--no-plots"], ["report"])] == [0, 0]
    assert not {path.read_bytes() for path in written} & set(before)
    assert "251.8" in written[0].read_text()  # a published value needs no run


def test_an_error_in_one_table_does_not_prevent_the_others(toy, capsys, monkeypatch):
    (toy / "conf" / "table" / "a_bad_one.yaml").write_text("title: it has no protocol\nsweeps: [method=dp_merf]\n")
    assert main(["tables", "--all", f"--results={toy}"]) == 2
    assert "a_bad_one" in capsys.readouterr().err
    assert (toy / "tables" / "toy.csv").exists()
    (toy / "tables" / "toy.csv").unlink()
    assert main(["tables", "toy", "toys", f"--results={toy}"]) == 2
    assert not (toy / "tables" / "toy.csv").exists()


@pytest.mark.parametrize("verb", [["tables", "demo"], ["tables", "--all"], ["report"], ["runs"]])
def test_a_missing_folder_of_results_is_an_error(verb, tmp_path, monkeypatch, capsys):
    assert main([*verb, f"--results={tmp_path / 'reslts'}"]) == 2
    monkeypatch.setenv("DPGEN_RESULTS", str(tmp_path / "reslts"))
    assert (main(verb), (tmp_path / "reslts").exists()) == (2, False)
    assert capsys.readouterr().err.count("expected a folder of results, got") == 2

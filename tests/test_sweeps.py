"""Sweeps of a table make exactly its missing runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dpgen_bench.cli import main
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.overrides import parse_override, quote_value
from dpgen_bench.runs.execute import execute
from dpgen_bench.store.folders import RunFolder, Store
from dpgen_bench.store.records import SCHEMA, record_file
from dpgen_bench.tables import sweeps
from dpgen_bench.tables.expand import expand
from dpgen_bench.tables.jobs import Job, plan_sweep
from dpgen_bench.tables.load import load_table
from dpgen_bench.tables.spec import parse_table
from dpgen_bench.tables.sweeps import check_overrides, multiruns
from dpgen_bench.training.signals import STOP_SIGNALS
from dpgen_bench.utils.paths import RECORDS
from tests.table_toys import measured

MERF = "experiment=demo/dp_merf"
BOTH = {"logreg": {"acc_logreg_pct": 91.0}, "mlp": {"acc_mlp_pct": 90.0}}  # all that the protocol quick measures


def a_table(*sweeps: str, **more) -> dict[str, Any]:
    return {"title": "t", "protocol": "quick", "sweeps": [*sweeps], "metrics": ["acc_mlp_pct"], **more}


def plan(table: dict[str, Any], results: Path, scale: str = "paper") -> list[Job]:
    return plan_sweep(parse_table("toy", table), results, scale)


def write_table(tmp_path: Path, monkeypatch, table: dict[str, Any]) -> None:
    (tmp_path / "conf" / "table").mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(table), tmp_path / "conf" / "table" / "toy.yaml")
    monkeypatch.setattr("dpgen_bench.tables.names.CONF", tmp_path / "conf")


@pytest.fixture
def launched(monkeypatch) -> list[list[str]]:
    """The arguments of `dpgen run` of each multirun; none is made."""
    arguments: list[list[str]] = []
    monkeypatch.setattr(sweeps, "run_stoppable", lambda command, output: (arguments.append(command[4:]), (0, None))[1])
    return arguments


def test_only_what_is_missing_is_planned(tmp_path):
    done = measured(tmp_path, f"{MERF} privacy.epsilon=10", "quick", BOTH, seed=1)
    table = a_table(f"{MERF} privacy.epsilon=1,10 seed=0,1", f"{MERF} privacy.epsilon=10 seed=1")
    jobs = plan(table, tmp_path)
    assert len(jobs) == 4  # the run that two lines name is one
    (finished,) = [job for job in jobs if job.finished]
    assert (finished.spec.id, {job.state for job in jobs if not job.finished}) == (done, {"not run"})
    made = [tuple(job) for _, *line, _ in multiruns(jobs, tmp_path, []) for job in expand(" ".join(line))]
    assert sorted(made) == sorted(job.overrides for job in jobs if not job.finished)  # the second line makes none


def test_a_line_of_finished_runs_is_not_launched(tmp_path):
    measured(tmp_path, f"{MERF} privacy.epsilon=10", "quick", BOTH, seed=1)
    table = a_table(f"{MERF} privacy.epsilon=10 seed=1", f"{MERF} privacy.epsilon=1 seed=0,1")
    ((_, *arguments),) = multiruns(plan(table, tmp_path), tmp_path, ["runtime.device=cpu"])
    assert arguments == [
        MERF,
        "privacy.epsilon=1",
        "seed=0,1",
        "protocol=quick",
        f"results={quote_value(str(tmp_path))}",
        "runtime.device=cpu",
    ]


def without_results(multirun: list[str]) -> str:
    _, *line, _ = multirun
    return " ".join(line)


def test_a_run_that_has_only_a_record_is_not_launched(tmp_path):
    """Its folder is missing, so `dpgen run` would train it again."""
    measured(tmp_path, f"{MERF} privacy.epsilon=1", "quick", BOTH, seed=0)
    recorded = Store(tmp_path).folder(measured(tmp_path, f"{MERF} privacy.epsilon=10", "quick", BOTH, seed=1))
    record = record_file(tmp_path, "dp_merf", recorded.id)
    record.parent.mkdir(parents=True)
    content = {"identity": recorded.read_json("identity.json"), "measurements": recorded.measurements.all()}
    unread = {"measured_by": {"name": "Ada"}, **{key: {} for key in ("config", "ledger", "cost", "environment")}}
    record.write_text(json.dumps({"schema": SCHEMA, **content, **unread}))
    shutil.rmtree(recorded.path)
    jobs = plan(a_table(f"{MERF} privacy.epsilon=1,10 seed=0,1,2"), tmp_path)
    assert [without_results(each) for each in multiruns(jobs, tmp_path, [])] == [
        f"{MERF} privacy.epsilon=1 seed=1,2 protocol=quick",
        f"{MERF} privacy.epsilon=10 seed=0,2 protocol=quick",
    ]


def test_scale_reduced_makes_the_runs_that_stand_in_and_no_others(tmp_path):
    rows = [{"of": {"method": "A"}, "run": f"{MERF} seed=0", "reduced": f"{MERF} seed=1,2 protocol=standard_2k"}]
    table = a_table(f"{MERF} seed=7", rows=rows, parents={"start": f"{MERF} seed=8"})
    planned = plan(table, tmp_path, "reduced")
    assert [(job.spec.seed, job.spec.config.protocol.name) for job in planned] == [
        (1, "standard_2k"),
        (2, "standard_2k"),
    ]
    assert {job.spec.seed for job in plan(table, tmp_path)} == {0, 7, 8}
    measured(tmp_path, MERF, "quick", BOTH)
    assert plan(table, tmp_path, "reduced") == []  # no table would show them
    with pytest.raises(ValueError, match="expected a table with a line under `reduced` for scale=reduced, got none"):
        plan(a_table(MERF), tmp_path, "reduced")


def test_a_run_measured_by_another_protocol_is_trained_not_measured(tmp_path):
    measured(tmp_path, MERF, "standard_2k", BOTH)
    (job,) = plan(a_table(f"{MERF} seed=0"), tmp_path)
    assert job.state == "trained, not measured"


def test_metrics_can_be_left_for_later(tmp_path):
    measured(tmp_path, MERF, "quick", {"logreg": {"acc_logreg_pct": 91.0}})
    table = parse_table("toy", a_table(f"{MERF} seed=0,1"))
    assert [job.state for job in plan_sweep(table, tmp_path)] == ["trained, not measured", "not run"]
    jobs = plan_sweep(table, tmp_path, without=["mlp"])
    assert [job.state for job in jobs] == ["finished", "not run"]
    ((_, *arguments),) = multiruns(jobs, tmp_path, [])
    assert arguments[:4] == [MERF, "seed=1", "protocol=quick", "~protocol.metrics.mlp"]
    assert compose_config(expand(" ".join(arguments[:4]))[0]).protocol.metrics.keys() == {"logreg"}


def test_a_metric_is_left_out_of_those_protocols_that_have_it(tmp_path):
    table = parse_table("toy", a_table(f"{MERF} seed=0 protocol=quick,standard_1k_cpu"))
    jobs = plan_sweep(table, tmp_path, without=["fid"])
    assert [job.line[-1] for job in jobs] == ["protocol=quick", "~protocol.metrics.fid"]


@pytest.mark.parametrize(
    ("table", "without", "message"),
    [
        ("gs_wgan_tablea1", "fdi", "expected metrics among adaboost, average, .*, those of the table, got fdi"),
        ("gs_wgan_tablea1", "mlp", "got mlp, a part of average of protocol 'gs_wgan': leave out both, mlp,average"),
        ("demo", "logreg, mlp", "of protocol 'quick' that stays, got logreg, mlp, which are all of them"),
    ],
)
def test_metrics_that_cannot_be_left_out_are_named(tmp_path, table, without, message, capsys, launched):
    assert main(["sweep", table, "--without", without, "--results", str(tmp_path)]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not launched


def test_steps_are_capped_by_the_scale_and_unknown_where_the_budget_sets_them(tmp_path):
    table = a_table("experiment=demo/dpgan", "experiment=demo/dpgan method.sigma=1.0 method.steps=null")
    assert [job.steps for job in plan(table, tmp_path)] == [900, None]
    assert plan(table, tmp_path, "quick")[0].steps == 300


@settings(max_examples=200, deadline=None)
@given(st.text() | st.text(alphabet="\\'\"a1 ,=[]{}()$%:./\n"))
def test_a_quoted_value_is_one_value_and_the_same(text):
    """A law of Hydra's parser, also for the overrides that its sweeper passes to each job of a multirun."""
    override = parse_override(f"results={quote_value(text)}")
    again = parse_override(f"results={override.get_value_element_as_str()}")
    assert not override.is_sweep_override()
    assert str(override.value()) == str(again.value()) == text


def test_a_damaged_run_of_the_table_is_reported_and_not_made(tmp_path, monkeypatch, capsys, launched):
    write_table(tmp_path, monkeypatch, a_table(f"{MERF} seed=0,1"))
    bad = Store(tmp_path).folder(measured(tmp_path, MERF, "quick", BOTH)).path
    (bad / "ledger.json").write_text("{bad")
    assert main(["sweep", "toy", "--dry-run", f"--results={tmp_path}"]) == 0
    assert "damaged: ledger.json cannot" in " ".join(capsys.readouterr().out.split())
    assert main(["sweep", "toy", f"--results={tmp_path}"]) == 1
    assert f"run {bad.name} is damaged: ledger.json cannot be read; it is not made" in capsys.readouterr().err
    assert [[word for word in arguments if "seed" in word] for arguments in launched] == [["seed=1"]]
    with pytest.raises(ValueError, match=f"run {bad.name} cannot be used: ledger.json cannot be read. Restore"):
        execute(compose_config([MERF, "seed=0", "protocol=quick", f"results={tmp_path}"]))
    launched.clear()
    write_table(tmp_path / "only", monkeypatch, a_table(f"{MERF} seed=0"))
    assert (main(["sweep", "toy", f"--results={tmp_path}"]), launched) == (1, [])


def test_a_dry_run_lists_and_makes_nothing(tmp_path, monkeypatch, capsys):
    write_table(tmp_path, monkeypatch, a_table(f"{MERF} privacy.epsilon=1,10 seed=0,1"))
    measured(tmp_path, f"{MERF} privacy.epsilon=1", "quick", BOTH)
    assert main(["sweep", "toy", "--dry-run", f"--results={tmp_path}"]) == 0
    output = capsys.readouterr().out
    assert "1 of 4 runs finished; 3 to make" in output
    listed = [line.split("│")[-3:-1] for line in output.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in cells] for cells in listed] == [["not run", "200"]] * 3
    assert output.count("dpgen run") == 2
    assert "dpgen run -m experiment=demo/dp_merf privacy.epsilon=1 seed=1 protocol=quick" in output
    assert "dpgen run -m experiment=demo/dp_merf privacy.epsilon=10 seed=0,1 protocol=quick" in output
    assert len(Store(tmp_path).runs()) == 1


def test_the_lines_printed_are_the_ones_launched(tmp_path, monkeypatch, capsys, launched):
    parents = {"first": f"{MERF} seed=7"}
    write_table(tmp_path, monkeypatch, a_table(f"{MERF} seed=0,1", f"{MERF} seed=7", parents=parents))
    results = tmp_path / "mine, (a) = 'b'"
    arguments = ["sweep", "toy", "runtime.device=cpu", f"--results={results}", "hydra/launcher=joblib"]
    printed = []
    for more in (["--dry-run"], []):
        assert main([*arguments, *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        printed.append([line[line.index("dpgen run") :] for line in lines if "dpgen run" in line])
    assert printed[0] == printed[1]
    assert [shlex.split(line)[2:] for line in printed[1]] == launched
    assert [arguments[-3:] for arguments in launched] == [
        [f"results={quote_value(str(results))}", "runtime.device=cpu", "hydra/launcher=joblib"]
    ] * 2
    assert ["seed=7" in arguments for arguments in launched] == [True, False]  # the parent first
    assert compose_config(launched[0][1:]).results == str(results)


def test_the_default_folder_of_results_is_not_an_override(tmp_path, monkeypatch, capsys, launched):
    write_table(tmp_path, monkeypatch, a_table(f"{MERF} seed=0"))
    monkeypatch.delenv("DPGEN_RESULTS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "toy", "--results=results"]) == 0
    monkeypatch.setenv("DPGEN_RESULTS", "elsewhere")
    assert main(["sweep", "toy", "--results=results"]) == 0
    assert [arguments[-1] for arguments in launched] == ["protocol=quick", "results=results"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    results = tmp_path_factory.mktemp("planned")
    line = "experiment=demo/dp_merf seed=0 runtime.keep_steps=[5]"
    return plan(a_table(line), results), results


OTHER_RUNS = [
    "method.steps=3", "method=dpgan", "dataset=mnist", "privacy.epsilon=3", "++scale.max_steps=3", "seed=5", "~restart",
    "experiment=demo/dpgan", "protocol=standard", "protocol.num_samples=10", "results=x", "hydra.mode=RUN",
    "+hydra.sweeper.params={method.steps:3}",
]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        *((word, "expected overrides that say how runs are made") for word in OTHER_RUNS),
        ("runtime.device=cpu,cuda", "expected one value"),
        ("foo", "expected an override such as"),
        ("method.characters=０１", r"beyond ASCII needs quotes within those of the shell: \"KEY='VALUE'\""),
        ("federation.faults.drop=0.1", "this changes the identity of dp_merf"),
        ("federation.dropout=independent", "changes federation.dropout"),
        ("runtime.keep_steps=[6]", "changes the steps to keep"),
    ],
)
def test_overrides_that_would_make_other_runs_are_refused(planned, word, complaint):
    with pytest.raises(ValueError, match=complaint):
        check_overrides([word], *planned)


def test_overrides_that_say_how_runs_are_made_are_taken(planned):
    how = ["runtime.device=cpu", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1", "data_root='/a b'"]
    check_overrides([*how, "federation=ray", "federation.actors=2"], *planned)


def test_a_refused_override_launches_nothing_whether_or_not_it_is_a_dry_run(tmp_path, monkeypatch, capsys, launched):
    write_table(tmp_path, monkeypatch, a_table(f"{MERF} seed=0"))
    for more in ([], ["--dry-run"]):
        for word in ("method.steps=3", "foo", "runtime.devise=cpu"):
            assert main(["sweep", "toy", *more, word, f"--results={tmp_path}"]) == 2
            assert word.split("=")[0].split(".")[-1] in capsys.readouterr().err
    assert (main(["sweep", "toy", "--dryrun", f"--results={tmp_path}"]), launched) == (2, [])
    assert "did you mean '--dry-run'?" in capsys.readouterr().err


def test_scale_and_options_may_stand_anywhere(tmp_path, monkeypatch):
    write_table(tmp_path, monkeypatch, a_table(f"{MERF} seed=0"))
    asked = []
    monkeypatch.setattr(
        "dpgen_bench.report.written.write_table", lambda *arguments: asked.append(arguments[:1] + arguments[2:4])
    )
    monkeypatch.setattr(sweeps, "print_plan", lambda *arguments: asked.append(arguments[:1] + arguments[2:]))
    for arguments in (["toy", "--format", "md", "scale=quick"], ["toy", "scale=quick", "--format", "md"]):
        assert main(["tables", *arguments, "--results", str(tmp_path)]) == 0
    for arguments in (
        ["toy", "scale=quick", "--dry-run"],
        ["--without=fid", "--dry-run", "toy", "a.b=1", "scale=quick"],
    ):
        assert main(["sweep", *arguments]) == 0
    swept = [("toy", [], "quick", []), ("toy", ["a.b=1"], "quick", ["fid"])]
    assert asked == [("toy", "quick", ["md"])] * 2 + swept


CHILD = """
import pathlib, signal, sys, time
def record(number, frame):
    pathlib.Path("received").write_text(signal.Signals(number).name)
    sys.exit(3)
signal.signal(signal.SIGTERM, record)
pathlib.Path("ready").touch()
time.sleep(600)
"""
SWEEPS = "import sys; from dpgen_bench.tables.sweeps import run_stoppable; print(run_stoppable(sys.argv[1:]))"


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGKILL))],
)
def test_a_stopped_sweep_stops_its_multirun(tmp_path, number):
    """SIGTERM reaches the child, which may end with any status; on Linux also if the parent is killed."""
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("no other system tells a process that its parent is gone")
    command = [sys.executable, "-c", SWEEPS, sys.executable, "-c", CHILD]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    parent = subprocess.Popen(command, cwd=tmp_path, env=path, stdout=subprocess.PIPE, text=True)
    wait_for(tmp_path / "ready")
    parent.send_signal(number)
    output = parent.communicate(timeout=300)[0]
    wait_for(tmp_path / "received")
    assert (tmp_path / "received").read_text() == "SIGTERM"
    assert output.strip() == ("" if number == signal.SIGKILL else f"(3, {int(number)})")


def test_a_multirun_leaves_the_signal_handlers_as_they_were():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    assert sweeps.run_stoppable([sys.executable, "-c", "raise SystemExit(3)"]) == (3, None)
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before


def wait_for(path: Path) -> None:
    end = time.monotonic() + 300
    while not (path.exists() and (path.name == "ready" or path.read_text())):
        assert time.monotonic() < end, f"{path.name} did not come"
        time.sleep(0.05)


def test_no_multirun_follows_a_signal_to_stop(tmp_path, monkeypatch, capsys):
    write_table(tmp_path, monkeypatch, a_table(f"{MERF} seed=0", f"{MERF} privacy.epsilon=1 seed=1"))
    made = []
    monkeypatch.setattr(sweeps, "run_stoppable", lambda command, output: (made.append(command), (143, 15))[1])
    assert main(["sweep", "toy", f"--results={tmp_path}"]) == 143
    assert len(made) == 1
    assert "the same command continues" in capsys.readouterr().err


def files(run: RunFolder) -> list[Path]:
    return [path for path in run.path.rglob("*") if path.is_file() and path.name != ".lock"]


def test_a_sweep_makes_exactly_what_is_missing_parents_first(tmp_path, monkeypatch, capfd):
    """Real runs in a folder with special characters: the parent, then two restarts; a second sweep makes none."""
    tiny = (
        "method=dpgan dataset=digits privacy.epsilon=inf method.steps=4 method.n_d=2 method.batch_size=8 method.d_d=4"
    )
    tiny += " method.d_g=4 method.latent_dim=4 protocol.num_samples=20 runtime.progress=false"
    # Classifiers are measured in processes of their own, whose start takes longer than all else here.
    tiny += " ~protocol.metrics.logreg ~protocol.metrics.mlp"
    tiny += " +protocol.metrics.brightness={_target_:tests.toys.Brightness}"
    table = a_table(
        f"{tiny} method.n_d=1,2 restart={{run:@first,checkpoint:step-2}}",
        parents={"first": f"{tiny} runtime.keep_steps=[2] protocol=quick"},
    )
    write_table(tmp_path, monkeypatch, table)
    results = tmp_path / "a, b=(c) 'd'"
    assert main(["sweep", "toy", f"--results={results}"]) == 0
    output = capfd.readouterr().out
    assert "toy: 0 of 3 runs finished" in output
    runs = Store(results).runs()
    assert sorted(run.status() for run in runs) == ["finished"] * 3
    restarts = [json.loads((run.path / "identity.json").read_text())["restart"] for run in runs]
    (parent,) = [run.id for run, restart in zip(runs, restarts, strict=True) if restart is None]
    assert [r for r in restarts if r] == [{"run": parent, "checkpoint": "step-2"}] * 2
    kept, lost = [run for run, restart in zip(runs, restarts, strict=True) if restart]
    shutil.rmtree(lost.path)
    before = {path: path.stat().st_mtime_ns for run in (kept, Store(results).folder(parent)) for path in files(run)}
    assert main(["sweep", "toy", f"--results={results}"]) == 0
    assert kept.id not in capfd.readouterr().out
    assert lost.status() == "finished"
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert main(["sweep", "toy", f"--results={results}"]) == 0
    output = capfd.readouterr().out
    assert "toy: 3 of 3 runs finished" in output
    assert "dpgen run" not in output


def test_a_sweep_names_missing_runs_that_the_bench_has_records_of(tmp_path, capsys):
    """Another folder of results has none of them, and `tables --recorded` shows them nevertheless."""
    assert main(["sweep", "league_hour", "--dry-run", f"--results={tmp_path}"]) == 0
    total = len(plan_sweep(load_table("league_hour"), tmp_path))
    assert f"{total} runs of these have a record in {RECORDS.parent}" in capsys.readouterr().out

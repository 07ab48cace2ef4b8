"""`make gpu-day` with a small plan on a CPU: it is killed in the middle of a run, and goes on."""

from __future__ import annotations

import signal
import sys

import pytest
import torch
import yaml

from dpgen_bench.cli import main as dpgen
from dpgen_bench.store.folders import Store
from dpgen_bench.store.records import record_file
from tests.gpu_day import __main__ as gpu_day
from tests.gpu_day.plan import PLAN, describe, expected_hours, read
from tests.run_toys import in_child, kill_at_rename

RUN = (
    "method=dp_merf dataset=digits privacy.epsilon=inf method.features=10 method.batch_size=2 method.steps=6 "
    "protocol.num_samples=20 ~protocol.metrics.mlp ~protocol.metrics.logreg "
    "+protocol.metrics.brightness._target_=tests.toys.Brightness runtime.checkpoint_s=0 runtime.account_s=0.01 "
    "runtime.progress=false runtime.threads=1"
)


def write_plan(path, *runs, checks=()):
    plan = {"gflops": 1000.0, "launch_s": 0.01, "checks": [*checks], "runs": [*runs]}
    path.write_text(yaml.safe_dump(plan))
    return path


def entry(name, run, seeds=(0,), value=1, loops=((100, 1),), more_hours=0.1):
    return {
        "name": name,
        "run": run,
        "seeds": [*seeds],
        "value": value,
        "loops": [[*loop] for loop in loops],
        "more_hours": more_hours,
    }


def test_a_loop_takes_as_long_as_its_operations_or_its_launches():
    launched, busy = (entry("", "", loops=[(3600, gflop)], more_hours=0.5) for gflop in (1.0, 2000.0))
    assert expected_hours(launched, gflops=1000.0, launch_s=0.01) == pytest.approx(0.51)
    assert expected_hours(busy, gflops=1000.0, launch_s=0.01) == pytest.approx(2.5)


def test_runs_are_ordered_by_value_per_hour_and_first_seeds_come_first(tmp_path):
    long = entry("long", "method=dp_merf dataset=digits", seeds=(0, 1), value=4, more_hours=2)
    short = entry("short", "method=dp_merf dataset=mnist", value=3)
    _, runs = read(write_plan(tmp_path / "plan.yaml", long, short), tmp_path)
    assert [run.name for run in runs] == ["short, seed 0", "long, seed 0", "long, seed 1"]


def test_a_mark_belongs_to_a_name_and_a_command_wherever_it_stands(tmp_path):
    first, second = ({"name": name, "command": f"{name} --all", "hours": 0.1} for name in ("tests", "bench"))
    read_marks = lambda *checks: [c.mark for c in read(write_plan(tmp_path / "plan.yaml", checks=checks), tmp_path)[0]]  # noqa: E731
    one, other = read_marks(first, second)
    assert one != other
    assert read_marks(second, first) == [other, one]
    assert read_marks({**first, "command": "tests --some"})[0] not in (one, other)


def test_the_plan_says_where_a_day_ends(tmp_path):
    runs = [entry(str(i), "method=dp_merf dataset=digits", seeds=(i,), more_hours=10, loops=()) for i in range(3)]
    lines = describe(*read(write_plan(tmp_path / "plan.yaml", *runs), tmp_path)).splitlines()
    assert lines[2] == "  ----    20.0 h until here; what follows ends after more than 24 hours"
    assert lines[-1] == "3 of 3 left, about 30.0 hours"


def test_without_a_gpu_the_plan_of_the_repository_is_printed_and_nothing_is_executed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_day"])
    refused = pytest.fail
    assert gpu_day.main(["--results", str(tmp_path)], lambda command: refused(str(command))) == 0
    printed = capsys.readouterr().out
    for each in yaml.safe_load(PLAN.read_text())["runs"]:
        assert f"{each['name']}, seed 0" in printed
    assert "no GPU" in printed
    assert not list(tmp_path.iterdir())


def test_a_day_that_is_killed_goes_on(tmp_path, capsys):
    results, commands = tmp_path / "results", []
    checks = [{"name": "a check", "command": "{python} -c pass", "hours": 0.1}]
    plan = write_plan(tmp_path / "plan.yaml", entry("toy", RUN, seeds=(0, 1)), checks=checks)

    def execute(command):
        """In this process, because a new one takes seconds to import PyTorch. A run of toys has no record."""
        commands.append(list(command[1:]))
        if command[3:4] == ["record"]:
            path = record_file(results, "dp_merf", command[4])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return (dpgen(list(command[3:])) if command[3:4] == ["run"] else 0), None

    def day():
        return gpu_day.main(["--plan", str(plan), "--results", str(results), "--by", "Ada", "--on-cpu"], execute)

    first, second = read(plan, results)[1]
    # The first run makes seven checkpoints: one after each step, and one at the end of the loop.
    assert in_child(lambda: kill_at_rename(9, day, to="last.pt")) == -signal.SIGKILL
    assert (first.done, first.recorded, second.done) == (True, True, False)
    assert (second.folder.path / "checkpoints" / "last.pt").exists()
    before = (first.folder.path / "DONE").stat().st_mtime_ns

    assert day() == 0
    assert [command[2:3] for command in commands] == [["run"], ["record"]]  # neither the check nor the first run
    assert second.recorded
    assert (first.folder.path / "DONE").stat().st_mtime_ns == before
    steps = Store(results).folder(second.spec.id).read_json("training.json")["steps"]
    assert steps == {"train": 6}
    assert "0 of 3 left, about 0.0 hours" in capsys.readouterr().out

    commands.clear()
    assert day() == 0
    assert commands == []


def test_a_failed_part_does_not_keep_the_others_from_running(tmp_path, capsys):
    checks = [{"name": name, "command": "{python} -c pass", "hours": 0.1} for name in ("bad", "good")]
    plan = write_plan(tmp_path / "plan.yaml", checks=checks)
    codes = iter([(3, None), (0, None), (0, 15)])
    arguments = ["--plan", str(plan), "--results", str(tmp_path), "--on-cpu"]
    assert gpu_day.main(arguments, lambda command: next(codes)) == 1
    assert "failed: bad" in capsys.readouterr().out
    assert gpu_day.main(arguments, lambda command: next(codes)) == 128 + 15

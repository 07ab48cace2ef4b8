"""Sweeps of a table: exactly the runs that it lacks, as few multiruns, with an estimate from measured runs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dpgen_bench.cli import main
from dpgen_bench.results.store import Store
from dpgen_bench.tables import rows
from dpgen_bench.tables.rows import expand
from dpgen_bench.tables.sweeps import boxes, estimator, format_seconds, plan_sweep
from tests.test_tables import measured

MERF = "experiment=demo/dp_merf"
BOTH = {"logreg": {"acc_logreg_pct": 91.0}, "mlp": {"acc_mlp_pct": 90.0}}  # all that the protocol quick measures


def a_table(*sweeps: str, **more):
    return OmegaConf.create(
        {"title": "t", "protocol": "quick", "sweeps": [*sweeps], "metrics": ["acc_mlp_pct"], **more}
    )


def write_table(tmp_path: Path, monkeypatch, table) -> None:
    (tmp_path / "conf" / "table").mkdir(parents=True)
    OmegaConf.save(table, tmp_path / "conf" / "table" / "toy.yaml")
    monkeypatch.setattr(rows, "CONF", tmp_path / "conf")


@settings(max_examples=200, deadline=None)
@given(st.sets(st.tuples(*[st.integers(0, 2)] * 3), min_size=0, max_size=20))
def test_boxes_hold_exactly_the_jobs_each_once(jobs):
    """A law: the combinations of all boxes together are the jobs, whatever is missing."""
    words = [[f"a={a}", f"b={b}", f"c={c}"] for a, b, c in sorted(jobs)]
    made = [tuple(job) for box in boxes(words) for job in expand(" ".join(box))]
    assert sorted(made) == sorted(map(tuple, words))
    assert len(boxes(words)) <= len(words)


def test_a_whole_product_is_one_box():
    words = [[f"a={a}", "x=1", f"b={b}"] for a, b in itertools.product("pqr", "st")]
    assert boxes(words) == [["a=p,q,r", "x=1", "b=s,t"]]
    assert boxes([]) == []


def test_values_with_commas_inside_stay_whole():
    restart = 'restart={run:"12e456789012",checkpoint:step-100}'
    (box,) = boxes([[restart, "seed=0"], [restart, "seed=1"]])
    assert expand(" ".join(box)) == [[restart, "seed=0"], [restart, "seed=1"]]


def test_only_what_is_missing_is_planned(tmp_path):
    done = measured(tmp_path, f"{MERF} privacy.epsilon=10", "quick", BOTH, seed=1)
    table = a_table(f"{MERF} privacy.epsilon=1,10 seed=0,1", f"{MERF} privacy.epsilon=10 seed=1")
    jobs = plan_sweep(table, tmp_path)
    assert len(jobs) == 4  # the run that two lines name is one
    (finished,) = [job for job in jobs if job.finished]
    assert (finished.spec.id, {job.state for job in jobs if not job.finished}) == (done, {"not run"})
    missing = [job.words for job in jobs if not job.finished]
    again = [tuple(job) for box in boxes(missing) for job in expand(" ".join(box))]
    assert sorted(again) == sorted(missing)


def test_a_run_measured_by_another_protocol_is_trained_not_measured(tmp_path):
    measured(tmp_path, MERF, "standard_2k", BOTH)
    (job,) = plan_sweep(a_table(f"{MERF} seed=0"), tmp_path)
    assert job.state == "trained, not measured"


def test_steps_are_capped_by_the_scale_and_unknown_where_the_budget_sets_them(tmp_path):
    table = a_table("experiment=demo/dpgan", "experiment=demo/dpgan method.sigma=1.0 method.steps=null")
    assert [job.steps for job in plan_sweep(table, tmp_path)] == [900, None]
    assert plan_sweep(table, tmp_path, "quick")[0].steps == 300


def test_an_estimate_is_the_measured_time_per_step_times_the_steps(tmp_path):
    """900 steps took 90 s, a warm start 5 s and the rest 1 s: 450 steps take 45 + 6 s; measuring took 7 s."""
    line = "experiment=demo/dpgan privacy.epsilon=10"
    run_id = measured(tmp_path, line, "quick", BOTH)
    folder = Store(tmp_path).folder(run_id)
    training = {"seconds": {"warm_start": 5.0, "train": 90.0}, "seconds_outside_loops": 1.0, "steps": {"train": 900}}
    folder.write_json("training.json", {**training, "device": "cpu"})
    (report,) = folder.reports.all()
    report["repeats"][0]["metrics"]["mlp"]["seconds"] = 7.0
    folder.reports.write(report)
    table = a_table(f"{line} method.steps=450 seed=1", f"{line} method.d_d=64 seed=1", "experiment=demo/gs_wgan")
    half, wider, other = [estimator(tmp_path)(job) for job in plan_sweep(table, tmp_path)]
    assert (half.train, half.measure, half.basis) == (51.0, 7.0, "cpu, the same settings")
    assert (wider.train, wider.basis) == (96.0, "cpu, other d_d")
    assert (other.train, other.measure, other.basis) == (None, 7.0, "nothing comparable was run")


def test_a_dry_run_lists_and_makes_nothing(tmp_path, monkeypatch, capsys):
    write_table(tmp_path, monkeypatch, a_table(f"{MERF} privacy.epsilon=1,10 seed=0,1"))
    measured(tmp_path, f"{MERF} privacy.epsilon=1", "quick", BOTH)
    assert main(["sweep", "toy", "--dry-run", f"--results={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "1 of 4 runs finished; 3 to make" in said
    assert "dpgen run -m experiment=demo/dp_merf privacy.epsilon=1,10 seed=1 protocol=quick" in said
    assert "dpgen run -m experiment=demo/dp_merf privacy.epsilon=10 seed=0 protocol=quick" in said
    assert len(Store(tmp_path).runs()) == 1


def test_a_sweep_makes_exactly_what_is_missing_parents_first(tmp_path, monkeypatch, capfd):
    """Real runs: the parent, then the two that restart from it; again, nothing is left."""
    tiny = (
        "method=dpgan dataset=digits privacy.epsilon=inf method.steps=4 method.n_d=2 method.batch_size=8 method.d_d=4"
    )
    tiny += " method.d_g=4 method.latent_dim=4 protocol.num_samples=120 runtime.progress=false runtime.workers=1"
    table = a_table(
        f"{tiny} method.n_d=1,2 restart={{run:@first,checkpoint:step-2}}",
        parents={"first": f"{tiny} runtime.keep_steps=[2] protocol=quick"},
    )
    write_table(tmp_path, monkeypatch, table)
    assert main(["sweep", "toy", f"--results={tmp_path}"]) == 0
    said = capfd.readouterr().out
    assert "toy: 0 of 3 runs finished" in said
    runs = Store(tmp_path).runs()
    assert sorted(run.status() for run in runs) == ["finished"] * 3
    restarts = [json.loads((run.path / "identity.json").read_text())["restart"] for run in runs]
    (parent,) = [run.id for run, restart in zip(runs, restarts, strict=True) if restart is None]
    assert [r for r in restarts if r] == [{"run": parent, "checkpoint": "step-2"}] * 2
    assert main(["sweep", "toy", f"--results={tmp_path}"]) == 0
    said = capfd.readouterr().out
    assert "toy: 3 of 3 runs finished" in said
    assert "dpgen run" not in said


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "?"), (42.4, "42 s"), (420, "7 min"), (11160, "3.1 h"), (207360, "2.4 days")],
)
def test_times_in_words(seconds, words):
    assert format_seconds(seconds) == words

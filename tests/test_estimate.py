"""Estimates of a run's time: from finished runs of the same work, marked where they are not, no damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpgen_bench.runs.store import Store
from dpgen_bench.tables.estimate import Estimator, format_seconds
from dpgen_bench.tables.jobs import plan_sweep
from tests.table_toys import measured
from tests.test_sweeps import BOTH, a_table

DPGAN = "experiment=demo/dpgan privacy.epsilon=10"


def timed(results: Path, line: str, train: float, steps: int = 900, seed: int = 0, **more) -> str:
    """A finished run that took `train` seconds for its steps, and 7 s to be measured."""
    folder = Store(results).folder(measured(results, line, "quick", BOTH, seed))
    training = {"seconds": {"train": train}, "seconds_outside_loops": 0.0, "steps": {"train": steps}, "device": "cpu"}
    folder.write_json("training.json", {**training, **more})
    (report,) = folder.reports.all()
    report["repeats"][0]["metrics"]["mlp"]["seconds"] = 7.0
    folder.reports.write(report)
    return folder.id


def test_an_estimate_is_the_measured_time_per_step_times_the_steps(tmp_path):
    """900 steps took 90 s, a warm start 5 s and the rest 1 s: 450 steps take 45 + 6 s; measuring took 7 s."""
    timed(tmp_path, DPGAN, 90.0, seconds={"warm_start": 5.0, "train": 90.0}, seconds_outside_loops=1.0)
    table = a_table(f"{DPGAN} method.steps=450 seed=1", f"{DPGAN} method.d_d=64 seed=1", "experiment=demo/gs_wgan")
    half, wider, other = [Estimator(tmp_path)(job) for job in plan_sweep(table, tmp_path)]
    assert (half.train, half.measure, half.basis, half.about) == (51.0, 7.0, "cpu, the same settings", False)
    assert (wider.train, wider.basis, wider.about) == (96.0, "cpu, other d_d", True)
    assert (other.train, other.measure, other.basis) == (None, 7.0, "nothing comparable was run")


def test_kept_steps_are_measured_once_more_each(tmp_path):
    timed(tmp_path, DPGAN, 90.0)
    (job,) = plan_sweep(a_table(f"{DPGAN} seed=1", kept_steps=[100, 200]), tmp_path)
    assert Estimator(tmp_path)(job).measure == 3 * 7.0


def test_times_are_taken_from_runs_of_the_same_work_or_said_to_be_about(tmp_path):
    """Clipping and noise take most of a private step: there are none where epsilon is inf and sigma null."""
    free = "experiment=demo/dpgan privacy.epsilon=inf"
    timed(tmp_path, free, 9.0)
    lines = [f"{DPGAN} seed=1", f"{free} method.sigma=1.0 seed=1", f"{free} seed=1"]
    lines += [f"{free} dataset=mnist seed=1", f"{free} dataset=cifar10 seed=1"]
    jobs = plan_sweep(a_table(*lines), tmp_path)
    found = [Estimator(tmp_path)(job) for job in jobs]
    assert [(each.train, each.about) for each in found[:3]] == [(None, False), (None, False), (9.0, False)]
    assert (found[3].train, found[3].about, found[3].basis) == (9.0, True, "cpu, other data set")
    assert found[4].train is None  # images of another shape
    timed(tmp_path, DPGAN, 90.0)
    again = [Estimator(tmp_path)(job) for job in jobs[:3]]
    assert [(each.train, each.about) for each in again] == [(90.0, False), (90.0, False), (9.0, False)]


def test_a_number_of_steps_that_is_not_known_makes_a_time_about(tmp_path):
    timed(tmp_path, DPGAN, 90.0)
    (job,) = plan_sweep(a_table(f"{DPGAN} method.sigma=1.0 method.steps=null"), tmp_path)
    found = Estimator(tmp_path)(job)
    assert (found.train, found.about, found.basis) == (90.0, True, "cpu, the same settings; steps as there")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", None),
        ("config.yaml", "a: [}"),
        ("config.yaml", "[1, 2]"),
        ("identity.json", None),
        ("training.json", "{bad"),
        ("training.json", "[]"),
        ("training.json", '{"seconds": {"train": "long"}, "steps": {"train": 900}}'),
        ("training.json", '{"seconds": {"train": 5.0}, "steps": {"train": 0}}'),
        ("training.json", None),
        ("ledger.json", "{bad"),
        ("metrics", "{bad"),
        ("metrics", '"seconds": "long"'),
    ],
)
@pytest.mark.filterwarnings("ignore:the report .* cannot be read")
def test_a_damaged_run_spoils_no_estimate(tmp_path, name, text):
    timed(tmp_path, DPGAN, 90.0)
    bad = Store(tmp_path).folder(timed(tmp_path, DPGAN, 9.0, seed=2)).path
    (file,) = (bad / "metrics").glob("*.json") if name == "metrics" else [bad / name]
    if text is None:
        file.unlink()
    else:
        file.write_text(file.read_text().replace('"seconds": 7.0', text) if text.startswith('"') else text)
    (job,) = plan_sweep(a_table(f"{DPGAN} seed=1"), tmp_path)
    estimate = Estimator(tmp_path)
    found = estimate(job)
    if name == "metrics":  # what it took to train is known all the same
        assert (found.train, found.measure) == (49.5, 7.0)
    else:
        assert (found.train, found.measure) == (90.0, 7.0)
        assert set(estimate.unused) == ({bad.name} if (bad / "config.yaml").exists() else set())


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "?"), (42.4, "42 s"), (420, "7 min"), (11160, "3.1 h"), (207360, "2.4 days")],
)
def test_times_in_words(seconds, words):
    assert format_seconds(seconds) == words


def test_a_time_that_is_about_has_a_sign():
    assert (format_seconds(42.4, about=True), format_seconds(None, about=True)) == ("≈ 42 s", "?")

"""Tests of kept steps: their generators, their epsilons, and their measurements together with the run's."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.generator import Generator
from dpgen_bench.method import Context
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.runs.execute import evaluate_run, execute
from dpgen_bench.runs.kept import extract, trajectory
from dpgen_bench.store.folders import RunFolder, Store
from dpgen_bench.tables.jobs import state_of
from dpgen_bench.training.checkpoint import load_checkpoint

TINY = {
    "dpgan": "experiment=demo/dpgan method.batch_size=8 method.d_d=4 method.d_g=4 method.latent_dim=4 method.steps=6 "
    "method.sigma=1.0 privacy.accountant=rdp privacy.epsilon=10",
    "dp_sinkhorn": "experiment=demo/dp_sinkhorn method.steps=6 method.width=4 method.batch_size=8 privacy.epsilon=inf",
    "gs_wgan": "experiment=demo/gs_wgan method.steps=6 method.shards=2 method.warm_start=1 method.width=4 "
    "method.critic_width=2 method.batch_size=4 method.n_critic=1 privacy.epsilon=inf",
}


def executed(results: Path, name: str, *more: str) -> tuple[list[str], RunFolder]:
    """The overrides and the run of a tiny preset with kept steps 2 and 4. Most budgets are infinite, for speed."""
    overrides = [
        *TINY[name].split(),
        *("runtime.keep_steps=[2,4]", "runtime.progress=false", "runtime.workers=1"),
        *("runtime.account_s=0.01", "protocol.num_samples=100", "~protocol.metrics.mlp", f"results={results}", *more),
    ]
    return overrides, execute(compose_config(overrides))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, RunFolder]:
    results = tmp_path_factory.mktemp("kept")
    return {name: executed(results, name)[1] for name in TINY}


@pytest.mark.parametrize(("name", "network"), [("dpgan", "G"), ("dp_sinkhorn", "g"), ("gs_wgan", "ema")])
def test_the_released_network_gets_the_weights_of_the_kept_step(runs, name, network):
    """GS-WGAN releases the moving average, not the trained network, which has the same shapes."""
    folder = runs[name]
    checkpoint = load_checkpoint(folder.path / "checkpoints" / "step-2.pt")
    state = checkpoint.phases["train"].stateful[network]
    prefix = "module." if network == "ema" else ""
    extracted = Generator.load(extract(folder, 2).path)
    for key, parameter in extracted.net.named_parameters():
        assert torch.equal(parameter, state[prefix + key]), key
    released = Generator.load(folder.path)
    assert any(
        not torch.equal(a, b) for a, b in zip(extracted.net.parameters(), released.net.parameters(), strict=True)
    )
    assert extracted.config() == released.config()


def test_the_last_kept_step_is_the_released_generator(tmp_path):
    _, folder = executed(tmp_path, "gs_wgan", "runtime.keep_steps=[6]")
    labels = torch.arange(10)
    extracted, released = Generator.load(extract(folder, 6).path), Generator.load(folder.path)
    assert torch.equal(extracted.sample(labels, seed=3), released.sample(labels, seed=3))


def test_the_epsilon_of_a_step_is_that_of_its_releases(runs):
    folder = runs["dpgan"]
    ledger = Ledger.load(folder.path / "ledger.json")
    (event,) = ledger.events
    budget = ledger.budget
    spent = folder.at_step(int(extract(folder, 2).path.name)).read_json("step.json")["epsilon"]
    assert spent == epsilon([replace(event, times=2)], budget.delta, budget.relation, budget.accountant)
    assert 0 < spent < ledger.epsilon["proven"]


def test_kept_steps_are_measured_once(tmp_path, capsys):
    overrides, folder = executed(tmp_path, "dpgan", "runtime.measure_kept=true")
    spec = build_spec(compose_config(overrides))
    points = trajectory(folder, spec.protocol_record())
    assert [point.step for point in points] == [2, 4, 6]
    assert all("acc_logreg_pct" in point.measurement["repeats"][0]["metrics"]["logreg"]["values"] for point in points)
    assert points[0].epsilon < points[1].epsilon < points[2].epsilon <= 10
    assert not (folder.path / "cache").exists()  # the cache is next to the runs, because they share it
    capsys.readouterr()
    execute(compose_config(overrides))
    assert "is finished: skipped" in capsys.readouterr().out
    # A measurement that is missing is made again; the others are not.
    for path in folder.at_step(4).path.glob("metrics/*.json"):
        path.unlink()
    execute(compose_config(overrides))
    assert "step 2 is measured" in capsys.readouterr().out
    assert [point.step for point in trajectory(folder, spec.protocol_record())] == [2, 4, 6]


def test_a_finished_runs_kept_steps_are_measured_by_evaluate(tmp_path):
    overrides, folder = executed(tmp_path, "dpgan")
    record = build_spec(compose_config(overrides)).protocol_record()
    assert [point.step for point in trajectory(folder, record)] == [6]
    evaluation = ["protocol=quick", "protocol.num_samples=100", "~protocol.metrics.mlp"]
    evaluate_run(tmp_path, folder.id, [*evaluation, "runtime.measure_kept=true", "runtime.workers=1"])
    assert [point.step for point in trajectory(folder, record)] == [2, 4, 6]


def test_a_stopped_evaluation_of_kept_steps_measures_only_the_others(tmp_path):
    overrides, folder = executed(tmp_path, "dpgan", "runtime.measure_kept=true")
    record = build_spec(compose_config(overrides)).protocol_record()
    own, second, fourth = (each.measurements.file_of(record) for each in (folder, folder.at_step(2), folder.at_step(4)))
    fourth.unlink()
    before = [path.stat().st_mtime_ns for path in (own, second)]
    evaluate_run(tmp_path, folder.id, ["runtime.measure_kept=true", "runtime.workers=1"])
    assert fourth.exists()
    assert [path.stat().st_mtime_ns for path in (own, second)] == before
    evaluate_run(tmp_path, folder.id, ["runtime.workers=1"])
    assert own.stat().st_mtime_ns > before[0]
    assert second.stat().st_mtime_ns == before[1]


def test_without_privacy_the_epsilon_of_a_step_is_infinite(tmp_path):
    _, folder = executed(tmp_path, "dpgan", "privacy.epsilon=inf", "method.sigma=null")
    assert folder.at_step(int(extract(folder, 2).path.name)).read_json("step.json")["epsilon"] == "inf"
    assert trajectory(folder, {"name": "quick", "metrics": {}}) == []


def test_a_released_network_that_is_not_in_the_checkpoint_is_refused(tmp_path):
    _, folder = executed(tmp_path, "dpgan")
    other = Generator.load(folder.path)
    with torch.no_grad():
        next(other.net.parameters()).add_(1.0)
    other.save(folder.path)
    with pytest.raises(ValueError, match="must pass the network that it releases to ctx"):
        extract(folder, 2)


def test_a_step_without_a_checkpoint_is_refused(runs):
    with pytest.raises(ValueError, match=r"expected the checkpoint step-3 .* runtime.keep_steps"):
        extract(runs["dpgan"], 3)


def test_steps_that_a_finished_run_did_not_keep_are_named(tmp_path, capsys):
    """Steps after the last one count for no run: lines of one table differ in their numbers of steps."""
    overrides, folder = executed(tmp_path, "dpgan")
    capsys.readouterr()
    _, again = executed(tmp_path, "dpgan", "runtime.keep_steps=[2,3,5,9]")
    assert again == folder
    assert "is finished: skipped; step 3, 5 not kept; use another seed" in capsys.readouterr().out
    states = [
        state_of(build_spec(compose_config([*overrides, f"runtime.keep_steps={steps}"])), folder)
        for steps in ("[4]", "[2,3,5,9]")
    ]
    assert states == ["finished", "finished, step 3, 5 not kept"]


@pytest.mark.parametrize(("steps", "named"), [("[2,9,12]", "9, 12"), ("[2,6]", None)])
def test_a_run_names_the_steps_that_its_training_did_not_reach(tmp_path, capsys, steps, named):
    _, folder = executed(tmp_path, "gs_wgan", f"runtime.keep_steps={steps}")
    note = f"run {folder.id}: note: runtime.keep_steps names step {named}, but training has 6 steps; not kept.\n"
    error = capsys.readouterr().err
    assert note in error if named else "keep_steps" not in error


def test_only_steps_of_the_training_on_records_are_kept(tmp_path):
    """A pretraining counts its steps from 1, too, and may have more of them."""
    context = Context(0, folder=tmp_path, keep_steps=(1, 4))
    for phase, steps in (("init_train", 5), ("train", 2)):
        for _ in context.steps(steps, phase=phase, net=torch.nn.Linear(1, 1)):
            pass
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*.pt")) == ["last.pt", "step-1.pt"]
    assert load_checkpoint(tmp_path / "checkpoints" / "step-1.pt").current == "train"


def test_a_store_with_kept_steps_lists_only_runs(runs):
    extract(runs["dpgan"], 4)
    listed = Store(runs["dpgan"].path.parent.parent).runs()
    assert sorted(run.id for run in listed) == sorted(run.id for run in runs.values())
    assert not math.isnan(runs["dpgan"].at_step(4).read_json("step.json")["epsilon"])

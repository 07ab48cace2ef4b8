"""Kept steps: the generator as it was then, what had been spent by then, and its figures beside the run's."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpgen_bench.generator import Generator
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.runs.config import build_spec, compose_config
from dpgen_bench.runs.execute import evaluate_run, execute
from dpgen_bench.runs.kept import extract, kept, trajectory
from dpgen_bench.runs.store import RunFolder, Store
from dpgen_bench.training.checkpoint import load_checkpoint

TINY = {
    "dpgan": "experiment=demo/dpgan method.batch_size=8 method.d_d=4 method.d_g=4 method.latent_dim=4 method.steps=6 "
    "method.sigma=1.0 privacy.accountant=rdp privacy.epsilon=10",
    "dp_sinkhorn": "experiment=demo/dp_sinkhorn method.steps=6 method.width=4 method.batch_size=8 privacy.epsilon=inf",
    "gs_wgan": "experiment=demo/gs_wgan method.steps=6 method.shards=2 method.warm_start=1 method.width=4 "
    "method.critic_width=2 method.batch_size=4 method.n_critic=1 privacy.epsilon=inf",
}


def made(results: Path, name: str, *more: str) -> tuple[list[str], RunFolder]:
    """The run of a tiny preset with kept steps 2 and 4; where a budget is not needed it is infinite, for speed."""
    words = [
        *TINY[name].split(),
        *("runtime.keep_steps=[2,4]", "runtime.progress=false", "runtime.workers=1"),
        *("runtime.account_s=0.01", "protocol.num_samples=100", "~protocol.metrics.mlp", f"results={results}", *more),
    ]
    return words, execute(compose_config(words))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, RunFolder]:
    results = tmp_path_factory.mktemp("kept")
    return {name: made(results, name)[1] for name in TINY}


@pytest.mark.parametrize(("name", "network"), [("dpgan", "G"), ("dp_sinkhorn", "g"), ("gs_wgan", "ema")])
def test_the_network_that_is_released_is_found_and_read_as_it_was(runs, name, network):
    """For GS-WGAN that is the moving average, not the trained network, which has the same shapes."""
    folder = runs[name]
    then = load_checkpoint(folder.path / "checkpoints" / "step-2.pt")
    state = then.phases["train"].stateful[network]
    prefix = "module." if network == "ema" else ""
    taken = Generator.load(extract(folder, 2).path)
    for key, parameter in taken.net.named_parameters():
        assert torch.equal(parameter, state[prefix + key]), key
    released = Generator.load(folder.path)
    assert any(not torch.equal(a, b) for a, b in zip(taken.net.parameters(), released.net.parameters(), strict=True))
    assert taken.config() == released.config()


def test_the_last_step_kept_is_what_was_released(tmp_path):
    _, folder = made(tmp_path, "gs_wgan", "runtime.keep_steps=[6]")
    labels = torch.arange(10)
    taken, released = Generator.load(extract(folder, 6).path), Generator.load(folder.path)
    assert torch.equal(taken.sample(labels, seed=3), released.sample(labels, seed=3))


def test_what_was_spent_by_then_is_the_epsilon_of_the_releases_made(runs):
    folder = runs["dpgan"]
    ledger = Ledger.load(folder.path / "ledger.json")
    (event,) = ledger.events
    budget = ledger.budget
    spent = kept(folder, int(extract(folder, 2).path.name)).read_json("step.json")["epsilon"]
    assert spent == epsilon([replace(event, times=2)], budget.delta, budget.relation, budget.accountant)
    assert 0 < spent < ledger.epsilon["proven"]


def test_kept_steps_are_measured_and_skipped_when_they_are(tmp_path, capsys):
    words, folder = made(tmp_path, "dpgan", "runtime.measure_kept=true")
    spec = build_spec(compose_config(words))
    points = trajectory(folder, spec.protocol_record())
    assert [point.step for point in points] == [2, 4, 6]
    assert all("acc_logreg_pct" in point.measurement["repeats"][0]["metrics"]["logreg"]["values"] for point in points)
    assert points[0].epsilon < points[1].epsilon < points[2].epsilon <= 10
    assert not (folder.path / "cache").exists()  # what is computed for many runs lies beside the runs
    capsys.readouterr()
    execute(compose_config(words))
    assert "is finished: skipped" in capsys.readouterr().out
    # What is lost of a step is measured again, the rest not.
    for path in kept(folder, 4).path.glob("metrics/*.json"):
        path.unlink()
    execute(compose_config(words))
    said = capsys.readouterr().out
    assert "step 2 is measured" in said
    assert [point.step for point in trajectory(folder, spec.protocol_record())] == [2, 4, 6]


def test_a_finished_runs_kept_steps_are_measured_by_evaluate(tmp_path):
    words, folder = made(tmp_path, "dpgan")
    record = build_spec(compose_config(words)).protocol_record()
    assert [point.step for point in trajectory(folder, record)] == [6]
    how = ["protocol=quick", "protocol.num_samples=100", "~protocol.metrics.mlp"]
    evaluate_run(tmp_path, folder.id, [*how, "runtime.measure_kept=true", "runtime.workers=1"])
    assert [point.step for point in trajectory(folder, record)] == [2, 4, 6]


def test_without_privacy_the_epsilon_along_the_way_is_infinite(tmp_path):
    _, folder = made(tmp_path, "dpgan", "privacy.epsilon=inf", "method.sigma=null")
    assert kept(folder, int(extract(folder, 2).path.name)).read_json("step.json")["epsilon"] == "inf"
    assert trajectory(folder, {"name": "quick", "metrics": {}}) == []


def test_a_method_that_releases_another_network_than_it_names(tmp_path):
    _, folder = made(tmp_path, "dpgan")
    other = Generator.load(folder.path)
    with torch.no_grad():
        next(other.net.parameters()).add_(1.0)
    other.save(folder.path)
    with pytest.raises(ValueError, match="must hand to ctx"):
        extract(folder, 2)


def test_a_step_that_was_not_kept(runs):
    with pytest.raises(ValueError, match=r"expected the checkpoint step-3 .* runtime.keep_steps"):
        extract(runs["dpgan"], 3)


def test_a_store_with_kept_steps_lists_runs_alone(runs):
    extract(runs["dpgan"], 4)
    listed = Store(runs["dpgan"].path.parent.parent).runs()
    assert sorted(run.id for run in listed) == sorted(run.id for run in runs.values())
    assert not math.isnan(kept(runs["dpgan"], 4).read_json("step.json")["epsilon"])

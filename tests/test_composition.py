"""Configs are composed from cached choices of yamls, and are those that Hydra composes from all overrides."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from dpgen_bench.config import compose as composition
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.tables.expand import jobs_of, lines_of, parent_ids, spec_of_job
from dpgen_bench.tables.load import load_table
from dpgen_bench.tables.names import table_names
from dpgen_bench.utils.own_folders import using
from dpgen_bench.utils.paths import CONF

COMPOSED = (
    ["experiment=demo/dp_merf", "privacy.epsilon=1", "protocol=quick", "method.steps=7"],
    ["experiment=dp_sinkhorn/mnist", "privacy.epsilon=inf", "method.sigma=null", "method.m=3.0", "seed=4"],
    ["experiment=quick/dpgan", "privacy.epsilon=10", "restart={run:'0123456789ab',checkpoint:last}"],
    ["method=dpgan", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1", "seed=4"],
    ["method=dpgan", "+method.new=1"],  # an addition is composed whole
    ["method=dpgan", "~privacy.epsilon"],
)


def hydras_own(overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides)


@pytest.mark.parametrize("overrides", COMPOSED, ids=lambda overrides: overrides[-1])
def test_a_config_is_the_one_that_hydra_composes(overrides):
    expected = hydras_own(overrides)
    for _ in range(2):  # the first one fills the cache
        config = compose_config(overrides)
        assert OmegaConf.to_container(config) == OmegaConf.to_container(expected)
        assert (list(config), OmegaConf.is_struct(config)) == (list(expected), OmegaConf.is_struct(expected))
        config.seed = 99  # a copy
    assert compose_config(overrides).seed != 99


def test_the_benchs_own_yamls_are_composed_once():
    once, state = compose_config(["method=dp_merf", "seed=1"]), composition._state([CONF])
    assert len(state) == len(list(CONF.rglob("*.yaml")))
    before = composition._of_choices.cache_info().misses
    assert compose_config(["method=dp_merf", "seed=2"]) != once
    assert composition._of_choices.cache_info().misses == before


REFUSED = {
    "method.stepz=3": "expected a setting of the config, got 'method.stepz=3' .did you mean 'method.steps'",
    "method=nothing": "expected method=NAME of a yaml",
    "seed.more=1": "expected .* got 'seed.more=1'",
    "seed=1,2": "expected one value of seed",
    "+seed=1": "expected a new key after",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_hydra_refuses_is_refused_with_its_name(override, monkeypatch):
    monkeypatch.setattr(composition, "MOST_FILES", 0)  # composed whole
    with pytest.raises(ValueError, match=REFUSED[override]) as whole:
        compose_config(["method=dp_merf", override])
    monkeypatch.undo()
    compose_config(["method=dp_merf"])
    with pytest.raises(ValueError, match="expected") as error:
        compose_config(["method=dp_merf", override])
    assert str(error.value) == str(whole.value)


@pytest.mark.parametrize("most", [composition.MOST_FILES, 3])
def test_a_yaml_that_changes_is_read_again(tmp_path, monkeypatch, most):
    monkeypatch.setattr(composition, "MOST_FILES", most)
    yaml = tmp_path / "experiment" / "mine.yaml"
    yaml.parent.mkdir()
    (yaml.parent / ".#mine.yaml").symlink_to("somebody@somewhere.1")  # the lock of a file that is open in Emacs

    def write(seed: int) -> None:
        yaml.write_text(f"# @package _global_\nseed: {seed}\n")
        os.utime(yaml, ns=(seed, seed))  # some file systems have times of a second

    def seeds() -> tuple[int, int]:
        with using([Path(tmp_path)]):
            inside = compose_config(["experiment=mine", "method=dp_merf"]).seed
        return inside, compose_config([f"--config-dir={tmp_path}", "experiment=mine"]).seed

    write(5)
    assert seeds() == (5, 5)
    write(7)
    assert seeds() == (7, 7)
    yaml.unlink()
    with pytest.raises(ValueError, match="expected experiment=NAME"):
        seeds()


@pytest.mark.slow
def test_runs_of_all_tables_are_those_that_hydra_composes(tmp_path):
    for name in table_names():
        table = load_table(name)
        for scale in ("paper", "quick"):
            parents = parent_ids(table, tmp_path, scale)
            for job in (job for line in lines_of(table, scale) for job in jobs_of(line, parents)):
                spec = build_spec(hydras_own([*job, f"results={tmp_path}"]), planned=True)
                found = spec_of_job(job, tmp_path)
                assert (found.id, found.training) == (spec.id, spec.training)
                assert found.config == spec.config

"""Jobs of a multirun on one machine: no two of them hold the same GPU. Numbers of GPUs are made up."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from dpgen_bench.cli import verbs
from dpgen_bench.runs import devices
from dpgen_bench.runs.devices import jobs_at_once, own_device, visible_devices
from dpgen_bench.runs.multirun import VARIABLE, IgnoreSignalsBetweenJobs
from dpgen_bench.utils.paths import CONF


def held(tmp_path, setting="auto", number=2, chosen=None):
    return own_device(
        setting, folder=tmp_path, count=lambda: number, choose=(chosen if chosen is not None else []).append, wait=0.01
    )


def test_jobs_hold_different_devices_and_release_them(tmp_path):
    chosen = []
    with held(tmp_path, chosen=chosen) as first, held(tmp_path, "cuda", chosen=chosen) as second:
        assert (first, second) == (0, 1)
    with held(tmp_path, chosen=chosen) as again:
        assert again == 0
    assert chosen == [0, 1, 0]


def test_a_job_waits_while_all_devices_are_held(tmp_path, capsys):
    got = []

    def job():
        with held(tmp_path, number=1) as device:
            got.append(device)

    waiting = threading.Thread(target=job)
    with held(tmp_path, number=1):
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        assert not got
    waiting.join(60)
    assert got == [0]
    assert capsys.readouterr().out.count("waiting for a GPU") == 1


def test_many_jobs_never_meet_on_a_device(tmp_path):
    busy, met, used = set(), [], []

    def job():
        with held(tmp_path, number=3) as device:
            met.extend([device] if device in busy else [])
            busy.add(device)
            used.append(device)
            threading.Event().wait(0.01)
            busy.remove(device)

    jobs = [threading.Thread(target=job) for _ in range(12)]
    for each in jobs:
        each.start()
    for each in jobs:
        each.join(60)
    assert len(used) == 12
    assert not met


@pytest.mark.parametrize(("setting", "number"), [("cpu", 2), ("cuda:1", 2), ("auto", 0)])
def test_nothing_is_held_where_there_is_no_choice(tmp_path, setting, number):
    with held(tmp_path, setting, number) as device:
        assert device is None
    assert not list(tmp_path.iterdir())


def test_locks_are_named_by_the_devices_of_the_machine_not_by_those_that_a_process_sees(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert visible_devices(lambda: 2) == ["3", "1"]
    with held(tmp_path) as first:
        assert first == 0
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2")
        with held(tmp_path) as second:
            assert second == 1  # its number 0 is the held device
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_devices(lambda: 2) == ["0", "1"]


def test_joblib_starts_as_many_processes_as_there_are_devices(monkeypatch):
    assert jobs_at_once("auto", -1, lambda: 4) == 4
    assert jobs_at_once("auto", 8, lambda: 4) == 8
    assert jobs_at_once("auto", -1, lambda: 0) == -1
    assert jobs_at_once("cpu", -1, lambda: 4) == -1
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", ["hydra/launcher=joblib"], return_hydra_config=True)
    monkeypatch.setattr(devices.jobs_at_once, "__defaults__", (lambda: 4,))
    IgnoreSignalsBetweenJobs().on_multirun_start(config)
    assert config.hydra.launcher.n_jobs == 4


@pytest.mark.parametrize(("parent", "asks_for"), [("", "cpu"), ("1:/nowhere", "auto")])
def test_only_jobs_of_a_launcher_hold_a_device(monkeypatch, parent, asks_for):
    """A run of its own may share a device with others."""
    asked = []
    monkeypatch.setenv(VARIABLE, parent)
    monkeypatch.setattr(verbs, "job_of_multirun", lambda: nullcontext(True))
    monkeypatch.setattr(verbs, "own_device", lambda setting: asked.append(setting) or nullcontext())
    monkeypatch.setattr("dpgen_bench.runs.execute.execute", lambda *args: None)
    monkeypatch.setattr(verbs, "_overrides_of_job", list)
    monkeypatch.setattr(verbs, "_own_folders_of_job", list)
    verbs._run_task.__wrapped__(OmegaConf.create({"runtime": {"device": "auto"}}))
    assert asked == [asks_for]

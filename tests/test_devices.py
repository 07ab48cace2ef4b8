"""Jobs of a multirun on one machine: no two of them hold the same GPU. Numbers of GPUs are made up."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from dpgen_bench.cli import main, verbs
from dpgen_bench.runs import devices
from dpgen_bench.runs.devices import further_devices, jobs_at_once, names_of_devices, own_devices
from dpgen_bench.runs.multirun import IgnoreSignalsBetweenJobs
from dpgen_bench.utils.paths import CONF


def held(tmp_path, setting="auto", number=2, chosen=None, processes=1):
    return own_devices(
        setting,
        processes,
        folder=tmp_path,
        names=lambda: [f"GPU-{index}" for index in range(number)],
        choose=(chosen if chosen is not None else []).append,
        wait=0.01,
    )


def test_jobs_hold_different_devices_and_release_them(tmp_path):
    chosen = []
    with held(tmp_path, chosen=chosen) as first, held(tmp_path, "cuda", chosen=chosen) as second:
        assert (first, second) == ([0], [1])
    with held(tmp_path, chosen=chosen) as again:
        assert again == [0]
    assert chosen == [0, 1, 0]


def test_a_job_waits_while_all_devices_are_held(tmp_path, capsys):
    got = []

    def job():
        with held(tmp_path, number=1) as device:
            got.extend(device)

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
        with held(tmp_path, number=3) as (device,):
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
        assert device == []
    assert not list(tmp_path.iterdir())


def test_jobs_of_several_devices_take_them_at_once_and_wait_for_each_other(tmp_path):
    """With one GPU each, four jobs would hold all four and none could continue."""
    busy, met, used = set(), [], []

    def job(processes):
        with held(tmp_path, number=4, processes=processes) as mine:
            with further_devices(processes - 1, mine[0], folder=tmp_path) as others:
                assert [mine[0], *others] == mine
            met.extend(busy & set(mine))
            busy.update(mine)
            threading.Event().wait(0.01)
            busy.difference_update(mine)
            used.append(len(mine))

    jobs = [threading.Thread(target=job, args=(processes,)) for processes in (2, 1, 3, 2, 4, 1, 2, 2)]
    for each in jobs:
        each.start()
    for each in jobs:
        each.join(60)
    assert sorted(used) == [1, 1, 2, 2, 2, 2, 3, 4]
    assert not met


def test_a_job_of_several_devices_is_not_overtaken_by_jobs_of_one(tmp_path):
    order, is_waiting = [], threading.Event()

    def job(processes):
        is_waiting.set()
        with held(tmp_path, processes=processes):
            order.append(processes)

    pair, single = (threading.Thread(target=job, args=(processes,)) for processes in (2, 1))
    with held(tmp_path):
        pair.start()
        is_waiting.wait(60)
        threading.Event().wait(0.2)
        single.start()
        single.join(0.2)
        assert order == []  # the other GPU is free, and the pair waits for both
    for each in (pair, single):
        each.join(60)
    assert order == [2, 1]


def test_a_job_of_more_devices_than_there_are_takes_none(tmp_path):
    """Its run is refused, or finished already."""
    with held(tmp_path, processes=3) as mine:
        assert mine == []
    assert not list(tmp_path.iterdir())


DEVICES = {  # of a machine, by number
    "0": SimpleNamespace(uuid="aaaa-0", pci_domain_id=0, pci_bus_id=16, pci_device_id=0),
    "1": SimpleNamespace(uuid="bbbb-1", pci_domain_id=0, pci_bus_id=17, pci_device_id=0),
}


def test_a_lock_has_the_same_name_however_the_device_is_named(tmp_path, monkeypatch):
    def visible():
        chosen = devices.os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        return [DEVICES.get(name) or DEVICES[name[-1]] for name in chosen]

    monkeypatch.setattr("torch.cuda.device_count", lambda: len(visible()))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: visible()[index])

    def job():
        return own_devices("auto", folder=tmp_path, choose=lambda index: None, wait=0.01)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbbb-1")
    with job() as first:
        assert first == [0]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
        with job() as second:
            assert second == [1]  # its number 0 is the held device
    for device in DEVICES.values():
        monkeypatch.setattr(device, "uuid", "00000000-0000-0000-0000-000000000000")
    assert names_of_devices() == ["pci-0000-11-00", "pci-0000-10-00"]


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


JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=1"]  # joblib executes the jobs in this process


@pytest.mark.parametrize(
    ("arguments", "asks_for"),
    [
        ([], ("cpu", 1)),
        (["-m"], ("cpu", 1)),
        (["-m", *JOBLIB], ("auto", 1)),
        (["-m", *JOBLIB, "runtime.processes=2"], ("auto", 2)),
        (["runtime.processes=2"], ("auto", 2)),
        (["runtime.processes=null"], ("cpu", 1)),  # invalid, which is refused later
    ],
)
def test_jobs_of_a_launcher_and_runs_of_several_processes_hold_devices(monkeypatch, tmp_path, arguments, asks_for):
    """A run of its own may share a device with others."""
    asked = []
    monkeypatch.setattr(verbs, "own_devices", lambda *setting: asked.append(setting) or nullcontext())
    monkeypatch.setattr("dpgen_bench.runs.execute.execute", lambda *args: None)
    assert main(["run", "method=dp_merf", "dataset=digits", f"results={tmp_path}", *arguments]) == 0
    assert asked == [asks_for]

"""The cost of a run: bytes that an interruption does not change, parameters, peak memory, and columns of tables."""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from dpgen_bench.config.compose import compose_config
from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.runs.execute import execute
from dpgen_bench.training import cost
from dpgen_bench.training.checkpoint import load_checkpoint
from dpgen_bench.training.cost import PeakMemory, cost_values, trainable_parameters
from tests.toys import MeanImage, Painter, release_painter

MEASURABLE = cost._reset_host_peak()


class Killed(Exception):
    """Raised in place of the end of the process."""


def federated(ctx: Context, die_at: int | None = None) -> dict[str, int]:
    """Bytes counted before, in, between and after two loops; dies at the `die_at`-th count (from 0)."""
    counts = 0

    def count(**sent: int) -> None:
        nonlocal counts
        if counts == die_at:
            raise Killed
        counts += 1
        ctx.count_bytes(**sent)

    net = nn.Linear(2, 1)
    count(server_to_client=10**9)
    for t in ctx.steps(4, phase="warm", net=net):
        count(server_to_client=10 + t, client_to_server=1)
    count(client_to_server=10**6)
    for _ in ctx.steps(3, phase="train", net=net):
        count(client_to_server=1000)
        count(client_to_server=10_000)
    count(server_to_client=10**10)
    return ctx.bytes_sent


WHOLE = {"server_to_client": 10**10 + 10**9 + 46, "client_to_server": 4 + 10**6 + 33_000}


def test_bytes_are_added_up():
    assert federated(Context()) == WHOLE


@pytest.mark.parametrize("every", [0.0, 1e9])
@pytest.mark.parametrize("die_at", range(13))
def test_bytes_are_exact_after_a_kill_anywhere(tmp_path, die_at, every):
    """With a checkpoint after every step, and with one at the end of each loop only."""
    with pytest.raises(Killed):
        federated(Context(folder=tmp_path, due=lambda seconds: seconds >= every), die_at)
    assert federated(Context(folder=tmp_path, due=lambda seconds: seconds >= every)) == WHOLE


def test_bytes_are_exact_after_many_kills(tmp_path):
    for die_at in (2, 2, 2, 2, 2, 4, 4, 4, 1):  # a resumed attempt counts less before it gets as far
        with pytest.raises(Killed):
            federated(Context(folder=tmp_path, due=lambda seconds: True), die_at)
    assert federated(Context(folder=tmp_path, due=lambda seconds: True)) == WHOLE


@pytest.mark.parametrize("count", [-1, 1.0, True, "3"])
def test_wrong_numbers_of_bytes_are_refused(count):
    ctx = Context()
    with pytest.raises(ValueError, match="expected client_to_server as an integer number of bytes >= 0"):
        ctx.count_bytes(client_to_server=count)


def test_a_run_that_sends_nothing_counts_nothing():
    assert Context().bytes_sent == {}


def test_a_checkpoint_from_before_costs_were_counted_loads(tmp_path):
    with pytest.raises(Killed):
        federated(Context(folder=tmp_path, due=lambda seconds: True), die_at=3)
    path = tmp_path / "checkpoints" / "last.pt"
    content = torch.load(path, weights_only=True)
    del content["seconds_outside"], content["peak_memory"], content["cpu_seconds"]
    for state in content["phases"].values():
        del state["bytes_sent"]
    torch.save(content, path)
    loaded = load_checkpoint(path)
    assert loaded is not None
    assert (loaded.seconds_outside, loaded.peak_memory, loaded.cpu_seconds) == (0.0, None, None)
    ctx = Context(folder=tmp_path, memory=PeakMemory())
    assert list(ctx.steps(4, phase="warm", net=nn.Linear(2, 1))) == [2, 3]
    assert ctx.bytes_sent == {}
    assert ctx.cost(generator())["peak_memory_mib"]["host"] > 0
    assert ctx.cost(generator())["cpu_seconds"] is None  # part of it was not measured


def test_processor_time_is_that_of_all_attempts(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: clock[0])

    def attempt(start: float, die_at: int | None) -> float:
        clock[0] = start
        ctx = Context(folder=tmp_path, due=lambda seconds: True)
        for t in ctx.steps(4, net=nn.Linear(2, 1)):
            clock[0] += 10.0
            if t == die_at:
                raise Killed
        clock[0] += 1.0
        return ctx.cost(generator())["cpu_seconds"]

    with pytest.raises(Killed):
        attempt(100.0, die_at=2)  # after checkpoints at 10 and 20 seconds
    assert attempt(500.0, None) == 20.0 + 2 * 10.0 + 1.0
    assert cost_values({"cpu_seconds": 41.0}) == {"cpu_seconds": 41.0}
    assert cost_values({"cpu_seconds": None}) == {}


def generator() -> NetGenerator:
    return NetGenerator(Painter(3, [1, 2, 2]), {}, 4, 3, (1, 2, 2))


def test_parameters_are_the_trainable_ones():
    frozen, net = nn.Linear(5, 5), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    frozen.requires_grad_(False)
    assert trainable_parameters(net) == 3 * 4 + 4 + 2 * 4
    ctx = Context()
    for _ in ctx.steps(1, phase="a", D=net, frozen=frozen, schedule=object()):
        pass
    net.requires_grad_(False)
    for _ in ctx.steps(1, phase="b", D=net, G=nn.Linear(1, 1)):
        pass
    assert ctx.cost(generator())["parameters"] == {"D": 24, "frozen": 0, "G": 2, "released_generator": 12}


def test_time_is_in_the_loops_and_outside_of_them(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("dpgen_bench.training.loop.time.monotonic", lambda: now[0])

    def attempt(die_at: int | None) -> Context:
        ctx = Context(folder=tmp_path, due=lambda seconds: True)
        now[0] += 1  # before the loop
        for t in ctx.steps(3, net=nn.Linear(1, 1)):
            now[0] += 10
            if t == die_at:
                raise Killed
        now[0] += 5  # after it
        return ctx

    with pytest.raises(Killed):
        attempt(die_at=2)  # two steps are kept; the third dies with the process
    now[0] += 1000
    measured = attempt(None).cost(generator())
    assert measured["seconds"] == {"train": 30.0}
    assert measured["steps"] == {"train": 3}
    assert measured["seconds_outside_loops"] == 1 + 1 + 5


@pytest.mark.skipif(not MEASURABLE, reason="this system does not set a process's peak memory back")
def test_peak_memory_is_of_this_run_and_not_of_the_process():
    np.ones(30 * 2**20)  # 240 MiB, gone before the run begins
    life = cost._host_peak()
    memory = PeakMemory()
    began = memory.read()["host"]
    held = np.ones(10 * 2**20)
    del held
    measured = memory.read()
    assert measured["since"] == "run start"
    assert measured["accelerator"] is None
    assert measured["host"] - began == pytest.approx(80, abs=10)
    assert life is not None
    assert life - began > 200


@pytest.mark.parametrize("missing", ["CLEAR_REFS", "STATUS"])
def test_a_peak_of_the_whole_process_says_so(monkeypatch, tmp_path, missing):
    monkeypatch.setattr(cost, missing, tmp_path / "no" / "such" / "file")
    measured = PeakMemory().read()
    assert measured["since"] == "process start"
    unit = 2**20 if sys.platform == "darwin" else 2**10
    assert measured["host"] == pytest.approx(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)


@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_the_process_peak_has_the_systems_unit(monkeypatch, system):
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    monkeypatch.setattr(sys, "platform", system)
    assert cost._process_peak() == pytest.approx(kib / 2**20 if system == "darwin" else kib / 2**10, rel=0.05)


def test_the_larger_peak_counts_across_a_kill(monkeypatch):
    monkeypatch.setattr(cost, "_host_peak", lambda: 300.0)
    memory = PeakMemory()
    memory._host_was_reset = True
    assert memory.read({"host": 500.0, "accelerator": 7.0, "since": "run start"}) == {
        "host": 500.0,
        "accelerator": 7.0,
        "since": "run start",
    }
    measured = memory.read({"host": 200.0, "accelerator": None, "since": "process start"})
    assert measured == {"host": 300.0, "accelerator": None, "since": "process start"}


def test_the_peak_is_kept_in_the_checkpoint(tmp_path, monkeypatch):
    peak = [900.0]
    monkeypatch.setattr(cost, "_reset_host_peak", lambda: True)
    monkeypatch.setattr(cost, "_host_peak", lambda: peak[0])
    with pytest.raises(Killed):
        federated(Context(folder=tmp_path, due=lambda seconds: True, memory=PeakMemory()), die_at=3)
    peak[0] = 400.0
    ctx = Context(folder=tmp_path, due=lambda seconds: True, memory=PeakMemory())
    federated(ctx)
    assert ctx.cost(generator())["peak_memory_mib"] == {"host": 900.0, "accelerator": None, "since": "run start"}


def test_an_accelerators_peak_is_of_this_run(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(device))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**20)
    memory = PeakMemory("cuda:1")
    assert calls == ["init", torch.device("cuda:1")]
    assert memory.read()["accelerator"] == 3.0
    assert memory.read({"host": 1.0, "accelerator": 5.0, "since": "run start"})["accelerator"] == 5.0
    assert memory.read({"host": 1.0, "accelerator": None, "since": "run start"})["accelerator"] == 3.0


@pytest.mark.gpu
def test_an_accelerators_peak_is_what_its_tensors_took():
    torch.ones(64 * 2**20, device="cuda")  # 256 MiB, gone before the run begins
    memory = PeakMemory("cuda")
    before = memory.read()["accelerator"]
    torch.ones(16 * 2**20, device="cuda")
    assert memory.read()["accelerator"] - before == pytest.approx(64, abs=2)


@dataclass
class Federated(MeanImage):
    """The toy, which sends a byte up and two down before each release."""

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        net = Painter(data.num_classes, list(data.image_shape))
        for _ in ctx.steps(self.steps, phase="talk", net=net):
            ctx.count_bytes(server_to_client=2, client_to_server=1)
        return release_painter(net, data)


def test_a_run_writes_its_cost(tmp_path):
    config = compose_config([f"results={tmp_path}", "runtime.progress=false", "privacy.epsilon=inf"])
    OmegaConf.set_struct(config, False)
    config.method = {"name": "federated", "_target_": "tests.test_cost.Federated", "steps": 3}
    metrics = {"brightness": {"_target_": "tests.toys.Brightness"}}
    config.protocol = {"name": "toy", "num_samples": 10, "labels": "balanced", "metrics": metrics}
    folder = execute(config)
    training = json.loads((folder.path / "training.json").read_text())
    assert training["steps"] == {"talk": 3}
    assert training["bytes"] == {"server_to_client": 6, "client_to_server": 3}
    assert training["parameters"] == {"net": 7840, "released_generator": 7840}
    memory = training["peak_memory_mib"]
    assert memory["since"] == ("run start" if MEASURABLE else "process start")
    assert 50 < memory["host"] < 1.05 * cost._process_peak()  # the kernel counts pages in batches
    values = cost_values(training)
    assert values["seconds_total"] == pytest.approx(training["seconds"]["talk"] + training["seconds_outside_loops"])
    expected = {
        "seconds_total", "seconds_talk", "seconds_outside_loops", "steps_talk", "parameters_net", "cpu_seconds",
        "parameters_released_generator", "bytes_server_to_client", "bytes_client_to_server",
        "peak_memory_mib" if MEASURABLE else "peak_memory_since_process_start_mib",
    }  # fmt: skip
    assert values.keys() == expected


def test_columns():
    training = {
        "seconds": {"warm": 1.5, "train": 20},
        "seconds_outside_loops": 0.5,
        "steps": {"warm": 10, "train": 300},
        "device": "cuda",
        "parameters": {"G": 7, "released_generator": 7},
        "peak_memory_mib": {"host": 1000.5, "accelerator": 300.0, "since": "run start"},
        "bytes": {"client_to_server": 12},
    }
    values = cost_values(training)
    assert values == {
        "seconds_total": 22.0,
        "seconds_warm": 1.5,
        "seconds_train": 20.0,
        "seconds_outside_loops": 0.5,
        "steps_warm": 10.0,
        "steps_train": 300.0,
        "peak_memory_mib": 1000.5,
        "peak_memory_accelerator_mib": 300.0,
        "parameters_G": 7.0,
        "parameters_released_generator": 7.0,
        "bytes_client_to_server": 12.0,
    }
    assert all(type(value) is float for value in values.values())


def test_a_peak_of_the_whole_process_has_another_column():
    values = cost_values({"peak_memory_mib": {"host": 9.0, "accelerator": None, "since": "process start"}})
    assert values == {"peak_memory_since_process_start_mib": 9.0}


def test_older_files_have_fewer_columns():
    assert cost_values({}) == {}
    old = {"seconds": {"train": 3.0}, "steps": {"train": 2}, "device": "cpu"}
    assert cost_values(old) == {"seconds_total": 3.0, "seconds_train": 3.0, "steps_train": 2.0}
    assert cost_values({**old, "peak_memory_mib": None}) == cost_values(old)

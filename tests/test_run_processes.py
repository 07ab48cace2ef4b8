"""`runtime.processes`: several processes train one run, with the result of one process."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from loky import cpu_count
from omegaconf import OmegaConf
from safetensors.torch import load_file

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.data.private import PrivateData
from dpgen_bench.privacy.bounds import PerRecord, PerRow, Whole
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.processes import NotDivisible, Processes
from dpgen_bench.privacy.sampling import EveryShard, Full, OneShard, Poisson
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.shards import PerShard
from dpgen_bench.runs import processes as division
from dpgen_bench.runs.devices import further_devices, jobs_at_once
from dpgen_bench.runs.execute import RunFailed, execute
from dpgen_bench.store.folders import Store
from dpgen_bench.training.signals import Preempted
from tests import toys
from tests.run_toys import QUICK, config, contents

TWO = "runtime.processes=2"


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    """So that the tests pass on a machine with one core, too."""
    monkeypatch.setattr(division, "usable_cores", lambda: max(2, cpu_count()))


def dpgan(results: Path, *overrides: str):
    """A small DPGAN on the digits of scikit-learn, with a toy protocol."""
    sizes = ["steps=8", "n_d=2", "batch_size=8", "d_d=8", "d_g=8", "latent_dim=8", "sigma=1.0"]
    small = ["privacy.epsilon=null", *(f"method.{setting}" for setting in sizes)]
    composed = compose_config(["method=dpgan", f"results={results}", *QUICK, *small, "scale=paper", *overrides])
    OmegaConf.set_struct(composed, False)
    composed.protocol = config(results).protocol
    return composed


def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder.path / "log.jsonl").read_text().splitlines()]


def test_two_processes_train_the_generator_of_one(tmp_path):
    one = execute(dpgan(tmp_path / "one", "runtime.padded=true"))
    two = execute(dpgan(tmp_path / "two", TWO))
    assert two.id == one.id
    assert two.done
    assert (two.path / "ledger.json").read_text() == (one.path / "ledger.json").read_text()
    assert [row["step"] for row in rows(two)] == [row["step"] for row in rows(one)]
    single, together = (load_file(folder.path / "generator.safetensors") for folder in (one, two))
    for name, value in single.items():
        # Adam divides by gradients that are nearly zero, so some weights differ by more than rounding.
        assert torch.allclose(together[name], value, rtol=1e-3, atol=1e-4), name
    assert not (two.path / "private").exists() or not list((two.path / "private").iterdir())


def test_a_private_function_that_raises_in_another_process_marks_the_ledger(tmp_path):
    with pytest.raises(RunFailed) as failed:
        execute(config(tmp_path, TWO, target="tests.division_toys.RaisesInProcessOne"))
    assert "Whether a private function raises may depend on the records" in str(failed.value)
    assert "text with a record" not in str(failed.value)
    (folder,) = Store(tmp_path).runs()
    (failure,) = Ledger.load(folder.path / "ledger.json").failures
    assert failure.statement is None
    errors = folder.path / "private" / "errors.txt"
    assert "process 1:" in errors.read_text()
    assert "text with a record" in errors.read_text()
    assert errors.stat().st_mode & 0o077 == 0
    public = [path for path in folder.path.rglob("*") if path.is_file() and "private" not in path.parts]
    assert not [path for path in public if b"text with a record" in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["seeded", "os"])
def test_a_run_of_two_processes_that_is_stopped_goes_on_to_the_same_result(tmp_path, monkeypatch, noise):
    monkeypatch.setenv("STOPPED", str(tmp_path / "stopped"))
    make = functools.partial(config, target="tests.division_toys.StopsOnce")
    with pytest.raises(Preempted):
        execute(make(tmp_path / "stopped_once", TWO, f"privacy.noise={noise}", "runtime.checkpoint_s=1000"))
    (folder,) = Store(tmp_path / "stopped_once").runs()
    assert folder.status() == "preempted"
    log = (folder.path / "log.jsonl").read_bytes()
    again = execute(make(tmp_path / "stopped_once", TWO, f"privacy.noise={noise}"))
    assert (again.path / "log.jsonl").read_bytes().startswith(log)
    assert len(rows(again)) == 6
    if noise == "seeded":
        assert contents(again) == contents(execute(make(tmp_path / "whole", TWO)))


@pytest.mark.parametrize("noise", ["seeded", pytest.param("os", marks=pytest.mark.slow)])
def test_only_with_seeded_noise_a_run_continues_with_another_number_of_processes(tmp_path, monkeypatch, noise):
    monkeypatch.setenv("STOPPED", str(tmp_path / "stopped"))
    make = functools.partial(
        config, tmp_path / "runs", f"privacy.noise={noise}", target="tests.division_toys.StopsOnce"
    )
    with pytest.raises(Preempted):
        execute(make(TWO, "runtime.checkpoint_s=1000"))
    (folder,) = Store(tmp_path / "runs").runs()
    if noise == "os":
        before = (folder.path / "ledger.json").read_bytes()
        with pytest.raises(
            ValueError, match=r"expected runtime.processes=2, with which run .* got runtime.processes=1:"
        ):
            execute(make())
        assert (folder.path / "ledger.json").read_bytes() == before
        assert folder.status() == "preempted"
    else:
        assert execute(make()).done


REFUSED = [
    ("privacy.diagnostics=unsafe", "expected privacy.diagnostics=off with runtime.processes=2, got unsafe"),
    ("runtime.padded=false", "expected padded draws with runtime.processes=2, got runtime.padded=false"),
]


@pytest.mark.parametrize(("override", "message"), REFUSED)
def test_settings_that_exclude_several_processes_are_refused_before_anything_is_written(tmp_path, override, message):
    with pytest.raises(ValueError, match=message):
        execute(config(tmp_path, TWO, override))
    assert not (tmp_path / "runs").exists()


def test_a_gpu_for_each_process_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(division, "number_of_devices", lambda: 1)
    spec = build_spec(config(tmp_path, TWO))
    for device in ("cuda", "cuda:0"):
        with pytest.raises(
            ValueError, match=r"expected a GPU for each of runtime.processes=2, got runtime.device=auto"
        ):
            division.expect_possible_division(spec, torch.device(device))
    monkeypatch.setattr(division, "number_of_devices", lambda: 2)
    division.expect_possible_division(spec, torch.device("cuda"))
    with pytest.raises(ValueError, match="expected a GPU for each"):
        division.expect_possible_division(spec, torch.device("cuda:0"))


@pytest.mark.parametrize("number", [1000, 10**20])
def test_more_processes_than_cores_are_refused_without_a_folder(tmp_path, monkeypatch, number):
    monkeypatch.setattr(division, "usable_cores", lambda: 4)
    message = f"expected at most as many runtime.processes as cores on a CPU, got {number} on a machine with 4; use"
    with pytest.raises(ValueError, match=message):
        execute(config(tmp_path, f"runtime.processes={number}"))
    assert not (tmp_path / "runs").exists()
    division.expect_possible_division(build_spec(config(tmp_path, "runtime.processes=4")), torch.device("cpu"))


def killed(*numbers: int):
    """Helpers that ended with these statuses."""
    return [
        types.SimpleNamespace(exitcode=number, pid=70 + place, is_alive=lambda: False)
        for place, number in enumerate(numbers)
    ]


def test_a_process_that_is_killed_between_releases_is_named(tmp_path, monkeypatch):
    agree, ready, started, calls = Processes.expect_same_release, division._expect_ready, [], []

    def kill(*args):
        calls.append(args)
        if len(calls) == 3:
            os.kill(started[0].pid, signal.SIGKILL)
        return agree(*args)

    monkeypatch.setattr(
        division, "_expect_ready", lambda helpers, *more: started.extend(helpers) or ready(helpers, *more)
    )
    monkeypatch.setattr(Processes, "expect_same_release", kill)
    message = r"process 1 of runtime.processes=2 \(id \d+\) was killed by SIGKILL between two releases.* out of memory"
    with pytest.raises(RunFailed, match=message):
        execute(config(tmp_path, TWO))
    (folder,) = Store(tmp_path).runs()
    assert folder.status() == "failed"
    assert not Ledger.load(folder.path / "ledger.json").failures


def test_of_several_processes_that_ended_the_killed_one_is_named():
    folder = types.SimpleNamespace(path=Path("run"))
    assert "process 2 of runtime.processes=4 (id 71) was killed by SIGKILL" in division._who_ended(
        killed(1, -9, 1), folder, ""
    )
    assert "process 1 of runtime.processes=2 (id 70) ended with status 1" in division._who_ended(killed(1), folder, "")


def test_an_error_of_the_method_is_not_replaced():
    with pytest.raises(RuntimeError, match="of the method"), division._naming_who_ended(killed(1), None):
        raise RuntimeError("of the method")


def test_a_method_without_releases_is_refused(tmp_path):
    spec = build_spec(config(tmp_path, TWO))
    services = Services(Ledger(Budget(math.inf), 10), Key.seeded("m"), processes=PAIR)
    with pytest.raises(ValueError, match=r"expected a method that makes releases with runtime.processes=2, got toy"):
        division.expect_divided(spec, services)


class OnAllRecords(toys.MeanImage):
    """Its sampling cannot be divided."""

    def mechanism(self, data, ctx):
        bound = PerRecord(C=self.C, shape=data.image_shape)
        return data.mechanism("sum", sample=Full(), bound=bound, times=self.steps)


class WithoutReleases(toys.MeanImage):
    def fit(self, data, ctx):
        net = toys.Painter(data.num_classes, list(data.image_shape)).to(ctx.device)
        return toys.release_painter(net, data)


@pytest.mark.parametrize(
    ("target", "message"),
    [("OnAllRecords", "expected a sum over records .* with 2 processes"), ("WithoutReleases", "which makes none")],
)
def test_a_method_that_cannot_be_divided_is_refused_and_leaves_no_folder(tmp_path, target, message):
    with pytest.raises(NotDivisible, match=f"(?s){message}.*leave out runtime.processes"):
        execute(config(tmp_path, TWO, target=f"{__name__}.{target}"))
    assert not list((tmp_path / "runs").iterdir())
    assert execute(config(tmp_path, target=f"{__name__}.{target}")).done


@pytest.mark.slow
def test_a_run_that_cannot_be_divided_keeps_what_it_had(tmp_path, monkeypatch):
    make = functools.partial(config, tmp_path, target=f"{__name__}.OnAllRecords")
    with monkeypatch.context() as patch:
        patch.setattr(toys.MeanImage, "prepare", stop)
        with pytest.raises(RunFailed):
            execute(make())
    (folder,) = Store(tmp_path).runs()
    before = {name: (folder.path / name).read_bytes() for name in ("status.json", "ledger.json")}
    with pytest.raises(NotDivisible):
        execute(make(TWO))
    assert {name: (folder.path / name).read_bytes() for name in before} == before


class AsksLate(toys.MeanImage):
    """Asks for a mechanism that cannot be divided after its releases."""

    def after(self, data, ctx, net):
        data.mechanism("late", sample=Full(), bound=PerRecord(C=1.0, shape=data.image_shape), times=1, std=1.0)


@pytest.mark.slow
def test_a_run_that_made_releases_is_never_deleted(tmp_path):
    with pytest.raises(NotDivisible):
        execute(config(tmp_path, TWO, target=f"{__name__}.AsksLate"))
    (folder,) = Store(tmp_path).runs()
    assert folder.status() == "failed"
    assert Ledger.load(folder.path / "ledger.json").entries["sum"].executed > 0


def stop(*_):
    raise RuntimeError("stopped by the test")


PAIR = types.SimpleNamespace(size=2, part=(0, 2), number=0, expect_same_records=str)
SUM = PerRecord(C=1.0, shape=(1, 28, 28))


@pytest.mark.parametrize(
    ("sample", "bound"),
    [
        (Full(), SUM),
        (Poisson(0.5), PerRow(C=1.0, shape=(2, 1))),
        (Poisson(0.5), Whole(C=1.0, shape=(2,))),
        (OneShard(2), PerRow(C=1.0, shape=(2, 1))),
        (EveryShard(2), PerShard(C=1.0, shape=(2,))),
    ],
)
def test_what_cannot_be_divided_is_refused_before_it_is_approved(sample, bound):
    ledger = Ledger(Budget(math.inf), 12)
    data = PrivateData(*toys.records(), 10, Services(ledger, Key.seeded("m"), processes=PAIR))
    with pytest.raises(
        ValueError, match=r"expected a sum over records .* with 2 processes.*leave out runtime.processes"
    ):
        data.mechanism("m", sample=sample, bound=bound, times=1, std=1.0)
    assert not ledger.entries
    data.mechanism("m", sample=Poisson(0.5), bound=SUM, times=1, std=1.0)


def test_rounds_of_clients_are_not_divided():
    services = Services(Ledger(Budget(math.inf), 12), Key.seeded("m"), processes=PAIR)
    data = PrivateData(*toys.records(), 10, services, clients=np.arange(12) % 3, num_clients=3)
    with pytest.raises(ValueError, match="expected one process for data whose unit is the client, got 2"):
        data.grouped("client")


def test_further_devices_are_free_and_held(tmp_path):
    take = functools.partial(further_devices, folder=tmp_path, names=lambda: list("abcd"))
    with take(2, 0) as first:
        assert first == [1, 2]
        with take(1, 0) as second:
            assert second == [3]
        message = "expected 3 GPUs for runtime.processes=3, one for each process, got the run's own and fewer than 2"
        with pytest.raises(ValueError, match=message), take(2, 0):
            pass
    with take(3, 2) as released:
        assert released == [0, 1, 3]


def test_joblib_leaves_each_job_the_devices_of_its_processes():
    assert jobs_at_once("auto", -1, lambda: 8, processes=2) == 4
    assert jobs_at_once("auto", -1, lambda: 2, processes=4) == 1
    assert jobs_at_once("auto", 3, lambda: 8, processes=2) == 3
    assert jobs_at_once("cpu", -1, lambda: 8, processes=2) == -1

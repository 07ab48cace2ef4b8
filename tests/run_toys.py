"""Helpers for tests of runs: configs and small runs of a toy method, and child processes that are killed."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

from omegaconf import OmegaConf

from dpgen_bench.config.compose import compose_config
from dpgen_bench.runs.execute import execute
from dpgen_bench.store.folders import RunFolder
from dpgen_bench.utils import files

TOY = "tests.toys.MeanImage"
RECORDABLE = ["method.name=dp_mean", "privacy.epsilon=10"]

# The table of epsilons would take most of the time of such small runs; nearly all cells exceed this limit.
QUICK = ["runtime.progress=false", "runtime.checkpoint_s=0", "runtime.account_s=0.01"]


def config(results: Path, *overrides: str, target: str = TOY, small: bool = True):
    base = compose_config([f"results={results}", *QUICK])
    protocol = {
        "name": "toy",
        "num_samples": 40,
        "labels": "balanced",
        "metrics": {"brightness": {"_target_": "tests.toys.Brightness"}},
    }
    OmegaConf.set_struct(base, False)
    base.protocol = protocol
    if small:
        base.dataset = {"name": "digits", "_target_": "tests.toys.SmallDigits", "root": "unused"}
    if target is not None:
        base.method = {"name": "toy", "_target_": target}
    for override in overrides:
        key, value = override.split("=", 1)
        OmegaConf.update(base, key, OmegaConf.create(f"v: {value}").v)
    return base


def recordable_run(results: Path) -> RunFolder:
    """A finished run of the toy that a record may name, made by the overrides `RECORDABLE`."""
    return execute(config(results, "method.name=dp_mean"), RECORDABLE)


def undisturbed_run(results: Path) -> RunFolder:
    """A toy run that is not killed, with its whole table of epsilons; other tests copy its cache."""
    return execute(config(results, "runtime.account_s=60"))


def in_child(function) -> int:
    """Run `function` in a forked process; returns its exit code (negative: the signal that ended it).

    Fails in a process that has loaded Ray, whose gRPC threads go on after `ray.shutdown`: a lock that one of them holds
    at the fork is never released in the child, which then hangs now and then.
    """
    assert sys.modules.get("ray") is None, "expected a process without Ray; use Ray in a child, or in another session"

    def child() -> None:
        faulthandler.dump_traceback_later(290, file=sys.__stderr__)  # says where a child hangs
        function()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(timeout=300)
    hangs = process.exitcode is None
    process.kill()
    process.join()
    assert not hangs, "expected the child to end within 300 s; standard error shows where it was"
    return process.exitcode


def kill_at_rename(number: int, action, to: str | None = None) -> None:
    """Run `action`; the process kills itself with SIGKILL instead of making its `number`-th rename (from 1).

    Args:
        to: count renames to files of that name alone.
    """
    renames = [0]
    rename = os.replace

    def replace(source, target):
        renames[0] += to is None or os.path.basename(target) == to
        if renames[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    files.os.replace = replace
    action()


def contents(folder) -> dict[str, bytes]:
    """The contents of the files that must not depend on whether a run was killed."""
    names = ["ledger.json", "generator.safetensors", "generator.json", "log.jsonl", "samples.png", "identity.json"]
    return {name: (folder.path / name).read_bytes() for name in names}


def prepare(results: Path, undisturbed) -> None:
    """Copy the cache of an undisturbed run, so that its table of epsilons is not computed again."""
    shutil.copytree(undisturbed.path.parent.parent / "cache", results / "cache", dirs_exist_ok=True)

"""Tests of metrics in separate processes: bounded in number, isolated, and ended with their caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import EvalContext, evaluate
from dpgen_bench.evaluate.parallel import evaluate_apart, needs_one_core
from tests.toy_metrics import Dies, Fails, Keeps, Mean, Noise, Process, Sleeps

GREY = Records(torch.full((4, 1, 4, 4), 51, dtype=torch.uint8), torch.arange(4) % 2)


@pytest.fixture
def ctx(tmp_path) -> EvalContext:
    return EvalContext(seed=3, device="cpu", num_classes=2, cache=tmp_path)


def run(metrics, ctx, workers=2):
    return dict(evaluate_apart(metrics, GREY, GREY, ctx, workers))


def test_which_metrics_run_on_one_core(ctx):
    assert needs_one_core(Mean(apart=True), "cpu")
    assert not needs_one_core(Mean(), "cpu")
    assert not needs_one_core(lambda *_: {}, "cpu")


def test_results_equal_those_in_this_process(ctx):
    metrics = {"mean": Mean(), "noise": Noise(), "fails": Fails()}
    results = run(metrics, ctx)
    for key, metric in metrics.items():
        here = evaluate(metric, GREY, GREY, ctx)
        assert (results[key].status, results[key].values, results[key].reason) == (
            here.status,
            here.values,
            here.reason,
        )
    assert results["fails"].reason == "ZeroDivisionError: one over nothing"


def test_each_has_one_thread_and_no_accelerator_and_processes_are_bounded(ctx):
    metrics = {str(i): Process(name=f"m{i}") for i in range(5)}
    results = run(metrics, EvalContext(3, "cuda", 2, ctx.cache), workers=2)
    assert {results[key].values[f"m{key}_threads"] for key in metrics} == {1.0}
    pids = {results[key].values[f"m{key}_pid"] for key in metrics}
    assert 1 <= len(pids) <= 2
    assert os.getpid() not in pids
    assert all(result.notes == ["device cpu"] for result in results.values())


def test_a_process_that_dies_fails_its_own_metric_only(ctx):
    metrics = {"first": Mean("first"), "dies": Dies(), "last": Mean("last")}
    results = run(metrics, ctx)
    assert results["dies"].status == "failed"
    assert "its process died" in results["dies"].reason
    assert {results["first"].status, results["last"].status} == {"measured"}
    assert run({"after": Mean()}, ctx)["after"].status == "measured"


def test_a_metric_whose_process_died_next_to_others_is_run_again(ctx, tmp_path):
    results = run({"dies": Dies(once=str(tmp_path / "died")), "mean": Mean()}, ctx)
    assert {result.status for result in results.values()} == {"measured"}


def test_metrics_that_keep_data_sets_in_memory_are_not_called_a_leak(ctx, recwarn):
    metrics = {"first": Mean("first"), "keeps": Keeps("keeps"), "next": Mean("next"), "last": Mean("last")}
    results = run(metrics, ctx, workers=1)
    assert {result.status for result in results.values()} == {"measured"}
    assert not [str(each.message) for each in recwarn if "memory leak" in str(each.message)]


def test_a_metric_that_cannot_be_pickled_fails_with_the_reason(ctx):
    class Unsendable(Mean):
        def __reduce__(self):
            raise TypeError("cannot be pickled")

    results = run({"unsendable": Unsendable(), "mean": Mean()}, ctx)
    assert results["unsendable"].status == "failed"
    assert "pickle" in results["unsendable"].reason
    assert results["mean"].status == "measured"


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie process does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.1)


def test_processes_end_when_the_caller_stops(ctx, tmp_path):
    tally = tmp_path / "pid"
    results = evaluate_apart({"mean": Mean(), "sleeps": Sleeps(tally=str(tally))}, GREY, GREY, ctx, 2)
    assert next(results)[0] == "mean"
    wait_for(lambda: tally.exists() and tally.read_text(), "the sleeper")
    pid = int(tally.read_text())
    assert alive(pid)
    results.close()
    wait_for(lambda: not alive(pid), "the sleeper's end")


def test_processes_end_when_the_caller_is_killed(tmp_path):
    tally = tmp_path / "pid"
    code = f"""
from dpgen_bench.evaluate.metric import EvalContext
from tests.test_parallel import GREY, run
from tests.toy_metrics import Sleeps
run({{"sleeps": Sleeps(tally={str(tally)!r})}}, EvalContext(0, "cpu", 2, None))
"""
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1])
    wait_for(lambda: tally.exists() and tally.read_text(), "the sleeper")
    pid = int(tally.read_text())
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    wait_for(lambda: not alive(pid), "the sleeper's end")

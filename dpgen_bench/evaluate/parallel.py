"""Metrics that need one core each, in a bounded pool of processes, one result at a time as they end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, as_completed
from dataclasses import replace
from typing import Any

import loky
from loky.process_executor import TerminatedWorkerError

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import EvalContext, Metric, MetricResult, evaluate
from dpgen_bench.training.progress import ProgressBar

# Sums depend on the number of threads: with one, a figure is the same on every machine whatever the size of the pool.
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


def needs_one_core(metric: Metric, device: Any) -> bool:
    """Whether the metric says (by `one_core(device)`) that it runs on one core, and so beside others like it."""
    asked = getattr(metric, "one_core", None)
    return bool(asked and asked(device))


def evaluate_apart(
    metrics: Mapping[str, Metric], samples: Records, real_test: Records, ctx: EvalContext, workers: int | None = None
) -> Iterator[tuple[str, MetricResult]]:
    """`evaluate` for each metric in a process of its own; results come as they end.

    A process that dies (out of memory, say) takes the others of the pool with it: those that had not ended are then
    run again one at a time, and one that dies alone is a failed metric. If the caller stops, or raises, so do the
    processes; they also leave when this process is killed.

    Args:
        workers: processes at most; None is one for each core this process may use.
    """
    workers = workers or loky.cpu_count()
    ctx = replace(ctx, device="cpu")
    left = dict(metrics)
    bar = ProgressBar("measuring", lambda: f"not yet: {', '.join(left)}" if left else "")
    bar.start("metrics", len(metrics))
    try:
        for key, result in _together(left, samples, real_test, ctx, workers):
            del left[key]
            bar.step(len(metrics) - len(left))
            yield key, result
        for key in list(left):
            alone = dict(_together({key: left[key]}, samples, real_test, ctx, 1))
            died = MetricResult("failed", reason="its process died; is there enough memory for it?")
            del left[key]
            bar.step(len(metrics) - len(left))
            yield key, alone.get(key, died)
    finally:
        bar.finish()


def _together(
    metrics: Mapping[str, Metric], samples: Records, real_test: Records, ctx: EvalContext, workers: int
) -> Iterator[tuple[str, MetricResult]]:
    """All metrics in one pool; ends early, without an error, if a process of it died."""
    pool = loky.get_reusable_executor(
        max_workers=workers, timeout=60, env=ONE_THREAD, initializer=_leave_with, initargs=(os.getpid(),)
    )
    ended = False
    try:
        futures: dict[Future[MetricResult], str] = {
            pool.submit(_job, metric, samples, real_test, ctx): key for key, metric in metrics.items()
        }
        for future in as_completed(futures):
            try:
                result = future.result()
            except TerminatedWorkerError:
                return
            except Exception as error:  # what cannot be sent to another process, or back
                result = MetricResult("failed", reason=f"{type(error).__name__}: {error}")
            yield futures[future], result
        ended = True
    finally:
        if not ended:
            pool.shutdown(wait=True, kill_workers=True)


def _job(metric: Metric, samples: Records, real_test: Records, ctx: EvalContext) -> MetricResult:
    import torch

    torch.set_num_threads(1)
    return evaluate(metric, samples, real_test, ctx)


def _leave_with(parent: int) -> None:
    """End this process when its parent is gone, even in the middle of a long computation."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

"""Evaluation of metrics in parallel, for those that need one core each: a bounded pool of processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, as_completed
from dataclasses import replace
from typing import Any

import loky
from loky.process_executor import TerminatedWorkerError

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import EvalContext, Metric, MetricResult, evaluate
from dpgen_bench.training.progress import ProgressBar
from dpgen_bench.training.signals import end_with
from dpgen_bench.utils.cores import usable_cores

# Sums depend on the number of threads. With one thread, values do not depend on the number of cores or processes.
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


def needs_one_core(metric: Metric, device: Any) -> bool:
    """Whether the metric runs on one core, next to others: it has a method `one_core(device)` that returns true."""
    one_core = getattr(metric, "one_core", None)
    return bool(one_core and one_core(device))


def evaluate_apart(
    metrics: Mapping[str, Metric], samples: Records, real_test: Records, ctx: EvalContext, workers: int | None = None
) -> Iterator[tuple[str, MetricResult]]:
    """`evaluate` each metric in a separate process; yields results in the order in which they are complete.

    If a process dies, for example for lack of memory, its pool ends with it. The metrics without a result are then run
    again one at a time, and a metric whose process dies again has failed. The processes end when the caller stops
    iterating or raises, and when this process is killed.

    Args:
        workers: the largest number of processes; None is one for each core that this process may use.
    """
    workers = workers or usable_cores()
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
            died = MetricResult("failed", reason="its process died; check that there is enough memory for it")
            del left[key]
            bar.step(len(metrics) - len(left))
            yield key, alone.get(key, died)
    finally:
        bar.finish()


def _together(
    metrics: Mapping[str, Metric], samples: Records, real_test: Records, ctx: EvalContext, workers: int
) -> Iterator[tuple[str, MetricResult]]:
    """Evaluate metrics in one pool; ends early, without an error, if a process of the pool dies."""
    # Between metrics, loky replaces a process that keeps more memory than at first. What is kept are data sets.
    warnings.filterwarnings("ignore", "A worker was restarted", UserWarning, "loky")
    pool = loky.get_reusable_executor(
        max_workers=workers, timeout=60, env=ONE_THREAD, initializer=end_with, initargs=(os.getpid(),)
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
            except Exception as error:  # A metric or a result that cannot be pickled.
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

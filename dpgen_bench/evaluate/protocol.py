"""Building the metrics of a protocol from its config, and evaluating them on one set of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import EvalContext, Metric, MetricResult, NotMeasured, evaluate
from dpgen_bench.evaluate.parallel import evaluate_apart, needs_one_core
from dpgen_bench.utils.classes import find_target


def evaluate_each(
    metrics: Mapping[str, Metric],
    samples: Records,
    test: Records,
    ctx: EvalContext,
    workers: int | None,
    done: Mapping[str, Mapping[str, Any]],
    title: str,
) -> Iterator[tuple[str, MetricResult]]:
    """Yield the key and the result of each metric.

    Metrics that need one core run first, in a pool of processes; then the others, in this process; last come those that
    combine the values of others. If two metrics return values of the same name, the later one fails.

    Args:
        metrics: by key.
        samples: see `Metric`.
        test: see `Metric`.
        ctx: see `EvalContext`.
        workers: see `parallel.evaluate_apart`.
        done: results by key, as dictionaries with "values". The caller adds each yielded result to them.
        title: of the lines that report progress.
    """
    apart = {key: metric for key, metric in metrics.items() if needs_one_core(metric, ctx.device)}
    combined = {key: metric for key, metric in metrics.items() if is_combined(metric)}
    if apart:
        print(f"  {title}: measuring {', '.join(apart)} on {len(samples)} samples", flush=True)
        for key, result in evaluate_apart(apart, samples, test, ctx, workers):
            yield key, _distinct(result, done)
    for key, metric in metrics.items():
        if key not in apart and key not in combined:
            print(f"  {title}: measuring {key} on {len(samples)} samples", flush=True)
            yield key, _distinct(evaluate(metric, _copy(samples), _copy(test), ctx), done)
    for key, metric in combined.items():
        yield key, _distinct(combine(metric, done), done)


def _copy(records: Records) -> Records:
    """A copy for one metric, so that one that changes its images in place does not change those of the next one."""
    return replace(records, images=records.images.clone(), labels=records.labels.clone())


def combine(metric: Any, done: Mapping[str, Mapping[str, Any]]) -> MetricResult:
    """The result of a metric that combines the values of others; `done` has their results by key."""
    values = {name: value for result in done.values() for name, value in result["values"].items()}
    notes: list[str] = []
    try:
        return MetricResult("measured", metric.combine(values, notes), notes=notes)
    except NotMeasured as error:
        return MetricResult("not measured", reason=str(error))
    except Exception as error:
        return MetricResult("failed", reason=f"{type(error).__name__}: {error}")


def _distinct(result: MetricResult, done: Mapping[str, Mapping[str, Any]]) -> MetricResult:
    for other, kept in done.items():
        if shared := result.values.keys() & kept["values"].keys():
            return MetricResult("failed", reason=f"its values {sorted(shared)} have the names of those of {other!r}")
    return result


def is_combined(metric: Any) -> bool:
    """Whether the metric is computed from the values of other metrics."""
    return hasattr(metric, "combine")


def build_metrics(protocol: DictConfig) -> dict[str, Any]:
    """The protocol's metrics by their keys.

    Raises:
        ValueError: if a metric cannot be built; names it and says why.
    """
    metrics = {}
    for key, node in protocol.metrics.items():
        if not isinstance(node, DictConfig) or "_target_" not in node:
            raise ValueError(
                f"metric {key!r} of protocol {protocol.name!r}: expected settings with a class in `_target_`, got "
                f"{node!r}; write {{_target_: MODULE.CLASS}}."
            )
        find_target(node["_target_"], f"protocol.metrics.{key}._target_")
        try:
            metrics[str(key)] = instantiate(node, _convert_="all")
        except InstantiationException as error:
            raise ValueError(
                f"metric {key!r} of protocol {protocol.name!r} cannot be built: {error.__cause__ or error}"
            ) from error
        if not (callable(metrics[str(key)]) or is_combined(metrics[str(key)])):
            raise ValueError(
                f"protocol.metrics.{key}._target_: expected the class of a metric, got {node['_target_']!r}, whose "
                "objects cannot be called; write the class of a metric."
            )
    return metrics

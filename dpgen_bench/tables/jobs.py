"""The runs that a table needs, each with its state: finished, or what is missing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from dpgen_bench.config.spec import RunSpec
from dpgen_bench.runs.kept import kept_steps_measured, not_kept
from dpgen_bench.runs.validation import problem_of
from dpgen_bench.store.folders import ReadableRun, RunFolder, Store
from dpgen_bench.store.measurements import Protocol, is_component
from dpgen_bench.store.records import readable_run
from dpgen_bench.tables.expand import (
    REDUCED,
    expand,
    line_of,
    lines_of,
    parent_overrides,
    reduced_line_of,
    spec_of_job,
    with_parents,
)
from dpgen_bench.tables.rows import rows_of
from dpgen_bench.tables.spec import RowSpec, TableSpec

DAMAGED, FINISHED = "damaged: ", "finished"


@dataclass(frozen=True)
class Job:
    """One run of a table.

    Attributes:
        overrides: the overrides of the run.
        line: the overrides of the table's multirun line that makes the run.
        state: "finished", with what a finished run cannot make any more; or what is missing.
    """

    overrides: tuple[str, ...]
    line: tuple[str, ...]
    spec: RunSpec
    folder: ReadableRun
    state: str

    @property
    def finished(self) -> bool:
        return is_finished(self.state)

    @property
    def damaged(self) -> bool:
        """Whether its folder has content that `dpgen run` can neither use nor repair."""
        return self.state.startswith(DAMAGED)

    @property
    def steps(self) -> int | None:
        """Steps of its training loop; None if the budget or the method determines them when the run starts."""
        steps = self.spec.config.method.get("steps")
        if not isinstance(steps, int):
            return None
        limit = self.spec.config.scale.max_steps
        return steps if limit is None else min(steps, int(limit))


def plan_sweep(table: TableSpec, results: Path, scale: str = "paper", without: Collection[str] = ()) -> list[Job]:
    """Each run of the table once, with its state: parents first, then in the order of the table's lines.

    Args:
        without: metrics, by their keys in `protocol.metrics`, that are not measured now. A run is then finished if it
            has all others.

    Raises:
        ValueError: for a metric in `without` that no protocol of the table has, or that is a part of one that stays.
    """
    of_parents = parent_overrides(table, scale)
    ids = {name: spec_of_job(overrides, results).id for name, overrides in of_parents.items()}
    extra = _kept_overrides(table, scale)
    needed = lines_of(table, scale)
    if scale == REDUCED:  # these have no parents, and are needed where a row's own runs have no values
        entries = [entry for entry in table.rows if entry.reduced and not _has_values(table, entry, results, ids)]
        needed, of_parents, extra = [each for entry in entries if (each := reduced_line_of(table, entry))], {}, []
    lines = [[*with_parents(line, ids).split(), *extra] for line in needed]
    jobs: dict[tuple[str, str], Job] = {}
    for line in _without_metrics([*of_parents.values(), *lines], without, results):
        for overrides in expand(" ".join(line)):
            spec = spec_of_job(overrides, results)
            key = (spec.id, str(spec.protocol_record()))  # two protocols may measure one run
            if key not in jobs:
                folder = _run_of(spec, results)
                jobs[key] = Job(tuple(overrides), tuple(line), spec, folder, state_of(spec, folder))
    return list(jobs.values())


def _has_values(table: TableSpec, entry: RowSpec, results: Path, parents: dict[str, str]) -> bool:
    """Whether one of the paper's own runs of a row was measured."""
    line = line_of(table, entry, "paper")
    return line is not None and any(row.measured for row in rows_of([line], results, parents))


def _without_metrics(lines: list[list[str]], without: Collection[str], results: Path) -> list[list[str]]:
    """The lines, with overrides that remove the metrics `without` from their protocols.

    A line whose jobs have different protocols becomes one line for each job, since an override cannot remove what its
    protocol does not have.
    """
    if not without:
        return lines
    known: set[str] = set()
    shorter: list[list[str]] = []
    for line in lines:
        jobs, removals = expand(" ".join(line)), []
        for overrides in jobs:
            protocol = spec_of_job(overrides, results).protocol_record()
            known |= protocol["metrics"].keys()
            _check_what_stays(protocol, without)
            removals.append([f"~protocol.metrics.{key}" for key in without if key in protocol["metrics"]])
        if all(removed == removals[0] for removed in removals):
            shorter.append([*line, *removals[0]])
        else:
            shorter += [[*overrides, *removed] for overrides, removed in zip(jobs, removals, strict=True)]
    if unknown := [key for key in without if key not in known]:
        raise ValueError(f"expected metrics among {', '.join(sorted(known))}, those of the table, got {unknown[0]}.")
    return shorter


def _check_what_stays(protocol: Protocol, without: Collection[str]) -> None:
    """Raise ValueError if no metric stays, or one that is combined from a metric that is left out."""
    metrics = protocol["metrics"]
    if metrics and metrics.keys() <= set(without):
        raise ValueError(
            f"expected a metric of protocol {protocol['name']!r} that stays, got {', '.join(without)}, which are all "
            "of them: leave out fewer."
        )
    for key in (each for each in metrics if each not in without):
        for left in without:
            if left in metrics and is_component(metrics[left], metrics[key]):
                raise ValueError(
                    f"expected metrics that are measured alone, got {left}, a part of {key} of protocol "
                    f"{protocol['name']!r}: leave out both, {','.join([*without, key])}."
                )


def _kept_overrides(table: TableSpec, scale: str) -> list[str]:
    """The overrides that keep and measure generators during training, for a table with `kept_steps`."""
    steps = table.quick.kept_steps if scale == "quick" else table.kept_steps
    if not steps:
        return []
    return [f"runtime.keep_steps=[{','.join(str(step) for step in steps)}]", "runtime.measure_kept=true"]


def _run_of(spec: RunSpec, results: Path) -> ReadableRun:
    """The run's record if that has all values, or else its folder, in which a sweep makes them."""
    run = readable_run(results, spec.id, spec.protocol_record())
    is_whole = isinstance(run, RunFolder) or run.measurements.covered(spec.protocol_record())
    return run if is_whole else Store(results).folder(spec.id)


def is_finished(state: str) -> bool:
    """Whether a state, as `state_of` says it, is that of a finished run."""
    return state.startswith(FINISHED)


def state_of(spec: RunSpec, run: ReadableRun) -> str:
    """ "finished", with the steps that it did not keep; or what is missing of a run."""
    if problem := problem_of(run):
        return f"{DAMAGED}{problem}"
    if isinstance(run, RunFolder):  # a record is of a finished run
        if not run.done:
            return "not run" if not run.path.exists() else run.status()
        if not run.measurements.covered(spec.protocol_record()):
            return "trained, not measured"
        if not kept_steps_measured(spec, run):
            return "kept steps not measured"
    return ", ".join(filter(None, [FINISHED, not_kept(spec, run)]))

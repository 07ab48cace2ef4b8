"""The runs that a table asks for, each with what is missing of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpgen_bench.runs.config import RunSpec
from dpgen_bench.runs.kept import kept_steps_measured
from dpgen_bench.runs.store import RunFolder, Store
from dpgen_bench.runs.validation import folder_problem
from dpgen_bench.tables.rows import expand, lines_of, parent_overrides, spec_of_job, with_parents
from dpgen_bench.tables.spec import TableSpec

DAMAGED = "damaged: "


@dataclass(frozen=True)
class Job:
    """One run of a table.

    Attributes:
        words: its overrides.
        line: the multirun line of the table that makes it, as overrides.
        state: finished, or what is missing of it.
    """

    words: tuple[str, ...]
    line: tuple[str, ...]
    spec: RunSpec
    folder: RunFolder
    state: str

    @property
    def finished(self) -> bool:
        return self.state == "finished"

    @property
    def damaged(self) -> bool:
        """Whether its folder holds what `dpgen run` can neither use nor mend."""
        return self.state.startswith(DAMAGED)

    @property
    def steps(self) -> int | None:
        """Steps of its training loop; None where the budget or the method sets them as it starts."""
        wanted = self.spec.config.method.get("steps")
        if not isinstance(wanted, int):
            return None
        cap = self.spec.config.scale.max_steps
        return wanted if cap is None else min(wanted, int(cap))


def plan_sweep(table: TableSpec, results: Path, scale: str = "paper") -> list[Job]:
    """Every run of the table once, parents first, then in the order of its lines, each with its state."""
    of_parents = parent_overrides(table, scale)
    ids = {name: spec_of_job(words, results).id for name, words in of_parents.items()}
    extra = _kept_overrides(table, scale)
    lines = [[*with_parents(line, ids).split(), *extra] for line in lines_of(table, scale)]
    store = Store(results)
    jobs: dict[tuple[str, str], Job] = {}
    for line in [*of_parents.values(), *lines]:
        for words in expand(" ".join(line)):
            spec = spec_of_job(words, results)
            key = (spec.id, str(spec.protocol_record()))  # one run may be measured by two protocols
            folder = store.folder(spec.id)
            if key not in jobs:
                jobs[key] = Job(tuple(words), tuple(line), spec, folder, _state(spec, folder))
    return list(jobs.values())


def _kept_overrides(table: TableSpec, scale: str) -> list[str]:
    """The overrides that keep and measure generators along the way, for a table with `kept_steps`."""
    steps = table.quick.kept_steps if scale == "quick" else table.kept_steps
    if not steps:
        return []
    return [f"runtime.keep_steps=[{','.join(str(step) for step in steps)}]", "runtime.measure_kept=true"]


def _state(spec: RunSpec, folder: RunFolder) -> str:
    if problem := folder_problem(folder):
        return f"{DAMAGED}{problem}"
    if not folder.done:
        return "not run" if not folder.path.exists() else folder.status()
    if not folder.measurements.covered(spec.protocol_record()):
        return "trained, not measured"
    return "finished" if kept_steps_measured(spec, folder) else "kept steps not measured"

"""The rows of a table: runs that differ in their seed alone, and what has been measured of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from dpgen_bench.config.spec import RunSpec
from dpgen_bench.outcomes.listing import describe_dataset, epsilon_entry, epsilon_number, first_stage, format_epsilon
from dpgen_bench.outcomes.soundness import budget_problem
from dpgen_bench.runs.validation import problem_of
from dpgen_bench.store.checks import plugin_note
from dpgen_bench.store.folders import ReadableRun, Store
from dpgen_bench.store.measurements import Measurement
from dpgen_bench.store.records import evidence, read_record, readable_run, record_paths
from dpgen_bench.store.statistics import Summary, summarise
from dpgen_bench.store.values import cost, metric_values, notes
from dpgen_bench.tables.combined import with_combined
from dpgen_bench.tables.expand import REDUCED, jobs_of, spec_of_job

OTHER = "another run"  # the mark of what stands in for a printed row's run and is no reduced run
UNMEASURED = "finished but not measured by this protocol"
# Settings that describe no difference between two runs: what follows from others, and how much is computed at once.
NO_DIFFERENCE = {"check", "pretraining", "_target_", "population", "stack", "microbatch"}


@dataclass(frozen=True)
class TableRow:
    """Runs that differ in their seed alone and are measured by the same protocol.

    Args:
        stands_for: the printed row's own runs, which have no values, if these stand in for them.
    """

    specs: tuple[RunSpec, ...]
    folders: tuple[ReadableRun, ...]
    stands_for: TableRow | None = None

    @property
    def protocol(self) -> str:
        return str(self.specs[0].config.protocol.name)

    @property
    def scale(self) -> str:
        return str(self.specs[0].config.scale.name)

    @cached_property
    def stands_in(self) -> str:
        """How values of runs that stand in for others are marked; "" of all others.

        "reduced" for a smaller scale, "another run" for other settings or seeds, and "by PROTOCOL" for the same run.
        """
        if self.stands_for is None:
            return ""
        if self.scale != "paper":
            return REDUCED
        is_other = self.differing or self.seeds.isdisjoint(self.stands_for.seeds)
        return OTHER if is_other else f"by {self.protocol}"

    @cached_property
    def differing(self) -> list[str]:
        """The settings in which these runs differ from those that they stand for, see `differing_settings`."""
        return differing_settings(self.specs[0], self.stands_for.specs[0]) if self.stands_for else []

    @property
    def seeds(self) -> set[int]:
        return {spec.seed for spec in self.specs}

    @property
    def measured(self) -> list[ReadableRun]:
        """The finished runs that were measured by the current text of the protocol; older measurements do not count."""
        return [folder for folder in self.folders if folder.id in self.measurements and folder.done]

    @cached_property
    def unusable(self) -> dict[str, str]:
        """What is wrong with the folders that cannot be read, or that hold another run than their name says."""
        return {folder.id: problem for folder in self.folders if (problem := problem_of(folder))}

    @cached_property
    def measurements(self) -> dict[str, Measurement]:
        """The measurements of the measured runs by run id; read once, however many values a table takes from them.

        Metrics that the row's own measurement lacks are taken from other protocols (`Measured.assembled`), or combined
        from what was taken (`with_combined`).
        """
        protocol = self.specs[0].protocol_record()
        usable = [folder for folder in self.folders if folder.id not in self.unusable]
        assembled = {folder.id: each for folder in usable if (each := folder.measurements.assembled(protocol))}
        return {run_id: with_combined(each, protocol) for run_id, each in assembled.items()}

    @cached_property
    def known(self) -> list[dict[str, list[float]]]:
        """For each run of `measured`, the values of its metrics and costs by name, one value for each repeat."""
        measured = [(folder, self.measurements[folder.id]) for folder in self.measured]
        return [{**cost(folder, measurement), **metric_values(measurement)} for folder, measurement in measured]

    def status(self) -> str:
        """`measured`, or how many seeds are in which state, such as `1 measured, 1 failed: why`."""
        others = [self._state(folder) for folder in self.folders if folder not in self.measured]
        counted = [f"{others.count(kind)} {kind}" for kind in sorted(set(others))]
        if not others:
            return "measured"
        if set(others) in ({"not run"}, {UNMEASURED}) and not self.measured:
            return others[0]
        return ", ".join([f"{len(self.measured)} measured", *counted])

    def _state(self, folder: ReadableRun) -> str:
        if folder.id in self.unusable:
            return f"damaged: {self.unusable[folder.id]}"
        state = folder.status()
        if state == "failed":
            return f"failed: {failure(folder)}"
        return {"empty": "not run", "finished": UNMEASURED}.get(state, state)

    def summary(self, metric: str) -> Summary | None:
        """The metric over seeds and repeats; None if no run has it."""
        values = [by_name[metric] for by_name in self.known if metric in by_name]
        return summarise(values) if values else None

    def cell(self, metric: str) -> str:
        """The summary as text, with what the measured runs lack."""
        summary = self.summary(metric)
        if summary is None:
            return "–"
        lacks = ", ".join(self.lacks(metric))
        return summary.text() + (f" ({lacks})" if lacks else "")

    def lacks(self, metric: str) -> list[str]:
        """`1 of 2 seeds`, if not all measured runs have the metric, and `repeats`."""
        seeds, runs = sum(metric in values for values in self.known), len(self.measured)
        return [*([f"{seeds} of {runs} seeds"] if seeds < runs else []), *self.repeats(metric)]

    def repeats(self, metric: str) -> list[str]:
        """`1 of 5 repeats`, if a run has another number of them than its protocol; [] else, and for a cost."""
        measured = [self.measurements[folder.id] for folder in self.measured]
        numbers = [
            (len(metric_values(each).get(metric, [])), int(each["protocol"].get("repeats", 1))) for each in measured
        ]
        return [f"{number} of {whole} repeats" for number, whole in sorted(numbers) if number not in (0, whole)][:1]

    @cached_property
    def ledgers(self) -> list[dict[str, Any]]:
        """The content of each measured run's ledger.json."""
        return [folder.read_json("ledger.json") for folder in self.measured]

    @property
    def epsilons(self) -> list[dict[str, Any]]:
        """What each measured run's ledger has on epsilon, see `runs.epsilon`; empty where nothing was accounted."""
        return [ledger.get("epsilon") or {} for ledger in self.ledgers]

    @cached_property
    def plugin_notes(self) -> list[str]:
        """What is known of a plugin's source, of which measured runs may have several; each line once."""
        return [note for note in dict.fromkeys(map(plugin_note, self.measured)) if note]

    def notes(self) -> list[str]:
        """Notes of the runs' measurements, and the assumptions of conditional epsilons; each line once."""
        conditional = [each.get("conditional") for each in self.epsilons]
        assumed = [f"ε conditional: {entry['assumption']}" for entry in conditional if isinstance(entry, dict)]
        assumed += [f"nothing is proven: {each['reason']}" for each in self.epsilons if "reason" in each]
        measured = [line for measurement in self.measurements.values() for line in notes(measurement)]
        return list(dict.fromkeys([*assumed, *measured]))

    @cached_property
    def evidence(self) -> str:
        """Who measured the recorded runs, and who made them again; "" for runs without a record."""
        return "; ".join(dict.fromkeys(filter(None, map(evidence, self.measured))))

    @property
    def unit(self) -> str:
        """The privacy unit of the row's epsilons, "record" or "client"; "" while nothing is measured."""
        return next((str(ledger.get("unit", "record")) for ledger in self.ledgers), "")

    @cached_property
    def public_data(self) -> str:
        """What the row's method uses besides the records, such as "fonts"; "" for nothing else."""
        return next((str(each["public_data"]) for each in self.ledgers if each.get("public_data")), "") or (
            self.specs[0].public_data() or ""
        )

    def epsilon_value(self, name: str) -> float | None:
        """The largest epsilon of that name among the measured runs; None if no run has a number for it.

        Args:
            name: "proven", "claimed", "server" or "conditional".
        """
        values = [epsilon_number(each, name) for each in self.epsilons]
        return max((value for value in values if value is not None), default=None)

    def budget_problems(self) -> list[str]:
        """What the measured runs' ledgers do not prove of what was configured, see `outcomes.soundness`; each once."""
        privacy = self.specs[0].config.privacy
        problems = [budget_problem(ledger, privacy) for ledger in self.ledgers]
        return list(dict.fromkeys(problem for problem in problems if problem))

    def epsilon(self, name: str) -> str:
        """`epsilon_value` as text, or the error of a run whose accounting failed."""
        entries = [epsilon_entry(each, name) for each in self.epsilons]
        if failed := [entry for entry in entries if str(entry).startswith("failed")]:
            return str(failed[0])
        return format_epsilon(self.epsilon_value(name))


def failure(folder: ReadableRun) -> str:
    """Why a run failed, in one line: the phase and the error."""
    status = folder.read_json("status.json")
    return textwrap.shorten(f"{status.get('phase', '?')}: {status.get('error') or 'no reason is kept'}", 160)


def has_quick_runs(results: Path) -> bool:
    """Whether a run or a record under `results` is of scale quick."""
    for path in record_paths(results).values():
        try:
            if str(read_record(path).config.scale.name) == "quick":
                return True
        except (ValueError, OmegaConfBaseException):  # the tables report it
            continue
    for folder in Store(results).runs():
        try:
            if str(folder.config.scale.name) == "quick":
                return True
        except Exception:  # the tables of a damaged run report it
            continue
    return False


def rows_of(lines: Iterable[str], results: Path, parents: dict[str, str]) -> list[TableRow]:
    """The rows that multirun lines stand for, in the order of the lines. Each line names its protocol."""
    groups: dict[str, dict[str, RunSpec]] = {}
    for line in lines:
        for job in jobs_of(line, parents):
            spec = spec_of_job(job, results)
            key = str((spec.protocol_record(), {**spec.training, "seed": None}))
            groups.setdefault(key, {})[spec.id] = spec  # a run that two lines name is one run
    return [
        TableRow(
            tuple(specs.values()),
            tuple(readable_run(results, run_id, spec.protocol_record()) for run_id, spec in specs.items()),
        )
        for specs in groups.values()
    ]


def differing_settings(one: RunSpec, other: RunSpec) -> list[str]:
    """Names of the settings in which two runs differ: "dataset", "init", and those of privacy and of the method."""
    compared = {"dataset": describe_dataset, "init": first_stage}
    names = [name for name, describe in compared.items() if describe(one.config) != describe(other.config)]
    for part in ("privacy", "method"):
        first, second = one.config[part], other.config[part]
        keys = sorted({*first, *second} - NO_DIFFERENCE)
        names += ["ε budget" if key == "epsilon" else str(key) for key in keys if first.get(key) != second.get(key)]
    return names

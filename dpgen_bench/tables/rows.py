"""The runs of a table: load its yaml, expand its multirun lines, and read what has been measured of each run."""

from __future__ import annotations

import copy
import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpgen_bench.runs.catalogue import catalogue
from dpgen_bench.runs.compose import compose_cached
from dpgen_bench.runs.config import SEEDS, RunSpec, build_spec, compose_config
from dpgen_bench.runs.listing import describe_dataset, epsilon_entry, epsilon_number, first_stage, format_epsilon
from dpgen_bench.runs.measurements import Measurement
from dpgen_bench.runs.records import evidence, read_record, readable_run, record_paths
from dpgen_bench.runs.soundness import budget_problem
from dpgen_bench.runs.statistics import Summary, summarise
from dpgen_bench.runs.store import ReadableRun, Store
from dpgen_bench.runs.validation import problem_of
from dpgen_bench.runs.values import cost, metric_values, notes
from dpgen_bench.tables.names import table_file
from dpgen_bench.tables.spec import RowSpec, TableSpec, parse_table
from dpgen_bench.utils.own_folders import own_folders
from dpgen_bench.utils.validation import suggestion

SCALES = ("paper", "quick")
QUICK_PROTOCOL = "standard_1k_cpu"  # the protocol of a table's quick runs if its yaml does not name one


@dataclass(frozen=True)
class TableRow:
    """Runs that differ in their seed alone and are measured by the same protocol."""

    specs: tuple[RunSpec, ...]
    folders: tuple[ReadableRun, ...]

    @property
    def protocol(self) -> str:
        return str(self.specs[0].config.protocol.name)

    @property
    def scale(self) -> str:
        return str(self.specs[0].config.scale.name)

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

        Metrics that the row's own measurement lacks are taken from other protocols, see `Measurements.assembled`.
        """
        protocol = self.specs[0].protocol_record()
        usable = [folder for folder in self.folders if folder.id not in self.unusable]
        return {folder.id: each for folder in usable if (each := folder.measurements.assembled(protocol))}

    @cached_property
    def known(self) -> list[dict[str, list[float]]]:
        """For each run of `measured`, the values of its metrics and costs by name, one value for each repeat."""
        return [{**cost(folder), **metric_values(self.measurements[folder.id])} for folder in self.measured]

    def status(self) -> str:
        """`measured`, or how many seeds are in which state, such as `1 measured, 1 failed: why`."""
        others = [self._state(folder) for folder in self.folders if folder not in self.measured]
        counted = [f"{others.count(kind)} {kind}" for kind in sorted(set(others))]
        if not others:
            return "measured"
        if set(others) == {"not run"} and not self.measured:
            return "not run"
        return ", ".join([f"{len(self.measured)} measured", *counted])

    def _state(self, folder: ReadableRun) -> str:
        if folder.id in self.unusable:
            return f"damaged: {self.unusable[folder.id]}"
        state = folder.status()
        if state == "failed":
            return f"failed: {failure(folder)}"
        return {"empty": "not run", "finished": "finished but not measured by this protocol"}.get(state, state)

    def summary(self, metric: str) -> Summary | None:
        """The metric over seeds and repeats; None if no run has it."""
        values = [by_name[metric] for by_name in self.known if metric in by_name]
        return summarise(values) if values else None

    def cell(self, metric: str) -> str:
        """The summary as text; if not all measured seeds have the metric, it says how many do."""
        summary, runs = self.summary(metric), len(self.measured)
        if summary is None:
            return "–"
        return summary.text() + (f" ({summary.seeds} of {runs} seeds)" if summary.seeds < runs else "")

    def notes(self) -> list[str]:
        """Notes of the runs' measurements, and the assumptions of conditional epsilons; each line once."""
        ledgers = [folder.read_json("ledger.json").get("epsilon") or {} for folder in self.measured]
        conditional = [ledger.get("conditional") for ledger in ledgers]
        assumed = [f"ε conditional: {entry['assumption']}" for entry in conditional if isinstance(entry, dict)]
        assumed += [f"nothing is proven: {ledger['reason']}" for ledger in ledgers if "reason" in ledger]
        measured = [line for measurement in self.measurements.values() for line in notes(measurement)]
        return list(dict.fromkeys([*assumed, *measured]))

    @cached_property
    def evidence(self) -> str:
        """Who measured the recorded runs, and who made them again; "" for runs without a record."""
        return "; ".join(dict.fromkeys(filter(None, map(evidence, self.measured))))

    @property
    def unit(self) -> str:
        """The privacy unit of the row's epsilons, "record" or "client"; "" while nothing is measured."""
        return next((str(folder.read_json("ledger.json").get("unit", "record")) for folder in self.measured), "")

    @cached_property
    def public_data(self) -> str:
        """What the row's method uses besides the records, such as "fonts"; "" for nothing else."""
        ledgers = [folder.read_json("ledger.json") for folder in self.measured]
        return next((str(each["public_data"]) for each in ledgers if each.get("public_data")), "") or (
            self.specs[0].public_data() or ""
        )

    def epsilon_value(self, name: str) -> float | None:
        """The largest epsilon of that name among the measured runs; None if no run has a number for it.

        Args:
            name: "proven", "claimed", "server" or "conditional".
        """
        values = [epsilon_number(folder.read_json("ledger.json").get("epsilon"), name) for folder in self.measured]
        return max((value for value in values if value is not None), default=None)

    def budget_problems(self) -> list[str]:
        """What the measured runs' ledgers do not prove of what was configured, see `runs.soundness`; each once."""
        privacy = self.specs[0].config.privacy
        problems = [budget_problem(folder.read_json("ledger.json"), privacy) for folder in self.measured]
        return list(dict.fromkeys(problem for problem in problems if problem))

    def epsilon(self, name: str) -> str:
        """`epsilon_value` as text, or the error of a run whose accounting failed."""
        entries = [epsilon_entry(folder.read_json("ledger.json").get("epsilon"), name) for folder in self.measured]
        if failed := [entry for entry in entries if str(entry).startswith("failed")]:
            return str(failed[0])
        return format_epsilon(self.epsilon_value(name))


def failure(folder: ReadableRun) -> str:
    """Why a run failed, in one line: the phase and the error."""
    status = folder.read_json("status.json")
    return textwrap.shorten(f"{status.get('phase', '?')}: {status.get('error') or 'no reason is kept'}", 160)


def load_table(name: str) -> TableSpec:
    """The table NAME.yaml of conf/table or of `own_folders`, with each grid entry of its `rows` replaced by its rows.

    Raises:
        ValueError: if there is none of that name, for a file that is not yaml, for keys or types that no table has (see
            `parse_table`), and for a protocol or a parent that does not exist.
    """
    path = table_file(name)
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"table {name}: expected {path} to be yaml with each key once, got an error: {reason}. Correct the file."
        ) from None
    if not isinstance(loaded, dict):
        raise ValueError(f"table {name}: expected a mapping of keys to values, got {loaded!r}; write `key: value`.")
    table = parse_table(name, {str(key): value for key, value in loaded.items()})
    try:
        _check_references(table)
    except (ValueError, HydraException) as error:
        raise ValueError(f"table {name}: {error}") from None
    return table


def _check_references(table: TableSpec) -> None:
    """Check that the protocols and the parents that a table names exist."""
    known = catalogue("protocols")
    for key, protocol in (("protocol", table.protocol), ("quick.protocol", table.quick.protocol)):
        if protocol is not None and protocol not in known:
            raise ValueError(
                f"expected `{key}` to name a protocol, got {protocol!r}{suggestion(protocol, known)}. `dpgen list "
                "protocols` lists them."
            )
    parents = dict.fromkeys(parent_overrides(table), "")
    for line in [*table.sweeps, *(line for entry in table.rows for line in (entry.run, entry.quick) if line)]:
        with_parents(line, parents)


def expand(sweep: str) -> list[list[str]]:
    """The overrides of each job of a multirun line: every combination of its choices, as in Hydra's basic sweeper."""
    choices = []
    for override in OverridesParser.create().parse_overrides(sweep.split()):
        key = override.get_key_element()
        if override.is_sweep_override():
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([key if override.is_delete() else f"{key}={override.get_value_element_as_str()}"])
    return [list(job) for job in itertools.product(*choices)]


def parent_overrides(table: TableSpec, scale: str = "paper") -> dict[str, list[str]]:
    """The overrides of the table's `parents`, from which other runs restart, by name.

    Raises:
        ValueError: if the line of a parent stands for more than one run.
    """
    overrides = {}
    for name, line in table.parents.items():
        jobs = expand(line)
        if len(jobs) != 1:
            raise ValueError(
                f"expected the line of one run for the parent {name!r}, got {len(jobs)} runs: {line}. Give each "
                "setting one value."
            )
        overrides[name] = [*with_table_protocol(table, jobs[0]), *(["scale=quick"] if scale == "quick" else [])]
    return overrides


def parent_ids(table: TableSpec, results: Path, scale: str = "paper") -> dict[str, str]:
    """Ids of the table's `parents` by name; raises what `parent_overrides` does."""
    overrides = parent_overrides(table, scale)
    return {name: spec_of_job(each, results).id for name, each in overrides.items()}


def lines_of(table: TableSpec, scale: str = "paper") -> list[str]:
    """The multirun lines of the table at that scale, of its printed rows and of its own, with their protocol.

    At scale quick the line of a printed row is its `quick`, or else its `run` with scale=quick; so are all others.
    """
    check_scale(scale)
    entries = [line for entry in table.rows if (line := line_of(table, entry, scale))]
    return [*entries, *sweep_lines(table, scale)]


def sweep_lines(table: TableSpec, scale: str = "paper") -> list[str]:
    """The multirun lines of runs that answer no printed row, with their protocol."""
    return [_at_scale(table, sweep, scale) for sweep in table.sweeps]


def scales_to_build(table: TableSpec, quick_runs: bool) -> tuple[str, ...]:
    """The scales at which a table can have values; only these are built, because building composes each run.

    Args:
        quick_runs: whether there are runs of scale quick.
    """
    has_stand_ins = any(entry.quick for entry in table.rows)
    return SCALES if has_stand_ins or quick_runs else SCALES[:1]


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


def line_of(table: TableSpec, entry: RowSpec, scale: str) -> str | None:
    """The multirun line of one entry of `rows`; None if the entry has no run."""
    check_scale(scale)
    if scale == "quick" and entry.quick:
        return " ".join(_with_protocol(entry.quick.split(), _quick_protocol(table)))
    return _at_scale(table, entry.run, scale) if entry.run else None


def check_scale(scale: str) -> None:
    """
    Raises:
        ValueError: for anything but `paper` or `quick`.
    """
    if scale not in SCALES:
        raise ValueError(f"expected scale={' or scale='.join(SCALES)}, got {scale!r}.")


def _at_scale(table: TableSpec, line: str, scale: str) -> str:
    if scale == "paper":
        return " ".join(with_table_protocol(table, line.split()))
    overrides = line.split()
    # In a paper's table a protocol that a line names is the paper's, which takes too long at scale quick.
    if table.published or not _names_protocol(overrides):
        overrides = [each for each in overrides if not each.startswith("protocol")]
    return " ".join([*_with_protocol(overrides, _quick_protocol(table)), "scale=quick"])


def _quick_protocol(table: TableSpec) -> str:
    return table.quick.protocol or QUICK_PROTOCOL


def with_table_protocol(table: TableSpec, overrides: Sequence[str]) -> list[str]:
    """The overrides with the table's protocol, unless they name one."""
    return _with_protocol(overrides, table.protocol)


def _with_protocol(overrides: Sequence[str], protocol: str) -> list[str]:
    return [*overrides] if _names_protocol(overrides) else [*overrides, f"protocol={protocol}"]


def _names_protocol(overrides: Sequence[str]) -> bool:
    return any(each.startswith("protocol=") for each in overrides)


def jobs_of(line: str, parents: dict[str, str]) -> list[list[str]]:
    """The overrides of each job of a line, with the ids of parents in place of their names.

    Raises:
        ValueError: for a name that `parents` lacks.
    """
    return expand(with_parents(line, parents))


def with_parents(line: str, parents: dict[str, str]) -> str:
    """The line with the ids of parents in place of their names.

    Raises:
        ValueError: for a name that `parents` lacks.
    """
    for name in re.findall(r"@([A-Za-z]\w*)", line):
        if name not in parents:
            names = ", ".join(sorted(parents)) or "there are none"
            raise ValueError(
                f"expected after @ the name of a parent of the table ({names}), got @{name}"
                f"{suggestion(name, parents)}; correct the name, or add the parent under `parents`."
            )
        line = re.sub(rf"@{name}\b", f'"{parents[name]}"', line)  # quoted: some ids look like numbers
    return line


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
        keys = sorted({*first, *second} - {"check", "pretraining", "_target_", "population"})
        names += ["ε budget" if key == "epsilon" else str(key) for key in keys if first.get(key) != second.get(key)]
    return names


def spec_of_job(overrides: Sequence[str], results: Path) -> RunSpec:
    """The run that the overrides of a job describe. A run from which it restarts need not exist yet."""
    seeds = [each.split("=", 1)[1] for each in overrides if re.fullmatch(r"seed=\d+", each)]
    others = tuple(each for each in overrides if not re.fullmatch(r"seed=\d+", each))
    seed = int(seeds[-1]) if seeds else None
    if seed is not None and seed >= SEEDS:  # refused there
        return build_spec(compose_config(overrides), planned=True)
    spec = _without_seed(others, str(results), own_folders())
    seed = spec.seed if seed is None else seed
    config = copy.deepcopy(spec.config)
    config.seed = seed
    return RunSpec(config, {**spec.training, "seed": seed})


@cache
def _without_seed(overrides: tuple[str, ...], results: str, _: tuple[Path, ...]) -> RunSpec:
    """The run of these overrides with the default seed, which no other setting depends on; cached for `own_folders`."""
    config = compose_cached(overrides)
    config.results = results
    return build_spec(config, planned=True)

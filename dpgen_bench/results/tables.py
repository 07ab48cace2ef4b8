"""Tables: which runs they are made of, how those are launched, and how their figures are put side by side."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from dpgen_bench.files import write_atomic
from dpgen_bench.results.figures import cost, figures, notes
from dpgen_bench.results.listing import describe_dataset, epsilon_figure, format_epsilon, is_changed, make_console
from dpgen_bench.results.reports import Report
from dpgen_bench.results.statistics import Summary, summarise
from dpgen_bench.results.store import RunFolder, Store
from dpgen_bench.specify import CONF, RunSpec, compose_config, specify

SPREADS = (
    "`±`: standard deviation over training seeds; `repeats ±`: over drawings of samples from one generator, with "
    "classifiers trained anew. The CSV beside this file has every figure unrounded, with 95% intervals."
)


SERVER, CONDITIONAL = "ε against the server", "ε conditional"  # columns that are shown where a row has them


@dataclass(frozen=True)
class TableRow:
    """Runs that differ in their seed alone, measured by one protocol, the same to its last setting."""

    specs: tuple[RunSpec, ...]
    folders: tuple[RunFolder, ...]

    @property
    def protocol(self) -> str:
        return str(self.specs[0].config.protocol.name)

    @property
    def measured(self) -> list[RunFolder]:
        """Those measured by the protocol as it is now; figures of an earlier text of it are not shown."""
        return [folder for folder in self.folders if folder.id in self.reports]

    @cached_property
    def reports(self) -> dict[str, Report]:
        """The measured runs' reports by run id; read once, however many figures a table takes from them."""
        wanted = self.specs[0].protocol_record()
        return {folder.id: report for folder in self.folders if (report := folder.reports.of(wanted))}

    @cached_property
    def known(self) -> list[dict[str, list[float]]]:
        """All figures of each measured run by name."""
        return [{**cost(folder), **figures(self.reports[folder.id])} for folder in self.measured]

    def status(self) -> str:
        """`measured`, or how many of the seeds are, and what became of the others."""
        others = [_words(folder.status()) for folder in self.folders if folder not in self.measured]
        counted = [f"{others.count(kind)} {kind}" for kind in sorted(set(others))]
        return ", ".join([f"{len(self.measured)} measured", *counted]) if others else "measured"

    def summary(self, metric: str) -> Summary | None:
        """The metric over seeds and repeats, or None where no run has it."""
        values = [found[metric] for found in self.known if metric in found]
        return summarise(values) if values else None

    def cell(self, metric: str) -> str:
        """The summary in words, with how many of the row's measured seeds have the metric if not all do."""
        summary, runs = self.summary(metric), len(self.measured)
        if summary is None:
            return "–"
        return summary.text() + (f" ({summary.seeds} of {runs} seeds)" if summary.seeds < runs else "")

    def notes(self) -> list[str]:
        """What the runs' reports say besides their figures, and what a conditional epsilon assumes; each line once."""
        ledgers = [folder.read_json("ledger.json").get("epsilon") or {} for folder in self.measured]
        given = [figure["assumption"] for ledger in ledgers if isinstance(figure := ledger.get("conditional"), dict)]
        assumed = [f"ε conditional: {assumption}" for assumption in given]
        assumed += [f"nothing is proven: {ledger['reason']}" for ledger in ledgers if "reason" in ledger]
        return list(dict.fromkeys([*assumed, *(line for report in self.reports.values() for line in notes(report))]))

    @property
    def unit(self) -> str:
        """Whom the row's epsilons protect, "record" or "client"; "" while nothing is measured."""
        return next((str(folder.read_json("ledger.json").get("unit", "record")) for folder in self.measured), "")

    def epsilon(self, name: str) -> str:
        """The largest figure among the row's runs (seeds do not change it)."""
        found = [epsilon_figure(folder.read_json("ledger.json").get("epsilon"), name) for folder in self.measured]
        if failed := [value for value in found if str(value).startswith("failed")]:
            return str(failed[0])
        known = [float(value) for value in found if value is not None]
        return format_epsilon(max(known)) if known else "–"


def load_table(name: str) -> DictConfig:
    """A table's yaml.

    Raises:
        ValueError: if there is none of that name.
    """
    path = CONF / "table" / f"{name}.yaml"
    if not path.exists():
        there = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml")))
        raise ValueError(f"expected a table in {path.parent} ({there}), got {name!r}.")
    loaded = OmegaConf.load(path)
    assert isinstance(loaded, DictConfig)
    return loaded


def expand(sweep: str) -> list[list[str]]:
    """The jobs of one multirun line, as Hydra's basic sweeper would launch them: every combination of its choices."""
    choices = []
    for override in OverridesParser.create().parse_overrides(sweep.split()):
        key = override.get_key_element()
        if override.is_sweep_override():
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([f"{key}={override.get_value_element_as_str()}"])
    return [list(job) for job in itertools.product(*choices)]


def table_rows(table: DictConfig, results: Path) -> list[TableRow]:
    """The table's rows in the order of its sweeps; runs that differ in seed alone share a row.

    A sweep may name a protocol of its own; other rows have the table's. Each row says which it was measured by.
    """
    groups: dict[str, dict[str, RunSpec]] = {}
    for sweep in table.sweeps:
        for job in expand(sweep):
            spec = specify(compose_config([f"results={results}", *_measured_by(table, job)]))
            alike = str((spec.protocol_record(), {**spec.training, "seed": None}))
            groups.setdefault(alike, {})[spec.id] = spec  # a run that two sweeps name is one run
    store = Store(results)
    return [
        TableRow(tuple(specs.values()), tuple(store.folder(run_id) for run_id in specs)) for specs in groups.values()
    ]


def table_frame(table: DictConfig, rows: list[TableRow]) -> pd.DataFrame:
    """One line per row: what was run, at which epsilon claimed and proven, what came of it; then what is published.

    Raises:
        ValueError: if the table names a setting that none of its methods has.
    """
    for name in table.get("settings", []):
        if rows and not any(name in row.specs[0].config.method for row in rows):
            raise ValueError(f"expected under `settings` the names of method settings, got {name!r}, which none has.")
    lines: list[dict[str, Any]] = []
    for row in rows:
        config = row.specs[0].config
        privacy = config.privacy
        line: dict[str, Any] = {
            "method": config.method.name,
            **{name: str(value) for name, value in _settings(table, row).items()},
            "dataset": describe_dataset(config),
            "ε budget": f"{float(privacy.epsilon):g}",
            "ε proven": row.epsilon("proven"),
            SERVER: row.epsilon("server"),
            "ε claimed": row.epsilon("claimed"),
            CONDITIONAL: row.epsilon("conditional"),
            "relation, δ, by": "–"
            if math.isinf(privacy.epsilon)
            else f"{privacy.relation}, {privacy.delta:g}, {privacy.accountant}"
            + (" (of clients)" if row.unit == "client" else ""),
        }
        line |= {metric: row.cell(metric) for metric in table.metrics}
        line |= {
            "seeds": len(row.measured),
            "scale": config.scale.name,
            "protocol": row.protocol + (" (changed)" if is_changed(row.specs[0].protocol_record()) else ""),
            "status": row.status(),
        }
        lines.append(line)
    columns = list(lines[0]) if lines else []
    for printed in table.get("published", []):
        if unknown := set(printed) - set(columns):
            raise ValueError(f"expected under `published` columns of the table ({columns}), got {sorted(unknown)}.")
        line = {column: str(printed.get(column, "–")) for column in columns}
        lines.append({**line, "seeds": "–", "scale": "paper", "status": "published"})
    return _without_unused(pd.DataFrame(lines), (SERVER, CONDITIONAL))


def _without_unused(frame: pd.DataFrame, columns: Iterable[str]) -> pd.DataFrame:
    """The table without those of the columns of epsilons that no row has."""
    return frame.drop(columns=[name for name in columns if name in frame and (frame[name] == "–").all()])


def _settings(table: DictConfig, row: TableRow) -> dict[str, Any]:
    """The method's settings that the table names under `settings`: what its rows differ in besides data and budget.

    A method without such a setting has a dash.
    """
    method = row.specs[0].config.method
    return {name: method.get(name, "–") for name in table.get("settings", [])}


def long_frame(table: DictConfig, rows: list[TableRow]) -> pd.DataFrame:
    """One line per row and metric, with unrounded numbers: mean, both spreads, interval, seeds, repeats, epsilons."""
    lines: list[dict[str, Any]] = []
    for row in rows:
        config = row.specs[0].config
        for metric in table.metrics:
            summary = row.summary(metric)
            low, high = (summary.ci95 if summary else None) or (None, None)
            lines.append(
                {
                    "method": config.method.name,
                    **_settings(table, row),
                    "dataset": describe_dataset(config),
                    "epsilon_budget": float(config.privacy.epsilon),
                    "epsilon_proven": row.epsilon("proven"),
                    "epsilon_claimed": row.epsilon("claimed"),
                    "epsilon_server": row.epsilon("server"),
                    "epsilon_conditional": row.epsilon("conditional"),
                    "unit": row.unit,
                    "delta": float(config.privacy.delta),
                    "relation": config.privacy.relation,
                    "accountant": config.privacy.accountant,
                    "metric": metric,
                    "mean": summary and summary.mean,
                    "std_seeds": summary and summary.std_seeds,
                    "std_repeats": summary and summary.std_repeats,
                    "ci95_low": low,
                    "ci95_high": high,
                    "ci95_over": summary and summary.ci_over,
                    "seeds": summary.seeds if summary else 0,
                    "repeats": summary.repeats if summary else 0,
                    "scale": config.scale.name,
                    "protocol": row.protocol,
                    "status": row.status(),
                    "runs": " ".join(folder.id for folder in row.measured),
                }
            )
    return _without_unused(pd.DataFrame(lines), ("epsilon_server", "epsilon_conditional"))


def print_table(name: str, results: Path) -> None:
    """Print a table and write it as results/tables/NAME.md and .csv; one without a single figure is not written."""
    table = load_table(name)
    rows = table_rows(table, results)
    frame = table_frame(table, rows)
    console = make_console()
    console.print(_for_console(frame, table, console.width))
    for row in rows:
        for folder in row.measured:
            config = folder.config
            what = f"{config.method.name} ε={float(config.privacy.epsilon):g} seed {config.seed}"
            console.print(f"  samples of {what}: {folder.path / 'samples.png'}", highlight=False, soft_wrap=True)
    if not any(row.measured for row in rows):
        console.print(f"nothing is measured yet, so no file is written; `dpgen sweep {name}` makes the runs")
        return
    place = results / "tables"
    remarks = _remarks(rows)
    for remark in remarks:
        console.print(f"  {remark}", highlight=False, soft_wrap=True)
    paragraphs = [f"# {table.title}", _markdown(frame), str(table.get("note", "")), SPREADS, _bullets(remarks)]
    write_atomic(place / f"{name}.md", "\n\n".join(part for part in paragraphs if part) + "\n")
    write_atomic(place / f"{name}.csv", long_frame(table, rows).to_csv(index=False))


def launch_sweeps(name: str, results: Path, overrides: list[str]) -> int:
    """Launch the multiruns of a table's sweeps that hold an unfinished run; 0 if all end well, else 1.

    `overrides` go to every multirun (a launcher, a device).
    """
    table = load_table(name)
    failed = False
    for sweep in table.sweeps:
        rows = table_rows(OmegaConf.merge(table, {"sweeps": [sweep]}), results)  # type: ignore[arg-type]
        folders = [folder for row in rows for folder in row.folders]
        done = {
            folder.id
            for row in rows
            for folder in row.folders
            if folder.done and folder.reports.settled(row.specs[0].protocol_record())
        }
        missing = [folder for folder in folders if folder.id not in done]
        print(f"{sweep}: {len(folders) - len(missing)} of {len(folders)} runs finished", flush=True)
        if missing:
            words = [*_measured_by(table, sweep.split()), f"results={results}", *overrides]
            command = [sys.executable, "-m", "dpgen_bench.cli", "run", "-m", *words]
            failed |= subprocess.run(command).returncode != 0
    return int(failed)


def _measured_by(table: DictConfig, words: list[str]) -> list[str]:
    """The overrides with the table's protocol, unless they name one."""
    named = any(word.startswith("protocol=") for word in words)
    return words if named else [*words, f"protocol={table.protocol}"]


def _for_console(frame: pd.DataFrame, table: DictConfig, width: int) -> Table:
    """The table as it is or, where its columns would be cut to a few letters each, turned on its side."""
    if 10 * len(frame.columns) <= width:
        shown = Table(*frame.columns, title=table.title, caption=table.get("note"))
        lines = frame.astype(str).values.tolist()
    else:
        shown = Table("", *(str(i + 1) for i in range(len(frame))), title=table.title, caption=table.get("note"))
        lines = [[name, *frame[name].astype(str)] for name in frame.columns]
    for line in lines:
        shown.add_row(*line)
    return shown


def _remarks(rows: list[TableRow]) -> list[str]:
    """`method dataset ε: remark` for each remark in the rows' reports."""
    lines = []
    for row in rows:
        config = row.specs[0].config
        who = f"{config.method.name} {config.dataset.name} ε={float(config.privacy.epsilon):g}"
        lines += [f"{who}: {note}" for note in row.notes()]
    return lines


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _words(status: str) -> str:
    return "not run" if status == "empty" else status


def _markdown(frame: pd.DataFrame) -> str:
    lines = [list(frame.columns), ["---"] * len(frame.columns), *frame.astype(str).values.tolist()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

"""Tables: which runs they are made of, how those are launched, and how their figures are put side by side."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from dpgen_bench.files import write_atomic
from dpgen_bench.results.listing import format_epsilon, headline, make_console
from dpgen_bench.results.store import RunFolder, Store
from dpgen_bench.specify import CONF, RunSpec, compose_config, specify


@dataclass(frozen=True)
class TableRow:
    """Runs that differ in their seed alone. Spread is the standard deviation over training seeds (n - 1)."""

    specs: tuple[RunSpec, ...]
    folders: tuple[RunFolder, ...]
    protocol: str

    @property
    def measured(self) -> list[RunFolder]:
        return [folder for folder in self.folders if self.protocol in folder.protocols]

    def status(self) -> str:
        """`measured`, or how many of the seeds are, and what became of the others."""
        others = [_words(folder.status()) for folder in self.folders if folder not in self.measured]
        counted = [f"{others.count(kind)} {kind}" for kind in sorted(set(others))]
        return ", ".join([f"{len(self.measured)} measured", *counted]) if others else "measured"

    def figure(self, metric: str) -> str:
        """Mean ± std over seeds, or a dash."""
        values = [v[metric] for f in self.measured if metric in (v := headline(f, self.protocol))]
        if not values:
            return "–"
        mean = f"{sum(values) / len(values):.1f}"
        return f"{mean} ± {pd.Series(values).std():.1f}" if len(values) > 1 else mean

    def epsilon(self, name: str) -> str:
        """The largest figure among the row's runs (seeds do not change it)."""
        found = [(folder.read_json("ledger.json").get("epsilon") or {}).get(name) for folder in self.measured]
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
    """The table's rows in the order of its sweeps; runs that differ in seed alone share a row."""
    groups: dict[str, list[RunSpec]] = {}
    for sweep in table.sweeps:
        for job in expand(sweep):
            spec = specify(compose_config([*job, f"results={results}", f"protocol={table.protocol}"]))
            groups.setdefault(str({**spec.training, "seed": None}), []).append(spec)
    store = Store(results)
    return [
        TableRow(tuple(specs), tuple(store.folder(spec.id) for spec in specs), str(table.protocol))
        for specs in groups.values()
    ]


def table_frame(table: DictConfig, rows: list[TableRow]) -> pd.DataFrame:
    """One line per row: what was run, at which epsilon claimed and proven, what came of it."""
    lines: list[dict[str, Any]] = []
    for row in rows:
        config = row.specs[0].config
        privacy = config.privacy
        line: dict[str, Any] = {
            "method": config.method.name,
            "dataset": config.dataset.name,
            "ε budget": f"{float(privacy.epsilon):g}",
            "ε proven": row.epsilon("proven"),
            "ε claimed": row.epsilon("claimed"),
            "relation, δ, by": "–"
            if math.isinf(privacy.epsilon)
            else f"{privacy.relation}, {privacy.delta:g}, {privacy.accountant}",
        }
        line |= {metric: row.figure(metric) for metric in table.metrics}
        line |= {
            "seeds": len(row.measured),
            "scale": config.scale.name,
            "protocol": row.protocol,
            "status": row.status(),
        }
        lines.append(line)
    return pd.DataFrame(lines)


def print_table(name: str, results: Path) -> None:
    """Print a table and write it as results/tables/NAME.md and .csv; one without a single figure is not written."""
    table = load_table(name)
    rows = table_rows(table, results)
    frame = table_frame(table, rows)
    shown = Table(*frame.columns, title=table.title, caption=table.get("note"))
    for line in frame.itertuples(index=False):
        shown.add_row(*map(str, line))
    console = make_console()
    console.print(shown)
    for row in rows:
        for folder in row.measured:
            config = folder.config
            what = f"{config.method.name} ε={float(config.privacy.epsilon):g} seed {config.seed}"
            console.print(f"  samples of {what}: {folder.path / 'samples.png'}", highlight=False, soft_wrap=True)
    if not any(row.measured for row in rows):
        console.print(f"nothing is measured yet, so no file is written; `dpgen sweep {name}` makes the runs")
        return
    place = results / "tables"
    write_atomic(place / f"{name}.md", f"# {table.title}\n\n{_markdown(frame)}\n\n{table.get('note', '')}\n")
    write_atomic(place / f"{name}.csv", frame.to_csv(index=False))


def launch_sweeps(name: str, results: Path, overrides: list[str]) -> int:
    """Launch the multiruns of a table's sweeps that hold an unfinished run; 0 if all end well, else 1.

    `overrides` go to every multirun (a launcher, a device).
    """
    table = load_table(name)
    failed = False
    for sweep in table.sweeps:
        rows = table_rows(OmegaConf.merge(table, {"sweeps": [sweep]}), results)  # type: ignore[arg-type]
        folders = [folder for row in rows for folder in row.folders]
        missing = [folder for folder in folders if str(table.protocol) not in folder.protocols or not folder.done]
        print(f"{sweep}: {len(folders) - len(missing)} of {len(folders)} runs finished", flush=True)
        if missing:
            words = [*sweep.split(), f"protocol={table.protocol}", f"results={results}", *overrides]
            command = [sys.executable, "-m", "dpgen_bench.cli", "run", "-m", *words]
            failed |= subprocess.run(command).returncode != 0
    return int(failed)


def _words(status: str) -> str:
    return "not run" if status == "empty" else status


def _markdown(frame: pd.DataFrame) -> str:
    lines = [list(frame.columns), ["---"] * len(frame.columns), *frame.astype(str).values.tolist()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

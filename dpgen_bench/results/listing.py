"""`dpgen runs`: what is there, in which state, at which epsilon, with which headline figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dpgen_bench.results.store import RunFolder, Store
from dpgen_bench.specify import is_stale

HEADLINES = ("fid", "acc_cnn_pct", "acc_mlp_pct", "acc_logreg_pct")


def headline(folder: RunFolder, protocol: str) -> dict[str, float]:
    """All measured values of one protocol, by name."""
    report = folder.read_json(f"metrics/{protocol}.json")
    found: dict[str, float] = {}
    for result in report.get("metrics", {}).values():
        if result["status"] == "measured":
            found.update(result["values"])
    return found


def format_epsilon(value: Any) -> str:
    """Three significant digits; inf for a non-private run; a dash for a figure nobody gave."""
    return "–" if value is None else f"{float(value):.3g}" if not isinstance(value, str) else value


def print_runs(results: Path) -> None:
    """One line per run and protocol."""
    runs = Store(results).runs()
    console = Console()
    if not runs:
        console.print(f"no runs in {results / 'runs'} yet; `dpgen run` makes one")
        return
    table = Table("run", "method", "dataset", "scale", "seed", "status", "ε budget", "ε proven", "ε claimed", "metrics")
    for folder in runs:
        config = folder.config
        status = folder.status()
        if status == "failed":
            status += f" ({folder.read_json('status.json').get('phase')})"
        if is_stale(config, folder.read_json("identity.json").get("source", "")):
            status += ", stale"
        epsilon = folder.read_json("ledger.json").get("epsilon") or {}
        lines = []
        for protocol in folder.protocols:
            values = headline(folder, protocol)
            figures = [f"{name} {values[name]:.1f}" for name in HEADLINES if name in values]
            lines.append(f"{protocol}: {', '.join(figures) or 'nothing measured'}")
        table.add_row(
            folder.id,
            config.method.name,
            config.dataset.name,
            config.scale.name,
            str(config.seed),
            status,
            f"{float(config.privacy.epsilon):g}",
            format_epsilon(epsilon.get("proven")),
            format_epsilon(epsilon.get("claimed")),
            "\n".join(lines),
        )
    console.print(table)

"""`dpgen runs`: what is there, in which state, at which epsilon, with which headline figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dpgen_bench.results.figures import headline
from dpgen_bench.results.store import RunFolder, Store
from dpgen_bench.specify import is_stale

HEADLINES = ("fid", "inception_score", "acc_cnn_pct", "acc_mlp_pct", "acc_logreg_pct", "acc_avg_pct")


def format_epsilon(value: Any) -> str:
    """Three significant digits; inf for a non-private run; a dash for a figure nobody gave."""
    return "–" if value is None else f"{float(value):.3g}" if not isinstance(value, str) else value


def print_runs(results: Path) -> None:
    """One line per run, with the headline figures of each protocol it was measured by."""
    runs = Store(results).runs()
    console = make_console()
    if not runs:
        console.print(f"no runs in {results / 'runs'} yet; `dpgen run` makes one")
        return
    table = Table("run", "what", "scale", "status", "ε budget", "proven", "claimed", "metrics")
    for folder in runs:
        try:
            row = describe_run(folder)
        except Exception as error:  # one damaged run must not hide the others
            row = [folder.id, f"damaged: {error}"]
        table.add_row(*row)
    console.print(table)


def describe_run(folder: RunFolder) -> list[str]:
    """The cells of one run."""
    config = folder.config
    epsilon = folder.read_json("ledger.json").get("epsilon") or {}
    return [
        folder.id,
        f"{config.method.name} {config.dataset.name} seed {config.seed}",
        config.scale.name,
        describe_status(folder),
        f"{float(config.privacy.epsilon):g}",
        format_epsilon(epsilon.get("proven")),
        format_epsilon(epsilon.get("claimed")),
        "\n".join(describe_metrics(folder, protocol) for protocol in folder.protocols),
    ]


def describe_status(folder: RunFolder) -> str:
    """The status, where it failed, how far it is, and `stale` when the method's source has changed since."""
    status = folder.status()
    if status == "failed":
        status += f" ({folder.read_json('status.json').get('phase')})"
    if is_stale(folder.config, folder.read_json("identity.json").get("source", "")):
        status += ", stale"
    return status


def describe_metrics(folder: RunFolder, protocol: str) -> str:
    """`protocol: fid 12.3, acc_cnn_pct 94.5`."""
    values = headline(folder, protocol)
    figures = [f"{name} {values[name]:.1f}" for name in HEADLINES if name in values]
    return f"{protocol}: {', '.join(figures) or 'nothing measured'}"


def make_console() -> Console:
    """As wide as the terminal; wide enough for a table where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=160)

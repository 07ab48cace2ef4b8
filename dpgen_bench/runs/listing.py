"""`dpgen runs`: what is there, in which state, at which epsilon, with which headline figures."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from dpgen_bench.privacy.events import budget_text
from dpgen_bench.privacy.ledger import unproven_reasons
from dpgen_bench.runs.config import CONF, RunSpec, compose_config
from dpgen_bench.runs.identity import is_stale
from dpgen_bench.runs.measurements import Measurement, Protocol
from dpgen_bench.runs.statistics import format_value, summarise
from dpgen_bench.runs.store import RunFolder, Store
from dpgen_bench.runs.values import mean_values, metric_values, notes, unmeasured

HEADLINES = ("fid", "inception_score", "acc_cnn_pct", "acc_mlp_pct", "acc_logreg_pct", "acc_avg_pct")


def format_epsilon(value: Any) -> str:
    """Three significant digits, from 1,000 on no decimals; inf without privacy; a dash where there is no value."""
    if value is None or isinstance(value, str):
        return value or "–"
    # 999.5 has the three digits 1.00e+03.
    return f"{value:,.0f}" if 999.5 <= float(value) < math.inf else f"{float(value):.3g}"


def epsilon_entry(epsilon: dict[str, Any] | None, name: str) -> Any:
    """A figure ("proven", "server", "claimed", "conditional") of a ledger's epsilons; None where it has none."""
    figure = (epsilon or {}).get(name)
    return figure["epsilon"] if isinstance(figure, dict) else figure


def epsilon_number(epsilon: dict[str, Any] | None, name: str) -> float | None:
    """`epsilon_entry` as a number; None where there is none, or its count failed."""
    figure = epsilon_entry(epsilon, name)
    return None if figure is None or str(figure).startswith("failed") else float(figure)


def describe_claims(epsilon: dict[str, Any]) -> str:
    """The claimed epsilon and, where the run has one, the conditional one: `9.99 (329 conditional)`."""
    claimed, conditional = (epsilon_entry(epsilon, name) for name in ("claimed", "conditional"))
    return format_epsilon(claimed) + ("" if conditional is None else f" ({format_epsilon(conditional)} conditional)")


def describe_dataset(config: DictConfig) -> str:
    """The data set's name and, of a choice of its clients, which: `debugging_mnist (suspected)`."""
    choice = config.dataset.get("select")
    return str(config.dataset.name) + (f" ({choice})" if choice else "")


def describe_proven(epsilon: dict[str, Any]) -> str:
    """The proven epsilon and, where the run has one, the one against the server: `9.99 (42 against the server)`."""
    server = epsilon_entry(epsilon, "server")
    figure = format_epsilon(epsilon.get("proven"))
    return figure + ("" if server is None else f" ({format_epsilon(server)} against the server)")


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
    ledger = folder.read_json("ledger.json")
    epsilon = ledger.get("epsilon") or ({"proven": "inf"} if is_unbounded(ledger) else {})
    return [
        folder.id,
        f"{config.method.name} {describe_dataset(config)} seed {config.seed}",
        config.scale.name,
        describe_status(folder),
        budget_text(config.privacy.epsilon),
        describe_proven(epsilon),
        describe_claims(epsilon),
        "\n".join(describe_measurement(measurement) for measurement in folder.measurements.all()),
    ]


def is_unbounded(ledger: dict[str, Any]) -> bool:
    """Whether a run proves nothing by the content of its ledger.json: it is marked as unproven, or has no noise."""
    noiseless = any(float(entry["std"]) == 0.0 and entry["times"] > 0 for entry in ledger.get("entries", []))
    return bool(unproven_reasons(ledger)) or noiseless


def describe_status(folder: RunFolder) -> str:
    """The status, where it failed, how far it is, and `stale` when the method computes something else now."""
    status = folder.status()
    if status == "failed":
        status += f" ({folder.read_json('status.json').get('phase')})"
    if is_stale(folder.config, folder.read_json("identity.json")):
        status += ", stale"
    return status


def describe_measurement(measurement: Measurement) -> str:
    """`protocol: fid 12.3, acc_cnn_pct 94.5 (mean of 3)`: headlines, or else the first figures that there are.

    A text of the protocol that differs from the one in conf/protocol is marked as changed; what was not measured is
    named.
    """
    protocol, values = measurement["protocol"], mean_values(measurement)
    shown = [name for name in HEADLINES if name in values] or list(values)[:3]
    words = ", ".join(f"{name} {format_value(values[name])}" for name in shown)
    repeats = f" (mean of {len(measurement['repeats'])})" if len(measurement["repeats"]) > 1 else ""
    changed = " (changed)" if is_changed(protocol) else ""
    missing = f"; not measured: {', '.join(unmeasured(measurement))}" if unmeasured(measurement) else ""
    return f"{protocol['name']}{changed}: {words or 'nothing measured'}{repeats}{missing}"


def is_changed(protocol: Protocol) -> bool:
    """Whether a protocol differs from the one of its name in conf/protocol now (one that is not there is not known)."""
    name = str(protocol["name"])
    return (CONF / "protocol" / f"{name}.yaml").exists() and protocol != current_protocol(name)


@lru_cache
def current_protocol(name: str) -> Protocol:
    """The protocol of that name in conf/protocol, as a report of it would hold it."""
    return RunSpec(compose_config([f"protocol={name}"]), training={}).protocol_record()


def print_metrics(folder: RunFolder) -> None:
    """All figures of the run's latest report, with the spread over repeats, and what is to be said of them."""
    measurements = folder.measurements
    measurement = max(measurements.all(), key=lambda each: measurements.file_of(each["protocol"]).stat().st_mtime)
    console = make_console()
    table = Table("figure", "value", title=f"run {folder.id}, protocol {measurement['protocol']['name']}")
    for name, values in sorted(metric_values(measurement).items()):
        table.add_row(name, summarise([values]).text())
    console.print(table)
    for note in notes(measurement):
        console.print(f"  {note}", highlight=False, soft_wrap=True)


def make_console() -> Console:
    """As wide as the terminal; wide enough for a table where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=160)

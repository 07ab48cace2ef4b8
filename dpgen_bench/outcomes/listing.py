"""Epsilons, measurements and metrics of runs as text, for the terminal, tables and the report."""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.display import metric_label, metric_with_value, relation_name
from dpgen_bench.config.spec import RunSpec
from dpgen_bench.privacy.ledger import unproven_reasons
from dpgen_bench.store.folders import RunFolder
from dpgen_bench.store.measurements import Measurement, Protocol, is_part
from dpgen_bench.store.statistics import format_value, summarise
from dpgen_bench.store.values import mean_values, metric_values, notes, unmeasured
from dpgen_bench.utils.console import Console
from dpgen_bench.utils.own_folders import own_files, own_folders
from dpgen_bench.utils.paths import CONF

MAIN_METRICS = ("fid", "inception_score", "acc_cnn_pct", "acc_mlp_pct", "acc_logreg_pct", "acc_avg_pct")


def format_epsilon(value: Any) -> str:
    """An epsilon as text: three significant digits, no decimals from 1,000, and a dash for None. Text is unchanged."""
    if value is None or isinstance(value, str):
        return value or "–"
    # .3g would format 999.5 as 1e+03.
    return f"{value:,.0f}" if 999.5 <= float(value) < math.inf else f"{float(value):.3g}"


def epsilon_entry(epsilon: dict[str, Any] | None, name: str) -> Any:
    """The value with this name, such as "proven" or "claimed", of a ledger's epsilons; None if it is missing."""
    entry = (epsilon or {}).get(name)
    return entry["epsilon"] if isinstance(entry, dict) else entry


def epsilon_number(epsilon: dict[str, Any] | None, name: str) -> float | None:
    """`epsilon_entry` as a number; None if it is missing, or if its computation failed."""
    entry = epsilon_entry(epsilon, name)
    return None if entry is None or str(entry).startswith("failed") else float(entry)


def describe_claims(epsilon: dict[str, Any]) -> str:
    """The claimed epsilon and the conditional one, if the run has one: `9.99 (329 conditional)`."""
    claimed, conditional = (epsilon_entry(epsilon, name) for name in ("claimed", "conditional"))
    return format_epsilon(claimed) + ("" if conditional is None else f" ({format_epsilon(conditional)} conditional)")


NOT_AUDITED = "not audited"


def format_certified(value: Any) -> str:
    """A certified epsilon as text, `≥ 0.64`: three significant digits, rounded down, because it is a lower bound."""
    if value is None:
        return NOT_AUDITED
    number = float(value)
    if not 0.0 < number < math.inf:
        return f"≥ {format_epsilon(number)}"
    with decimal.localcontext(prec=3, rounding=decimal.ROUND_FLOOR):
        return f"≥ {format_epsilon(float(+decimal.Decimal(repr(number))))}"


def describe_certified(epsilon: dict[str, Any]) -> str:
    """What `dpgen audit` certified: `≥ 0.64 at 95 %, 100,000 trials, level c (...)`; or that it was not audited."""
    certified = epsilon.get("certified")
    if not isinstance(certified, dict) or certified["epsilon"] is None:
        return NOT_AUDITED + (f": {certified['reason']}" if certified else "")
    return f"{format_certified(certified['epsilon'])} {describe_audit(certified)}"


def least_certified(epsilons: Iterable[dict[str, Any] | None]) -> dict[str, Any]:
    """What audits certified for runs of the same settings, by the epsilons of their ledgers: the least; {} without one.

    Runs with nothing to audit have a "reason" and no epsilon, which counts only if no run has a number.
    """
    known = [each["certified"] for each in epsilons if each and isinstance(each.get("certified"), dict)]
    numbers = [each for each in known if each["epsilon"] is not None]
    return min(numbers, key=lambda each: float(each["epsilon"]), default=known[0] if known else {})


def describe_audit(certified: dict[str, Any]) -> str:
    """How an epsilon was certified: `at 95 %, 100,000 trials, level c (Gaussian by construction, add/remove)`."""
    figure = "Gaussian by construction" if certified["figure"] == "gdp" else "model-free"
    return (
        f"at {100 * float(certified['confidence']):g} %, {certified['trials']:,} trials, level {certified['level']} "
        f"({figure}, {relation_name(certified['relation'])})"
    )


def first_stage(config: DictConfig) -> str:
    """The name of the first stage of a run, "none" without one; configs of older runs do not state it."""
    return str((config.get("init") or {}).get("name", "none"))


def setting_of(config: DictConfig, name: str, default: str = "–") -> str:
    """A setting of a run's method as text; "init" names its first stage, and "init.share" a key of its config."""
    if name == "init":
        return first_stage(config)
    return str(OmegaConf.select(config, setting_key(name), default=default))


def setting_key(name: str) -> str:
    """The key in a run's config of a setting as tables name it: a name without a dot is of the method."""
    return name if "." in name else f"method.{name}"


def describe_dataset(config: DictConfig) -> str:
    """The dataset's name and, if only some of its clients are used, which: `debugging_mnist (suspected)`."""
    selection = config.dataset.get("select")
    return str(config.dataset.name) + (f" ({selection})" if selection else "")


def describe_proven(epsilon: dict[str, Any]) -> str:
    """The proven epsilon and the one against the server, if the run has one: `9.99 (42 against the server)`."""
    server = epsilon_entry(epsilon, "server")
    proven = format_epsilon(epsilon.get("proven"))
    return proven + ("" if server is None else f" ({format_epsilon(server)} against the server)")


def is_unbounded(ledger: dict[str, Any]) -> bool:
    """Whether a run proves nothing by the content of its ledger.json: it is marked as unproven, or has no noise."""
    noiseless = any(float(entry["std"]) == 0.0 and entry["times"] > 0 for entry in ledger.get("entries", []))
    return bool(unproven_reasons(ledger)) or noiseless


def describe_measurement(measurement: Measurement) -> str:
    """A measurement in one line: `protocol: FID 12.3, Acc. CNN 94.5% (mean of 3)`.

    It has the values of `MAIN_METRICS`, or else the first three values. A protocol that differs from the one of its
    name in conf/protocol is marked as changed, and metrics that were not measured are named.
    """
    protocol, values = measurement["protocol"], mean_values(measurement)
    shown = [name for name in MAIN_METRICS if name in values] or list(values)[:3]
    text = ", ".join(metric_with_value(name, format_value(values[name])) for name in shown)
    repeats = f" (mean of {len(measurement['repeats'])})" if len(measurement["repeats"]) > 1 else ""
    changed = " (changed)" if is_changed(protocol) else ""
    missing = f"; not measured: {', '.join(unmeasured(measurement))}" if unmeasured(measurement) else ""
    return f"{protocol['name']}{changed}: {text or 'nothing measured'}{repeats}{missing}"


def is_changed(protocol: Protocol) -> bool:
    """Whether a protocol differs from the present one of its name; false if there is none."""
    name = str(protocol["name"])
    exists = (CONF / "protocol" / f"{name}.yaml").exists() or name in own_files("protocol")
    return exists and protocol != current_protocol(name)


def is_outdated(protocol: Protocol) -> bool:
    """Whether a protocol is no part of the present one of its name, which was edited since; false if there is none."""
    return is_changed(protocol) and not is_part(protocol, current_protocol(str(protocol["name"])))


def current_protocol(name: str) -> Protocol:
    """The present protocol of that name, in the form in which measurements store it."""
    return _protocol(name, own_folders())


@lru_cache
def _protocol(name: str, _: tuple[Path, ...]) -> Protocol:
    """`current_protocol`, cached for each value of `own_folders`."""
    return RunSpec(compose_config([f"protocol={name}"]), training={}).protocol_record()


def print_metrics(folder: RunFolder) -> None:
    """Print all values of the run's latest measurement, with the spread over repeats, and its notes."""
    measurements = folder.measurements
    measurement = max(measurements.all(), key=lambda each: measurements.file_of(each["protocol"]).stat().st_mtime)
    console = make_console()
    table = Table("metric", "value", title=f"run {folder.id}, protocol {measurement['protocol']['name']}")
    for name, values in sorted(metric_values(measurement).items()):
        table.add_row(metric_label(name), summarise([values]).text())
    console.print(table)
    for note in notes(measurement):
        console.print(f"  {note}", highlight=False, soft_wrap=True)


def make_console() -> Console:
    """A console as wide as the terminal, or 160 columns wide if the output is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=160)

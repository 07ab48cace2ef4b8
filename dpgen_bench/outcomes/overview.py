"""`dpgen runs`: what it states of each run, as JSON-able values by stable keys, with filters and an order."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.table import Table

from dpgen_bench.config.identity import is_stale, method_version
from dpgen_bench.outcomes.listing import (
    describe_claims,
    describe_dataset,
    describe_measurement,
    describe_proven,
    epsilon_entry,
    is_unbounded,
    make_console,
)
from dpgen_bench.privacy.events import budget_text
from dpgen_bench.runs.validation import file_problem
from dpgen_bench.store.checks import plugin_note
from dpgen_bench.store.folders import RunFolder, Store
from dpgen_bench.store.values import mean_values
from dpgen_bench.training.cost import cost_values
from dpgen_bench.utils.json_numbers import to_json
from dpgen_bench.utils.validation import suggestion

# The keys of a run, always in this order; `null` stands for what is unknown or does not exist.
KEYS = (
    *("id", "method", "dataset", "seed", "settings", "scale", "status", "phase", "error", "stale"),
    *("date", "duration_s", "step", "steps", "budget", "proven", "claimed", "conditional", "server", "certified"),
    *("delta", "relation", "unit", "noise", "parent", "protocols", "metrics", "path", "plugin"),
)
UNREADABLE, DAMAGED = "unreadable", "damaged"
SETTINGS = ("experiment=", "init", "method.", "dataset.", "privacy.")  # overrides that tell runs of a method apart

Overview = dict[str, Any]


def overviews(results: Path) -> list[Overview]:
    """An overview of each run of a folder of results, sorted by id. A run that cannot be read has its error."""
    version_of = cache(method_version)  # a plugin without version is hashed once, and not once for each run
    found = []
    for folder in Store(results).runs():
        try:
            found.append(overview(folder, version_of))
        except Exception as error:  # one unreadable run must not hide the others
            empty, problem = dict.fromkeys(KEYS), file_problem(folder)
            status, why = (DAMAGED, problem) if problem else (UNREADABLE, str(error))
            found.append({**empty, "id": folder.id, "status": status, "error": why, "path": str(folder.path)})
    return found


def overview(folder: RunFolder, version_of: Callable[[type], int | str] = method_version) -> Overview:
    """The values of one run by `KEYS`: JSON-able, with the texts "inf" and "nan" for numbers that JSON lacks.

    Args:
        version_of: gives the version of a method's class.
    """
    config, ledger, status = folder.config, folder.read_json("ledger.json"), folder.read_json("status.json")
    problem = file_problem(folder)
    state = DAMAGED if problem else folder.status()
    epsilon = ledger.get("epsilon") or ({"proven": "inf"} if is_unbounded(ledger) else {})
    progress = _progress(folder) if state == "running" else {}
    restart, measurements = config.get("restart"), folder.measurements.all()
    values = {
        "id": folder.id,
        "method": str(config.method.name),
        "dataset": describe_dataset(config),
        "seed": config.seed,
        "settings": _settings(folder),
        "scale": str(config.scale.name),
        "status": state,
        "phase": status.get("phase"),
        "error": problem or status.get("error"),
        "stale": is_stale(config, folder.read_json("identity.json"), version_of),
        "date": status.get("at"),
        "duration_s": _duration(folder, state, status),
        "step": progress.get("step"),
        "steps": progress.get("steps"),
        "budget": budget_text(config.privacy.epsilon),
        **{name: epsilon_entry(epsilon, name) for name in ("proven", "claimed", "conditional", "server", "certified")},
        **{name: config.privacy.get(name) for name in ("delta", "relation")},
        "unit": ledger.get("unit"),
        "noise": config.privacy.get("noise"),
        "parent": str(restart.run) if restart else None,
        "protocols": [str(each["protocol"]["name"]) for each in measurements],
        "metrics": {str(each["protocol"]["name"]): mean_values(each) for each in measurements},
        "path": str(folder.path),
        "plugin": plugin_note(folder) or None,
    }
    plain = to_json(values)
    assert isinstance(plain, dict)
    return plain


def print_runs(results: Path, runs: Sequence[Overview], filters: Sequence[str] = ()) -> None:
    """Print a table with one row for each run, and below it what is known of the source of each plugin.

    Args:
        filters: which runs these are, for the message if there is none.
    """
    console = make_console()
    if not runs:
        none = f"no run in {results / 'runs'} matches {' '.join(filters)}; `dpgen runs` lists all"
        console.print(none if filters else f"no runs in {results / 'runs'}; start one with `dpgen run`")
        return
    table = Table("run", "what", "scale", "status", "date", "duration", "ε budget", "proven", "claimed", "metrics")
    for run in runs:
        table.add_row(*row(run))
    console.print(table)
    for note in dict.fromkeys(run["plugin"] for run in runs if run["plugin"]):
        console.print(f"note: {note}", highlight=False, soft_wrap=True)


def row(run: Overview) -> list[str]:
    """The cells of an overview, as texts."""
    if run["status"] == UNREADABLE:
        return [run["id"], f"cannot be read: {run['error']}"]
    if run["method"] is None:
        return [run["id"], "?", "?", _describe_status(run)]
    date = "" if run["date"] is None else f"{datetime.fromisoformat(run['date']).astimezone():%Y-%m-%d %H:%M}"
    return [
        run["id"],
        "\n".join([f"{run['method']} {run['dataset']} seed {run['seed']}", *run["settings"]]),
        run["scale"],
        _describe_status(run),
        date,
        _describe_seconds(run["duration_s"]),
        run["budget"],
        describe_proven({"proven": run["proven"], "server": run["server"]}),
        describe_claims({"claimed": run["claimed"], "conditional": run["conditional"]}),
        "\n".join(describe_measurement(each) for each in RunFolder(Path(run["path"])).measurements.all()),
    ]


def _settings(folder: RunFolder) -> list[str]:
    """The overrides of a run's preset, method, first stage, data set and privacy, without its epsilon."""
    overrides = [text.lstrip("+") for text in folder.read_json("environment.json").get("overrides") or []]
    return [text for text in overrides if text.startswith(SETTINGS) and not text.startswith("privacy.epsilon=")]


def _describe_status(run: Overview) -> str:
    """The status, the phase in which the run failed or is, its step, and whether the method has changed since."""
    status: str = run["status"]
    if status == DAMAGED:
        return f"damaged: {run['error']}"
    if status == "failed":
        status += f" ({run['phase']})"
    if status == "running":
        step = "" if run["step"] is None else f" {run['step']:,} of {run['steps']:,}"
        status += f" ({run['phase']}{step})"
    return status + {True: ", stale", None: ", method not found", False: ""}[run["stale"]]


def _describe_seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def _progress(folder: RunFolder) -> dict[str, Any]:
    try:
        return folder.read_json("progress.json")
    except ValueError:  # it is being written
        return {}


def _duration(folder: RunFolder, state: str, status: Mapping[str, Any]) -> float | None:
    """Seconds of training; of a running run, the seconds since its phase began."""
    if state == "running" and "at" in status:
        return (datetime.now(UTC) - datetime.fromisoformat(status["at"])).total_seconds()
    return cost_values(folder.read_json("training.json")).get("seconds_total")


def select(runs: Iterable[Overview], filters: Sequence[str]) -> list[Overview]:
    """The runs that match every filter KEY=VALUE, where commas separate several values and * stands for any text.

    Equal numbers match, however they are written: delta=0.00001 those with 1e-5.

    A key is one of `KEYS`, "protocol", or a setting of the runs' configs, such as method.batch_size.

    Raises:
        ValueError: for a key that neither `KEYS` nor any run has.
    """
    found = list(runs)
    for text in filters:
        key, _, values = text.partition("=")
        known = {run["id"]: _value(run, key) for run in found}
        names = [*KEYS, "protocol"]
        if key not in names and ("." not in key or (found and set(known.values()) == {None})):
            raise ValueError(
                f"expected a filter by {', '.join(names)} or a setting such as privacy.epsilon, got {key!r}"
                f"{suggestion(key, names)}."
            )
        found = [run for run in found if _matches(known[run["id"]], values.split(","))]
    return found


def _value(run: Overview, key: str) -> Any:
    if key == "protocol":
        return tuple(run["protocols"] or ())
    if key in KEYS:
        value = run[key]
        return tuple(value) if isinstance(value, list | dict) else value
    try:
        value = OmegaConf.select(RunFolder(Path(run["path"])).config, key)
    except Exception:  # an unreadable run matches nothing
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def _matches(value: Any, patterns: Sequence[str]) -> bool:
    texts = [str(item) for item in value] if isinstance(value, tuple) else [_text(value)]
    return any(
        fnmatch.fnmatchcase(text, pattern) or _are_equal_numbers(text, pattern)
        for text in texts
        for pattern in patterns
    )


def _are_equal_numbers(text: str, pattern: str) -> bool:
    try:
        return float(text) == float(pattern)
    except ValueError:
        return False


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def ordered(runs: Sequence[Overview], key: str, reverse: bool = False) -> list[Overview]:
    """The runs in the order of a key or a metric; those without a value, or with NaN, come last.

    Args:
        key: one of `KEYS`, a metric, or PROTOCOL:METRIC, a metric as that protocol measures it.

    Raises:
        ValueError: for a key that is neither one of `KEYS` nor a metric of a run, or for a metric that several
            protocols measured, whose values are not comparable.
    """
    by_protocol = [
        (protocol, metric) for run in runs for protocol, values in (run["metrics"] or {}).items() for metric in values
    ]
    metrics = sorted({name for protocol, metric in by_protocol for name in (metric, f"{protocol}:{metric}")})
    aliases = {"duration": "duration_s", "epsilon": "proven", "progress": "step"}
    name = aliases.get(key, key)
    if name not in KEYS and name not in metrics:
        known = [*KEYS, *aliases, *metrics]
        raise ValueError(f"expected --sort by one of {', '.join(known)}, got {key!r}{suggestion(key, known)}.")

    protocols = sorted({protocol for protocol, metric in by_protocol if name in (metric, f"{protocol}:{metric}")})
    if name not in KEYS and len(protocols) > 1:
        raise ValueError(
            f"expected --sort by a metric of one protocol, such as {protocols[0]}:{name}, got {name!r}, which the runs "
            f"have by {', '.join(protocols)}."
        )

    def value_of(run: Overview) -> Any:
        if name in KEYS:
            return run[name]
        return (run["metrics"] or {}).get(protocols[0], {}).get(name.removeprefix(f"{protocols[0]}:"))

    def has_value(run: Overview) -> bool:
        value = value_of(run)
        return value is not None and str(value) != "nan"  # which has no place in an order

    def rank(value: Any) -> tuple[bool, float, str]:
        """Numbers in their order, texts such as "inf" that are numbers among them, then other texts."""
        try:
            return False, float(value), ""
        except (TypeError, ValueError):
            return True, 0.0, str(value)

    present = [run for run in runs if has_value(run)]
    missing = [run for run in runs if not has_value(run)]
    return [*sorted(present, key=lambda run: rank(value_of(run)), reverse=reverse), *missing]

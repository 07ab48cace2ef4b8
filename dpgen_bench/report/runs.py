"""The report's runs: which folders are runs, damaged or copies, and the content of each run's panel.

Nothing of a run's private/ folder is read.
"""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dpgen_bench.config.display import counted, dataset_name, method_name, metric_label, relation_name
from dpgen_bench.config.identity import is_stale
from dpgen_bench.config.spec import identify
from dpgen_bench.outcomes.listing import (
    describe_certified,
    describe_claims,
    describe_dataset,
    describe_proven,
    epsilon_number,
    format_epsilon,
    is_changed,
)
from dpgen_bench.outcomes.soundness import release_problems
from dpgen_bench.privacy.events import budget_text
from dpgen_bench.privacy.ledger import unproven_reasons
from dpgen_bench.privacy.sampling import sampling_from_dict
from dpgen_bench.report.text import (
    describe_value,
    described,
    flatten,
    once,
    small_picture,
)
from dpgen_bench.runs.validation import file_problem, problem_of
from dpgen_bench.store.checks import plugin_note
from dpgen_bench.store.folders import REMOVED, ReadableRun, RunFolder
from dpgen_bench.store.measurements import Measurement
from dpgen_bench.store.records import Record, read_record, record_of, record_paths
from dpgen_bench.store.statistics import summarise
from dpgen_bench.store.values import metric_values, notes
from dpgen_bench.training.cost import cost_values
from dpgen_bench.utils.errors import describe_error

_ID = re.compile("[0-9a-f]{12}")


@dataclass
class Run:
    """One folder below results/runs, or one record.

    id: the hash of its identity.json, or the folder's name if that file cannot be read.
    state: finished, running, failed, preempted, interrupted, empty, damaged or duplicate.
    remark: why it is damaged, how it failed, what it is a duplicate of.
    unread: files of reports that cannot be read.
    """

    folder: ReadableRun
    id: str
    state: str = "damaged"
    remark: str = ""
    config: DictConfig = field(default_factory=lambda: OmegaConf.create({}))
    identity: dict[str, Any] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    unread: int = 0

    @property
    def sound(self) -> bool:
        """Whether its files could be read and it is not a copy."""
        return self.state not in ("damaged", "duplicate")

    @property
    def epsilon(self) -> dict[str, Any]:
        return self.ledger.get("epsilon") or {}

    @property
    def unit(self) -> str:
        return str(self.ledger.get("unit", "record"))

    @property
    def stale(self) -> bool:
        """Whether its method is known to have changed since."""
        return bool(is_stale(self.config, self.identity))

    @property
    def budget(self) -> str:
        """The epsilon of the budget as text: `10`, `inf` or `none`."""
        return budget_text(self.identity["privacy"]["epsilon"])


def read_runs(results: Path) -> list[Run]:
    """Every folder below results/runs and every record of a run that has no finished folder, sorted by name.

    A finished folder has the measurements of its run's record that its own do not cover. Copies are marked; a file with
    the name of a run is damaged.
    """
    runs = _read_folders(results)
    finished = {run.id: run for run in runs if run.state == "finished"}
    recorded = []
    for name, path in record_paths(results).items():
        if name in finished:
            finished[name].measurements += _recorded_only(finished[name].folder, path)
        else:
            recorded.append(_read_record(path))
    ids = {run.id for run in recorded if run.sound}
    # An unfinished folder of a recorded run adds nothing that the record does not have.
    return sorted([*(run for run in runs if run.id not in ids), *recorded], key=lambda run: run.folder.id)


def _read_folders(results: Path) -> list[Run]:
    candidates = (path for path in (results / "runs").glob("*") if path.is_dir() or _ID.fullmatch(path.name))
    places = sorted(candidates, key=lambda path: path.name)
    runs = [
        _read(RunFolder(path)) for path in places if not path.name.startswith(".") and not (path / REMOVED).exists()
    ]
    sound = sorted((run for run in runs if run.sound), key=lambda run: (run.folder.id != run.id, run.folder.id))
    first: dict[str, Run] = {}
    for run in sound:  # of several copies, the folder named by the id comes first
        kept = first.setdefault(run.id, run)
        if kept is not run:
            run.state, run.remark = "duplicate", f"duplicate of {run.id}"
        elif run.folder.id != run.id:
            run.remark = "; ".join(part for part in (run.remark, f"its folder is called {run.folder.id}") if part)
    return runs


def _recorded_only(folder: ReadableRun, path: Path) -> list[Measurement]:
    """The measurements of a run's record by protocols that the run's finished folder does not cover.

    If the record is of another fit, they say so, as those of a record of two fits do.
    """
    try:
        record = read_record(path)
    except ValueError:  # the run's panel says so
        return []
    fit = {} if record.is_of(folder) else {"fit": {"cost": record.content["cost"]}}
    return [{**fit, **each} for each in record.measurements.all() if not folder.measurements.covered(each["protocol"])]


def _read_record(path: Path) -> Run:
    try:
        record = read_record(path)
    except ValueError:
        return Run(Record(path, {}), path.stem, remark="its record cannot be read, or is of another schema")
    run = Run(record, record.id)
    if problem := problem_of(record):
        run.remark = problem
        return run
    return _read_content(run)


def _read(folder: RunFolder) -> Run:
    run = Run(folder, folder.id)
    try:
        if problem := file_problem(folder):  # `read_runs` handles folders whose name is not the id
            run.remark = problem
            return run
        if not (folder.path / "config.yaml").exists():
            raise ValueError("expected a config.yaml, got none: it ended before it began, or is no run")
        files = len(list((folder.path / "metrics").glob("*.json")))
    except Exception as error:  # a damaged run must not hide the others
        run.remark = describe_error(error)
        return run
    run = _read_content(run)
    run.unread = max(files - len(run.measurements), 0)
    return run


def _read_content(run: Run) -> Run:
    """The run with all that its folder or record says; damaged, with the reason, if something cannot be read."""
    folder = run.folder
    try:
        run.identity = folder.read_json("identity.json")
        if not run.identity:
            raise ValueError("expected an identity.json, got none: its settings cannot be trusted")
        run.config, run.ledger = folder.config, folder.read_json("ledger.json")
        run.id = identify(run.identity)
        run.training = folder.read_json("training.json")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the store warns of unreadable measurements; the run's panel counts them
            run.measurements = folder.measurements.all()
        if folder.done and not run.ledger:
            raise ValueError("expected the ledger.json of a finished run, got none")
        _ = run.budget, values_by_protocol(run), cost_values(run.training), ledger_panel(run)
        _ = epsilon_number(run.epsilon, "proven")
        run.state, run.remark = folder.status(), ""
        if run.state == "failed" and isinstance(folder, RunFolder):
            run.remark = f"{folder.failed_during()}: "
        if run.state in ("failed", "preempted"):
            run.remark += str(folder.read_json("status.json").get("error", ""))
    except Exception as error:  # a damaged run must not hide the others
        run.state, run.remark = "damaged", describe_error(error)
    return run


def values_by_protocol(run: Run) -> list[dict[str, Any]]:
    """All values of a run, one entry for each of its measurements, with their notes."""
    return [
        {
            "protocol": str(protocol["name"]) + (" (changed)" if is_changed(protocol) else ""),
            "samples": f"{protocol.get('num_samples', '?')} samples, {counted(len(measurement['repeats']), 'drawing')}",
            "values": [
                [metric_label(name), described(summarise([values]))]
                for name, values in sorted(metric_values(measurement).items())
            ],
            "notes": notes(measurement),
        }
        for measurement in run.measurements
        for protocol in [measurement["protocol"]]
    ]


def panel(run: Run) -> dict[str, Any]:
    """The content of one run's panel as JSON-able values, the same for the same files."""
    content: dict[str, Any] = {"id": run.id, "folder": run.folder.id, "state": run.state, "remark": run.remark}
    if not run.sound:
        return content
    config, environment = run.config, run.folder.read_json("environment.json")
    unread = counted(run.unread, "measurement cannot be read and is", "measurements cannot be read and are")
    remarks = [f"{unread} ignored"] if run.unread else []
    return {
        **content,
        "method": method_name(str(config.method.name)),
        "dataset": dataset_name(describe_dataset(config)),
        "seed": str(config.seed),
        "scale": str(config.scale.name),
        "epsilon": run.budget,
        "stale": run.stale,
        "command": _command(run, environment),
        "settings": [[name, describe_value(value)] for name, value in sorted(_settings(run).items())],
        "ledger": ledger_panel(run),
        "reports": values_by_protocol(run),
        "cost": [
            [metric_label(name), described(summarise([[value]]))]
            for name, value in sorted(cost_values(run.training).items())
        ],
        "environment": _environment(environment),
        "remarks": remarks,
        "evidence": _evidence(run),
        **_picture(run),
    }


def _evidence(run: Run) -> list[str]:
    """Who measured a run that has a record, and who made it again; [] without one."""
    try:
        record = record_of(run.folder)
    except ValueError as error:
        return [str(error)]
    if record is None:
        return []
    by = record.content["measured_by"]
    other = [] if record.is_of(run.folder) else ["These values are of another fit than those of the run's record."]
    lines = [*other, f"Measured by {by['name']}, {by['date']}."]
    return lines + [f"Made again by {each['name']}, {each['date']}." for each in record.content.get("verified", [])]


def _picture(run: Run) -> dict[str, Any]:
    """{"picture": data URI, "alt": text}; without a picture, "alt" says why."""
    path = run.folder.picture
    if not path.exists():
        return {"picture": "", "alt": "no samples yet"}
    try:
        picture = small_picture(path)
    except (OSError, ValueError) as error:
        return {"picture": "", "alt": f"{path.name} cannot be read ({type(error).__name__})"}
    what = f"{method_name(str(run.config.method.name))}, {describe_dataset(run.config)}, ε budget {run.budget}"
    return {"picture": picture, "alt": f"grid of generated samples: {what}, seed {run.config.seed}"}


def _settings(run: Run) -> dict[str, Any]:
    """The run's identity as flat keys, without those that the panel shows elsewhere and without the class's path."""
    flat = flatten(run.identity)
    shown = ("method._target_", "method.name", "dataset.name", "scale.name", "seed")
    return {name.removeprefix("method."): value for name, value in flat.items() if name not in shown}


def _command(run: Run, environment: Mapping[str, Any]) -> dict[str, str]:
    """{"line": the command that made the run, or "" if the run did not store it; "note": limits of its use}."""
    overrides = environment.get("overrides")
    if overrides is None:
        return {"line": "", "note": "The run did not store its command: it was made before commands were stored."}
    notes = []
    if run.stale:
        notes.append("The code has changed since: the command makes another run now.")
    if any(str(override).endswith("=PATH") for override in overrides):
        notes.append("Replace PATH by your own folder.")
    return {"line": shlex.join(["dpgen", "run", *map(str, overrides)]), "note": " ".join(notes)}


def _environment(environment: Mapping[str, Any]) -> list[list[str]]:
    """Device and versions, without the machine's name and without paths; at the end, other devices that were used."""
    machine, packages = environment.get("machine") or {}, environment.get("packages") or {}
    values = {
        "device": machine.get("device"),
        "cores": machine.get("cores"),
        "torch threads": machine.get("torch_threads"),
        "python": environment.get("python"),
        "commit": environment.get("commit"),
        **packages,
    }
    before = dict.fromkeys(str(each["machine"]["device"]) for each in environment.get("earlier", []))
    if others := [device for device in before if device != machine.get("device")]:
        values["device before"] = ", ".join(others)
    return [[name, str(value)] for name, value in values.items() if value is not None]


def ledger_panel(run: Run) -> dict[str, Any]:
    """A run's ledger: the approved releases, their epsilons under both relations, and all warnings."""
    ledger, epsilon = run.ledger, run.epsilon
    if not ledger:
        return {}
    budget, unit = ledger["budget"], run.unit
    mode = ledger["noise"]["mode"]
    # Reasons about epsilon are left out here, because the reason for an unproven epsilon follows.
    warnings_ = [f"not for release: {why}" for why in release_problems(ledger) if "epsilon" not in why]
    reasons = unproven_reasons(ledger)
    if epsilon.get("reason", "; ".join(reasons)) != "; ".join(reasons):
        warnings_.append(f"nothing is proven: {epsilon['reason']}")
    warnings_ += [f"nothing is proven: {reason}" for reason in reasons]
    # Failures that the user stated to be independent of records: epsilon holds if the statement is true.
    stated = [failure for failure in ledger.get("failures", []) if failure.get("statement")]
    warnings_ += [
        f"{failure['what']}: that this did not depend on records is {failure['statement']}" for failure in stated
    ]
    warnings_ += [f"warning: {warning}" for warning in ledger.get("warnings", [])]
    warnings_ += [note] if (note := plugin_note(run.folder)) else []
    # Epsilons under other assumptions come with the assumption, or with the reason why there is none.
    conditional, server = epsilon.get("conditional"), epsilon.get("server")
    if isinstance(conditional, dict):
        warnings_.append(f"ε conditional holds only {conditional['assumption']}")
    if isinstance(server, dict) and "reason" in server:
        warnings_.append(f"against the server: {server['reason']}")
    table = epsilon.get("table") or {}
    accountants = once(name for row in table.values() for name in row)
    return {
        "pairs": [
            ["budget", f"ε {budget_text(budget['epsilon'])}, δ {float(budget['delta']):g}"],
            ["relation, accountant", f"{relation_name(budget['relation'])}, {budget['accountant']}"],
            ["unit", f"{unit}; {ledger['records']:,} {unit}s"],
            ["ε proven", describe_proven(epsilon)],
            ["ε claimed", describe_claims(epsilon)],
            ["ε certified", describe_certified(epsilon)],
            ["noise", f"{mode}: not for release" if release_problems(ledger) else str(mode)],
        ],
        "warnings": once(warnings_),
        "events": {
            "head": ["release", "bound", "C", "noise std", "sampling", "rate", "times", "executed", "noise by", "from"],
            "rows": [_event(entry) for entry in ledger["entries"]],
        },
        "table": {
            "head": ["ε by", *accountants],
            "rows": [
                [relation_name(relation), *(format_epsilon(row.get(name)) for name in accountants)]
                for relation, row in table.items()
            ],
        },
        "out_of_scope": ledger.get("out_of_scope", []),
    }


def _event(entry: Mapping[str, Any]) -> list[str]:
    bound, sampling = entry["bound"], sampling_from_dict(entry["sampling"])
    rows = f", {bound['rows']} rows" if bound.get("rows", 1) != 1 else ""
    how = "" if entry["calibrated"] == "nothing" else f" ({entry['calibrated']} calibrated)"
    return [
        str(entry["name"]),
        f"{bound['kind']}{rows}",
        f"{float(bound['C']):g}",
        f"{float(entry['std']):.6g}{how}",
        str(sampling),
        f"{float(entry['sampling']['rate']):.6g}",
        f"{entry['times']:,}",
        f"{entry['executed']:,}",
        str(entry.get("noise_at", "server")),
        str(entry["inherited_from"] or "this run"),
    ]

"""Makes the record of a finished run: its JSON and its picture, without paths of the machine that made it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from dpgen_bench.outcomes.listing import is_outdated
from dpgen_bench.store.folders import ReadableRun, RunFolder
from dpgen_bench.store.measurements import Measurement, protocol_hash
from dpgen_bench.store.pictures import thumbnail
from dpgen_bench.store.records import DATA_ROOT, SCHEMA, Record, moved, read_record, record_file, same_name
from dpgen_bench.store.values import mean_values, unmeasured
from dpgen_bench.utils.files import write_atomic

# Where files are on this machine; what a record has in place of these entries of a config.
_PLACES = {"results": "results", "data_root": DATA_ROOT, "dataset.root": DATA_ROOT, "dataset.path": "PATH"}
LOG_DIGITS = 4


def make_record(folder: RunFolder, by: str, log: Sequence[str] = ()) -> tuple[Record, bytes]:
    """The record of a finished and measured run, not yet written, and its picture as PNG.

    Args:
        by: who measured it.
        log: scalars of the public log to keep, rounded to four significant digits.

    Raises:
        ValueError: if the run is not finished, has noise for release, is not measured, has no samples, or lacks a
            scalar of `log`.
    """
    if not folder.done:
        raise ValueError(f"expected a finished run, got {folder.id}, which is {folder.status()}; finish it first.")
    if folder.config.privacy.noise == "os":
        raise ValueError(
            f"expected a run with privacy.noise=seeded, for benchmarks on public data, got {folder.id} with "
            "privacy.noise=os: its id is a hash of its records, and no epsilon covers its metric values; `dpgen "
            "export` writes what may be published of it."
        )
    measurements = folder.measurements.all()
    if not measurements:
        raise ValueError(f"expected a measured run, got {folder.id} without a measurement; `dpgen evaluate` measures.")
    outdated, samples = left_out(measurements), folder.path / "samples.npz"
    if not samples.exists():
        raise ValueError(f"expected run {folder.id} to have a samples.npz, got none; `dpgen evaluate` draws samples.")
    picture, rows = thumbnail(samples)
    environment = folder.read_json("environment.json")
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "id": folder.id,
        "command": environment.pop("overrides", None),
        "measured_by": {"name": by, "date": _today()},
        "verified": [],
        "picture_rows": rows,
        "config": _portable_config(folder),
        "identity": folder.read_json("identity.json"),
        "ledger": folder.read_json("ledger.json"),
        "cost": folder.read_json("training.json"),
        "environment": environment,
        "measurements": [_with_hash(each) for each in measurements if each not in outdated],
    }
    if steps := {str(step): _step(folder.at_step(step)) for step in folder.steps()}:
        content["steps"] = steps
    if log:
        content["log"] = {name: _scalar(folder, name) for name in log}
    path = record_file(folder.path.parent.parent, str(folder.config.method.name), folder.id)
    return Record(path, json.loads(json.dumps(content))), picture


def left_out(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Those of a run's measurements that its record does not have: by protocols that were edited since.

    If there is no other, none is left out, and the check of the record says what to do.
    """
    outdated = [each for each in measurements if is_outdated(each["protocol"])]
    return outdated if len(outdated) < len(measurements) else []


def write_record(record: Record, picture: bytes) -> Path:
    """Write a record and its picture; returns the JSON file. The picture comes first, so that no record lacks it."""
    write_atomic(record.picture, picture)
    write_atomic(record.path, json.dumps(record.content, indent=1, ensure_ascii=False) + "\n")
    return record.path


def verify(record: Record, again: Record) -> Record:
    """The record with a note that somebody else made its run again: by whom, when, and by how much values differ.

    The values of the first measurement stay.

    Args:
        again: the record of the same run, made by somebody else.

    Raises:
        ValueError: if both are by the same person or of the same folder, or share no measurement.
    """
    by = again.content["measured_by"]["name"]
    if _same_author(record, again):
        raise ValueError(
            f"expected a re-run of {record.id} by somebody else than {by!r}, who measured it, or a measurement "
            "by a protocol that the record lacks; --overwrite replaces the record."
        )
    if record.is_of(again):
        raise ValueError(
            f"expected a re-run of {record.id}, got the run that {record.content['measured_by']['name']!r} recorded: "
            "its seconds are the same; make the run in a folder of results of your own."
        )
    differences: dict[str, dict[str, float]] = {}
    for measurement in record.measurements.all():
        other = again.measurements.of(measurement["protocol"])
        mine, theirs = mean_values(measurement), mean_values(other)
        if common := {name: theirs[name] - mine[name] for name in mine if name in theirs}:
            differences[str(measurement["protocol"]["name"])] = common
    if not differences:
        raise ValueError(f"expected a re-run of {record.id} that is measured by one of its protocols, got none.")
    note = {"name": by, "date": _today(), "differences": differences, "environment": again.content["environment"]}
    others = [each for each in record.content["verified"] if same_name(each["name"]) != same_name(by)]
    return Record(record.path, {**record.content, "verified": [*others, note]})


def add_record(folder: RunFolder, by: str, log: Sequence[str] = (), overwrite: bool = False) -> tuple[Record, bytes]:
    """The record of a run as it is to be written: a new one, or the existing one with what this run adds to it.

    To a record by the same name, the run adds measurements by protocols, or of their metrics, that the record has none
    of; to one by another name, a verification.

    Args:
        overwrite: replace an existing record, and its verification, by one that has all of its metrics and scalars.

    Raises:
        ValueError: as `make_record`, `complete` and `verify` do; or if the record that replaces another has less.
    """
    record, picture = make_record(folder, by, log)
    if not record.path.exists():
        return record, picture
    if overwrite:
        _expect_nothing_lost(record)
        return record, picture
    existing = read_record(record.path)
    add = complete if _further(existing, record) and _same_author(existing, record) else verify
    return add(existing, record), existing.picture.read_bytes()


def complete(record: Record, again: Record) -> Record:
    """The record with the measurements of a run of the same id by further protocols: FID where it has accuracies.

    The values that it has stay. Measurements of another fit than the record's say so, as the weights of two fits can
    differ by rounding between machines: `fit` has its cost and environment, and the date of this record of it.

    Args:
        again: the record of the same run, which may be of another fit, made by the same person.

    Raises:
        ValueError: if the record is verified, because the verification does not cover the added values; or if `again`
            has a log and is of another fit.
    """
    if verified := record.content["verified"]:
        raise ValueError(
            f"expected a record without a verification, got {record.id}, verified by {verified[0]['name']!r} without "
            "these measurements; record a run with another seed."
        )
    content, added = dict(record.content), _further(record, again)
    if again.content["cost"] == record.content["cost"]:
        for key in again.content.keys() & {"steps", "log"}:
            content[key] = {**content.get(key, {}), **again.content[key]}
    elif "log" in again.content:
        raise ValueError(
            f"expected --log of the fit that the record of {record.id} is of, got another fit of the run; leave --log "
            "out, or replace the record with --overwrite."
        )
    else:
        fit = {"date": _today(), "cost": again.content["cost"], "environment": again.content["environment"]}
        added = [{**measurement, "fit": fit} for measurement in added]
    return Record(record.path, {**content, "measurements": [*content["measurements"], *added]})


def _further(record: Record, again: Record) -> list[Measurement]:
    """The measurements of `again` with values of a metric of which no measurement of `record` has any.

    Measurements by protocols of the same name are compared.
    """
    metrics: dict[str, set[str]] = {}
    for each in record.measurements.all():
        metrics.setdefault(each["protocol"]["name"], set()).update(_measured(each))
    return [
        each for each in again.measurements.all() if not _measured(each) <= metrics.get(each["protocol"]["name"], set())
    ]


def _measured(measurement: Measurement) -> set[str]:
    """The metrics that have values in every repeat of a measurement."""
    return set(measurement["protocol"]["metrics"]) - set(unmeasured(measurement))


def _expect_nothing_lost(replacement: Record) -> None:
    """Raise ValueError if the replacement lacks a metric or a scalar of the record that it replaces.

    A record that cannot be read has nothing to lose.
    """
    try:
        existing = read_record(replacement.path)
    except ValueError:
        return
    if lost := _further(replacement, existing):
        protocol = lost[0]["protocol"]
        raise ValueError(
            f"expected a run with every metric of the record that it replaces, got {replacement.id} without its "
            f"{', '.join(protocol['metrics'])} by the protocol {protocol['name']!r}; measure it with `dpgen evaluate "
            f"{replacement.id} protocol={protocol['name']}`, or delete {existing.path}."
        )
    for step in existing.steps():
        if step not in replacement.steps() or _further(replacement.at_step(step), existing.at_step(step)):
            raise ValueError(
                f"expected a run with every metric of the kept steps of the record that it replaces, got "
                f"{replacement.id} without those of step {step}; measure them with `dpgen evaluate {replacement.id} "
                f"runtime.measure_kept=true` if the run kept its checkpoint, or delete {existing.path}."
            )
    if scalars := sorted(existing.content.get("log", {}).keys() - replacement.content.get("log", {}).keys()):
        raise ValueError(
            f"expected every scalar of the log of the record that {replacement.id} replaces, got it without its scalar "
            f"{scalars[0]!r}; add --log {scalars[0]}."
        )


def _same_author(record: Record, again: Record) -> bool:
    return same_name(record.content["measured_by"]["name"]) == same_name(again.content["measured_by"]["name"])


def _portable_config(folder: RunFolder) -> dict[str, Any]:
    config = folder.config
    data = str(config.get("data_root"))
    for key, place in _PLACES.items():
        if OmegaConf.select(config, key) is not None:
            OmegaConf.update(config, key, place)
    plain = moved(OmegaConf.to_container(config), data, DATA_ROOT)
    return {str(key): value for key, value in plain.items()}


def _with_hash(measurement: Measurement) -> Measurement:
    return {"protocol_hash": protocol_hash(measurement["protocol"]), **measurement}


def _step(run: ReadableRun) -> dict[str, Any]:
    return {"step": run.read_json("step.json"), "measurements": [_with_hash(each) for each in run.measurements.all()]}


def _scalar(folder: RunFolder, name: str) -> list[float]:
    values: np.ndarray = folder.log_values(name)
    if not len(values):
        raise ValueError(f"expected the log of run {folder.id} to have the scalar {name!r}, got none of that name.")
    return [float(f"{value:.{LOG_DIGITS}g}") for value in values]


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def default_name(path: Path) -> str:
    """The name of who measures: git's user.name in that folder.

    Raises:
        ValueError: if git has none.
    """
    git = shutil.which("git")
    command = [str(git), "config", "user.name"]
    name = subprocess.run(command, cwd=path, capture_output=True, text=True).stdout.strip() if git else ""
    if not name:
        raise ValueError("expected a name of who measured the run, got none, and git has no user.name; use --by NAME.")
    return name

"""Why the content of a run's folder cannot be used: files that are lost, torn, edited or put in the wrong place.

One damaged folder must not hide the others, and none of its figures may enter a table or a report.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dpgen_bench.runs.config import identify
from dpgen_bench.runs.listing import epsilon_figure
from dpgen_bench.runs.store import RunFolder
from dpgen_bench.runs.values import figures, notes
from dpgen_bench.training.cost import cost_values

FILES = ("identity", "ledger", "training", "status", "environment")  # the JSON files that a run leaves
EPSILONS = ("proven", "server", "claimed", "conditional")


def damage(folder: RunFolder) -> str:
    """Why a run folder's content cannot be used, in words without a path; "" if it can, or if there is no run yet.

    Nothing is raised, whatever lies there. A report that cannot be read is no damage: it counts as not there.
    """
    return content_damage(folder) or _misplaced(folder)


def content_damage(folder: RunFolder) -> str:
    """`damage` for readers that take a run for what it holds, whatever its folder is called."""
    try:
        if not folder.path.exists():
            return ""
        if not folder.path.is_dir():
            return "it is a file, not a folder"
        return _of_files(folder)
    except OSError as error:
        return f"it cannot be read ({type(error).__name__})"


def _misplaced(folder: RunFolder) -> str:
    identity = folder.read_json("identity.json") if folder.path.exists() else {}
    holds = identify(identity) if identity else folder.id
    return "" if holds == folder.id else f"it holds run {holds}"


def _of_files(folder: RunFolder) -> str:
    read: dict[str, Any] = {}
    for name in FILES:
        try:
            read[name] = folder.read_json(f"{name}.json")
        except (ValueError, OSError):  # torn JSON, bytes that are no text, a folder in its place
            return f"{name}.json cannot be read"
        if not isinstance(read[name], dict):
            return f"{name}.json is not what a run leaves"
    has_config = (folder.path / "config.yaml").exists()
    if not read["identity"]:
        # A run writes its config, then this file, then the others: with none of them it is only not there yet.
        return "it does not say which run it is: identity.json is missing" if read["ledger"] or folder.done else ""
    if not has_config:
        return "config.yaml is missing"
    return (
        _of_config(folder, read["identity"])
        or _of_ledger(read["ledger"])
        or _of_training(read["training"])
        or _of_reports(folder)
    )


def _of_config(folder: RunFolder, identity: Mapping[str, Any]) -> str:
    """Whether config.yaml is the config that was hashed: else one of the two was edited."""
    try:
        loaded = OmegaConf.load(folder.path / "config.yaml")
        config = OmegaConf.to_container(loaded) if isinstance(loaded, DictConfig) else None
    except Exception:  # yaml's errors have no common base with OmegaConf's, and a folder in its place is an OSError
        return "config.yaml cannot be read"
    if not isinstance(config, dict) or not all(isinstance(config.get(key), dict) for key in ("method", "dataset")):
        return "config.yaml is not what a run leaves"
    config["method"].pop("check", None)
    if isinstance(config.get("privacy"), dict):
        config["privacy"].pop("population", None)
    for key in ("method", "privacy", "scale", "seed"):
        if _comparable(config.get(key)) != _comparable(identity.get(key)):
            return f"config.yaml and identity.json disagree about {key}: one was edited"
    hashed = identity.get("dataset")
    for key in ("name", "select"):  # by which the data are called; the identity has other words for the rest
        if isinstance(hashed, dict) and key in hashed and config["dataset"].get(key) != hashed[key]:
            return f"config.yaml and identity.json disagree about dataset.{key}: one was edited"
    return ""


def _comparable(value: Any) -> Any:
    """The value with words for numbers that JSON does not have, of which identity.json has the words."""
    if isinstance(value, Mapping):
        return {str(key): _comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _of_ledger(ledger: Mapping[str, Any]) -> str:
    epsilon = ledger.get("epsilon") or {}
    if not isinstance(epsilon, dict):
        return "ledger.json is not what a run leaves"
    for name in EPSILONS:
        try:
            figure = epsilon_figure(epsilon, name)
        except KeyError:
            return f"the ε {name} of ledger.json is not what a run leaves"
        failed = name != "proven" and isinstance(figure, str) and figure.startswith("failed")
        # JSON has no infinity, for which the ledger writes the word.
        if figure is not None and figure != "inf" and not failed and not _is_number(figure):
            return f"the ε {name} of ledger.json is no number"
    return ""


def _of_training(training: Mapping[str, Any]) -> str:
    try:
        parts = [training.get(part, {}) for part in ("seconds", "steps", "parameters", "bytes", "counters")]
        strange = [name for part in parts for name, value in part.items() if not _is_number(value)]
        cost_values(training)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return "training.json is not what a run leaves"
    return f"{strange[0]} in training.json is no number" if strange else ""


def _of_reports(folder: RunFolder) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever uses the reports is told of those that cannot be read
            reports = folder.reports.all()
        for report in reports:
            _ = report["protocol"]["name"], notes(report)
            if strange := list(_no_numbers(figures(report))):
                return f"{strange[0]} in a report by {report['protocol']['name']} is no number"
    except (AttributeError, KeyError, TypeError, ValueError):
        return "a report of it is not what an evaluation leaves"
    return ""


def _no_numbers(found: Mapping[str, list[Any]]) -> Iterator[str]:
    # NaN and infinity are numbers that a metric may give; tables never rank them.
    return (name for name, values in found.items() if not all(_is_number(value, finite=False) for value in values))


def _is_number(value: Any, finite: bool = True) -> bool:
    """Whether it is a number that a float can hold: of JSON's NaN and Infinity, neither if `finite`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value)) or not finite
    except OverflowError:  # an integer of hundreds of digits
        return False

"""Tab completion: verbs, options, overrides and their values, tables and runs, by argcomplete.

Names are read from folders of yamls and of runs. Nothing here imports Hydra or PyTorch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from dpgen_bench.cli.values import default_results
from dpgen_bench.config.catalogue import GROUPS, names, run_ids
from dpgen_bench.runs.remembered import remembered
from dpgen_bench.tables.spec import FORMATS
from dpgen_bench.utils.own_folders import using
from dpgen_bench.utils.paths import CONF

FOLDERS = ("method", "dataset", "protocol", "experiment", "scale", "privacy", "federation")
# Values of settings that have few.
VALUES = {
    "hydra/launcher": ("basic", "joblib", "submitit_local", "submitit_slurm"),
    "privacy.noise": ("seeded", "os"),
    "privacy.relation": ("add_remove", "replace_one"),
    "privacy.accountant": ("rdp", "prv", "pld"),
    "privacy.diagnostics": ("off", "unsafe"),
    "runtime.device": ("auto", "cpu", "cuda"),
    "tracker": ("tensorboard", "wandb"),
    "runtime.progress": ("true", "false"),
    "runtime.measure_kept": ("true", "false"),
}
FILTERS = {"status": ("finished", "running", "failed", "preempted", "interrupted"), "stale": ("true", "false")}

Completer = Callable[..., Iterable[str]]


def completer(kind: str) -> Completer:
    """The function that argcomplete calls for the possible texts of an argument, such as an override or a run."""
    functions: dict[str, Callable[[str, argparse.Namespace], Iterable[str]]] = {
        "overrides": _overrides,
        "tables": lambda prefix, options: [*names("table"), "scale=quick"],
        "sweep": _sweep,
        "runs": lambda prefix, options: run_ids(_results(options)),
        "filters": _filters,
        "groups": lambda prefix, options: GROUPS,
        "formats": lambda prefix, options: _listed(prefix, FORMATS),
    }

    def complete(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
        given = tuple(getattr(parsed_args, "config_dir", None) or ())
        with using(given or remembered(_results(parsed_args)).config):
            return list(functions[kind](prefix, parsed_args))

    return complete


def _results(options: argparse.Namespace) -> Path:
    return getattr(options, "results", None) or default_results()


def _sweep(prefix: str, options: argparse.Namespace) -> list[str]:
    overrides = [each for each in _overrides(prefix, options) if each.startswith(("runtime", "hydra", "federation"))]
    return [*names("table"), "scale=quick", "scale=reduced", *overrides]


def _overrides(prefix: str, options: argparse.Namespace) -> list[str]:
    """The keys of overrides, or the values of the key in `prefix`, of which commas separate several."""
    key, equals, value = prefix.partition("=")
    if equals:
        values = names(key) if key in FOLDERS else VALUES.get(key, ())
        return [f"{key}={each}" for each in _listed(value, values)]
    return [f"{name}=" for name in [*FOLDERS, "hydra/launcher", *_settings(options)]]


def _settings(options: argparse.Namespace) -> list[str]:
    """The settings of the config, and those of the method and the dataset that are named or the default."""
    config = yaml.safe_load((CONF / "config.yaml").read_text())
    keys = [key for key in config if key not in ("defaults", "hydra", "runtime")]
    keys += [f"runtime.{key}" for key in config["runtime"]]
    defaults = {key: value for each in config["defaults"] if isinstance(each, dict) for key, value in each.items()}
    words = [word for word in getattr(options, "overrides", None) or () if isinstance(word, str)]
    chosen = dict(word.split("=", 1) for word in words if "=" in word)
    for group in ("method", "dataset", "privacy"):
        path = names(group).get(chosen.get(group, defaults[group]).split(",")[0])
        content = yaml.safe_load(path.read_text()) if path else {}
        keys += [
            f"{group}.{key}" for key in content if key not in ("name", "_target_", "check", "pretraining", "defaults")
        ]
    return keys


def _filters(prefix: str, options: argparse.Namespace) -> list[str]:
    key, equals, value = prefix.partition("=")
    if not equals:
        return [f"{name}=" for name in ("method", "dataset", "protocol", "scale", *FILTERS)]
    values = FILTERS.get(key) or (names(key) if key in FOLDERS else ())
    return [f"{key}={each}" for each in _listed(value, values)]


def _listed(prefix: str, values: Iterable[str]) -> list[str]:
    """The values after those that `prefix` already lists, separated by commas."""
    before = prefix.rpartition(",")[0]
    return [f"{before},{each}" if before else each for each in values]

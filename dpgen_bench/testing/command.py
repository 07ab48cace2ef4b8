"""`dpgen check method=NAME`: the suite on a configured method, at the size and on the data that the user chooses."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from dpgen_bench.data.datasets import DatasetSpec
from dpgen_bench.privacy.noise import Key
from dpgen_bench.specify import RunSpec, build_dataset, build_method, compose_config
from dpgen_bench.testing.bench import DataSet
from dpgen_bench.testing.errors import ConformanceError
from dpgen_bench.testing.source import read_plugin
from dpgen_bench.testing.suite import check_method, made_up_data

RECORDS = 48  # made-up ones, by default
CLIENTS = 8

LIMITS = (
    "cheats that begin only beyond the size that was checked: more records, larger draws, later releases",
    "coupling of rows in a release that is not questioned: the fast suite questions the first, the second and the last "
    "of each mechanism, --thorough twelve",
    "coupling that only rare values show, unless they are among the records that the suite tries",
    "noise that is wrong by little where few numbers are released: the statistical tests have little power there",
    "what is written into the environment of the process, and what hides in the digits of a clock",
    "data that the plugin loads by itself, and files that it writes",
    "what it prints, how long it takes and how much memory it uses",
    "access to records by other ways than attributes: closures, gc, frames, ctypes",
    "code that looks whether it is being checked: read a plugin before you believe its figures",
)


def check_configured_method(arguments: list[str]) -> int:
    """`dpgen check method=NAME [--records N] [--data] [--thorough] [--as-configured] [OVERRIDES]`.

    The yaml's `check` settings, which make a method small, are put in force unless an override names them: the method's
    own arguments, and `privacy.epsilon` for a method that can keep no finite one.

    Returns:
        0 if the method conforms, 1 if it does not. Findings in its source are warnings and change nothing.

    Raises:
        ValueError: for arguments that cannot be.
    """
    given, overrides = _parse(arguments)
    console = Console(soft_wrap=True, highlight=False)
    config = compose_config(overrides)
    named = {word.split("=")[0].lstrip("+~") for word in overrides}
    for key, value in ({} if given.as_configured else config.method.get("check") or {}).items():
        path = key if key.startswith("privacy.") else f"method.{key}"
        if path not in named:
            OmegaConf.update(config, path, value)
    dataset = build_dataset(config)
    data, clients = _data(config, dataset, given.records, given.data)
    budget = RunSpec(config, training={}).budget()
    kind = f"records of {config.dataset.name}" if given.data else "made-up records"
    console.print(f"{config.method.name}: its yaml builds {config.method['_target_']}")
    console.print(
        f"  at  {len(data)} {kind} {'x'.join(map(str, data.images.shape[1:]))}, {dataset.num_classes} classes, "
        f"{clients} clients; epsilon {budget.epsilon:g}, delta {budget.delta:g}, {budget.relation}; "
        f"seed {int(config.seed)}; {torch.get_num_threads()} threads; "
        + ("thorough" if given.thorough else "fast (--thorough checks more)")
    )
    began = time.monotonic()
    try:
        check_method(
            lambda: build_method(config),
            num_classes=dataset.num_classes,
            seed=int(config.seed),
            budget=budget,
            data=data,
            clients=clients,
            data_folders=_data_folders(config),
            thorough=given.thorough,
            tell=lambda line: console.print(f"  ok  {line}", markup=False),
        )
    except Exception as error:  # whatever a plugin does wrong is the suite's answer, not its crash
        kind = "" if isinstance(error, ConformanceError) else f"{type(error).__name__}: "
        console.print(f"  FAILED  {kind}{error}", markup=False)
        return 1
    finally:
        for finding in read_plugin(get_class(config.method["_target_"])):
            console.print(f"  WARNING  {finding}", markup=False)
    console.print(f"{config.method.name} conforms ({time.monotonic() - began:.0f} s)")
    console.print("No replay sees:\n" + "\n".join(f"  - {limit}" for limit in LIMITS), markup=False)
    return 0


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser("dpgen check", allow_abbrev=False)
    parser.add_argument("--records", type=int, help="how many records; 48 made-up ones, or all of --data, by default")
    parser.add_argument("--data", action="store_true", help="real training records of the configured dataset")
    parser.add_argument("--thorough", action="store_true", help="every neighbour, more releases questioned, more kills")
    parser.add_argument("--as-configured", action="store_true", help="without the yaml's `check` settings")
    parser.epilog = "then overrides: method=NAME, dataset=..., privacy.epsilon=..., --config-dir DIR"
    given, overrides = parser.parse_known_args(arguments)
    if given.records is not None and given.records < 2:
        raise ValueError(
            f"expected --records of at least 2, so that one can be removed and another stays; got {given.records}."
        )
    return given, overrides


def _data(config: DictConfig, dataset: DatasetSpec, records: int | None, real: bool) -> tuple[DataSet, int]:
    """The records to check on, and how many clients they belong to."""
    seed = int(config.seed)
    if not real:
        data = made_up_data(dataset.image_shape, records or RECORDS, dataset.num_classes, CLIENTS, seed)
        return data, CLIENTS
    loaded = dataset.load("train")
    n = len(loaded) if records is None else min(records, len(loaded))
    if records is not None and records > len(loaded):
        raise ValueError(
            f"expected --records of at most {len(loaded)}, the size of {config.dataset.name}, got {records}."
        )
    # Some of them: in an order of our own, because data sets may be sorted by class.
    order = np.sort(Key.seeded(f"check:{seed}").generator("records").permutation(len(loaded))[:n])
    images = loaded.images[order].float() / 255.0
    if loaded.clients is None:
        clients, owner = CLIENTS, np.arange(n) % CLIENTS
    else:
        clients, owner = int(dataset.num_clients or 0), loaded.clients.numpy()[order]
    return DataSet("", images, loaded.labels[order], np.arange(n), owner), clients


def _data_folders(config: DictConfig) -> list[str]:
    """Where the configured data lie; a generator must be sampled without them."""
    named: list[Any] = [config.get("data_root"), config.dataset.get("root"), config.dataset.get("path")]
    return sorted({str(Path(str(place)).resolve()) for place in named if place})

"""`dpgen check method=NAME`: runs the conformance suite on a configured method."""

from __future__ import annotations

import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import get_class
from omegaconf import DictConfig

from dpgen_bench.config.building import build_dataset, build_method
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.display import relation_name
from dpgen_bench.config.identity import resolved_arguments, source_fingerprint
from dpgen_bench.config.small import Replaced, make_small
from dpgen_bench.config.spec import RunSpec
from dpgen_bench.data.records import DatasetSpec
from dpgen_bench.privacy.events import budget_text
from dpgen_bench.privacy.key import Key
from dpgen_bench.store.checks import Check, is_plugin, keep_check
from dpgen_bench.testing.bench import DataSet
from dpgen_bench.testing.errors import ConformanceError
from dpgen_bench.testing.source import read_plugin
from dpgen_bench.testing.suite import check_method, random_data
from dpgen_bench.utils.console import Console
from dpgen_bench.utils.source import own_modules

RECORDS = 48  # default number of made-up records
CLIENTS = 8  # number of clients that made-up records, or records without clients, are divided among

LIMITS = (  # the same list as in docs/conformance.md
    "faults that appear only beyond the size that was checked: with more records, larger draws or later releases",
    "code that only other settings execute than those that were checked: check of the yaml replaces configured ones, "
    "which the output lists, and a run may have others",
    "coupling of rows in releases whose private functions are not called again: the fast suite calls those of the "
    "first, the second and the last release of each mechanism again, --thorough those of twelve",
    "coupling that appears only for rare values, such as an image that is all white, unless they are among the records "
    "that the suite tries",
    "votes, and other comparisons of numbers, that rounding decides: if a record is at the border, they may depend on "
    "the batch that it is computed in",
    "noise that is slightly wrong where few numbers are released: the statistical tests have little power there",
    "values that are written into the environment of the process (os.environ) or hidden in the digits of a time",
    "data that the plugin loads by itself, files that it writes, and what it prints",
    "how long the plugin takes and how much memory it uses",
    "access to records that does not ask an object for an attribute: object.__getattribute__, __closure__, gc, frames, "
    "ctypes, code executed in the namespace of a library's module, and functions implemented in C that the plugin "
    "makes and the harness calls (operator.attrgetter)",
    "private functions of harness classes that the plugin took, keys that it made, and other code that it ran before "
    "fit, when it was imported or its class was called",
    "noise that the plugin computes from the public text that seeds it, without using Key: a release minus a number "
    "that is the same in every fit looks like any other function of releases",
    "code that behaves differently when it is checked",
)


def check_configured_method(
    overrides: list[str],
    records: int | None = None,
    real: bool = False,
    thorough: bool = False,
    as_configured: bool = False,
) -> int:
    """Run the conformance suite on the method of these overrides, and print its result.

    The yaml's `check` mapping contains settings that make a method small: arguments of the method, and
    `privacy.epsilon` for a method without a finite one. They apply unless an override sets the same key. A first stage
    (`init`) has such a mapping, too.

    Args:
        records: the number of records; None: `RECORDS` made-up ones, or all real ones.
        real: use training records of the configured dataset.
        thorough: check more.
        as_configured: ignore the yaml's `check` mapping.

    Returns:
        0 if the method conforms, 1 if it does not. Warnings from its source do not change the status.

    Raises:
        ValueError: for invalid arguments.
    """
    if records is not None and records < 2:
        raise ValueError(f"expected --records of at least 2, because one of them is removed, got {records}.")
    console = Console(soft_wrap=True, highlight=False)
    config = compose_config(overrides)
    build_method(config)  # raises for a class that is not found, or whose module or arguments are wrong
    plugin = get_class(config.method["_target_"])
    overridden = {override.split("=")[0].lstrip("+~") for override in overrides}
    replaced = [] if as_configured else make_small(config, overridden)
    _build_small(config, replaced)
    dataset = build_dataset(config)
    data, clients = _data(config, dataset, records, real)
    budget = RunSpec(config, training={}).budget()
    threads = torch.get_num_threads()
    kind = f"records of {config.dataset.name}" if real else "made-up records"
    console.print(f"{config.method.name}: its yaml builds {config.method['_target_']}")
    at = (
        f"{len(data)} {kind} {'x'.join(map(str, data.images.shape[1:]))}, {dataset.num_classes} classes; "
        f"epsilon {budget_text(budget.epsilon)}, delta {budget.delta:g}, {relation_name(budget.relation)}; "
        f"seed {int(config.seed)}; {threads} {'thread' if threads == 1 else 'threads'}; "
        + ("thorough" if thorough else "fast")
    )
    console.print(f"  at  {at}{'' if thorough else ' (--thorough checks more)'}")
    if replaced:
        console.print(f"  small, by `check` of the yaml: {'; '.join(map(str, replaced))}", markup=False)
    started = time.monotonic()
    failure = _failure(
        plugin,
        make_method=lambda: build_method(config),
        num_classes=dataset.num_classes,
        seed=int(config.seed),
        budget=budget,
        data=data,
        clients=clients,
        class_names=dataset.class_names,
        data_folders=_data_folders(config),
        thorough=thorough,
        echo=lambda line: console.print(f"  ok  {line}", markup=False),
    )
    if failure:
        console.print(f"  FAILED  {failure}", markup=False)
    for warning in [*map(str, read_plugin(plugin)), *_about_switches(replaced)]:
        console.print(f"  WARNING  {warning}", markup=False)
    if is_plugin(config.method["_target_"]):
        checked = f"{at}{', as configured' if as_configured else ''}"
        # A run has other values of these than the suite, and those do not select other code.
        smaller = {each.path.split(".")[1] for each in replaced if each.path.startswith("method.")}
        smaller -= {each.path.split(".")[1] for each in replaced if each.is_switch}
        resolved = resolved_arguments(plugin, config.method)
        arguments = {key: value for key, value in resolved.items() if key not in {"_target_", "name", *smaller}}
        today = f"{datetime.now(UTC):%Y-%m-%d}"
        result = Check(config.method["_target_"], not failure, today, checked, arguments)
        keep_check(Path(str(config.results)), source_fingerprint(plugin), result)
    if failure:
        return 1
    console.print(f"{config.method.name} conforms ({time.monotonic() - started:.0f} s)")
    console.print("The suite cannot detect:\n" + "\n".join(f"  - {limit}" for limit in LIMITS), markup=False)
    return 0


def _failure(plugin: type, **arguments: Any) -> str:
    """Run the suite; the rule that is broken, or the error of the method with its line. "" if the method conforms."""
    try:
        check_method(**arguments)
    except ConformanceError as error:
        return f"{error}{_where(error, plugin)}"
    except (Exception, SystemExit) as error:  # any error of a plugin is a result of the suite, not a crash
        return f"{type(error).__name__}: {error}{_where(error, plugin)}"
    return ""


def _build_small(config: DictConfig, replaced: list[Replaced]) -> None:
    """Build the method with its small settings, so that an error names the mapping that they are from.

    Raises:
        ValueError: if the method refuses them.
    """
    try:
        build_method(config)
    except ValueError as error:
        changes = "; ".join(map(str, replaced))
        raise ValueError(f"{error} It is `check` in its yaml that sets {changes}; correct it.") from error


def _about_switches(replaced: list[Replaced]) -> list[str]:
    """A warning about small settings that may select other code than the configured ones."""
    switches = [each for each in replaced if each.is_switch]
    if not switches:
        return []
    return [
        f"`check` of the yaml sets {'; '.join(map(str, switches))}: code that only the configured values execute was "
        "not checked; set them on the command line, or use --as-configured"
    ]


def _where(error: BaseException, plugin: type) -> str:
    """The last line of the plugin's own modules that the error passed through; no text if there is none."""
    files = {str(path) for path, _ in own_modules(plugin.__module__).values()}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _data(config: DictConfig, dataset: DatasetSpec, records: int | None, real: bool) -> tuple[DataSet, int]:
    """The records to run the method on, and the number of clients that they belong to."""
    seed = int(config.seed)
    if not real:
        data = random_data(dataset.image_shape, records or RECORDS, dataset.num_classes, CLIENTS, seed)
        return data, CLIENTS
    loaded = dataset.load("train")
    n = len(loaded) if records is None else min(records, len(loaded))
    if records is not None and records > len(loaded):
        raise ValueError(
            f"expected --records of at most {len(loaded)}, the size of {config.dataset.name}, got {records}."
        )
    # The subset is random because datasets may be sorted by class.
    order = np.sort(Key.seeded(f"check:{seed}").generator("records").permutation(len(loaded))[:n])
    images = loaded.images[order].float() / 255.0
    if loaded.clients is None:
        clients, owner = CLIENTS, np.arange(n) % CLIENTS
    else:
        clients, owner = int(dataset.num_clients or 0), loaded.clients.numpy()[order]
    return DataSet("", images, loaded.labels[order], np.arange(n), owner), clients


def _data_folders(config: DictConfig) -> list[str]:
    """The folders of the configured data, which the suite hides while it samples from a generator."""
    folders: list[Any] = [config.get("data_root"), config.dataset.get("root"), config.dataset.get("path")]
    return sorted({str(Path(str(folder)).resolve()) for folder in folders if folder})

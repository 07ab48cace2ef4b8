"""From a config to the identity of a run: what is hashed into its id, and whether its code has changed since."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from dpgen_bench.data.datasets import DatasetSpec
from dpgen_bench.federation.settings import Settings, settings
from dpgen_bench.method import Method, Scale
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.runs.identity import method_version, resolved_arguments
from dpgen_bench.runs.store import Store
from dpgen_bench.utils.validation import check_types

# Raised when the harness changes in a way that changes what training produces: ids of older runs then differ.
TRAINING_VERSION = 2
# Raised when the harness changes in a way that changes figures: those of older reports are then measured anew.
EVALUATION_VERSION = 2

T = TypeVar("T")

CONF = Path(__file__).resolve().parents[2] / "conf"


@dataclass(frozen=True)
class RunSpec:
    """A resolved config with its identity. `training` is exactly what the id hashes.

    The dataset and the budget are each built once, and checked when they are.
    """

    config: DictConfig
    training: dict[str, Any]
    _built: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def id(self) -> str:
        return identify(self.training)

    @property
    def seed(self) -> int:
        return int(self.config.seed)

    def dataset(self) -> DatasetSpec:
        return self._once("dataset", lambda: build_dataset(self.config))

    def method(self) -> Method:
        """A new instance each time: what `fit` leaves in one must not reach the accounting of its run."""
        return build_method(self.config)

    def budget(self) -> Budget:
        return self._once("budget", self._read_budget)

    def _once(self, name: str, build: Callable[[], T]) -> T:
        if name not in self._built:
            self._built[name] = build()
        built: T = self._built[name]
        return built

    def _read_budget(self) -> Budget:
        privacy = self.config.privacy
        try:
            if isinstance(privacy.epsilon, bool) or isinstance(privacy.delta, bool):
                raise TypeError
            epsilon = None if privacy.epsilon is None else float(privacy.epsilon)
            delta = float(privacy.delta)
        except (TypeError, ValueError):
            raise ValueError(
                "expected numbers for privacy.epsilon (or null for no budget) and privacy.delta, got "
                f"{privacy.epsilon!r}, {privacy.delta!r}."
            ) from None
        return Budget(epsilon, delta, privacy.relation, privacy.accountant)

    def new_ledger(self, records: int) -> Ledger:
        """An empty ledger for `records` records under this config's budget."""
        privacy = self.config.privacy
        population = population_of(self.config) if privacy.noise == "os" else None
        return Ledger(
            self.budget(), records, noise=privacy.noise, diagnostics=privacy.diagnostics, population=population
        )

    def protocol_record(self) -> dict[str, Any]:
        """What a report's figures depend on besides the generator: the protocol as written, and EVALUATION_VERSION."""
        written = OmegaConf.to_container(self.config.protocol)
        assert isinstance(written, dict)
        if written.get("batch_statistics") is None:  # so that figures from before the option keep their protocol
            written.pop("batch_statistics", None)
        return {**_canonical(written), "evaluation_version": EVALUATION_VERSION}

    def federation(self) -> Settings:
        return settings(self.config.get("federation") or {})  # runs from before the federated setting have none

    def scale(self) -> Scale:
        return Scale(self.config.scale.name, self.config.scale.max_steps)


def identify(training: dict[str, Any]) -> str:
    """The run id of what a run is, as `RunSpec.training` and the run's identity.json have it."""
    text = json.dumps(training, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def compose_config(overrides: list[str]) -> DictConfig:
    """The config that `dpgen run` would get from these overrides, `--config-dir DIR` (also `=DIR`) included."""
    directory, rest, queue = None, [], list(overrides)
    while queue:
        word = queue.pop(0)
        if word in ("--config-dir", "-cd"):
            directory = queue.pop(0) if queue else None
        elif word.startswith("--config-dir="):
            directory = word.split("=", 1)[1]
        else:
            rest.append(word)
    if directory is not None:
        rest.append(f"hydra.searchpath=[file://{Path(directory).resolve()}]")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", rest)


def build_spec(config: DictConfig, planned: bool = False) -> RunSpec:
    """Resolve and check a config, and work out the run's identity.

    Identity: the method's resolved arguments and its version (see `runs.identity`), dataset, privacy, scale, seed,
    parent run and TRAINING_VERSION. Not: protocol, device, paths, launcher, experiment names, the population's name,
    where the programs of clients run (but faults that are played, if there are any).

    Args:
        planned: the run is not made now, and the parent that it names by its whole id need not be there yet.

    Raises:
        ValueError: for a value that no run can have (the budget is checked here, before any data is read).
    """
    OmegaConf.resolve(config)
    for key in ("method", "dataset", "privacy", "scale", "protocol", "federation"):
        if not isinstance(config.get(key), DictConfig):
            raise ValueError(f"expected a config group {key!r}, got {config.get(key)!r}; see conf/{key}/.")
    if isinstance(config.seed, bool) or not isinstance(config.seed, int) or config.seed < 0:
        raise ValueError(f"expected seed to be an integer >= 0, got {config.seed!r}.")
    spec = RunSpec(config, training={})
    spec.new_ledger(records=0)
    population_of(config)
    spec.scale()
    method = type(spec.method())
    played = spec.federation().faults
    check_evaluation(config)
    training = {
        "method": resolved_arguments(method, config.method),
        "dataset": spec.dataset().identity(),
        "privacy": hashed_privacy(config),
        "scale": OmegaConf.to_container(config.scale),
        "seed": config.seed,
        "restart": _restart(config, planned),
        "version": method_version(method),
        "training_version": TRAINING_VERSION,
    }
    if played.any:  # what a federation plays changes what is trained; where clients run does not
        training["faults"] = asdict(played)
    return replace(spec, training=_canonical(training))


def hashed_privacy(config: DictConfig) -> dict[str, Any]:
    """The part of `privacy` that a run's identity has: without the name of the population, which changes no release."""
    privacy = OmegaConf.to_container(config.privacy)
    assert isinstance(privacy, dict)
    return {str(key): value for key, value in privacy.items() if key != "population"}


def population_of(config: DictConfig) -> str:
    """Whose records a config is about: `privacy.population`, else the data set's name and where it lies.

    Raises:
        ValueError: for a name that is no text, or blank.
    """
    named, dataset = config.privacy.get("population"), config.dataset
    if named is None:
        place = dataset.get("path") or dataset.get("root")
        return str(dataset.get("name", "?")) + (f" at {Path(str(place)).resolve()}" if place else "")
    if not isinstance(named, str) or not named.strip():
        raise ValueError(
            f"expected privacy.population to be a name, or null for the data set's name and path, got {named!r}."
        )
    return named.strip()


PROTOCOL_KEYS = {"name", "num_samples", "labels", "rounding", "floor", "batch_statistics", "repeats", "metrics"}


def check_evaluation(config: DictConfig) -> None:
    """Check what a config says of measuring: its protocol, and the number of processes.

    Raises:
        ValueError: for a protocol that cannot be, or an entry that no protocol has.
    """
    protocol, workers = config.protocol, config.runtime.get("workers")
    if unknown := sorted(set(map(str, protocol)) - PROTOCOL_KEYS):
        raise ValueError(f"expected entries {', '.join(sorted(PROTOCOL_KEYS))} in a protocol, got {unknown}.")
    name = protocol.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
        raise ValueError(f"expected protocol.name to be a word that can name a file, got {name!r}.")
    if not isinstance(protocol.get("metrics"), DictConfig):
        raise ValueError(f"expected protocol.metrics to name metrics, got {protocol.get('metrics')!r}.")
    floor = protocol.get("floor")
    if floor is not None and not (_is_integer(floor) and 0 <= floor <= 255):
        raise ValueError(f"expected protocol.floor to be null or an integer in 0..255, got {floor!r}.")
    batch = protocol.get("batch_statistics")
    if batch is not None and not (_is_integer(batch) and batch >= 2):
        raise ValueError(
            "expected protocol.batch_statistics to be null (running statistics) or an integer >= 2, the images in a "
            f"batch, got {batch!r}."
        )
    for key, default in (("num_samples", None), ("repeats", 1)):
        value = protocol.get(key, default)
        if not _is_integer(value) or value < 1:
            raise ValueError(f"expected protocol.{key} to be an integer >= 1, got {value!r}.")
    for key, known in (("labels", ("balanced", "uniform")), ("rounding", ("uint8", "none"))):
        if protocol.get(key, known[0]) not in known:
            raise ValueError(f"expected protocol.{key} to be {' or '.join(known)}, got {protocol.get(key)!r}.")
    if workers is not None and not (_is_integer(workers) and workers >= 1):
        raise ValueError(f"expected runtime.workers to be null or an integer >= 1, got {workers!r}.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _restart(config: DictConfig, planned: bool) -> dict[str, str] | None:
    """The parent by its whole id, however it was abbreviated."""
    if not config.restart:
        return None
    if not isinstance(config.restart.run, str):  # an id such as 12e456789012 is read as a number
        raise ValueError(
            f"expected restart.run to be a run's id as text, got the number {config.restart.run!r}; put the id into "
            "quotes: 'restart={run: \"ID\", checkpoint: last}'."
        )
    named = config.restart.run
    whole = planned and re.fullmatch("[0-9a-f]{12}", named)
    run = named if whole else Store(Path(str(config.results))).find(named).id
    return {"run": run, "checkpoint": str(config.restart.get("checkpoint", "last"))}


def build_dataset(config: DictConfig) -> DatasetSpec:
    """The dataset of a config; its `name` is a label and no argument."""
    return _build(config.dataset, "dataset", drop=())


def build_method(config: DictConfig) -> Method:
    """The method of a config, without the keys that are the harness's own (`name`, `check`)."""
    return _build(config.method, "method", drop=("name", "check"))


def _build(group: DictConfig, what: str, drop: tuple[str, ...]) -> Any:
    arguments = {key: value for key, value in group.items() if key not in drop}
    plain = OmegaConf.to_container(group)
    assert isinstance(plain, dict)
    try:
        cls = get_class(group["_target_"])
    except Exception:  # what is wrong with the name, or the file behind it, is said below
        cls = object
    check_types(cls, {str(key): value for key, value in plain.items() if key in arguments}, what)
    try:
        return instantiate(arguments, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        raise ValueError(f"{what} {group.get('name', '?')!r} cannot be built: {cause}") from error


def _canonical(value: Any) -> Any:
    """The same JSON for 10 and 10.0, and a word for infinity."""
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, float):
        if math.isinf(value):
            return "inf"
        return int(value) if value.is_integer() else value
    return value

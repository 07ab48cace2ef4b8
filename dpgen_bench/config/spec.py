"""Turns composed configs into `RunSpec`s: checked, with the run's dataset, method, budget and id."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpgen_bench.config.building import (
    build_dataset,
    build_method,
    check_complete,
    first_stage_identity,
)
from dpgen_bench.config.identity import method_version, resolved_arguments
from dpgen_bench.config.runtime import check_runtime, precision_of
from dpgen_bench.data.records import DatasetSpec
from dpgen_bench.federation.settings import Settings, settings
from dpgen_bench.method import Method, Scale
from dpgen_bench.pretraining.pretrained import FirstStage, Pretrained, plugin_of
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.store.folders import Store

# Increased when a change of the harness changes what training produces; ids of older runs then differ.
TRAINING_VERSION = 2
# Increased when a change of the harness changes metric values; runs with older measurements are then measured again.
EVALUATION_VERSION = 2

# Seeds are below this number, because PyTorch's generators take 64 bits with a sign.
SEEDS = 2**63

T = TypeVar("T")


@dataclass(frozen=True)
class RunSpec:
    """A resolved config with the identity of its run.

    The dataset, the budget and an instance of the method that is never fitted are built and checked at their first use,
    once.

    Args:
        config: the resolved config.
        training: the run's identity: exactly what its id is the hash of.
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
        """A new instance of the method at each call, so that `fit` cannot change the instance used for accounting."""
        return build_method(self.config)

    def _unfitted(self) -> Method:
        """The instance of which only the class and what it declares are read."""
        return self._once("method", self.method)

    def method_class(self) -> type[Method]:
        """The class that the method's yaml names."""
        return type(plugin_of(self._unfitted()))

    def first_stage(self) -> FirstStage | None:
        """The first stage with which the method is pretrained, if any; an instance that makes no release."""
        return method.stage if isinstance(method := self._unfitted(), Pretrained) else None

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
        except (TypeError, ValueError, OverflowError):
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
            self.budget(),
            records,
            noise=privacy.noise,
            diagnostics=privacy.diagnostics,
            population=population,
            public_data=self.public_data(),
        )

    def public_data(self) -> str | None:
        """What the method declares to use besides the records, such as "fonts"; None if it uses nothing else.

        Raises:
            ValueError: for a declaration that is no text.
        """
        declared = getattr(self._unfitted(), "public_data", None)
        if declared is not None and (not isinstance(declared, str) or not declared.strip()):
            raise ValueError(
                f"expected {self.config.method.name}.public_data to be text, such as 'fonts', or None, got "
                f"{declared!r}; name the public data that the method uses."
            )
        return declared

    def protocol_record(self) -> dict[str, Any]:
        """The protocol and EVALUATION_VERSION, which together with the generator determine the metric values."""
        protocol = OmegaConf.to_container(self.config.protocol)
        assert isinstance(protocol, dict)
        if protocol.get("batch_statistics") is None:  # so that older measurements, without this option, stay valid
            protocol.pop("batch_statistics", None)
        return {**_canonical(protocol), "evaluation_version": EVALUATION_VERSION}

    def federation(self) -> Settings:
        return settings(self.config.get("federation") or {})  # configs of older runs have no federation

    def scale(self) -> Scale:
        return Scale(self.config.scale.name, self.config.scale.max_steps)


def identify(training: dict[str, Any]) -> str:
    """The run id: a hash of the run's identity, which is `RunSpec.training` and the content of identity.json."""
    text = json.dumps(training, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def build_spec(config: DictConfig, planned: bool = False) -> RunSpec:
    """Resolve and check a config, and compute the identity of its run.

    The identity has the method's resolved arguments and its version (see `config.identity`), dataset, privacy, scale,
    seed, parent run, TRAINING_VERSION and, if there are any, simulated faults and a precision other than fp32. It does
    not depend on protocol, device, paths, launcher, names of experiments, the population's name, or where clients run.

    Args:
        planned: the run is only planned: a parent that `restart.run` names by its whole id need not exist yet.

    Raises:
        ValueError: for an invalid value. The budget is checked here, before any data is read.
        LookupError: if no run, or more than one, matches `restart.run`.
    """
    check_complete(config)
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise ValueError(
            f"expected values of the config that can be resolved, got {str(error).splitlines()[0]}; correct the "
            "${...} in the override or the yaml."
        ) from None
    for key in ("method", "dataset", "privacy", "scale", "protocol", "federation"):
        if not isinstance(config.get(key), DictConfig):
            raise ValueError(f"expected a config group {key!r}, got {config.get(key)!r}; see conf/{key}/.")
    _check_keys(config)
    check_runtime(config)
    if not _is_integer(config.seed) or not 0 <= config.seed < SEEDS:
        raise ValueError(f"expected seed to be an integer in [0, 2**63), got {config.seed!r}; write seed=0.")
    spec = RunSpec(config, training={})
    spec.new_ledger(records=0)
    population_of(config)
    spec.scale()
    method = spec.method_class()
    faults = spec.federation().faults
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
    # Without a first stage, simulated faults and a lower precision, ids are those of runs from before these existed.
    precision = precision_of(config)
    training |= {"init": first_stage_identity(first, config)} if (first := spec.first_stage()) else {}
    training |= {"faults": asdict(faults)} if faults.any else {}
    training |= {"precision": precision} if precision != "fp32" else {}
    return replace(spec, training=_canonical(training))


def _check_keys(config: DictConfig) -> None:
    """Check that `~KEY` or a user's yaml removed no setting that every run needs, and that folders are text.

    Raises:
        ValueError: for the first one.
    """
    needed = ["seed", "restart", "data_root", "results", "method.name", "dataset.name", "scale.name", "scale.max_steps"]
    needed += [f"privacy.{key}" for key in ("epsilon", "delta", "relation", "accountant", "noise", "diagnostics")]
    for path in needed:
        *group, key = path.split(".")
        content = config[group[0]] if group else config
        if key not in content:
            raise ValueError(f"expected a value of {path}, got none; write {path}=VALUE, or add it to the yaml.")
    for key in ("data_root", "results"):
        if not isinstance(config[key], str | None) or (key == "results" and not config.results):
            raise ValueError(f"expected {key} to be a folder, got {config[key]!r}; write {key}=FOLDER.")


def hashed_privacy(config: DictConfig) -> dict[str, Any]:
    """The part of `privacy` in a run's identity: all but the name of the population, which changes no release."""
    privacy = OmegaConf.to_container(config.privacy)
    assert isinstance(privacy, dict)
    return {str(key): value for key, value in privacy.items() if key != "population"}


def population_of(config: DictConfig) -> str:
    """The name of the population that the records are of: `privacy.population`, else the dataset's name and path.

    Raises:
        ValueError: if `privacy.population` is not text, or blank.
    """
    population, dataset = config.privacy.get("population"), config.dataset
    if population is None:
        path = dataset.get("path") or dataset.get("root")
        return str(dataset.get("name", "?")) + (f" at {Path(str(path)).resolve()}" if path else "")
    if not isinstance(population, str) or not population.strip():
        raise ValueError(
            f"expected privacy.population to be a name, or null for the dataset's name and path, got {population!r}."
        )
    return population.strip()


PROTOCOL_KEYS = {"name", "num_samples", "labels", "rounding", "floor", "batch_statistics", "repeats", "metrics"}
# Entries of a protocol that are one of several words. The first is the default, for a protocol without the entry.
PROTOCOL_CHOICES = {"labels": ("balanced", "uniform"), "rounding": ("uint8", "none")}


def protocol_choice(protocol: DictConfig, key: str) -> str:
    """The value of an entry of `PROTOCOL_CHOICES`, by default the first."""
    value: str = protocol.get(key, PROTOCOL_CHOICES[key][0])
    return value


def check_evaluation(config: DictConfig) -> None:
    """Check the settings of evaluation, which are the protocol's.

    Raises:
        ValueError: for an invalid value, or an unknown entry of the protocol.
    """
    protocol = config.protocol
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
    for key, known in PROTOCOL_CHOICES.items():
        if (word := protocol_choice(protocol, key)) not in known:
            raise ValueError(f"expected protocol.{key} to be {' or '.join(known)}, got {word!r}.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _restart(config: DictConfig, planned: bool) -> dict[str, str] | None:
    """The parent run by its whole id, which `restart.run` may abbreviate, and its checkpoint; None without a parent."""
    if not config.restart:
        return None
    usage = "'restart={run: \"ID\", checkpoint: last}'"
    if not isinstance(config.restart, DictConfig) or not {"run"} <= set(config.restart) <= {"run", "checkpoint"}:
        raise ValueError(
            f"expected restart to be null, or a run and its checkpoint, got {config.restart!r}; write {usage}."
        )
    if not isinstance(config.restart.run, str):  # yaml reads an id such as 12e456789012 as a number
        raise ValueError(
            f"expected restart.run to be a run's id as text, got {config.restart.run!r}; put the id into "
            f"quotes: {usage}."
        )
    prefix = config.restart.run
    is_whole = re.fullmatch("[0-9a-f]{12}", prefix)
    run = prefix if planned and is_whole else Store(Path(str(config.results))).find(prefix).id
    return {"run": run, "checkpoint": str(config.restart.get("checkpoint", "last"))}


def _canonical(value: Any) -> Any:
    """The value as JSON in one form: 10.0 becomes 10, and infinity the text "inf"."""
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, float):
        if math.isinf(value):
            return "inf"
        return int(value) if value.is_integer() else value
    return value

"""Builds the dataset and the method of a config, with checks of what a user can have mistyped."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from dpgen_bench.config.identity import NOT_ARGUMENTS, resolved_arguments
from dpgen_bench.data.records import DatasetSpec
from dpgen_bench.method import Method
from dpgen_bench.pretraining.pretrained import VERSION as PRETRAINING_VERSION
from dpgen_bench.pretraining.pretrained import FirstStage, Pretrained
from dpgen_bench.training.signals import Preempted
from dpgen_bench.utils.classes import find_target
from dpgen_bench.utils.paths import CONF
from dpgen_bench.utils.validation import check_types, suggestion

# What a message proposes for a value that a yaml leaves open (`???`): by the name of the entry and its key.
EXAMPLES = {
    ("npz", "path"): "FILE.npz",
    ("???", "name"): "KMNIST",  # of dataset=torchvision
    ("image_folder", "path"): "FOLDER",
    ("image_folder", "image_size"): "32",
}


def build_dataset(config: DictConfig) -> DatasetSpec:
    """The dataset of a config.

    Raises:
        ValueError: if the class or its arguments are invalid.
    """
    return _build(config.dataset, "dataset", drop=())


def build_method(config: DictConfig) -> Method:
    """The method of a config, pretrained if the config has a first stage.

    Raises:
        ValueError: if a class or its arguments are invalid, another class has the name of a method of the bench, or the
            method's yaml does not say how it is pretrained.
    """
    _expect_own_name(config)
    method: Method = _build(config.method, "method", drop=NOT_ARGUMENTS)
    if not has_first_stage(config):
        return method
    changes, stated = config.method.get("pretraining"), f"init={config.init.get('name')}: expected "
    if isinstance(changes, str):
        raise ValueError(
            f"{stated}a method that can be pretrained, got {config.method.name!r}: {changes}; use init=none."
        )
    if not isinstance(changes, DictConfig):
        raise ValueError(
            f"{stated}the yaml of the method {config.method.name!r} to have `pretraining`, the settings that differ "
            f"when it is pretrained, got {changes!r}; use init=none, or add `pretraining: {{}}` if it trains networks "
            "in a loop of ctx.steps."
        )
    changed = OmegaConf.merge(config.method, changes)
    assert isinstance(changed, DictConfig)
    stage: FirstStage = _build(config.init, "init", drop=NOT_ARGUMENTS)
    return Pretrained(method, stage, _build(changed, "method", drop=NOT_ARGUMENTS))


def _expect_own_name(config: DictConfig) -> None:
    """Check that a plugin does not have the name of a method of the bench, as whose values its own would be read.

    Raises:
        ValueError: if it has.
    """
    name, target = str(config.method.get("name")), config.method.get("_target_")
    own = _target_of_bench(name)
    if own not in (None, target):
        raise ValueError(
            f"expected a name of its own for the method {target}, got method.name={name!r}, which is that of the "
            f"bench's {own}; give it another `name` in its yaml, or write method.name=NAME."
        )


@cache
def _target_of_bench(name: str) -> str | None:
    """The class of the bench's method of this name; None if it has none."""
    path = CONF / "method" / f"{name}.yaml"
    is_own = re.fullmatch(r"\w+", name) and path.is_file()
    return str(OmegaConf.select(OmegaConf.load(path), "_target_")) if is_own else None


def has_first_stage(config: DictConfig) -> bool:
    """Whether a first stage releases images; configs of older runs do not state it.

    Raises:
        ValueError: if `init` is not of a yaml in conf/init.
    """
    init = config.get("init")
    if init is None:
        return False
    if not isinstance(init, DictConfig) or not init.get("name"):
        raise ValueError(f"expected a config group 'init' with a name, got {init!r}; see conf/init/.")
    return bool(init.name != "none")


def first_stage_identity(stage: FirstStage, config: DictConfig) -> dict[str, Any]:
    """The part of a first stage, which is that of the config, and of the pretraining in a run's identity."""
    arguments = resolved_arguments(type(stage), config.init)
    return {
        **arguments,
        "pretraining": OmegaConf.to_container(config.method.pretraining),
        "version": PRETRAINING_VERSION,
    }


def check_complete(config: DictConfig, prefix: str = "") -> None:
    """Check that every value which a yaml leaves open (`???`) is set.

    Raises:
        ValueError: for the values that are not; it says what to write.
    """

    def open_values(content: Any, path: str, group: str) -> list[tuple[str, str]]:
        """Paths of the open values, each with an example of its override."""
        if isinstance(content, dict):
            name = str(content.get("name", group))
            return [pair for key, item in content.items() for pair in open_values(item, f"{path}.{key}", name)]
        key = path.rsplit(".", 1)[-1]
        return [(path[1:], f"{path[1:]}={EXAMPLES.get((group, key), 'VALUE')}")] if content == "???" else []

    missing = open_values(OmegaConf.to_container(config), f".{prefix}" if prefix else "", "")
    if missing:
        paths, examples = zip(*missing, strict=True)
        raise ValueError(
            f"expected a value of {' and of '.join(paths)}, got none, and there is no default; write "
            f"{' '.join(examples)}."
        )


def _check_names(cls: Callable[..., Any], arguments: Mapping[str, Any], group: DictConfig, what: str) -> None:
    """Check that a class has the settings of its config group.

    Raises:
        ValueError: for the first setting that the class does not have.
    """
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # a class without a signature, whose arguments are checked when it is called
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key in arguments:
        if key not in parameters and not key.startswith("_"):  # _target_ and the like are read by Hydra
            raise ValueError(
                f"{what}.{key}: expected a setting of the {what} {group.get('name', '?')!r} ({', '.join(parameters)}), "
                f"got {key!r}{suggestion(key, parameters)}; correct the name, or leave it out."
            )


def _build(group: DictConfig, what: str, drop: tuple[str, ...]) -> Any:
    check_complete(group, what)
    arguments = {str(key): value for key, value in group.items() if key not in drop}
    plain = OmegaConf.to_container(group)
    assert isinstance(plain, dict)
    cls = find_target(group.get("_target_"), f"{what}._target_")
    _check_names(cls, arguments, group, what)
    if isinstance(cls, type):
        check_types(cls, {str(key): value for key, value in plain.items() if key in arguments}, what)
    try:
        return instantiate(arguments, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        raise ValueError(f"{what} {group.get('name', '?')!r} cannot be built: {cause}") from error
    except Preempted:
        raise
    except SystemExit as end:  # of the class; the command would end with its status, which may be 0
        raise ValueError(
            f"{what} {group.get('name', '?')!r} cannot be built: it raises SystemExit({end.code!r})"
        ) from end

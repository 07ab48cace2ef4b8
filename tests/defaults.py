"""Methods with the default settings of their yamls, and comments of yamls."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hydra.utils import get_class
from omegaconf import OmegaConf

from dpgen_bench.method import Method
from dpgen_bench.utils.paths import CONF

T = TypeVar("T")


@cache
def _yaml(name: str) -> dict[str, Any]:
    content = OmegaConf.to_container(OmegaConf.load(CONF / "method" / f"{name}.yaml"))
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _settings(name: str) -> dict[str, Any]:
    return {key: value for key, value in _yaml(name).items() if key not in ("name", "_target_", "check", "pretraining")}


def build(cls: type[T], **changes: Any) -> T:
    """A method, or a cheat derived from one, with the settings of its yaml, except `changes`."""
    module = next(base.__module__ for base in cls.__mro__ if base.__module__.startswith("methods."))
    return cls(**{**_settings(module.removeprefix("methods.")), **changes})


def named(name: str, **changes: Any) -> Method:
    """The method of conf/method/NAME.yaml with its settings, except `changes`."""
    method: Method = get_class(_yaml(name)["_target_"])(**{**_settings(name), **changes})
    return method


def check_settings(name: str) -> dict[str, Any]:
    """The method's settings in its yaml's `check`, which make a fit short."""
    return {
        key: value for key, value in (_yaml(name).get("check") or {}).items() if "." not in key and key != "pretraining"
    }


def comment(path: Path) -> str:
    """The comment lines of a yaml as one line."""
    lines = path.read_text().splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))

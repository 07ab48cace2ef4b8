"""Methods of the bench with the settings of their yamls, which is where defaults stand."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from omegaconf import OmegaConf

from dpgen_bench.runs.config import CONF

T = TypeVar("T")


@cache
def _settings(name: str) -> dict[str, Any]:
    settings = OmegaConf.to_container(OmegaConf.load(CONF / "method" / f"{name}.yaml"))
    assert isinstance(settings, dict)
    return {str(key): value for key, value in settings.items() if key not in ("name", "_target_", "check")}


def build(cls: type[T], **changes: Any) -> T:
    """A method, or a cheat derived from one, with the settings of its yaml but for `changes`."""
    module = next(base.__module__ for base in cls.__mro__ if base.__module__.startswith("methods."))
    return cls(**{**_settings(module.removeprefix("methods.")), **changes})

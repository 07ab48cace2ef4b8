"""Makes a method small for the conformance suite: the `check` mapping of its yaml replaces configured settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dpgen_bench.config.building import has_first_stage


@dataclass(frozen=True)
class Replaced:
    """A setting that a `check` mapping replaced.

    Attributes:
        path: its path, such as `method.steps`.
        configured: the value that a run has; None if the yaml does not state it.
        small: the value that the suite runs with.
    """

    path: str
    configured: Any
    small: Any

    @property
    def is_switch(self) -> bool:
        """Whether the values may select other code: text, true or false, null, or zero on one side only."""
        if not (_is_number(self.configured) and _is_number(self.small)):
            return type(self.configured) is not type(self.small) or isinstance(self.small, str | bool)
        return (self.configured == 0) != (self.small == 0)

    def __str__(self) -> str:
        return f"{self.path} {_text(self.small)} instead of {_text(self.configured)}"


def make_small(config: DictConfig, kept: Collection[str]) -> list[Replaced]:
    """Replace settings by those of the `check` mappings of the method and of its first stage, and return them.

    A key of a mapping is an argument, or `privacy.epsilon` for a method without a finite one. Entries of the key
    `pretraining` replace settings of the pretraining alone, which otherwise has those of the method.

    Args:
        config: is changed.
        kept: what the user set, whose values stay: paths of settings; names of groups are ignored.

    Raises:
        ValueError: for a `check` that is no mapping.
    """
    replaced = []
    for group in ("method", "init"):
        settings = _plain(OmegaConf.select(config, f"{group}.check")) or {}
        if not isinstance(settings, dict):
            raise ValueError(
                f"{group}.check: expected a mapping of settings to small values, such as {{steps: 3}}, "
                f"got {settings!r}."
            )
        for key, value in _leaves(settings, ""):
            path = key if key.startswith("privacy.") else f"{group}.{key}"
            if path.startswith("method.pretraining.") and not has_first_stage(config):
                continue
            if any(path == own or path.startswith(f"{own}.") for own in kept if "." in own):
                continue
            configured = OmegaConf.select(config, path)
            OmegaConf.update(config, path, value, force_add=True)
            if configured != value:
                replaced.append(Replaced(path, _plain(configured), value))
    return replaced


def _leaves(settings: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)

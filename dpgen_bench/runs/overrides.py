"""Words in the grammar of Hydra's overrides: what is to be one value stays one, whatever letters it holds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

_WORD = re.compile(r"[A-Za-z_][\w.+-]*(/[\w.+-]+)*", re.ASCII)
_FOLDERS = ("data_root", "results")  # where files lie on this machine, which is no part of what a run is
_PATH = re.compile(r"~?[/\\]|[A-Za-z]:[\\/]|file:")
_SPECIAL = {"null", "true", "false", "inf", "nan"}


def quote_value(value: Any) -> str:
    """A value as it stands after the = of an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(quote_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{quote_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        if _WORD.fullmatch(value) and value.lower() not in _SPECIAL:
            return value
        # Backslashes count as themselves except before a quote, the one that ends the value included.
        return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + found[2].replace("'", r"\'"), value) + "'"
    return repr(value)


def parse_override(word: str) -> Override:
    """
    Raises:
        ValueError: for a word that is no override.
    """
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        raise ValueError(
            f"expected an override such as runtime.device=cpu, got {word!r}; a value with spaces, commas or brackets "
            "goes into quotes: KEY='VALUE'."
        ) from None


def without_local_paths(overrides: Sequence[str]) -> list[str]:
    """The overrides as another machine can use them: data_root and results are dropped, any other path becomes PATH."""
    kept = []
    for word in overrides:
        override = parse_override(word)
        if override.key_or_group in _FOLDERS:
            continue
        is_path = not override.is_delete() and _PATH.match(str(override.value()))
        kept.append(f"{override.get_key_element()}=PATH" if is_path else word)
    return kept

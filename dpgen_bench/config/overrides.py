"""Writes and reads Hydra overrides (KEY=VALUE), with quotes where a value contains characters of Hydra's grammar."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException

_PLAIN_TEXT = re.compile(r"[A-Za-z_][\w.+-]*(/[\w.+-]+)*", re.ASCII)
_FOLDERS = ("data_root", "results")  # where files are on this machine: no part of a run's identity
_PATH = re.compile(r"~?[/\\]|[A-Za-z]:[\\/]|file:")
_SPECIAL = {"null", "true", "false", "inf", "nan"}


def quote_value(value: Any) -> str:
    """A value as it is written after the `=` of an override, quoted where Hydra would read it as something else."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(quote_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{quote_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        if _PLAIN_TEXT.fullmatch(value) and value.lower() not in _SPECIAL:
            return value
        # Hydra takes a backslash literally, except before a quote, including the quote that ends the value.
        return "'" + re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + match[2].replace("'", r"\'"), value) + "'"
    return repr(value)


def parse_override(text: str) -> Override:
    """The parsed override.

    Raises:
        ValueError: if the text is no override.
    """
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        raise ValueError(
            f"expected an override such as runtime.device=cpu, got {text!r}; a value with spaces, commas, brackets or "
            "letters beyond ASCII needs quotes within those of the shell: \"KEY='VALUE'\"."
        ) from None
    # Without this check privacy.epsilon=1e400 would mean no privacy. Ids under `restart` may look like numbers.
    if override.key_or_group != "restart" and (overflown := _overflown(text)) and _has_infinity(override.value()):
        raise ValueError(f"expected a number below 1.8e308, got {overflown} in {text!r}; write inf for infinity.")
    return override


def _overflown(text: str) -> str:
    """The first number in the text that is too large for a float; "" if there is none."""
    numbers = re.findall(r"(?<![\w.])\d[\d_]*\.?[\d_]*[eE]\+?\d+", text)
    return next((number for number in numbers if math.isinf(float(number))), "")


def _has_infinity(value: Any) -> bool:
    """Whether a parsed value is, or has among its items, an infinite float."""
    if isinstance(value, ChoiceSweep):
        value = value.list
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(map(_has_infinity, value))
    return isinstance(value, float) and math.isinf(value)


def split_config_dir(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The folder of `--config-dir DIR`, `--config-dir=DIR` or `-cd DIR`, or None, and the other arguments.

    Raises:
        ValueError: if the option has no folder.
    """
    directory, overrides = None, []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name not in ("--config-dir", "-cd"):
            overrides.append(argument)
            continue
        directory = value if equals else next(remaining, None)
        if not directory:
            raise ValueError(f"expected a folder after {name}, got nothing; write --config-dir DIR.")
    return directory, overrides


def without_local_paths(overrides: Sequence[str]) -> list[str]:
    """The overrides without paths of this machine.

    `data_root`, `results` and `--config-dir` are dropped; any other path becomes PATH.
    """
    portable = []
    for text in split_config_dir(overrides)[1]:
        override = parse_override(text)
        if override.key_or_group in _FOLDERS:
            continue
        is_path = not override.is_delete() and _PATH.match(str(override.value()))
        portable.append(f"{override.get_key_element()}=PATH" if is_path else text)
    return portable

"""Finds a class by its dotted path without messages, in contrast to Hydra's `get_class`, which logs an error."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pydoc import ErrorDuringImport, locate
from types import ModuleType
from typing import Any

from dpgen_bench.utils.validation import suggestion


def find_class(path: str) -> type | None:
    """The class of that dotted path; None if there is no such module or class.

    Raises:
        Exception: if the module is broken.
    """
    found = locate(path)
    return found if isinstance(found, type) else None


def find_target(path: Any, key: str) -> Callable[..., Any]:
    """The class or function that a `_target_` of a config names.

    Args:
        path: MODULE.CLASS; anything else is refused.
        key: the path of the setting, for messages.

    Raises:
        ValueError: if there is no such module or class, or its module raises when it is imported. The message names
            the file and the line that raised.
    """
    if not isinstance(path, str) or not path.strip("."):
        raise ValueError(f"{key}: expected MODULE.CLASS, got {path!r}; write `_target_: MODULE.CLASS` into the yaml.")
    try:
        found = locate(path)
    except ErrorDuringImport as error:
        reason = error.value
        frames = traceback.extract_tb(error.tb)
        where = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else error.filename
        if isinstance(reason, SyntaxError):
            where = f"{reason.filename}, line {reason.lineno}"
        raise ValueError(
            f"{key}: expected a module that can be imported, got {path!r}, which raises {type(reason).__name__}: "
            f"{reason} ({where}); correct the module, or install what it imports."
        ) from reason
    if callable(found):
        return found
    if found is not None:
        raise ValueError(f"{key}: expected a class, got {path!r}, which is {type(found).__name__}; write MODULE.CLASS.")
    module = _imported_part(path)
    if module is None:
        raise ValueError(
            f"{key}: expected MODULE.CLASS, got {path!r}, and there is no module {path.partition('.')[0]!r}; correct "
            "the name, or start the command in the folder of the module, or add that folder to PYTHONPATH."
        )
    missing = path.removeprefix(f"{module.__name__}.").partition(".")[0]
    raise ValueError(
        f"{key}: expected MODULE.CLASS, got {path!r}, and {module.__name__} has no {missing!r}"
        f"{suggestion(missing, vars(module))}; correct the name."
    )


def targets_in(value: Any) -> list[str]:
    """All names under `_target_` in a config."""
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    own = [str(value["_target_"])] if isinstance(value, dict) and "_target_" in value else []
    return own + [name for item in items for name in targets_in(item)]


def _imported_part(path: str) -> ModuleType | None:
    """The module of the longest part of a dotted path that was imported."""
    parts = path.split(".")
    found = (sys.modules.get(".".join(parts[:number])) for number in range(len(parts), 0, -1))
    return next((module for module in found if module is not None), None)

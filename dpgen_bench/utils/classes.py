"""Finds a class by its dotted path without messages, in contrast to Hydra's `get_class`, which logs an error."""

from __future__ import annotations

from pydoc import locate


def find_class(path: str) -> type | None:
    """The class of that dotted path; None if there is no such module or class.

    Raises:
        Exception: if the module is broken.
    """
    found = locate(path)
    return found if isinstance(found, type) else None

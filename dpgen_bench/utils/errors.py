"""Errors as files of a run keep them: one line, without the folders of the machine on which they were raised."""

from __future__ import annotations

import re

LONGEST = 300  # characters of an error that are kept

# Absolute paths; a quoted one may contain spaces.
_PATH = re.compile(
    r"""(['"`])(?:~?/|[A-Za-z]:[\\/])[^'"`\n]*\1|(?<![\w.~/-])(?:~?/(?=[\w.~-])|[A-Za-z]:[\\/])[^\s'"`,;:)(\]\[<>]*"""
)


def without_paths(text: str) -> str:
    """The text with `[path]` for each absolute path."""
    return _PATH.sub("[path]", text)


def describe_error(error: BaseException) -> str:
    """`ValueError: text`: the first line, without absolute paths, `LONGEST` characters at most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = ": ".join([type(error).__name__, *map(without_paths, lines[:1])])
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"

"""The text of an error as files of a run store it: one line, without absolute paths of the machine."""

from __future__ import annotations

import re

LONGEST = 300  # the largest number of characters of an error that are stored

# Absolute paths; a quoted one may contain spaces.
_PATH = re.compile(
    r"""(['"`])(?:~?/|[A-Za-z]:[\\/])[^'"`\n]*\1|(?<![\w.~/-])(?:~?/(?=[\w.~-])|[A-Za-z]:[\\/])[^\s'"`,;:)(\]\[<>]*"""
)


def without_paths(text: str) -> str:
    """The text with each absolute path replaced by `[path]`."""
    return _PATH.sub("[path]", text)


def describe_error(error: BaseException) -> str:
    """`ValueError: text`, with the first line of the text, without absolute paths, in at most `LONGEST` characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = ": ".join([type(error).__name__, *map(without_paths, lines[:1])])
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"

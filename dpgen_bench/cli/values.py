"""Reads the values of options; functions raise `ArgumentTypeError` with what was expected and what came."""

from __future__ import annotations

import argparse
import os
from fractions import Fraction
from pathlib import Path

from dpgen_bench.tables.spec import FORMATS
from dpgen_bench.utils.validation import suggestion


def default_results() -> Path:
    """The folder of results if none is given."""
    return Path(os.environ.get("DPGEN_RESULTS", "results"))


def folder(text: str) -> Path:
    """A folder that exists."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, got {text!r}; create it, or correct the path")
    return Path(text)


def formats(text: str) -> list[str]:
    """Formats of tables, separated by commas."""
    names = text.split(",")
    for each in names:
        if each not in FORMATS:
            raise argparse.ArgumentTypeError(
                f"expected formats {','.join(FORMATS)}, got {each!r}{suggestion(each, FORMATS)}"
            )
    return names


def names(text: str) -> list[str]:
    """Names separated by commas, each once."""
    return [name for name in dict.fromkeys(map(str.strip, text.split(","))) if name]


def integer(text: str) -> int:
    """An integer."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None


def number(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def rate(text: str) -> float:
    """A number or a fraction such as 1/469."""
    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"expected a number or a fraction such as 1/469, got {text!r}") from None

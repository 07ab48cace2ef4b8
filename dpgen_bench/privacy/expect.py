"""Checks of the arguments of the privacy core; each error says what was expected, what came and what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")


def expect_name(name: object, what: str) -> str:
    """`name`, if it can name a file: names of mechanisms and of private state become names of files and folders.

    Raises:
        ValueError: for anything but a letter followed by at most 99 letters, digits, underscores and hyphens.
    """
    if type(name) is not str or not _NAME.fullmatch(name):
        raise ValueError(
            f"expected the name of {what} to be a word that can name a file (a letter, then at most 99 letters, "
            f"digits, _ or -), got {name!r}. Choose such a word."
        )
    return name


def expect_integer(given: object, what: str, *, least: int = 1, do: str = "give a whole number") -> int:
    """`given` as an int; NumPy's integers are accepted, booleans and floats are not.

    Raises:
        ValueError: unless it is a whole number of at least `least`.
    """
    if isinstance(given, bool) or not isinstance(given, Integral) or int(given) < least:
        raise ValueError(f"{what}: expected a whole number >= {least}, got {given!r}; {do}.")
    return int(given)


def expect_number(given: object, what: str, *, do: str, above: float = -math.inf, most: float = math.inf) -> float:
    """`given` as a float; NumPy's numbers are accepted, booleans are not.

    Raises:
        ValueError: unless it is a number in (above, most]; a NaN is in no interval.
    """
    if isinstance(given, bool) or not isinstance(given, Real) or not above < float(given) <= most:
        raise ValueError(f"{what}: expected a number in ({above:g}, {most:g}], got {given!r}; {do}.")
    return float(given)


def expect_shape(given: Any, what: str, *, least: int) -> tuple[int, ...]:
    """`given` as a tuple of ints.

    Raises:
        ValueError: unless it is a tuple or list of whole numbers of at least `least`.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError(
            f"{what}: expected a shape, a tuple of whole numbers >= {least}, got {given!r}; give such a tuple."
        )
    return tuple(expect_integer(size, f"{what}, shape {tuple(given)!r}", least=least) for size in given)

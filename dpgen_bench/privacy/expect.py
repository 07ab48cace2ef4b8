"""Checks arguments of the privacy core; each error says what was expected, what was received and what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

MOST_NUMBERS = 2**27  # of a release: 1 GiB in float64, of which noise and sums need several
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")


def expect_name(name: object, what: str) -> str:
    """`name`, if it can name a file: names of mechanisms and of private state become names of files and folders.

    Raises:
        ValueError: for anything but a letter followed by at most 99 letters, digits, underscores and hyphens.
    """
    if type(name) is not str or not _NAME.fullmatch(name):
        raise ValueError(
            f"expected the name of {what} to be a word that can name a file (a letter, then at most 99 letters, "
            f"digits, _ or -), got {name!r}; choose such a name."
        )
    return name


def expect_integer(value: object, what: str, *, minimum: int = 1, advice: str = "give a whole number") -> int:
    """`value` as an int; NumPy's integers are accepted, booleans and floats are not.

    Raises:
        ValueError: unless it is a whole number of at least `minimum`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        raise ValueError(f"{what}: expected a whole number >= {minimum}, got {value!r}; {advice}.")
    return int(value)


def expect_number(
    value: object, what: str, *, advice: str, above: float = -math.inf, maximum: float = math.inf
) -> float:
    """`value` as a float; NumPy's numbers are accepted, booleans are not.

    Raises:
        ValueError: unless it is a number in (above, maximum]; a NaN is in no interval.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not above < float(value) <= maximum:
        raise ValueError(f"{what}: expected a number in ({above:g}, {maximum:g}], got {value!r}; {advice}.")
    return float(value)


def expect_size(numbers: int, what: str) -> None:
    """Check the size of a release before any is made: one that ended for want of memory would mark the run.

    Raises:
        ValueError: for more than 2^27 numbers.
    """
    if numbers > MOST_NUMBERS:
        raise ValueError(
            f"{what}: expected a release of at most {MOST_NUMBERS:,} numbers, got {numbers:,}; give smaller sizes."
        )


def expect_shape(value: Any, what: str, *, minimum: int) -> tuple[int, ...]:
    """`value` as a tuple of ints.

    Raises:
        ValueError: unless it is a tuple or list of whole numbers of at least `minimum`.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(
            f"{what}: expected a shape, a tuple of whole numbers >= {minimum}, got {value!r}; give such a tuple."
        )
    return tuple(expect_integer(size, f"{what}, shape {tuple(value)!r}", minimum=minimum) for size in value)

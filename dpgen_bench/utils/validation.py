"""Whether the values that a config gives to a dataclass are of the types that it declares."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_SIMPLE = {float: "a number", int: "an integer", str: "a word", bool: "true or false", type(None): "null"}


def check_types(cls: type, given: Mapping[str, Any], where: str) -> None:
    """Compare each given value with its field's type. Types it does not know, and classes without fields, pass.

    Yaml's lists stand for tuples, and integers for numbers; true and false are no numbers.

    Args:
        where: the config group that the fields are in, for the message.

    Raises:
        ValueError: naming the first field whose value is of another type.
    """
    if not is_dataclass(cls):
        return
    hints = get_type_hints(cls)
    for name, value in given.items():
        if name in hints and not _fits(value, hints[name]):
            raise ValueError(f"{where}.{name}: expected {_words(hints[name])}, got {value!r}.")


def check_bounds(of: Any, where: str, bounds: Mapping[str, Sequence[str]]) -> None:
    """Compare numeric fields of `of` with the intervals that they must lie in. None passes; of a tuple, each item.

    Args:
        bounds: interval -> names of fields, the interval as in "[1, inf)": a square bracket includes its end.

    Raises:
        ValueError: naming the first field outside its interval (a NaN is outside of all).
    """
    for interval, names in bounds.items():
        low, high = (float(end) for end in interval[1:-1].split(","))
        for name in names:
            given = getattr(of, name)
            for value in given if isinstance(given, tuple | list) else (given,):
                above = value is None or (value >= low if interval[0] == "[" else value > low)
                if not (above and (value is None or (value <= high if interval[-1] == "]" else value < high))):
                    raise ValueError(f"{where}.{name}: expected a number in {interval}, got {given!r}.")


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(value == word and type(value) is type(word) for word in arguments)
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin in (tuple, list, Sequence):
        if not isinstance(value, list | tuple):
            return False
        if origin is tuple and Ellipsis not in arguments:
            return len(value) == len(arguments) and all(map(_fits, value, arguments))
        return all(_fits(item, arguments[0]) for item in value)
    if hint in (float, int):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in _SIMPLE else True


def _words(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_words, arguments)))
    if origin is tuple and Ellipsis not in arguments:
        return f"a list of {len(arguments)}: {', '.join(map(_words, arguments))}"
    if origin in (tuple, list, Sequence):
        return f"a list, each {_words(arguments[0])}"
    return _SIMPLE.get(hint, str(hint))

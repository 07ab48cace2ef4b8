"""Validation of a dataclass's values, which come from a config, against the types and intervals of its fields."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

_SIMPLE = {float: "a number", int: "an integer", str: "a string", bool: "true or false", type(None): "null"}


@dataclass(frozen=True)
class Interval:
    """The interval of a field's values, as in `lr: Annotated[float, Interval("(0, inf)")]`.

    A square bracket includes its end, a round one excludes it. NaN is in no interval.
    """

    text: str

    def __contains__(self, value: float) -> bool:
        low, high = (float(end) for end in self.text[1:-1].split(","))
        above = value >= low if self.text[0] == "[" else value > low
        below = value <= high if self.text[-1] == "]" else value < high
        return above and below


NUMBERS = Interval("[-inf, inf]")  # of floats without an interval of their own
Finite = Annotated[float, Interval("(-inf, inf)")]
Count = Annotated[int, Interval("[1, inf)")]
CountOrZero = Annotated[int, Interval("[0, inf)")]
TwoOrMore = Annotated[int, Interval("[2, inf)")]
Positive = Annotated[float, Interval("(0, inf)")]
NonNegative = Annotated[float, Interval("[0, inf)")]
Fraction = Annotated[float, Interval("[0, 1]")]
Decay = Annotated[float, Interval("[0, 1)")]
Share = Annotated[float, Interval("(0, 1)")]  # of a budget, of which something is left


class Checked:
    """Base class of dataclasses that validate their values in `__post_init__` and store lists as tuples.

    Raises:
        ValueError: For a value that is not of its field's type, or outside its field's interval.
    """

    config_group: ClassVar[str] = "method"

    def __post_init__(self) -> None:
        check_types(type(self), vars(self), self.config_group)
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))

    def expect_one_of(self, *names: str) -> None:
        """Check that at least one of the named fields is not None.

        Raises:
            ValueError: If all of them are None.
        """
        if all(getattr(self, name) is None for name in names):
            keys = " and ".join(f"{self.config_group}.{name}" for name in names)
            raise ValueError(f"{keys} are both null: give one of them, or both.")


def expect_shards(setting: str, shards: int, n: int) -> None:
    """Raise ValueError for more shards than the n records: a shard without records trains on made-up ones."""
    if shards > n:
        raise ValueError(f"{setting}: expected K <= N = {n} records, got {shards}; lower it.")


def check_types(cls: type, values: Mapping[str, Any], group: str) -> None:
    """Check each value against the type and the interval of its field.

    Lists may stand for tuples, and integers for floats; true and false are not numbers, and neither is NaN.
    Fields of other types than numbers, strings, null, literals, unions and sequences are not checked, and neither are
    classes that are no dataclasses.

    Args:
        cls: The dataclass.
        values: Values by the name of the field.
        group: The config group of the fields, for the message.

    Raises:
        ValueError: For the first field whose value is of another type, or outside its interval.
    """
    if not is_dataclass(cls):
        return
    hints = get_type_hints(cls, include_extras=True)
    for name, value in values.items():
        if name not in hints:
            continue
        if not _has_type(value, hints[name]):
            # Hydra reads 12 as a number, and '12' in quotes that the shell leaves as a string.
            text = isinstance(value, int | float) and not isinstance(value, bool) and _has_type("", hints[name])
            advice = f"""; write "{group}.{name}='{value}'".""" if text else "."
            raise ValueError(f"{group}.{name}: expected {_describe_type(hints[name])}, got {value!r}{advice}")
        if (interval := _violated_interval(value, hints[name])) is not None:
            raise ValueError(f"{group}.{name}: expected a number in {interval.text}, got {value!r}.")


def check_keys(cls: type, content: Any, where: str) -> None:
    """Check that a mapping has the keys that a dataclass needs, and no others.

    Args:
        cls: The dataclass.
        content: The mapping.
        where: A name of the mapping, for the message.

    Raises:
        ValueError: For something other than a mapping, a key that is not a field, or a missing field without default.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{where}: expected a mapping of keys to values, got {content!r}; write it as `key: value`.")
    init_fields = [field for field in fields(cls) if field.init]
    names = [field.name for field in init_fields]
    if unknown := sorted(set(map(str, content)) - set(names)):
        raise ValueError(f"{where}: expected keys among {', '.join(names)}, got {unknown}; correct the name.")
    required = [field.name for field in init_fields if field.default is MISSING and field.default_factory is MISSING]
    if missing := [name for name in required if name not in content]:
        raise ValueError(f"{where}: expected the keys {', '.join(required)}, got none of {missing}; add them.")


def closest(name: str, names: Iterable[str], similarity: float = 0.6) -> str | None:
    """The one of the names that is most similar to `name`; None if none is, by difflib's ratio (1: the same name)."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=similarity)), None)


def suggestion(name: str, names: Iterable[str]) -> str:
    """Text such as " (did you mean 'dpgan'?)" if one of the names is close to `name`, else no text."""
    close = closest(name, names)
    return f" (did you mean {close!r}?)" if close else ""


def frozen(value: Any) -> Any:
    """The value with tuples instead of lists, at every depth."""
    if isinstance(value, Mapping):
        return {key: frozen(item) for key, item in value.items()}
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def _has_type(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _has_type(value, arguments[0])
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in arguments)
    if origin in (Union, types.UnionType):
        return any(_has_type(value, argument) for argument in arguments)
    if origin in (tuple, list, Sequence):
        if not isinstance(value, list | tuple):
            return False
        if origin is tuple and Ellipsis not in arguments:
            return len(value) == len(arguments) and all(map(_has_type, value, arguments))
        return all(_has_type(item, arguments[0]) for item in value)
    if origin is dict:
        if not isinstance(value, Mapping):
            return False
        return all(_has_type(key, arguments[0]) and _has_type(item, arguments[1]) for key, item in value.items())
    if hint in (float, int):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in _SIMPLE else True


def _violated_interval(value: Any, hint: Any) -> Interval | None:
    """The first interval that a value of the right type is outside of, or None."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        intervals = [each for each in arguments[1:] if isinstance(each, Interval)]
        return next((each for each in intervals if value not in each), None)
    if origin in (Union, types.UnionType):
        return _violated_interval(value, next(argument for argument in arguments if _has_type(value, argument)))
    if origin is tuple and Ellipsis not in arguments:
        return next(filter(None, map(_violated_interval, value, arguments)), None)
    if origin in (tuple, list, Sequence):
        return next(filter(None, (_violated_interval(item, arguments[0]) for item in value)), None)
    return NUMBERS if hint is float and value not in NUMBERS else None


def _describe_type(hint: Any) -> str:
    """A type in a message for users, such as "a list of 2: a number, a number"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _describe_type(arguments[0])
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_describe_type, arguments)))
    if origin is tuple and Ellipsis not in arguments:
        return f"a list of {len(arguments)}: {', '.join(map(_describe_type, arguments))}"
    if origin in (tuple, list, Sequence):
        return f"a list, each item {_describe_type(arguments[0])}"
    if origin is dict:
        return f"a mapping from {_describe_type(arguments[0])} to {_describe_type(arguments[1])}"
    return _SIMPLE.get(hint, str(hint))

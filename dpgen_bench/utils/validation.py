"""Whether the values that a config gives to a dataclass are of the types and in the intervals that it declares."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

_SIMPLE = {float: "a number", int: "an integer", str: "a word", bool: "true or false", type(None): "null"}


@dataclass(frozen=True)
class Interval:
    """Where a number lies, as in `lr: Annotated[float, Interval("(0, inf)")]`. A square bracket includes its end."""

    text: str

    def __contains__(self, value: float) -> bool:
        low, high = (float(end) for end in self.text[1:-1].split(","))
        above = value >= low if self.text[0] == "[" else value > low
        return above and (value <= high if self.text[-1] == "]" else value < high)  # a NaN is in no interval


Count = Annotated[int, Interval("[1, inf)")]
CountOrZero = Annotated[int, Interval("[0, inf)")]
Positive = Annotated[float, Interval("(0, inf)")]
NonNegative = Annotated[float, Interval("[0, inf)")]
Fraction = Annotated[float, Interval("[0, 1]")]
Decay = Annotated[float, Interval("[0, 1)")]


class Checked:
    """Base class of a dataclass that checks its values when it is made, and turns the lists of a config into tuples.

    Raises:
        ValueError: for a value that is not of its field's type, or outside its field's interval.
    """

    config_group: ClassVar[str] = "method"

    def __post_init__(self) -> None:
        check_types(type(self), vars(self), self.config_group)
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))

    def expect_one_of(self, *names: str) -> None:
        """Refuse to leave all of the named fields open.

        Raises:
            ValueError: if all of them are None.
        """
        if all(getattr(self, name) is None for name in names):
            keys = " and ".join(f"{self.config_group}.{name}" for name in names)
            raise ValueError(f"{keys} are both null: give one of them, or both.")


def check_types(cls: type, given: Mapping[str, Any], where: str) -> None:
    """Compare each given value with its field's type and interval. Unknown types, and classes without fields, pass.

    Yaml's lists stand for tuples, and integers for numbers; true and false are no numbers.

    Args:
        where: the config group that the fields are in, for the message.

    Raises:
        ValueError: naming the first field whose value is of another type, or outside its interval.
    """
    if not is_dataclass(cls):
        return
    hints = get_type_hints(cls, include_extras=True)
    for name, value in given.items():
        if name in hints and not _fits(value, hints[name]):
            raise ValueError(f"{where}.{name}: expected {_words(hints[name])}, got {value!r}.")
        if name in hints and (interval := _missed(value, hints[name])) is not None:
            raise ValueError(f"{where}.{name}: expected a number in {interval.text}, got {value!r}.")


def check_keys(cls: type, content: Any, where: str) -> None:
    """Compare the keys of a mapping with the fields of a dataclass that will be made of it.

    Args:
        where: what the mapping is, for the message.

    Raises:
        ValueError: for something other than a mapping, a key that is not a field, or a field without default that is
            missing.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{where}: expected a mapping of keys to values, got {content!r}; write it as `key: value`.")
    known = [each for each in fields(cls) if each.init]
    names = [each.name for each in known]
    if unknown := sorted(set(map(str, content)) - set(names)):
        raise ValueError(f"{where}: expected keys among {', '.join(names)}, got {unknown}; correct the name.")
    required = [each.name for each in known if each.default is MISSING and each.default_factory is MISSING]
    if missing := [name for name in required if name not in content]:
        raise ValueError(f"{where}: expected the keys {', '.join(required)}, got none of {missing}; add them.")


def frozen(value: Any) -> Any:
    """The value with tuples in place of lists, at every depth."""
    if isinstance(value, Mapping):
        return {key: frozen(item) for key, item in value.items()}
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(value, arguments[0])
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
    if origin is dict:
        key, item = arguments
        return isinstance(value, Mapping) and all(_fits(k, key) and _fits(v, item) for k, v in value.items())
    if hint in (float, int):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in _SIMPLE else True


def _missed(value: Any, hint: Any) -> Interval | None:
    """The interval that a value of the right type is outside of, None if there is none."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        intervals = [each for each in arguments[1:] if isinstance(each, Interval)]
        return next((each for each in intervals if value not in each), None)
    if origin in (Union, types.UnionType):
        return _missed(value, next(argument for argument in arguments if _fits(value, argument)))
    if origin is tuple and Ellipsis not in arguments:
        return next(filter(None, map(_missed, value, arguments)), None)
    if origin in (tuple, list, Sequence):
        return next(filter(None, (_missed(item, arguments[0]) for item in value)), None)
    return None


def _words(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _words(arguments[0])
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_words, arguments)))
    if origin is tuple and Ellipsis not in arguments:
        return f"a list of {len(arguments)}: {', '.join(map(_words, arguments))}"
    if origin in (tuple, list, Sequence):
        return f"a list, each {_words(arguments[0])}"
    if origin is dict:
        return f"a mapping from {_words(arguments[0])} to {_words(arguments[1])}"
    return _SIMPLE.get(hint, str(hint))

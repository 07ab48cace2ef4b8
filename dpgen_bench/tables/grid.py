"""Grid rows of a table's yaml: one entry of `rows` with `for:` stands for one entry per combination of its values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NAME = re.compile(r"\{([A-Za-z]\w*)\}")  # {p}; not {run:@parent,...}, which Hydra reads


def expand_rows(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The entries with every grid entry replaced by its rows, the values of the last axis changing fastest.

    `for: {p: [0.1, 0.2], m: [1, 3]}` makes four rows, with `{p}` and `{m}` replaced by their values in every text of
    the entry. An axis may also be a mapping from the printed text to the text in overrides:
    `for: {d: {"196": 192}}` makes `{d}` 196 under `of` and 192 everywhere else.

    Raises:
        ValueError: for an axis that is empty or unused, and for a name in braces that is not an axis.
    """
    return [row for entry in entries for row in _rows(entry)]


def _rows(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    axes = entry.get("for", {})
    if "for" in entry and not (isinstance(axes, Mapping) and axes):
        raise ValueError(
            f"expected under `for` axes and their values, got {axes!r} in the entry of {entry.get('of')}; write it as "
            "{p: [0.1, 0.2]}, or leave `for` out."
        )
    axes = {str(name): values for name, values in axes.items()}
    points = [_points(name, values, entry) for name, values in axes.items()]
    texts = {key: value for key, value in entry.items() if key != "for"}
    named, in_of = _names(texts), _names(texts.get("of"))
    if unknown := sorted(named - set(axes)):
        raise ValueError(
            f"expected in braces the axes of `for` ({', '.join(axes) or 'there are none'}), got {unknown} in the entry "
            f"of {entry.get('of')}; add the axis to `for`, or correct the name."
        )
    if unused := sorted(set(axes) - in_of):
        raise ValueError(
            f"expected each axis of `for` in braces under `of`, got none of {unused} in the entry of "
            f"{entry.get('of')}; without it several rows would answer one printed row. Name the axis there, or take "
            "it out of `for`."
        )
    for point in itertools.product(*points):
        printed = dict(zip(axes, (pair[0] for pair in point), strict=True))
        used = dict(zip(axes, (pair[1] for pair in point), strict=True))
        yield {key: _filled(value, printed if key == "of" else used) for key, value in texts.items()}


def _points(name: str, values: Any, entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    """For each value of an axis, its printed text and its text in overrides."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(values, Mapping | list | tuple):
        pairs = list(values.items()) if isinstance(values, Mapping) else [(value, value) for value in values]
    if not pairs or any(isinstance(used, Mapping | list) for _, used in pairs):
        raise ValueError(
            f"expected for the axis {name!r} a list of values, or a mapping from printed to used values, got "
            f"{values!r} in the entry of {entry.get('of')}; write at least one value, as in {{{name}: [0.1, 0.2]}}."
        )
    return [(_text(printed), _text(used)) for printed, used in pairs]


def _text(value: Any) -> str:
    """A value as yaml and Hydra write it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _names(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        return set().union(*map(_names, value.values()))
    return set(NAME.findall(value)) if isinstance(value, str) else set()


def _filled(value: Any, texts: Mapping[str, str]) -> Any:
    """The value with each name in braces replaced by its text, at every depth."""
    if isinstance(value, Mapping):
        return {key: _filled(item, texts) for key, item in value.items()}
    return NAME.sub(lambda match: texts[match[1]], value) if isinstance(value, str) else value

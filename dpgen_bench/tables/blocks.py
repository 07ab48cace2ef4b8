"""The cells of a table for readers: what a value, its published counterpart, a name and an epsilon look like."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dpgen_bench.config.display import direction
from dpgen_bench.store.statistics import Summary, format_value
from dpgen_bench.tables.lines import NONE, BuiltTable, Cell, Line
from dpgen_bench.tables.naming import (
    certified_notes,
    certified_of,
    dataset_of,
    epsilon_notes,
    epsilon_of,
    group_of,
    is_measured,
    method_of,
    rank_of,
    variant_of,
)
from dpgen_bench.tables.notes import Notes, Shared


@dataclass(frozen=True)
class Text:
    """One line of a cell, with the numbers of its notes."""

    text: str
    notes: tuple[int, ...] = ()
    bold: bool = False

    def __len__(self) -> int:
        return len(self.text) + (len(" ".join(map(str, self.notes))) + 1 if self.notes else 0)


Block = tuple[Text, ...]  # a cell: lines of text below each other


def name_block(row: Sequence[Line], shared: Shared, notes: Notes) -> Block:
    """The method, with the notes on its line, and the variant below it."""
    several = len({tuple(shared.notes_of(line)) for line in row}) > 1
    texts = [f"{dataset_of(line)}: {text}" if several else text for line in row for text in shared.notes_of(line)]
    name = Text(method_of(row[0]), notes.number(texts))
    variant = variant_of(row[0])
    return (name, Text(variant)) if variant else (name,)


def epsilon_block(row: Sequence[Line], notes: Notes) -> Block:
    """The epsilon claimed and the one proven; one line, or one for each data set where they differ."""
    return _of_data_sets(row, notes, epsilon_of, epsilon_notes)


def certified_block(row: Sequence[Line], notes: Notes) -> Block:
    """The certified epsilon; one line, or one for each data set where they differ."""
    return _of_data_sets(row, notes, certified_of, certified_notes)


def _of_data_sets(
    row: Sequence[Line], notes: Notes, text_of: Callable[[Line], str], notes_of: Callable[[Line], list[str]]
) -> Block:
    texts = {dataset_of(line): text_of(line) for line in row}
    marks = {dataset_of(line): notes_of(line) for line in row}
    measured = {dataset_of(line): text for line, text in zip(row, texts.values(), strict=True) if is_measured(line)}
    different = dict.fromkeys((measured or texts).values())
    if len(different) == 1:
        return (Text(next(iter(different)), notes.number(note for several in marks.values() for note in several)),)
    return tuple(Text(f"{text} ({data})", notes.number(marks[data])) for data, text in texts.items())


def cell_block(line: Line, metric: str, best: Best, shared: Shared, notes: Notes) -> Block:
    """The measured value and, below it in brackets, the published one with the difference."""
    cell = line.cells.get(metric, Cell())
    texts = []
    if cell.measured is not None:
        why = cell.why_no_reproduction
        caveat = f"No reproduction: {why}." if why else ""
        # A caveat says what the runs lack.
        lacks = line.row.lacks(metric) if line.row and not cell.caveat else []
        numbers = notes.number([caveat, *(f"{each} measured." for each in lacks)])
        mark = f" ({line.stands_in})" if line.stands_in else ""
        bold = best.is_best(line, metric, cell.measured.mean)
        texts.append(Text(value_text(cell.measured) + mark, numbers, bold))
    if cell.published is not None or cell.illegible:
        printed = "illegible" if cell.illegible else cell.printed.removesuffix("*")
        distance = "" if cell.difference is None else f", {cell.distance}"
        note = shared.note_of(cell)
        bold = cell.published is not None and best.is_best(line, metric, cell.published, published=True)
        texts.append(Text(f"[{printed}{distance}]", notes.number([f"Published value: {note}." if note else ""]), bold))
    return tuple(texts) or (Text(NONE),)


def value_text(summary: Summary) -> str:
    """`86.0 ± 1.8`: mean and deviation over seeds; `86.0 (± 0.3)`: of one seed, the deviation over repeats."""
    text, mean = format_value(summary.mean), summary.mean
    if mean.is_integer() and summary.std_seeds == 0.0:
        return text  # a count, such as a number of parameters
    if summary.std_seeds is not None:
        return f"{text} ± {format_value(summary.std_seeds, mean)}"
    return text if summary.std_repeats is None else f"{text} (± {format_value(summary.std_repeats, mean)})"


@dataclass(frozen=True)
class Best:
    """The best values by data set, epsilon, metric and whether they are published."""

    values: dict[tuple[str, str, str, bool], float]

    def is_best(self, line: Line, metric: str, value: float, published: bool = False) -> bool:
        return _competes(line) and self.values.get((dataset_of(line), group_of(line), metric, published)) == value


def _competes(line: Line) -> bool:
    return rank_of(line) == 1


def best_values(built: BuiltTable) -> Best:
    """The best of several values at one epsilon; real data and lines without records do not compete.

    No measured value is the best if another line with measured values lacks it, because that one may be better.
    """
    values: dict[tuple[str, str, str, bool], list[float]] = {}
    incomplete: set[tuple[str, str, str, bool]] = set()
    for line in filter(_competes, built.lines):
        for metric, cell in line.cells.items():
            if is_measured(line) and cell.measured is None:
                incomplete.add((dataset_of(line), group_of(line), metric, False))
            of_cell = ((cell.measured.mean if cell.measured else None), False), (cell.published, True)
            for value, published in of_cell:
                if value is not None and math.isfinite(value) and direction(metric):
                    values.setdefault((dataset_of(line), group_of(line), metric, published), []).append(value)
    choose: dict[str, Callable[[Iterable[float]], float]] = {"lower": min, "higher": max}
    several = {key: each for key, each in values.items() if len(each) > 1 and key not in incomplete}
    return Best({key: choose[str(direction(key[2]))](each) for key, each in several.items()})

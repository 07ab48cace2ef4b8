"""Lay a table out for readers, as a paper prints it: rows are methods, groups of columns are data sets and metrics.

A cell has the value that was measured here and, below it in brackets, the published value and the difference. What
qualifies a value is a numbered note. `formats` writes the layout; the CSV has the long form instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from dpgen_bench.config.display import direction, label_of, metric_label
from dpgen_bench.outcomes.listing import setting_key
from dpgen_bench.tables.blocks import (
    Best,
    Block,
    Text,
    best_values,
    cell_block,
    certified_block,
    epsilon_block,
    name_block,
)
from dpgen_bench.tables.lines import NONE, PUBLIC_DATA, TO_BEST, BuiltTable, Line
from dpgen_bench.tables.naming import budget_of, certified, dataset_of, group_of, is_measured, method_of, rank_of
from dpgen_bench.tables.notes import Notes, Shared, paragraphs

MOST_COLUMNS = 9
WIDTH = 120  # characters of a table in a terminal
EPSILONS, CERTIFIED = "ε claimed → proven", "ε certified"
UNDERSTOOD = ("#", "Method")  # columns whose cells need no name
WIDEST_NAME = 26  # characters of the column of methods, whose texts are folded

Pair = tuple[str, str]  # a data set and a metric, which have a column
Plan = tuple[list[Pair], list[int] | None]  # of a part: its pairs and, where these are rows, which methods are columns

Item = TypeVar("Item")


@dataclass(frozen=True)
class Column:
    """A column: its group (the data set, or "" where all columns share it) and its heading."""

    group: str
    head: Block


@dataclass(frozen=True)
class Part:
    """A part of a table that fits a page.

    Args:
        title: its data set, "" if the columns have several; in a table by method, the method stands before it.
        breaks: numbers of the rows before which a reader expects a rule, such as those at another epsilon.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Block, ...], ...]
    breaks: tuple[int, ...] = ()

    def groups(self) -> list[tuple[str, int]]:
        """The groups of columns that stand next to each other, with the number of their columns."""
        return [(name, len(list(several))) for name, several in groupby(column.group for column in self.columns)]


@dataclass(frozen=True)
class Layout:
    """A table for readers. `notes` are numbered from 1, and `remarks` are about single runs."""

    name: str
    title: str
    parts: tuple[Part, ...]
    paragraphs: tuple[str, ...]
    notes: tuple[str, ...]
    remarks: tuple[str, ...]

    def heading_of(self, part: Part) -> str:
        """The data set of a part where the table's title does not say it; "" elsewhere."""
        return part.title if len(self.parts) > 1 or part.title.lower() not in self.title.lower() else ""


def lay_out(built: BuiltTable, width: int = WIDTH) -> Layout:
    """The table for readers, in parts of at most `MOST_COLUMNS` columns and, where words allow it, `width` characters.

    A part that would be wider is split by data set. What is still wider has a row for each metric if its methods are
    few, and is otherwise split by metric. In a table by method, each method is laid out by itself.
    """
    built, unmade = _without_unmade(built)
    shared, notes = Shared(built), Notes()
    drafts = {method: _Draft(group, shared, best_values(group)) for method, group in _groups(built).items()}
    parts = [
        replace(part, title=", ".join(filter(None, (method, part.title))))
        for method, draft in drafts.items()
        for part in (draft.part(pairs, notes, turned) for pairs, turned in draft.plan(width))
    ]
    below = paragraphs(built, shared, any(draft.best.values for draft in drafts.values()))
    below += [unmade] if unmade else []
    return Layout(built.name, built.heading, tuple(parts), tuple(below), tuple(notes.texts), tuple(built.remarks))


def _without_unmade(built: BuiltTable) -> tuple[BuiltTable, str]:
    """A leaderboard without the lines that have no run, and a sentence about these; other tables show such lines."""
    unmade = [line for line in built.lines if line.standing is not None and not is_measured(line)]
    if not built.measured or not unmade:
        return built, ""
    names = ", ".join(dict.fromkeys(map(method_of, unmade)))
    has = "line has no run" if len(unmade) == 1 else "lines have no run"
    quick = " scale=quick" if built.scale == "quick" else ""
    text = f"{len(unmade)} {has} yet ({names}); `dpgen sweep {built.name}{quick} --dry-run` lists the runs."
    return replace(built, lines=[line for line in built.lines if line not in unmade]), text


def _groups(built: BuiltTable) -> dict[str, BuiltTable]:
    """The tables that are laid out by themselves: of each method in a table by method, else the whole, under ""."""
    if not built.by_method:
        return {"": built}
    lines: dict[str, list[Line]] = {}
    for line in built.lines:
        lines.setdefault(method_of(line), []).append(line)
    return {method: replace(built, lines=of_method) for method, of_method in lines.items()}


@dataclass(frozen=True)
class _Draft:
    """A table, or the lines of one method, being laid out. `shared` is of the whole table."""

    built: BuiltTable
    shared: Shared
    best: Best

    def plan(self, width: int) -> list[Plan]:
        """The columns of values of each part and, where its rows are metrics, the methods that are its columns."""
        lines = self.built.lines
        datasets = list(dict.fromkeys(map(dataset_of, lines)))
        pairs = [(data, metric) for data in datasets for metric in self.built.metrics if _is_used(lines, data, metric)]
        if not pairs:
            return []
        ranked = any("place" in line.head for line in lines)  # each data set has places of its own
        if self._fits((pairs, None), width) and not (ranked and len(datasets) > 1):
            return [(pairs, None)]
        plans: list[Plan] = []
        for data in datasets:
            if of_data := [pair for pair in pairs if pair[0] == data]:
                plans += self._split(of_data, width, ranked)
        return plans

    def _split(self, pairs: list[Pair], width: int, ranked: bool) -> list[Plan]:
        """The parts of one data set. Places are read from top to bottom, so a ranking keeps a row for each method."""
        if ranked:
            return self._filled(pairs, width)
        rows = list(range(len(self.part(pairs, Notes()).rows)))
        upright: list[list[Plan]] = [[(chunk, None) for chunk in _chunks(pairs, n + 1)] for n in range(len(pairs))]
        turned: list[list[Plan]] = [[(pairs, chunk) for chunk in _chunks(rows, n + 1)] for n in range(len(rows))]
        fitting = [
            next((plans for plans in ways if all(self._fits(plan, width) for plan in plans)), ways[-1])
            for ways in (upright, turned)
        ]
        return min(fitting, key=len)  # of equally many parts those whose rows are methods

    def _filled(self, pairs: list[Pair], width: int) -> list[Plan]:
        """Parts with as many columns of values as fit, at least one. All but the first have more room for them."""
        plans: list[Plan] = []
        while pairs:
            fitting = (count for count in range(len(pairs), 1, -1) if self._fits((pairs[:count], None), width))
            count = next(fitting, 1)
            plans.append((pairs[:count], None))
            pairs = pairs[count:]
        return plans

    def _continues(self, pairs: Sequence[Pair]) -> bool:
        """Whether a part of a ranking has its first metrics in another part."""
        data, metric = pairs[0]
        of_data = [line for line in self.built.lines if dataset_of(line) == data]
        first = next(metric for metric in self.built.metrics if _is_used(of_data, data, metric))
        return "place" in of_data[0].head and metric != first

    def _fits(self, plan: Plan, width: int) -> bool:
        part = self.part(plan[0], Notes(), plan[1])
        narrow = sum(column.head[0].text == CERTIFIED for column in part.columns)  # it does not split a table by itself
        return len(part.columns) - narrow <= MOST_COLUMNS and _width(part) <= width

    def part(self, pairs: Sequence[Pair], notes: Notes, turned: Sequence[int] | None = None) -> Part:
        """The part with a column for each pair; `turned`: with a row for each pair, and these methods as columns."""
        datasets = list(dict.fromkeys(data for data, _ in pairs))
        lines = [line for line in self.built.lines if dataset_of(line) in datasets]
        # Settings that are the same in all lines distinguish none.
        settings = [name for name in self.built.settings if len({line.head.get(name, NONE) for line in lines}) > 1]
        # Columns that name a line: the place in a leaderboard, the method, its settings, and its epsilons.
        with_place, with_best = "place" in lines[0].head, any(line.tail.get(TO_BEST, NONE) != NONE for line in lines)
        heads = ["#"] if with_place else []
        heads += [] if self.built.by_method else ["Method"]  # there, the title of the part names it
        heads += [*(label_of(setting_key(name), plain=True) for name in settings), EPSILONS]
        # What a ranking says of a line beyond its name is in the first of its parts.
        once = not self._continues(pairs)
        with_best = with_best and once
        with_certified = once and any(certified(line.row).get("epsilon") is not None for line in lines)
        heads += [CERTIFIED] if with_certified else []
        with_public = once and any(line.head.get(PUBLIC_DATA, NONE) != NONE for line in lines)
        heads += ["Public data"] if with_public else []
        naming = len(heads)
        heads += ["Difference from the best"] if with_best else []
        columns = [Column("", (Text(head),)) for head in heads]
        group = len(datasets) > 1
        columns += [Column(data if group else "", (Text(_heading(metric)),)) for data, metric in pairs]
        rows: list[tuple[Block, ...]] = []
        breaks, previous = [], None
        for row in sorted(_rows(lines, settings), key=self._order):
            first, of_data = row[0], {dataset_of(line): line for line in row}
            competes = rank_of(first) == 1  # the ends of the scale have no place
            place = first.head.get("place", NONE) if competes else NONE
            to_best = first.tail.get(TO_BEST, NONE) if competes else NONE
            blocks: list[Block] = [(Text(place),)] if with_place else []
            method, epsilon = name_block(row, self.shared, notes), epsilon_block(row, notes)
            if self.built.by_method:  # the notes on the line stand at its epsilon
                epsilon = (replace(epsilon[0], notes=(*method[0].notes, *epsilon[0].notes)), *epsilon[1:])
            else:
                blocks.append(method)
            blocks += [(Text(_shown(first.head.get(name, NONE))),) for name in settings]
            blocks.append(epsilon)
            blocks += [certified_block(row, notes)] if with_certified else []
            blocks += [(Text(first.head.get(PUBLIC_DATA, NONE)),)] if with_public else []
            blocks += [(Text(to_best),)] if with_best else []
            blocks += [
                cell_block(of_data[data], metric, self.best, self.shared, notes) if data in of_data else (Text(""),)
                for data, metric in pairs
            ]
            if rows and self._order(row) != previous:
                breaks.append(len(rows))
            previous = self._order(row)
            rows.append(tuple(blocks))
        title = "" if group else datasets[0] + ("" if once else ", continued")
        part = Part(title, tuple(columns), tuple(rows), tuple(breaks))
        return part if turned is None else _turned(part, naming, turned)

    def _order(self, row: Sequence[Line]) -> tuple[int, float]:
        """The section of a row. Budgets divide a table of the bench; a paper's table keeps its printed order."""
        budget = budget_of(row[0])
        return rank_of(row[0]), 0.0 if self.built.published else -1.0 if budget is None else budget


def _is_used(lines: Sequence[Line], dataset: str, metric: str) -> bool:
    cells = [line.cells[metric] for line in lines if dataset_of(line) == dataset and metric in line.cells]
    return any(cell.published is not None or cell.illegible or cell.measured for cell in cells)


def _shown(setting: str) -> str:
    """A setting as a column shows it. A fraction of many digits, such as 1/6, has four; the csv has all."""
    return f"{float(setting):.4g}" if re.fullmatch(r"0\.\d{7,}", setting) else setting.replace("None", NONE)


def _heading(metric: str) -> str:
    arrow = {"lower": "\u00a0↓", "higher": "\u00a0↑", None: ""}[direction(metric)]
    return metric_label(metric) + arrow


def _rows(lines: Sequence[Line], settings: Sequence[str]) -> list[list[Line]]:
    """The lines of each row: at most one for each data set, of the same method, variant, settings and epsilon."""
    rows: dict[tuple[str, ...], list[list[Line]]] = {}
    for line in lines:
        printed = line.printed
        names = [method_of(line), group_of(line), *(line.head.get(name, NONE) for name in settings)]
        if printed is None:
            names += [line.tail["scale"], line.tail["protocol"], line.head.get("place", "")]
        else:
            names += [printed.variant, printed.reported_in, printed.delta]
        of_names = rows.setdefault(tuple(names), [])
        free = next((row for row in of_names if dataset_of(line) not in map(dataset_of, row)), None)
        if free is None:
            of_names.append([line])
        else:
            free.append(line)
    return [row for several in rows.values() for row in several]


def _width(part: Part) -> int:
    """Characters of a part in a terminal."""
    return 1 + sum(3 + column_width(part, number) for number in range(len(part.columns)))


def column_width(part: Part, number: int) -> int:
    """Characters of a column: it is as wide as its longest line; headings are folded at spaces, and so are names."""
    column = part.columns[number]
    words = [word for text in (column.group, *(each.text for each in column.head)) for word in text.split(" ")]
    longest = max([len(word) for word in words] + [len(text) for row in part.rows for text in row[number]])
    return min(longest, WIDEST_NAME) if column.head[0].text == "Method" else longest


def _chunks(items: Sequence[Item], count: int) -> list[list[Item]]:
    """The items in at most that many pieces of about the same size."""
    size = -(-len(items) // count)
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def _turned(part: Part, naming: int, methods: Sequence[int]) -> Part:
    """The part with its metrics as rows and these methods as columns, whose headings are the first `naming` columns."""
    upright = [part.rows[number] for number in methods]
    # The name of a setting stands before its value, because its column's heading is gone.
    names = [column.head[0].text for column in part.columns[:naming]]
    before = ["" if name in UNDERSTOOD else "ε " if name == EPSILONS else f"{name} " for name in names]
    heads = [
        tuple(
            replace(text, text=prefix + text.text)
            for prefix, block in zip(before, row[:naming], strict=True)
            for text in block
            if text.text != NONE
        )
        for row in upright
    ]
    columns = (Column("", (Text("Metric"),)), *(Column("", head) for head in heads))
    numbers = range(naming, len(part.columns))
    rows = tuple((part.columns[number].head, *(row[number] for row in upright)) for number in numbers)
    return Part(part.title, columns, rows)

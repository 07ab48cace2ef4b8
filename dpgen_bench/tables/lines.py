"""The lines and cells of a table: the published value, the measured value, their difference, and what qualifies it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpgen_bench.runs.statistics import Summary, format_value
from dpgen_bench.tables.published import PublishedRow, print_number
from dpgen_bench.tables.rows import TableRow

SERVER, CONDITIONAL = "ε against the server", "ε conditional"  # columns that are shown where a row has them
ILLEGIBLE = "not legible in the source"
NOT_COMPARABLE = "†"  # marks a figure that does not count as a reproduction of the printed one beside it


@dataclass(frozen=True)
class Cell:
    """One figure of one line: as printed, as measured here, and their distance.

    Args:
        published, published_std, note: as printed, in our unit; None: nothing is printed, or (`illegible`) not legibly.
        decimals: how many of them are printed.
        ours: the measured figure over seeds and repeats, None where there is none; words: it as text.
        alike: a measured figure was made at the paper's scale and by the paper's protocol, as far as this figure goes.
        caveat: why a measured figure is not alike, in words; "" where it is, or where nothing is measured or printed.
    """

    published: float | None = None
    published_std: float | None = None
    note: str = ""
    illegible: bool = False
    ours: Summary | None = None
    words: str = "–"
    caveat: str = ""
    decimals: int | None = None

    @property
    def difference(self) -> float | None:
        """Ours minus the published figure; None where either is missing, or ours is no finite number."""
        if self.ours is None or self.published is None or not math.isfinite(self.ours.mean):
            return None
        return self.ours.mean - self.published

    @property
    def alike(self) -> bool:
        return self.difference is not None and not self.caveat

    @property
    def printed(self) -> str:
        """The published figure in words: `18.5 ± 0.9`; with `*` where a note goes with it."""
        if self.published is None:
            return ILLEGIBLE if self.illegible else "–"
        spread = "" if self.published_std is None else f" ± {print_number(self.published_std, self.decimals)}"
        return f"{print_number(self.published, self.decimals)}{spread}" + ("*" if self.note else "")

    @property
    def distance(self) -> str:
        """The difference with its sign: `+2.3`, marked where it is no reproduction's."""
        if self.difference is None or self.ours is None:
            return "–"
        size = format_value(abs(self.difference), max(abs(self.ours.mean), abs(self.published or 0.0)))
        zero = float(size.replace(",", "")) == 0.0
        return ("0" if zero else ("+" if self.difference > 0 else "−") + size) + (
            f" {NOT_COMPARABLE}" if self.caveat else ""
        )


@dataclass(frozen=True)
class Line:
    """One line of a table: what it is, its figures, and how they came about. `row` is None where nothing can be run."""

    head: dict[str, str]
    cells: dict[str, Cell]
    tail: dict[str, str]
    row: TableRow | None = None
    printed: PublishedRow | None = None


@dataclass(frozen=True)
class Built:
    """A table with its content. `published`: it has printed numbers to stand beside."""

    name: str
    title: str
    note: str
    scale: str
    metrics: list[str]
    lines: list[Line]
    remarks: list[str]
    published: bool

    @property
    def rows(self) -> list[TableRow]:
        return [line.row for line in self.lines if line.row is not None]

    @property
    def measured(self) -> bool:
        return any(row.measured for row in self.rows)

    def reproduced(self) -> str:
        """How many of the printed figures have a counterpart here, and of which kind; "" for a table of our own."""
        if not self.published:
            return ""
        cells = [cell for line in self.lines for cell in line.cells.values() if cell.published is not None]
        alike, others = sum(cell.alike for cell in cells), sum(bool(cell.caveat) for cell in cells)
        return (
            f"{alike} of {len(cells)} printed figures were measured at the paper's scale and by its protocol; "
            f"{others} otherwise ({NOT_COMPARABLE}: no reproduction), {len(cells) - alike - others} not."
        )

    def marks(self) -> list[str]:
        """What the marks in the cells stand for, notes on printed figures and reasons for †, each with whose it is."""
        whose: dict[str, dict[str, None]] = {}
        for line in self.lines:
            who = ", ".join(dict.fromkeys(v for k, v in line.head.items() if k in _WHO and v != "–"))
            for cell in line.cells.values():
                if cell.note and (cell.published is not None or cell.illegible):
                    whose.setdefault(f"* {cell.note}", {})[who] = None
                if cell.caveat:
                    whose.setdefault(f"{NOT_COMPARABLE} {cell.caveat}", {})[who] = None
        return [f"{mark}: {'; '.join(lines)}" for mark, lines in whose.items()]


_WHO = ("method", "variant", "dataset", "ε printed")

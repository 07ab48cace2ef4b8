"""The lines and cells of a table: the published value, the measured value, their difference, and what qualifies it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpgen_bench.runs.statistics import Summary, format_value
from dpgen_bench.tables.published import PublishedRow, print_number
from dpgen_bench.tables.ranking import Standing
from dpgen_bench.tables.rows import TableRow

NONE = "–"
NOTHING = "no metric of this table was measured"  # the status of a run that was measured by another protocol's metrics
TO_BEST = "difference from the best"  # a leaderboard's column
SERVER, CONDITIONAL = "ε against the server", "ε conditional"  # columns that are shown where a row has them
PUBLIC_DATA = "public data"  # as above: what a method uses besides the records
ILLEGIBLE = "not legible in the source"


@dataclass(frozen=True)
class Cell:
    """One metric in one line: the published value, the measured value, and what qualifies their comparison.

    Args:
        published, published_std: the published value and its spread in the bench's unit; None where none is printed.
        note: a remark on the published value.
        illegible: the paper prints a value that our copy of its text does not show legibly.
        measured: the measured value over seeds and repeats, None where there is none.
        text: the measured value as the table shows it.
        caveat: why the measured value does not count as a reproduction; "" if it does, or if a value is missing.
        decimals: how many decimals the published value is printed with.
    """

    published: float | None = None
    published_std: float | None = None
    note: str = ""
    illegible: bool = False
    measured: Summary | None = None
    text: str = "–"
    caveat: str = ""
    decimals: int | None = None

    @property
    def difference(self) -> float | None:
        """The measured minus the published value; None where one is missing or the measured one is not finite."""
        if self.measured is None or self.published is None or not math.isfinite(self.measured.mean):
            return None
        return self.measured.mean - self.published

    @property
    def is_reproduction(self) -> bool:
        """Whether the measured value comes from runs at the paper's scale, measured by the paper's protocol."""
        return self.difference is not None and not self.caveat

    @property
    def printed(self) -> str:
        """The published value as text, such as `18.5 ± 0.9`, with `*` if it has a note."""
        if self.published is None:
            return ILLEGIBLE if self.illegible else "–"
        spread = "" if self.published_std is None else f" ± {print_number(self.published_std, self.decimals)}"
        return f"{print_number(self.published, self.decimals)}{spread}" + ("*" if self.note else "")

    @property
    def distance(self) -> str:
        """The difference with its sign, such as `+2.3`."""
        if self.difference is None or self.measured is None:
            return NONE
        size = format_value(abs(self.difference), max(abs(self.measured.mean), abs(self.published or 0.0)))
        zero = float(size.replace(",", "")) == 0.0
        return "0" if zero else ("+" if self.difference > 0 else "−") + size


@dataclass(frozen=True)
class Line:
    """One line of a table.

    Args:
        head: columns that name the line: the method, the data set, settings and epsilons.
        cells: its values by metric.
        tail: columns that say how the values were measured: seeds, scale, protocol and status.
        row: its runs; None if none can be run.
        printed: the row of the paper's table that it reproduces; None for a run that answers no printed row.
        standing: its place in a leaderboard; None in other tables.
    """

    head: dict[str, str]
    cells: dict[str, Cell]
    tail: dict[str, str]
    row: TableRow | None = None
    printed: PublishedRow | None = None
    standing: Standing | None = None


@dataclass(frozen=True)
class BuiltTable:
    """A table with its values.

    Args:
        published: it shows the published values next to the measured ones.
        settings: the settings of methods that are columns.
    """

    name: str
    title: str
    note: str
    scale: str
    metrics: list[str]
    lines: list[Line]
    remarks: list[str]
    published: bool
    settings: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """The title, which says where short runs stand in for a paper's."""
        return self.title + (" · stand-ins (scale=quick)" if self.scale == "quick" and self.published else "")

    @property
    def rows(self) -> list[TableRow]:
        return [line.row for line in self.lines if line.row is not None]

    @property
    def measured(self) -> bool:
        return any(row.measured for row in self.rows)

    def count_reproductions(self) -> str:
        """A sentence that counts reproductions and other measured values; "" for a table without published values."""
        if not self.published:
            return ""
        cells = [cell for line in self.lines for cell in line.cells.values() if cell.published is not None]
        reproduced, others = sum(cell.is_reproduction for cell in cells), sum(bool(cell.caveat) for cell in cells)
        return (
            f"Of {len(cells)} published values, {reproduced} were measured at the paper's scale and by its protocol, "
            f"{others} in another way (a note says which), and {len(cells) - reproduced - others} were not measured."
        )

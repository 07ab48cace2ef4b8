"""The lines and cells of a table: the published value, the measured value, their difference, and what qualifies it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpgen_bench.config.display import is_accuracy_in_percent
from dpgen_bench.store.statistics import Summary, format_value
from dpgen_bench.tables.expand import REDUCED
from dpgen_bench.tables.published import PublishedRow, print_number
from dpgen_bench.tables.ranking import Standing
from dpgen_bench.tables.rows import OTHER, TableRow

NONE = "–"
NOTHING = "no metric of this table was measured"  # the status of a run that was measured by another protocol's metrics
TO_BEST = "difference from the best"  # a leaderboard's column
SERVER, CONDITIONAL = "ε against the server", "ε conditional"  # columns that are shown where a row has them
PUBLIC_DATA = "public data"  # as above: what a method uses besides the records
ILLEGIBLE = "not legible in the source"
TOO_FAR = "the difference exceeds the tolerance"  # the caveat of a value that is comparable and no reproduction
TOLERANCE = (
    "The tolerance is twice the printed spread or, where none or 0 is printed, 1.5 points of an accuracy and 10% of "
    "another value."
)


def tolerance_of(metric: str, published: float, spread: float | None) -> float:
    """The largest difference from a published value with which a measured one reproduces it, as `TOLERANCE` says."""
    return 2.0 * spread if spread else 1.5 if is_accuracy_in_percent(metric) else 0.1 * abs(published)


@dataclass(frozen=True)
class Cell:
    """One metric in one line: the published value, the measured value, and what qualifies their comparison.

    Args:
        published, published_std: the published value and its spread in the bench's unit; None where none is printed.
        note: a remark on the published value.
        illegible: the paper prints a value that our copy of its text does not show legibly.
        measured: the measured value over seeds and repeats, None where there is none.
        text: the measured value as the table shows it.
        caveat: why the measured value is not comparable with the published one; "" if it is, or if a value is missing.
        decimals: how many decimals the published value is printed with.
        tolerance: the largest difference of a reproduction; None without a published value.
    """

    published: float | None = None
    published_std: float | None = None
    note: str = ""
    illegible: bool = False
    measured: Summary | None = None
    text: str = "–"
    caveat: str = ""
    decimals: int | None = None
    tolerance: float | None = None

    @property
    def difference(self) -> float | None:
        """The measured minus the published value; None where one is missing or the measured one is not finite."""
        if self.measured is None or self.published is None or not math.isfinite(self.measured.mean):
            return None
        return self.measured.mean - self.published

    @property
    def is_comparable(self) -> bool:
        """Whether the measured value comes from runs at the paper's scale, measured by the paper's protocol."""
        return self.difference is not None and not self.caveat

    @property
    def is_near(self) -> bool:
        """Whether the measured value is within the tolerance of the published one, however it was measured."""
        return self.difference is not None and self.tolerance is not None and abs(self.difference) <= self.tolerance

    @property
    def is_reproduction(self) -> bool:
        """Whether the measured value is comparable with the published one, and within its tolerance."""
        return self.is_comparable and self.is_near

    @property
    def why_no_reproduction(self) -> str:
        """The caveat, or that the difference exceeds the tolerance; "" for a reproduction, or if a value is missing."""
        if self.is_comparable and not self.is_near:
            return f"{TOO_FAR}, {print_number(self.tolerance or 0.0, None)}"
        return self.caveat

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

    @property
    def stands_in(self) -> str:
        """How values of runs that stand in for a printed row's own are marked, see `TableRow.stands_in`."""
        return self.row.stands_in if self.row is not None else ""

    @property
    def is_reduced(self) -> bool:
        """Whether a printed row has values of reduced runs, which stand in for the paper's."""
        return self.stands_in == REDUCED

    @property
    def is_of_other_runs(self) -> bool:
        """Whether what stands in is another run than the printed row's, whose epsilon is not that of the claim."""
        return self.stands_in in (REDUCED, OTHER)


@dataclass(frozen=True)
class BuiltTable:
    """A table with its values.

    Args:
        published: it shows the published values next to the measured ones.
        settings: the settings of methods that are columns.
        by_method: each method has a part of its own.
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
    by_method: bool = False

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
        published = [(line, cell) for line in self.lines for cell in line.cells.values() if cell.published is not None]
        comparable = [cell for _, cell in published if cell.is_comparable]
        reduced = [cell for line, cell in published if cell.caveat and line.is_reduced]
        others = [cell for line, cell in published if cell.caveat and not line.is_reduced]
        rest = len(published) - len(comparable) - len(others) - len(reduced)
        if rest == len(published):
            return f"Of {len(published)} published values, none was measured."
        by_reduced = f"{len(reduced)} by reduced runs ({_near(reduced)}), " if reduced else ""
        return (
            f"Of {len(published)} published values, {len(comparable)} were measured at the paper's scale and by its "
            f"protocol ({_near(comparable)}), {len(others)} in another way ({_near(others)}; a note says how), "
            f"{by_reduced}and {rest} were not measured. {TOLERANCE}"
        )


def _near(cells: Sequence[Cell]) -> str:
    return f"{sum(cell.is_near for cell in cells)} within the tolerance"

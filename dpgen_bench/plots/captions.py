"""What stands around a picture: its title, and below it what must be known of the runs that are in it."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpgen_bench.plots.parts import epsilon_text
from dpgen_bench.runs.listing import epsilon_number, is_changed
from dpgen_bench.runs.soundness import budget_problem
from dpgen_bench.runs.store import RunFolder
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.tables.spec import TableSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PRINTED = re.compile(r"\b(Figure|Table) [A-Z]?\d")  # in the title of a table that follows a paper's


@dataclass(frozen=True)
class Picture:
    """A figure that is drawn. lines: how many rows of the table are in it."""

    figure: Figure
    lines: int


def finished(
    figure: Figure,
    table: TableSpec,
    rows: Sequence[TableRow],
    folders: Mapping[int, Sequence[RunFolder]],
    how: str,
) -> Picture:
    """The picture with the table's title above and the `caption` below."""
    write_below(figure, table.title, caption(table, rows, folders, how))
    return Picture(figure, len(_sound(rows, folders)))


def caption(table: TableSpec, rows: Sequence[TableRow], folders: Mapping[int, Sequence[RunFolder]], how: str) -> str:
    """What must be known of the runs in a picture: scale, protocol, seeds, epsilons, and why it reproduces nothing.

    Args:
        folders: of each row (by its place in `rows`), the runs that are drawn. Damaged ones are left out.
        how: what lines and bars mean.
    """
    sound = _sound(rows, folders)
    if not sound:
        return how
    drawn, runs = [row for row, _ in sound], [folder for _, several in sound for folder in several]
    seeds = sorted({len(several) for _, several in sound})
    scales = _different(row.specs[0].config.scale.name for row in drawn)
    parts = [f"scale {', '.join(scales)}"]
    parts.append(f"protocol {', '.join(_different(row.protocol for row in drawn))}")
    parts.append(f"{_range(seeds)} seed{'' if seeds == [1] else 's'} each")
    private = [row.specs[0].config.privacy for row in drawn if row.specs[0].config.privacy.epsilon != math.inf]
    parts.append(f"ε proven {_epsilons(runs, 'proven')}")
    if private:
        relations = ", ".join(_different(str(privacy.relation).replace("_", "-") for privacy in private))
        parts[-1] += f" ({relations}, δ = {', '.join(_different(f'{privacy.delta:g}' for privacy in private))})"
    if claimed := _epsilons(runs, "claimed", finite=True):
        parts.append(f"claimed by the papers' counts {claimed}")
    lines = ["; ".join(parts) + "."]
    if {str(privacy.relation) for privacy in private} == {"add_remove", "replace_one"}:
        lines.append("Beware: an ε under replace-one does not compare with one under add-remove.")
    if reasons := _no_reproduction(table, sound):
        lines.append(f"Not a reproduction: {'; '.join(reasons)}.")
    return "\n".join([*lines, how])


def _sound(
    rows: Sequence[TableRow], folders: Mapping[int, Sequence[RunFolder]]
) -> list[tuple[TableRow, list[RunFolder]]]:
    """Each row that is drawn with its runs; those whose files cannot be trusted are not asked."""
    kept = [(row, [each for each in folders.get(i, ()) if each.id not in row.unusable]) for i, row in enumerate(rows)]
    return [(row, several) for row, several in kept if several]


def _no_reproduction(table: TableSpec, drawn: Sequence[tuple[TableRow, Sequence[RunFolder]]]) -> list[str]:
    """Why a picture does not show again what a paper shows: all its lines must be made and measured as the paper's."""
    of_paper = bool(table.paper) or bool(PRINTED.search(table.title))
    reasons = [] if of_paper else ["no paper has this picture"]
    other = [row.scale for row, _ in drawn if row.scale != "paper"]
    if len(other) == len(drawn):
        reasons.append(f"scale {', '.join(_different(other))}")
    elif other:
        counts = ", ".join(f"{other.count(scale)} {scale}" for scale in _different(other))
        reasons.append(f"not all lines are of scale paper ({counts} of {len(drawn)})")
    if of_paper:
        # A changed text of a protocol measures otherwise, whatever its name.
        others = [
            f"{row.protocol}{' (changed)' if is_changed(row.specs[0].protocol_record()) else ''}" for row, _ in drawn
        ]
        wanted = table.protocol
        if others := [name for name in _different(others) if name != wanted]:
            reasons.append(f"protocol {', '.join(others)} (the paper's: {wanted})")
        reasons += _said(table)
    ledgers = [(run.read_json("ledger.json"), row.specs[0].config.privacy) for row, runs in drawn for run in runs]
    if any(budget_problem(ledger, privacy) for ledger, privacy in ledgers):
        reasons.append("a ledger does not prove what its run was configured with")
    return reasons


def _said(table: TableSpec) -> list[str]:
    """Why the table's yaml says that its figures are no reproduction: of all, of some figures, of some rows."""
    caveat = table.caveat
    words = list(caveat.values()) if isinstance(caveat, dict) else [caveat] if caveat else []
    if any(row.caveat for row in table.rows):
        words.append("settings of some rows are not as printed, or not known (see the table)")
    return _different(" ".join(word.split()) for word in words)


def write_below(figure: Figure, title: str, text: str) -> None:
    """The title above all panels and the caption below them, both wrapped to the figure's width."""
    width = float(figure.get_figwidth())
    figure.suptitle(textwrap.fill(title, int(9.5 * width)), fontsize=11)
    wrapped = [textwrap.fill(line, int(15.5 * width)) for line in text.splitlines() if line]
    figure.supxlabel("\n".join(wrapped), fontsize=7.5, x=0.01, ha="left")


def _epsilons(runs: Sequence[RunFolder], name: str, finite: bool = False) -> str:
    """The runs' epsilons of that name, each once; lowest and highest where they are many."""
    found = {epsilon_number(folder.read_json("ledger.json").get("epsilon"), name) for folder in runs}
    values = sorted(value for value in found if value is not None and not (finite and math.isinf(value)))
    words = _different(epsilon_text(value) for value in values)
    if len(words) > 5:
        return f"{words[0]} to {words[-1]}"
    return ", ".join(words) or ("" if finite else "not known")


def _different(words: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(str(word) for word in words))


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"

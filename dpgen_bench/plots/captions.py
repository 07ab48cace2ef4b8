"""The caption of a plot, which pages show below it: the runs in the plot, and why it is not a reproduction."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpgen_bench.config.display import counted, relation_name
from dpgen_bench.outcomes.listing import epsilon_number, is_changed
from dpgen_bench.outcomes.soundness import budget_problem
from dpgen_bench.plots.parts import epsilon_text
from dpgen_bench.store.folders import ReadableRun
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.tables.spec import TableSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PRINTED = re.compile(r"\b(Figure|Table) [A-Z]?\d")  # in the title of a table that follows a paper's


@dataclass(frozen=True)
class Picture:
    """A plot that is drawn, without a title and a caption in it.

    lines: how many rows of the table are in it. caption: its paragraphs.
    """

    figure: Figure
    lines: int
    caption: tuple[str, ...]


def finished(
    figure: Figure,
    table: TableSpec,
    rows: Sequence[TableRow],
    folders: Mapping[int, Sequence[ReadableRun]],
    how: str,
) -> Picture:
    """The plot with its `caption`."""
    return Picture(figure, len(_sound(rows, folders)), caption(table, rows, folders, how))


def caption(
    table: TableSpec, rows: Sequence[TableRow], folders: Mapping[int, Sequence[ReadableRun]], how: str
) -> tuple[str, ...]:
    """The paragraphs of a plot's caption: how to read it; scale, protocol, seeds and epsilons; why no reproduction.

    Args:
        folders: the runs that are drawn, by the place of their row in `rows`. Damaged runs are left out.
        how: the meaning of lines and bars.
    """
    sound = _sound(rows, folders)
    if not sound:
        return (how,)
    drawn, runs = [row for row, _ in sound], [folder for _, several in sound for folder in several]
    seeds = sorted({len(several) for _, several in sound})
    scales = _different(row.specs[0].config.scale.name for row in drawn)
    parts = [f"Scale {', '.join(scales)}"]
    parts.append(f"protocol {', '.join(_different(row.protocol for row in drawn))}")
    each = counted(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    parts.append(f"{each} each")
    private = [row.specs[0].config.privacy for row in drawn if row.specs[0].config.privacy.epsilon != math.inf]
    parts.append(f"ε proven {_epsilons(runs, 'proven')}")
    if private:
        relations = ", ".join(_different(relation_name(str(privacy.relation)) for privacy in private))
        parts[-1] += f" ({relations}, δ = {', '.join(_different(f'{privacy.delta:g}' for privacy in private))})"
    if claimed := _epsilons(runs, "claimed", finite=True):
        parts.append(f"claimed by the papers' counts {claimed}")
    lines = ["; ".join(parts) + "."]
    if {str(privacy.relation) for privacy in private} == {"add_remove", "replace_one"}:
        lines.append("An ε under replace-one is not comparable with one under add/remove.")
    if reasons := _no_reproduction(table, sound):
        lines.append(f"Not a reproduction: {'; '.join(reasons)}.")
    return how, *lines


def _sound(
    rows: Sequence[TableRow], folders: Mapping[int, Sequence[ReadableRun]]
) -> list[tuple[TableRow, list[ReadableRun]]]:
    """Each row that is drawn, with its runs that are not damaged."""
    kept = [(row, [each for each in folders.get(i, ()) if each.id not in row.unusable]) for i, row in enumerate(rows)]
    return [(row, several) for row, several in kept if several]


def _no_reproduction(table: TableSpec, drawn: Sequence[tuple[TableRow, Sequence[ReadableRun]]]) -> list[str]:
    """Why a plot is not a reproduction of a paper's: all its lines must be trained and measured as the paper's are."""
    of_paper = bool(table.paper) or bool(PRINTED.search(table.title))
    reasons = [] if of_paper else ["no paper has this picture"]
    other = [row.scale for row, _ in drawn if row.scale != "paper"]
    if len(other) == len(drawn):
        reasons.append(f"scale {', '.join(_different(other))}")
    elif other:
        counts = ", ".join(f"{other.count(scale)} {scale}" for scale in _different(other))
        reasons.append(f"not all lines are of scale paper ({counts} of {len(drawn)})")
    if of_paper:
        # A protocol whose text has changed is another protocol of the same name.
        others = [
            f"{row.protocol}{' (changed)' if is_changed(row.specs[0].protocol_record()) else ''}" for row, _ in drawn
        ]
        paper = table.protocol
        if others := [name for name in _different(others) if name != paper]:
            reasons.append(f"protocol {', '.join(others)} (the paper's: {paper})")
        reasons += _stated_caveats(table)
    ledgers = [(run.read_json("ledger.json"), row.specs[0].config.privacy) for row, runs in drawn for run in runs]
    if any(budget_problem(ledger, privacy) for ledger, privacy in ledgers):
        reasons.append("a ledger does not prove what its run was configured with")
    return reasons


def _stated_caveats(table: TableSpec) -> list[str]:
    """The caveats in the table's yaml, each once; those of rows are one general sentence."""
    caveat = table.caveat
    reasons = list(caveat.values()) if isinstance(caveat, dict) else [caveat] if caveat else []
    if any(row.caveat for row in table.rows):
        reasons.append("settings of some rows are not as printed, or not known (see the table)")
    return _different(" ".join(reason.split()) for reason in reasons)


def _epsilons(runs: Sequence[ReadableRun], name: str, finite: bool = False) -> str:
    """The runs' epsilons of that name, each once; only the lowest and the highest of more than five."""
    numbers = {epsilon_number(folder.read_json("ledger.json").get("epsilon"), name) for folder in runs}
    values = sorted(value for value in numbers if value is not None and not (finite and math.isinf(value)))
    texts = _different(epsilon_text(value) for value in values)
    if len(texts) > 5:
        return f"{texts[0]} to {texts[-1]}"
    return ", ".join(texts) or ("" if finite else "not known")


def _different(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values))

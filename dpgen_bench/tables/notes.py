"""What is written below a table: what its runs share, in what a line differs, and how its cells are read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from dpgen_bench.config.display import relation_name
from dpgen_bench.tables.lines import NONE, NOTHING, BuiltTable, Cell, Line
from dpgen_bench.tables.naming import certified, epsilon_of, is_measured, is_real_data, uses_no_records


@dataclass
class Notes:
    """The notes of a table; equal ones share a number."""

    texts: dict[str, int] = field(default_factory=dict)

    def number(self, texts: Iterable[str]) -> tuple[int, ...]:
        """The numbers of these notes, of which the empty ones are left out."""
        return tuple(dict.fromkeys(self.texts.setdefault(text, len(self.texts) + 1) for text in texts if text))


class Shared:
    """What the measured lines of a table share, which is said once, and in what a line differs, which is a note."""

    def __init__(self, built: BuiltTable) -> None:
        self._published = built.published
        measured = [line for line in built.lines if is_measured(line)]
        # The notes of runs that stand in say what differs, so what is shared is that of the others.
        facts = [_facts(line) for line in [each for each in measured if not each.stands_in] or measured]
        self.common: dict[str, str] = {}
        for key in dict.fromkeys(key for each in facts for key in each):
            texts = Counter(each[key] for each in facts if key in each)
            self.common[key] = texts.most_common(1)[0][0]
        printed = [cell for line in built.lines for cell in line.cells.values() if cell.published is not None]
        clauses = Counter(clause for cell in printed for clause in dict.fromkeys(cell.note.split("; ")) if clause)
        self.of_most = [clause for clause, count in clauses.items() if 2 * count > len(printed)]
        self.unmade = [line for line in built.lines if line.row is not None and line.tail["status"] == "not run"]
        self.is_unmade = bool(self.unmade) and not measured

    def note_of(self, cell: Cell) -> str:
        """The note on a published value without what holds for most of them."""
        clauses = [clause for clause in cell.note.split("; ") if clause and clause not in self.of_most]
        return "; ".join(clauses).rstrip(".")

    def notes_of(self, line: Line) -> list[str]:
        """The notes on a whole line: its state, who reports it, and in what its runs differ from most others."""
        texts = []
        status = line.tail["status"]
        main, _, reasons = status.partition("; ")
        if line.row is None:
            reasons = ""
            texts.append({"not implemented": "Not implemented here."}.get(status, _sentence(status)))
        elif main == "not run":
            texts.append("" if self.is_unmade else "Not run yet.")
        elif main not in ("measured", "measured in part", NOTHING) and "seeds measured" not in reasons:
            texts.append(_sentence(main))
        # Below a published value the reasons are a part of its own note.
        if reasons and not (self._published and any(cell.caveat for cell in line.cells.values())):
            texts.append(_sentence(reasons))
        if line.printed is not None and line.head.get("reported in", NONE) != NONE:
            reported = line.printed.reported_in
            texts.append(f"Published value{', ' if reported.startswith('run by') else ' as reported by '}{reported}.")
        if is_measured(line):
            # The notes on measured values name scale and protocol where there is a published value.
            is_end = is_real_data(line) or uses_no_records(line)  # nothing is trained, so scales do not differ
            hidden = ("scale", "protocol") if line.printed is not None else ()
            differing = [
                text
                for key, text in _facts(line).items()
                if text != self.common.get(key) and key not in hidden and not is_end
            ]
            texts.append(_sentence("; ".join(differing)))
            assert line.row is not None
            texts += map(_sentence, line.row.plugin_notes)
        elif line.row is not None and line.printed is None and not self.is_unmade:
            facts = _facts(line)  # what will be measured, where other lines of the table show something else
            planned = [facts[key] for key in ("protocol", "ε") if facts.get(key, "") not in ("", self.common.get(key))]
            texts.append(_sentence("; ".join(planned)))
        return [text for text in texts if text]


def _sentence(text: str) -> str:
    first = text[:1].upper() if text[:1].isascii() else text[:1]  # ε has no capital for readers
    return f"{first}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""


def _facts(line: Line) -> dict[str, str]:
    """How the runs of a measured line were made, measured and accounted for."""
    row = line.row
    assert row is not None
    privacy, seeds = row.specs[0].config.privacy, len(row.measured)
    facts = {
        "scale": f"scale {row.scale}",
        "protocol": f"protocol {line.tail['protocol']}",
        "seeds": "1 seed" if seeds == 1 else f"{seeds} seeds",
    }
    if row.evidence:
        facts["evidence"] = row.evidence
    if privacy.epsilon != math.inf and not uses_no_records(line):
        relation = relation_name(str(privacy.relation))
        unit = "a client" if row.unit == "client" else "a record"
        facts["ε"] = f"ε for {unit} under {relation} at δ = {privacy.delta:g}, by {str(privacy.accountant).upper()}"
    return facts


PUBLISHED = (
    "A cell has the value measured here and, below it in brackets, the published value and the difference (ours minus "
    "published)."
)
STANDS_IN = "Values with a mark are of runs that stand in where a row's own have none; their notes say what differs."
OF_OTHERS = "A marked ε is that of these runs, and says nothing about the published noise."
SPREAD = "± is the standard deviation over training seeds, (±) that over repeated evaluations of one generator."
BOLD = "Bold marks the best mean at one ε, which need not be a significant difference."
BOLD_OF_METHOD = BOLD.replace("mean", "mean of a method")
CERTIFIED = (
    "ε certified is what attacks showed the mechanisms to leak at least at these settings, to an observer of all "
    "releases (`dpgen audit`); each value holds at its own confidence."
)
EPSILON = (
    "ε claimed is by the paper's own accounting and neighbouring relation, which may be another than that of ε proven; "
    "ε proven follows from the ledgers of the runs made here."
)


def paragraphs(built: BuiltTable, shared: Shared, has_best: bool) -> list[str]:
    """What is written below a table, before its notes."""
    measured = [cell.measured for line in built.lines for cell in line.cells.values() if cell.measured is not None]
    spread = any(each.std_seeds is not None or each.std_repeats is not None for each in measured)
    legend = [*([PUBLISHED] if built.published and measured else []), *([SPREAD] if spread else [])]
    if built.published and not measured:
        legend.append("Published values are in brackets.")
    legend += [STANDS_IN] if any(line.stands_in for line in built.lines) else []
    legend += [OF_OTHERS] if any(line.is_of_other_runs for line in built.lines) else []
    legend += [BOLD_OF_METHOD if built.by_method else BOLD] if has_best else []
    legend += [EPSILON] if any("→" in epsilon_of(line) for line in built.lines) else []
    audited = any(certified(row).get("epsilon") is not None for row in built.rows)
    legend += [CERTIFIED] if audited else []
    facts = list(shared.common.values())
    unless = " unless a note says otherwise" if facts else ""
    made = f"Runs: {'; '.join(facts)}{unless}." if facts else ""
    if shared.is_unmade:
        quick = " scale=quick" if built.scale == "quick" else ""
        made = f"None of its runs has been made yet; `dpgen sweep {built.name}{quick}` makes them."
    if shared.of_most:
        legend.append(f"Of most published values: {'; '.join(shared.of_most)}.")
    return [text for text in [built.count_reproductions(), built.note, " ".join(legend), made] if text]

"""What all runs on one population spend together: releases on the same records add up, whichever run made them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table as View

from dpgen_bench.privacy.accountants.table import Table, epsilon_table
from dpgen_bench.privacy.events import RELATIONS, Event
from dpgen_bench.privacy.ledger import Entry, Ledger
from dpgen_bench.runs.config import population_of
from dpgen_bench.runs.listing import format_epsilon, make_console
from dpgen_bench.runs.store import RunFolder

ACCOUNTANTS = ("pld", "rdp")
# What no folder of results can know, and a reader of a total must.
CAVEATS = (
    "Only runs in this folder of results are counted. A run whose folder was deleted or is elsewhere has spent, too.",
    "Records that are in two populations, such as a subset under a name of its own, are spent on by both: give runs on "
    "overlapping records one name with privacy.population.",
    "Settings that were chosen after looking at earlier runs on the same records are not accounted for.",
)


@dataclass
class Spent:
    """The releases of one population with one unit of privacy, each once, whoever has inherited it.

    Attributes:
        runs: ids of the runs that made releases, finished or not.
        seeded: runs whose noise is public. Their releases are not counted: they protect nothing.
        deltas: of the runs' budgets.
        unproven: the reasons why nothing is proven of them.
    """

    population: str
    unit: str
    entries: dict[str, Entry] = field(default_factory=dict)
    runs: set[str] = field(default_factory=set)
    seeded: set[str] = field(default_factory=set)
    deltas: set[float] = field(default_factory=set)
    unproven: list[str] = field(default_factory=list)

    @property
    def events(self) -> list[Event]:
        """Approved allowances in full."""
        return [entry.event for entry in self.entries.values()]

    @property
    def delta(self) -> float:
        """The smallest delta of the runs: the total is stated at it, which is the largest epsilon of their choices."""
        return min(self.deltas)

    def add(self, run_id: str, ledger: Ledger) -> None:
        private = [entry for entry in ledger.entries.values() if entry.noise != "seeded"]
        if any(entry.noise == "seeded" for entry in ledger.entries.values()):
            self.seeded.add(run_id)
        if not private:
            return
        self.deltas.add(ledger.budget.delta)
        self.unproven += [f"run {run_id}: {reason}" for reason in ledger.unproven]
        for entry in private:
            run = entry.inherited_from or run_id
            self.runs.add(run)
            name = entry.name.rsplit(f"{run}/", 1)[-1]
            # What was approved belongs to the key: if two copies disagree, both count.
            approved = replace(entry, name=name, executed=0, inherited_from=None, noise=None, diagnostics=None)
            self.entries.setdefault(f"{run} {json.dumps(approved.to_dict(), sort_keys=True)}", entry)


def read_spent(results: Path) -> tuple[list[Spent], list[str]]:
    """What was spent of each population and unit, by name; and the runs that cannot be read, each with the reason."""
    found: dict[tuple[str, str], Spent] = {}
    unreadable = []
    for path in sorted((results / "runs").glob("*/ledger.json")):
        folder = RunFolder(path.parent)
        try:
            ledger = Ledger.load(path)
            population = population_for(folder, ledger)
        except Exception as error:  # one damaged run must not hide what the others spent
            unreadable.append(f"run {folder.id} cannot be read ({type(error).__name__})")
            continue
        key = population, ledger.unit
        found.setdefault(key, Spent(*key)).add(folder.id, ledger)
    return [found[key] for key in sorted(found) if found[key].runs], unreadable


def population_for(folder: RunFolder, ledger: Ledger) -> str:
    """The population of a run; of one whose ledger names none, what its config would name."""
    return ledger.population or population_of(folder.config)


def total(spent: Spent, results: Path, delta: float | None = None, timeout_s: float = 60.0) -> Table:
    """epsilon of everything that was spent, as `epsilon_table` gives it, by PLD and RDP under both relations.

    Args:
        delta: None takes `spent.delta`.
    """
    cache = results / "cache" / "epsilon.json"
    table = epsilon_table(spent.events, delta or spent.delta, timeout_s, cache=cache, accountants=ACCOUNTANTS)
    return {relation: dict.fromkeys(table[relation], "inf") for relation in table} if spent.unproven else table


def print_spent(results: Path, delta: float | None = None) -> None:
    """A line for each population, unit and relation: runs, mechanisms, epsilon; then why, and what is not covered."""
    populations, unreadable = read_spent(results)
    console = make_console()
    if not populations:
        console.print(f"no run with privacy.noise=os in {results / 'runs'} has made a release")
    view = View("population", "unit", "runs", "mechanisms", "relation", "δ", *(f"ε ({name})" for name in ACCOUNTANTS))
    notes = []
    for spent in populations:
        table = total(spent, results, delta)
        for relation in RELATIONS:
            first = relation == RELATIONS[0]
            who = [spent.population, spent.unit, _few(spent.runs), f"{len(spent.entries)}"] if first else [""] * 4
            figures = [_figure(table[relation][name]) for name in ACCOUNTANTS]
            view.add_row(*who, relation, f"{delta or spent.delta:g}" if first else "", *figures)
        notes += _notes(spent, populations)
    if populations:
        console.print(view)
    for note in [*notes, *(f"{why}: what it spent is in no total" for why in unreadable), *CAVEATS]:
        console.print(f"- {note}", highlight=False, soft_wrap=True)


def _notes(spent: Spent, populations: Sequence[Spent]) -> list[str]:
    where = f"{spent.population} ({spent.unit}s)"
    notes = [f"{where}: nothing is proven: {why}" for why in dict.fromkeys(spent.unproven)]
    if len(spent.deltas) > 1:
        notes.append(f"{where}: the runs' budgets have different δ; the total is at the smallest")
    if spent.seeded:
        notes.append(
            f"{where}: {_few(spent.seeded)} made releases with privacy.noise=seeded, which protect nothing and are not "
            "counted; if anything of them was given away, no total holds"
        )
    if spent.unit == "record" and any(other.unit == "client" for other in populations if _same(other, spent)):
        notes.append(
            f"{where}: runs whose unit is the client spend on these records, too. What they spend of a client bounds "
            "what they spend of one of its records (as replacing the client's data does); the epsilons add up, and the "
            "deltas"
        )
    return notes


def _same(one: Spent, other: Spent) -> bool:
    return one.population == other.population


def describe_total(results: Path, folder: RunFolder) -> list[str]:
    """Lines that say what a run spends by itself, and what all runs on its population do."""
    ledger = Ledger.load(folder.path / "ledger.json")
    if ledger.noise != "os":
        return []
    population = population_for(folder, ledger)
    populations, unreadable = read_spent(results)
    found = [each for each in populations if each.population == population and each.unit == ledger.unit]
    own: Mapping[str, Any] = ledger.epsilon or {}
    budget = ledger.budget
    lines = [f"this run: epsilon {format_epsilon(own.get('proven'))} ({budget.relation}, delta {budget.delta:g})"]
    for spent in found:
        table = total(spent, results)
        figures = ", ".join(f"{_figure(table[relation]['pld'])} ({relation})" for relation in RELATIONS)
        lines.append(
            f"all {len(spent.runs)} run(s) with privacy.noise=os on the {spent.unit}s of {population!r}: epsilon "
            f"{figures}, delta {spent.delta:g}, by pld"
        )
        lines += _notes(spent, populations)
    lines += [f"{failure.what}: {failure.statement}" for failure in ledger.failures if failure.statement]
    return [*lines, *(f"{why}: what it spent is in no total" for why in unreadable), *CAVEATS]


def _few(runs: set[str]) -> str:
    some = sorted(runs)
    return ", ".join(some[:3]) + (f" and {len(some) - 3} more" if len(some) > 3 else "")


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else format_epsilon(value)

"""The epsilon that all runs on the same population spend together, because releases on the same records compose."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table as View

from dpgen_bench.config.display import relation_name
from dpgen_bench.config.spec import population_of
from dpgen_bench.outcomes.listing import format_epsilon, make_console
from dpgen_bench.privacy.accountants.table import Table, epsilon_table
from dpgen_bench.privacy.events import RELATIONS, Event
from dpgen_bench.privacy.ledger import Entry, Ledger
from dpgen_bench.store.folders import RunFolder

ACCOUNTANTS = ("pld", "rdp")
# Limits of every total, because they cannot be computed from the folder of results.
CAVEATS = (
    "Only runs in this folder of results are counted. A run whose folder was deleted or is elsewhere has spent, too.",
    "Records that are in two populations, such as a subset under a name of its own, are spent on by both: give runs on "
    "overlapping records one name with privacy.population.",
    "Settings that were chosen after looking at earlier runs on the same records are not accounted for.",
)


@dataclass
class Spent:
    """The releases on one population with one unit of privacy. Inherited releases are counted once.

    Attributes:
        population: the name of the population.
        unit: "record" or "client".
        entries: the entries of the runs' ledgers with private noise, by run and content.
        runs: ids of the runs that made releases, finished or not.
        seeded: ids of runs with releases whose noise is public. These are not counted: they protect nothing.
        deltas: the deltas of the runs' budgets.
        unproven: the reasons why nothing is proven for some releases.
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
        """The events of all allowances, as approved, even if fewer releases were executed."""
        return [entry.event for entry in self.entries.values()]

    @property
    def delta(self) -> float:
        """The smallest delta of the runs, at which totals are stated; a larger delta would give a smaller epsilon."""
        return min(self.deltas)

    def add(self, run_id: str, ledger: Ledger) -> None:
        """Add the releases in the ledger of a run."""
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
            # The key contains what was approved, so that two copies of an entry that differ are both counted.
            approved = replace(entry, name=name, executed=0, inherited_from=None, noise=None, diagnostics=None)
            self.entries.setdefault(f"{run} {json.dumps(approved.to_dict(), sort_keys=True)}", entry)


def read_spent(results: Path) -> tuple[list[Spent], list[str]]:
    """The releases on each population and unit, sorted by name, and a message for each run that cannot be read."""
    populations: dict[tuple[str, str], Spent] = {}
    unreadable = []
    for path in sorted((results / "runs").glob("*/ledger.json")):
        folder = RunFolder(path.parent)
        try:
            ledger = Ledger.load(path)
            population = population_for(folder, ledger)
        except Exception as error:  # one unreadable run must not hide what the others spent
            unreadable.append(f"run {folder.id} cannot be read ({type(error).__name__})")
            continue
        key = population, ledger.unit
        populations.setdefault(key, Spent(*key)).add(folder.id, ledger)
    return [populations[key] for key in sorted(populations) if populations[key].runs], unreadable


def population_for(folder: RunFolder, ledger: Ledger) -> str:
    """The population of a run by its ledger, or else by its config."""
    return ledger.population or population_of(folder.config)


def total(spent: Spent, results: Path, delta: float | None = None, timeout_s: float = 60.0) -> Table:
    """Epsilon of all releases by PLD and RDP under both relations, in the form of `epsilon_table`.

    Args:
        results: the folder of results, which has the cache of epsilons.
        delta: None is `spent.delta`.
        timeout_s: time limit for each epsilon, in seconds.
    """
    cache = results / "cache" / "epsilon.json"
    table = epsilon_table(spent.events, delta or spent.delta, timeout_s, cache=cache, accountants=ACCOUNTANTS)
    return {relation: dict.fromkeys(table[relation], "inf") for relation in table} if spent.unproven else table


def print_spent(results: Path, delta: float | None = None) -> None:
    """Print a row for each population, unit and relation, then notes and the limits of the totals."""
    populations, unreadable = read_spent(results)
    console = make_console()
    if not populations:
        console.print(f"no run with privacy.noise=os in {results / 'runs'} has made a release")
    view = View("population", "unit", "runs", "mechanisms", "relation", "δ", *(f"ε ({name})" for name in ACCOUNTANTS))
    notes = []
    for spent in populations:
        table = total(spent, results, delta)
        for relation in RELATIONS:
            is_first = relation == RELATIONS[0]
            head = [spent.population, spent.unit, _first_three(spent.runs), f"{len(spent.entries)}"]
            epsilons = [format_epsilon(table[relation][name]) for name in ACCOUNTANTS]
            delta_text = f"{delta or spent.delta:g}" if is_first else ""
            view.add_row(*(head if is_first else [""] * 4), relation_name(relation), delta_text, *epsilons)
        notes += _notes(spent, populations)
    if populations:
        console.print(view)
    for note in [*notes, *(f"{why}: what it spent is not in any total" for why in unreadable), *CAVEATS]:
        console.print(f"- {note}", highlight=False, soft_wrap=True)


def _notes(spent: Spent, populations: Sequence[Spent]) -> list[str]:
    """What a reader of the total of `spent` must know, where `populations` are all totals."""
    where = f"{spent.population} ({spent.unit}s)"
    notes = [f"{where}: nothing is proven: {why}" for why in dict.fromkeys(spent.unproven)]
    if len(spent.deltas) > 1:
        notes.append(f"{where}: the runs' budgets have different δ; the total is at the smallest")
    if spent.seeded:
        notes.append(
            f"{where}: {_first_three(spent.seeded)} made releases with privacy.noise=seeded, which protect nothing and "
            "are not counted; if their outputs were released, no total holds"
        )
    same = [other for other in populations if other.population == spent.population]
    if spent.unit == "record" and any(other.unit == "client" for other in same):
        notes.append(
            f"{where}: runs whose unit is the client spend on these records, too. What they spend on a client bounds "
            "what they spend on one of its records, because replacing one record replaces the client's data; the "
            "epsilons add up, and so do the deltas"
        )
    return notes


def describe_total(results: Path, folder: RunFolder) -> list[str]:
    """Lines with the epsilon of a run with privacy.noise=os, and of all runs on its population; [] for another run."""
    ledger = Ledger.load(folder.path / "ledger.json")
    if ledger.noise != "os":
        return []
    population = population_for(folder, ledger)
    populations, unreadable = read_spent(results)
    same = [each for each in populations if each.population == population and each.unit == ledger.unit]
    own: Mapping[str, Any] = ledger.epsilon or {}
    budget = ledger.budget
    terms = f"{relation_name(budget.relation)}, delta {budget.delta:g}"
    lines = [f"this run: epsilon {format_epsilon(own.get('proven'))} ({terms})"]
    for spent in same:
        table = total(spent, results)
        by_relation = {relation_name(relation): format_epsilon(table[relation]["pld"]) for relation in RELATIONS}
        epsilons = ", ".join(f"{epsilon} ({name})" for name, epsilon in by_relation.items())
        lines.append(
            f"all {len(spent.runs)} run(s) with privacy.noise=os on the {spent.unit}s of {population!r}: epsilon "
            f"{epsilons}, delta {spent.delta:g}, by pld"
        )
        lines += _notes(spent, populations)
    lines += [f"{failure.what}: {failure.statement}" for failure in ledger.failures if failure.statement]
    return [*lines, *(f"{why}: what it spent is not in any total" for why in unreadable), *CAVEATS]


def _first_three(runs: set[str]) -> str:
    """The first three ids, and the number of the others."""
    ids = sorted(runs)
    return ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")

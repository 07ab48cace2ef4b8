"""`dpgen account`: epsilon of planned mechanisms by RDP, PRV and PLD under both neighbouring relations."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.display import relation_name
from dpgen_bench.config.spec import build_spec
from dpgen_bench.privacy.accountants.claims import classical_rdp, memoryless_event, opacus_rdp, wor_rdp
from dpgen_bench.privacy.accountants.proven import ACCOUNTANTS, epsilon
from dpgen_bench.privacy.accountants.table import Table, claimed_epsilon, conditional_epsilon, epsilon_table
from dpgen_bench.privacy.events import RELATIONS, Event, Sensitivity, budget_text
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import Full, OneClient, OneShard, Poisson, Sampling
from dpgen_bench.runs.plan import plan
from dpgen_bench.utils.console import Console


class UsageError(Exception):
    """Raised for invalid arguments."""


@dataclass(frozen=True)
class Plan:
    """The releases to account for.

    Args:
        events: one event for each mechanism.
        delta: the delta at which epsilon is computed.
        ledger: the ledger of the run that overrides describe, which names the mechanisms; None for options.
    """

    events: list[Event]
    delta: float
    ledger: Ledger | None = None

    def tables_of_each(self, timeout_s: float, cache: Path | None) -> dict[str, Table]:
        """The epsilon of each mechanism alone, by the budget's accountant; empty unless there are several."""
        if self.ledger is None or len(self.ledger.entries) < 2:
            return {}
        accountants = (self.ledger.budget.accountant,)
        return {
            name: epsilon_table([entry.event], self.delta, timeout_s, cache=cache, accountants=accountants)
            for name, entry in self.ledger.entries.items()
        }


def run_account(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Run `dpgen account`; returns the exit status (0, or 2 for invalid arguments).

    Args:
        arguments: the options, as `cli.account_parser` checks them.
        overrides: what is neither an option nor the value of one, in full.
    """
    try:
        plan = _build_plan(arguments, overrides)
        server = _against_server(plan.events, plan.delta)
        claims, conditional = _claims(arguments, overrides, plan) if arguments.published else ({}, {})
    except (UsageError, ValueError, LookupError, FileNotFoundError) as error:
        print(f"dpgen account: {error}", file=sys.stderr)
        return 2
    table = epsilon_table(plan.events, plan.delta, arguments.timeout, claims, arguments.cache, conditional)
    alone = plan.tables_of_each(arguments.timeout, arguments.cache)
    if arguments.json:
        against_server = {} if server is None else {"server": server}
        mechanisms = [_as_json(event) for event in plan.events]
        for name, mechanism in zip(plan.ledger.entries if plan.ledger else (), mechanisms, strict=False):
            mechanism |= {"name": name, "epsilon_alone": alone.get(name, table)}
        print(json.dumps({"delta": plan.delta, "mechanisms": mechanisms, "epsilon": table, **against_server}))
    else:
        _print(table, plan, alone, arguments, server)
    return 0


def _build_plan(arguments: argparse.Namespace, overrides: list[str]) -> Plan:
    """The releases that the overrides plan, or else those that the options describe."""
    if overrides:
        ledger = plan(overrides)
        return Plan(ledger.events, arguments.delta or ledger.budget.delta, ledger)
    releases = arguments.releases_per_draw
    joint = math.sqrt(releases)
    is_sum = releases == 1 and arguments.clients is None  # a client's answer may be any function of its records
    per_record = (arguments.bound or ("record" if is_sum else "row")) == "record"
    sensitivity = Sensitivity(joint, 2.0 * joint if per_record else joint)
    sampling: Sampling
    if arguments.shards is not None:
        sampling = OneShard(arguments.shards, arguments.schedule or "random")
    elif arguments.clients is not None:
        sampling = OneClient(arguments.clients, arguments.schedule or "random", arguments.max_answers)
    else:
        sampling = Full() if arguments.q == 1.0 else Poisson(arguments.q)
    return Plan([Event(sampling, sensitivity, arguments.sigma, arguments.steps)], arguments.delta or 1e-5)


def _against_server(events: Sequence[Event], delta: float) -> dict[str, Any] | None:
    """Epsilon of a client against the server, {"answers": k_max, "epsilon": {relation: exact}}; None without clients.

    The server knows which client it asks and keeps every answer, so sampling does not amplify privacy: a client makes
    at most k_max unsampled Gaussian releases. This holds for any choice of clients and any message of the server.
    """
    if len(events) != 1 or not isinstance(events[0].sampling, OneClient):
        return None
    (event,) = events
    assert isinstance(event.sampling, OneClient)
    answers = event.sampling.max_participations(event.times)
    unsampled = replace(event, sampling=Full(), times=answers)
    return {
        "answers": answers,
        "epsilon": {relation: epsilon([unsampled], delta, relation, "pld") for relation in RELATIONS},
    }


def _claims(
    arguments: argparse.Namespace, overrides: list[str], plan: Plan
) -> tuple[dict[str, float], dict[str, float | Sequence[Event]]]:
    """Claimed and conditional epsilons by label: those of a run's method, or as the papers count draws.

    A claimed epsilon is what the paper states; a conditional one holds under an assumption.

    Raises:
        UsageError: if there is neither.
    """
    if overrides:
        config = compose_config(overrides)
        name, method, events, delta = config.method.name, build_spec(config).method(), plan.events, plan.delta
        claimed = claimed_epsilon(method, events, delta)
        conditional = conditional_epsilon(method, events, delta)
        if claimed is None and conditional is None:
            at = " at these settings" if hasattr(method, "epsilon_claimed") else ""
            raise UsageError(
                f"expected with --published a method whose paper's count can be printed, got {name}, which has "
                f"none{at}: the paper states no count, or one that depends on private values."
            )
        return (
            {} if claimed is None else {f"claimed (by {name}'s paper)": float(claimed)},
            {}
            if conditional is None
            else {f"conditional ({conditional['assumption']})": float(conditional["epsilon"])},
        )
    compositions = arguments.steps * arguments.releases_per_draw
    rest = (arguments.sigma, compositions, plan.delta)
    label = f"claimed ({compositions:,} compositions, {{}} RDP)"
    if arguments.q is None:
        if arguments.schedule == "public_balanced" or arguments.max_answers is not None:
            raise UsageError(
                "expected --published without --max-answers or a public schedule: the papers draw shards and clients "
                "at random, without a limit."
            )
        return (
            {label.format("without-replacement"): wor_rdp(1.0 / (arguments.shards or arguments.clients), *rest)},
            {"conditional (if steps were memoryless)": [memoryless_event(event) for event in plan.events]},
        )
    claims = {label.format("classical"): classical_rdp(arguments.q, *rest)}
    if arguments.releases_per_draw == 1:
        claims[label.format("Opacus")] = opacus_rdp(arguments.q, *rest)
    return claims, {}


def _as_json(event: Event) -> dict[str, Any]:
    """The entry of one mechanism in the output of --json."""
    sampling = event.sampling.to_dict()
    return {
        "sampling": sampling.pop("kind").lower(),
        **sampling,
        "multiplier": {"add_remove": event.multiplier("add_remove"), "replace_one": event.multiplier("replace_one")},
        "times": event.times,
    }


def _print(
    table: Table,
    plan: Plan,
    alone: Mapping[str, Table],
    arguments: argparse.Namespace,
    server: Mapping[str, Any] | None = None,
) -> None:
    """Print the mechanisms, the table of proven epsilons, and the epsilons of other kinds below it."""
    from rich.table import Table as RichTable

    # The mechanisms; plain parameters have no ledger, so their events have no names.
    console = Console(highlight=False)
    entries = list(plan.ledger.entries.values()) if plan.ledger else [None] * len(plan.events)
    for entry, event in zip(entries, plan.events, strict=True):
        name = "" if entry is None else f"{entry.name!r}: "
        share = "" if entry is None or entry.share is None else f", share {entry.share:g} of the budget"
        plural = "" if event.times == 1 else "s"
        console.print(
            f"{name}{event.times:,} release{plural}, {event.sampling}, "
            f"joint multiplier {event.multiplier('add_remove'):.5g}{share}",
            soft_wrap=True,
        )
    if plan.ledger is not None:
        budget = plan.ledger.budget
        counted_by = f"{relation_name(budget.relation)}, {budget.accountant}"
        console.print(f"budget: epsilon {budget_text(budget.epsilon)} ({counted_by})")
    # The proven epsilons: of everything together, then of each mechanism alone.
    view = RichTable(title=f"epsilon at delta = {plan.delta:g}", title_justify="left")
    for column in ("count", *map(relation_name, RELATIONS)):
        view.add_column(column, overflow="fold")
    for name in ACCOUNTANTS:
        view.add_row(f"proven, {name.upper()}", _cell(table["add_remove"][name]), _cell(table["replace_one"][name]))
    for mechanism, epsilons in alone.items():
        for name in epsilons["add_remove"]:
            cells = (_cell(epsilons[relation][name]) for relation in ("add_remove", "replace_one"))
            view.add_row(f"{mechanism!r} alone, {name.upper()}", *cells)
    console.print(view)
    if server is not None:
        answers, epsilons = server["answers"], server["epsilon"]
        console.print(
            f"against the server, which keeps every answer (at most {answers:,} of one client, which adds the noise): "
            f"{_cell(epsilons['add_remove'])} (add/remove), {_cell(epsilons['replace_one'])} (replace-one)"
        )
    # These are not in the table's columns, because each paper counts under a relation of its own.
    for label, value in [*table.get("conditional", {}).items(), *table.get("claimed", {}).items()]:
        console.print(f"{label}: {_cell(value)}")
    if table.get("claimed") and arguments.releases_per_draw > 1:
        console.print(
            f"The claim counts {arguments.releases_per_draw} independent draws per step, but a step has one draw: the "
            "claimed epsilon is no bound."
        )


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"

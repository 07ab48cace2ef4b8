"""`dpgen account`: epsilon of a planned mechanism by three accountants under both neighbouring relations."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from dpgen_bench.privacy.accountants.claims import classical_rdp, memoryless_event, opacus_rdp, wor_rdp
from dpgen_bench.privacy.accountants.proven import ACCOUNTANTS, epsilon
from dpgen_bench.privacy.accountants.table import Table, claimed_epsilon, conditional_epsilon, epsilon_table
from dpgen_bench.privacy.events import RELATIONS, Event, Sensitivity, budget_text
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import Full, OneClient, OneShard, Poisson, Sampling
from dpgen_bench.runs.config import build_spec, compose_config
from dpgen_bench.runs.plan import plan

EPILOG = """\
sigma is the noise multiplier: noise std over the add/remove sensitivity of ONE released row. For a sum of clipped
per-record gradients that sensitivity is C. For rows that may be any function of the batch (DP-Sinkhorn, GS-WGAN) it
is 2C, and the papers' sigma is already relative to 2C (DP-Sinkhorn's Algorithm 1), so give it as printed.

Where one draw feeds B releases, they move together: what is proven is the multiplier sigma / sqrt(B), T times.

--shards K instead of --q: a draw is one of K disjoint parts of the records (GS-WGAN), which may keep private state.
  dpgen account --shards 1000 --sigma 1.07 --steps 20000 --releases-per-draw 32 --published

--clients N instead of --q: each step asks one of N clients, --max-answers times each at most, and the client adds the
noise. The table is of outsiders, who see what is made of the answers; the line below it is of the server.
  dpgen account --clients 3400 --sigma 1.07 --steps 30000 --releases-per-draw 32 --max-answers 20

Without these: Hydra overrides, whose planned mechanisms are accounted before any data is used. Where there are several,
the table also shows the epsilon of each alone, by the accountant of the budget; these epsilons do not add up:
  dpgen account method=dpgan dataset=mnist privacy.epsilon=10
"""


class Usage(Exception):
    """Bad arguments; the message says what was expected."""


@dataclass(frozen=True)
class Plan:
    """What is accounted. ledger: of the run that overrides describe, with the names of its mechanisms; else None."""

    events: list[Event]
    delta: float
    ledger: Ledger | None = None

    def alone(self, timeout_s: float, cache: Path | None) -> dict[str, Table]:
        """The epsilon of each mechanism by itself, by the budget's accountant; empty unless there are several."""
        if self.ledger is None or len(self.ledger.entries) < 2:
            return {}
        accountants = (self.ledger.budget.accountant,)
        return {
            name: epsilon_table([entry.event], self.delta, timeout_s, cache=cache, accountants=accountants)
            for name, entry in self.ledger.entries.items()
        }


def main(argv: list[str]) -> int:
    """`dpgen account`; returns the exit status (0, or 2 for bad arguments)."""
    parser = _parser()
    try:
        arguments, overrides = parser.parse_known_args(argv)
    except SystemExit as ending:  # argparse has printed help or the error
        return int(ending.code or 0)
    try:
        _check(arguments, overrides)
        if arguments.config_dir is not None:
            overrides = [f"--config-dir={arguments.config_dir}", *overrides]
        plan = _planned(arguments, overrides)
        server = _seen_by_server(plan.events, plan.delta)
        claims, conditional = _claims(arguments, overrides, plan) if arguments.published else ({}, {})
    except (Usage, ValueError, LookupError, FileNotFoundError) as error:
        print(f"dpgen account: {error}", file=sys.stderr)
        return 2
    table = epsilon_table(plan.events, plan.delta, arguments.timeout, claims, arguments.cache, conditional)
    alone = plan.alone(arguments.timeout, arguments.cache)
    if arguments.json:
        told = {} if server is None else {"server": server}
        mechanisms = [_as_json(event) for event in plan.events]
        for name, mechanism in zip(plan.ledger.entries if plan.ledger else (), mechanisms, strict=False):
            mechanism |= {"name": name, "epsilon_alone": alone.get(name, table)}
        print(json.dumps({"delta": plan.delta, "mechanisms": mechanisms, "epsilon": table, **told}))
    else:
        _print(table, plan, alone, arguments, server)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpgen account",
        usage="dpgen account (--q Q | --shards K | --clients N) --sigma S --steps T [options] | "
        "dpgen account OVERRIDES [options]",
        description="epsilon by RDP, PRV and PLD under both neighbouring relations.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--q", type=_rate, help="Poisson sampling rate in (0, 1], e.g. 1/469; 1: every record")
    parser.add_argument("--shards", type=int, metavar="K", help="each draw is one of K disjoint parts of the records")
    parser.add_argument("--clients", type=int, metavar="N", help="each step asks one of N clients, which is the unit")
    parser.add_argument(
        "--schedule", choices=("random", "public_balanced"), help="of the shards or clients drawn (default random)"
    )
    parser.add_argument(
        "--max-answers", type=int, metavar="K", help="of one client; a step beyond passes without a release"
    )
    parser.add_argument("--sigma", type=float, help="noise multiplier of one released row (see below)")
    parser.add_argument("--steps", type=int, help="T: number of draws")
    parser.add_argument("--delta", type=float, help="default 1e-5, or privacy.delta of the overrides")
    parser.add_argument(
        "--releases-per-draw", type=int, default=1, metavar="B", help="rows released from each draw (default 1)"
    )
    parser.add_argument(
        "--bound",
        choices=("record", "row"),
        help="what one row is: a clipped sum over records (replacing one moves it twice as far as removing one), or "
        "any clipped function of the batch (both move it by 2C). Default: record if B is 1, else row; row of clients",
    )
    parser.add_argument("--config-dir", metavar="DIR", help="with yamls of your own, for the overrides")
    parser.add_argument("--published", action="store_true", help="print the papers' own count beside the proven one")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds per cell (default 60)")
    parser.add_argument("--cache", type=Path, help="JSON file that remembers slow cells")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def _rate(text: str) -> float:
    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"expected a number or a fraction such as 1/469, got {text!r}") from None


def _check(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Raise Usage for what argparse cannot see."""
    stray = [token for token in overrides if "=" not in token.lstrip("-") and not token.startswith("~")]
    stray += [token for token in overrides if token.startswith("-") and token not in stray]
    if stray:
        raise Usage(
            f"expected options or Hydra overrides (key=value), got {' '.join(stray)}; see dpgen account --help."
        )
    given = [name for name in ("q", "shards", "clients", "sigma", "steps") if getattr(arguments, name) is not None]
    drawn = [name for name in given if name in ("q", "shards", "clients")]
    wanted = "--q or --shards, --sigma and --steps"
    if given and overrides:
        raise Usage(f"expected either {wanted}, or overrides, got both (--{given[0]}, {overrides[0]}).")
    if len(drawn) > 1:
        raise Usage(f"expected one of --{' and --'.join(drawn)}, got {'both' if len(drawn) == 2 else 'all'}.")
    missing = [name for name in ("q", "sigma", "steps") if name not in given and not (name == "q" and drawn)]
    if given and missing:
        raise Usage(f"expected {wanted} together; missing {', '.join(f'--{name}' for name in missing)}.")
    if not given and not overrides:
        raise Usage(f"expected {wanted}, or Hydra overrides such as method=dpgan; see --help, for --clients too.")
    if arguments.schedule and drawn not in (["shards"], ["clients"]):
        raise Usage("--schedule belongs to --shards and --clients.")
    if arguments.max_answers is not None and drawn != ["clients"]:
        raise Usage("--max-answers belongs to --clients.")
    if overrides and (arguments.bound or arguments.releases_per_draw != 1):
        raise Usage(f"--bound and --releases-per-draw belong to {wanted}.")
    rules = {
        "q": ("in (0, 1]", lambda q: 0.0 < q <= 1.0),
        "shards": (">= 1", lambda shards: shards >= 1),
        "clients": (">= 1", lambda clients: clients >= 1),
        "max_answers": (">= 1", lambda answers: answers >= 1),
        "sigma": ("> 0 and finite", lambda sigma: 0.0 < sigma < math.inf),
        "steps": (">= 1", lambda steps: steps >= 1),
        "delta": ("in (0, 1)", lambda delta: 0.0 < delta < 1.0),
        "releases_per_draw": (">= 1", lambda releases: releases >= 1),
        "timeout": ("> 0", lambda seconds: seconds > 0.0),
    }
    for name, (expected, holds) in rules.items():
        value = getattr(arguments, name)
        if value is not None and not holds(value):
            raise Usage(f"expected --{name.replace('_', '-')} {expected}, got {value:g}.")


def _planned(arguments: argparse.Namespace, overrides: list[str]) -> Plan:
    if overrides:
        ledger = plan(overrides)
        return Plan(ledger.events, arguments.delta or ledger.budget.delta, ledger)
    releases = arguments.releases_per_draw
    joint = math.sqrt(releases)
    sums = releases == 1 and arguments.clients is None  # a client answers with any function of its records
    per_record = (arguments.bound or ("record" if sums else "row")) == "record"
    sensitivity = Sensitivity(joint, 2.0 * joint if per_record else joint)
    sampling: Sampling
    if arguments.shards is not None:
        sampling = OneShard(arguments.shards, arguments.schedule or "random")
    elif arguments.clients is not None:
        sampling = OneClient(arguments.clients, arguments.schedule or "random", arguments.max_answers)
    else:
        sampling = Full() if arguments.q == 1.0 else Poisson(arguments.q)
    return Plan([Event(sampling, sensitivity, arguments.sigma, arguments.steps)], arguments.delta or 1e-5)


def _seen_by_server(events: Sequence[Event], delta: float) -> dict[str, Any] | None:
    """What the server learns of one client, {"answers": k_max, "epsilon": {relation: exact}}; None without clients.

    It knows whom it asks and keeps every answer, so nothing is amplified: as many unsampled Gaussian releases as a
    client answers at most. That is so whomever it asks, and whatever it sends.
    """
    if len(events) != 1 or not isinstance(events[0].sampling, OneClient):
        return None
    (event,) = events
    assert isinstance(event.sampling, OneClient)
    answers = event.sampling.max_participations(event.times)
    seen = replace(event, sampling=Full(), times=answers)
    return {
        "answers": answers,
        "epsilon": {relation: epsilon([seen], delta, relation, "pld") for relation in RELATIONS},
    }


def _claims(
    arguments: argparse.Namespace, overrides: list[str], plan: Plan
) -> tuple[dict[str, float], dict[str, float | Sequence[Event]]]:
    """The paper's own count, and what would hold under an assumption: of a run's method, or as the papers count draws.

    Raises:
        Usage: if there is neither.
    """
    if overrides:
        config = compose_config(overrides)
        name, method, events, delta = config.method.name, build_spec(config).method(), plan.events, plan.delta
        claimed = claimed_epsilon(method, events, delta)
        figure = conditional_epsilon(method, events, delta)
        if claimed is None and figure is None:
            raise Usage(f"--published: {name} has no count of its paper's own for these settings.")
        return (
            {} if claimed is None else {f"claimed (by {name}'s paper)": float(claimed)},
            {} if figure is None else {f"conditional ({figure['assumption']})": float(figure["epsilon"])},
        )
    compositions = arguments.steps * arguments.releases_per_draw
    rest = (arguments.sigma, compositions, plan.delta)
    label = f"claimed ({compositions:,} compositions, {{}} RDP)"
    if arguments.q is None:
        if arguments.schedule == "public_balanced" or arguments.max_answers is not None:
            raise Usage(
                "--published: the papers draw shards and clients at random, without a limit; they have no count for a "
                "public schedule or for --max-answers."
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
    from rich.console import Console
    from rich.table import Table as RichTable

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
        console.print(f"budget: epsilon {budget_text(budget.epsilon)} ({budget.relation}, {budget.accountant})")
    view = RichTable(title=f"epsilon at delta = {plan.delta:g}", title_justify="left")
    for column in ("count", "add/remove", "replace-one"):
        view.add_column(column, overflow="fold")
    for name in ACCOUNTANTS:
        view.add_row(f"proven, {name.upper()}", _cell(table["add_remove"][name]), _cell(table["replace_one"][name]))
    for mechanism, costs in alone.items():
        for name in costs["add_remove"]:
            cells = (_cell(costs[relation][name]) for relation in ("add_remove", "replace_one"))
            view.add_row(f"{mechanism!r} alone, {name.upper()}", *cells)
    console.print(view)
    if server is not None:
        most, felt = server["answers"], server["epsilon"]
        console.print(
            f"against the server, which keeps every answer ({most:,} of one client at most, noised by itself): "
            f"{_cell(felt['add_remove'])} (add/remove), {_cell(felt['replace_one'])} (replace-one)"
        )
    # In no column: under which relation a paper counts is its own affair.
    for label, value in [*table.get("conditional", {}).items(), *table.get("claimed", {}).items()]:
        console.print(f"{label}: {_cell(value)}")
    if table.get("claimed") and arguments.releases_per_draw > 1:
        console.print(
            f"The claim counts {arguments.releases_per_draw} separate draws per step; there is one: it bounds nothing."
        )


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"

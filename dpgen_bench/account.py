"""`dpgen account`: epsilon of a planned mechanism by three accountants under both neighbouring relations.

Each figure that may take long is computed in a process of its own with a time limit, because nothing inside the
accounting libraries can be interrupted. This module and `privacy.accountants` keep torch out of those processes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpgen_bench.privacy.accountants import ACCOUNTANTS, Composition, NotCovered

if TYPE_CHECKING:
    from dpgen_bench.privacy.events import Budget, Event, Relation

Table = dict[str, dict[str, float | str]]

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

Without these: Hydra overrides, whose planned mechanisms are accounted before any data is used:
  dpgen account method=dpgan dataset=mnist privacy.epsilon=10
"""


class Usage(Exception):
    """Bad arguments; the message says what was expected."""


def epsilon_table(
    events: Sequence[Event],
    delta: float,
    timeout_s: float = 60.0,
    claims: Mapping[str, float] | None = None,
    cache: Path | None = None,
    conditional: Mapping[str, float | Sequence[Event]] | None = None,
) -> Table:
    """epsilon of `events` at `delta` by every accountant under every relation, safe to write as JSON.

    Args:
        events: what was (or would be) released, composed in full.
        timeout_s: limit in seconds of one cell that needs a process of its own.
        claims: label -> a paper's own figure, carried along under "claimed".
        cache: JSON file that remembers cells by composition, delta, relation and library version.
        conditional: label, with the assumption in it -> a figure, or the events of which it is the add/remove epsilon
            by PLD; carried along under "conditional".

    Returns:
        {relation: {accountant: cell}} where a cell is a float, "inf", "over 60 s" or "not available: why".

    Raises:
        ValueError: delta outside (0, 1).
    """
    from dpgen_bench.privacy.events import RELATIONS

    if not 0.0 < delta < 1.0:
        raise ValueError(f"expected delta in (0, 1), got {delta!r}.")
    known = _read(cache)
    jobs: dict[tuple[str, str], _Cell] = {
        (relation, name): _Cell(Composition.of(events, relation), delta, relation, name)
        for relation in RELATIONS
        for name in ACCOUNTANTS
    }
    for label, assumed in (conditional or {}).items():
        if not isinstance(assumed, float):
            jobs["conditional", label] = _Cell(Composition.of(assumed, "add_remove"), delta, "add_remove", "pld")
    # A worker only waits for its process, so threads are enough; one per core keeps the limits honest.
    with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as workers:
        answers = workers.map(lambda cell: cell.answer(timeout_s, known), jobs.values())
        cells = dict(zip(jobs, answers, strict=True))
    if cache is not None:
        _remember(cache, {jobs[place].key: answer for place, answer in cells.items() if jobs[place].slow})
    table: Table = {relation: {name: _word(cells[relation, name]) for name in ACCOUNTANTS} for relation in RELATIONS}
    if claims:
        table["claimed"] = {label: _word({"epsilon": value}) for label, value in claims.items()}
    if conditional:
        figures = {label: cells.get(("conditional", label), {"epsilon": value}) for label, value in conditional.items()}
        table["conditional"] = {label: _word(answer) for label, answer in figures.items()}
    return table


def claimed_epsilon(method: Any, events: Sequence[Event], delta: float) -> float | str | None:
    """The method's `epsilon_claimed`, safe to write as JSON; None if it has none."""
    claim = getattr(method, "epsilon_claimed", None)
    value = claim(events, delta) if claim else None
    return None if value is None else _word({"epsilon": value})


def conditional_epsilon(method: Any, events: Sequence[Event], delta: float) -> dict[str, Any] | None:
    """The method's `epsilon_conditional` as {"epsilon", "assumption"}, safe to write as JSON; None if it has none."""
    figure = getattr(method, "epsilon_conditional", None)
    found = figure(events, delta) if figure else None
    return None if found is None else {"epsilon": _word({"epsilon": found[0]}), "assumption": str(found[1])}


class _Cell:
    """One figure of the table. Answers are {"epsilon": x}, {"reason": why} or {"over": seconds}."""

    def __init__(self, composition: Composition | None, delta: float, relation: Relation, name: str) -> None:
        self.composition, self.delta, self.relation, self.name = composition, delta, relation, name

    @property
    def slow(self) -> bool:
        """Whether it may take more than about a second. RDP, unsampled Gaussians and one law of hits do not."""
        if self.composition is None or ACCOUNTANTS[self.name].uncovered(self.composition, self.relation):
            return False
        return self.name != "rdp" and (bool(self.composition.poisson) or self.composition.hidden > 1)

    @property
    def request(self) -> dict[str, Any]:
        assert self.composition is not None
        return {
            **self.composition.to_dict(),
            "delta": self.delta,
            "relation": self.relation,
            "accountant": self.name,
            "library": version(ACCOUNTANTS[self.name].library),
        }

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.request, sort_keys=True).encode()).hexdigest()

    def answer(self, timeout_s: float, known: Mapping[str, Any]) -> dict[str, Any]:
        if self.composition is None:
            return {"epsilon": math.inf}
        if not self.slow:
            return _compute(self.composition, self.delta, self.relation, self.name)
        remembered: dict[str, Any] | None = known.get(self.key)
        if remembered is not None and remembered.get("over", math.inf) >= timeout_s:
            return remembered
        return self._in_a_process(timeout_s)

    def _in_a_process(self, timeout_s: float) -> dict[str, Any]:
        paths = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            done = subprocess.run(
                [sys.executable, "-c", "from dpgen_bench.account import answer_request; answer_request()"],
                input=json.dumps(self.request),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"over": timeout_s}
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return {"failed": f"the process ended with status {done.returncode}: {last}"}
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


def answer_request() -> None:
    """The child's side: one JSON request on stdin, one JSON answer on stdout, and nothing else there."""
    request = json.load(sys.stdin)
    composition = Composition.from_dict(request)
    with contextlib.redirect_stdout(sys.stderr):
        answer = _compute(composition, request["delta"], request["relation"], request["accountant"])
    json.dump(answer, sys.stdout)


def _compute(composition: Composition, delta: float, relation: Relation, name: str) -> dict[str, Any]:
    reason = ACCOUNTANTS[name].uncovered(composition, relation)
    if reason is not None:
        return {"reason": reason}
    try:
        return {"epsilon": ACCOUNTANTS[name].compose(composition, delta, relation)}
    except NotCovered as failure:
        return {"reason": str(failure)}


def _word(answer: Mapping[str, Any]) -> float | str:
    if "epsilon" in answer:
        value = float(answer["epsilon"])
        return "inf" if math.isinf(value) else value
    if "over" in answer:
        return f"over {answer['over']:g} s"
    return f"not available: {answer.get('reason', answer.get('failed'))}"


def _read(cache: Path | None) -> dict[str, Any]:
    """What the cache holds; nothing if it is missing or unreadable, since every cell can be computed again."""
    content = {}
    if cache is not None:
        with contextlib.suppress(ValueError, OSError):
            content = json.loads(cache.read_text())
    return content if isinstance(content, dict) else {}


def _remember(cache: Path, answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Merge `answers` into the cache under a lock. Failures are not kept: they may be the machine's."""
    from filelock import FileLock

    from dpgen_bench.files import write_atomic

    new = {key: answer for key, answer in answers.items() if "failed" not in answer}
    cache.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{cache}.lock"):
        write_atomic(cache, json.dumps({**_read(cache), **new}, indent=1))


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
        events, delta, budget = _planned(arguments, overrides)
        server = _seen_by_server(events, delta)
        claims, conditional = _claims(arguments, overrides, events, delta) if arguments.published else ({}, {})
    except (Usage, ValueError, LookupError, FileNotFoundError) as error:
        print(f"dpgen account: {error}", file=sys.stderr)
        return 2
    table = epsilon_table(events, delta, arguments.timeout, claims, arguments.cache, conditional)
    if arguments.json:
        told = {} if server is None else {"server": server}
        mechanisms = [_as_json(event) for event in events]
        print(json.dumps({"delta": delta, "mechanisms": mechanisms, "epsilon": table, **told}))
    else:
        _print(table, events, delta, budget, arguments, server)
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


def _planned(arguments: argparse.Namespace, overrides: list[str]) -> tuple[list[Event], float, Budget | None]:
    """Events, delta and (for overrides) the budget they are planned under."""
    if overrides:
        from dpgen_bench.run import plan

        events, budget = plan(overrides)
        return events, arguments.delta or budget.delta, budget
    from dpgen_bench.privacy.events import Event, Sensitivity
    from dpgen_bench.privacy.sampling import Full, OneClient, OneShard, Poisson, Sampling

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
    return [Event(sampling, sensitivity, arguments.sigma, arguments.steps)], arguments.delta or 1e-5, None


def _seen_by_server(events: Sequence[Event], delta: float) -> dict[str, Any] | None:
    """What the server learns of one client, {"answers": k_max, "epsilon": {relation: exact}}; None without clients.

    It knows whom it asks and keeps every answer, so nothing is amplified: as many unsampled Gaussian releases as a
    client answers at most. That is so whomever it asks, and whatever it sends.
    """
    from dpgen_bench.privacy.accountants import epsilon
    from dpgen_bench.privacy.events import RELATIONS
    from dpgen_bench.privacy.sampling import Full, OneClient

    if len(events) != 1 or not isinstance(events[0].sampling, OneClient):
        return None
    (event,) = events
    assert isinstance(event.sampling, OneClient)
    answers = event.sampling.most_answers(event.times)
    seen = replace(event, sampling=Full(), times=answers)
    return {
        "answers": answers,
        "epsilon": {relation: epsilon([seen], delta, relation, "pld") for relation in RELATIONS},
    }


def _claims(
    arguments: argparse.Namespace, overrides: list[str], events: Sequence[Event], delta: float
) -> tuple[dict[str, float], dict[str, float | Sequence[Event]]]:
    """The paper's own count, and what would hold under an assumption: of a run's method, or as the papers count draws.

    Raises:
        Usage: if there is neither.
    """
    if overrides:
        from dpgen_bench.specify import compose_config, specify

        config = compose_config(overrides)
        name, method = config.method.name, specify(config).method()
        claimed = claimed_epsilon(method, events, delta)
        figure = conditional_epsilon(method, events, delta)
        if claimed is None and figure is None:
            raise Usage(f"--published: {name} has no count of its paper's own for these settings.")
        return (
            {} if claimed is None else {f"claimed (by {name}'s paper)": float(claimed)},
            {} if figure is None else {f"conditional ({figure['assumption']})": float(figure["epsilon"])},
        )
    from dpgen_bench.privacy.claims import classical_rdp, memoryless_event, opacus_rdp, wor_rdp

    compositions = arguments.steps * arguments.releases_per_draw
    rest = (arguments.sigma, compositions, delta)
    label = f"claimed ({compositions:,} compositions, {{}} RDP)"
    if arguments.q is None:
        if arguments.schedule == "public_balanced" or arguments.max_answers is not None:
            raise Usage(
                "--published: the papers draw shards and clients at random, without a limit; they have no count for a "
                "public schedule or for --max-answers."
            )
        return (
            {label.format("without-replacement"): wor_rdp(1.0 / (arguments.shards or arguments.clients), *rest)},
            {"conditional (if steps were memoryless)": [memoryless_event(event) for event in events]},
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
    events: Sequence[Event],
    delta: float,
    budget: Budget | None,
    arguments: argparse.Namespace,
    server: Mapping[str, Any] | None = None,
) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(highlight=False)
    for event in events:
        plural = "" if event.times == 1 else "s"
        console.print(
            f"{event.times:,} release{plural}, {event.sampling}, joint multiplier {event.multiplier('add_remove'):.5g}"
        )
    if budget is not None:
        console.print(f"budget: epsilon {budget.epsilon:g} ({budget.relation}, {budget.accountant})")
    view = RichTable(title=f"epsilon at delta = {delta:g}", title_justify="left")
    for column in ("count", "add/remove", "replace-one"):
        view.add_column(column, overflow="fold")
    for name in ACCOUNTANTS:
        view.add_row(f"proven, {name.upper()}", _cell(table["add_remove"][name]), _cell(table["replace_one"][name]))
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

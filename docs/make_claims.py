"""Makes the table of docs/claims.md: claims of the three papers, and what our experiments say about them.

The claims and their experiments are in docs/claims.yaml, measured values in results/records. `dpgen sweep claims` runs
what is missing. Run it again after a new record, or let `make tables` do it:

    .venv/bin/python docs/make_claims.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from docs.make_published_epsilons import accounted, certified, entries, name, shown
from docs.make_results import seconds_of
from docs.page_tables import page_with, table
from dpgen_bench.config.display import direction, metric_label
from dpgen_bench.store.records import records_alone
from dpgen_bench.store.statistics import LEAST_SEEDS, Difference, difference, holm, p_value
from dpgen_bench.tables.rows import TableRow, rows_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "claims.md"
SPEC = ROOT / "docs" / "claims.yaml"
BEGIN, END = "<!-- table: made by docs/make_claims.py -->", "<!-- end of the table -->"
PAPERS = {"dpgan": "Private GANs, Revisited", "dp_sinkhorn": "DP-Sinkhorn", "gs_wgan": "GS-WGAN"}
HEADER = ("#", "claim", "measured", "difference, 95% interval", "p", "verdict")
CONFIRMED, NOT_CONFIRMED, REFUTED = "**confirmed**", "**not confirmed**", "**refuted for the mechanism**"
FOR, AGAINST, UNDECIDED, NOT_RUN = "points to yes", "points to no", "undecided", "not run"
# How often a comparison was tested: with three seeds, and if these decided nothing, with further ones. Each test gets a
# part of the level, so that the level of both together is kept whether or not there was a second.
LOOKS = 2

Claim = Mapping[str, Any]


def claims() -> list[dict[str, Any]]:
    """The claims, numbered from 1, with the defaults of seeds and protocol."""
    stated = yaml.safe_load(SPEC.read_text())["claims"]
    return [{"number": i, "seeds": "0,1,2", "protocol": "quick", **claim} for i, claim in enumerate(stated, 1)]


def lines(claim: Claim) -> tuple[str, str]:
    """The multirun lines of the runs that should be better, and of those that they are compared with."""
    more = f"seed={claim['seeds']} protocol={claim['protocol']}"
    return f"{claim['for']} {more}", f"{claim['against']} {more}"


def sweeps() -> list[str]:
    """The multirun lines of all claims, each once, in the order of the claims."""
    return list(dict.fromkeys(line for claim in claims() if "epsilon" not in claim for line in lines(claim)))


@cache
def row(line: str) -> TableRow:
    """The records of one multirun line; runs in results/runs do not count."""
    with records_alone(ROOT / "results") as source:
        (found,) = rows_of([line], source, {})
    return found


def values(line: str, metric: str) -> list[list[float]]:
    """The values of a metric for each measured seed, one for each repeat."""
    return [known[metric] for known in row(line).known if metric in known]


def compared(claim: Claim) -> Difference | None:
    """How much better `for` is than `against`, positive if it is better; None if one of the two has no run."""
    better, reference = (values(line, claim["metric"]) for line in lines(claim))
    if not better or not reference:
        return None
    found = difference(better, reference)
    if direction(claim["metric"]) != "lower":
        return found
    interval = None if found.ci95 is None else (-found.ci95[1], -found.ci95[0])
    return Difference(-found.mean, interval)


def p_of(claim: Claim) -> float | None:
    """The p-value of Welch's test that the difference is minus the margin of the claim; None without an interval."""
    found = compared(claim)
    if found is None or found.ci95 is None:
        return None
    better, reference = (values(line, claim["metric"]) for line in lines(claim))
    sign = -1.0 if direction(claim["metric"]) == "lower" else 1.0
    return p_value(better, reference, -sign * float(claim.get("margin", 0.0)))


def verdict(found: Difference | None, margin: float = 0.0, decided: bool = True) -> str:
    """What a difference says about the claim that it is above -margin.

    Confirmed if its whole interval is above, not confirmed if its whole interval is below, and otherwise undecided.
    Where the correction for the number of claims does not decide, an interval only points to an answer.
    """
    if found is None:
        return NOT_RUN
    if found.ci95 is None:
        return UNDECIDED
    low, high = found.ci95
    if low > -margin:
        return CONFIRMED if decided else FOR
    if high < -margin:
        return NOT_CONFIRMED if decided else AGAINST
    return UNDECIDED


def verdict_of_epsilon(line: Mapping[str, str], audited: str = "–") -> str:
    """Confirmed if the proven epsilon, under the relation of the claim, is at most the claimed one.

    Refuted if an audit certifies that the mechanisms leak more than what is claimed.
    """
    if audited != "–" and float(audited) > float(line["claimed"]):
        return REFUTED
    return CONFIRMED if float(line["proven"]) <= float(line["claimed"]) else NOT_CONFIRMED


def certified_epsilon(claim: Claim) -> str:
    """The epsilon that an audit of a claim's mechanisms certifies, or a dash."""
    (entry,) = [each for each in entries() if name(each) == claim["epsilon"]]
    return certified(entry)


@cache
def decided() -> frozenset[int]:
    """The numbers of the comparisons that are decided after the corrections for looks, and for claims by Holm."""
    about_runs = [claim for claim in claims() if "epsilon" not in claim]
    tested = {claim["number"]: p for claim in about_runs if (p := p_of(claim)) is not None}
    rejected = holm(list(tested.values()), level=0.05 / LOOKS)
    return frozenset(number for number, yes in zip(tested, rejected, strict=True) if yes)


def verdict_on(claim: Claim) -> str:
    """The verdict on a claim about runs or about an epsilon, without its limit."""
    if "epsilon" in claim:
        return verdict_of_epsilon(accounted()[claim["epsilon"]], certified_epsilon(claim))
    return verdict(compared(claim), float(claim.get("margin", 0.0)), claim["number"] in decided())


def cells(claim: Claim) -> tuple[str, ...]:
    """The cells of one claim in the table."""
    number = claim["number"]
    first_cells = f"[{number}](#claim-{number})", f"{claim['claim']} ({PAPERS[claim['paper']]})"
    if "epsilon" in claim:
        line = accounted()[claim["epsilon"]]
        measured = f"ε claimed {float(line['claimed']):.4g}, proven {shown(line['proven'])}"
        if (audited := certified_epsilon(claim)) != "–":
            measured += f", certified ≥ {audited}"
        return *first_cells, measured, "–", "–", verdict_on(claim)
    found = compared(claim)
    first, second = (row(line).cell(claim["metric"]) for line in lines(claim))
    interval = "–"
    if found is not None:
        interval = f"{found.mean:+.1f}"
        interval += "" if found.ci95 is None else f" [{found.ci95[0]:+.1f}, {found.ci95[1]:+.1f}]"
    measured = "–" if found is None else f"{metric_label(claim['metric'])}: {first} against {second}"
    decision = verdict_on(claim) + (f" ({claim['limit']})" if "limit" in claim else "")
    if found is not None and found.ci95 is None:
        decision += f": fewer than {LEAST_SEEDS} seeds"
    p = p_of(claim)
    return *first_cells, measured, interval, "–" if p is None else f"{p:.2g}", decision


def details(claim: Claim) -> str:
    """Where a claim is made, what is printed for it, and the experiment that tests it."""
    heading = f"### Claim {claim['number']}\n\n{claim['claim']}.\n\n- *{PAPERS[claim['paper']]}*, {claim['where']}."
    heading += f" Printed: {claim['printed']}.\n"
    if "epsilon" in claim:
        return (
            heading + "- Here: the releases of the published setting, [accounted](published_epsilons.md), at δ = 1e-5."
        )
    margin = f" The claim holds if it is at most {claim['margin']:g} worse." if "margin" in claim else ""
    samples = f"\n- Samples: {claim['samples']}." if "samples" in claim else ""
    also = f"\n- Also: {claim['also']}." if "also" in claim else ""
    runs = f"`{claim['for']}` against `{claim['against']}`, seeds {claim['seeds']}, protocol `{claim['protocol']}`"
    return f"{heading}- Here: {runs}.{margin}\n- Scale: {claim['scale']}.{evidence(claim)}{samples}{also}"


def evidence(claim: Claim) -> str:
    """The records behind a claim, and what their fits cost; "" if one of the two settings has none."""
    both = [row(line).measured for line in lines(claim)]
    if not all(both):
        return ""
    records = " against ".join(", ".join(f"`{run.id}`" for run in runs) for runs in both)
    first, second = map(seconds_of, both)
    return f"\n- Records: {records}; fits took {first} and {second} processor-seconds."


def counted() -> Iterator[str]:
    """How many claims have which verdict, and how many of these a limit, as items of a sentence."""
    found = [(verdict_on(claim), "limit" in claim) for claim in claims()]
    for kind in (CONFIRMED, NOT_CONFIRMED, REFUTED, FOR, AGAINST, UNDECIDED, NOT_RUN):
        if limits := [limited for each, limited in found if each == kind]:
            text = kind.strip("*")
            limited = f" ({sum(limits)} with a limit)" if any(limits) else ""
            yield f"{len(limits)} {text if len(limits) == 1 else text.replace('points', 'point')}{limited}"


def made() -> str:
    """The counts, the table and the experiments in Markdown."""
    body = [cells(claim) for claim in claims()]
    more = "\n\n".join(details(claim) for claim in claims())
    counts = f"{len(body)} claims: {', '.join(counted())}."
    return f"{counts}\n\n{table(HEADER, body)}\n\n## The experiments\n\n{more}"


def page() -> str:
    """The page with its table made again."""
    return page_with(PAGE, BEGIN, made(), END)


if __name__ == "__main__":
    PAGE.write_text(page())

"""`dpgen audit`: what the attacks on a mechanism certify, next to what is claimed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from dpgen_bench.audit.cases import Case, case_files, load_case
from dpgen_bench.audit.distinguisher import Attacked, Certificate, certify
from dpgen_bench.privacy.events import Relation
from dpgen_bench.utils.console import Console
from dpgen_bench.utils.validation import suggestion

TRIALS = 100_000


def audit(target: str, *, trials: int = TRIALS, relation: Relation | None = None, as_json: bool = False) -> int:
    """Audit a case and print the result.

    Args:
        target: the name of a case of the bench, or the path of a yaml.
        trials: number of trials in each world.
        relation: the relation of the claim; None takes the case's own.

    Returns:
        0, or 1 if the claim is refuted.

    Raises:
        ValueError: for a target that is no case.
    """
    case = _case(target)
    if relation is not None and relation != case.relation:
        raise ValueError(
            f"expected --relation {case.relation} for the case {case.name}, got {relation}: its claim and its "
            "movements are those of one relation. Write a case for the other relation."
        )
    certificate = certify(case.attacked, case.delta, case.relation, trials=trials)
    refuted = certificate.strongest > case.epsilon
    if as_json:
        print(json.dumps({"case": case.name, "claimed": case.epsilon, "refuted": refuted, **certificate.to_dict()}))
    else:
        _print(case, certificate, refuted)
    return int(refuted)


def _case(target: str) -> Case:
    cases = case_files()
    if target in cases:
        return load_case(cases[target])
    if target.endswith((".yaml", ".yml")):
        path = Path(target)
        return replace(load_case(path), name=path.stem)
    raise ValueError(
        f"expected a case ({', '.join(cases)}) or the path of a yaml, got {target!r}{suggestion(target, cases)}."
    )


def _print(case: Case, certificate: Certificate, refuted: bool) -> None:
    console = Console(soft_wrap=True, highlight=False)

    def line(text: str) -> None:
        console.print(text, markup=False)

    line(f"{case.name}: {case.title}")
    line(f"  claimed    epsilon {case.epsilon:g} at delta {case.delta:g}, {case.relation} ({case.source})")
    for each in case.attacked:
        line(f"  attacked   {describe_attacked(each)}")
    for text in describe_certificate(certificate):
        line(f"  certified  {text}")
    if refuted:
        line(f"  REFUTED    the certified epsilon is above the claimed {case.epsilon:g}")
    else:
        line("  not refuted; this is no proof that the claim holds")


def describe_attacked(attacked: Attacked) -> str:
    """One mechanism in one line."""
    event = attacked.event
    plural = "" if event.times == 1 else "s"
    return (
        f"{attacked.name}: {event.times:,} release{plural}, {event.sampling}; noise std {event.std:.6g}, "
        f"moved {attacked.movement.distance:.6g}"
    )


def describe_certificate(certificate: Certificate) -> list[str]:
    """What is certified, in one line for each of its figures."""
    c = certificate
    side = "above" if c.rejects_first else "below"
    test = (
        f"{c.false} false and {c.true} true rejections by ratios {side} {c.threshold:.6g}, which was fixed on as many "
        "pilot trials"
    )
    at = f"at {100 * c.confidence:g} %, {c.trials:,} trials in each world, level c"
    lines = [f"epsilon >= {c.epsilon:.4g} {at}, model-free ({test})"]
    if c.gdp is not None:
        lines.append(f"epsilon >= {c.gdp:.4g} {at}, Gaussian by construction (GDP)")
    return lines

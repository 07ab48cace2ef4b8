"""`dpgen audit`: what the attacks on a mechanism certify, next to what is claimed and proven."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dpgen_bench.audit.canaries import CANARIES, audit_samples, describe_seen
from dpgen_bench.audit.cases import Case, case_files, load_case
from dpgen_bench.audit.certified import write_certified
from dpgen_bench.audit.code import audit_code
from dpgen_bench.audit.count_test import certify_count
from dpgen_bench.audit.distinguisher import CONFIDENCE, Attacked, Certificate, certify
from dpgen_bench.audit.methods import MethodAudit, audit_method, method_spec, run_ledger, run_spec
from dpgen_bench.config.catalogue import names, run_ids
from dpgen_bench.config.spec import RunSpec
from dpgen_bench.privacy.events import Relation
from dpgen_bench.privacy.expect import expect_integer
from dpgen_bench.testing.errors import ConformanceError
from dpgen_bench.utils.console import Console
from dpgen_bench.utils.validation import suggestion

TRIALS = 100_000  # in each world
EXECUTIONS = 1000  # of code in each world
COUNTS = 100_000_000  # of a test of counts in the first world


def audit(
    target: str,
    overrides: Sequence[str] = (),
    *,
    results: Path,
    level: str | None = None,
    trials: int | None = None,
    relation: Relation | None = None,
    seed: int | None = None,
    as_json: bool = False,
) -> int:
    """Audit a case, a method or a run, and print the result.

    Args:
        target: the name of a case or of a method, the path of a case's yaml, the id of a run, or an override.
        overrides: settings of a method.
        results: the folder of the run.
        level: the only level to audit; None for levels a, b and c.
        trials: number of trials in each world, of canaries at level d; None for `TRIALS`, `EXECUTIONS` of code,
            `COUNTS` or `CANARIES`.
        relation: the relation that is attacked; None takes that of the claim or the budget.
        seed: of the trials; None for 0.

    Returns:
        0, or 1 if a release moves further than declared, a claimed or proven epsilon is refuted, or an attack on
        samples saw more than the budget.

    Raises:
        ValueError: for a target that is none of these, or options that do not fit it.
    """
    if trials is not None:
        expect_integer(trials, "--trials", minimum=2, advice="leave it out for the default number")
    if seed is not None:
        expect_integer(seed, "--seed", minimum=0)
        if level == "d":
            raise ValueError("expected no --seed with level d; its canaries are drawn with the run's seed: use seed=N.")
    seed = seed or 0
    case = _case(target)
    if case is not None:
        if overrides or level not in (None, "c"):
            raise ValueError(f"expected no overrides and no other level than c for the case {case.name}, got some.")
        if relation not in (None, case.relation):
            raise ValueError(
                f"expected --relation {case.relation} for the case {case.name}, got {relation}: its claim and its "
                "movements are those of one relation. Write a case for the other relation."
            )
        if case.code is None:
            return _audit_case(case, trials, seed, as_json)
        return _audit_code(case, trials, seed, as_json)
    spec, run = _spec(target, overrides, results)
    if level == "d":
        return _audit_samples(spec, trials, as_json)
    return _audit_method(spec, run, results, level, trials or TRIALS, relation, seed, as_json)


def _case(target: str) -> Case | None:
    cases = case_files()
    if target in cases:
        return load_case(cases[target])
    return load_case(Path(target)) if target.endswith((".yaml", ".yml")) else None


def _spec(target: str, overrides: Sequence[str], results: Path) -> tuple[RunSpec, str | None]:
    """The settings of the target, and the id of the run if it is one."""
    if "=" in target:
        return method_spec([target, *overrides]), None
    methods = names("method")
    if target in methods:
        return method_spec([f"method={target}", *overrides]), None
    if any(run.startswith(target) for run in run_ids(results)):
        if overrides:
            raise ValueError(f"expected no overrides for the run {target}, got {' '.join(overrides)}.")
        return run_spec(results, target), target
    known = [*case_files(), *methods]
    raise ValueError(
        f"expected a case ({', '.join(case_files())}), the path of a case's yaml, the name of a method, or the id of a "
        f"run in {results}, got {target!r}{suggestion(target, known)}."
    )


def _audit_code(case: Case, trials: int | None, seed: int, as_json: bool) -> int:
    assert case.code is not None
    assert case.declared is not None
    result = audit_code(case.code, case.declared, case.relation, case.delta, trials=trials or EXECUTIONS, seed=seed)
    refuted = result.epsilon > case.epsilon
    if as_json:
        values = {"epsilon": result.epsilon, "trials": result.trials, "false": result.false, "true": result.true}
        faults = [{"level": level, "fault": text} for level, text in result.faults]
        print(json.dumps({"case": case.name, "claimed": case.epsilon, "refuted": refuted, "faults": faults, **values}))
        return int(refuted or bool(faults))
    _claim(case)
    for level, text in result.faults:
        _line(f"  FAULT      level {level}: {text}")
    if result.worst is not None:
        _line(f"  neighbours {result.worst.name}; releases move by {result.worst.distances.max():.6g} at most")
    _line(
        f"  certified  epsilon >= {result.epsilon:.4g} at {100 * CONFIDENCE:g} %, {result.trials:,} trials in each "
        f"world, level c, model-free ({result.false} false and {result.true} true rejections; threshold "
        f"{result.threshold:.6g}, which was fixed on as many pilot trials)"
    )
    _verdict([f"the claimed {case.epsilon:g}"] if refuted else [], faults=bool(result.faults))
    return int(refuted or bool(result.faults))


def _claim(case: Case) -> None:
    _line(f"{case.name}: {case.title}")
    _line(f"  claimed    epsilon {case.epsilon:g} at delta {case.delta:g}, {case.relation} ({case.source})")


def _audit_case(case: Case, trials: int | None, seed: int, as_json: bool) -> int:
    if case.above is None:
        certificate = certify(case.attacked, case.delta, case.relation, trials=trials or TRIALS, seed=seed)
    else:
        (attacked,) = case.attacked
        certificate = certify_count(attacked, case.above, case.delta, case.relation, trials=trials or COUNTS, seed=seed)
    refuted = certificate.strongest > case.epsilon
    if as_json:
        print(json.dumps({"case": case.name, "claimed": case.epsilon, "refuted": refuted, **certificate.to_dict()}))
        return int(refuted)
    _claim(case)
    _certified(case.attacked, certificate)
    _verdict([f"the claimed {case.epsilon:g}"] if refuted else [])
    return int(refuted)


def _audit_method(
    spec: RunSpec,
    run: str | None,
    results: Path,
    level: str | None,
    trials: int,
    relation: Relation | None,
    seed: int,
    as_json: bool,
) -> int:
    quiet = (lambda text: None) if as_json else (lambda text: _line(f"  {text}"))
    stated = None if run is None else run_ledger(results, run)
    try:
        result = audit_method(
            spec, relation, levels=level or "abc", trials=trials, seed=seed, stated=stated, echo=quiet
        )
    except ConformanceError as error:
        if as_json:
            print(json.dumps({"refuted": True, "fault": str(error)}))
        else:
            _line(f"  REFUTED    {error}")
        return 1
    failed = result.failed
    written, why = (None, "") if run is None else write_certified(results, run, result)
    if as_json:
        kept = {} if run is None else {"written": written is not None, "why_not_written": why or None}
        print(json.dumps({"refuted": failed, **result.to_dict(), **kept}))
        return int(failed)
    _print_audit(result)
    if written is not None:
        _line(f"  written    to {written}, which tables, the report and records of the run show")
    elif run is not None and result.certificate is not None:
        _line(f"  not written to the ledger of the run: {why}")
    return int(failed)


def _print_audit(result: MethodAudit) -> None:
    """What each level found, and the verdict."""
    _line(result.title)
    for text in result.lines():
        _line(f"  level a    {text}")
    for text in result.exceeded:
        _line(f"  EXCEEDED   {text}")
    if result.noise is not None and not result.wrong_noise:
        noisy = any(event.std > 0.0 for event in result.replayed.events.values())
        found = "has the stated scale, is normal and independent" if noisy else "was not tested: none is stated"
        _line(f"  level b    the noise {found}")
    for text in result.wrong_noise:
        _line(f"  NOISE      {text}")
    if result.certificate is not None:
        _print_epsilons(result)
    elif result.failed:
        _verdict([], faults=True)


def _audit_samples(spec: RunSpec, canaries: int | None, as_json: bool) -> int:
    seen, budget = audit_samples(spec, canaries or CANARIES), spec.budget()
    alarming = budget.epsilon is not None and seen.epsilon > budget.epsilon
    if as_json:
        print(json.dumps({"refuted": alarming, **seen.to_dict()}))
        return int(alarming)
    _line(f"{spec.config.method.name} on {spec.config.dataset.name}, one fit with {seen.canaries:,} canaries")
    for text in describe_seen(seen):
        _line(f"  level d    {text}")
    if alarming:
        _line(f"  REFUTED    this attack saw more than the budget, epsilon {budget.epsilon:g}; look at level c")
    return int(alarming)


def _print_epsilons(result: MethodAudit) -> None:
    assert result.certificate is not None
    if result.claimed is not None:
        compared = "" if result.claim_is_attacked else ", which is not compared with what is certified here"
        _line(f"  claimed    epsilon {result.claimed:.4g}, {result.claimed_relation}{compared}")
    proven = "not available" if result.proven is None else f"{result.proven:.4g}"
    _line(f"  proven     epsilon {proven} at delta {result.delta:g}, {result.relation}")
    _line(f"  neighbours {result.pair.names[0]} / {result.pair.names[1]}")
    _certified(result.replayed.attacked(result.relation)[1], result.certificate)
    _verdict([f"the {name} one" for name in result.refuted], faults=result.failed)


def _certified(attacked: Sequence[Attacked], certificate: Certificate) -> None:
    for each in attacked:
        _line(f"  attacked   {describe_attacked(each)}")
    for text in describe_certificate(certificate):
        _line(f"  certified  {text}")


def _verdict(refuted: Sequence[str], faults: bool = False) -> None:
    if refuted:
        _line(f"  REFUTED    the certified epsilon is above {' and '.join(refuted)}")
    elif faults:
        _line("  FAILED     what is declared does not hold, see above, so neither does a proof that uses it")
    else:
        _line("  not refuted; this is no proof that an epsilon holds")


def _line(text: str) -> None:
    Console(soft_wrap=True, highlight=False).print(text, markup=False)


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
    pilot = ", which was fixed on as many pilot trials" if c.exact is None else ", which was fixed by the exact law"
    test = f"{c.false} false and {c.true} true rejections by a {c.statistic} {side} {c.threshold:.6g}{pilot}"
    trials = f"{c.trials:,} trials in each world"
    if c.second_trials not in (None, c.trials):
        trials = f"{c.trials:,} trials in the first and {c.second_trials:,} in the second world"
    at = f"at {100 * c.confidence:g} %, {trials}, level c"
    lines = [f"epsilon >= {c.epsilon:.4g} {at}, model-free ({test})"]
    if c.gdp is not None:
        lines.append(f"epsilon >= {c.gdp:.4g} {at}, Gaussian by construction (GDP)")
    if c.exact is not None:
        lines.append(f"epsilon >= {c.exact:.4g} by the exact rates of error of this test, without trials")
    return lines

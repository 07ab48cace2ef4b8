"""The certified epsilon of a run: how it enters the run's ledger or its record, and whether a record's one is accepted.

The entry `epsilon.certified` of a ledger has the bound, its confidence and number of trials, and the whole attack, so
that anyone can draw the trials again. Runs that differ in their seed alone have the same mechanisms, so one audit is
enough for all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dpgen_bench.audit.distinguisher import CONFIDENCE, Attacked, certify
from dpgen_bench.audit.laws import Movement, NotAudited, law_of
from dpgen_bench.audit.methods import MethodAudit, audit_method, run_ledger
from dpgen_bench.config.spec import RunSpec, identify
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.store.folders import ReadableRun, RunFolder, Store
from dpgen_bench.store.records import Record, read_record, record_paths
from dpgen_bench.testing.checks import TOLERANCE

# Trials that are drawn again may differ in a few rejections where another version of NumPy draws other numbers.
AGAIN_RELATIVE, AGAIN_ABSOLUTE = 0.05, 0.02


def certified_entry(result: MethodAudit, run: str, seed: int) -> dict[str, Any]:
    """What an audit certified, as the JSON of `epsilon.certified`.

    Args:
        run, seed: the id and the seed of the run whose settings were audited.
    """
    certificate = result.certificate
    assert certificate is not None
    return {
        "epsilon": str(certificate.strongest) if math.isinf(certificate.strongest) else certificate.strongest,
        "figure": "model-free" if certificate.gdp is None else "gdp",
        "confidence": certificate.confidence,
        "trials": certificate.trials,
        "level": "c",
        "relation": result.relation,
        "run": run,
        "seed": seed,
        "attack": result.to_dict(),
    }


def why_nothing_is_certified(ledger: Ledger) -> str:
    """Why there is nothing to audit in a run with this ledger, in a few words; "" if it can be audited."""
    own = [entry.event for entry in ledger.own.values()]
    if ledger.unit != "record":
        return f"its unit is the {ledger.unit}, whose mechanisms are not replayed"
    if not own:
        return "it makes no release"
    if any(event.std == 0.0 and event.times for event in own):
        return "its releases have no noise"
    try:
        for event in own:
            law_of(event, Movement.of(1.0))
    except NotAudited as error:
        return str(error)
    return ""


def why_not_written(ledger: Ledger, result: MethodAudit) -> str:
    """Why the result of an audit does not enter the ledger of its run, in a few words; "" if it does."""
    if result.certificate is None:
        return "level c was not audited"
    if result.failed:
        return "the audit found a fault"
    if ledger.epsilon is None:
        return "the run is not finished"
    if ledger.budget.relation != result.relation:
        return f"the budget of the run is for {ledger.budget.relation}"
    kept = (ledger.epsilon.get("certified") or {}).get("trials", 0)
    if kept > result.certificate.trials:
        return f"the ledger has the result of an audit with more trials, {kept:,}"
    return why_nothing_is_certified(ledger)


def write_certified(results: Path, run: str, result: MethodAudit) -> tuple[Path | None, str]:
    """Write what was certified into the ledger of a run, as `epsilon.certified`.

    Returns:
        The ledger's path and "", or None and why nothing was written.
    """
    if why := why_not_written(run_ledger(results, run), result):
        return None, why
    folder = Store(results).find(run)
    return keep_certified(folder, certified_entry(result, folder.id, int(folder.config.seed))), ""


def keep_certified(folder: RunFolder, certified: dict[str, Any]) -> Path:
    """Write the `epsilon.certified` of a run into its ledger, and return the ledger's path."""
    path = folder.path / "ledger.json"
    with folder.locked():
        ledger = Ledger.load(path)
        assert ledger.epsilon is not None
        ledger.epsilon["certified"] = certified
        ledger.save()
    return path


def with_certified(record: Record, certified: dict[str, Any]) -> Record:
    """The record with this `epsilon.certified`."""
    ledger = record.content["ledger"]
    epsilon = {**ledger["epsilon"], "certified": certified}
    return Record(record.path, {**record.content, "ledger": {**ledger, "epsilon": epsilon}})


def certify_run(
    run: ReadableRun, results: Path, data_root: str, echo: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """The `epsilon.certified` of a run: its own, else that of a run with the same settings, else that of an audit.

    Of several runs that differ in their seed alone, the least certified epsilon is taken. A run with nothing to audit
    gets {"epsilon": None, "reason": why}.

    Args:
        run: a finished run, or a record.
        results: the folder of runs and records that are searched for the same settings.
        data_root: the folder of data sets, for a record; a run knows its own.
        echo: called with one line for each step.

    Raises:
        ValueError: if the audit finds a fault, which no epsilon may hide, or refuses the run.
        ConformanceError: if a replay shows that the method uses records other than through releases.
    """
    content = run.read_json("ledger.json")
    if not content.get("epsilon"):
        raise ValueError(f"expected the epsilons of run {run.id}, got none; finish the run, which computes them.")
    own: dict[str, Any] | None = content["epsilon"].get("certified")
    if own is not None:
        return own
    if reason := why_nothing_is_certified(Ledger.from_dict(content)):
        echo(f"{run.id}: nothing to audit, because {reason}")
        return {"epsilon": None, "reason": reason}
    identity = run.read_json("identity.json")
    if same := sorted(_certified_with_other_seeds(identity, results), key=lambda each: float(each["epsilon"])):
        of = "its record" if same[0]["run"] == run.id else f"{same[0]['run']}, which has the same settings"
        echo(f"{run.id}: the audit of {of}")
        return same[0]
    config = run.config_at(data_root) if isinstance(run, Record) else run.config
    result = audit_method(RunSpec(config, identity), stated=Ledger.from_dict(content), echo=echo)
    if result.failed:
        faults = [*result.exceeded, *result.wrong_noise, *(f"it refutes the {name} epsilon" for name in result.refuted)]
        raise ValueError(f"expected an audit of {run.id} without a fault, got: {'; '.join(faults)}.")
    return certified_entry(result, run.id, int(config.seed))


def _certified_with_other_seeds(identity: Mapping[str, Any], results: Path) -> Iterator[dict[str, Any]]:
    """The certified epsilons of runs and records with this identity, up to the seed. Damaged ones are left out."""
    settings = _settings(identity)
    folders = [folder.path for folder in Store(results).runs() if folder.done]
    for path in [*record_paths(results).values(), *folders]:
        try:
            run: ReadableRun = read_record(path) if path.suffix == ".json" else RunFolder(path)
            epsilon = run.read_json("ledger.json").get("epsilon") or {}
            same = _settings(run.read_json("identity.json")) == settings
        except ValueError:  # `dpgen runs` and `dpgen record --check` report it
            continue
        certified = epsilon.get("certified")
        if same and certified is not None and certified["epsilon"] is not None:
            yield certified


def _settings(identity: Mapping[str, Any]) -> str:
    return json.dumps({**identity, "seed": None}, sort_keys=True)


def certified_problems(record: Record) -> list[str]:
    """Why the certified epsilon of a record is not accepted; [] if it is, or if the record has none.

    Its trials are drawn again from the movements in the record. How far releases move is compared with the ledger's
    sensitivities; to find it again, a fit has to be replayed, which `dpgen audit` does.
    """
    content = record.content["ledger"]
    entry = content["epsilon"].get("certified")
    if entry is None:
        return []
    ledger = Ledger.from_dict(content)
    reason = why_nothing_is_certified(ledger)
    if entry["epsilon"] is None or reason:
        stated = entry.get("reason", f"ε ≥ {entry['epsilon']}")
        expected = reason or "a certified ε"
        return [] if stated == reason else [f"its certified ε is {stated!r}, expected {expected!r} by its ledger"]
    return [f"its certified ε {problem}" for problem in _problems(record, ledger, entry)]


def _problems(record: Record, ledger: Ledger, entry: dict[str, Any]) -> Iterator[str]:
    attack = entry["attack"]
    certificate = attack["certified"]
    run = identify({**record.content["identity"], "seed": entry["seed"]})
    if run != entry["run"]:
        yield f"is that of run {entry['run']}, expected {run}, these settings with seed {entry['seed']}"
    for key, expected in (("relation", ledger.budget.relation), ("delta", ledger.budget.delta)):
        if {attack[key], certificate[key], entry.get(key, expected)} != {expected}:
            yield f"is for {key} {attack[key]}, expected {expected}, that of the budget"
    if entry["confidence"] != CONFIDENCE:
        yield f"has a confidence of {entry['confidence']:g}, expected {CONFIDENCE:g}"
    if {key: certificate[key] for key in ("confidence", "trials", "level")} != {
        key: entry[key] for key in ("confidence", "trials", "level")
    }:
        yield "states another confidence, level or number of trials than its attack"
    if faults := [name for name, texts in (attack["noise"] or {}).items() if texts]:
        yield f"is that of an audit which found wrong noise of {faults[0]!r}"
    attacked, problems = _attacked(ledger, certificate["mechanisms"], entry["relation"])
    yield from problems
    if problems or not attacked:
        yield from () if problems else ("is that of no mechanism",)
        return
    again = certify(
        attacked,
        ledger.budget.delta,
        ledger.budget.relation,
        trials=entry["trials"],
        confidence=CONFIDENCE,
        seed=certificate["seed"],
    )
    figure = "model-free" if again.gdp is None else "gdp"
    if figure != entry["figure"]:
        yield f"is called {entry['figure']}, expected {figure}"
    if not _agrees(entry["epsilon"], again.strongest):
        yield f"is {entry['epsilon']}, expected {again.strongest:.6g}, by its trials drawn again"
    for name, value in (("epsilon", again.epsilon), ("gdp", again.gdp)):
        if not _agrees(certificate[name], value):
            yield f"has an attack with {name} {certificate[name]}, expected {value}, by its trials drawn again"


def _agrees(stated: float | str | None, again: float | None) -> bool:
    if stated is None or again is None:
        return stated is again
    return math.isclose(float(stated), again, rel_tol=AGAIN_RELATIVE, abs_tol=AGAIN_ABSOLUTE)


def _attacked(ledger: Ledger, stated: list[dict[str, Any]], relation: str) -> tuple[list[Attacked], list[str]]:
    """The attacked mechanisms, and in what they are not those of the ledger."""
    attacked, problems, times = [], [], dict.fromkeys(ledger.entries, 0)
    for each in stated:
        name, movement = each["name"], Movement(float(each["moved"]["first"]), float(each["moved"]["second"]))
        if name not in ledger.entries:
            problems.append(f"attacks {name!r}, which its ledger does not have")
            continue
        event = ledger.entries[name].event
        times[name] += each["times"]
        if (each["std"], each["sampling"]) != (event.std, event.sampling.to_dict()) or times[name] > event.times:
            problems.append(f"attacks {name!r} with another noise, sampling or number of releases than its ledger's")
        declared = getattr(event.sensitivity, relation)
        if movement.distance > declared * (1.0 + TOLERANCE):
            problems.append(f"is of a release {name!r} that moves by {movement.distance:.6g}, declared {declared:.6g}")
        attacked.append(Attacked(name, Event(event.sampling, event.sensitivity, event.std, each["times"]), movement))
    return attacked, problems

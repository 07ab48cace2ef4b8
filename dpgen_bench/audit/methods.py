"""Audits of a configured method or a run.

Level a finds how far releases move, level b tests their noise, and level c attacks the mechanisms with both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpgen_bench.audit.distinguisher import Certificate, certify
from dpgen_bench.audit.noise import noise_faults
from dpgen_bench.audit.replay import Pair, Replayed, attacked_record, describe, noise_of_runs, replay
from dpgen_bench.privacy.accountants.proven import NotCovered, epsilon
from dpgen_bench.privacy.accountants.table import claimed_epsilon
from dpgen_bench.privacy.events import Event, Relation, budget_text
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.runs.compose import compose_config
from dpgen_bench.runs.config import RunSpec, build_spec
from dpgen_bench.runs.measure import is_for_release
from dpgen_bench.runs.plan import plan_spec
from dpgen_bench.runs.store import Store
from dpgen_bench.testing.bench import Bench, DataSet


@dataclass(frozen=True)
class MethodAudit:
    """What an audit found out about a method.

    Attributes:
        title: the method, its data and its budget, in one line.
        proven: epsilon of the accountant under the relation; None if it does not cover the releases.
        claimed: epsilon as the paper counts it, or None.
        replayed: level a.
        noise: what level b found wrong with the noise, by mechanism; None if it was not asked for.
        pair: the neighbours that were told apart.
        certificate: level c; None if it was not asked for.
    """

    title: str
    relation: Relation
    delta: float
    proven: float | None
    claimed: float | None
    replayed: Replayed
    noise: dict[str, list[str]] | None
    pair: Pair
    certificate: Certificate | None

    @property
    def exceeded(self) -> list[str]:
        """Releases that moved further than declared, in words."""
        return [
            f"release {moved.index} of {moved.mechanism!r} moved by {moved.distance:.6g}, but {moved.declared:.6g} is "
            f"declared ({pair.relation}: {pair.names[0]} / {pair.names[1]})"
            for moved, pair in self.replayed.exceeded
        ]

    @property
    def refuted(self) -> list[str]:
        """Names of the epsilons that are below the certified one."""
        if self.certificate is None:
            return []
        values = {"proven": self.proven, "claimed": self.claimed}
        return [name for name, value in values.items() if value is not None and self.certificate.strongest > value]

    def lines(self) -> list[str]:
        """The result of level a, one line for each mechanism and relation."""
        return list(describe(self.replayed))

    @property
    def wrong_noise(self) -> list[str]:
        """What is wrong with the noise, in words."""
        return [f"{name!r}: {text}" for name, texts in (self.noise or {}).items() for text in texts]

    def to_dict(self) -> dict[str, Any]:
        """JSON values, for the record of an attack."""
        return {
            "relation": self.relation,
            "delta": self.delta,
            "proven": _finite(self.proven),
            "claimed": _finite(self.claimed),
            "neighbours": list(self.pair.names),
            "moved": {
                name: {which: _furthest(self.replayed, name, which) for which in ("add_remove", "replace_one")}
                for name in self.replayed.events
            },
            "noise": self.noise,
            "certified": None if self.certificate is None else self.certificate.to_dict(),
        }


def _finite(value: float | None) -> float | str | None:
    return str(value) if value is not None and math.isinf(value) else value


def _furthest(replayed: Replayed, name: str, which: Relation) -> dict[str, Any] | None:
    found = replayed.furthest(name, which)
    if found is None:
        return None
    moved, pair = found
    return {"distance": moved.distance, "declared": _finite(moved.declared), "neighbours": list(pair.names)}


def run_spec(results: Path, run: str) -> RunSpec:
    """The settings of a run in a folder of results.

    Raises:
        LookupError: if no run, or more than one, matches `run`.
    """
    folder = Store(results).find(run)
    return RunSpec(folder.config, folder.read_json("identity.json"))


def write_certified(results: Path, run: str, result: MethodAudit) -> Path | None:
    """Write what was certified into the ledger of a run, as `epsilon.certified`, and return its path.

    Nothing is written, and None returned, if the run's epsilons were not computed yet, if the audit attacked another
    relation than that of the run's budget, or if it found a fault, which an epsilon would hide.
    """
    folder = Store(results).find(run)
    certificate, path = result.certificate, folder.path / "ledger.json"
    if certificate is None or result.exceeded or result.wrong_noise or result.refuted:
        return None
    with folder.locked():
        ledger = Ledger.load(path)
        if ledger.epsilon is None or ledger.budget.relation != result.relation:
            return None
        ledger.epsilon["certified"] = {
            "epsilon": _finite(certificate.strongest),
            "figure": "model-free" if certificate.gdp is None else "gdp",
            "confidence": certificate.confidence,
            "trials": certificate.trials,
            "level": "c",
            "relation": result.relation,
            "attack": result.to_dict(),
        }
        ledger.save()
    return path


def method_spec(overrides: list[str]) -> RunSpec:
    """The settings of the run that overrides describe."""
    return build_spec(compose_config(overrides))


def audit_method(
    spec: RunSpec,
    relation: Relation | None = None,
    *,
    levels: str = "abc",
    trials: int = 100_000,
    seed: int = 0,
    echo: Callable[[str], None] = lambda line: None,
) -> MethodAudit:
    """Audit the method of a run.

    Args:
        levels: letters of the levels; level a is always a part, because the others need its fit.
        relation: the relation whose neighbours are attacked; None takes that of the budget.
        echo: called with one line for each step.

    Raises:
        ValueError: for a method without mechanisms, one whose unit is the client, or a run with privacy.noise=os:
            how far its records move a release is a function of them that no mechanism protects.
        ConformanceError: if a replay shows that the method uses records other than through releases.
    """
    if is_for_release(spec.config):
        raise ValueError(
            "expected settings with privacy.noise=seeded, on public data, got privacy.noise=os: an audit computes from "
            "the records what no epsilon covers. Audit the same method on public data, by its name and settings."
        )
    ledger = plan_spec(spec)
    if ledger.unit != "record":
        raise ValueError(
            f"expected a method that protects single records, got {spec.config.method.name}, whose unit is the "
            "client: its mechanisms are not replayed. Describe them in a case (docs/audit.md)."
        )
    own = {name: entry for name, entry in ledger.entries.items() if entry.inherited_from is None}
    if not own:
        raise ValueError(f"expected a method that uses records, got {spec.config.method.name}, which makes no release.")
    ledger.entries = own
    loaded = spec.dataset().load("train")
    # The key of `Bench`, whose draws decide which records are needed.
    record, ids = attacked_record(ledger, Key.seeded(f"conformance:{spec.seed}"), len(loaded))
    budget, dataset = ledger.budget, spec.dataset()
    images = loaded.images[ids].float() / 255.0
    bench = Bench(
        spec.method,
        DataSet("", images, loaded.labels[ids], ids, np.zeros(len(ids), dtype=np.int64)),
        (images.shape[1], images.shape[2], images.shape[3]),
        dataset.num_classes,
        spec.seed,
        budget,
        clients=1,
        class_names=dataset.class_names,
        public_n=len(loaded),
        scale=spec.scale(),
    )
    replayed = replay(bench, ledger, record, echo)
    which = relation or budget.relation
    pair, attacked = replayed.attacked(which)
    certificate, noise = None, None
    if "b" in levels:
        noises = noise_of_runs(bench, replayed)
        noise = {name: noise_faults(runs, replayed.events[name].std) for name, runs in noises.items()}
    if "c" in levels:
        certificate = certify(attacked, budget.delta, which, trials=trials, seed=seed)
    events = list(replayed.events.values())
    title = (
        f"{spec.config.method.name} on {spec.config.dataset.name}: {len(loaded):,} records, epsilon "
        f"{budget_text(budget.epsilon)} at delta {budget.delta:g}, {budget.relation}"
    )
    stated = claimed_epsilon(spec.method(), events, budget.delta)
    claimed = None if stated is None else float(stated)
    return MethodAudit(
        title, which, budget.delta, _proven(events, budget.delta, which), claimed, replayed, noise, pair, certificate
    )


def _proven(events: list[Event], delta: float, relation: Relation) -> float | None:
    """The epsilon that PLD or, where it has no theory, RDP proves; None if neither does."""
    for accountant in ("pld", "rdp"):
        try:
            return epsilon(events, delta, relation, accountant)
        except NotCovered:
            continue
    return None

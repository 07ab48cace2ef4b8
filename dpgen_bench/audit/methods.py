"""Audits of a configured method or a run.

Level a finds how far releases move, level b tests their noise, and level c attacks the mechanisms with both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpgen_bench.audit.distinguisher import Certificate, certify
from dpgen_bench.audit.noise import noise_faults
from dpgen_bench.audit.pretrained_once import Known, PretrainedOnce
from dpgen_bench.audit.replay import Pair, Replayed, attacked_record, describe, noise_of_runs, replay
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import RunSpec, build_spec
from dpgen_bench.method import Method
from dpgen_bench.pretraining.pretrained import Pretrained
from dpgen_bench.privacy.accountants.proven import NotCovered, epsilon
from dpgen_bench.privacy.accountants.table import claimed_epsilon
from dpgen_bench.privacy.events import Event, Relation, budget_text
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.runs.measure import is_for_release
from dpgen_bench.runs.plan import plan_spec
from dpgen_bench.store.folders import Store
from dpgen_bench.testing.bench import Bench, DataSet
from dpgen_bench.utils.json_numbers import to_json


@dataclass(frozen=True)
class MethodAudit:
    """What an audit found out about a method.

    Attributes:
        title: the method, its data and its budget, in one line.
        proven: epsilon of the accountant under the relation; None if it does not cover the releases.
        claimed: epsilon as the paper counts it, or None.
        claimed_relation: the relation of this count; a claim of another relation than the attacked one is not compared.
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
    claimed_relation: Relation

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
        values = {"proven": self.proven, "claimed": self.claimed if self.claim_is_attacked else None}
        return [name for name, value in values.items() if value is not None and self.certificate.strongest > value]

    @property
    def claim_is_attacked(self) -> bool:
        """Whether the claim is of the relation that was attacked."""
        return self.claimed_relation == self.relation

    @property
    def failed(self) -> bool:
        """Whether a release moved further than declared, noise is wrong, or an epsilon is refuted."""
        return bool(self.exceeded or self.wrong_noise or self.refuted)

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
            "proven": to_json(self.proven),
            "claimed": to_json(self.claimed),
            "claimed_relation": self.claimed_relation,
            "neighbours": list(self.pair.names),
            "moved": {
                name: {which: _furthest(self.replayed, name, which) for which in ("add_remove", "replace_one")}
                for name in self.replayed.events
            },
            "noise": self.noise,
            "certified": None if self.certificate is None else self.certificate.to_dict(),
        }


def _furthest(replayed: Replayed, name: str, which: Relation) -> dict[str, Any] | None:
    found = replayed.furthest(name, which)
    if found is None:
        return None
    moved, pair = found
    return {"distance": moved.distance, "declared": to_json(moved.declared), "neighbours": list(pair.names)}


def run_spec(results: Path, run: str) -> RunSpec:
    """The settings of a run in a folder of results.

    Raises:
        LookupError: if no run, or more than one, matches `run`.
    """
    folder = Store(results).find(run)
    return RunSpec(folder.config, folder.read_json("identity.json"))


def run_ledger(results: Path, run: str) -> Ledger:
    """The ledger of a run in a folder of results.

    Raises:
        LookupError: if no run, or more than one, matches `run`.
        ValueError: if it has no ledger yet, or one that cannot be read.
    """
    folder = Store(results).find(run)
    content = folder.read_json("ledger.json")
    if not content:
        raise ValueError(f"expected a ledger of run {folder.id}, got none in {folder.path}; start or finish the run.")
    return Ledger.from_dict(content)


def expect_planned(stated: Ledger, planned: Ledger) -> None:
    """Raise ValueError unless the ledger of a run states the budget and the releases that its config plans.

    An audit attacks what the config plans. If the config, the ledger or the method was changed after the run, its
    certified epsilon would be that of other mechanisms than the run's.
    """
    budgets = [replace(each.budget, accountant="pld") for each in (stated, planned)]
    same = budgets[0] == budgets[1] and stated.entries.keys() >= planned.entries.keys()
    for name, entry in planned.entries.items():
        if same:
            own, other = stated.entries[name].event, entry.event
            same = math.isclose(own.std, other.std, rel_tol=1e-6) and own == replace(other, std=own.std)
    if not same:
        raise ValueError(
            "expected a run whose ledger states the releases that its config plans, got others: its config, its "
            "ledger or its method was changed after the run. Audit the method by its name and settings instead."
        )


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
    stated: Ledger | None = None,
    echo: Callable[[str], None] = lambda line: None,
) -> MethodAudit:
    """Audit the method of a run.

    Args:
        levels: letters of the levels; level a is always a part, because the others need its fit.
        relation: the relation whose neighbours are attacked; None takes that of the budget.
        seed: of the trials of level c; another one draws other trials.
        stated: the ledger of the run, whose releases must be those that its settings plan; None for a method.
        echo: called with one line for each step.

    Raises:
        ValueError: for a method without mechanisms, one whose unit is the client, or a run with privacy.noise=os:
            how far its records move a release is a function of them that no mechanism protects.
        ConformanceError: if a replay shows that the method uses records other than through releases.
    """
    expect_public(spec)
    ledger = plan_spec(spec)
    if stated is not None:
        expect_planned(stated, ledger)
    if ledger.unit != "record":
        raise ValueError(
            f"expected a method that protects single records, got {spec.config.method.name}, whose unit is the "
            "client: its mechanisms are not replayed. Describe them in a case (docs/audit.md)."
        )
    own = ledger.own
    if not own:
        raise ValueError(f"expected a method that uses records, got {spec.config.method.name}, which makes no release.")
    ledger.entries = own
    loaded = spec.dataset().load("train")
    # The key of `Bench`, whose draws decide which records are needed.
    record, ids = attacked_record(ledger, Key.seeded(f"conformance:{spec.seed}"), len(loaded))
    budget, dataset = ledger.budget, spec.dataset()
    images = loaded.images[ids].float() / 255.0
    known: Known = {}
    bench = Bench(
        lambda: with_audited(spec.method(), known),
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
    method = spec.method()
    claim = claimed_epsilon(method, events, budget.delta)
    claimed = None if claim is None else float(claim)
    proven = _proven(events, budget.delta, which)
    claimed_relation = getattr(method, "claimed_relation", budget.relation)
    return MethodAudit(
        title, which, budget.delta, proven, claimed, replayed, noise, pair, certificate, claimed_relation
    )


def expect_public(spec: RunSpec) -> None:
    """Raise ValueError for a run whose records no audit may use."""
    if is_for_release(spec.config):
        raise ValueError(
            "expected settings with privacy.noise=seeded, on public data, got privacy.noise=os: an audit computes from "
            "the records what no epsilon covers. Audit the same method on public data, by its name and settings."
        )


def with_audited(method: Method, known: Known) -> Method:
    """The method with the settings that its class states for audits (`audited`), as GS-WGAN's warm start of critics.

    They make a fit shorter. `replay` checks that the events of its mechanisms stay as they are.

    Args:
        known: networks that earlier fits pretrained, and to which this one adds (`PretrainedOnce`).
    """
    if isinstance(method, Pretrained):
        return PretrainedOnce(with_audited(method.method, known), method.stage, method.pretraining, known)
    audited = getattr(type(method), "audited", {})
    return replace(method, **audited) if audited else method  # type: ignore[type-var]


def _proven(events: list[Event], delta: float, relation: Relation) -> float | None:
    """The epsilon that PLD or, where it has no theory, RDP proves; None if neither does."""
    for accountant in ("pld", "rdp"):
        try:
            return epsilon(events, delta, relation, accountant)
        except NotCovered:
            continue
    return None

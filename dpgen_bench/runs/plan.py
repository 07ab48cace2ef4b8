"""Plans a run: the mechanisms that its method would request, with their budget, without access to any record."""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import RunSpec, build_spec
from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context, fit_method
from dpgen_bench.privacy.allowance import Observer
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from dpgen_bench.runs.prepare import inherited_ledger, new_ledger


def plan(overrides: list[str]) -> Ledger:
    """The ledger with the allowances that the run of these overrides would request, see `plan_spec`."""
    spec = build_spec(compose_config(overrides))
    inherited_ledger(spec)
    return plan_spec(spec)


def plan_spec(spec: RunSpec) -> Ledger:
    """The ledger with the allowances that a run would request before its first release.

    Nothing is released: `fit` is stopped before its first access to records.
    """
    dataset = spec.dataset()
    records = dataset.load("train")
    ledger = new_ledger(spec, len(records))
    # The method gets empty data and the number of records only, and the first release ends the plan.
    key = Key.from_os() if ledger.noise == "os" else Key.seeded("plan")
    services = Services(ledger, key, observer=_StopAtRecords())
    data = PrivateData(
        records.images[:0],
        records.labels[:0],
        dataset.num_classes,
        services,
        public_n=len(records),
        clients=None if records.clients is None else records.clients[:0].numpy(),
        num_clients=dataset.num_clients,
        class_names=dataset.class_names,
    )
    with contextlib.suppress(_PlanComplete):
        fit_method(spec.method(), data, Context(spec.seed, "cpu", scale=spec.scale(), services=services))
    return ledger


class _PlanComplete(Exception):
    """Raised where the method would first use a record."""


class _StopAtRecords(Observer):
    """Ends `fit` before the first release, which therefore returns nothing to the method."""

    def release(self, *_: Any) -> NoReturn:
        raise _PlanComplete

    def before_records(self) -> NoReturn:
        raise _PlanComplete

"""What a run would release, planned without touching a record: its allowances and its budget."""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context
from dpgen_bench.privacy.allowance import Observer
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from dpgen_bench.runs.config import build_spec, compose_config
from dpgen_bench.runs.prepare import inherited_ledger, new_ledger


def plan(overrides: list[str]) -> Ledger:
    """A ledger of the allowances that the run of these overrides would request before its first release.

    Nothing is released: `fit` is stopped where it would first touch a record.
    """
    spec = build_spec(compose_config(overrides))
    inherited_ledger(spec)
    dataset = spec.dataset()
    records = dataset.load("train")
    ledger = new_ledger(spec, len(records))
    # No record is handed over: the data are empty, only their number is known, and the first release ends the plan.
    key = Key.from_os() if ledger.noise == "os" else Key.seeded("plan")
    services = Services(ledger, key, observer=_Planned())
    data = PrivateData(
        records.images[:0],
        records.labels[:0],
        dataset.num_classes,
        services,
        public_n=len(records),
        clients=None if records.clients is None else records.clients[:0].numpy(),
        num_clients=dataset.num_clients,
    )
    with contextlib.suppress(_PlanMade):
        spec.method().fit(data, Context(spec.seed, "cpu", scale=spec.scale(), services=services))
    return ledger


class _PlanMade(Exception):
    pass


class _Planned(Observer):
    """Ends a plan: nothing of the first release comes back to the method."""

    def release(self, *_: Any) -> NoReturn:
        raise _PlanMade

    def before_records(self) -> NoReturn:
        raise _PlanMade

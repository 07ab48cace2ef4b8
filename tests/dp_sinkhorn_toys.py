"""Small settings of DP-Sinkhorn and fits with them, for its tests."""

from __future__ import annotations

import math
from typing import Any

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import Generator
from dpgen_bench.method import Context
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from methods.dp_sinkhorn import DPSinkhorn
from tests.toys import Watcher, records

TINY: dict[str, Any] = dict(batch_size=5, p=0.4, latent_dim=3, label_dim=2, width=2, sigma=None, steps=1)
VARIANTS: dict[str, dict[str, Any]] = {
    "per_row": {},
    "whole": {"clip": "whole"},
    "parameter": {"perturb": "parameter"},
    "parameter, biased": {"perturb": "parameter", "p": 0.0, "cost": "l2"},
    "biased": {"p": 0.0},
    "debiased, whole, repeated labels": {"p": 1.0, "clip": "whole", "debias_labels": "repeated"},
    "distances": {"cost": "l1"},
    "annealed by squares": {"lam": 5.0, "exponent": 2.0, "cost": "l2"},
}


class Seen(Context):
    """A context that remembers the states that the method passed to its loop."""

    def steps(self, total: int, *, phase: str = "train", **stateful: Any) -> Any:
        self.stateful = stateful
        return super().steps(total, phase=phase, **stateful)


def private(eps: float = math.inf, n: int = 12, watcher: Watcher | None = None, **options: Any) -> PrivateData:
    ledger = Ledger(Budget(eps, 1e-5, "add_remove", "rdp"), n)
    return PrivateData(*records(n), 10, Services(ledger, Key.seeded("test"), observer=watcher, **options))


def fit(method: DPSinkhorn, data: PrivateData, **context: Any) -> tuple[Generator, Seen]:
    ctx = Seen(3, services=data._services, **context)
    return method.fit(data, ctx), ctx

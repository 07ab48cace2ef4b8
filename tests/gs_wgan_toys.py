"""A small GS-WGAN, the records that it is fitted to, and its fit, for the tests of GS-WGAN."""

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
from methods.gs_wgan import GSWGAN
from tests.toys import Watcher, records

SHAPE = (1, 28, 28)
TINY: dict[str, Any] = dict(
    shards=3, batch_size=4, steps=4, n_critic=1, warm_start=1, generator="dcgan", width=2, critic_width=2, latent_dim=3
)


def private(eps: float = math.inf, n: int = 12, watcher: Watcher | None = None, **options: Any) -> PrivateData:
    ledger = Ledger(Budget(eps, 1e-5, "replace_one", "pld"), n)
    return PrivateData(*records(n), 10, Services(ledger, Key.seeded("test"), observer=watcher, **options))


def fit(method: GSWGAN, data: PrivateData, **context: Any) -> Generator:
    return method.fit(data, Context(3, services=data._services, **context))

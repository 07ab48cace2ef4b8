"""Fits of methods on made-up records, with the CPU time and the floating-point operations of each step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.utils.flop_counter import FlopCounterMode

from dpgen_bench.config.building import build_method
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import RunSpec
from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context, fit_method
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from dpgen_bench.testing.suite import random_data
from dpgen_bench.utils.execution import Precision

CLASSES = 10
BEFORE = "before the first loop"  # the phase before `Context.steps` is called, such as the one release of DP-MERF


@dataclass
class Steps:
    """A `Progress` that keeps what each step of a fit costs, by the phase of its loop.

    Attributes:
        flops: counts multiplications and additions of matrix products and convolutions; None counts nothing.
        seconds: CPU seconds of the process for each step.
        operations: the counted operations of each step.
    """

    flops: FlopCounterMode | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    operations: dict[str, list[int]] = field(default_factory=dict)
    _phase: str = BEFORE
    _since: tuple[float, int] = (0.0, 0)

    def begin(self) -> None:
        self._since = self._now()

    def start(self, phase: str, total: int, done: int) -> None:
        if self._phase == BEFORE:
            self.step(1)
        self._phase = phase
        self.begin()

    def step(self, done: int) -> None:
        seconds, operations = self._now()
        self.seconds.setdefault(self._phase, []).append(seconds - self._since[0])
        self.operations.setdefault(self._phase, []).append(operations - self._since[1])
        self.begin()

    def finish(self) -> None:
        pass

    def _now(self) -> tuple[float, int]:
        return time.process_time(), self.flops.get_total_flops() if self.flops else 0


def fit(
    method: str,
    overrides: Sequence[str],
    *,
    records: int = 1000,
    side: int = 28,
    clients: int = 10,
    precision: Precision = "fp32",
    flops: FlopCounterMode | None = None,
) -> Steps:
    """Fit a method on made-up grey images [records, 1, side, side].

    Args:
        overrides: settings of the config, with a budget that needs no calibration, which would be counted.
        records, side, clients: the made-up data.
        precision: of networks outside of private functions.
        flops: an active mode that counts operations.
    """
    config = compose_config([f"method={method}", "dataset=mnist", *overrides])
    made = random_data((1, side, side), records, CLASSES, clients, seed=0)
    services = Services(Ledger(RunSpec(config, training={}).budget(), records), Key.seeded("scaling"))
    data = PrivateData(
        made.images,
        made.labels,
        CLASSES,
        services,
        ids=made.ids,
        public_n=records,
        clients=made.clients,
        num_clients=clients,
    )
    steps = Steps(flops)
    context = Context(0, "cpu", services=services, precision=precision, progress=steps)
    steps.begin()
    fit_method(build_method(config), data, context)
    return steps

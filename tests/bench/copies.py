"""Cost of one clipped gradient sum of DPDM's losses, of K noisy copies of each record, on one CPU thread.

Three ways, interleaved in one process, on the same rows, for the network of dpdm/medium_mnist: the non-private gradient
of all copies, one pass in which copies are positions (`copies=K`), and K passes, each of which forms the gradient of
every record for one copy by Opacus's hooks and adds it to those of the copies before. Times are processor time of the
process; ratios are medians of round-by-round ratios. Memory is that of a fresh process for each way.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpgen_bench.nets.edm import Denoiser
from dpgen_bench.privacy.gradients import clipped_gradient_sum
from dpgen_bench.privacy.gradients.opacus_backend import _hooked
from tests.bench._machine import machine
from tests.bench.gradients import _peak_mib, _spread

ROUNDS, RECORDS, MAX_NORM = 3, 32, 1.0
SIZES = dict(width=28, multipliers=(1, 2), blocks=1, patch=2, embedding=96)
WAYS = ("non_private", "one_pass", "k_passes")
NUMBERS_OF_COPIES = (8,)


def step(way: str, copies: int) -> Callable[[], dict[str, Tensor]]:
    """A function that computes the (clipped) sum once."""
    torch.manual_seed(0)
    net = Denoiser((1, 28, 28), 10, **SIZES)
    torch.nn.init.normal_(net.net.leave.weight, std=0.05)
    b, parameters = RECORDS, dict(net.named_parameters())
    x, y, rows = torch.rand(b, 1, 28, 28), torch.randint(10, (b,)), torch.arange(b)
    s, noise = torch.exp(1.2 * torch.randn(b, copies) - 1.2), torch.randn(b, copies, 1, 28, 28)

    def losses(rows: Tensor) -> Tensor:  # the mean over all copies of each record
        repeated = rows.repeat_interleave(copies)
        each = net.losses(x[repeated], y[repeated], s[rows].flatten(), noise[rows].flatten(0, 1))
        return each.view(-1, copies).mean(1)

    def non_private() -> dict[str, Tensor]:
        gradients = torch.autograd.grad(losses(rows).sum(), list(parameters.values()))
        return dict(zip(parameters, gradients, strict=True))

    def one_pass() -> dict[str, Tensor]:
        return clipped_gradient_sum(net, losses, (rows,), MAX_NORM, copies=copies).gradients

    def k_passes() -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for k in range(copies):
            with _hooked(net):
                each = net.losses(x, y, s[:, k], noise[:, k]) / copies
                torch.autograd.grad(each.sum(), list(parameters.values()))
                for name, parameter in parameters.items():
                    sample = parameter.grad_sample  # type: ignore[attr-defined]
                    total[name] = sample.clone() if k == 0 else total[name].add_(sample)
        norms = torch.stack([part.flatten(1).norm(dim=1) for part in total.values()]).norm(dim=0)
        factors = MAX_NORM / norms.clamp_min(MAX_NORM)
        return {name: torch.tensordot(factors, part, 1) for name, part in total.items()}

    return {"non_private": non_private, "one_pass": one_pass, "k_passes": k_passes}[way]


def _times(copies: int) -> dict[str, Any]:
    steps = {way: step(way, copies) for way in WAYS}
    sums = {way: steps[way]() for way in WAYS}  # also fills caches
    difference = max(float((sums["one_pass"][name] - sums["k_passes"][name]).norm()) for name in sums["one_pass"])
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, once in steps.items():
            start = time.process_time()
            once()
            seconds[way].append(time.process_time() - start)

    def ratio(over: str, under: str) -> dict[str, float]:
        return _spread([a / b for a, b in zip(seconds[over], seconds[under], strict=True)])

    return {
        "seconds": {way: _spread(values) for way, values in seconds.items()},
        "k_passes over one_pass": ratio("k_passes", "one_pass"),
        "one_pass over non_private": ratio("one_pass", "non_private"),
        "largest norm of a difference of the two sums, of one parameter": difference,
    }


def _memory(way: str, copies: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.bench.copies", way, str(copies)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _measure_own_memory(way: str, copies: int) -> None:
    torch.set_num_threads(1)
    once = step(way, copies)
    before = _peak_mib()
    once()
    print(json.dumps({"step_mib": round(_peak_mib() - before)}))


def measure() -> dict[str, Any]:
    """All values of this benchmark."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    return {
        "what": " ".join((__doc__ or "").split()),
        "machine": machine("opacus"),
        "rounds": ROUNDS,
        "records": RECORDS,
        "time": {f"{copies} copies": _times(copies) for copies in NUMBERS_OF_COPIES},
        "memory": {f"{copies} copies": {way: _memory(way, copies) for way in WAYS} for copies in NUMBERS_OF_COPIES},
    }


if __name__ == "__main__":
    _measure_own_memory(sys.argv[1], int(sys.argv[2]))

"""Cost of one DP-Sinkhorn step's loss and gradient (p = 0.4, l1+l2 with m = 1, λ = 0.05) on digits of 28x28 pixels.

Interleaved in one process on the same float32 points, on one CPU thread and, where there is one, on an accelerator:
geomloss with the differences of all pairs (the reference back end); with the squares by a matrix product, as geomloss's
own cost takes them; with torch.cdist for the L1 term; and the bench's, with both terms in one loop or, as the method
must, one after the other. CPU times are processor time of the process, so that other work on the machine disturbs them
little; ratios are medians of round-by-round ratios. `gradient_error` is the norm of the difference from geomloss's
gradient in float64, relative to that gradient's norm.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from geomloss import SamplesLoss
from sklearn.datasets import load_digits
from torch import Tensor

from dpgen_bench.nets.transport import Cost, Transport, semi_debiased
from tests.bench._machine import machine

P, LAM, ALPHA_C, COST = 0.4, 0.05, 15.0, Cost(1.0, 1.0)
ROUNDS = {50: 21, 200: 5}  # of n = m points
BENCH = "fast, both terms at once"


def points(n: int, m: int) -> tuple[Tensor, Tensor]:
    """Images in [-1, 1] with the class appended: X [n + 0.4 n, 794], blurred and noisy as a generator's, Y [m, 794]."""
    generator = torch.Generator().manual_seed(0)
    digits = load_digits()
    rows = torch.randperm(len(digits.target), generator=generator)[: n + int(n * P) + m]
    images = torch.from_numpy(digits.images).float()[rows, None] / 8.0 - 1.0
    images = F.interpolate(images, size=(28, 28), mode="bilinear").flatten(1)
    labels = ALPHA_C * F.one_hot(torch.from_numpy(digits.target)[rows], 10).float()
    generated = (0.8 * images + 0.2 * torch.randn(images.shape, generator=generator) - 0.1).clamp(-1.0, 1.0)
    return torch.cat([generated, labels], dim=1)[:-m], torch.cat([images, labels], dim=1)[-m:]


def all_absolute_differences(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, :, None] - y[:, None]).abs().sum(-1)


def by_matrix_product(l1: Callable[[Tensor, Tensor], Tensor], X: Tensor, Y: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """As one would write it with geomloss: |x|² + |y|² - 2<x, y> and one backward pass."""

    def cost(x: Tensor, y: Tensor) -> Tensor:
        squares = x.square().sum(-1)[:, :, None] + y.square().sum(-1)[:, None] - 2.0 * x @ y.transpose(1, 2)
        return COST.l2 * squares + COST.l1 * l1(x, y)

    W = SamplesLoss("sinkhorn", p=1, blur=LAM, cost=cost, debias=False, backend="tensorized")
    X = X.clone().requires_grad_()
    loss = 2.0 * W(X[:n], Y) - W(X[:n], X[len(X) - n :])
    return loss.detach(), torch.autograd.grad(loss, X)[0]


def term_by_term(X: Tensor, Y: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """As methods/dp_sinkhorn.py calls it."""
    transport = Transport(COST, LAM)
    (own,) = transport.solve((X[:n], X[len(X) - n :]))
    in_first, in_last = own.in_both
    gradient = torch.zeros_like(X)
    gradient[:n] -= in_first
    gradient[len(X) - n :] -= in_last
    (cross,) = transport.solve((X[:n], Y))
    gradient[:n] += 2.0 * cross.in_x
    return 2.0 * cross.value - own.value, gradient


WAYS: dict[str, Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]] = {
    "geomloss": partial(semi_debiased, Transport(COST, LAM, backend="geomloss")),
    "geomloss, squares by matrix product": partial(by_matrix_product, all_absolute_differences),
    "geomloss, matrix product and cdist": partial(by_matrix_product, partial(torch.cdist, p=1.0)),
    BENCH: partial(semi_debiased, Transport(COST, LAM)),
    "fast, term by term": term_by_term,
}


def _timed(way: Callable[[Tensor, Tensor, int], Any], X: Tensor, Y: Tensor, n: int) -> float:
    clock = time.process_time if X.device.type == "cpu" else time.perf_counter
    if X.device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    way(X, Y, n)
    if X.device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def compared(n: int, rounds: int, device: str) -> dict[str, Any]:
    """Seconds of each way, ratios and errors, with n generated and n real points."""
    X, Y = (cloud.to(device) for cloud in points(n, n))
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for i in range(rounds + 1):
        for name, way in WAYS.items():
            took = _timed(way, X, Y, n)
            if i:  # the first round fills caches
                seconds[name].append(took)
    _, exact = WAYS["geomloss"](X.double(), Y.double(), n)
    errors = {name: float((way(X, Y, n)[1] - exact).norm() / exact.norm()) for name, way in WAYS.items()}
    ratios = {
        name: [a / b for a, b in zip(seconds[name], seconds[BENCH], strict=True)] for name in WAYS if name != BENCH
    }
    return {
        "rounds": rounds,
        "milliseconds": {name: _spread([1e3 * value for value in values]) for name, values in seconds.items()},
        **{f"{name}, over {BENCH}": _spread(values) for name, values in ratios.items()},
        "gradient_error": {name: float(f"{error:.2g}") for name, error in errors.items()},
    }


def _spread(values: list[float]) -> dict[str, float]:
    spread = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in spread.items()}


def measure() -> dict[str, Any]:
    """All values of this benchmark."""
    torch.set_num_threads(1)
    result = {
        "what": " ".join((__doc__ or "").split()),
        "machine": machine("geomloss"),
        "cpu": {f"n = m = {n}": compared(n, rounds, "cpu") for n, rounds in ROUNDS.items()},
    }
    if torch.cuda.is_available():
        result["accelerator"] = {f"n = m = {n}": compared(n, 4 * rounds, "cuda") for n, rounds in ROUNDS.items()}
    return result

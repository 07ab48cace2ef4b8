"""The papers' own counts of epsilon, and one value under an assumption, for tables that compare them with the proof.

No budget is enforced on them. Two of the papers compose the subsampled Gaussian once per row of a batch although all
rows of a step come from one secret draw, which is not an upper bound on epsilon. The upper bound is that of
`dpgen_bench.privacy.accountants.proven` for the ledger's events. See docs/accountants.md, "Claimed and conditional
values".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import gammaln, logsumexp

from dpgen_bench.privacy.accountants.composition import Composition
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.events import Event, Sensitivity
from dpgen_bench.privacy.sampling import OneClient, OneShard, Poisson

# The orders of TF-privacy's DP-SGD scripts, which DP-Sinkhorn's accountant uses: it gives 10.05, where an order between
# 3.5 and 4.0 would give 10.02.
TF_PRIVACY_ORDERS: tuple[float, ...] = (
    *(1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5),
    *(float(order) for order in range(5, 64)),
    *(128.0, 256.0, 512.0),
)


def _check(q: float, sigma: float, compositions: int, delta: float) -> None:
    if not 0.0 < q <= 1.0:
        raise ValueError(f"expected a sampling rate q in (0, 1], got {q!r}.")
    if not sigma > 0.0:
        raise ValueError(f"expected a noise multiplier sigma > 0, got {sigma!r}.")
    if compositions < 1:
        raise ValueError(f"expected at least one composition, got {compositions!r}.")
    if not 0.0 < delta < 1.0:
        raise ValueError(f"expected delta in (0, 1), got {delta!r}.")


def _curve(q: float, sigma: float, compositions: int, orders: tuple[float, ...]) -> list[float]:
    from opacus.accountants.analysis.rdp import compute_rdp

    curve = compute_rdp(q=q, noise_multiplier=sigma, steps=compositions, orders=list(orders))
    return [float(value) for value in curve]


def paper_count(
    count: Callable[[float, float, int, float], float],
    events: Sequence[Event],
    delta: float,
    *,
    unit: float,
    per_step: int = 1,
) -> float | None:
    """A paper's count of epsilon for a method with one mechanism.

    The result is inf for a release without noise, and None for a run that inherits releases of another run, which the
    papers do not count.

    Args:
        count: from (sampling rate q, sigma, compositions, delta) to epsilon, such as `classical_rdp`.
        unit: standard deviation of the noise at sigma = 1.
        per_step: compositions that the paper counts for each release.
    """
    if len(events) != 1:
        return None
    (event,) = events
    if event.std == 0.0:
        return math.inf
    return count(event.sampling.rate, event.std / unit, event.times * per_step, delta)


@lru_cache(maxsize=256)
def classical_rdp(
    q: float, sigma: float, compositions: int, delta: float, orders: tuple[float, ...] = TF_PRIVACY_ORDERS
) -> float:
    """DP-Sinkhorn's count: RDP of the Poisson-subsampled Gaussian with the classical conversion.

    epsilon = min over orders alpha of rdp(alpha) + log(1/delta) / (alpha - 1). With `compositions` = iterations x rows
    it gives the values of the paper (MNIST: q=1/1200, sigma=1.5, 160,000 x 50 -> 10.05; Fashion-MNIST: 1.9, 280,000 x
    50 -> 10.04), which are claims and no bounds. With compositions = iterations, for the released code that clips the
    whole batch (1.1, 3.4 million -> 9.93), it is a valid but loose bound.

    Raises:
        ValueError: q outside (0, 1], sigma <= 0, compositions < 1 or delta outside (0, 1).
    """
    _check(q, sigma, compositions, delta)
    curve = _curve(q, sigma, compositions, orders)
    bounds = [
        value + math.log(1.0 / delta) / (order - 1.0)
        for order, value in zip(orders, curve, strict=True)
        if not math.isnan(value)
    ]
    return min(bounds, default=math.inf)


def opacus_rdp(q: float, sigma: float, compositions: int, delta: float) -> float:
    """DPGAN's count: Opacus's RDP accountant with its default orders, one composition per step.

    Table 1's settings at delta 1e-5 give 9.963 (batch 128), 9.995 (512) and 9.946 (2048), printed as 10.

    Raises:
        ValueError: q outside (0, 1], sigma <= 0, compositions < 1 or delta outside (0, 1).
    """
    _check(q, sigma, compositions, delta)
    return _by_opacus(((sigma, q, compositions),), delta)


def opacus_epsilon(events: Sequence[Event], delta: float) -> float | None:
    """`opacus_rdp` of `events` under add/remove; a run that restarts from another has several events.

    This is a valid bound, at least as large as that of `proven.Rdp`, which has more orders: 1,500 steps of DPGAN at
    q = 1/469, sigma = 1 and delta = 1e-5 have epsilon 0.870 by this function and 0.850 by `proven.Rdp`.

    Returns:
        epsilon; inf for a release without noise; None for samplings other than `Poisson` and `Full`, since Opacus has
        no curve for them.

    Raises:
        ValueError: for a delta outside (0, 1).
    """
    if not 0.0 < delta < 1.0:
        raise ValueError(f"expected delta in (0, 1), got {delta!r}.")
    composition = Composition.of(events, "add_remove")
    if composition is None:
        return math.inf
    if composition.shards or composition.clients or composition.fixed:
        return None
    history = [(multiplier, rate, times) for rate, multiplier, times in composition.poisson]
    if composition.gaussian:
        history.append((composition.gaussian**-0.5, 1.0, 1))
    return _by_opacus(tuple(history), delta)


@lru_cache(maxsize=256)
def _by_opacus(history: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """Epsilon by Opacus's accountant of a history in its own form, (noise multiplier, rate, times)."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = list(history)
    return float(accountant.get_epsilon(delta))


WOR_ORDERS = range(2, 513)  # larger orders are best only for epsilons below 2 log(1/delta) / 511


@lru_cache(maxsize=256)
def wor_rdp(rate: float, sigma: float, compositions: int, delta: float) -> float:
    """GS-WGAN's count: RDP of the Gaussian subsampled without replacement, by the general bound for any mechanism.

    Theorem A.1 of the paper (Wang, Balle, Kasiviswanathan 2019, Theorem 9), with g the sampling rate and the Gaussian's
    e(j) = j / (2 sigma²), e(inf) = inf: at an integer order a >= 2,

        (a - 1) rdp(a) <= log(1 + C(a, 2) g² min(4 (e^e(2) - 1), 2 e^e(2)) + sum_{j=3..a} 2 C(a, j) g^j e^((j-1) e(j))),

    and never more than (a - 1) e(a). The conversion is the classical one, as in autodp: epsilon is the minimum over a
    of rdp(a) + log(1/delta) / (a - 1). autodp also interpolates (a - 1) rdp(a) linearly between integers and minimises
    over real orders, with the same result: between integers its objective is a ratio of linear functions of a, hence
    monotone, and below order 2 it takes rdp(2) with a larger log term.

    With `compositions` = iterations x batch size it gives the value of the paper (1/1000, 1.07, 20,000 x 32, delta 1e-5
    -> 9.9926; autodp 0.2.3.1 agrees to 1e-6). That is a claim and no bound, because all images of a step come from one
    secret draw.

    Raises:
        ValueError: rate outside (0, 1], sigma <= 0, compositions < 1 or delta outside (0, 1).
    """
    _check(rate, sigma, compositions, delta)
    return min(
        compositions * _wor_log_moment(rate, sigma, order) / (order - 1.0) + math.log(1.0 / delta) / (order - 1.0)
        for order in WOR_ORDERS
    )


def _wor_log_moment(rate: float, sigma: float, order: int) -> float:
    """(order - 1) rdp(order) of one release; see `wor_rdp`."""

    def plain(j: Any) -> Any:
        return j / (2.0 * sigma**2)

    j = np.arange(2, order + 1)
    draws = gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1) + j * math.log(rate)
    terms = draws + (j - 1) * plain(j) + math.log(2.0)
    terms[0] += min(math.log(2.0) + math.log(-math.expm1(-plain(2))), 0.0)
    return min((order - 1) * plain(order), float(logsumexp([0.0, *terms])))


def memoryless(event: Event, delta: float) -> float:
    """GS-WGAN's epsilon if steps were memoryless: PLD of T Gaussians of joint sensitivity, each subsampled at rate 1/K.

    This is no bound for GS-WGAN. It assumes that each step is a fresh mixture over the secret index: its law depends on
    the shards, on public values and on earlier releases alone. Critics that are trained from step to step violate this
    (docs/accounting.md, "Why private state has no amplification"). The proven epsilon is that of `OneShard`.

    The subsampled Gaussian is that of add/remove at rate 1/K, with the sensitivity of replacing a record. For one step,
    amplification by advanced joint convexity proves it (Balle, Barthe and Gaboardi 2018). For T steps under replace-one
    it assumes in addition that the worst case keeps one direction.

    Args:
        event: `times` releases of a `OneShard` or `OneClient` sampling, schedule "random".

    Returns:
        epsilon; the published setting (K = 1000, B = 32, sigma 1.07 per row, T = 20,000, delta 1e-5) gives 329.4.

    Raises:
        ValueError: for another sampling (a public schedule hides no index), or a delta outside (0, 1).
    """
    return epsilon([memoryless_event(event)], delta, "add_remove", "pld")


def if_memoryless(events: Sequence[Event], delta: float) -> tuple[float, str] | None:
    """`memoryless` of a run's only event, and its assumption as text; this is not an upper bound.

    None for a release without noise, for a public schedule, and for a run that inherits releases of another run.
    """
    if len(events) != 1 or events[0].std == 0.0 or getattr(events[0].sampling, "schedule", None) != "random":
        return None
    return memoryless(events[0], delta), "if critics kept nothing of earlier steps (fresh state in each)"


def memoryless_event(event: Event) -> Event:
    """The Poisson-sampled event whose add/remove epsilon by PLD is `memoryless`."""
    sampling = event.sampling
    if not isinstance(sampling, OneShard | OneClient) or sampling.schedule != "random":
        raise ValueError(
            f"expected one of K shards or clients at random, got {sampling}: without a secret index nothing is hidden."
        )
    joint = event.sensitivity.replace_one
    return Event(Poisson(sampling.rate), Sensitivity(joint, joint), event.std, event.times)

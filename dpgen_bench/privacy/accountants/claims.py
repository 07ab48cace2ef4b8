"""The papers' own counts, and one under an assumption, kept ONLY so that tables can be regenerated and labelled.

No budget is enforced on them. Two of the papers compose the subsampled Gaussian once per row of a batch although all
rows of a step share one secret draw, which is not an upper bound on what the mechanism loses; the figure that is one
comes from `dpgen_bench.privacy.accountants.proven` on the ledger's events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.special import gammaln, logsumexp

from dpgen_bench.privacy.accountants.composition import Composition
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.events import Event, Sensitivity
from dpgen_bench.privacy.sampling import OneClient, OneShard, Poisson

# The orders TF-privacy's DP-SGD scripts use, and with them DP-Sinkhorn's accountant: 3.5 and 4.0 with nothing in
# between is what makes 10.02 a 10.05.
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
    """A paper's count of a method with one mechanism.

    It is inf for a release without noise, and None for a run that inherits releases of another, which the papers do not
    count.

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


def classical_rdp(q: float, sigma: float, compositions: int, delta: float) -> float:
    """DP-Sinkhorn's count: RDP of the Poisson-subsampled Gaussian, converted the older way.

    epsilon = min over orders alpha of rdp(alpha) + log(1/delta) / (alpha - 1). With `compositions` = iterations x
    rows it gives the paper's figures (MNIST: q=1/1200, sigma=1.5, 160,000 x 50 -> 10.05; Fashion-MNIST: 1.9,
    280,000 x 50 -> 10.04), which are claims; with compositions = iterations for the released whole-batch clipping
    (1.1, 3.4 million -> 9.93) it is a sound bound, merely loose.

    Raises:
        ValueError: q outside (0, 1], sigma <= 0, compositions < 1 or delta outside (0, 1).
    """
    _check(q, sigma, compositions, delta)
    curve = _curve(q, sigma, compositions, TF_PRIVACY_ORDERS)
    bounds = [
        value + math.log(1.0 / delta) / (order - 1.0)
        for order, value in zip(TF_PRIVACY_ORDERS, curve, strict=True)
        if not math.isnan(value)
    ]
    return min(bounds, default=math.inf)


def opacus_rdp(q: float, sigma: float, compositions: int, delta: float) -> float:
    """DPGAN's count: Opacus's RDP accountant at its own orders, one composition per step.

    Table 1's settings at delta 1e-5 give 9.963 (batch 128), 9.995 (512) and 9.946 (2048), printed as 10.

    Raises:
        ValueError: q outside (0, 1], sigma <= 0, compositions < 1 or delta outside (0, 1).
    """
    _check(q, sigma, compositions, delta)
    return _by_opacus([(sigma, q, compositions)], delta)


def opacus_epsilon(events: Sequence[Event], delta: float) -> float | None:
    """`opacus_rdp` of `events` under add/remove; a run that restarts from another has several.

    This is a sound bound, at least as large as that of `accountants`, which has more orders: 1,500 steps of DPGAN at
    q = 1/469 and sigma = 1 are 0.870 here and 0.850 there, at delta 1e-5.

    Returns:
        epsilon; inf for a release without noise; None for a sampling that is neither Poisson's nor of all records,
        since Opacus has no curve for it.

    Raises:
        ValueError: delta outside (0, 1).
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
    return _by_opacus(history, delta)


def _by_opacus(history: list[tuple[float, float, int]], delta: float) -> float:
    """Epsilon by Opacus's own accountant of releases given as it keeps them, (noise multiplier, rate, times)."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = history
    return float(accountant.get_epsilon(delta))


WOR_ORDERS = range(2, 513)  # larger ones serve epsilons below 2 log(1/delta) / 511 alone


def wor_rdp(rate: float, sigma: float, compositions: int, delta: float) -> float:
    """GS-WGAN's count: RDP of the Gaussian subsampled without replacement, by the general bound for any mechanism.

    Theorem A.1 of the paper (Wang, Balle, Kasiviswanathan 2019, Theorem 9), with g the sampling rate and the Gaussian's
    e(j) = j / (2 sigma²), e(inf) = inf: at an integer order a >= 2,

        (a - 1) rdp(a) <= log(1 + C(a, 2) g² min(4 (e^e(2) - 1), 2 e^e(2)) + sum_{j=3..a} 2 C(a, j) g^j e^((j-1) e(j))),

    and never more than (a - 1) e(a). Converted the older way, epsilon = min over a of rdp(a) + log(1/delta) / (a - 1),
    as autodp does. autodp also interpolates (a - 1) rdp(a) linearly between integers and minimises over real orders.
    That changes nothing: between integers its objective is a ratio of linear functions of a, hence monotone, and below
    order 2 it takes rdp(2) with a larger log term.

    With `compositions` = iterations x batch size it gives the paper's figure (1/1000, 1.07, 20,000 x 32, delta 1e-5 ->
    9.9926; autodp 0.2.3.1 the same to 1e-6), which is a claim: all images of a step come from one secret draw.

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

    Assumes that each step is a fresh mixture over the secret index: its law depends on the shards and on what was
    released before, and on nothing hidden that earlier steps left. Critics that are trained on and on break that (see
    `accountants`), so it is no bound for GS-WGAN; nothing proves more than `OneShard`'s own figure.

    The subsampled Gaussian is the one of add/remove, rate 1/K, with the sensitivity of replacing a record. For one step
    amplification by advanced joint convexity proves it (Balle, Barthe, Gaboardi 2018). For T replace-one steps it takes
    as given besides that the worst case keeps one direction throughout: a pair that dominates both directions at once
    gives 346.7 at the published setting.

    Args:
        event: `times` releases of a `OneShard` or `OneClient` sampling, schedule "random".

    Returns:
        epsilon; the published setting (K = 1000, B = 32, sigma 1.07 per row, T = 20,000, delta 1e-5) gives 329.4.

    Raises:
        ValueError: for another sampling (a public schedule hides no index), or delta outside (0, 1).
    """
    return epsilon([memoryless_event(event)], delta, "add_remove", "pld")


def if_memoryless(events: Sequence[Event], delta: float) -> tuple[float, str] | None:
    """`memoryless` of a run's only event, with its assumption in words; no bound.

    None for a release without noise, for a public schedule, and for a run that inherits releases of another.
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

"""The papers' own counts, kept ONLY so that their tables can be regenerated and labelled as claims.

No budget is enforced on them. Two of the papers compose the subsampled Gaussian once per row of a batch although all
rows of a step share one secret draw, which is not an upper bound on what the mechanism loses; the figure that is one
comes from `dpgen_bench.privacy.accountants` on the ledger's events.
"""

from __future__ import annotations

import math

# The orders TF-privacy's DP-SGD scripts use, and with them DP-Sinkhorn's accountant: 3.5 and 4.0 with nothing in
# between is what makes 10.02 a 10.05.
TF_PRIVACY_ORDERS: tuple[float, ...] = (
    *(1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5),
    *(float(order) for order in range(5, 64)),
    *(128.0, 256.0, 512.0),
)
OPACUS_ORDERS: tuple[float, ...] = (
    *(1.0 + tenth / 10.0 for tenth in range(1, 100)),
    *(float(order) for order in range(12, 64)),
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
    """DPGAN's count: Opacus' RDP with its improved conversion and default orders, one composition per step.

    Table 1's settings at delta 1e-5 give 9.963 (batch 128), 9.995 (512) and 9.946 (2048), printed as 10.

    Raises:
        ValueError: q outside (0, 1], sigma <= 0, compositions < 1 or delta outside (0, 1).
    """
    from opacus.accountants.analysis.rdp import get_privacy_spent

    _check(q, sigma, compositions, delta)
    curve = _curve(q, sigma, compositions, OPACUS_ORDERS)
    return float(get_privacy_spent(orders=list(OPACUS_ORDERS), rdp=curve, delta=delta)[0])

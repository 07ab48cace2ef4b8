"""Attacks on noise that was drawn and added in floating point: which exact value do the bits of a release reveal?

Membership (Mironov 2012; Jin et al. 2022). NumPy's float32 sampler takes the values r · w with 0 <= r < 2^23 and one of
256 widths w. Near zero, float32 numbers lie far closer together than these, so most of them are never drawn. Where a
release comes near a candidate's exact value, the candidate is refuted if no r and w lead from it to the release.

Residue. Near zero a sum of float32 numbers is a multiple of the last place of its terms, for every size of the sum.
"""

from __future__ import annotations

import numpy as np
from scipy.special import erfc

NEAR = 2.0**-9  # in units of the noise's std


def widths() -> np.ndarray:
    """The widths of the sampler's 256 layers over 2^23, float32 [256] (Marsaglia and Tsang 2000, NumPy's constants)."""
    right = 3.6541528853610087963519472518
    area = right * np.exp(-(right**2) / 2) + np.sqrt(np.pi / 2) * erfc(right / np.sqrt(2))
    edges = [right]
    for _ in range(254):
        edges.append(np.sqrt(-2.0 * np.log(np.exp(-(edges[-1] ** 2) / 2) + area / edges[-1])))
    layers = [area / np.exp(-(right**2) / 2), *reversed(edges)]
    return (np.array(layers) / 2.0**23).astype(np.float32)


WIDTHS = widths()


def reachable(candidate: np.ndarray, released: np.ndarray, std: float) -> np.ndarray:
    """Whether some value of the sampler, times std, added to `candidate` in float32, gives `released`; all [n]."""
    noise = (released.astype(np.float64) - candidate) / std
    steps = np.rint(np.abs(noise)[:, None] / WIDTHS.astype(np.float64))
    reached = np.zeros(len(released), dtype=bool)
    for shift in (-2.0, -1.0, 0.0, 1.0, 2.0):
        drawn = (steps + shift).clip(0.0).astype(np.float32) * WIDTHS
        drawn = np.copysign(drawn, noise[:, None]).astype(np.float32) * np.float32(std)
        reached |= (candidate[:, None] + drawn == released[:, None]).any(axis=1)
    return reached


def by_membership(zero: np.ndarray, one: np.ndarray, released: np.ndarray, std: float) -> int:
    """The candidate, 0 or 1 of two float32 [n], that was released with noise: the one that is refuted less often."""
    scores = []
    for candidate in (zero, one):
        near = np.abs(released.astype(np.float64) - candidate) < NEAR * std
        scores.append(reachable(candidate[near], released[near], std).mean() if near.any() else 0.5)
    return int(scores[1] > scores[0])


def by_residue(zero: np.ndarray, one: np.ndarray, released: np.ndarray, std: float) -> int:
    """As `by_membership`, if `zero` is 0: 1 if the smallest outputs are multiples of the last places of `one`."""
    near = (zero == 0.0) & (np.abs(released) < np.abs(one) / 4)
    places = np.spacing(np.abs(one[near])).astype(np.float64) / 2
    whole = np.mod(released[near].astype(np.float64), places) == 0.0
    return int(near.any() and whole.mean() > 0.9)

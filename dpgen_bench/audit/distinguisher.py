"""Level c of an audit: an attack on the mechanisms themselves, and the epsilon that it certifies.

The attacker knows both data sets, the private functions and all settings, and sees every noisy release. It computes the
log-likelihood ratio of the releases and compares it with a threshold. The threshold is fixed on pilot trials; the rates
of error are those of other trials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dpgen_bench.audit.bounds import epsilon_from_counts, gaussian_epsilon, gaussian_mu_below
from dpgen_bench.audit.laws import Law, Movement, draw_ratios, gaussian_mu, law_of
from dpgen_bench.privacy.events import Event, Relation
from dpgen_bench.privacy.expect import expect_integer
from dpgen_bench.utils.json_numbers import to_json

CONFIDENCE = 0.95
_CANDIDATES = 400  # thresholds that are compared on the pilot trials
_BATCH = 100_000  # trials drawn together, which limits the memory of counts in bins
MOST_TRIALS = 100_000_000  # in each world; their ratios are kept in memory, in about 7 GB


@dataclass(frozen=True)
class Attacked:
    """One mechanism under attack.

    Attributes:
        name: the name of the mechanism.
        event: sampling, noise and number of releases; its declared sensitivity is not used.
        movement: how far its exact value was seen to move, which an audit must find out by itself.
    """

    name: str
    event: Event
    movement: Movement

    def describe(self) -> dict[str, Any]:
        """As JSON values, for the record of an attack."""
        return {
            "name": self.name,
            "sampling": self.event.sampling.to_dict(),
            "std": self.event.std,
            "times": self.event.times,
            "moved": asdict(self.movement),
        }


@dataclass(frozen=True)
class Certificate:
    """What an attack certifies: epsilon is at least `epsilon` at `delta`, with probability `confidence`.

    Attributes:
        epsilon: the model-free lower bound (Clopper-Pearson).
        gdp: the lower bound from the means of the statistic, which assumes that it is Gaussian with a known variance;
            None where it is not Gaussian by construction.
        trials: number of trials in each world. As many pilot trials were made before.
        threshold: of the log-likelihood ratio, fixed on the pilot trials.
        rejects_first: whether a ratio above the threshold rejects the first world (the unit is seen), or a ratio below
            it rejects the second one (the unit is missed).
        false, true: numbers of rejections where the rejected world is the true one, and where it is not.
        mechanisms: the attacked mechanisms, see `Attacked.describe`.
        statistic: what is compared with the threshold.
        second_trials: number of trials in the second world, if it is another one.
        exact: epsilon by the exact rates of error of the best threshold, without trials and for certain; None where
            they are not computed.
    """

    epsilon: float
    gdp: float | None
    delta: float
    relation: Relation
    confidence: float
    trials: int
    threshold: float
    rejects_first: bool
    false: int
    true: int
    seed: int
    mechanisms: tuple[dict[str, Any], ...]
    statistic: str = "log-likelihood ratio"
    second_trials: int | None = None
    exact: float | None = None

    @property
    def strongest(self) -> float:
        """The lower bound that a claim is compared with: the exact one, else GDP, else the model-free one.

        It is one of them and not their maximum, which would be wrong more often than the confidence allows.
        """
        if self.exact is not None:
            return self.exact
        return self.epsilon if self.gdp is None else self.gdp

    def to_dict(self) -> dict[str, Any]:
        """JSON values, for the record of an attack; infinities as text."""
        values = {"level": "c", **asdict(self), "mechanisms": list(self.mechanisms)}
        return to_json(values)


def certify(
    attacked: Sequence[Attacked],
    delta: float,
    relation: Relation,
    *,
    trials: int = 100_000,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Certificate:
    """Attack the composition of mechanisms, and certify an epsilon with the given confidence.

    Each of the two figures of the result exceeds the true epsilon of these mechanisms, at these movements, with
    probability at most 1 - `confidence`.

    Args:
        trials: number of trials in each world; the pilot has as many.

    Raises:
        NotAudited: for a sampling without an exact law of trials.
        ValueError: for fewer than 2 trials or more than `MOST_TRIALS`, or a delta or confidence outside (0, 1).
    """
    trials = expect_integer(trials, "trials of an audit", minimum=2, advice="give the number of trials in each world")
    if trials > MOST_TRIALS:
        raise ValueError(f"expected at most {MOST_TRIALS:,} trials, got {trials:,}: their ratios are kept in memory.")
    if not (0.0 < delta < 1.0 and 0.0 < confidence < 1.0):
        raise ValueError(f"expected delta and confidence in (0, 1), got delta={delta!r}, confidence={confidence!r}.")
    laws = [law_of(each.event, each.movement) for each in attacked]
    streams = np.random.SeedSequence(seed).spawn(4)
    pilot = [_ratios(laws, world, trials, streams[world]) for world in (0, 1)]
    threshold, rejects_first = choose_threshold(pilot[0], pilot[1], delta, confidence)
    first, second = (_ratios(laws, world, trials, streams[2 + world]) for world in (0, 1))
    false, true = rejections(first, second, threshold, rejects_first)
    epsilon = float(epsilon_from_counts(np.array(false), trials, np.array(true), trials, delta, confidence))
    mu, gdp = gaussian_mu(laws), None
    if mu is not None:
        # The ratio over mu is N(±mu/2, 1): its means are mu apart.
        known = mu in (0.0, math.inf)
        below = mu if known else gaussian_mu_below(first / mu, second / mu, confidence)
        gdp = gaussian_epsilon(below, delta)
    return Certificate(
        epsilon,
        gdp,
        delta,
        relation,
        confidence,
        trials,
        threshold,
        rejects_first,
        false,
        true,
        seed,
        tuple(each.describe() for each in attacked),
    )


def _ratios(laws: Sequence[Law], world: int, trials: int, stream: np.random.SeedSequence) -> np.ndarray:
    rng = np.random.default_rng(stream)
    sizes = [min(_BATCH, trials - start) for start in range(0, trials, _BATCH)]
    return np.concatenate([draw_ratios(laws, world, size, rng) for size in sizes])


def rejections(first: np.ndarray, second: np.ndarray, threshold: float, rejects_first: bool) -> tuple[int, int]:
    """Numbers of false and of true rejections among trials in the first and in the second world."""
    if rejects_first:
        return int((first > threshold).sum()), int((second > threshold).sum())
    return int((second <= threshold).sum()), int((first <= threshold).sum())


def choose_threshold(first: np.ndarray, second: np.ndarray, delta: float, confidence: float) -> tuple[float, bool]:
    """The threshold and the direction of the test that certify the largest epsilon on pilot trials.

    One more false rejection than in the pilot is assumed, so that a threshold beyond all pilot trials is not preferred
    for the accident that none exceeded it.
    """
    pooled = np.sort(np.concatenate([first, second]))
    places = np.unique(np.round(_places(len(pooled))).astype(int))
    candidates = np.unique(pooled[places])
    best = (-1.0, float(candidates[len(candidates) // 2]), True)
    ordered = np.sort(first), np.sort(second)
    at_most = [np.searchsorted(each, candidates, side="right") for each in ordered]
    for rejects_first in (True, False):
        if rejects_first:
            false, true = len(first) - at_most[0], len(second) - at_most[1]
        else:
            false, true = at_most[1], at_most[0]
        false = np.minimum(false + 1, len(first))
        values = epsilon_from_counts(false, len(first), true, len(second), delta, confidence)
        place = int(values.argmax())
        best = max(best, (float(values[place]), float(candidates[place]), rejects_first), key=lambda each: each[0])
    return best[1], best[2]


def _places(number: int) -> np.ndarray:
    """Places in a sorted array, dense towards both of its ends."""
    half = np.geomspace(1.0, number / 2.0, _CANDIDATES // 2) - 1.0
    return np.concatenate([half, number - 1.0 - half])

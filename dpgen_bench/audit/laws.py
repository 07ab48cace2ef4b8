"""The exact law of what an attack sees of a mechanism: log-likelihood ratios of all of its releases, in two worlds.

In the first world the mechanisms run on a data set, in the second on its neighbour. The exact values of a release then
differ along one line, so a trial needs the projection of the noise on this line only, and not the whole release.
Releases that depend on whether the unit takes part at random, unknown to the attacker, are counted in bins of the
projection. That is post-processing, and the counts have an exact multinomial law for any number of releases.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm

from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.sampling import FixedSize, OneClient, OneShard, Poisson

# Edges of the bins, in standard deviations of the noise around each possible exact value.
EDGES = np.linspace(-6.0, 6.0, 49)


class NotAudited(ValueError):
    """Raised for a mechanism whose trials cannot be drawn from an exact law."""


@dataclass(frozen=True)
class Movement:
    """Exact values of one release on the line of the attack, if the attacked unit takes part.

    The origin is the exact value if the unit takes no part.

    Attributes:
        first: the value in the first world; 0.0 under add/remove, where the unit is missing.
        second: the value in the second world.
    """

    first: float
    second: float

    @classmethod
    def of(cls, distance: float) -> Movement:
        """The movement of a unit that is missing in the first world."""
        return cls(0.0, distance)

    @property
    def distance(self) -> float:
        return abs(self.second - self.first)


class Law(ABC):
    """The law of the log-likelihood ratio of all releases of one mechanism, in both worlds."""

    @abstractmethod
    def draw(self, world: int, trials: int, rng: np.random.Generator) -> np.ndarray:
        """Log-likelihood ratios (second world over first), float64 [trials], of trials in world 0 or 1."""


@dataclass(frozen=True)
class GaussianLaw(Law):
    """Releases in which the unit takes part for certain: their sum is sufficient, and the ratio is N(±mu²/2, mu²).

    Attributes:
        mu: root of the summed squares of distance / noise std.
    """

    mu: float

    def draw(self, world: int, trials: int, rng: np.random.Generator) -> np.ndarray:
        sign = 1.0 if world else -1.0
        if math.isinf(self.mu):  # without noise the worlds are never confused
            return np.full(trials, sign * math.inf)
        return sign * self.mu**2 / 2.0 + self.mu * rng.standard_normal(trials)


@dataclass(frozen=True)
class BinnedLaw(Law):
    """Releases that are counted in bins: multinomial counts, with the probabilities of each world.

    Attributes:
        first, second: probabilities of the bins in each world, [bins].
        times: number of releases.
    """

    first: np.ndarray
    second: np.ndarray
    times: int

    def draw(self, world: int, trials: int, rng: np.random.Generator) -> np.ndarray:
        ratios = np.log(self.second) - np.log(self.first)
        counts = rng.multinomial(self.times, (self.first, self.second)[world], size=trials)
        return counts @ ratios


def law_of(event: Event, movement: Movement) -> Law:
    """The law of the releases of `event` whose exact values move by `movement`.

    The attacker does not know in which of them the unit takes part, except where the schedule is public.

    Raises:
        NotAudited: for a sampling whose participation is neither certain nor independent between releases.
    """
    if movement.distance == 0.0 or event.times == 0:
        return GaussianLaw(0.0)
    if event.std == 0.0:
        return GaussianLaw(math.inf)
    certain = certain_participations(event)
    if certain is not None:
        return GaussianLaw(movement.distance / event.std * math.sqrt(certain))
    return _mixture(event.sampling.rate, movement.first / event.std, movement.second / event.std, event.times)


def certain_participations(event: Event) -> int | None:
    """The number of releases in which a unit takes part, if it is public; None if participation is hidden and random.

    Raises:
        NotAudited: see `law_of`.
    """
    sampling, times = event.sampling, event.times
    if isinstance(sampling, OneClient):
        if sampling.rate == 1.0 or sampling.schedule == "public_balanced":
            return sampling.max_participations(times)
        if sampling.max_participations(times) < times:
            raise NotAudited(
                f"expected a sampling whose draws are independent, got {sampling}: the limit ties rounds to each other."
                " Audit it without max_answers, or by a public schedule."
            )
        return None
    if sampling.rate == 1.0:
        return times
    if isinstance(sampling, OneShard) and sampling.schedule == "public_balanced":
        return -(-times // sampling.shards)
    if isinstance(sampling, Poisson | OneShard | FixedSize):
        return None
    raise NotAudited(f"expected a sampling of dpgen_bench.privacy.sampling, got {type(sampling).__name__}.")


def _mixture(rate: float, first: float, second: float, times: int) -> BinnedLaw:
    """The law of releases N(0, 1), or with probability `rate` N(first, 1) and N(second, 1) in the two worlds."""
    edges = np.unique(np.concatenate([centre + EDGES for centre in {0.0, first, second}]))
    none, one, other = (_bins(edges - centre) for centre in (0.0, first, second))

    def world(taking_part: np.ndarray) -> np.ndarray:
        probabilities = np.maximum((1.0 - rate) * none + rate * taking_part, 1e-300)
        return np.asarray(probabilities / probabilities.sum())

    return BinnedLaw(world(one), world(other), times)


def _bins(edges: np.ndarray) -> np.ndarray:
    """Probabilities of N(0, 1) between neighbouring edges, and outside of them; accurate in both tails."""
    below, above = norm.cdf(edges), norm.sf(edges)
    inner = np.where(edges[1:] <= 0.0, np.diff(below), -np.diff(above))
    return np.concatenate([below[:1], inner, above[-1:]])


def draw_ratios(laws: Sequence[Law], world: int, trials: int, rng: np.random.Generator) -> np.ndarray:
    """Log-likelihood ratios of the releases of all mechanisms together, float64 [trials]."""
    total = np.zeros(trials)
    for law in laws:
        total += law.draw(world, trials, rng)
    return total


def gaussian_mu(laws: Sequence[Law]) -> float | None:
    """mu of all mechanisms together, if every law is Gaussian by construction; otherwise None."""
    if not all(isinstance(law, GaussianLaw) for law in laws):
        return None
    return math.sqrt(math.fsum(law.mu**2 for law in laws if isinstance(law, GaussianLaw)))

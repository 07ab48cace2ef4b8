"""Three published accountants behind one interface; the mathematics is theirs, but for `OneShard` (below, and `hits`).

| name  | library            | theory                                            | tightness                        |
|-------|--------------------|---------------------------------------------------|----------------------------------|
| `rdp` | opacus             | Rényi DP of the sampled Gaussian (1908.10530),    | 7-10% loose; what the papers     |
|       |                    | conversion of Balle et al. (1905.09982, Thm 21)   | calibrate with                   |
| `prv` | prv-accountant     | privacy random variables (2106.02848)             | upper bound, `eps_error` loose   |
| `pld` | dp-accounting      | privacy loss distributions, connect-the-dots;     | exact for unsampled Gaussians    |
|       |                    | analytic Gaussian (1805.06530) without sampling   | and shards, else < 1% above      |

Every figure is an upper bound on epsilon at the given delta (up to floating point).

Neighbouring relations. An unsampled Gaussian release is accounted from its sensitivity under the relation, by
all three. A Poisson-sampled one is covered by all three under add/remove, with the multiplier
std / add_remove. Under replace-one only dp-accounting's PLD has a dominating pair: for a rate q and the
add/remove sensitivity s,

    P* = (1 - q) N(0, std²) + q N(+s, std²),    Q* = (1 - q) N(0, std²) + q N(-s, std²).

Why that pair dominates whatever the replace-one sensitivity r <= 2 s is (so that `PerRow` and `Whole`, whose r
equals s, are covered by it too, if loosely). Condition on everybody else's coins. The batch without the record
has mean 0, the batch with x has mean a, the one with x' mean b, and |a|, |b| <= s. With z ~ N(0, I), std = 1 and
gamma >= 1, the hockey-stick divergence of order gamma is

    E (q - (gamma - 1)(1 - q) e^(U - Var U / 2) - gamma q e^(V - Var V / 2))_+,   U = -<z, a>,  V = <z, b - a>.

It is a convex function of a positively weighted sum of log-normals, so it grows with every entry of the
covariance of (U, V) (interpolate linearly between two covariance matrices and differentiate). The entries
|a|², <a, a - b>, |a - b|² are at most s², 2 s², 4 s², which a = s, b = -s attains. The pair is symmetric, so
orders gamma < 1 follow by exchanging P and Q; mixing over the other coins is joint convexity, and dominating
pairs compose adaptively (Zhu, Dong, Wang 2022).

One shard of K in each draw (`OneShard`), with private state for each shard. Let s be the sensitivity under the relation
and m = std / s. What is accounted is the mechanism that also publishes the index of every draw; dropping the indices is
post-processing. They are independent of the data and have one law in both worlds, so it is enough to compare the worlds
given all of them, and to average delta over their law. A record lies in one shard, the same in both worlds, and whether
it is replaced, added or removed no other record changes its shard. By induction over the releases, given equal earlier
releases:

- a release that draws another shard has one law in both worlds: it is a function of that shard's records, of that
  shard's state, and of what was released before, and the state is a function of the same three and of private coins;
- a release that draws the record's shard, a hit, adds N(0, std² I) to two values at most s apart, whatever the state in
  each world has become, because the bound holds for any function. It is an adaptively chosen Gaussian of multiplier m.

h hits therefore compose to one Gaussian of mean shift sqrt(h) / m (Gaussian DP, 1905.02383), and

    delta(epsilon) <= E_h delta_Gauss(epsilon; sqrt(h) / m),  h ~ Binomial(T, 1/K)  under schedule "random",

attained where every hit moves by s. Under "public_balanced" h is at most ceil(T / K), an unsampled composition. The
hits of several mechanisms are independent, and squared mean shifts add up. Rényi DP at order a, with the known index a
part of each release: log(1 - 1/K + e^(a (a - 1) / (2 m²)) / K) / (a - 1), composed as ever. Full and Poisson releases
beside them see no state of a shard (`PrivateData.mechanism` refuses it), so they compose with all this adaptively.

Why this claims no amplification by a secret index. That T composed subsampled Gaussians bound T such releases needs
each release, given the earlier ones, to be a fresh mixture whose part without the record has one law in both worlds.
But state remembers past indices, and what was released makes them more probable in one world than in the other. An
example, with 1/K = 1/1000, m = 0.47, T = 2, epsilon = 1: the first release is moved by s if it hits the record; the
second shows s if the first drew the record's shard, or if it hits the record itself. Each release obeys its bound.
Delta is 9.8e-5; the composition says 6.2e-6, the mixture above 1.1e-3. This state is common to all shards; state of one
shard each remembers too, so the argument fails for it as well, whatever the truth is.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dpgen_bench.privacy.hits import TooManyHits, mixture_epsilon, shard_rdp

# The libraries are imported where they are used: opacus brings torch along, which a process for one PLD cell can spare.
if TYPE_CHECKING:
    from dpgen_bench.privacy.events import Event, Relation


class NotCovered(ValueError):
    """The accountant has no theory, or no sound implementation, for these events under this relation."""


@dataclass(frozen=True)
class Composition:
    """Events in the one form all accountants share; equal compositions in any order compare equal.

    gaussian: squared mean shift mu² = sum of times / multiplier² of all unsampled releases. Gaussians compose
        exactly to one Gaussian of multiplier 1 / mu (0.0: there is none).
    poisson: sorted (rate in (0, 1), std / add_remove sensitivity, times), one entry per distinct mechanism.
    shards: sorted (K > 1, multiplier under the relation, times) of `OneShard` releases of the random schedule. Those of
        the balanced one are unsampled releases, ceil(times / K) of them.
    """

    gaussian: float
    poisson: tuple[tuple[float, float, int], ...]
    shards: tuple[tuple[int, float, int], ...] = ()

    @classmethod
    def of(cls, events: Sequence[Event], relation: Relation) -> Composition | None:
        """The composition of `events`; None if one of them releases something without any noise.

        Raises:
            TypeError: for a sampling that nothing is proven of.
        """
        from dpgen_bench.privacy.sampling import Full, OneShard, Poisson  # brings torch along

        gaussians, poisson, shards = [], Counter[tuple[float, float]](), Counter[tuple[int, float]]()
        for event in events:
            sampling, times = event.sampling, event.times
            if not isinstance(sampling, Full | Poisson | OneShard):
                raise TypeError(f"expected Full, Poisson or OneShard sampling, got {type(sampling).__name__}.")
            amplified = isinstance(sampling, Poisson) and sampling.rate < 1.0
            multiplier = event.multiplier("add_remove" if amplified else relation)
            if times == 0 or math.isinf(multiplier):
                continue
            if multiplier == 0.0:
                return None
            if amplified:
                poisson[sampling.rate, multiplier] += times
            elif not isinstance(sampling, OneShard) or sampling.shards == 1:
                gaussians.append(times / multiplier**2)
            elif sampling.schedule == "public_balanced":
                gaussians.append(-(-times // sampling.shards) / multiplier**2)
            else:
                shards[sampling.shards, multiplier] += times

        def entries(counter: Counter[Any]) -> tuple[Any, ...]:
            return tuple(sorted((*key, times) for key, times in counter.items()))

        # fsum is correctly rounded, hence independent of the order of the events.
        return cls(math.fsum(gaussians), entries(poisson), entries(shards))

    @property
    def empty(self) -> bool:
        return self.gaussian == 0.0 and not self.poisson and not self.shards


class Accountant(ABC):
    """Upper bounds on epsilon by one library (`library`: the distribution whose version belongs to a figure)."""

    name: ClassVar[str]
    library: ClassVar[str]

    def epsilon(self, events: Sequence[Event], delta: float, relation: Relation) -> float:
        """Smallest epsilon this accountant proves for the composition of `events` at `delta`.

        0.0 for no releases, inf if any release has no noise (or an infinite sensitivity).

        Raises:
            NotCovered: no theory or implementation for these events under `relation`; the message says why.
            ValueError: delta outside (0, 1).
        """
        if not 0.0 < delta < 1.0:
            raise ValueError(f"expected delta in (0, 1), got {delta!r}.")
        composition = Composition.of(events, relation)
        return math.inf if composition is None else self.compose(composition, delta, relation)

    def compose(self, composition: Composition, delta: float, relation: Relation) -> float:
        """`epsilon` of a composition in normal form."""
        if composition.empty:
            return 0.0
        reason = self.uncovered(composition, relation)
        if reason is not None:
            raise NotCovered(f"{self.name} ({self.library}): {reason}")
        return max(0.0, self._compose(composition, delta, relation))

    @abstractmethod
    def uncovered(self, composition: Composition, relation: Relation) -> str | None:
        """Why the composition is not covered under `relation`, in words; None if it is. Costs nothing."""

    @abstractmethod
    def _compose(self, composition: Composition, delta: float, relation: Relation) -> float: ...


def _orders() -> tuple[float, ...]:
    """Rényi orders: opacus' own, so that no figure is looser than the papers', and between and beyond them.

    Orders near 1 serve large epsilons, large orders small ones. opacus' sampled curve overflows above 1029.
    """
    usual = {*(1.0 + tenth / 10.0 for tenth in range(1, 100)), *(float(order) for order in range(12, 64))}
    fractional = {float(order) for order in 1.0 + np.geomspace(0.005, 20.0, 220)}
    integers = {float(round(order)) for order in np.geomspace(64.0, 1000.0, 80)}
    far = {float(order) for order in np.geomspace(1100.0, 1e6, 160)}
    return tuple(sorted(usual | fractional | integers | far))


ORDERS = _orders()
SAMPLED_ORDER_MAX = 1000.0


@lru_cache(maxsize=100_000)
def _rdp(rate: float, multiplier: float, order: float) -> float:
    """RDP of one (sampled) Gaussian release at `order`; inf where opacus cannot evaluate it."""
    from opacus.accountants.analysis.rdp import compute_rdp

    if rate < 1.0 and order > SAMPLED_ORDER_MAX:
        return math.inf
    try:
        value = float(compute_rdp(q=rate, noise_multiplier=multiplier, steps=1, orders=order))
    except (ValueError, OverflowError):  # its series for a fractional order can leave the range of floats
        return math.inf
    # Below some 1e-12 the series loses its sign to cancellation.
    return math.inf if math.isnan(value) else max(value, 0.0)


@dataclass(frozen=True)
class Rdp(Accountant):
    """Rényi DP by opacus; curves of different events are summed order by order."""

    name = "rdp"
    library = "opacus"

    def uncovered(self, composition: Composition, relation: Relation) -> str | None:
        if relation == "replace_one" and composition.poisson:
            return "its curve of the Poisson-sampled Gaussian is proven for add/remove only"
        return None

    def _compose(self, composition: Composition, delta: float, relation: Relation) -> float:
        return _rdp_epsilon(composition, delta)


@lru_cache(maxsize=4096)
def _rdp_epsilon(composition: Composition, delta: float) -> float:
    from opacus.accountants.analysis.rdp import get_privacy_spent

    sigma = math.inf if composition.gaussian == 0.0 else composition.gaussian**-0.5

    def bound(orders: Sequence[float]) -> tuple[float, float]:
        curve = [
            math.fsum(times * _rdp(rate, multiplier, order) for rate, multiplier, times in composition.poisson)
            + math.fsum(times * shard_rdp(shards, m, order) for shards, m, times in composition.shards)
            + (_rdp(1.0, sigma, order) if composition.gaussian else 0.0)
            for order in orders
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "optimal order is the smallest": still a bound, merely a looser one
            epsilon, order = get_privacy_spent(orders=list(orders), rdp=curve, delta=delta)
        return float(epsilon), float(order)

    # Every order gives a valid bound; the best of a coarse grid shows where the fine one is worth its cost.
    coarse = ORDERS[::8]
    epsilon, order = bound(coarse)
    if not math.isfinite(epsilon):
        return bound(ORDERS)[0]
    centre = ORDERS.index(order)
    return min(epsilon, bound(ORDERS[max(0, centre - 8) : centre + 9])[0])


@dataclass(frozen=True)
class Prv(Accountant):
    """Privacy random variables by prv-accountant; the UPPER end of its interval is returned.

    eps_error: half-width of that interval in epsilon. None: 0.5% of the library's own RDP figure, kept within
        [0.001, 5], so that cost depends little on epsilon (DPGAN's headline row: 0.05, a few seconds).
    """

    eps_error: float | None = None
    name = "prv"
    library = "prv-accountant"
    smallest_multiplier: ClassVar[float] = 0.05

    def uncovered(self, composition: Composition, relation: Relation) -> str | None:
        if composition.shards:
            return "it has no random number of hits, as OneShard draws need; rdp and pld have"
        if not composition.poisson:
            return None
        if relation == "replace_one":
            return "its Poisson-sampled Gaussian is defined for add/remove only"
        if min(multiplier for _, multiplier, _ in composition.poisson) < self.smallest_multiplier:
            # exp(t) overflows to inf beyond t = 709, where its distribution function then reads 1: the mass of
            # larger losses would be dropped silently. One release's losses reach 1/(2 m²) + 10/m.
            return f"it loses the largest losses at noise multipliers below {self.smallest_multiplier}"
        return None

    def _compose(self, composition: Composition, delta: float, relation: Relation) -> float:
        return _prv_epsilon(composition, delta, self.eps_error)


@lru_cache(maxsize=1024)
def _prv_epsilon(composition: Composition, delta: float, eps_error: float | None) -> float:
    from prv_accountant import GaussianMechanism, PoissonSubsampledGaussianMechanism, PRVAccountant
    from prv_accountant.other_accountants import RDP

    variables: list[Any] = [PoissonSubsampledGaussianMechanism(q, m) for q, m, _ in composition.poisson]
    times = [steps for *_, steps in composition.poisson]
    if composition.gaussian:
        variables.append(GaussianMechanism(composition.gaussian**-0.5))
        times.append(1)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        if eps_error is None:
            rough = RDP(variables).compute_epsilon(delta, times)[2]
            eps_error = float(np.clip(0.005 * rough, 1e-3, 5.0))
        try:
            accountant = PRVAccountant(variables, eps_error, delta / 1000, max_self_compositions=times)
            upper = float(accountant.compute_epsilon(delta, times)[2])
        except (ValueError, RuntimeError, AssertionError, MemoryError) as error:
            raise NotCovered(f"prv (prv-accountant): it gave up with: {error}") from error
    if math.isnan(upper):
        raise NotCovered("prv (prv-accountant): its figure is not a number here")
    return upper


INTERVALS = (1e-3, 1e-4, 2e-5, 4e-6)


@dataclass(frozen=True)
class Pld(Accountant):
    """Privacy loss distributions by dp-accounting, pessimistic estimate; `OneShard` draws exactly, by `hits`.

    interval: width h of the grid on which privacy losses are rounded, or None for the best of `INTERVALS`, refined
        until the grid stops to matter. Rounding adds a variance of up to h²/4 per release; epsilon itself tells
        which variance mu² it joins (that of the Gaussian with the same epsilon), and up to 0.1% of it is allowed.
        DPGAN at epsilon 1 shows why: 0.9134 at 1e-4, 0.9091 at 2e-5. A finer grid can also be worse: the library
        clips negative probabilities, which arise from cancellation and grow like 1/h², at zero (replace-one at
        T = 450,000: 17.34 at 1e-4, 17.41 at 1e-5). Both errors only ever raise epsilon, so the smallest counts.
    """

    interval: float | None = None
    name = "pld"
    library = "dp-accounting"

    def uncovered(self, composition: Composition, relation: Relation) -> str | None:
        if composition.shards and composition.poisson:
            return "its OneShard draws compose with unsampled releases alone, not with Poisson-sampled ones"
        return None

    def _compose(self, composition: Composition, delta: float, relation: Relation) -> float:
        if composition.shards:
            try:
                return mixture_epsilon(composition.gaussian, composition.shards, delta)
            except TooManyHits as error:
                raise NotCovered(f"pld: {error}") from error
        from dp_accounting import get_epsilon_gaussian, get_sigma_gaussian

        if not composition.poisson:
            return float(get_epsilon_gaussian(composition.gaussian**-0.5, delta))
        if self.interval is not None:
            return _pld_epsilon(composition, delta, relation, self.interval)
        releases = sum(times for *_, times in composition.poisson)
        best = math.inf
        for interval in INTERVALS:
            try:
                epsilon = _pld_epsilon(composition, delta, relation, interval)
            except NotCovered:
                if math.isinf(best):
                    raise
                break
            if epsilon >= best or epsilon <= 0.0:
                return min(epsilon, best)
            best = epsilon
            variance = float(get_sigma_gaussian(epsilon, delta)) ** -2
            if releases * interval**2 / 4.0 <= 1e-3 * variance:
                break
        return best


@lru_cache(maxsize=8)  # a few million floats each; calibration of `times` asks for the same one again and again
def _sampled_pld(rate: float, multiplier: float, relation: Relation, interval: float) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    # Under REPLACE_ONE dp-accounting 0.6 takes the pair P*, Q* of this module's docstring, doubling the distance
    # itself: it must be given std / add_remove, not std / replace_one.
    names = {"add_remove": "ADD_OR_REMOVE_ONE", "replace_one": "REPLACE_ONE"}
    return privacy_loss_distribution.from_gaussian_mechanism(
        multiplier,
        value_discretization_interval=interval,
        sampling_prob=rate,
        neighboring_relation=NeighboringRelation[names[relation]],
    )


@lru_cache(maxsize=4096)
def _pld_epsilon(composition: Composition, delta: float, relation: Relation, interval: float) -> float:
    from dp_accounting.pld import privacy_loss_distribution

    total = None
    try:
        for rate, multiplier, times in composition.poisson:
            part = _sampled_pld(rate, multiplier, relation, interval).self_compose(times)
            total = part if total is None else total.compose(part)
        if composition.gaussian:
            # mu already is in terms of the relation's own sensitivity, and a Gaussian pair is the same in both
            # directions: add/remove of sensitivity 1 states it exactly under either relation.
            gaussian = privacy_loss_distribution.from_gaussian_mechanism(
                composition.gaussian**-0.5, value_discretization_interval=interval
            )
            total = gaussian if total is None else gaussian.compose(total)
    except (ValueError, MemoryError) as error:
        raise NotCovered(f"pld (dp-accounting): it gave up with: {error}") from error
    assert total is not None
    return float(total.get_epsilon_for_delta(delta))


ACCOUNTANTS: dict[str, Accountant] = {accountant.name: accountant for accountant in (Rdp(), Prv(), Pld())}


def epsilon(events: Sequence[Event], delta: float, relation: Relation, accountant: str) -> float:
    """Upper bound on epsilon of `events` by the accountant of that name; see `Accountant.epsilon`.

    Raises:
        NotCovered: the accountant does not cover these events under `relation`.
        ValueError: unknown accountant or delta outside (0, 1).
    """
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"expected an accountant among {', '.join(ACCOUNTANTS)}, got {accountant!r}.")
    return ACCOUNTANTS[accountant].epsilon(events, delta, relation)

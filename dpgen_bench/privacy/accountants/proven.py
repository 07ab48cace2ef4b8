"""Three published accountants behind one interface; the mathematics is theirs, but for random hits (below, and `hits`).

| name  | library            | theory                                            | tightness                        |
|-------|--------------------|---------------------------------------------------|----------------------------------|
| `rdp` | opacus             | Rényi DP of the sampled Gaussian (1908.10530),    | 7-10% loose; what the papers     |
|       |                    | conversion of Balle et al. (1905.09982, Thm 21)   | calibrate with                   |
| `prv` | prv-accountant     | privacy random variables (2106.02848)             | upper bound, `eps_error` loose   |
| `pld` | dp-accounting      | privacy loss distributions, connect-the-dots;     | exact for unsampled Gaussians    |
|       |                    | analytic Gaussian (1805.06530) without sampling   | and hits, else < 1% above        |

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

One client of N in each round (`OneClient`), the client being the unit. The observer is an outsider, who sees what the
answers were made into. Clients keep state, so the proof is that of shards, with "client" for "shard" and for "record",
and whose turn it is in every round published: hiding it is not claimed to gain anything. Assumed: whose turn it is,
and whether the limit k_max lets it pass, never depends on data (`OneClient.asked`); a client answers from its own
records, its state and what was sent to it; every answer has noise of std, and moves by s at most if the client had
other records, or none. The client is then hit h = min(Binomial(T, 1/N), k_max) times under "random", and at most
min(ceil(T/N), k_max) times under "public_balanced". T is the number of rounds planned: an answer that is lost or
refused counts, which only adds to the bound, as long as who is lost does not depend on data. Given the turns, h hits
have Rényi curve h a / (2 m²) at order a, so all rounds together have

    rdp(a) = log E e^(h a (a - 1) / (2 m²)) / (a - 1),

which adds up over mechanisms, because their turns are independent. Without k_max it is T times the curve above; with
it, no more than that of k_max unsampled releases.

Draws without replacement (`FixedSize`: b of N, afresh in each round). The population is the N clients, of which none
comes or goes: replace-one only. dp-accounting's Rényi curve (1808.00087, Theorem 27) is of a Gaussian whose own curve
is a / (2 m²) under replace-one, so it must be given std / replace_one; it doubles nothing itself. At each order the
lesser of it and of the next paragraph's curve is taken.

Published participation. Of a Poisson-sampled (rate q) or fixed-size (q = b / N) mechanism, publish also who takes part
in which release. That is independent of the data and has one law in both worlds: a coin belongs to an id, whether or
not anybody has it. Given all of it, a release without the record has one law in both worlds, and one with it moves by
the relation's own sensitivity at most: under add/remove by that of joining the draw, under replace-one, where the
record takes part in both worlds or in neither, by that of being exchanged. So h ~ Binomial(T, q), and the mixture above
bounds epsilon, whatever releases remember of past participation. `pld` has nothing else for `FixedSize`, where it is
loose but for small noise. It takes it for Poisson draws where they meet random hits, where dp-accounting gives up, and
where it is the smaller, as for rows (r = s) at high rates. The amplified figures, dp-accounting's and opacus', do need
that a release depends on earlier ones through what was published alone.

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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from dpgen_bench.privacy.accountants.composition import Composition, NotCovered
from dpgen_bench.privacy.accountants.grid import finest_epsilon, grid_epsilon
from dpgen_bench.privacy.accountants.participations import (
    MOST_ATOMS,
    TooManyHits,
    hit_rdp,
    hits_rdp,
    mixture_epsilon,
    shard_rdp,
)
from dpgen_bench.privacy.events import Event, Relation

# The libraries are imported where they are used: opacus brings torch along, which a process for one PLD cell can spare.


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

    def uncovered(self, composition: Composition, relation: Relation) -> str | None:
        """Why the composition is not covered under `relation`, in words; None if it is. Costs nothing."""
        if composition.fixed and relation == "add_remove":
            return (
                "draws of a fixed size are of a population of a fixed size, which adding or removing a client would "
                "change; take replace_one"
            )
        return self._uncovered(composition, relation)

    @abstractmethod
    def _uncovered(self, composition: Composition, relation: Relation) -> str | None: ...

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


@lru_cache(maxsize=100_000)
def _fixed_rdp(size: int, of: int, multiplier: float, order: float) -> float:
    """RDP of one release of a draw of fixed size at `order`; the multiplier is that of replace-one."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent
    from dp_accounting.rdp import RdpAccountant

    published = hit_rdp(size / of, multiplier, order)
    if order > SAMPLED_ORDER_MAX:  # its cost grows with the order
        return published
    accountant = RdpAccountant([order], NeighboringRelation.REPLACE_ONE)
    accountant.compose(SampledWithoutReplacementDpEvent(of, size, GaussianDpEvent(multiplier)))
    value = float(accountant._rdp[0])
    return published if math.isnan(value) else min(value, published)


@dataclass(frozen=True)
class Rdp(Accountant):
    """Rényi DP by opacus; curves of different events are summed order by order."""

    name = "rdp"
    library = "opacus"

    def _uncovered(self, composition: Composition, relation: Relation) -> str | None:
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
            + math.fsum(hits_rdp(hits, order) for hits in composition.clients)
            + math.fsum(times * _fixed_rdp(size, of, m, order) for size, of, m, times in composition.fixed)
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

    def _uncovered(self, composition: Composition, relation: Relation) -> str | None:
        if composition.shards or composition.clients:
            return "it has no random number of hits, as OneShard and OneClient draws need; rdp and pld have"
        if composition.fixed:
            return "it has no draws of a fixed size; rdp and pld have"
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


CHEAP_ATOMS = 20_000  # a tenth of a second


@dataclass(frozen=True)
class Pld(Accountant):
    """Privacy loss distributions by dp-accounting, pessimistic estimate; random hits exactly, by `hits`.

    interval: width of the grid on which privacy losses are rounded, or None for the best of several (`grid`).
    """

    interval: float | None = None
    name = "pld"
    library = "dp-accounting"

    def _uncovered(self, composition: Composition, relation: Relation) -> str | None:
        if composition.shards and composition.poisson:
            return "its OneShard draws compose with unsampled releases alone, not with Poisson-sampled ones"
        return None

    def _compose(self, composition: Composition, delta: float, relation: Relation) -> float:
        if not composition.hidden:
            from dp_accounting import get_epsilon_gaussian

            return float(get_epsilon_gaussian(composition.gaussian**-0.5, delta))
        if composition.hidden > len(composition.poisson):  # dp-accounting has Poisson draws alone
            return _published(composition, delta, relation)
        try:
            if self.interval is None:
                found = finest_epsilon(composition, delta, relation)
            else:
                found = grid_epsilon(composition, delta, relation, self.interval)
        except NotCovered as failure:
            try:
                return _published(composition, delta, relation)
            except NotCovered:
                raise failure from None
        try:
            return min(found, _published(composition, delta, relation, CHEAP_ATOMS))
        except NotCovered:
            return found


def _published(composition: Composition, delta: float, relation: Relation, most: int = MOST_ATOMS) -> float:
    """Epsilon once it is published who takes part in which release; see the module."""
    try:
        return mixture_epsilon(composition.gaussian, composition.revealed(relation), delta, most)
    except TooManyHits as error:
        raise NotCovered(f"pld: {error}") from error


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

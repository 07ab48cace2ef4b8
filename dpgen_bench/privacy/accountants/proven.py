"""Upper bounds on epsilon by three published accountants behind one interface, `Accountant`.

| name  | library            | theory                                                                          |
|-------|--------------------|---------------------------------------------------------------------------------|
| `rdp` | opacus             | Renyi DP of the sampled Gaussian; conversion of Balle et al. 2020               |
| `prv` | prv-accountant     | privacy random variables (Gopi, Lee and Wutschitz 2021)                         |
| `pld` | dp-accounting      | privacy loss distributions; analytic Gaussian mechanism; mixtures of Gaussians  |

Mixtures over random participation (`participations`) are implemented here. docs/accounting.md proves every bound and
names its assumptions, and docs/accountants.md says which composition each accountant covers. All values are upper
bounds at the given delta, up to the rounding of floating-point numbers inside the libraries.
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
    TooManyParticipations,
    mixture_epsilon,
    participation_rdp,
    participations_rdp,
    shard_rdp,
)
from dpgen_bench.privacy.events import Event, Relation

# The libraries are imported where they are used: opacus imports torch, which a process for one PLD cell does not need.


class Accountant(ABC):
    """Upper bounds on epsilon by one library.

    Attributes:
        library: the distribution whose version is part of the key of a cached value.
    """

    name: ClassVar[str]
    library: ClassVar[str]

    def epsilon(self, events: Sequence[Event], delta: float, relation: Relation) -> float:
        """The smallest epsilon that this accountant proves for the composition of `events` at `delta`.

        It is 0.0 for no releases, and inf if a release has no noise or an infinite sensitivity.

        Guarantees: `events` are (epsilon, delta)-DP under `relation`, under the assumptions A1 to A11 of
        docs/accounting.md as far as they concern the samplings of `events`.

        Raises:
            NotCovered: if there is no theory or implementation for these events under `relation`; the message says why.
            ValueError: for a delta outside (0, 1).
        """
        if not 0.0 < delta < 1.0:
            raise ValueError(f"expected delta in (0, 1), got {delta!r}.")
        composition = Composition.of(events, relation)
        return math.inf if composition is None else self.compose(composition, delta, relation)

    def compose(self, composition: Composition, delta: float, relation: Relation) -> float:
        """As `epsilon`, of a composition."""
        if composition.empty:
            return 0.0
        reason = self.uncovered(composition, relation)
        if reason is not None:
            covers = self is not (pld := ACCOUNTANTS["pld"]) and pld.uncovered(composition, relation) is None
            remedy = "; privacy.accountant=pld covers these releases" if covers and "pld" not in reason else ""
            raise NotCovered(f"{self.name} ({self.library}): {reason}{remedy}")
        return max(0.0, self._compose(composition, delta, relation))

    def uncovered(self, composition: Composition, relation: Relation) -> str | None:
        """The reason why the composition is not covered under `relation`; None if it is covered. Takes no time."""
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
    """Renyi orders: those of opacus, so that no bound is looser than the papers', and others between and beyond them.

    Orders near 1 give the best bound for large epsilons, large orders for small ones. The curve of opacus for a sampled
    Gaussian overflows above order 1029.
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
    """RDP at `order` of one Gaussian release, on a Poisson draw if rate < 1; inf where opacus cannot evaluate it.

    The multiplier is that of the relation for rate = 1 and that of add/remove otherwise.
    """
    from opacus.accountants.analysis.rdp import compute_rdp

    if rate < 1.0 and order > SAMPLED_ORDER_MAX:
        return math.inf
    try:
        value = float(compute_rdp(q=rate, noise_multiplier=multiplier, steps=1, orders=order))
    except (ValueError, OverflowError):  # the series for a fractional order can overflow
        return math.inf
    # Below about 1e-12 the series may be negative because of cancellation.
    return math.inf if math.isnan(value) else max(value, 0.0)


@lru_cache(maxsize=100_000)
def _fixed_rdp(size: int, of: int, multiplier: float, order: float) -> float:
    """RDP at `order` > 1 of one release on a draw of `size` of `of` clients without replacement, under replace-one.

    The smaller of two bounds: amplification by sampling without replacement (Wang, Balle and Kasiviswanathan 2019,
    Theorem 27, by dp-accounting) and published participation. The release must not depend on earlier ones except
    through what was released. See docs/accounting.md, "Draws of a fixed size".

    Args:
        multiplier: noise std over the replace-one sensitivity, which dp-accounting does not double for RDP.
    """
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent
    from dp_accounting.rdp import RdpAccountant

    published = participation_rdp(size / of, multiplier, order)
    if order > SAMPLED_ORDER_MAX:  # the time that dp-accounting needs grows with the order
        return published
    accountant = RdpAccountant([order], NeighboringRelation.REPLACE_ONE)
    accountant.compose(SampledWithoutReplacementDpEvent(of, size, GaussianDpEvent(multiplier)))
    value = float(accountant._rdp[0])
    return published if math.isnan(value) else min(value, published)


@dataclass(frozen=True)
class Rdp(Accountant):
    """Renyi DP by opacus: the curves of all events are added order by order, and the sum is converted to epsilon.

    Covers all samplings, except Poisson draws under replace-one and draws of a fixed size under add/remove.
    """

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
            + math.fsum(participations_rdp(participations, order) for participations in composition.clients)
            + math.fsum(times * _fixed_rdp(size, of, m, order) for size, of, m, times in composition.fixed)
            + (_rdp(1.0, sigma, order) if composition.gaussian else 0.0)
            for order in orders
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "optimal order is the smallest": the bound is valid, but loose
            epsilon, order = get_privacy_spent(orders=list(orders), rdp=curve, delta=delta)
        return float(epsilon), float(order)

    # Every order gives a valid bound. The best order of a coarse grid shows where to evaluate the fine one.
    coarse = ORDERS[::8]
    epsilon, order = bound(coarse)
    if not math.isfinite(epsilon):
        return bound(ORDERS)[0]
    centre = ORDERS.index(order)
    return min(epsilon, bound(ORDERS[max(0, centre - 8) : centre + 9])[0])


@dataclass(frozen=True)
class Prv(Accountant):
    """Privacy random variables by prv-accountant; the upper end of the library's interval is returned.

    Covers `Full` under both relations, and Poisson draws under add/remove. Of a Poisson draw, the library composes the
    pair of a record that is removed (docs/accounting.md, "Poisson draws under add/remove").

    Args:
        eps_error: half-width of the interval in epsilon. None takes 0.5% of the library's own RDP epsilon, within
            [0.001, 5], so that the time depends little on epsilon (0.05 and a few seconds for DPGAN's largest setting).
    """

    eps_error: float | None = None
    name = "prv"
    library = "prv-accountant"
    smallest_multiplier: ClassVar[float] = 0.05

    def _uncovered(self, composition: Composition, relation: Relation) -> str | None:
        if composition.shards or composition.clients:
            return "it has no random number of participations, as OneShard and OneClient draws need; rdp and pld have"
        if composition.fixed:
            return "it has no draws of a fixed size; rdp and pld have"
        if not composition.poisson:
            return None
        if relation == "replace_one":
            return "its Poisson-sampled Gaussian is defined for add/remove only"
        if min(multiplier for _, multiplier, _ in composition.poisson) < self.smallest_multiplier:
            # exp(t) overflows beyond t = 709, and the distribution function is 1 there: the mass of larger losses would
            # be dropped silently. The losses of one release reach 1/(2 m²) + 10/m for a multiplier m.
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
            reach = _prv_reach(variables, times, eps_error, delta / 1000)
            accountant = PRVAccountant(variables, eps_error, delta / 1000, max_self_compositions=times, eps_max=reach)
            upper = float(accountant.compute_epsilon(delta, times)[2])
            means = [float(np.dot(each.domain.ts(), each.pmf)) for each in accountant.composer.prvs]
        except (ValueError, RuntimeError, AssertionError, MemoryError) as error:
            raise NotCovered(f"prv (prv-accountant): it gave up with: {error}") from error
    if math.isnan(upper):
        raise NotCovered("prv (prv-accountant): its epsilon is NaN for this composition")
    # The library shifts each discrete loss to its mean, by a quadrature that may miss rare large losses. A mean that is
    # too small by d moves epsilon down by d for each release.
    expected = [mean_loss(q, m) for q, m, _ in composition.poisson]
    expected += [composition.gaussian / 2.0] * bool(composition.gaussian)
    return upper + math.fsum(
        max(0.0, truth - mean) * number for truth, mean, number in zip(expected, means, times, strict=True)
    )


def _prv_reach(variables: Sequence[Any], times: Sequence[int], eps_error: float, delta_error: float) -> float:
    """Half-width of the domain on which prv-accountant composes losses.

    The library's own half-width holds the composed loss. But it shifts the whole domain by the rounding error of the
    mean of all releases, at most half a mesh for each, and the part of the loss that is then outside enters the domain
    from its other end, where it counts as no loss: epsilon would be too small. So this error is added.
    """
    from prv_accountant.accountant import compute_safe_domain_size

    total = sum(times)
    mesh = eps_error / math.sqrt(total / 2.0 * math.log(12.0 / delta_error))  # theorem 5.5 of the paper
    safe = compute_safe_domain_size(variables, times, eps_error=eps_error, delta_error=delta_error)
    return float(safe) + total * mesh / 2.0


def mean_loss(q: float, multiplier: float) -> float:
    """The mean privacy loss of one Gaussian release of a record on a Poisson draw, of the pair of its removal.

    With P = (1 - q) N(0, m²) + q N(1, m²) it is the divergence KL(P | N(0, m²)), by quadrature in the release x, where
    all mass is near 0 and 1.

    Args:
        q: rate of the draw, in (0, 1).
        multiplier: m, noise std over the sensitivity, at least `Prv.smallest_multiplier`.
    """
    from scipy.integrate import quad
    from scipy.stats import norm

    def loss(x: float) -> float:
        return math.log1p(q * math.expm1((2.0 * x - 1.0) / (2.0 * multiplier**2)))

    def mean_around(centre: float) -> float:
        reach = 12.0 * multiplier
        return float(
            quad(lambda x: norm.pdf(x, centre, multiplier) * loss(x), centre - reach, centre + reach, epsabs=0.0)[0]
        )

    return (1.0 - q) * mean_around(0.0) + q * mean_around(1.0)


CHEAP_ATOMS = 20_000  # a tenth of a second


@dataclass(frozen=True)
class Pld(Accountant):
    """Privacy loss distributions by dp-accounting (`grid`), and mixtures of Gaussians for random participation.

    Covers all samplings under both relations, except `OneShard` of the random schedule together with Poisson draws, and
    draws of a fixed size under add/remove. Poisson draws under replace-one are bounded by a dominating pair that
    depends on the add/remove sensitivity alone (docs/accounting.md, "Poisson draws under replace-one").

    Args:
        interval: width of the grid on which privacy losses are rounded; None takes the best of several widths.
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
        if composition.hidden > len(composition.poisson):  # dp-accounting covers Poisson draws only
            return _published(composition, delta, relation)
        try:
            if self.interval is None:
                by_grid = finest_epsilon(composition, delta, relation)
            else:
                by_grid = grid_epsilon(composition, delta, relation, self.interval)
        except NotCovered as failure:
            try:
                return _published(composition, delta, relation)
            except NotCovered:
                raise failure from None
        try:
            return min(by_grid, _published(composition, delta, relation, CHEAP_ATOMS))
        except NotCovered:
            return by_grid


def _published(composition: Composition, delta: float, relation: Relation, most: int = MOST_ATOMS) -> float:
    """Epsilon of the composition if who takes part in which release is published, which is a bound without it, too.

    Let h_j be the number of participations of a record in mechanism j, and m_j its multiplier under `relation`. Then

        delta(epsilon) <= E delta_Gauss(epsilon; sqrt(gaussian + sum of h_j / m_j²)).

    This assumes that participation is independent of data and that a release without the record has the same law on
    both neighbours, given earlier outputs and all participations. Releases may depend on who took part before, and
    `OneShard` and `OneClient` mechanisms may keep private state. See docs/accounting.md, "One shard in each release",
    "One client in each round" and "Published participation".

    Raises:
        NotCovered: if the joint law of the participations has more than `most` likely values.
    """
    try:
        return mixture_epsilon(composition.gaussian, composition.revealed(relation), delta, most)
    except TooManyParticipations as error:
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

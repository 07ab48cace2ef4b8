"""The releases of a run in the one form that all accountants share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpgen_bench.privacy.accountants.participations import Hits, one_shard
from dpgen_bench.privacy.events import Event, Relation
from dpgen_bench.privacy.sampling import FixedSize, Full, OneClient, OneShard, Poisson

Entries = tuple[tuple[float, float, int], ...]


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
    clients: sorted hits of `OneClient` mechanisms of the random schedule, with the multiplier under the relation. Those
        of the balanced one are unsampled releases, min(ceil(times / N), cap) of them. Mechanisms whose cap can be
        reached stay apart: each has a cap of its own.
    fixed: sorted (size, of, multiplier under the relation, times) of `FixedSize` releases.
    exposed: the entries of `poisson` again, with their multipliers under replace-one. Left empty under add/remove, and
        where replacing a record moves every release twice as far as removing it.
    """

    gaussian: float
    poisson: Entries
    shards: tuple[tuple[int, float, int], ...] = ()
    clients: tuple[Hits, ...] = ()
    fixed: tuple[tuple[int, int, float, int], ...] = ()
    exposed: Entries = ()

    @classmethod
    def of(cls, events: Sequence[Event], relation: Relation) -> Composition | None:
        """The composition of `events`; None if one of them releases something without any noise.

        Raises:
            TypeError: for a sampling that nothing is proven of.
        """
        gaussians: list[float] = []
        capped: list[Hits] = []
        poisson, exposed, uncapped = (Counter[tuple[float, float]]() for _ in range(3))
        shards, fixed = Counter[tuple[int, float]](), Counter[tuple[int, int, float]]()
        for event in events:
            sampling, times = event.sampling, event.times
            if not isinstance(sampling, Full | Poisson | OneShard | OneClient | FixedSize):
                raise TypeError(
                    f"expected Full, Poisson, OneShard, OneClient or FixedSize sampling, got {type(sampling).__name__}."
                )
            multiplier = event.multiplier(relation)
            if times == 0 or math.isinf(multiplier):
                continue
            if multiplier == 0.0:
                return None
            match sampling:
                case FixedSize() if sampling.rate < 1.0 or relation == "add_remove":  # where all of them are refused
                    fixed[sampling.size, sampling.of, multiplier] += times
                case _ if sampling.rate == 1.0:
                    hits = sampling.most_answers(times) if isinstance(sampling, OneClient) else times
                    gaussians.append(hits / multiplier**2)
                case Poisson():
                    poisson[sampling.rate, event.multiplier("add_remove")] += times
                    exposed[sampling.rate, multiplier] += times
                case OneShard(schedule="public_balanced"):
                    gaussians.append(-(-times // sampling.shards) / multiplier**2)
                case OneShard():
                    shards[sampling.shards, multiplier] += times
                case OneClient(schedule="public_balanced"):
                    gaussians.append(sampling.most_answers(times) / multiplier**2)
                case OneClient() if sampling.most_answers(times) == times:
                    uncapped[sampling.rate, multiplier] += times
                case OneClient():
                    capped.append(Hits(sampling.rate, multiplier, times, sampling.most_answers(times)))

        def entries(counter: Counter[Any]) -> tuple[Any, ...]:
            return tuple(sorted((*key, times) for key, times in counter.items()))

        capped += [Hits(*key, times, times) for key, times in uncapped.items()]
        twice = entries(exposed) == tuple(
            (rate, multiplier / 2.0, times) for rate, multiplier, times in entries(poisson)
        )
        return cls(
            math.fsum(gaussians),  # correctly rounded, hence independent of the order of the events
            entries(poisson),
            entries(shards),
            tuple(sorted(capped)),
            entries(fixed),
            () if relation == "add_remove" or twice else entries(exposed),
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Composition:
        """Inverse of `to_dict`, after a journey as JSON too; other keys are not looked at."""
        return cls(
            data["gaussian"],
            tuple((rate, multiplier, int(times)) for rate, multiplier, times in data["poisson"]),
            tuple((int(shards), multiplier, int(times)) for shards, multiplier, times in data.get("shards", ())),
            tuple(Hits(rate, m, int(times), int(cap)) for rate, m, times, cap in data.get("clients", ())),
            tuple((int(size), int(of), m, int(times)) for size, of, m, times in data.get("fixed", ())),
            tuple((rate, multiplier, int(times)) for rate, multiplier, times in data.get("exposed", ())),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able. What is empty is left out, but for the two that have always been there: caches know them."""
        filled = {name: value for name, value in asdict(self).items() if value != ()}
        return {"gaussian": self.gaussian, "poisson": self.poisson, **filled}

    @property
    def empty(self) -> bool:
        return self.gaussian == 0.0 and not (self.poisson or self.shards or self.clients or self.fixed)

    @property
    def hidden(self) -> int:
        """Number of distinct mechanisms that draw in secret, or a random number of times."""
        return len(self.poisson) + len(self.shards) + len(self.clients) + len(self.fixed)

    def revealed(self, relation: Relation) -> tuple[Hits, ...]:
        """The hits of every such mechanism, as they are once everybody knows who took part in which release."""
        halved = 1.0 if relation == "add_remove" else 2.0
        exposed = self.exposed or tuple((rate, multiplier / halved, times) for rate, multiplier, times in self.poisson)
        return (
            *(one_shard(*entry) for entry in self.shards),
            *self.clients,
            *(Hits(rate, multiplier, times, times) for rate, multiplier, times in exposed),
            *(Hits(size / of, multiplier, times, times) for size, of, multiplier, times in self.fixed),
        )

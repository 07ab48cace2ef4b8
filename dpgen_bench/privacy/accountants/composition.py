"""The releases of a run in the one form that all accountants read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpgen_bench.privacy.accountants.participations import Participations, one_shard
from dpgen_bench.privacy.events import Event, Relation
from dpgen_bench.privacy.sampling import EveryShard, FixedSize, Full, OneClient, OneShard, Poisson

Entries = tuple[tuple[float, float, int], ...]


class NotCovered(ValueError):
    """Raised if an accountant has no theory, or no sound implementation, for these events under this relation."""


@dataclass(frozen=True)
class Composition:
    """Events in the one form that all accountants read; equal compositions in any order compare equal.

    Attributes:
        gaussian: squared mean shift mu² = sum of times / multiplier² of all unsampled releases, which compose exactly
            to one Gaussian mechanism of multiplier 1 / mu; 0.0 if there is none.
        poisson: sorted (rate in (0, 1), std / add_remove sensitivity, times), one entry per distinct mechanism.
        shards: sorted (K > 1, multiplier under the relation, times) of `OneShard` releases of the random schedule. A
            mechanism of the balanced schedule counts as ceil(times / K) unsampled releases.
        clients: sorted participations in `OneClient` mechanisms of the random schedule, with the multiplier under the
            relation. A mechanism of the balanced schedule counts as min(ceil(times / N), cap) unsampled releases.
            Mechanisms whose cap can be reached are not merged, because each has a cap of its own.
        fixed: sorted (size, of, multiplier under the relation, times) of `FixedSize` releases.
        exposed: the entries of `poisson` again, with their multipliers under replace-one. Empty under add/remove, and
            if the replace-one sensitivity of every release is twice its add/remove sensitivity.
    """

    gaussian: float
    poisson: Entries
    shards: tuple[tuple[int, float, int], ...] = ()
    clients: tuple[Participations, ...] = ()
    fixed: tuple[tuple[int, int, float, int], ...] = ()
    exposed: Entries = ()

    @classmethod
    def of(cls, events: Sequence[Event], relation: Relation) -> Composition | None:
        """The composition of `events`; None if one of them makes a release without noise.

        Raises:
            TypeError: for a sampling for which nothing is proven.
        """
        gaussians: list[float] = []
        capped: list[Participations] = []
        poisson, exposed, uncapped = (Counter[tuple[float, float]]() for _ in range(3))
        shards, fixed = Counter[tuple[int, float]](), Counter[tuple[int, int, float]]()
        for event in events:
            sampling, times = event.sampling, event.times
            if not isinstance(sampling, Full | Poisson | OneShard | EveryShard | OneClient | FixedSize):
                raise TypeError(
                    "expected Full, Poisson, OneShard, EveryShard, OneClient or FixedSize sampling, got "
                    f"{type(sampling).__name__}."
                )
            multiplier = event.multiplier(relation)
            if times == 0 or math.isinf(multiplier):
                continue
            if multiplier == 0.0:
                return None
            match sampling:
                # Under add/remove these are refused at any rate.
                case FixedSize() if sampling.rate < 1.0 or relation == "add_remove":
                    fixed[sampling.size, sampling.of, multiplier] += times
                case _ if sampling.rate == 1.0:
                    participations = sampling.max_participations(times) if isinstance(sampling, OneClient) else times
                    gaussians.append(participations / multiplier**2)
                case Poisson():
                    poisson[sampling.rate, event.multiplier("add_remove")] += times
                    exposed[sampling.rate, multiplier] += times
                case OneShard(schedule="public_balanced"):
                    gaussians.append(-(-times // sampling.shards) / multiplier**2)
                case OneShard():
                    shards[sampling.shards, multiplier] += times
                case OneClient(schedule="public_balanced"):
                    gaussians.append(sampling.max_participations(times) / multiplier**2)
                case OneClient() if sampling.max_participations(times) == times:
                    uncapped[sampling.rate, multiplier] += times
                case OneClient():
                    capped.append(Participations(sampling.rate, multiplier, times, sampling.max_participations(times)))

        def entries(counter: Counter[Any]) -> tuple[Any, ...]:
            return tuple(sorted((*key, times) for key, times in counter.items()))

        capped += [Participations(*key, times, times) for key, times in uncapped.items()]
        twice = entries(exposed) == tuple(
            (rate, multiplier / 2.0, times) for rate, multiplier, times in entries(poisson)
        )
        return cls(
            math.fsum(gaussians),  # correctly rounded, so it does not depend on the order of the events
            entries(poisson),
            entries(shards),
            tuple(sorted(capped)),
            entries(fixed),
            () if relation == "add_remove" or twice else entries(exposed),
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Composition:
        """Inverse of `to_dict`, also if the dict was written as JSON; other keys are ignored."""
        return cls(
            data["gaussian"],
            tuple((rate, multiplier, int(times)) for rate, multiplier, times in data["poisson"]),
            tuple((int(shards), multiplier, int(times)) for shards, multiplier, times in data.get("shards", ())),
            tuple(Participations(rate, m, int(times), int(cap)) for rate, m, times, cap in data.get("clients", ())),
            tuple((int(size), int(of), m, int(times)) for size, of, m, times in data.get("fixed", ())),
            tuple((rate, multiplier, int(times)) for rate, multiplier, times in data.get("exposed", ())),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able. Empty fields are left out, except the two oldest, which are in the keys of existing caches."""
        filled = {name: value for name, value in asdict(self).items() if value != ()}
        return {"gaussian": self.gaussian, "poisson": self.poisson, **filled}

    @property
    def empty(self) -> bool:
        return self.gaussian == 0.0 and not (self.poisson or self.shards or self.clients or self.fixed)

    @property
    def hidden(self) -> int:
        """Number of distinct mechanisms in which a record takes part at random."""
        return len(self.poisson) + len(self.shards) + len(self.clients) + len(self.fixed)

    def revealed(self, relation: Relation) -> tuple[Participations, ...]:
        """The participations of a record in each of these mechanisms, if who takes part is published.

        The multipliers are those of `relation` (docs/accounting.md, "Published participation").
        """
        halved = 1.0 if relation == "add_remove" else 2.0
        exposed = self.exposed or tuple((rate, multiplier / halved, times) for rate, multiplier, times in self.poisson)
        return (
            *(one_shard(*entry) for entry in self.shards),
            *self.clients,
            *(Participations(rate, multiplier, times, times) for rate, multiplier, times in exposed),
            *(Participations(size / of, multiplier, times, times) for size, of, multiplier, times in self.fixed),
        )

"""Events of mechanisms that draw one of several shards."""

from __future__ import annotations

from dpgen_bench.privacy.events import Event, Sensitivity
from dpgen_bench.privacy.sampling import OneShard

DELTA = 1e-5
UNIT = Sensitivity(1.0, 1.0)


def unit(shards: int, multiplier: float, times: int, schedule: str = "random") -> Event:
    """An event of sensitivity 1."""
    return Event(OneShard(shards, schedule), UNIT, multiplier, times)  # type: ignore[arg-type]

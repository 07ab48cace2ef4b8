"""How a mechanism draws the records of one release, from coins that belong to the records.

A coin is keyed by (root key, mechanism, draw index, record id). Whether record i is drawn therefore never
depends on which other records exist: adding, removing or replacing one record shifts nobody else's coin, which
is what the neighbouring-dataset arguments of the accountants assume, and what the conformance replay relies on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpgen_bench.privacy.noise import Key


@dataclass(frozen=True)
class Full:
    """Every record takes part in every release: no amplification.

    `rate` is the probability that one record takes part in one draw; `draw` gives the positions (int64, ascending) in
    `ids` [n] of the records drawn with the coins of `key`.
    """

    @property
    def rate(self) -> float:
        return 1.0

    def draw(self, ids: np.ndarray, key: Key) -> np.ndarray:
        return np.arange(len(ids))


@dataclass(frozen=True)
class Poisson:
    """Each record takes part independently with probability `rate`, afresh for each draw.

    The size of a draw is random and may be zero; it is never released.

    Raises:
        ValueError: if `rate` is not in (0, 1].
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0.0 < self.rate <= 1.0:
            raise ValueError(
                f"Poisson sampling needs a rate in (0, 1], got {self.rate!r}; for all records at once use Full()."
            )

    def draw(self, ids: np.ndarray, key: Key) -> np.ndarray:
        if len(ids) == 0:
            return np.empty(0, dtype=np.int64)
        # Coin number i of the stream is record i's, whoever else is in the data.
        coins = key.generator("coins").random(int(ids.max()) + 1)
        return np.flatnonzero(coins[ids] < self.rate)

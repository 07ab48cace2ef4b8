"""Padded draws: shapes that do not depend on the draw, so that no step waits for an accelerator or changes its shapes.

The size of a Poisson draw is random. For bounds that sum one summand per record, positions of the draw are filled up
with padding to a fixed number of rows. A private function sees padding as black images of class 0, and the bound
replaces the summand of each such row by exact zeros before the sum (`Batch.real`). So a padded release has the
sensitivity and the value, up to rounding, of the draw alone. A draw that is larger than the fixed number is computed in
further pieces of the same size: no record is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.utils.upload import upload

PADDED = -1  # the position of a row of padding
FIRST_PADDED_ID = -(2**62)  # ids of padding are below those of records and of public rows
_DEVIATIONS = 4.0  # one draw in 30,000 is larger than its mean by more than this many standard deviations


@dataclass(frozen=True)
class Padding:
    """The rows of the releases of a mechanism: public numbers, functions of the config and of the number of records.

    Attributes:
        at_once: the number of rows, public ones included, on which the private function is called together.
        pieces: the number of such calls for a draw of usual size.
        public_rows: the number of public rows of a PerRecordGradient that this process adds.
        part: (i, k), where draws are divided among k processes, of which this is number i.
    """

    at_once: int
    pieces: int
    public_rows: int = 0
    part: tuple[int, int] = (0, 1)

    @classmethod
    def plan(
        cls, rate: float, n: int, *, most: int | None, public_rows: int = 0, part: tuple[int, int] = (0, 1)
    ) -> Padding:
        """Padding for Poisson draws at `rate` from `n` records.

        Args:
            most: the largest number of rows on which the private function may be called together; None for all.
            public_rows: the number of public rows, of all processes together.
            part: the part of this process.
        """
        mean = rate * n
        usual = math.ceil(mean + _DEVIATIONS * math.sqrt(mean * (1.0 - rate)))
        public = len(range(*part[:1], public_rows, part[1]))
        rows = max(1, math.ceil(min(usual, n) / part[1]) + public)
        pieces = 1 if most is None else math.ceil(rows / most)
        return cls(math.ceil(rows / pieces), pieces, public, part)

    def own(self, positions: np.ndarray) -> np.ndarray:
        """The part of a draw that this process computes."""
        return positions[self.part[0] :: self.part[1]]

    def padded(self, positions: np.ndarray) -> np.ndarray:
        """The part of this process of a draw, int64, followed by PADDED; with the public rows, whole pieces."""
        own = self.own(positions)
        pieces = max(self.pieces, math.ceil((len(own) + self.public_rows) / self.at_once))
        rows = np.full(pieces * self.at_once - self.public_rows, PADDED, dtype=np.int64)
        rows[: len(own)] = own
        return rows


class PaddedDraws:
    """The padded draws of a mechanism, each made on the host while the device works on the release before it.

    Args:
        padding: the number of rows.
        draw: the positions of the records of a draw, by its number.
        times: the number of draws.
        device: where the positions are needed.
    """

    def __init__(self, padding: Padding, draw: Callable[[int], np.ndarray], times: int, device: torch.device) -> None:
        self.padding = padding
        self._draw, self._times, self._device = draw, times, device
        self._made: dict[int, tuple[np.ndarray, Tensor]] = {}

    def take(self, index: int) -> tuple[np.ndarray, Tensor]:
        """Draw number `index`: the positions of its records, and the padded positions of this process's part."""
        self.make(index)
        return self._made.pop(index)

    def make(self, index: int) -> None:
        """Make a draw that will be taken."""
        if index < self._times and index not in self._made:
            drawn = self._draw(index)
            self._made = {index: (drawn, upload(torch.from_numpy(self.padding.padded(drawn)), self._device))}

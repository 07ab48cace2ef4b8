"""What an accountant reads of a mechanism: sampling, sensitivity, noise and number of releases; and the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

from dpgen_bench.privacy.expect import expect_integer
from dpgen_bench.privacy.sampling import Sampling

Relation = Literal["add_remove", "replace_one"]
RELATIONS: tuple[Relation, ...] = get_args(Relation)


@dataclass(frozen=True)
class Sensitivity:
    """L2 distance by which the exact value of one joint release moves if its draw changes by one record.

    Attributes:
        add_remove: if one record joins or leaves the draw.
        replace_one: if one drawn record is exchanged for another.

    Raises:
        ValueError: unless they are numbers with 0 < add_remove <= replace_one <= 2 * add_remove. The last inequality is
            the triangle inequality through the draw without the record.
    """

    add_remove: float
    replace_one: float

    def __post_init__(self) -> None:
        numbers = _is_number(self.add_remove) and _is_number(self.replace_one)
        if not (numbers and 0.0 < self.add_remove <= self.replace_one <= 2.0 * self.add_remove):
            raise ValueError(
                "expected 0 < add_remove <= replace_one <= 2 * add_remove for a sensitivity (inf for a value that is "
                f"not clipped), got add_remove={self.add_remove!r}, replace_one={self.replace_one!r}; give numbers."
            )


@dataclass(frozen=True)
class Event:
    """`times` releases of (exact value + N(0, std² I)), each on an independent draw of `sampling`.

    All values that are computed from one draw are one release with their joint sensitivity (2 C sqrt(R) for R rows of
    norm at most C), and never R releases: they share one secret draw, so they do not compose as independently
    subsampled releases.

    Raises:
        ValueError: unless `std` is a number >= 0, which may be infinite, and `times` a whole number >= 0.
    """

    sampling: Sampling
    sensitivity: Sensitivity
    std: float
    times: int

    def __post_init__(self) -> None:
        if not (_is_number(self.std) and self.std >= 0.0):
            raise ValueError(f"expected a noise std >= 0, got {self.std!r}; give the noise's standard deviation.")
        times = expect_integer(self.times, "times of an event", minimum=0, advice="give the number of releases")
        object.__setattr__(self, "times", times)

    def multiplier(self, relation: Relation) -> float:
        """Noise std over the sensitivity under `relation`; 0.0 for an unclipped release."""
        sensitivity = getattr(self.sensitivity, relation)
        return 0.0 if math.isinf(sensitivity) else self.std / sensitivity


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class Budget:
    """The privacy that a run may spend: (epsilon, delta) under one neighbouring relation, bounded by one accountant.

    Attributes:
        epsilon: inf trains without privacy, and 0 allows no release at all. None is no budget: every mechanism states
            its noise and its number of releases, and the epsilon that these prove is reported.

    Raises:
        ValueError: for a negative epsilon, a delta outside (0, 1), an unknown relation or accountant.
    """

    epsilon: float | None
    delta: float = 1e-5
    relation: Relation = "add_remove"
    accountant: Literal["rdp", "prv", "pld"] = "pld"

    def __post_init__(self) -> None:
        if self.epsilon is not None and not self.epsilon >= 0.0:
            raise ValueError(
                "expected privacy.epsilon > 0 (inf for a non-private run, null for no budget, 0 for a method that uses "
                f"no records), got {self.epsilon!r}."
            )
        if self.epsilon is not None and 1e5 < self.epsilon < math.inf:
            raise ValueError(
                f"expected privacy.epsilon of at most 1e5, got {self.epsilon!r}: accountants need gigabytes beyond it, "
                "and it protects nothing. Use inf for a non-private run, or null to report what stated noise proves."
            )
        if not 0.0 < self.delta < 1.0:
            raise ValueError(f"expected privacy.delta in (0, 1), got {self.delta!r}; set privacy.delta=1e-5.")
        if self.relation not in RELATIONS:
            raise ValueError(f"expected privacy.relation in {RELATIONS}, got {self.relation!r}.")
        if self.accountant not in ("rdp", "prv", "pld"):
            raise ValueError(f"expected privacy.accountant rdp, prv or pld, got {self.accountant!r}.")

    @property
    def limit(self) -> float:
        """The largest epsilon that may be spent; inf without a budget."""
        return math.inf if self.epsilon is None else self.epsilon

    @property
    def without_privacy(self) -> bool:
        """Whether the run is trained without privacy. A run without a budget is not."""
        return self.epsilon is not None and math.isinf(self.epsilon)

    def clip_norm(self, C: float, sigma: float | None) -> float:
        """The clipping norm of a method: inf (no clipping) if no noise is stated and the budget is infinite, else C.

        Such a release gets no noise (`calibration.calibrate_std`), so that the run is the non-private method.
        """
        return math.inf if sigma is None and self.without_privacy else C


def budget_text(epsilon: float | str | None) -> str:
    """The epsilon of a budget as text for tables and messages: `10`, `inf`, or `none` if there is no budget."""
    return "none" if epsilon is None else f"{float(epsilon):g}"

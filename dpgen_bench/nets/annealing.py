"""The annealed, symmetrised Sinkhorn loop of geomloss, for several problems at once, and its temperatures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpgen_bench.utils.upload import upload

# Smaller exponents are raised to this one: exp(-80) is negligible next to the largest term, 1, and results that are
# denormal numbers make CPUs slow.
_UNDERFLOW = -80.0


def temperatures(diameter: float, lam: float, exponent: float, scaling: float) -> list[float]:
    """geomloss's annealing: from diameter^exponent, multiplied by scaling^exponent in every step, down to lambda."""
    # geomloss computes with blur = lambda^(1/exponent). Without it, rounding could change the number of temperatures.
    blur = lam ** (1.0 / exponent)
    start, end, step = exponent * math.log(diameter), exponent * math.log(blur), exponent * math.log(scaling)
    return [diameter**exponent, *(math.exp(e) for e in np.arange(start, end, step)), blur**exponent]


@dataclass(frozen=True)
class Annealing:
    """The temperatures of k problems in one loop. All problems end together.

    A problem with fewer temperatures than steps waits at its first one, and is reset when it starts.

    Attributes:
        temperature: [steps, k], float64.
        delays: The step at which each problem starts: a list, or int64 [k] on an accelerator, which is not read.
    """

    temperature: Tensor
    delays: Sequence[int] | Tensor

    @classmethod
    def of(cls, schedules: Sequence[Sequence[float]], device: torch.device | str = "cpu") -> Annealing:
        """That of the temperatures of each problem."""
        steps = max(len(schedule) for schedule in schedules)
        delays = [steps - len(schedule) for schedule in schedules]
        rows = [
            [schedule[max(t - delay, 0)] for schedule, delay in zip(schedules, delays, strict=True)]
            for t in range(steps)
        ]
        return cls(upload(torch.tensor(rows, dtype=torch.float64), torch.device(device)), delays)

    @classmethod
    def on_device(cls, diameters: Tensor, largest: float, lam: float, exponent: float, scaling: float) -> Annealing:
        """That of `temperatures` for diameters float64 [k], computed where they are, with steps enough for `largest`.

        The number of temperatures of a diameter may differ from that of `temperatures` where rounding decides it.
        """
        blur = lam ** (1.0 / exponent)
        end, step = exponent * math.log(blur), exponent * math.log(scaling)
        steps = len(temperatures(largest, lam, exponent, scaling))
        diameters = diameters.clamp(1e-6, largest)
        start = exponent * diameters.log()
        between = ((end - start) / step).ceil().clamp_min(0.0).clamp_max(steps - 2)  # temperatures before the last
        delays = (steps - 2 - between).long()
        t = torch.arange(steps, device=diameters.device)[:, None]
        temperature = torch.where(t <= delays, diameters**exponent, (start + (t - delays - 1).double() * step).exp())
        temperature[-1] = blur**exponent
        return cls(temperature, delays)

    def starts(self, t: int) -> Tensor | None:
        """Which problems start at step t, bool [k]; None for none, or all."""
        if t == 0:
            return None
        if isinstance(self.delays, Tensor):
            return self.delays == t
        if t not in self.delays:
            return None
        return torch.tensor([delay == t for delay in self.delays], device=self.temperature.device)


def sinkhorn(costs: Sequence[Tensor], annealing: Annealing) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The annealed loop for several cost matrices [n, m] at once, each with its own temperatures.

    The potentials f and g of all k problems are updated together, as the rows of one tensor u [2k, s] (first all f,
    then all g). A step is one soft minimum over the last axis of a tensor [2k, s, s] with each cost and its transpose.
    Smaller problems are padded with points of weight 0.

    Args:
        costs: The cost matrix of each problem.
        annealing: The temperatures of each problem.

    Returns:
        For each problem, its value <a, f> + <b, g> and two plans [n, m]: one whose rows sum to 1/n exactly, for the
        gradient in x, and one whose columns sum to 1/m, for the gradient in y. The plans are equal only in the limit of
        many steps.
    """
    k = len(costs)
    sizes = [(c.shape[0], c.shape[1]) for c in costs] + [(c.shape[1], c.shape[0]) for c in costs]
    s = max(max(size) for size in sizes)
    minus_cost = costs[0].new_zeros(2 * k, s, s)
    log_weight = costs[0].new_full((2 * k, s), -math.inf)  # log weights of the points that are summed over
    for row, (own, other) in enumerate(sizes):
        cost = costs[row] if row < k else costs[row - k].T
        torch.neg(cost, out=minus_cost[row, :own, :other])
        log_weight[row, :other] = -math.log(other)

    exponent = torch.empty_like(minus_cost)

    def soft_minimum(eps: Tensor, h: Tensor) -> Tensor:
        """-eps log sum_j exp(h_j - C_ij / eps) for each of the 2k rows.

        `exponent` keeps the terms of the sum, up to a factor for each i.
        """
        torch.mul(minus_cost, (1.0 / eps)[:, None], out=exponent).add_(h[:, None])
        largest = exponent.amax(dim=2)
        exponent.sub_(largest[:, :, None]).clamp_min_(_UNDERFLOW).exp_()
        return exponent.sum(dim=2).log_().add_(largest).mul_(-eps)

    def log_potential(u: Tensor, eps: Tensor) -> Tensor:
        """log weight_j + u_j / eps of the points on the other side."""
        return log_weight + u.roll(k, dims=0) / eps

    temperature = annealing.temperature.repeat(1, 2).to(log_weight.dtype)
    start = soft_minimum(temperature[0, :, None], log_weight)
    u = start
    for t, eps in enumerate(temperature[:, :, None]):
        if (starts_now := annealing.starts(t)) is not None:
            u = torch.where(starts_now.repeat(2)[:, None], start, u)
        u = (u + soft_minimum(eps, log_potential(u, eps))).mul_(0.5)
    last = soft_minimum(eps, log_potential(u, eps))
    # Negligible entries become 0, because products with them would be denormal numbers, which are slow.
    plan = F.threshold(exponent / exponent.sum(dim=2, keepdim=True), 1e-30, 0.0)

    return [
        (
            last[i, :n].mean() + last[k + i, :m].mean(),
            plan[i, :n, :m] / n,
            (plan[k + i, :m, :n].T / m).contiguous(),
        )
        for i, (n, m) in enumerate(sizes[:k])
    ]

"""Entropic optimal transport between two small point clouds, and how its cost changes as the points move.

For uniform measures on x_1..x_n and y_1..y_m and a cost c,

    W(x, y) = min over plans P of  sum_ij P_ij c(x_i, y_j) + lambda KL(P | 1/(nm)),

by the annealed, symmetrised Sinkhorn loop of geomloss (Feydy's thesis, Algorithm 3.5). Neither back end iterates until
convergence: geomloss spends one step per temperature, and at lambda = 0.05 on MNIST the marginals of its plan are off
by 0.4. A paper's loss is therefore what this schedule gives, and "fast" repeats the schedule, not the limit.

Methods train by what is computed here: raise `TRAINING_VERSION` in runs/config.py with any change of it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Numbers held at once where all differences x_i - y_j are needed: few enough for a CPU's cache, many for a GPU.
_CHUNK = {"cpu": 2**20, "other": 2**27}
# exp(-80) is nothing beside the 1 of the largest term; below it CPUs round to denormal numbers, by a slow path.
_UNDERFLOW = -80.0
_kept = threading.local()


@dataclass(frozen=True)
class Cost:
    """c(x, y) = l2 |x - y|_2^2 + l1 |x - y|_1.

    No matrix product takes part, hence neither TF32 nor bfloat16, whatever PyTorch's global settings allow: costs are
    divided by temperatures as low as 0.05, which makes exponents of 2e4.

    Raises:
        ValueError: for negative weights, or a sum of them that is not in (0, 1e6].
    """

    l2: float = 1.0
    l1: float = 0.0

    def __post_init__(self) -> None:
        if min(self.l2, self.l1) < 0 or not 0 < self.l2 + self.l1 <= 1e6:
            raise ValueError(
                f"expected weights >= 0 of the cost's terms, not both 0 and 1e6 at most together, got l2={self.l2!r}, "
                f"l1={self.l1!r}."
            )

    def matrix(self, x: Tensor, y: Tensor) -> Tensor:
        """c(x_i, y_j) [n, m] of x [n, d] and y [m, d]."""
        costs = x.new_empty(len(x), len(y))
        for rows, difference, other in _differences(x, y):
            total = torch.sum(torch.mul(difference, difference, out=other), dim=2).mul_(self.l2)
            if self.l1:
                total += self.l1 * torch.sum(difference.abs_(), dim=2)
            costs[rows] = total
        return costs

    def gradients(self, x: Tensor, y: Tensor, by_x: Tensor, by_y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Gradient in x [n, d] of sum_ij by_x_ij c(x_i, y_j), and in y [m, d] of sum_ij by_y_ij c(x_i, y_j).

        Where two coordinates are equal, |x - y| has slope 0, as PyTorch's own abs.

        Args:
            by_x, by_y: weights [n, m]; without by_y the second gradient is None.
        """
        in_x = torch.empty_like(x)
        in_y = None if by_y is None else torch.zeros_like(y)
        for rows, slope, other in _differences(x, y):
            if self.l1:
                torch.sign(slope, out=other)
                slope.mul_(2.0 * self.l2).add_(other, alpha=self.l1)
            else:
                slope.mul_(2.0 * self.l2)
            if by_y is not None and in_y is not None:
                in_y -= torch.mul(slope, by_y[rows, :, None], out=other).sum(dim=0)
            torch.sum(slope.mul_(by_x[rows, :, None]), dim=1, out=in_x[rows])
        return in_x, in_y


def _differences(x: Tensor, y: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows of x, x_i - y_j [rows, m, d] for them, and room for another tensor of that shape; a few rows at a time.

    Differences are taken one by one, since |x|^2 + |y|^2 - 2<x, y> cancels. torch.cdist does that too, but reduces pair
    by pair, which takes a CPU three times as long.
    """
    most = _CHUNK["cpu" if x.device.type == "cpu" else "other"]
    size = min(max(most // max(y.numel(), 1), 1), len(x))
    difference, other = _workspace(2 * size * y.numel(), x).view(2, size, *y.shape)
    for start in range(0, len(x), size):
        rows = slice(start, min(start + size, len(x)))
        count = rows.stop - rows.start
        torch.sub(x[rows, None], y, out=difference[:count])
        yield rows, difference[:count], other[:count]


def _workspace(size: int, like: Tensor) -> Tensor:
    """`size` numbers of any value; on a CPU the same memory each time, whose pages need not be mapped anew."""
    if like.device.type != "cpu":
        return like.new_empty(size)
    kept: Tensor | None = getattr(_kept, str(like.dtype), None)
    if kept is None or len(kept) < size:
        with torch.inference_mode(False):  # a tensor made in that mode could not be written outside of it
            kept = torch.empty(size, dtype=like.dtype)
        setattr(_kept, str(like.dtype), kept)
    return kept[:size]


def temperatures(diameter: float, lam: float, exponent: float, scaling: float) -> list[float]:
    """geomloss's annealing: diameter^exponent, divided by scaling^-exponent at every step, and last lambda.

    geomloss names the end by its "blur": lambda = blur^exponent.
    """
    # By way of the blur, or rounding could make one temperature more or less than geomloss has.
    blur = lam ** (1.0 / exponent)
    start, end, step = exponent * math.log(diameter), exponent * math.log(blur), exponent * math.log(scaling)
    return [diameter**exponent, *(math.exp(e) for e in np.arange(start, end, step)), blur**exponent]


def diameter_of(x: Tensor, y: Tensor) -> float:
    """Diagonal of the box around both clouds [n, d] and [m, d], as geomloss takes it; at least 1e-6."""
    low = torch.minimum(x.amin(dim=0), y.amin(dim=0))
    high = torch.maximum(x.amax(dim=0), y.amax(dim=0))
    # One point, or all the same: any temperature will do but 0.
    return max(float((high - low).double().norm()), 1e-6)


def _check_clouds(x: Tensor, y: Tensor) -> None:
    """Raise ValueError unless x and y are clouds of one dimension with coordinates of at most 1e6.

    Each cloud is judged alone: if one is public and the other, of records, is known to be in range, nothing that is
    said here depends on the records.
    """
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) == 0:
        raise ValueError(
            "expected two clouds [n, d] and [m, d] of one dimension d and at least one point each, got "
            f"{tuple(x.shape)} and {tuple(y.shape)}."
        )
    for cloud in (x, y):
        largest = float(cloud.abs().amax())  # NaN where a coordinate is
        if not largest <= 1e6:
            raise ValueError(
                "expected points of finite coordinates of at most 1e6 for optimal transport, got coordinates up to "
                f"{largest:g}. If they are a generator's images, the training has diverged: lower the learning rate."
            )


@dataclass(frozen=True)
class Solution:
    """W(x, y) of one problem, a scalar, and its gradients in x [n, d] and, if asked for by `both`, in y [m, d]."""

    value: Tensor
    gradients: Callable[[bool], tuple[Tensor, Tensor | None]]

    @property
    def in_x(self) -> Tensor:
        """Gradient in x [n, d]."""
        return self.gradients(False)[0]

    @property
    def in_both(self) -> tuple[Tensor, Tensor]:
        """Gradients in x [n, d] and y [m, d]."""
        in_x, in_y = self.gradients(True)
        assert in_y is not None
        return in_x, in_y


@dataclass(frozen=True)
class Transport:
    """W with its settings; `solve` solves any number of problems.

    Args:
        cost: c.
        lam: λ, the entropic regularisation, in the units of the cost.
        exponent: geomloss's p, which here only sets the annealing: it starts at diameter^p.
        scaling: geomloss's ratio of two successive "blur" scales, below 1.
        backend: "geomloss" is geomloss.SamplesLoss(backend="tensorized", debias=False), the reference; "fast" runs
            all problems of a call in one batched loop and takes gradients by the envelope theorem, as geomloss does:
            the potentials of the last but one step are constants, and only the cost is differentiated.

    Raises:
        ValueError: for a value outside its range.
    """

    cost: Cost
    lam: float = 0.05
    exponent: float = 1.0
    scaling: float = 0.5
    backend: Literal["fast", "geomloss"] = "fast"

    def __post_init__(self) -> None:
        # Within these no number overflows, and the annealing has some ten thousand steps at most, whatever the points:
        # a private function that solves a problem cannot raise or starve because of a record.
        for name, (low, high) in {"lam": (1e-8, 1e8), "exponent": (0.5, 4.0), "scaling": (1e-3, 0.999)}.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(
                    f"expected the transport's {name} between {low:g} and {high:g}, got {getattr(self, name)!r}."
                )
        if self.backend not in ("fast", "geomloss"):
            raise ValueError(f"expected the transport back end 'fast' or 'geomloss', got {self.backend!r}.")

    def solve(self, *problems: tuple[Tensor, Tensor]) -> list[Solution]:
        """W(x, y) of each problem (x [n, d], y [m, d]) with n, m >= 1.

        Raises:
            ValueError: for an empty cloud, two dimensions, or coordinates that are not finite or too large.
        """
        problems = tuple((x.detach().clone(), y.detach().clone()) for x, y in problems)
        for x, y in problems:
            _check_clouds(x, y)
        diameters = [diameter_of(x, y) for x, y in problems]
        if self.backend == "geomloss":
            return [self._by_geomloss(x, y, diameter) for (x, y), diameter in zip(problems, diameters, strict=True)]
        schedules = [temperatures(diameter, self.lam, self.exponent, self.scaling) for diameter in diameters]
        solved = sinkhorn([self.cost.matrix(x, y) for x, y in problems], schedules)

        def gradients(x: Tensor, y: Tensor, rows: Tensor, columns: Tensor, both: bool) -> tuple[Tensor, Tensor | None]:
            return self.cost.gradients(x, y, rows, columns if both else None)

        return [
            Solution(value, partial(gradients, x, y, rows, columns))
            for (x, y), (value, rows, columns) in zip(problems, solved, strict=True)
        ]

    def _by_geomloss(self, x: Tensor, y: Tensor, diameter: float) -> Solution:
        from geomloss import SamplesLoss

        def cost(x: Tensor, y: Tensor) -> Tensor:  # [1, n, d], [1, m, d] -> [1, n, m], differentiable
            difference = x[:, :, None] - y[:, None]
            return self.cost.l2 * difference.square().sum(dim=3) + self.cost.l1 * difference.abs().sum(dim=3)

        loss = SamplesLoss(
            "sinkhorn",
            p=self.exponent,
            blur=self.lam ** (1.0 / self.exponent),
            scaling=self.scaling,
            diameter=diameter,
            cost=cost,
            debias=False,
            backend="tensorized",
        )
        x, y = x.requires_grad_(), y.requires_grad_()
        with torch.enable_grad():
            value = loss(x, y)

        def gradients(both: bool) -> tuple[Tensor, Tensor | None]:
            slopes = torch.autograd.grad(value, [x, y] if both else [x], retain_graph=True)
            return slopes[0], slopes[1] if both else None

        return Solution(value.detach(), gradients)


def sinkhorn(costs: Sequence[Tensor], schedules: Sequence[Sequence[float]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The annealed loop for several cost matrices [n, m] at once, each with its own temperatures.

    Both potentials of all problems advance together: they are rows of one tensor u [2k, s], f of the k problems over g,
    and a step is one soft minimum over the last axis of a tensor [2k, s, s] that holds each cost and its transpose.
    Smaller problems are padded by points of weight 0.

    Returns:
        for each problem its value <a, f> + <b, g>, and two plans [n, m]: one whose rows sum to 1/n exactly, in which
        the gradient in x is linear, and one whose columns sum to 1/m, for the gradient in y. They are the same plan
        only in the limit of many steps.
    """
    k = len(costs)
    sizes = [(c.shape[0], c.shape[1]) for c in costs] + [(c.shape[1], c.shape[0]) for c in costs]
    s = max(max(size) for size in sizes)
    minus_cost = costs[0].new_zeros(2 * k, s, s)
    log_weight = costs[0].new_full((2 * k, s), -math.inf)  # of the points that are summed over
    for row, (own, other) in enumerate(sizes):
        cost = costs[row] if row < k else costs[row - k].T
        torch.neg(cost, out=minus_cost[row, :own, :other])
        log_weight[row, :other] = -math.log(other)

    # A problem with fewer temperatures rests at its first one while the others begin, and is reset when it starts.
    steps = max(len(schedule) for schedule in schedules)
    late = [steps - len(schedule) for schedule in schedules] * 2
    epsilon = log_weight.new_tensor(
        [[e[max(t - w, 0)] for e, w in zip([*schedules] * 2, late, strict=True)] for t in range(steps)]
    )
    exponent = torch.empty_like(minus_cost)

    def soft_minimum(eps: Tensor, h: Tensor) -> Tensor:
        """-eps log sum_j exp(h_j - C_ij / eps) for each of the 2k rows; `exponent` keeps what is summed, to a
        factor for each i."""
        torch.mul(minus_cost, (1.0 / eps)[:, None], out=exponent).add_(h[:, None])
        largest = exponent.amax(dim=2)
        exponent.sub_(largest[:, :, None]).clamp_min_(_UNDERFLOW).exp_()
        return exponent.sum(dim=2).log_().add_(largest).mul_(-eps)

    def log_potential(u: Tensor, eps: Tensor) -> Tensor:
        """log weight_j + u_j / eps of the points on the other side."""
        return log_weight + u.roll(k, dims=0) / eps

    start = soft_minimum(epsilon[0, :, None], log_weight)
    u = start
    for t, eps in enumerate(epsilon[:, :, None]):
        if t and t in late:
            begins = torch.tensor([w == t for w in late], device=u.device)[:, None]
            u = torch.where(begins, start, u)
        u = (u + soft_minimum(eps, log_potential(u, eps))).mul_(0.5)
    last = soft_minimum(eps, log_potential(u, eps))
    # Entries of nothing become 0: as factors they would make denormal numbers of everything they meet.
    plan = F.threshold(exponent / exponent.sum(dim=2, keepdim=True), 1e-30, 0.0)

    return [
        (
            last[i, :n].mean() + last[k + i, :m].mean(),
            plan[i, :n, :m] / n,
            (plan[k + i, :m, :n].T / m).contiguous(),
        )
        for i, (n, m) in enumerate(sizes[:k])
    ]


def semi_debiased(transport: Transport, X: Tensor, Y: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """DP-Sinkhorn's loss 2 W(X[0:n], Y) - W(X[0:n], X[n':n'+n]) and its gradient in X (Definition 4.3).

    Both problems are solved in one loop, so the gradient's last n' rows, which do not depend on Y, have shared the
    arithmetic of those that do: a private method that gives them away without noise solves the two terms apart.

    Args:
        X: n + n' generated points [n + n', d], 0 <= n' <= n. n' = 0 is the biased loss, n' = n the debiased one.
        Y: m real points [m, d]. With m = 0 the first term is absent.

    Returns:
        the loss, a scalar, and its gradient [n + n', d].
    """
    debias = len(X) - n
    if not 0 <= debias <= n:
        raise ValueError(f"expected n to 2n generated points for n={n}, got {len(X)}.")
    own, *cross = transport.solve((X[:n], X[debias:]), *([(X[:n], Y)] if len(Y) else []))
    in_first, in_last = own.in_both
    gradient = torch.zeros_like(X)
    gradient[:n] -= in_first
    gradient[debias:] -= in_last
    value = -own.value
    for term in cross:
        gradient[:n] += 2.0 * term.in_x
        value = value + 2.0 * term.value
    return value, gradient

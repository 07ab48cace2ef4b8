"""Entropic optimal transport between two small point clouds, with gradients in the points.

For uniform measures on x_1..x_n and y_1..y_m and a cost c, it is

    W(x, y) = min over plans P of  sum_ij P_ij c(x_i, y_j) + lambda KL(P | 1/(nm)),

approximated by the annealed, symmetrised Sinkhorn loop of geomloss (Feydy's thesis, Algorithm 3.5). The loop makes one
step for each temperature and does not iterate until convergence: at lambda = 0.05 on MNIST, the marginals of its plan
differ by 0.4 from the given ones. The loss of a paper that uses geomloss is therefore the result of this schedule, and
the backend "fast" follows the same schedule.

After a change of what is computed here, raise `TRAINING_VERSION` in config/spec.py, because methods train with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dpgen_bench.nets.annealing import Annealing, sinkhorn, temperatures

# The number of entries in memory at once for differences x_i - y_j: they fit into a CPU's cache, or keep a GPU busy.
_CHUNK = {"cpu": 2**20, "other": 2**27}
# Devices whose numbers the program reads without waiting. On others, annealing is computed on the device.
MAY_READ = frozenset({"cpu"})
_workspaces = threading.local()


@dataclass(frozen=True)
class Cost:
    """c(x, y) = l2 |x - y|_2^2 + l1 |x - y|_1.

    It is computed without matrix products in float32, so that PyTorch never uses TF32 or bfloat16: costs are divided by
    temperatures as low as 0.05, which gives exponents of 2e4.

    Args:
        l2, l1: The weights of the two terms.

    Raises:
        ValueError: For negative weights, or if their sum is not in (0, 1e6].
    """

    l2: float = 1.0
    l1: float = 0.0

    def __post_init__(self) -> None:
        if min(self.l2, self.l1) < 0 or not 0 < self.l2 + self.l1 <= 1e6:
            raise ValueError(
                "expected weights >= 0 of the cost's terms whose sum is above 0 and at most 1e6, got "
                f"l2={self.l2!r}, l1={self.l1!r}."
            )

    def matrix(self, x: Tensor, y: Tensor) -> Tensor:
        """c(x_i, y_j) [n, m] of x [n, d] and y [m, d]."""
        costs = x.new_empty(len(x), len(y))
        for rows, difference, scratch in _differences(x, y):
            total = torch.sum(torch.mul(difference, difference, out=scratch), dim=2).mul_(self.l2)
            if self.l1:
                total += self.l1 * torch.sum(difference.abs_(), dim=2)
            costs[rows] = total
        return costs

    def gradients(self, x: Tensor, y: Tensor, by_x: Tensor, by_y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Gradient in x [n, d] of sum_ij by_x_ij c(x_i, y_j), and in y [m, d] of sum_ij by_y_ij c(x_i, y_j).

        If two coordinates are equal, the slope of |x - y| is 0, as for PyTorch's abs.

        Args:
            x, y: The points.
            by_x, by_y: Weights [n, m]; without by_y the second gradient is None.
        """
        if use_products(x):
            return self._slopes(x, y, by_x), None if by_y is None else self._slopes(y, x, by_y.T)
        in_x = torch.empty_like(x)
        in_y = None if by_y is None else torch.zeros_like(y)
        for rows, slope, scratch in _differences(x, y):
            if self.l1:
                torch.sign(slope, out=scratch)
                slope.mul_(2.0 * self.l2).add_(scratch, alpha=self.l1)
            else:
                slope.mul_(2.0 * self.l2)
            if by_y is not None and in_y is not None:
                in_y -= torch.mul(slope, by_y[rows, :, None], out=scratch).sum(dim=0)
            torch.sum(slope.mul_(by_x[rows, :, None]), dim=1, out=in_x[rows])
        return in_x, in_y

    def _slopes(self, x: Tensor, y: Tensor, by_x: Tensor) -> Tensor:
        """The gradient in x by a product in float64, for which PyTorch has no lower precision, and cdist's slope."""
        weights = 2.0 * self.l2 * by_x.double()
        in_x = (x.double() * weights.sum(dim=1, keepdim=True) - weights @ y.double()).to(x.dtype)
        if self.l1:
            # The backward pass of torch.cdist alone: for p = 1 it needs no distances, so any matrix stands for them.
            x, y, by_x = x.contiguous(), y.contiguous(), by_x.contiguous()
            in_x.add_(torch.ops.aten._cdist_backward(by_x, x, y, 1.0, by_x), alpha=self.l1)
        return in_x


def use_products(x: Tensor) -> bool:
    """Whether gradients in the points x [n, d] are computed by products and cdist, and not by all differences.

    The number of points and the processor's instructions decide, not measured times, so that a resumed run continues
    bit by bit. Both ways are equal up to rounding (a relative 2e-7); see docs/methods/dp_sinkhorn.md, "Cost".
    """
    return x.device.type == "cpu" and len(x) >= 100 and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def _differences(x: Tensor, y: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For a few rows of x at a time: the rows, x_i - y_j [rows, m, d], and scratch memory of the same shape.

    The differences are computed entry by entry, because |x|^2 + |y|^2 - 2<x, y> suffers from cancellation. torch.cdist
    also does this, but takes three times as long on a CPU.
    """
    chunk = _CHUNK["cpu" if x.device.type == "cpu" else "other"]
    size = min(max(chunk // max(y.numel(), 1), 1), len(x))
    difference, scratch = _workspace(2 * size * y.numel(), x).view(2, size, *y.shape)
    for start in range(0, len(x), size):
        rows = slice(start, min(start + size, len(x)))
        count = rows.stop - rows.start
        torch.sub(x[rows, None], y, out=difference[:count])
        yield rows, difference[:count], scratch[:count]


def _workspace(size: int, like: Tensor) -> Tensor:
    """Uninitialised memory of `size` entries. On a CPU each thread uses the same memory again, which is faster."""
    if like.device.type != "cpu":
        return like.new_empty(size)
    memory: Tensor | None = getattr(_workspaces, str(like.dtype), None)
    if memory is None or len(memory) < size:
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be written to outside of it
            memory = torch.empty(size, dtype=like.dtype, device=like.device)
        setattr(_workspaces, str(like.dtype), memory)
    return memory[:size]


def _diagonal(x: Tensor, y: Tensor) -> Tensor:
    """The diagonal of the box around both clouds [n, d] and [m, d]."""
    low = torch.minimum(x.amin(dim=0), y.amin(dim=0))
    high = torch.maximum(x.amax(dim=0), y.amax(dim=0))
    return (high - low).double().norm()


def diameters(*problems: tuple[Tensor, Tensor]) -> list[float]:
    """Of each problem the diagonal of the box around both clouds [n, d] and [m, d], as in geomloss; at least 1e-6.

    The clouds are checked separately. If x is public and the records y are known to be in range, the error does not
    depend on records.

    Raises:
        ValueError: Unless the clouds of a problem have one dimension, and coordinates of at most 1e6.
    """
    for x, y in problems:
        if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) == 0:
            raise ValueError(
                "expected two clouds [n, d] and [m, d] of one dimension d and at least one point each, got "
                f"{tuple(x.shape)} and {tuple(y.shape)}."
            )
    # All numbers are read together, because an accelerator finishes its work before each reading.
    numbers = [torch.stack([x.abs().amax().double(), y.abs().amax().double(), _diagonal(x, y)]) for x, y in problems]
    read = torch.stack(numbers).tolist() if numbers else []
    for *largest_of_both, _ in read:
        for largest in largest_of_both:  # NaN where a coordinate is
            if not largest <= 1e6:
                raise ValueError(
                    "expected points with finite coordinates of at most 1e6 for optimal transport, got coordinates up "
                    f"to {largest:g}. If they are a generator's images, the training has diverged: lower the learning "
                    "rate."
                )
    # If all points are equal, any temperature but 0 gives the same result.
    return [max(diagonal, 1e-6) for *_, diagonal in read]


@dataclass(frozen=True)
class Solution:
    """W(x, y) of one problem and its gradients, which are computed when they are read.

    Attributes:
        value: W(x, y), a scalar.
        gradients: gradients(both) returns the gradient in x [n, d] and, if `both`, that in y [m, d], else None.
    """

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
        lam: lambda, the entropic regularisation, in units of the cost.
        exponent: geomloss's p. It only changes the annealing, which starts at diameter^p.
        scaling: geomloss's ratio of two successive "blur" scales, below 1.
        backend: "geomloss" is geomloss.SamplesLoss(backend="tensorized", debias=False), the reference. "fast" solves
            all problems of a call in one batched loop. Like geomloss, it uses the envelope theorem for gradients: the
            potentials before the last step are constants, and only the cost is differentiated.

    Raises:
        ValueError: For a value outside its range.
    """

    cost: Cost
    lam: float = 0.05
    exponent: float = 1.0
    scaling: float = 0.5
    backend: Literal["fast", "geomloss"] = "fast"

    def __post_init__(self) -> None:
        # In these ranges no number overflows, and the annealing has about ten thousand steps at most, for all points.
        # A function inside a mechanism can therefore neither raise nor take very long because of a record.
        for name, (low, high) in {"lam": (1e-8, 1e8), "exponent": (0.5, 4.0), "scaling": (1e-3, 0.999)}.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(
                    f"expected the transport's {name} between {low:g} and {high:g}, got {getattr(self, name)!r}."
                )
        if self.backend not in ("fast", "geomloss"):
            raise ValueError(f"expected the transport backend 'fast' or 'geomloss', got {self.backend!r}.")

    def solve(self, *problems: tuple[Tensor, Tensor], within: float | None = None) -> list[Solution]:
        """W(x, y) of each problem (x [n, d], y [m, d]) with n, m >= 1.

        Args:
            within: A bound on the diagonal of the box around both clouds, if one is known. With it, an accelerator
                computes the temperatures without waiting, and coordinates are not checked.

        Raises:
            ValueError: For an empty cloud, clouds of different dimensions, or coordinates that are not finite or too
                large.
        """
        problems = tuple((x.detach().clone(), y.detach().clone()) for x, y in problems)
        device = problems[0][0].device if problems else torch.device("cpu")
        if within is not None and self.backend == "fast" and device.type not in MAY_READ:
            extents_there = torch.stack([_diagonal(x, y) for x, y in problems])
            annealing = Annealing.on_device(extents_there, within, self.lam, self.exponent, self.scaling)
            return self._solve(problems, annealing)
        extents = diameters(*problems)
        if self.backend == "geomloss":
            return [self._by_geomloss(x, y, diameter) for (x, y), diameter in zip(problems, extents, strict=True)]
        schedules = [temperatures(diameter, self.lam, self.exponent, self.scaling) for diameter in extents]
        return self._solve(problems, Annealing.of(schedules, device))

    def _solve(self, problems: Sequence[tuple[Tensor, Tensor]], annealing: Annealing) -> list[Solution]:
        solved = sinkhorn([self.cost.matrix(x, y) for x, y in problems], annealing)

        def gradients(x: Tensor, y: Tensor, rows: Tensor, columns: Tensor, both: bool) -> tuple[Tensor, Tensor | None]:
            return self.cost.gradients(x, y, rows, columns if both else None)

        return [
            Solution(value, partial(gradients, x, y, rows, columns))
            for (x, y), (value, rows, columns) in zip(problems, solved, strict=True)
        ]

    def _by_geomloss(self, x: Tensor, y: Tensor, diameter: float) -> Solution:
        """The solution by geomloss itself."""
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


def semi_debiased(transport: Transport, X: Tensor, Y: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """DP-Sinkhorn's loss 2 W(X[0:n], Y) - W(X[0:n], X[n':n'+n]) and its gradient in X (Definition 4.3).

    Both problems are solved in one loop, so the rounding of the gradient's last n' rows can depend on Y. A method that
    releases these rows without noise must solve the two terms separately (`sinkhorn_loss`).

    Args:
        transport: W.
        X: n + n' generated points [n + n', d], 0 <= n' <= n. n' = 0 is the biased loss, n' = n the debiased one.
        Y: m real points [m, d]. With m = 0 the first term is absent.
        n: Number of points of the cross group.

    Returns:
        The loss, a scalar, and its gradient [n + n', d].

    Raises:
        ValueError: If n' is not in 0..n.
    """
    debiasing = len(X) - n  # n'
    if not 0 <= debiasing <= n:
        raise ValueError(f"expected n to 2n generated points for n={n}, got {len(X)}.")
    own, *cross = transport.solve((X[:n], X[debiasing:]), *([(X[:n], Y)] if len(Y) else []))
    in_first, in_last = own.in_both
    gradient = torch.zeros_like(X)
    gradient[:n] -= in_first
    gradient[debiasing:] -= in_last
    value = -own.value
    for term in cross:
        gradient[:n] += 2.0 * term.in_x
        value = value + 2.0 * term.value
    return value, gradient

"""Optimal transport: equality with geomloss, closed forms, laws of W and of its gradients, and errors.

The reference is geomloss.SamplesLoss in float64 with a cost written here, on a diameter that it finds by itself.
"""

from __future__ import annotations

import itertools
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from geomloss import SamplesLoss
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.profiler import profile

from dpgen_bench.nets import transport
from dpgen_bench.nets.annealing import Annealing, sinkhorn, temperatures
from dpgen_bench.nets.transport import Cost, Transport, diameters, semi_debiased

BACKENDS = ("fast", "geomloss")
COSTS = (Cost(), Cost(0.0, 1.0), Cost(1.0, 0.25), Cost(1.0, 1.0), Cost(1.0, 4.0))
L1_L2 = Transport(Cost(1.0, 1.0))
KINDS = ("apart", "overlapping", "ties", "small", "far", "labelled")
NUMBERS = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 6), st.integers(0, 10**6))
SETTINGS = st.tuples(st.sampled_from(COSTS), st.sampled_from([0.05, 0.5, 5.0]), st.sampled_from([1.0, 2.0]))
both = pytest.mark.parametrize("backend", BACKENDS)
every_cost = pytest.mark.parametrize("cost", COSTS)


def clouds(kind: str, n: int, m: int, d: int, seed: int) -> list[Tensor]:
    """x [n, d'] and y [m, d'] in float64; "overlapping" shares points, as the semi-debiased loss's second term does."""
    torch.manual_seed(seed)
    x, y = torch.randn(n, d).double(), torch.randn(m, d).double()
    if kind == "ties":
        x, y = x.sign() * (x.abs() > 0.4), y.sign() * (y.abs() > 0.4)
    elif kind == "labelled":
        x, y = (torch.cat([c.tanh(), 15.0 * torch.eye(3)[torch.randint(3, (len(c),))]], dim=1) for c in (x, y))
    elif kind == "overlapping":
        y[: min(n, m) - 1] = x[n - min(n, m) + 1 :]
    scale, shift = {"small": (1e-3, 0.0), "far": (1.0, 40.0)}.get(kind, (1.0, 0.0))
    return [scale * x, scale * y + shift]


def points(n: int, m: int, seed: int = 0) -> list[Tensor]:
    return clouds("apart", n, m, 5, seed)


def digit_like(rows: int, seed: int) -> Tensor:
    """[rows, 794] float32: images of 28x28, of which most pixels are -1, and 15 onehot(class)."""
    torch.manual_seed(seed)
    images = 2.0 * torch.rand(rows, 784) ** 0.5 * (torch.rand(rows, 784) < 0.25) - 1.0
    return torch.cat([images, 15.0 * torch.eye(10)[torch.randint(10, (rows,))]], dim=1)


def geomloss_value(x: Tensor, y: Tensor, t: Transport) -> Tensor:
    """W by geomloss, differentiable; nothing but the settings is taken from the code under test."""

    def cost(x: Tensor, y: Tensor) -> Tensor:
        difference = x.unsqueeze(2) - y.unsqueeze(1)
        return t.cost.l2 * (difference**2).sum(-1) + t.cost.l1 * difference.abs().sum(-1)

    blur = t.lam ** (1.0 / t.exponent)
    return SamplesLoss("sinkhorn", t.exponent, blur, scaling=t.scaling, cost=cost, debias=False)(x, y)


def by_geomloss(x: Tensor, y: Tensor, t: Transport) -> tuple[Tensor, ...]:
    x, y = x.double().requires_grad_(), y.double().requires_grad_()
    value = geomloss_value(x, y, t)
    return value.detach(), *torch.autograd.grad(value, [x, y])


def solution_of(t: Transport, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    (solution,) = t.solve((x, y))
    return solution.value, *solution.in_both


def assert_same(got: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Each tensor, to `tolerance` times the size of the expected one as a whole, or to 1e-13."""
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert float((a - b).norm()) <= tolerance * float(b.norm()) + 1e-13


def limit(x: Tensor, y: Tensor, cost: Cost, lam: float) -> tuple[Tensor, ...]:
    """Value and both plans after 300 steps at λ itself: the minimum that defines W, unless λ is small."""
    return sinkhorn([cost.matrix(x, y)], Annealing.of([[lam] * 300]))[0]


@settings(max_examples=200)
@given(st.sampled_from(KINDS), NUMBERS, SETTINGS)
def test_value_and_gradients_are_geomlosses(kind, numbers, chosen):
    x, y = clouds(kind, *numbers)
    assume(diameters((x, y))[0] > 1e-6)  # points all the same: geomloss takes log 0
    expected = by_geomloss(x, y, Transport(*chosen))
    for backend in BACKENDS:
        assert_same(solution_of(Transport(*chosen, backend=backend), x, y), expected)


@every_cost
def test_problems_of_one_call_have_the_solutions_of_separate_calls(cost):
    """Sizes, diameters (0.01 to 80) and so the numbers of temperatures differ, and the order has no effect."""
    t = Transport(cost, lam=0.05)
    shapes = [("small", 4, 9), ("far", 7, 2), ("ties", 1, 5), ("labelled", 6, 1), ("overlapping", 3, 3)]
    problems = [clouds(kind, n, m, 3, seed) for seed, (kind, n, m) in enumerate(shapes)]
    assert len({len(temperatures(diameters((x, y))[0], 0.05, 1.0, 0.5)) for x, y in problems}) >= 4
    expected = [by_geomloss(x, y, t) for x, y in problems]
    for order in (range(5), (4, 2, 0, 3, 1)):
        for i, solution in zip(order, t.solve(*(problems[i] for i in order)), strict=True):
            assert_same((solution.value, *solution.in_both), expected[i])


def test_neither_huge_costs_of_other_problems_nor_padding_change_a_problem():
    next_to_huge, _ = L1_L2.solve(points(3, 2), [1e4 * c for c in clouds("far", 40, 30, 5, 1)])
    assert_same((next_to_huge.value, *next_to_huge.in_both), solution_of(L1_L2, *points(3, 2)), 1e-12)


@pytest.fixture
def reduced_precision():  # gives a function that allows TF32 and bfloat16 in matrix products
    before = torch.get_float32_matmul_precision()
    yield lambda: torch.set_float32_matmul_precision("medium")
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("cost", COSTS[1:4])
def test_float32_gradients_on_digits_are_close_to_float64(cost, device, reduced_precision):
    """At λ = 0.05 costs of 500 become exponents of 1e4, of which float32 keeps three decimals: geomloss's own
    float32 gradients are off by 1e-4 to 3e-4 of their norm."""
    reduced_precision()
    X, Y, t = digit_like(50, 0), digit_like(47, 1), Transport(cost)
    got = solution_of(t, X.to(device), Y.to(device))
    assert {g.dtype for g in got} == {torch.float32}
    assert_same([g.cpu() for g in got], by_geomloss(X, Y, t), 1e-3)


@pytest.mark.parametrize("exponent", [1.0, 2.0, 3.0])
def test_temperatures_by_hand(exponent):
    """From 8^p down to 3^p, halving the scale: 8, then 8, 4 (the first one is there twice), and the end itself."""
    assert temperatures(8.0, 3.0**exponent, exponent, 0.5) == pytest.approx([s**exponent for s in (8, 8, 4, 3)])
    assert temperatures(2.0, 3.0**exponent, exponent, 0.5) == pytest.approx([s**exponent for s in (2, 3)])
    assert diameters((torch.tensor([[0.0, 1.0], [1.0, 4.0]]), torch.tensor([[3.0, 0.0]]))) == [5.0]  # 3 x 4, of both


def test_as_many_temperatures_as_geomloss_where_rounding_decides():
    """diameter² = 2 = 4λ: whether one more halving comes before λ hangs on the last bit of the end's logarithm."""
    x, y = torch.tensor([[[0.0, 0.0], [0.3, 0.8]], [[1.0, 1.0], [0.2, 0.5]]]).double()
    assert_same(solution_of(Transport(Cost(), 0.5, 2.0), x, y), by_geomloss(x, y, Transport(Cost(), 0.5, 2.0)))


@both
@pytest.mark.parametrize("lam", [0.05, 5.0])
def test_one_point_against_many_costs_the_mean(backend, lam):
    """Only one plan exists: W = mean c(x, y_j), of any schedule. c((0,0), (3,-4)) = 25 + 2·7, c((0,0), (1,0)) = 3."""
    x, y = torch.zeros(1, 2).double(), torch.tensor([[3.0, -4.0], [1.0, 0.0]]).double()
    t, slopes = Transport(Cost(1.0, 2.0), lam, backend=backend), torch.tensor([[8.0, -10.0], [4.0, 0.0]]).double()
    assert_same(solution_of(t, x, y[:1]), (torch.tensor(39.0), -slopes[:1], slopes[:1]))
    assert_same(solution_of(t, x, y), (torch.tensor(21.0), -slopes.mean(0, keepdim=True), slopes / 2))


@both
@pytest.mark.parametrize("lam", [0.05, 0.5, 5.0])
def test_polygons_have_a_closed_form(backend, lam):
    """Every point sees the same costs: potentials are equal constants at all steps, W = -λ log mean_j exp(-c_1j/λ)."""
    angle = 2.0 * math.pi * torch.arange(5).double() / 5
    x, y = (r * torch.stack([(angle + a).cos(), (angle + a).sin()], dim=1) for r, a in ((1.0, 0.0), (1.5, 0.3)))
    value, in_x, _ = solution_of(Transport(Cost(), lam, backend=backend), x, y)
    weights = torch.exp(-(x[0] - y).square().sum(dim=1) / lam)
    slope = 2.0 * (weights / weights.sum()) @ (x[0] - y) / 5
    assert_same([value, in_x[0]], [-lam * torch.log(weights.mean()), slope])


@both
def test_two_far_pairs_are_matched(backend):
    """λ log 2 is the entropy of the matching. Other matchings cost 90 or more, and λ is negligible."""
    x, y = torch.tensor([[[0.0, 0.0], [10.0, 0.0]], [[10.4, 0.0], [0.3, 0.2]]]).double()
    value, *gradients = solution_of(Transport(Cost(), 0.05, scaling=0.99, backend=backend), x, y)
    assert float(value) == pytest.approx((0.13 + 0.16) / 2 + 0.05 * math.log(2), rel=0.02)
    assert_same(gradients, [x - y.flip(0), y - x.flip(0)])


@both
@pytest.mark.parametrize(("place", "exponent"), [(0.0, 1.0), (3.5, 1.0), (3.5, 2.0)])
def test_equal_points_cost_nothing(backend, place, exponent):
    t = Transport(L1_L2.cost, 0.05, exponent, backend=backend)
    value, *gradients = solution_of(t, torch.full((4, 3), place), torch.full((2, 3), place))
    assert float(value) == pytest.approx(0.0, abs=1e-7)
    assert not torch.cat(gradients).any()


@every_cost
def test_in_the_limit_the_plan_is_a_coupling_and_the_value_the_minimum(cost):
    x, y = points(4, 6)
    C, lam = cost.matrix(x, y), 2.0
    value, P, by_columns = limit(x, y, cost, lam)
    assert_same([P, 4 * P.sum(1), 6 * P.sum(0)], [by_columns, torch.ones(4), torch.ones(6)], 1e-9)

    def objective(plan: Tensor) -> float:
        return float((plan * C).sum() + lam * (plan * torch.log(plan * 24)).sum())

    assert objective(P) == pytest.approx(float(value), rel=1e-9)
    for i, j in itertools.product(range(3), range(5)):  # moves that keep both marginals span all other plans
        move = torch.zeros_like(P)
        move[i : i + 2, j : j + 2] = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]) * 0.1 * P[i : i + 2, j : j + 2].min()
        assert min(objective(P + move), objective(P - move)) > float(value)


def test_annealing_leaves_one_marginal_wrong_and_less_so_if_slow():
    x, y = points(5, 4)
    value, P, _ = limit(x, y, Cost(), 0.5)
    errors = []
    for scaling in (0.5, 0.9, 0.99, 0.999):
        schedule = temperatures(diameters((x, y))[0], 0.5, 1.0, scaling)
        ((annealed, rows, columns),) = sinkhorn([Cost().matrix(x, y)], Annealing.of([schedule]))
        assert min(float(rows.min()), float(columns.min())) >= 0
        assert_same([5 * rows.sum(1), 4 * columns.sum(0)], [torch.ones(5), torch.ones(4)], 1e-14)
        wrong = (annealed / value - 1, rows - P, columns - P, rows.sum(0) - 1 / 4, columns.sum(1) - 1 / 5)
        errors.append([float(by.abs().sum()) for by in wrong])
    assert (torch.tensor(errors).diff(dim=0) < 0).all()
    assert max(errors[-1]) < 5e-3 < 0.1 < min(errors[0][1:])


@every_cost
def test_gradient_against_finite_differences_in_the_limit(cost):
    """Only there: the gradient takes potentials for constants. Their own change cancels at the optimum (envelope
    theorem), not where the schedule stops before it."""
    x, y = points(3, 4)
    in_x, in_y = cost.gradients(x, y, *limit(x, y, cost, 2.0)[1:])
    for _ in range(3):
        u, v = torch.randn_like(x), torch.randn_like(y)
        ahead, behind = (float(limit(x + h * u, y + h * v, cost, 2.0)[0]) for h in (1e-5, -1e-5))
        assert (ahead - behind) / 2e-5 == pytest.approx(float((in_x * u).sum() + (in_y * v).sum()), rel=1e-6)


@every_cost
def test_exchanging_moving_and_reordering_the_clouds(cost):
    t, (x, y) = Transport(cost), points(6, 9)
    value, in_x, in_y = solution_of(t, x, y)
    assert_same(solution_of(t, y, x), (value, in_y, in_x), 1e-12)
    shift = torch.randn(5).double() * 50
    assert_same(solution_of(t, x + shift, y + shift), (value, in_x, in_y))
    i, j = torch.randperm(6), torch.randperm(9)
    assert_same(solution_of(t, x[i], y[j]), (value, in_x[i], in_y[j]))


@both
@pytest.mark.parametrize("m", [0, 1, 6])
@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_semi_debiased_loss_as_defined(backend, m, p):
    """Definition 4.3 with one leaf X in both terms, n = 5; of an empty real batch the first term is absent."""
    n, n_, t = 5, int(5 * p), Transport(L1_L2.cost, 5.0, backend=backend)  # λ = 0.05 matches shared points at no cost
    X, Y = points(n + n_, 6, 7)
    leaf = X.clone().requires_grad_()
    expected = -geomloss_value(leaf[:n], leaf[n_:], t)
    if m:
        expected = expected + 2.0 * geomloss_value(leaf[:n], Y[:m], t)
    assert_same(semi_debiased(t, X, Y[:m], n), (expected.detach(), *torch.autograd.grad(expected, leaf)))


def test_terms_solved_separately_are_the_terms_of_the_loss():
    """methods/dp_sinkhorn.py does so, because rows without noise must not depend on the data by rounding."""
    n, n_, X, Y = 50, 20, digit_like(70, 2), digit_like(47, 3)
    (own,), (cross,) = L1_L2.solve((X[:n], X[n_:])), L1_L2.solve((X[:n], Y))
    separate = torch.zeros_like(X)
    separate[:n] += 2.0 * cross.in_x - own.in_x
    separate[n_:] -= own.in_both[1]
    loss, together = semi_debiased(L1_L2, X, Y, n)
    assert_same([2.0 * cross.value - own.value, separate[:n], separate[n:]], [loss, together[:n], together[n:]], 1e-3)
    assert torch.equal(separate[n:], semi_debiased(L1_L2, X, Y[:0], n)[1][n:])


def test_no_matrix_product_so_that_reduced_precision_cannot_matter(reduced_precision):
    x, y = digit_like(9, 4), digit_like(8, 5)
    with profile() as seen:
        expected = solution_of(L1_L2, x, y)
    names = " ".join(event.name for event in seen.function_events)
    assert "aten::sub " in names
    assert not re.search(r"\w*(mm|mv|dot|einsum|cdist|linear|conv)\w*", names)
    reduced_precision()
    assert all(map(torch.equal, solution_of(L1_L2, x, y), expected))


@pytest.mark.parametrize("cost", COSTS)
def test_gradients_by_products_are_those_by_differences(cost, monkeypatch, reduced_precision):
    """With float32 points on a grid, where many coordinates are equal, at each precision that products may have."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, 4, (rows, 6), generator=generator) / 4.0 for rows in (7, 5))
    by_x, by_y = torch.rand(7, 5, generator=generator), torch.rand(7, 5, generator=generator)
    expected = cost.gradients(x.double(), y.double(), by_x.double(), by_y.double())
    monkeypatch.setattr(transport, "use_products", lambda x: True)
    reduced_precision()
    for got, exact in zip(cost.gradients(x, y, by_x, by_y), expected, strict=True):
        assert got.dtype == torch.float32
        assert_same((got,), (exact,), 1e-6)
    assert cost.gradients(x, y, by_x)[1] is None


def test_products_are_for_many_points_on_processors_with_wide_instructions(monkeypatch):
    few, many = torch.zeros(99, 3), torch.zeros(100, 3)
    for capability, expected in {"DEFAULT": False, "AVX2": True, "AVX512": True}.items():
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda value=capability: value)
        assert transport.use_products(many) is expected
        assert transport.use_products(few) is transport.use_products(many.to("meta")) is False


@pytest.mark.parametrize("numbers", [1, 3 * 9 * 5])  # one row, or three: the last piece of seven is shorter
def test_a_few_rows_at_a_time_give_the_same(monkeypatch, numbers):
    x, y = points(7, 9)
    expected = solution_of(L1_L2, x, y)
    monkeypatch.setitem(transport._CHUNK, "cpu", numbers)
    assert_same(solution_of(L1_L2, x, y), expected, 1e-13)


def test_later_calls_do_not_change_earlier_results():
    (first,) = L1_L2.solve(points(5, 4))
    results = (first.value, *first.in_both)
    copies = [result.clone() for result in results]
    for seed, dtype in enumerate((torch.float64, torch.float32, torch.float64)):
        solution_of(L1_L2, *(10.0 * c.to(dtype) for c in points(6, 50, seed)))
    assert all(map(torch.equal, results, copies))
    assert all(map(torch.equal, (first.value, *first.in_both), copies))


def test_a_call_in_inference_mode_does_not_break_later_ones(monkeypatch):
    monkeypatch.setattr(transport, "_workspaces", threading.local())
    with torch.inference_mode():
        inside = solution_of(L1_L2, *points(5, 4))
    assert all(map(torch.equal, solution_of(L1_L2, *points(5, 4)), inside))


def test_threads_do_not_share_their_memory():
    problems = [[c.repeat(1, 30) for c in points(30, 20 + k, k)] for k in range(4)]
    expected = [solution_of(L1_L2, *problem) for problem in problems]
    with ThreadPoolExecutor(4) as pool:
        for k, got in enumerate(pool.map(lambda k: solution_of(L1_L2, *problems[k % 4]), range(100))):
            assert all(map(torch.equal, got, expected[k % 4]))


@pytest.mark.parametrize("exponent", [0.5, 4.0])
@pytest.mark.parametrize("lam", [1e-8, 1e8])
@pytest.mark.parametrize("size", [0.0, 1e-20, 1.0, 1e6])
def test_nothing_that_is_accepted_can_overflow(size, lam, exponent):
    """A function inside a mechanism must not raise or return NaN because of a record."""
    x, y = (size * (2.0 * torch.rand(k, 784, generator=torch.Generator().manual_seed(k)) - 1.0) for k in (3, 5))
    for cost in (Cost(1e6 - 1.0, 1.0), Cost(0.0, 1e-3)):
        for scaling in (1e-3, 0.9):
            for number in solution_of(Transport(cost, lam, exponent, scaling), x, y):
                assert torch.isfinite(number).all()


X, Y = torch.rand(3, 5), torch.rand(4, 5)
FINITE, LENGTH = "finite coordinates .* lower the learning rate", "n to 2n generated points for n=5, got"
REFUSED: list[Any] = [
    (lambda: L1_L2.solve((Y, X), (X[:0], Y)), r"at least one point each, got \(0, 5\) and \(4, 5\)"),
    (lambda: L1_L2.solve((Y, X), (X, Y[:0])), r"at least one point each, got \(3, 5\) and \(0, 5\)"),
    (lambda: L1_L2.solve((Y, X), (X * math.nan, Y)), FINITE),
    (lambda: L1_L2.solve((Y, X), (X, Y.index_fill(0, torch.tensor(2), math.inf))), FINITE),
    (lambda: L1_L2.solve((Y, X), (X.index_fill(1, torch.tensor(0), -math.inf), Y)), FINITE),
    (lambda: L1_L2.solve((X * 1e20, Y)), "lower the learning rate"),  # W is NaN
    (lambda: L1_L2.solve((X, Y[:, :1])), "dimension"),  # one coordinate is broadcast
    (lambda: semi_debiased(L1_L2, X, Y, 5), f"{LENGTH} 3"),
    (lambda: semi_debiased(L1_L2, torch.rand(11, 5), Y, 5), f"{LENGTH} 11"),
    *((partial(Cost, *w), "weights >= 0 of") for w in [(0, 0), (-1, 2), (2, -1), (math.nan, 1), (1, 1e38)]),
    *((partial(Transport, Cost(), lam=v), r"lam between 1e-08 and 1e.08, got") for v in (0.0, -1.0, 1e9, math.nan)),
    *(
        (partial(Transport, Cost(), exponent=v), f"exponent between 0.5 and 4, got {v}")
        for v in (0.0, 235.0, math.inf, math.nan)
    ),
    *((partial(Transport, Cost(), scaling=v), f"scaling between .*, got {v}") for v in (0.0, 1.0, 1.5, -0.5, math.nan)),
    *((partial(Transport, Cost(), backend=v), f"'fast' or 'geomloss', got {v!r}") for v in ("keops", "", None)),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_bad_input_is_refused(call, message, monkeypatch):
    monkeypatch.setattr(transport, "_workspaces", threading.local())
    with pytest.raises(ValueError, match=message):
        call()

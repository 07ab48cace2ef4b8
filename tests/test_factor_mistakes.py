"""Mistakes in bounds of factors, and factors that depend on other records, are found."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from dpgen_bench.privacy.events import Sensitivity
from dpgen_bench.privacy.factors import PerRecordMoments, PerRecordProducts
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.testing import ConformanceError, check_method
from tests import cheats_factors
from tests.test_factors import SHAPES, WEIGHTS
from tests.test_independence import check
from tests.test_privacy_core import open_data

# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerRecordProducts(C=1.0, shapes={}), "at least one part"),
        (lambda: PerRecordProducts(C=1.0, shapes={"W": (3,)}), r"expected two sizes \(m, n\)"),
        (lambda: PerRecordProducts(C=1.0, shapes={"a/b": (3, 4)}), "a word that can name a file"),
        (lambda: PerRecordProducts(C=1.0, shapes=SHAPES, classes=0), "classes: expected a whole number >= 1"),
        (lambda: PerRecordMoments(dim=0, radius=1.0, weights=WEIGHTS), "dim: expected a whole number >= 1"),
        (lambda: PerRecordMoments(dim=10_000, radius=1.0, weights=WEIGHTS, classes=10), "at most 134,217,728 numbers"),
        (lambda: PerRecordMoments(dim=2, radius=0.0, weights=WEIGHTS), "radius: expected a number"),
        (lambda: PerRecordMoments(dim=2, radius=math.inf, weights=WEIGHTS), "expected a finite radius"),
        (lambda: PerRecordMoments(dim=2, radius=1.0, weights=(0.1, 0.2)), "weights of count, first and second"),
        (lambda: PerRecordMoments(dim=2, radius=1.0, weights=(0.1, 0.0, 0.0)), "expected a weight of a moment"),
        (lambda: PerRecordMoments(dim=2, radius=1.0, weights=(-0.1, 0.2, 1.0)), "weights: expected a number"),
    ],
)
def test_mistakes_in_a_bound_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("bound", "fn", "message"),
    [
        (PerRecordMoments(dim=3, radius=1.0, weights=WEIGHTS), lambda x, y: x.flatten(1), r"shape \(12, 3\), got"),
        (PerRecordProducts(C=1.0, shapes=SHAPES), lambda x, y: x.flatten(1), r"expected a dict \{part: \(u, v\)\}"),
        (PerRecordProducts(C=1.0, shapes=SHAPES), lambda x, y: {"W": (x, x)}, r"parts \['W', 'V'\], got \['W'\]"),
        (
            PerRecordProducts(C=1.0, shapes={"W": (4, 4)}),
            lambda x, y: {"W": (x.flatten(1), x.flatten(1).int())},
            "expected rows of float16",
        ),
        (
            PerRecordProducts(C=1.0, shapes={"W": (4, 4)}),
            lambda x, y: {"W": (x.flatten(1), x)},
            r"factors of shape \(12, 4\) and \(12, 4\) for part 'W', got",
        ),
        (PerRecordProducts(C=1.0, shapes={"W": (4, 4)}), lambda x, y: {"W": (x,)}, "two factors"),
    ],
)
def test_a_function_that_returns_something_else_is_refused(bound, fn, message):
    data, _ = open_data()
    release = data.mechanism("m", sample=Full(), bound=bound, times=1)
    with pytest.raises(ValueError, match=message):
        release(fn)


def test_another_number_of_classes_is_refused_before_records_are_used():
    data, ledger = open_data()
    for bound in (
        PerRecordMoments(dim=4, radius=1.0, weights=WEIGHTS, classes=7),
        PerRecordProducts(C=1.0, shapes=SHAPES, classes=7),
    ):
        with pytest.raises(ValueError, match="expected a bound of 3 classes"):
            data.mechanism("m", sample=Full(), bound=bound, times=1)
    assert not ledger.entries


def test_norms_before_clipping_are_private_diagnostics(tmp_path):
    path = tmp_path / "private" / "diagnostics.jsonl"
    data, _ = open_data(diagnostics=path)
    moments = PerRecordMoments(dim=4, radius=1.0, weights=WEIGHTS)
    products = PerRecordProducts(C=1.0, shapes={"W": (4, 4)})
    first = data.mechanism("moments", sample=Full(), bound=moments, times=1, share=0.5)
    second = data.mechanism("products", sample=Full(), bound=products, times=1)
    first(lambda x, y: torch.full((len(x), 4), 3.0))
    second(lambda x, y: {"W": (torch.full((len(x), 4), 3.0), torch.full((len(x), 4), 0.5))})
    lines = path.read_text().splitlines()
    assert '"norms_before_clipping": [6.0, 6.0' in lines[0]
    assert '"norms_before_clipping": [6.0, 6.0' in lines[1]


# --- conformance ------------------------------------------------------------------------------------------------------

ROWS = "Row i must depend on record i and public inputs alone"
PRODUCTS = PerRecordProducts(C=0.5, shapes={"W": (64, 3), "b": (1, 64)})
MOMENTS = PerRecordMoments(dim=64, radius=1e-2, weights=WEIGHTS)


def products(x: Tensor, u: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    x = x.flatten(1)
    u = x if u is None else u
    return {"W": (u, x[:, :3] + 1.0), "b": (torch.ones_like(x[:, :1]), x)}


COUPLED = {
    "a faint mean": lambda x: x + 1e-4 * x.nan_to_num().clamp(-99, 99).mean(dim=0),
    "the number of records": lambda x: x + 1e-3 * len(x),
    "the next record": lambda x: x + 0.01 * x.nan_to_num().clamp(-9, 9).roll(1, dims=0),
}


@pytest.mark.parametrize("fn", COUPLED.values(), ids=COUPLED)
@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_factors_that_depend_on_other_records_are_detected_although_clipping_is_saturated(fn, precision):
    with pytest.raises(ConformanceError, match=ROWS):
        check(lambda x, y: fn(x.to(precision)).flatten(1), MOMENTS)
    with pytest.raises(ConformanceError, match=ROWS):
        check(lambda x, y: products(x.to(precision), fn(x.to(precision)).flatten(1)), PRODUCTS)


@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_factors_of_single_records_pass(precision):
    assert check(lambda x, y: x.to(precision).flatten(1), MOMENTS) == precision
    assert check(lambda x, y: products(x.to(precision)), PRODUCTS) == precision
    # A factor of zero, and factors of very different size.
    assert check(lambda x, y: products(x.to(precision) * 1e-9, 1e9 * x.to(precision).flatten(1)), PRODUCTS)


SMALL = {"image_shape": (1, 8, 8), "num_classes": 3}


@pytest.mark.parametrize("kind", ["moments", "products"])
def test_cheats_with_factors_are_detected(kind):
    check_method(lambda: cheats_factors.Factors(kind=kind), **SMALL)
    with pytest.raises(ConformanceError, match=f"{ROWS}|its declared sensitivity"):
        check_method(lambda: cheats_factors.Factors(kind=kind, coupled=True), **SMALL)


def test_vectors_that_are_not_what_the_bound_states_are_detected(monkeypatch):
    """Negative entries are cut off. If they were not, two records of opposite directions would differ by 2C."""

    def centred():
        return cheats_factors.Factors(weights=(0.2, 1.0, 0.0), by_class=False, nonnegative=True)

    check_method(centred, **SMALL)
    value = PerRecordMoments.value

    def uncut(bound, *given):
        return value(dataclasses.replace(bound, nonnegative=False), *given)

    monkeypatch.setattr(PerRecordMoments, "value", uncut)
    with pytest.raises(ConformanceError, match="its declared sensitivity"):
        check_method(centred, **SMALL)


def test_a_wrong_sensitivity_is_detected(monkeypatch):
    """Weights of a mean alone move by 2C, whatever the bound declares."""
    monkeypatch.setattr(PerRecordMoments, "sensitivity", property(lambda bound: Sensitivity(1.0, math.sqrt(2.0))))
    with pytest.raises(ConformanceError, match="its declared sensitivity"):
        check_method(lambda: cheats_factors.Factors(weights=(1e-3, 1.0, 1e-3), by_class=False), **SMALL)

"""The parts of `make bench-scaling` that are no times: exponents, the page, and fits whose steps are counted."""

from __future__ import annotations

import json

import pytest

from tests.scaling.__main__ import BEGIN, END, PAGE, ROOT
from tests.scaling.cases import CASES
from tests.scaling.fits import BEFORE, fit
from tests.scaling.laws import curve, exponent, table


@pytest.mark.parametrize("law", [0.0, 1.0, 2.5])
def test_the_exponent_of_a_power_law_is_found(law):
    sizes = [10, 30, 100, 1000]
    assert exponent(sizes, [0.3 * size**law for size in sizes]) == pytest.approx(law, abs=1e-12)


def test_a_fixed_cost_disturbs_the_end_of_a_curve_less_than_the_whole():
    found = curve("part", "size", 1.0, "why", {size: 50.0 + size for size in (10, 100, 1000, 10_000)})
    assert found["exponent"] < 0.85 < 0.95 < found["exponent_at_the_end"] < 1.0


def test_the_page_has_the_measured_values_and_every_case():
    curves = json.loads((ROOT / "results" / "bench" / "scaling.json").read_text())["curves"]
    assert [(each["part"], each["size"], each["law"]) for each in curves] == [(c.part, c.size, c.law) for c in CASES]
    for each in curves:  # the exponents are those of the values that stand next to them
        sizes, costs = map(int, each["milliseconds"]), each["milliseconds"].values()
        assert exponent(list(sizes), list(costs)) == pytest.approx(each["exponent"], abs=0.01)
    written = PAGE.read_text().split(f"{BEGIN}\n")[1].split(f"\n{END}")[0]
    assert written == table(curves)


def test_the_steps_of_a_fit_are_measured_one_by_one():
    settings = ["privacy.epsilon=inf", "method.features=20", "method.batch_size=2", "method.steps=3"]
    found = fit("dp_merf", settings, records=8, side=8)
    assert {phase: len(seconds) for phase, seconds in found.seconds.items()} == {BEFORE: 1, "train": 3}
    assert all(second > 0.0 for seconds in found.seconds.values() for second in seconds)

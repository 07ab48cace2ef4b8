"""What the bench corrects of prv-accountant: its domain, and its mean of the loss of a release."""

from __future__ import annotations

import pytest
from prv_accountant.privacy_random_variables import PrivacyRandomVariableTruncated

from dpgen_bench.privacy.accountants.proven import Prv, _prv_epsilon, mean_loss
from dpgen_bench.privacy.events import Event, Sensitivity
from dpgen_bench.privacy.sampling import Poisson

RECORD = Sensitivity(1.0, 2.0)
DELTA = 1e-5


def test_a_wide_interval_contains_a_narrow_one() -> None:
    """The library's own domain loses the largest losses here: it gave 122.8 as the upper end of the wide one."""
    events = [Event(Poisson(0.001), RECORD, 0.3, 100_000)]
    wide, narrow = (Prv(eps_error=error).epsilon(events, DELTA, "add_remove") for error in (3.0, 0.5))
    assert narrow - 2 * 0.5 <= wide <= narrow + 2 * 3.0


def test_an_understated_mean_of_the_library_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [Event(Poisson(0.01), RECORD, 1.5, 1_000)]
    expected = Prv().epsilon(events, DELTA, "add_remove")
    mean = PrivacyRandomVariableTruncated.mean
    monkeypatch.setattr(PrivacyRandomVariableTruncated, "mean", lambda variable: mean(variable) - 1e-6)
    _prv_epsilon.cache_clear()
    assert Prv().epsilon(events, DELTA, "add_remove") == pytest.approx(expected, abs=1e-5)
    _prv_epsilon.cache_clear()


@pytest.mark.parametrize("multiplier", [0.05, 0.3, 1.0, 5.0])
def test_the_mean_loss_is_the_limit_of_renyi_divergence(multiplier: float) -> None:
    """At q near 1 it is that of the Gaussian mechanism, 1 / (2 m²); it is convex in q and at most q times that."""
    whole = 1.0 / (2.0 * multiplier**2)
    assert mean_loss(1.0 - 1e-9, multiplier) == pytest.approx(whole, rel=1e-6)
    small, half = mean_loss(0.001, multiplier), mean_loss(0.5, multiplier)
    assert 0.0 < small <= 0.002 * half <= 0.001 * whole

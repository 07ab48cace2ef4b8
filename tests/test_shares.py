"""Tests mechanisms that share a budget: the noise of a share, the rest for the last one, and refused requests."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import get_sigma_gaussian
from scipy.optimize import brentq
from scipy.stats import norm

from dpgen_bench.data.private import PrivateData
from dpgen_bench.privacy.accountants.calibration import BudgetExceeded, gaussian_mu, is_nearly_spent
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.bounds import PerRecord, PerRow, Whole
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import Full, OneClient, OneShard, Poisson
from dpgen_bench.privacy.services import Services
from tests.client_toys import Toy

SUM = PerRecord(C=0.5, shape=(2,))
UNIT = Sensitivity(1.0, 1.0)


def open_data(budget: Budget | None = None, ledger: Ledger | None = None) -> PrivateData:
    ledger = ledger or Ledger(budget or Budget(2.0), 12)
    return PrivateData(
        torch.zeros(12, 1, 2, 2),
        torch.zeros(12, dtype=torch.int64),
        1,
        Services(ledger, Key.seeded("shares")),
        clients=np.arange(12) % 4,
        num_clients=4,
    )


def spent(data: PrivateData) -> float:
    budget = data.budget
    events = [mechanism.event for mechanism in data.mechanisms.values()]
    return epsilon(events, budget.delta, budget.relation, budget.accountant)


# --- the noise of a share ---------------------------------------------------------------------------------------------


def exact_mu(budget: Budget) -> float:
    """The mu whose delta(epsilon; mu) is the budget's delta (Balle and Wang 2018, theorem 8)."""

    def delta(mu: float) -> float:
        e = budget.epsilon
        return norm.cdf(mu / 2 - e / mu) - math.exp(e + norm.logcdf(-mu / 2 - e / mu))

    return brentq(lambda mu: delta(mu) - budget.delta, 1e-3, 1e3, xtol=1e-12)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize(("e", "delta"), [(0.1, 1e-5), (1.0, 1e-5), (10.0, 1e-5), (2.0, 1e-9), (100.0, 1e-3)])
def test_the_mu_of_a_budget_is_that_of_the_exact_gaussian_mechanism(e, delta, relation) -> None:
    budget = Budget(e, delta, relation)
    assert gaussian_mu(budget) == pytest.approx(exact_mu(budget), rel=2e-6)
    assert gaussian_mu(budget) == pytest.approx(1 / get_sigma_gaussian(e, delta), rel=2e-6)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_a_looser_accountant_gives_a_budget_a_smaller_mu(accountant) -> None:
    budget = Budget(1.0, accountant=accountant)
    assert 0.8 < gaussian_mu(budget) / exact_mu(budget) <= 1.0
    costs = epsilon([Event(Full(), UNIT, 1 / gaussian_mu(budget), 1)], 1e-5, "add_remove", accountant)
    assert costs == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(("relation", "moves"), [("add_remove", 0.5), ("replace_one", 1.0)])
def test_full_batch_noise_is_the_closed_form_rounded_up(relation, moves) -> None:
    budget = Budget(2.0, relation=relation)
    exact = moves * math.sqrt(7) / (exact_mu(budget) * math.sqrt(0.3))
    std = open_data(budget).mechanism("sums", sample=Full(), bound=SUM, times=7, share=0.3).std
    assert exact * (1 - 2e-6) <= std <= exact * 1.0002
    assert float(f"{std:.5g}") == std


@pytest.mark.parametrize("sample", [Poisson(0.2), OneShard(3), OneShard(3, "public_balanced")])
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_noise_of_sampled_releases_is_the_smallest_that_costs_at_most_the_share(sample, relation) -> None:
    budget = Budget(2.0, relation=relation)
    whole = Event(Full(), UNIT, 1 / (gaussian_mu(budget) * math.sqrt(0.3)), 1)
    allowed = epsilon([whole], 1e-5, relation, "pld")
    event = open_data(budget).mechanism("rows", sample=sample, bound=SUM, times=20, share=0.3).event
    less = Event(sample, event.sensitivity, event.std * 0.999, 20)
    assert epsilon([event], 1e-5, relation, "pld") <= allowed < epsilon([less], 1e-5, relation, "pld")


# --- the rest for the last one ----------------------------------------------------------------------------------------

FULL, SAMPLED, SHARD = (Full(), 3), (Poisson(0.2), 20), (OneShard(3), 6)
PLANS = {
    "two full": [(*FULL, 0.3), (*FULL, None)],
    "full, sampled": [(*FULL, 0.3), (*SAMPLED, None)],
    "sampled, full": [(*SAMPLED, 0.6), (*FULL, 0.4)],
    "two sampled": [(*SAMPLED, 0.5), (Poisson(0.05), 40, None)],
    "three": [(*FULL, 0.2), (*SAMPLED, 0.3), (*FULL, 0.5)],
    "shards, full": [(*SHARD, 0.4), (*FULL, None)],
}


@pytest.mark.parametrize(
    ("plan", "relation", "accountant"),
    [
        *((plan, relation, "pld") for plan in PLANS for relation in ("add_remove", "replace_one")),
        *((plan, "add_remove", "rdp") for plan in PLANS),
        *((plan, "replace_one", "rdp") for plan in ("two full", "shards, full")),
        *((plan, "add_remove", "prv") for plan in ("two full", "full, sampled")),
        ("two full", "replace_one", "prv"),
    ],
)
def test_the_composition_meets_the_budget(plan, relation, accountant) -> None:
    budget = Budget(1.5, 1e-5, relation, accountant)
    data = open_data(budget)
    for number, (sample, times, share) in enumerate(PLANS[plan]):
        data.mechanism(f"m{number}", sample=sample, bound=SUM, times=times, share=share)
    assert 0.99 * budget.epsilon <= spent(data) <= budget.epsilon
    assert is_nearly_spent(budget, [m.event for m in data.mechanisms.values()])


def test_full_batch_releases_share_mu_squared_exactly() -> None:
    data = open_data()
    stds = [
        data.mechanism(name, sample=Full(), bound=SUM, times=1, share=share).std
        for name, share in (("a", 0.1), ("b", 0.2), ("c", 0.7))
    ]
    squared_mu = np.array([1 / std**2 for std in stds])
    np.testing.assert_allclose(squared_mu / squared_mu.sum(), [0.1, 0.2, 0.7], rtol=1e-3)


def test_shares_below_one_leave_the_rest_to_later_mechanisms() -> None:
    data = open_data()
    for name in ("a", "b"):
        data.mechanism(name, sample=Full(), bound=SUM, times=1, share=0.3)
    third = data.mechanism("c", sample=Full(), bound=SUM, times=1)
    assert third.std == pytest.approx(data.mechanisms["a"].std * math.sqrt(0.3 / 0.4), rel=1e-3)


@pytest.mark.parametrize("first", [0.3, None])
def test_an_infinite_budget_is_shared_without_noise(first) -> None:
    data = open_data(Budget(math.inf))
    assert data.mechanism("a", sample=Full(), bound=SUM, times=1, share=first).std == 0.0
    assert data.mechanism("b", sample=Poisson(0.5), bound=SUM, times=9).std == 0.0


# --- refused requests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"times": 1, "share": 0.0}, r"share of the budget: expected a number in \(0, 1\], got 0.0"),
        ({"times": 1, "share": 1.1}, r"share of the budget: expected a number in \(0, 1\], got 1.1"),
        ({"times": 1, "share": math.nan}, r"in \(0, 1\], got nan"),
        ({"times": 1, "share": True}, r"in \(0, 1\], got True"),
        ({"times": 1, "std": 1.0, "share": 0.5}, "no `std` with share=0.5, got times=1 and std=1.0"),
        ({"share": 0.5}, "no `std` with share=0.5, got times=None"),
    ],
)
@pytest.mark.parametrize("e", [2.0, math.inf])
def test_invalid_requests_for_a_share_are_refused(request_, reason, e) -> None:
    with pytest.raises(ValueError, match=reason):
        open_data(Budget(e)).mechanism("a", sample=Full(), bound=SUM, **request_)


def test_shares_over_one_are_refused_with_their_sum() -> None:
    data = open_data()
    data.mechanism("a", sample=Full(), bound=SUM, times=1, share=0.7)
    with pytest.raises(ValueError, match=r"at most 1, got 1.1 \(a 0.7, b 0.4\).*leave `share` out of the last"):
        data.mechanism("b", sample=Full(), bound=SUM, times=1, share=0.4)
    data.mechanism("b", sample=Full(), bound=SUM, times=1, share=0.1 + 0.2)  # 0.30000000000000004


def test_the_share_of_a_first_stage_is_named_by_its_setting() -> None:
    data = open_data()
    data.mechanism("init_gauss", sample=Full(), bound=SUM, times=1, share=0.3)
    with pytest.raises(ValueError, match=r"Lower one \(that of the first stage is init.share\), or leave `share` out"):
        data.mechanism("b", sample=Full(), bound=SUM, times=1, share=0.8)


@pytest.mark.parametrize("share", [None, 0.3])
def test_the_error_of_a_mechanism_without_budget_says_how_to_share(share) -> None:
    data = open_data()
    data.mechanism("class_sums", sample=Full(), bound=SUM, times=1)
    with pytest.raises(BudgetExceeded) as error:
        data.mechanism("second_moments", sample=Full(), bound=SUM, times=1, share=share)
    assert "'class_sums' was declared without a share and took the rest of the budget" in str(error.value)
    assert "data.mechanism('class_sums', ..., times=1, share=0.5), and" in str(error.value)
    fixed = open_data()
    fixed.mechanism("class_sums", sample=Full(), bound=SUM, times=1, share=0.5)
    fixed.mechanism("second_moments", sample=Full(), bound=SUM, times=1, share=share)


def test_the_error_names_the_mechanisms_that_use_the_budget() -> None:
    full = open_data(Budget(2.0)).mechanism("a", sample=Full(), bound=SUM, times=1).std
    stated = open_data()
    stated.mechanism("a", sample=Full(), bound=SUM, times=1, std=full * 1.001)
    with pytest.raises(BudgetExceeded, match=r"less than 1% of it\. The noise of 'a' \(std=.* was stated"):
        stated.mechanism("b", sample=Full(), bound=SUM, times=1)
    shared = open_data()
    shared.mechanism("a", sample=Full(), bound=SUM, times=1, share=0.6)
    shared.mechanism("b", sample=Full(), bound=SUM, times=1, share=0.4)
    with pytest.raises(BudgetExceeded, match=r"shares of the others \(a 0.6, b 0.4\) leave too little"):
        shared.mechanism("c", sample=Full(), bound=SUM, times=1)


@pytest.mark.parametrize(("share", "nearly"), [(0.985, False), (0.995, True)])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_less_than_one_percent_is_counted_in_mu_squared(share, nearly, accountant) -> None:
    budget = Budget(2.0, accountant=accountant)
    taken = Event(Full(), UNIT, 1 / (gaussian_mu(budget) * math.sqrt(share)), 1)
    assert is_nearly_spent(budget, [taken]) is nearly
    assert not is_nearly_spent(budget, [])
    assert not is_nearly_spent(Budget(math.inf), [taken])


def test_a_share_that_delta_alone_covers_is_refused_for_a_sampled_release() -> None:
    data = open_data(Budget(0.1, delta=1e-3))
    with pytest.raises(ValueError, match=r"alone covers a share of 0\.001"):
        data.mechanism("a", sample=Poisson(0.5), bound=SUM, times=1, share=0.001)


# --- resumed and restarted runs ---------------------------------------------------------------------------------------


def test_a_resumed_run_must_request_the_same_share() -> None:
    data = open_data()
    for name, share in (("a", 0.3), ("b", None)):
        data.mechanism(name, sample=Full(), bound=SUM, times=1, share=share)

    def resumed() -> PrivateData:
        return open_data(ledger=Ledger.from_dict(json.loads(json.dumps(data._services.ledger.to_dict()))))

    again = resumed()
    for name, share in (("a", 0.3), ("b", None)):
        assert again.mechanism(name, sample=Full(), bound=SUM, times=1, share=share).std == data.mechanisms[name].std
    for share in (0.4, None):
        with pytest.raises(ValueError, match="a resumed run must make the same requests"):
            resumed().mechanism("a", sample=Full(), bound=SUM, times=1, share=share)


def restarted(parent_share: float) -> PrivateData:
    parent = open_data()
    parent.mechanism("a", sample=Full(), bound=SUM, times=1, share=parent_share)
    ledger = Ledger(Budget(2.0), 12)
    ledger.inherit(parent._services.ledger, "0123456789ab")
    return open_data(ledger=ledger)


def test_shares_of_a_restarted_run_are_of_the_whole_budget_and_the_last_takes_the_rest() -> None:
    child = restarted(0.5)
    first = child.mechanism("a", sample=Full(), bound=SUM, times=1, share=0.3)
    rest = child.mechanism(
        "b", sample=Full(), bound=SUM, times=1, share=0.7
    )  # completes the sum of 1, so it takes the remaining 0.2
    assert rest.std == pytest.approx(first.std * math.sqrt(0.3 / 0.2), rel=1e-3)
    assert epsilon(child._services.ledger.events, 1e-5, "add_remove", "pld") == pytest.approx(2.0, rel=1e-3)


def test_a_share_that_the_parent_has_spent_is_refused() -> None:
    with pytest.raises(
        BudgetExceeded, match=r"would bring epsilon to .* restarts from 0123456789ab, which used the budget"
    ):
        restarted(0.5).mechanism("a", sample=Full(), bound=SUM, times=1, share=0.6)
    with pytest.raises(BudgetExceeded, match=r"less than 1% of it\. The run restarts from 0123456789ab"):
        restarted(0.995).mechanism("a", sample=Full(), bound=SUM, times=1)


# --- clients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("against", ["outsiders", "server"])
def test_mechanisms_of_clients_share_a_budget(against) -> None:
    budget = Budget(2.0, relation="replace_one")
    clients = open_data(budget).grouped("client")
    sample = OneClient(4, "public_balanced")
    ask = {"program": Toy(), "sample": sample, "noise_at": "client", "times": 8, "against": against}
    first = clients.mechanism("a", bound=PerRow(C=1.0, shape=(2, 3)), share=0.3, **ask)
    rest = clients.mechanism("b", bound=Whole(C=1.0, shape=(2, 3)), share=0.7, **ask)
    # Two answers of each client in both: per release, mu² is (sensitivity / std)²; the bounds' sensitivities differ.
    squared_mu = [(m.event.sensitivity.replace_one / m.std) ** 2 for m in (first, rest)]
    assert squared_mu[0] / sum(squared_mu) == pytest.approx(0.3, rel=1e-3)
    assert 2 * sum(squared_mu) == pytest.approx(gaussian_mu(budget) ** 2, rel=1e-3)


# --- the examples -----------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent


def test_the_example_of_two_releases_conforms_and_is_planned(tmp_path, monkeypatch, capsys) -> None:
    """The example is read from docs/extend/method.md, written to files, and used with the commands of that page."""
    from dpgen_bench.cli import main

    text = (ROOT / "docs" / "extend" / "method.md").read_text()
    examples = dict(re.findall(r"<!-- example: (\S+) -->\n```\w+\n(.*?)```", text, flags=re.DOTALL))
    (tmp_path / "moments.py").write_text(examples["moments.py"])
    (tmp_path / "my_conf" / "method").mkdir(parents=True)
    (tmp_path / "my_conf" / "method" / "moments.yaml").write_text(examples["my_conf/method/moments.yaml"])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    chosen = ["--config-dir", "my_conf", "method=moments", "dataset=digits", "privacy.epsilon=2"]
    assert main(["check", *chosen]) == 0
    capsys.readouterr()
    assert main(["account", *chosen, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    sums, moments = (mechanism["multiplier"]["add_remove"] for mechanism in plan["mechanisms"])
    assert (moments / sums) ** 2 == pytest.approx(0.8 / 0.2, rel=1e-3)  # sums take 0.8, moments the rest
    assert plan["epsilon"]["add_remove"]["pld"] == pytest.approx(2.0, rel=1e-3)

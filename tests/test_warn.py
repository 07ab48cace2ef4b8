"""Tests the warnings about settings in a ledger, and that a method cannot control its mechanisms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from omegaconf import OmegaConf

from dpgen_bench.data.private import PrivateData
from dpgen_bench.federation.client_mechanism import ClientMechanism
from dpgen_bench.privacy.accountants.calibration import calibrate_std, is_nearly_spent
from dpgen_bench.privacy.bounds import PerRecord, PerRow, Whole
from dpgen_bench.privacy.events import Budget, Sensitivity
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.sampling import Full, OneClient, OneShard, Poisson
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.warn import warn_of_unused_shares
from dpgen_bench.runs.execute import RunFailed, execute
from dpgen_bench.store.folders import Store
from tests import toys
from tests.client_toys import N, Toy, ask_one
from tests.run_toys import config

SUM = PerRecord(C=1.0, shape=(1, 2, 2))


def open_data(budget: Budget, path=None, ids=None, **more) -> tuple[PrivateData, Ledger]:
    images, labels = toys.records(12, (1, 2, 2))
    ledger = Ledger(budget, len(labels), path=path)
    return PrivateData(images, labels, 10, Services(ledger, Key.seeded("cautions")), ids=ids, **more), ledger


@pytest.mark.parametrize(
    ("delta", "epsilon", "warned"), [(1 / 12, 1.0, True), (1 / 13, 1.0, False), (0.5, math.inf, False)]
)
def test_a_delta_of_at_least_one_record_writes_a_warning(tmp_path, delta, epsilon, warned):
    data, ledger = open_data(Budget(epsilon, delta), tmp_path / "ledger.json")
    announced: list[str] = []
    ledger.announce = announced.append
    data.mechanism("sum", sample=Full(), bound=SUM, times=1)
    warnings = Ledger.load(tmp_path / "ledger.json").warnings
    assert warnings == announced
    assert [f"delta = {delta:g} is not below 1/n = 0.0833" in line for line in warnings] == [True] * warned


@pytest.mark.parametrize(("shards", "empty"), [(12, 0), (15, 3)])
@pytest.mark.parametrize("eps", [1.0, math.inf])
def test_more_shards_than_records_cause_a_warning(shards, empty, eps):
    data, ledger = open_data(Budget(eps, relation="replace_one"))
    data.mechanism("sum", sample=OneShard(shards), bound=Whole(C=1.0, shape=(1,)), times=1, std=10.0)
    about_shards = [line for line in ledger.warnings if "into" in line]
    assert about_shards == [
        f"'sum' divides 12 records into 15 shards, so at least {empty} of them have no record, and what is trained on "
        "these learns nothing from records. Set fewer shards."
    ] * bool(empty)


def test_clients_are_counted_if_the_unit_is_the_client():
    data, ledger = open_data(Budget(1.0, 0.3), clients=np.arange(12) % N, num_clients=N)
    ask_one(data, std=None, times=1)
    (line,) = ledger.warnings
    assert f"1/n = {1 / N}, where n is the number of clients" in line


@pytest.mark.parametrize(
    ("relation", "ids", "warned"),
    [("add_remove", None, True), ("add_remove", np.arange(12), False), ("replace_one", None, False)],
)
def test_shards_by_position_cause_a_warning_under_add_remove(relation, ids, warned):
    data, ledger = open_data(Budget(10.0, relation=relation), ids=ids)
    data.mechanism("critics", sample=OneShard(3), bound=PerRow(C=1.0, shape=(2, 1)), times=3)
    assert ["by their place" in line for line in ledger.warnings] == [True] * warned
    assert open_data(Budget(10.0))[1].warnings == []


@pytest.mark.parametrize(("first", "second", "warned"), [(0.995, 0.002, ["small"]), (0.4, 0.002, []), (0.5, 0.49, [])])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_release_with_almost_no_budget_left_causes_a_warning(first, second, warned, swapped):
    """Shares of mu squared: a Gaussian release with noise std s has (C / s)², and these add up for Full draws."""
    budget = Budget(2.0)
    whole = calibrate_std(budget, [], Full(), Sensitivity(1.0, 2.0), 1)
    data, ledger = open_data(budget)
    shares = {"large": first, "small": second}
    for name in reversed(shares) if swapped else shares:
        data.mechanism(name, sample=Full(), bound=SUM, times=1, std=1.001 * whole / math.sqrt(shares[name]))
    assert [line.split(" to ")[1].split(",")[0].strip("'") for line in ledger.warnings] == warned


def after_fit(budget: Budget, *requests: dict, parent: Ledger | None = None) -> list[str]:
    """The warnings that the end of a fit adds, after mechanisms with these settings were declared."""
    data, ledger = open_data(budget)
    if parent is not None:
        ledger.inherit(parent, "0123456789ab")
    for number, request in enumerate(requests):
        data.mechanism(f"m{number}", **{"sample": Full(), "bound": SUM, "times": 1, **request})
    before = len(ledger.warnings)
    warn_of_unused_shares(ledger)
    return ledger.warnings[before:]


SAMPLED = {"sample": Poisson(0.5)}


@pytest.mark.parametrize(
    ("requests", "warned"),
    [
        ([{"share": 0.3}, {"share": 0.6}], True),
        ([{"share": 0.98}], True),
        ([{"share": 0.3, **SAMPLED}, {"share": 0.6, "times": 9, **SAMPLED}], True),
        ([{"share": 0.3}, {"share": 0.695}], False),  # less than 1 % is left
        ([{"share": 0.3}, {"share": 0.7}], False),
        ([{"share": 0.3}, {}], False),
        (
            [{"share": 0.3}, {"times": None, "std": 3.0}],
            False,
        ),  # the largest number that fits; one more may cost over 1 %
        ([{"std": 9.0}], False),  # without a share, the noise is the author's choice
        ([], False),
    ],
)
def test_unused_shares_cause_a_warning(requests, warned):
    warnings = after_fit(Budget(2.0), *requests)
    assert len(warnings) == warned
    assert all("the shares of the budget sum to " in line and "no mechanism took the rest" in line for line in warnings)


def test_an_infinite_budget_has_no_unused_part():
    assert after_fit(Budget(math.inf), {"share": 0.3}) == []


def test_a_budget_against_the_server_counts_what_the_server_sees():
    """Outsiders do not know which clients were asked, so the same releases cost less against them."""

    def asked(**second) -> tuple[Ledger, float]:
        data, ledger = open_data(Budget(2.0, 1e-3, "replace_one"), clients=np.arange(12) % N, num_clients=N)
        clients = data.grouped("client")
        ask = {"program": Toy(), "sample": OneClient(N, max_answers=2), "noise_at": "client", "against": "server"}
        ask |= {"bound": PerRow(C=1.0, shape=(2, 3)), "times": 2 * N}
        clients.mechanism("a", share=0.3, **ask)
        return ledger, clients.mechanism("b", **second, **ask).std

    std = asked(share=0.7)[1]
    for factor, warned in ((1.0001, False), (1.2, True)):
        ledger, _ = asked(std=factor * std)
        assert not is_nearly_spent(ledger.budget, ledger.events)
        before = len(ledger.warnings)
        warn_of_unused_shares(ledger)
        assert len(ledger.warnings) - before == warned


def test_the_releases_of_a_parent_are_not_an_unused_part():
    parent, ledger = open_data(Budget(2.0))
    parent.mechanism("m0", sample=Full(), bound=SUM, times=1, share=0.5)
    assert after_fit(Budget(2.0), {"share": 0.499}, parent=ledger) == []
    (warning,) = after_fit(Budget(2.0), {"share": 0.4}, parent=ledger)
    assert "the shares of the budget sum to 0.4 (m0 0.4)" in warning


def test_a_run_prints_that_a_part_of_its_budget_is_unused(tmp_path, capsys):
    run = execute(config(tmp_path / "results", target="tests.toys.HalfOfTheBudget"))
    printed = capsys.readouterr().err
    assert printed.count("warning: the shares of the budget sum to 0.5 (sum 0.5)") == 1
    assert len(Ledger.load(run.path / "ledger.json").warnings) == 1


def test_a_run_prints_its_warnings_at_each_start(tmp_path, capsys):
    flag = tmp_path / "flag"
    flag.touch()
    made = config(tmp_path / "results", "privacy.delta=0.01", target="tests.failure_toys.Raises")
    OmegaConf.update(made, "method", {"flag": str(flag)})
    with pytest.raises(RunFailed):
        execute(made)
    assert capsys.readouterr().err.count("warning: delta = 0.01") == 1
    flag.unlink()
    run = execute(made)
    assert capsys.readouterr().err.count("warning: delta = 0.01") == 1
    assert len(Ledger.load(run.path / "ledger.json").warnings) == 1
    assert len(Store(tmp_path / "results").runs()) == 1


@pytest.mark.parametrize("kind", [Mechanism, ClientMechanism])
@pytest.mark.parametrize("name", ["resume_at", "before_checkpoint", "after_checkpoint"])
def test_a_mechanism_has_no_method_that_sets_its_release_number(kind, name):
    assert not hasattr(kind, name)

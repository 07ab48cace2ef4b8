"""Tests of the conditional epsilon: how a run stores it, and where it is shown."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from dpgen_bench.outcomes.overview import overview, row
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.ledger import Entry, Ledger
from dpgen_bench.runs.epsilon import account_run
from dpgen_bench.store.folders import Store
from dpgen_bench.tables.assembly import assemble
from dpgen_bench.tables.formats import long_frame
from dpgen_bench.tables.layout import lay_out
from tests.shard_cases import DELTA, unit
from tests.table_toys import fake_run, table_of


class ClaimsAndConditions:
    def __init__(self, claimed=9.99, conditional=(329.4, "if steps were memoryless")) -> None:
        self.claimed, self.conditional = claimed, conditional

    def epsilon_claimed(self, events, delta):
        return self.claimed

    def epsilon_conditional(self, events, delta):
        if isinstance(self.conditional, Exception):
            raise self.conditional
        return self.conditional


def accounted(folder, method, accountant="pld") -> dict:
    budget = Budget(math.inf, DELTA, "replace_one", accountant)
    ledger = Ledger(budget, 100, path=folder / "ledger.json")
    ledger.approve(Entry("m", {"kind": "Whole", "C": 1.0}, unit(10, 1.0, 50)))
    config = OmegaConf.create({"results": str(folder), "runtime": {"account_s": 60}})
    account_run(SimpleNamespace(method=lambda: method, config=config), SimpleNamespace(path=folder))  # type: ignore[arg-type]
    stored = Ledger.load(folder / "ledger.json").epsilon
    assert stored is not None
    return stored


def test_a_run_stores_its_conditional_epsilon_with_the_assumption(tmp_path) -> None:
    stored = accounted(tmp_path, ClaimsAndConditions())
    assert stored["conditional"] == {"epsilon": 329.4, "assumption": "if steps were memoryless"}
    assert stored["claimed"] == 9.99
    assert stored["proven"] == epsilon([unit(10, 1.0, 50)], DELTA, "replace_one", "pld")
    assert "reason" not in stored


@pytest.mark.parametrize(
    ("method", "conditional"),
    [
        (ClaimsAndConditions(conditional=None), None),
        (object(), None),
        (ClaimsAndConditions(conditional=(math.inf, "if so")), {"epsilon": "inf", "assumption": "if so"}),
        (ClaimsAndConditions(conditional=RuntimeError("no luck")), "failed: RuntimeError: no luck"),
    ],
)
def test_an_error_of_a_conditional_epsilon_does_not_fail_the_run(method, conditional, tmp_path) -> None:
    assert accounted(tmp_path, method)["conditional"] == conditional


def test_an_epsilon_that_the_accountant_does_not_cover_is_infinite_with_a_reason(tmp_path) -> None:
    stored = accounted(tmp_path, ClaimsAndConditions(), accountant="prv")
    assert stored["proven"] == "inf"
    assert "random number of participations" in stored["reason"]
    assert isinstance(stored["table"]["replace_one"]["pld"], float)


def test_tables_show_conditional_epsilons_if_a_row_has_one(tmp_path) -> None:
    sweeps = ["experiment=demo/dp_merf privacy.epsilon=10", "experiment=demo/dpgan"]
    table = table_of(sweeps=sweeps, metrics=["acc_logreg_pct", "acc_mlp_pct"])
    one = fake_run(tmp_path, ["experiment=demo/dp_merf", "privacy.epsilon=10", "protocol=quick"], 90.0)
    built = assemble("demo", table, tmp_path)
    assert not [note for note in lay_out(built).notes if "conditional ε" in note]
    assert "epsilon_conditional" not in long_frame(built)
    folder = Store(tmp_path).folder(one)
    before = row(overview(folder))
    epsilons = {"proven": 610.34, "claimed": 9.9926, "conditional": {"epsilon": 329.42, "assumption": "if so"}}
    folder.write_json("ledger.json", {"entries": [], "epsilon": epsilons})
    built = assemble("demo", table, tmp_path)
    layout = lay_out(built)
    (epsilon, *_), (unmade, *_) = (row[1] for row in layout.parts[0].rows)
    assert (epsilon.text, unmade.text) == ("9.99 → 610", "10 (budget)")
    assert "conditional ε: 329" in [layout.notes[number - 1] for number in epsilon.notes]
    assert set(long_frame(built)["epsilon_conditional"]) == {329.42, "–"}
    assert "ε conditional: if so" in built.rows[0].notes()
    assert [cell for cell in row(overview(folder)) if cell not in before] == ["610", "9.99 (329 conditional)"]
    folder.write_json(
        "ledger.json", {"entries": [], "epsilon": {**epsilons, "conditional": "failed: RuntimeError: no luck"}}
    )
    assert assemble("demo", table, tmp_path).rows[0].epsilon("conditional") == "failed: RuntimeError: no luck"

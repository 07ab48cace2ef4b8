"""Tests privacy.epsilon=null: without a budget, clipping and noise are stated, and their epsilon is reported."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.data.private import PrivateData
from dpgen_bench.outcomes.overview import overview, row
from dpgen_bench.outcomes.soundness import budget_problem
from dpgen_bench.privacy.accountants.calibration import calibrate_share, calibrate_std, calibrate_times
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.bounds import PerRecord
from dpgen_bench.privacy.events import Budget, budget_text
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import Full, Poisson
from dpgen_bench.privacy.services import Services
from dpgen_bench.runs.execute import execute
from dpgen_bench.tables.assembly import assemble
from tests.table_toys import ROW, a_table, line_for, measured

SUM = PerRecord(C=0.5, shape=(2,))
NONE = Budget(None, 1e-2)


def open_data(budget: Budget = NONE) -> PrivateData:
    ledger = Ledger(budget, 12)
    return PrivateData(
        torch.zeros(12, 1, 2, 2), torch.zeros(12, dtype=torch.int64), 1, Services(ledger, Key.seeded("none"))
    )


def test_stated_noise_is_approved_for_any_epsilon() -> None:
    data = open_data()
    for name, std in (("first", 0.05), ("second", 0.5)):
        data.mechanism(name, sample=Full(), bound=SUM, std=std, times=20)
    events = [mechanism.event for mechanism in data.mechanisms.values()]
    assert [(event.std, event.times) for event in events] == [(0.05, 20), (0.5, 20)]
    assert epsilon(events, NONE.delta, NONE.relation, NONE.accountant) > 100


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (dict(times=3), "expected std and times where privacy.epsilon is null, got std=None and times=3"),
        (dict(std=1.0), "expected std and times where privacy.epsilon is null, got std=1.0 and times=None"),
        (dict(times=3, share=0.5), "expected no share where privacy.epsilon is null, got share=0.5"),
        (dict(times=3, std=0.0), "expected clipping and noise .* got no noise"),
        (dict(times=3, std=1.0, bound=PerRecord(C=math.inf, shape=(2,))), "expected clipping and noise .* not clipped"),
    ],
)
def test_missing_settings_are_refused(request_: dict[str, Any], message: str) -> None:
    data = open_data()
    with pytest.raises(ValueError, match=message):
        data.mechanism("sum", **{"sample": Full(), "bound": SUM, **request_})
    assert not data.mechanisms


def test_nothing_is_calibrated_without_a_budget() -> None:
    """Otherwise std would be 0, as for an infinite budget."""
    for calibrate in (
        lambda: calibrate_std(NONE, [], Poisson(0.1), SUM.sensitivity, 5),
        lambda: calibrate_share(NONE, 0.5, Poisson(0.1), SUM.sensitivity, 5),
        lambda: calibrate_times(NONE, [], Poisson(0.1), SUM.sensitivity, 1.0),
    ):
        with pytest.raises(ValueError, match=r"expected a budget to calibrate .* got privacy.epsilon=null; state both"):
            calibrate()


def test_null_keeps_privacy_and_inf_does_not() -> None:
    assert (NONE.clip_norm(2.0, None), NONE.without_privacy, NONE.limit) == (2.0, False, math.inf)
    free = Budget(math.inf)
    assert (free.clip_norm(2.0, None), free.without_privacy, free.limit) == (math.inf, True, math.inf)
    assert [budget_text(value) for value in (None, "inf", 10, 0.5)] == ["none", "inf", "10", "0.5"]


def test_a_ledger_keeps_null_and_warns_of_delta() -> None:
    ledger = Ledger(Budget(None, 0.5), 12)
    data = PrivateData(
        torch.zeros(12, 1, 2, 2), torch.zeros(12, dtype=torch.int64), 1, Services(ledger, Key.seeded("none"))
    )
    data.mechanism("sum", sample=Full(), bound=SUM, std=1.0, times=1)
    written = json.loads(json.dumps(ledger.to_dict()))
    assert written["budget"]["epsilon"] is None
    assert Ledger.from_dict(written).budget == ledger.budget
    assert any("is not below 1/n" in warning for warning in ledger.warnings)


def test_a_run_without_a_budget_is_private_and_reports_what_it_proves(tmp_path) -> None:
    tiny = "method.steps=3 method.d_d=4 method.d_g=4 method.latent_dim=4 method.batch_size=8 ~protocol.metrics.mlp"
    overrides = (
        f"experiment=demo/dpgan method.sigma=0.5 runtime.account_s=0.01 protocol=quick {tiny} results={tmp_path}"
    )
    config = compose_config([*overrides.split(), "privacy.epsilon=null"])
    others = [
        build_spec(compose_config([*overrides.split(), f"privacy.epsilon={other}"])).id for other in ("10", "inf")
    ]
    folder = execute(config)
    assert folder is not None
    assert folder.id not in others
    ledger = Ledger.load(folder.path / "ledger.json")
    (event,) = ledger.events
    assert ledger.epsilon is not None
    assert 0 < event.std < math.inf == ledger.budget.limit
    assert ledger.epsilon["proven"] == epsilon([event], 1e-5, "add_remove", "pld") < math.inf
    assert budget_problem(ledger.to_dict(), config.privacy) == ""
    assert row(overview(folder))[6] == "none"
    ten = compose_config(["privacy.epsilon=10"]).privacy
    assert budget_problem(ledger.to_dict(), ten) == "its ledger has a budget of none, not 10"
    assert budget_problem({**ledger.to_dict(), "unproven": ["why"]}, config.privacy) == "nothing is proven: why"


def test_a_table_shows_none_as_the_budget(tmp_path) -> None:
    run = "experiment=demo/dpgan method.sigma=1.0 privacy.epsilon=null scale=paper"
    measured(tmp_path, run, "dpgan_revisited", {"fid": {"fid": 200.0}})
    built = assemble("toy", a_table({"of": ROW, "run": f"{run} seed=0"}), tmp_path)
    head = line_for(built, variant=ROW["variant"]).head
    assert (head["ε budget"], head["ε proven"]) == ("none", "9.5")
    assert head["relation, δ, by"] == "add/remove, 1e-05, pld"


@pytest.mark.parametrize("value", ["none", "[1]", "-1"])
def test_another_epsilon_is_refused_with_a_message(value: str) -> None:
    with pytest.raises(ValueError, match="null"):
        build_spec(compose_config([f"privacy.epsilon={value}"]))

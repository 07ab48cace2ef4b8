"""`dpgen account`: the table, its cells in their own processes, its cache, and what it refuses."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dpgen_bench.cli import main as dpgen
from dpgen_bench.privacy.accountants import table as tables
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.accountants.table import epsilon_table
from dpgen_bench.privacy.events import RELATIONS, Budget, Event, Sensitivity
from dpgen_bench.privacy.ledger import Entry, Ledger
from dpgen_bench.privacy.sampling import Full, OneShard, Poisson
from dpgen_bench.runs import account
from dpgen_bench.utils.cache import read_values

RECORD = Sensitivity(1.0, 2.0)
SHORT = ["--q", "1/100", "--sigma", "2", "--steps", "50"]
SAMPLED = Event(Poisson(0.01), RECORD, 2.0, 50)
GS_WGAN = ["--shards", "1000", "--sigma", "1.07", "--steps", "20000", "--releases-per-draw", "32"]
BALANCED = [*GS_WGAN, "--schedule", "public_balanced"]
UNSAMPLED = Event(Full(), RECORD, 1.0, 1)


def main(argv: list[str]) -> int:
    return dpgen(["account", *argv])


def as_json(capsys, *argv: str) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def planned(budget: Budget, **events: Event) -> Ledger:
    ledger = Ledger(budget, 100)
    for name, event in events.items():
        ledger.approve(Entry(name, {"kind": "PerRecord", "C": 1.0, "rows": 1}, event))
    return ledger


def no_process(*args, **kwargs):
    raise AssertionError("a process was started")


def test_table_of_a_sampled_mechanism(capsys) -> None:
    out = as_json(capsys, *SHORT)
    table = out["epsilon"]
    for name in ("rdp", "prv", "pld"):
        assert table["add_remove"][name] == pytest.approx(epsilon([SAMPLED], 1e-5, "add_remove", name), rel=1e-9)
    assert table["replace_one"]["pld"] == pytest.approx(epsilon([SAMPLED], 1e-5, "replace_one", "pld"), rel=1e-9)
    assert "add/remove only" in table["replace_one"]["rdp"]
    assert table["replace_one"]["prv"].startswith("not available: ")
    assert out["delta"] == 1e-5
    assert out["mechanisms"] == [
        {"sampling": "poisson", "rate": 0.01, "multiplier": {"add_remove": 2.0, "replace_one": 1.0}, "times": 50}
    ]


def test_rate_one_is_every_record_and_starts_no_process(capsys, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "run", no_process)
    table = as_json(capsys, "--q", "1", "--sigma", "1", "--steps", "1")["epsilon"]
    assert table["add_remove"]["pld"] == pytest.approx(4.377, abs=1e-3)  # DP-MERF's sigma 0.5, both relations
    assert table["replace_one"]["pld"] == pytest.approx(9.997, abs=1e-3)
    assert isinstance(table["replace_one"]["rdp"], float)


def test_releases_per_draw_divide_the_multiplier_by_their_root(capsys, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "run", no_process)
    rows = as_json(capsys, "--q", "1", "--sigma", "4", "--steps", "3", "--releases-per-draw", "16")
    plain = as_json(capsys, "--q", "1", "--sigma", "1", "--steps", "3")
    assert rows["epsilon"]["add_remove"] == plain["epsilon"]["add_remove"]
    # Rows are any function of the batch: the same 2C under both relations, unless --bound=record states that they are
    # sums.
    assert rows["epsilon"]["replace_one"] == plain["epsilon"]["add_remove"]
    sums = as_json(capsys, "--q", "1", "--sigma", "4", "--steps", "3", "--releases-per-draw", "16", "--bound", "record")
    assert sums["epsilon"] == plain["epsilon"]


def test_published_adds_the_claimed_epsilon_to_the_proven_one(capsys) -> None:
    """DP-Sinkhorn, final paper, MNIST: 10.05 claimed, about 890 proven by RDP (PLD: test_accountants)."""
    sinkhorn = ["--q", "1/1200", "--sigma", "1.5", "--steps", "160000", "--releases-per-draw", "50"]
    table = as_json(capsys, *sinkhorn, "--published", "--timeout", "0.05")["epsilon"]
    (label, claimed), *rest = table["claimed"].items()
    assert label == "claimed (8,000,000 compositions, classical RDP)"
    assert rest == []
    assert claimed == pytest.approx(10.05, abs=0.005)
    assert table["add_remove"]["rdp"] == pytest.approx(888, abs=3)


def test_published_dpgan_adds_opacus(capsys) -> None:
    dpgan = ["--q", "1/469", "--sigma", "1", "--steps", "450000", "--published", "--timeout", "0.05"]
    claims = as_json(capsys, *dpgan)["epsilon"]["claimed"]
    assert claims["claimed (450,000 compositions, Opacus RDP)"] == pytest.approx(9.963, abs=1e-3)


def test_shards_of_gs_wgan_proven_conditional_and_claimed(capsys) -> None:
    printed = as_json(capsys, *GS_WGAN, "--published")
    table = printed["epsilon"]
    assert table["replace_one"]["pld"] == pytest.approx(610.3, abs=0.05)
    assert table["add_remove"] == table["replace_one"]  # rows: any function of the batch
    assert "random number of participations" in table["add_remove"]["prv"]
    assert table["claimed"] == {
        "claimed (640,000 compositions, without-replacement RDP)": pytest.approx(9.9926, abs=1e-4)
    }
    assert table["conditional"] == {"conditional (if steps were memoryless)": pytest.approx(329.4, abs=0.05)}
    (mechanism,) = printed["mechanisms"]
    assert (mechanism["sampling"], mechanism["shards"], mechanism["schedule"]) == ("oneshard", 1000, "random")
    assert mechanism["multiplier"]["replace_one"] == pytest.approx(0.18915, abs=1e-5)


def test_the_conditional_epsilon_has_its_time_limit_and_its_label(capsys) -> None:
    assert main([*GS_WGAN, "--published", "--timeout", "0.05"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "20,000 releases, one of 1000 shards, random, joint multiplier 0.18915" in printed
    assert printed.count("over 0.05 s") == 1
    assert printed.index("conditional (if") < printed.index("claimed (640,000")
    assert "the claimed epsilon is no bound" in printed


def test_a_public_schedule_costs_its_rounds(capsys, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "run", no_process)
    table = as_json(capsys, *BALANCED)["epsilon"]
    assert table["replace_one"]["pld"] == pytest.approx(379.4, abs=0.05)
    sums = as_json(capsys, *BALANCED, "--bound", "record")["epsilon"]
    assert sums["add_remove"] == table["add_remove"]
    assert sums["replace_one"]["pld"] > 3 * table["replace_one"]["pld"]
    assert main(BALANCED) == 0
    assert "one of 1000 shards, public_balanced" in capsys.readouterr().out


def test_several_sharded_mechanisms_are_composed_in_a_process(tmp_path, monkeypatch) -> None:
    events = [Event(OneShard(10), RECORD, 2.0, 50), Event(OneShard(7), RECORD, 3.0, 20), UNSAMPLED]
    cache = tmp_path / "epsilon.json"
    table = epsilon_table(events, 1e-5, cache=cache)
    for relation in RELATIONS:
        assert table[relation]["pld"] == epsilon(events, 1e-5, relation, "pld")
    monkeypatch.setattr(subprocess, "run", no_process)
    assert epsilon_table(events, 1e-5, cache=cache) == table
    with pytest.raises(AssertionError, match="a process was started"):
        epsilon_table([*events, Event(OneShard(7), RECORD, 3.0, 1)], 1e-5, cache=cache)


@pytest.mark.parametrize("claimed", [9.9, None])
def test_a_methods_conditional_epsilon_is_printed_with_its_assumption(monkeypatch, capsys, claimed) -> None:
    method = SimpleNamespace(
        epsilon_claimed=lambda events, delta: claimed, epsilon_conditional=lambda events, delta: (33.0, "if so")
    )
    config = SimpleNamespace(method=SimpleNamespace(name="toy"))
    spec = SimpleNamespace(method=lambda: method)
    monkeypatch.setattr(account, "compose_config", lambda overrides: config)
    monkeypatch.setattr(account, "build_spec", lambda config: spec)
    monkeypatch.setattr(account, "plan", lambda overrides: planned(Budget(10.0), sums=UNSAMPLED))
    table = as_json(capsys, "method=dp_merf", "--published")["epsilon"]
    assert table["conditional"] == {"conditional (if so)": 33.0}
    assert table.get("claimed") == (None if claimed is None else {"claimed (by toy's paper)": 9.9})


def test_published_adds_the_claimed_epsilon_of_a_run(capsys) -> None:
    """The claim is the method's own. DPGAN's paper counts by Opacus's RDP, at fewer orders than the proof."""
    run = ["method=dpgan", "dataset=digits", "privacy.epsilon=10", "method.steps=50"]
    printed = as_json(capsys, *run, "--published", "--timeout", "0.05")
    proven = printed["epsilon"]["add_remove"]
    claimed = printed["epsilon"]["claimed"]["claimed (by dpgan's paper)"]
    assert proven["rdp"] <= claimed <= 1.005 * proven["rdp"]
    assert 11 < proven["rdp"] < 12  # the budget of 10 is by PLD


def test_a_cell_that_takes_too_long_says_so(capsys) -> None:
    assert main([*SHORT, "--timeout", "0.05"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("over 0.05 s") == 3
    assert "not available" in printed
    assert f"{epsilon([SAMPLED], 1e-5, 'add_remove', 'rdp'):.4g}" in printed
    assert "50 releases, Poisson rate 0.01, joint multiplier 2" in printed


def test_a_process_that_fails_gives_its_last_words(monkeypatch, tmp_path) -> None:
    def failing(*args, **kwargs):
        return SimpleNamespace(returncode=-9, stdout="", stderr="boo\nout of memory\n")

    monkeypatch.setattr(subprocess, "run", failing)
    cache = tmp_path / "epsilon.json"
    table = epsilon_table([SAMPLED], 1e-5, cache=cache)
    assert table["add_remove"]["pld"] == "not available: the process ended with status -9: out of memory"
    assert read_values(cache) == {}  # The machine may have caused the failure.


def test_cache_spares_the_processes(monkeypatch, tmp_path) -> None:
    cache = tmp_path / "deep" / "epsilon.json"
    with monkeypatch.context() as once:
        answer = SimpleNamespace(returncode=0, stdout='{"epsilon": 1.5}', stderr="")
        once.setattr(subprocess, "run", lambda *args, **kwargs: answer)
        first = epsilon_table([SAMPLED], 1e-5, cache=cache)
    assert first["add_remove"]["pld"] == first["replace_one"]["pld"] == 1.5
    monkeypatch.setattr(subprocess, "run", no_process)
    # The same composition in other words: two halves, and scaled units.
    half = Event(Poisson(0.01), Sensitivity(3.0, 6.0), 6.0, 25)
    assert epsilon_table([half, half], 1e-5, cache=cache) == first
    with pytest.raises(AssertionError, match="a process was started"):
        epsilon_table([SAMPLED], 1e-6, cache=cache)
    for name, value in (("version", lambda library: "99"), ("own_code", lambda: "corrected since")):
        with monkeypatch.context() as changed:
            changed.setattr(tables, name, value)
            with pytest.raises(AssertionError, match="a process was started"):
                epsilon_table([SAMPLED], 1e-5, cache=cache)


def test_cache_retries_a_cell_only_when_given_more_time(monkeypatch, tmp_path) -> None:
    cache = tmp_path / "epsilon.json"
    cache.write_text("{ not json")
    limits = []

    def slow(*args, timeout, **kwargs):
        limits.append(timeout)
        raise subprocess.TimeoutExpired("cell", timeout)

    monkeypatch.setattr(subprocess, "run", slow)
    with pytest.warns(UserWarning, match=r"epsilon\.json cannot be read"):
        assert epsilon_table([SAMPLED], 1e-5, 10.0, cache=cache)["add_remove"]["prv"] == "over 10 s"
    assert epsilon_table([SAMPLED], 1e-5, 5.0, cache=cache)["add_remove"]["prv"] == "over 10 s"
    assert limits == [10.0] * 3
    assert epsilon_table([SAMPLED], 1e-5, 20.0, cache=cache)["add_remove"]["prv"] == "over 20 s"
    assert limits == [10.0] * 3 + [20.0] * 3


def test_tables_are_json_even_when_infinite() -> None:
    table = epsilon_table([Event(Full(), RECORD, 0.0, 1)], 1e-5, claims={"claimed": math.inf})
    assert table == {
        **{relation: dict.fromkeys(("rdp", "prv", "pld"), "inf") for relation in RELATIONS},
        "claimed": {"claimed": "inf"},
    }
    conditional = epsilon_table([UNSAMPLED], 1e-5, conditional={"given": math.inf, "nothing": []})["conditional"]
    assert conditional == {"given": "inf", "nothing": 0.0}
    assert epsilon_table([], 1e-5)["add_remove"] == dict.fromkeys(("rdp", "prv", "pld"), 0.0)


def test_overrides_account_the_planned_mechanisms(monkeypatch, capsys) -> None:
    seen = []

    def plan(overrides):
        seen.append(overrides)
        return planned(Budget(10.0, 1e-6, "replace_one", "pld"), sums=UNSAMPLED)

    monkeypatch.setattr(account, "plan", plan)
    assert main(["method=dp_merf", "privacy.epsilon=10"]) == 0
    assert seen == [["method=dp_merf", "privacy.epsilon=10"]]
    printed = capsys.readouterr().out
    assert "'sums': 1 release, all records, joint multiplier 1\n" in printed
    assert "alone" not in printed  # it is the whole table
    assert "budget: epsilon 10 (replace-one, pld)" in printed
    assert "delta = 1e-06" in printed
    assert f"{epsilon([UNSAMPLED], 1e-6, 'replace_one', 'pld'):.4g}" in printed
    out = as_json(capsys, "method=dp_merf", "--delta", "1e-5")
    assert out["delta"] == 1e-5


def test_each_of_several_mechanisms_is_named_next_to_what_it_costs_alone(monkeypatch, capsys) -> None:
    events = {"sums": UNSAMPLED, "moments": Event(Full(), RECORD, 3.0, 2)}
    ledger = planned(Budget(10.0), **events)
    ledger.entries["sums"] = replace(ledger.entries["sums"], share=0.8)
    monkeypatch.setattr(account, "plan", lambda overrides: ledger)
    assert main(["method=dp_merf"]) == 0
    printed = capsys.readouterr().out
    assert "'sums': 1 release, all records, joint multiplier 1, share 0.8 of the budget\n" in printed
    assert "'moments': 2 releases, all records, joint multiplier 3\n" in printed
    parsed = as_json(capsys, "method=dp_merf")
    assert [mechanism["name"] for mechanism in parsed["mechanisms"]] == ["sums", "moments"]
    for mechanism, (name, event) in zip(parsed["mechanisms"], events.items(), strict=True):
        (row,) = (line for line in printed.splitlines() if f"'{name}' alone, PLD" in line)
        for relation in RELATIONS:
            cost = epsilon([event], 1e-5, relation, "pld")
            assert f" {cost:.4g} " in row
            assert mechanism["epsilon_alone"][relation] == {"pld": cost}
    assert parsed["epsilon"]["add_remove"]["pld"] == epsilon(ledger.events, 1e-5, "add_remove", "pld")


def test_a_plan_that_fails_is_an_error_not_a_traceback(monkeypatch, capsys) -> None:
    def plan(overrides):
        raise ValueError("over budget by 3")

    monkeypatch.setattr(account, "plan", plan)
    assert main(["method=dpgan"]) == 2
    assert "over budget by 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "expected --q or --shards, --sigma and --steps, or Hydra overrides"),
        (["--shards", "9", *SHORT], "expected one of --q and --shards, got both"),
        (["--shards", "0", "--sigma", "1", "--steps", "1"], "--shards >= 1, got 0"),
        (["--shards", "9", "--steps", "1"], "missing --sigma"),
        (["--sigma", "2", "--steps", "1"], "missing --q"),
        ([*SHORT, "--schedule", "random"], "expected --schedule together with --shards"),
        (
            ["--shards", "9", "--sigma", "1", "--steps", "1", "--schedule", "fixed"],
            "expected one of random, public_balanced, got 'fixed'",
        ),
        ([*BALANCED, "--published"], "without --max-answers or a public schedule"),
        (["--shards", "9", "method=dpgan"], "got both"),
        (["--q", "0", "--sigma", "1", "--steps", "1"], "--q in (0, 1], got 0"),
        (["--q", "3/2", "--sigma", "1", "--steps", "1"], "--q in (0, 1], got 1.5"),
        (["--q", "1/0", "--sigma", "1", "--steps", "1"], "expected a number or a fraction"),
        (["--q", "nan", "--sigma", "1", "--steps", "1"], "expected a number or a fraction"),
        (["--q", "0.1", "--sigma", "0", "--steps", "1"], "--sigma > 0"),
        (["--q", "0.1", "--sigma", "inf", "--steps", "1"], "--sigma > 0 and finite"),
        (["--q", "0.1", "--sigma", "1", "--steps", "0"], "--steps >= 1"),
        (["--q", "0.1", "--sigma", "1", "--steps", "1.5"], "expected an integer, got '1.5'"),
        ([*SHORT, "--delta", "0"], "--delta in (0, 1), got 0"),
        ([*SHORT, "--delta", "1"], "--delta in (0, 1), got 1"),
        ([*SHORT, "--releases-per-draw", "0"], "--releases-per-draw >= 1"),
        ([*SHORT, "--timeout", "0"], "--timeout > 0"),
        (["--q", "0.1", "--steps", "1"], "missing --sigma"),
        ([*SHORT, "method=dpgan"], "got both"),
        (["--sigm", "1"], "got --sigm (did you mean '--sigma'?)"),
        (["--steep=3"], "got --steep=3 (did you mean '--steps'?)"),
        (
            ["method=dp_merf", "dataset=digits", "--published"],
            "whose paper's count can be printed, got dp_merf, which has none: ",
        ),
        (["method=dpgan", "--bound", "row"], "--bound and --releases-per-draw together with"),
    ],
)
def test_bad_input_is_refused_with_status_2(argv, message, capsys, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "run", no_process)
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_help_explains_sigma(capsys) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert "2C" in printed
    assert "sigma / sqrt(B)" in printed

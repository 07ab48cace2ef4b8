"""The leaderboard: places among comparable lines only, and the reason for a line without a place."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.display import direction
from dpgen_bench.store.folders import RunFolder, Store
from dpgen_bench.tables.assembly import assemble
from dpgen_bench.tables.formats import long_frame
from dpgen_bench.tables.load import load_table
from dpgen_bench.tables.ranking import Standing, signed, standings
from dpgen_bench.tables.spec import LeaderboardSpec
from dpgen_bench.utils.paths import CONF
from tests.table_toys import every_column, measured, table_of, table_rows

SHARED = "privacy.relation=replace_one privacy.accountant=pld privacy.delta=1e-5"
LINES = {name: f"experiment=demo/{name} {SHARED} privacy.epsilon=10" for name in ("dp_merf", "dpgan", "dp_sinkhorn")}


TERMS = {"relation": "replace_one", "delta": 1e-5, "accountant": "pld"}


def board(*sweeps: str, by: str = "fid", **more: str):
    return table_of(sweeps=[*sweeps], metrics=[by], leaderboard={"by": by, **more})


def ledger(proven: float | str = 9.99, **changed: Any) -> dict[str, Any]:
    """A ledger as a run leaves it, without releases."""
    whole = {
        "unit": "record",
        "budget": {"epsilon": 10.0, **TERMS},
        "diagnostics": "off",
        "unproven": [],
        "entries": [],
    }
    return {**whole, "epsilon": {"proven": proven, **TERMS}, **changed}


def ran(results: Path, name: str, fid: float, seed: int = 0, content: dict | None = None, **more: float) -> RunFolder:
    run_id = measured(results, LINES[name], "quick", {"fid": {"fid": fid, **more}}, seed)
    folder = Store(results).folder(run_id)
    folder.write_json("ledger.json", ledger() if content is None else content)
    return folder


def places(results: Path, table) -> dict[str, tuple[str, str]]:
    frame = every_column(assemble("t", table, results))
    return {line["method"]: (line["place"], line["status"]) for line in frame.to_dict("records")}


def test_lines_are_ranked_by_the_direction_of_the_metric(tmp_path):
    for name, fid, accuracy in (("dp_merf", 100.0, 70.0), ("dpgan", 50.0, 60.0), ("dp_sinkhorn", 75.0, 80.0)):
        ran(tmp_path, name, fid, acc_mlp_pct=accuracy)
    by_fid = places(tmp_path, board(*LINES.values()))
    assert list(by_fid) == ["dpgan", "dp_sinkhorn", "dp_merf"]
    assert [place for place, _ in by_fid.values()] == ["1", "2", "3"]
    by_accuracy = places(tmp_path, board(*LINES.values(), by="acc_mlp_pct"))
    assert list(by_accuracy) == ["dp_sinkhorn", "dp_merf", "dpgan"]


def test_equal_values_share_a_place(tmp_path):
    for name, fid in (("dp_merf", 50.0), ("dpgan", 50.0), ("dp_sinkhorn", 75.0)):
        ran(tmp_path, name, fid)
    assert [place for place, _ in places(tmp_path, board(*LINES.values())).values()] == ["1=", "1=", "3"]


def compared(results: Path, table) -> dict[str, tuple[str, str]]:
    frame = every_column(assemble("t", table, results))
    return {line["method"]: (line["place"], line["difference from the best"]) for line in frame.to_dict("records")}


def test_lines_are_compared_with_the_best_over_seeds(tmp_path):
    """Welch: DPGAN differs by 2 with variances of the means 1/3 and 1/3, t(4) = 2.776; DP-Sinkhorn differs clearly."""
    lines = [f"{LINES[name]} seed=0,1,2" for name in LINES]
    for name, fids in (("dp_merf", (9.0, 10.0, 11.0)), ("dpgan", (11.0, 12.0, 13.0)), ("dp_sinkhorn", (20, 21, 22))):
        for seed, fid in enumerate(fids):
            ran(tmp_path, name, fid, seed)
    assert compared(tmp_path, board(*lines)) == {
        "dp_merf": ("1=", "best"),
        "dpgan": ("1=", "+2.0 [−0.3, +4.3]"),
        "dp_sinkhorn": ("3", "+11.0 [+8.7, +13.3]"),
    }
    built = assemble("t", board(*lines), tmp_path)
    assert "Welch's t" in built.note
    frame = long_frame(built).set_index("method")
    assert list(frame["tie"]) == ["", "yes", "no"]
    assert frame.loc["dpgan", "to_best_ci95_low"] == pytest.approx(2.0 - 2.776445 * (2 / 3) ** 0.5, abs=1e-4)
    assert "tie" not in long_frame(assemble("t", table_of(sweeps=lines, metrics=["fid"]), tmp_path))


def test_with_two_seeds_neither_ties_nor_wins_are_claimed(tmp_path):
    for name, fids in (("dp_merf", (9.0, 11.0)), ("dpgan", (9.5, 11.5)), ("dp_sinkhorn", (500.0, 501.0))):
        for seed, fid in enumerate(fids):
            ran(tmp_path, name, fid, seed)
    assert compared(tmp_path, board(*(f"{line} seed=0,1" for line in LINES.values()))) == {
        "dp_merf": ("1", "best"),
        "dpgan": ("2", "+0.5"),
        "dp_sinkhorn": ("3", "+490.5"),
    }


def test_higher_values_are_compared_with_the_highest():
    best, near, far = [[90.0], [91.0], [92.0]], [[89.0], [90.0], [91.5]], [[10.0], [11.0], [12.0]]
    found = standings([near, None, best, far], lower=False)
    assert [each.place_text for each in found] == ["1=", "–", "1=", "3"]
    assert found[3].to_best.mean == -80.0
    assert found[3].comparison == "−80.0 [−82.3, −77.7]"
    assert [each.comparison for each in found[1:3]] == ["–", "best"]
    assert standings([None, None], lower=True) == [Standing(None)] * 2


def test_lines_that_cannot_be_told_from_the_best_come_before_one_that_can_whatever_their_means():
    best, clear, wide = [[90.0], [90.1], [90.2]], [[89.0], [89.1], [89.2]], [[80.0], [88.0], [96.0]]
    found = standings([clear, wide, best, clear, clear[:2]], lower=False)
    assert [each.place_text for each in found] == ["3=", "1=", "1=", "3=", "5"]
    assert sorted(range(5), key=lambda line: found[line].order) == [2, 1, 0, 3, 4]


def test_differences_have_a_sign():
    assert [signed(value, 80.0) for value in (0.0, 0.04, -3.21, 1.5)] == ["0", "0", "−3.2", "+1.5"]


def test_each_epsilon_has_its_own_places(tmp_path):
    ran(tmp_path, "dp_merf", 50.0)
    table = board(*LINES.values(), LINES["dp_merf"].replace("epsilon=10", "epsilon=1"))
    frame = every_column(assemble("t", table, tmp_path))
    assert list(frame["ε budget"]) == ["1", "10", "10", "10"]
    assert list(frame["place"]) == ["–", "1", "–", "–"]
    assert set(frame["status"]) == {"measured", "not run"}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (ledger(9.0), "proven 9 leaves a part of 10 unspent"),
        (ledger(10.4), "proven 10.4 is above 10"),
        (ledger("inf"), "nothing is proven"),
        (ledger(unit="client"), "its epsilon protects a client, not a record"),
        (ledger(epsilon=None), "nothing is proven"),
        (ledger(budget={"epsilon": 100.0, **TERMS}), "its ledger has a budget of 100, not 10"),
        (ledger(diagnostics="unsafe"), "it kept private diagnostics (unsafe)"),
        (ledger(unproven=["a client raised"]), "nothing is proven: a client raised"),
        (
            ledger(epsilon={"proven": 9.99, **TERMS, "relation": "add_remove"}),
            "its ledger counts by relation add/remove",
        ),
        (ledger(budget={"epsilon": 10.0, **TERMS, "delta": 1e-3}), "its ledger counts by delta 0.001, not 1e-05"),
        (
            ledger(budget={"epsilon": 10.0, **TERMS, "accountant": "rdp"}),
            "its ledger counts by accountant rdp, not pld",
        ),
        ({"entries": []}, "its ledger lacks the unit or the budget"),
    ],
)
@pytest.mark.parametrize("bad", [0, 1])
def test_a_seed_that_is_not_comparable_removes_the_place_and_is_named(tmp_path, content, why, bad):
    """One of two seeds has another ledger; its line gets no place, although its value is the best."""
    for seed in (0, 1):
        ran(tmp_path, "dp_merf", 1.0, seed, content if seed == bad else None)
    ran(tmp_path, "dpgan", 50.0)
    ranking = places(tmp_path, board(f"{LINES['dp_merf']} seed=0,1", LINES["dpgan"]))
    assert ranking["dpgan"] == ("1", "measured")
    place, status = ranking["dp_merf"]
    assert place == "–"
    assert f"; no place: seed {bad}: {why}" in status
    assert f"seed {1 - bad}" not in status


def test_sound_seeds_have_a_place_together(tmp_path):
    for seed, proven in ((0, 9.81), (1, 10.0)):
        ran(tmp_path, "dp_merf", 1.0, seed, ledger(proven))
    assert places(tmp_path, board(f"{LINES['dp_merf']} seed=0,1")) == {"dp_merf": ("1", "measured")}


def test_without_privacy_the_unit_counts_alone(tmp_path):
    line = LINES["dp_merf"].replace("epsilon=10", "epsilon=inf")
    folder = Store(tmp_path).folder(measured(tmp_path, line, "quick", {"fid": {"fid": 9.0}}))
    content = ledger("inf", budget={"epsilon": "inf", **TERMS}, diagnostics="unsafe")
    folder.write_json("ledger.json", content)
    assert places(tmp_path, board(line)) == {"dp_merf": ("1", "measured")}
    folder.write_json("ledger.json", {**content, "unit": "client"})
    assert places(tmp_path, board(line))["dp_merf"][0] == "–"


def test_a_line_has_a_place_only_with_all_its_seeds(tmp_path):
    ran(tmp_path, "dp_merf", 1.0)
    ran(tmp_path, "dpgan", 50.0)
    assert places(tmp_path, board(f"{LINES['dp_merf']} seed=0,1", LINES["dpgan"])) == {
        "dpgan": ("1", "measured"),
        "dp_merf": ("–", "1 measured, 1 not run; no place: 1 of 2 seeds measured"),
    }


def test_a_value_of_one_of_two_seeds_gets_no_place(tmp_path):
    ran(tmp_path, "dp_merf", 1.0, 0, acc_mlp_pct=90.0)
    ran(tmp_path, "dp_merf", 2.0, 1)
    _, status = places(tmp_path, board(f"{LINES['dp_merf']} seed=0,1", by="acc_mlp_pct"))["dp_merf"]
    assert status.endswith("no place: accuracy, MLP (%) was measured for 1 of 2 seeds")


def test_a_run_without_the_metric_gets_no_place(tmp_path):
    run_id = measured(tmp_path, LINES["dpgan"], "quick", {"mlp": {"acc_mlp_pct": 90.0}})
    Store(tmp_path).folder(run_id).write_json("ledger.json", ledger())
    assert places(tmp_path, board(LINES["dpgan"])) == {
        "dpgan": ("–", "no metric of this table was measured; no place: FID was not measured")
    }


@pytest.mark.parametrize(
    ("by", "name"),
    [("seconds_total", "seconds"), ("parameters_released_generator", "parameters"), ("bytes_up", "bytes")],
)
def test_a_cost_is_better_lower(tmp_path, by, name):
    for method, cost in (("dp_merf", 20.0), ("dpgan", 5.0)):
        part = {"seconds_total": "train", "bytes_up": "up"}.get(by, "released_generator")
        ran(tmp_path, method, 1.0).write_json("training.json", {name: {part: cost}})
    ranking = places(tmp_path, board(LINES["dp_merf"], LINES["dpgan"], by=by))
    assert ranking == {"dpgan": ("1", "measured"), "dp_merf": ("2", "measured")}


@pytest.mark.parametrize(
    ("by", "lower"),
    [
        ("fid", True),
        ("kid", True),
        ("nn_copies_pct", True),
        ("seconds_train", True),
        ("peak_memory_mib", True),
        ("comm_cost_bytes", True),
        ("inception_score", False),
        ("acc_cnn_pct", False),
        ("acc_linear_svc_calibrated_pct", False),
        ("acc_calibrated_pct", False),
        ("coverage", False),
    ],
)
def test_which_way_is_better(by, lower):
    assert direction(by) == ("lower" if lower else "higher")


@pytest.mark.parametrize(
    "by", ["fid_num_samples", "acc_mlp_real_pct", "inception_score_std_splits", "accuracy", "fidd"]
)
def test_what_ranks_nothing(by):
    assert direction(by) is None


def test_a_metric_without_a_known_direction_is_refused(tmp_path):
    ran(tmp_path, "dpgan", 50.0, brightness_gap=0.5)
    ran(tmp_path, "dp_merf", 50.0, brightness_gap=0.1)
    lines = [LINES["dpgan"], LINES["dp_merf"]]
    misspelt = replace(board(*lines), leaderboard=LeaderboardSpec(by="fdi"))
    for table, message in (
        (misspelt, "among the table's metrics, fid, got 'fdi'"),
        (board(*lines, by="fdi"), "a metric whose direction is known .*fid.*, got 'fdi'"),
        (board(*lines, by="fdi", better="lower"), "a metric that a run has .*brightness_gap.*, got 'fdi'"),
        (board(*lines, by="brightness_gap"), "leaderboard.better"),
        (board(*lines, by="fid", better="higher"), "leaderboard.better lower for fid, got 'higher'"),
    ):
        with pytest.raises(ValueError, match=message):
            assemble("t", table, tmp_path)
    with pytest.raises(ValueError, match=r"leaderboard\.better: expected 'lower' or 'higher' or null, got 'less'"):
        board(*lines, by="brightness_gap", better="less")
    for better, first in (("lower", "dp_merf"), ("higher", "dpgan")):
        assert next(iter(places(tmp_path, board(*lines, by="brightness_gap", better=better)))) == first


def test_a_value_that_is_not_finite_gets_no_place(tmp_path):
    ran(tmp_path, "dp_merf", float("nan"))
    ran(tmp_path, "dpgan", 50.0)
    ranking = places(tmp_path, board(LINES["dp_merf"], LINES["dpgan"]))
    assert ranking == {"dpgan": ("1", "measured"), "dp_merf": ("–", "measured; no place: FID is no finite number")}


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ("privacy.relation=add_remove", "relation"),
        ("privacy.delta=1e-6", "delta"),
        ("privacy.accountant=rdp", "accountant"),
        ("protocol=standard_2k", "protocol"),
    ],
)
def test_lines_that_are_not_comparable_are_refused(tmp_path, other, key):
    words = [word for word in LINES["dpgan"].split() if word.split("=")[0] != other.split("=")[0]]
    other_line = " ".join([*words, other])
    with pytest.raises(ValueError, match=f"expected one {key} for all lines of a leaderboard"):
        assemble("t", board(LINES["dp_merf"], other_line), tmp_path)


def test_fidelity_is_measured_for_the_first_seed_of_each_line_of_the_league_and_for_three_more_settings():
    first = [re.sub(r"seed=\S+", "seed=0", line) for line in load_table("league_mnist").sweeps]
    *lines, without_texture, debiased, authors = load_table("league_fidelity").sweeps
    assert lines == first
    assert without_texture == first[0].replace("seed=0", "method.texture=0 method.threshold=0.15 seed=0")
    league = next(line for line in first if "dp_sinkhorn" in line).replace("privacy.epsilon=1,10", "privacy.epsilon=10")
    (settings, own) = (compose_config(line.split()).method for line in (debiased, league))
    assert {key for key in own if own[key] != settings[key]} == {"p", "cost"}
    assert compose_config(authors.split()).init.name == "none"
    league = next(line for line in first if "dp_cgan" in line).replace("privacy.epsilon=1,10", "privacy.epsilon=10")
    (settings, own) = (compose_config(line.split()).method for line in (authors, league))
    assert {key for key in own if own[key] != settings[key]} == {"steps", "pretraining"}


def test_fidelity_on_fashion_mnist_is_that_of_the_first_seed_of_each_line_and_of_dp_gauss_without_texture():
    first = [re.sub(r"seed=\S+", "seed=0", line) for line in load_table("league_fashion_mnist").sweeps]
    *lines, without_texture = load_table("league_fidelity_fashion_mnist").sweeps
    assert lines == first
    assert without_texture == first[0].replace("seed=0", "method.texture=0 method.threshold=0.15 seed=0")


@pytest.mark.parametrize(
    "name", ["league_mnist", "league_fashion_mnist", "league_fidelity", "league_fidelity_fashion_mnist"]
)
def test_the_league_has_every_method_at_both_epsilons_and_comparable_lines(tmp_path, name):
    table = load_table(name)
    assemble(name, table, tmp_path)  # raises if they are not comparable
    specs = [spec for row in table_rows(table, tmp_path) for spec in row.specs]
    fashion = name.endswith("fashion_mnist")
    assert {spec.config.dataset.name for spec in specs} == {"fashion_mnist" if fashion else "mnist"}
    of_clients, draw_characters = {"fed_gs_wgan", "fedavg_gan"}, {"sim_pe", "public_fonts"}
    expected = {path.stem for path in (CONF / "method").glob("*.yaml")} - of_clients
    assert {spec.config.method.name for spec in specs} == expected - (draw_characters if fashion else set())
    ends = {"real_data", "public_fonts", "uniform_noise"}
    budgets = {(spec.config.method.name, spec.config.privacy.epsilon) for spec in specs}
    private = {method for method, _ in budgets} - ends
    assert {(method, epsilon) for method in private for epsilon in (1, 10)} <= budgets


def test_lines_that_are_not_better_than_runs_without_records_say_so(tmp_path):
    """A run that makes no release proves epsilon 0, and is the lower end of all groups of its data set."""
    without = f"method=real_data dataset=digits {SHARED} privacy.epsilon=0"  # stands for a method without mechanisms
    lines = {**LINES, "real_data": without}
    for name, fid in (("dp_merf", 100.0), ("dpgan", 50.0), ("dp_sinkhorn", 75.0)):
        ran(tmp_path, name, fid)
    folder = Store(tmp_path).folder(measured(tmp_path, without, "quick", {"fid": {"fid": 75.0, "seconds_x": 1.0}}, 0))
    folder.write_json("ledger.json", ledger(0.0, budget={"epsilon": 0.0, **TERMS}))
    found = places(tmp_path, board(*lines.values()))
    assert list(found) == ["real_data", "dpgan", "dp_sinkhorn", "dp_merf"]
    assert [place for place, _ in found.values()] == ["1", "1", "2", "3"]
    remark = "not better than Real data, which uses no records"
    assert [remark in status for _, status in found.values()] == [False, False, True, True]


@pytest.mark.parametrize(("own", "worse"), [(60.0, False), (80.0, True)])
def test_a_line_is_compared_with_runs_without_records_that_have_its_public_data(tmp_path, own, worse):
    """Of two sets of fonts, the one of the line; a method without fonts is not compared with fonts."""
    lines = {
        "own fonts": f"method=sim_pe dataset=digits {SHARED}",
        "no fonts": LINES["dp_merf"],
        "same": f"method=public_fonts dataset=digits {SHARED} privacy.epsilon=0",
        "better": f"method=public_fonts method.fonts_digest=0123456789abcdef dataset=digits {SHARED} privacy.epsilon=0",
    }
    for (name, line), fid in zip(lines.items(), (own, 90.0, 70.0, 40.0), strict=True):
        folder = Store(tmp_path).folder(measured(tmp_path, line, "quick", {"fid": {"fid": fid, "seconds_x": 1.0}}, 0))
        public = {} if name == "no fonts" else {"public_data": "fonts"}
        zero = {} if name in ("own fonts", "no fonts") else {"budget": {"epsilon": 0.0, **TERMS}}
        folder.write_json("ledger.json", ledger(*([0.0] if zero else []), **zero, **public))
    frame = every_column(assemble("t", board(*lines.values()), tmp_path))
    assert len(frame) == 4
    remarked = [name for name, status in zip(frame["method"], frame["status"], strict=True) if "not better" in status]
    assert remarked == (["sim_pe"] if worse else [])


def test_data_besides_the_records_is_a_column_where_a_line_has_them(tmp_path):
    ran(tmp_path, "dp_merf", 100.0)
    fonts = ran(tmp_path, "dpgan", 50.0, content=ledger(public_data="fonts"))
    frame = every_column(assemble("t", board(*LINES.values()), tmp_path))
    assert dict(zip(frame["method"], frame["public data"], strict=True)) == {
        "dpgan": "fonts",
        "dp_merf": "–",
        "dp_sinkhorn": "–",
    }
    assert list(frame).index("public data") == list(frame).index("relation, δ, by") + 1
    fonts.write_json("ledger.json", ledger())
    assert "public_data" not in long_frame(assemble("t", board(*LINES.values()), tmp_path))

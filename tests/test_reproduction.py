"""When a measured value counts as a reproduction of the published one, and the caveat if it does not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dpgen_bench.store.folders import Store
from dpgen_bench.tables.assembly import assemble
from dpgen_bench.tables.expand import spec_of_job
from dpgen_bench.tables.formats import long_frame, to_markdown
from dpgen_bench.tables.lines import tolerance_of
from dpgen_bench.tables.load import load_table
from dpgen_bench.tables.rows import differing_settings
from tests.table_toys import ROW, RUN, a_table, line_for, measured

VALUES = {"fid": {"fid": 260.0}, "cnn": {"acc_cnn_pct": 40.0}}
REDUCED = RUN.replace("scale=paper", "scale=reduced")


def the_line(tmp_path, entry, **more):
    return line_for(assemble("t", a_table({"of": ROW, **entry}, **more), tmp_path), **ROW)


def caveat(line):
    return {metric: cell.caveat for metric, cell in line.cells.items()}


def test_the_same_run_at_the_papers_scale_counts(tmp_path):
    measured(tmp_path, RUN, "dpgan_revisited", VALUES)
    line = the_line(tmp_path, {"run": RUN})
    assert caveat(line) == {"fid": "", "acc_cnn_pct": ""}
    assert all(cell.is_comparable for cell in line.cells.values())


@pytest.mark.parametrize(
    ("metric", "published", "spread", "expected"),
    [
        ("acc_mlp_pct", 80.0, 0.4, 0.8),  # twice the printed spread
        ("acc_mlp_pct", 80.0, None, 1.5),
        ("acc_mlp_pct", 80.0, 0.0, 1.5),  # a spread that is printed as 0 is rounded
        ("fid", 48.4, 3.0, 6.0),
        ("fid", 48.4, None, 4.84),
        ("inception_score", 9.0, None, 0.9),
    ],
)
def test_the_tolerance_of_a_reproduction(metric, published, spread, expected):
    assert tolerance_of(metric, published, spread) == pytest.approx(expected)


def test_a_reproduction_is_comparable_and_within_the_tolerance(tmp_path):
    """Published FID 251.8 and accuracy 45.0, both without a spread: tolerances are 25.18 and 1.5."""
    measured(tmp_path, RUN, "dpgan_revisited", {"fid": {"fid": 251.8 + 25.1}, "cnn": {"acc_cnn_pct": 46.4}})
    assert [cell.is_reproduction for cell in the_line(tmp_path, {"run": RUN}).cells.values()] == [True, True]
    measured(tmp_path, RUN, "dpgan_revisited", {"fid": {"fid": 251.8 - 25.3}, "cnn": {"acc_cnn_pct": 43.4}}, 1)
    far = the_line(tmp_path, {"run": f"{RUN} seed=1"})
    assert [(cell.is_comparable, cell.is_reproduction) for cell in far.cells.values()] == [(True, False)] * 2


def test_fewer_seeds_than_the_papers_mean_has(tmp_path):
    for seed in (0, 1):
        measured(tmp_path, RUN, "dpgan_revisited", VALUES, seed)
    line = the_line(tmp_path, {"run": f"{RUN} seed=0,1,2"})
    assert caveat(line) == {"fid": "2 of 3 seeds", "acc_cnn_pct": "2 of 3 seeds"}
    measured(tmp_path, RUN, "dpgan_revisited", {"fid": {"fid": 260.0}}, 2)
    assert caveat(the_line(tmp_path, {"run": f"{RUN} seed=0,1,2"})) == {"fid": "", "acc_cnn_pct": "2 of 3 seeds"}


def test_other_numbers_of_repeats_than_the_protocols(tmp_path):
    measured(tmp_path, RUN, "dpgan_revisited", VALUES, repeats=2)
    assert caveat(the_line(tmp_path, {"run": RUN}))["fid"] == "2 of 1 repeats"


@pytest.mark.parametrize("bad_value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_has_no_difference_and_does_not_count(tmp_path, bad_value):
    measured(tmp_path, RUN, "dpgan_revisited", {"fid": {"fid": bad_value}})
    built = assemble("t", a_table({"of": ROW, "run": RUN}), tmp_path)
    cell = line_for(built, **ROW).cells["fid"]
    assert (cell.difference, cell.distance, cell.is_reproduction, cell.caveat) == (None, "–", False, "no finite number")
    assert built.count_reproductions().startswith("Of 8 published values, 0 were")
    assert "1 in another way" in built.count_reproductions()


def test_reduced_runs_stand_in_while_the_papers_own_have_no_values(tmp_path):
    """Their values are marked, counted by themselves, and never a reproduction, however near they are."""
    measured(tmp_path, REDUCED, "dpgan_revisited", {"fid": {"fid": 251.8}, "cnn": {"acc_cnn_pct": 40.0}}, 1)
    table = a_table({"of": ROW, "run": RUN, "reduced": f"{REDUCED} seed=1"})
    built = assemble("t", table, tmp_path)
    line = line_for(built, **ROW)
    assert caveat(line) == dict.fromkeys(("fid", "acc_cnn_pct"), "scale reduced (other seed)")
    assert (line.tail["scale"], line.tail["status"]) == ("reduced", "measured")
    assert not any(cell.is_reproduction for cell in line.cells.values())
    text = to_markdown(built)
    assert "| 251.8 (reduced) ³<br>" in text
    assert "| 10 → 9.5 (reduced) |" in text  # which the noise of the claim does not prove
    assert "A marked ε is that of these runs, and says nothing about the published noise." in text
    assert (
        "0 in another way (0 within the tolerance; a note says how), 2 by reduced runs (1 within the tolerance), and 6 "
        "were not measured."
    ) in text
    measured(tmp_path, RUN, "dpgan_revisited", {"fid": {"fid": 260.0}})
    built = assemble("t", table, tmp_path)
    assert caveat(line_for(built, **ROW)) == {"fid": "", "acc_cnn_pct": ""}
    assert "reduced" not in to_markdown(built)
    assert "stands_in" not in long_frame(built)


def test_the_papers_run_by_another_protocol_may_stand_in(tmp_path):
    measured(tmp_path, RUN, "standard_2k", {"fid": {"fid": 260.0}})
    built = assemble("t", a_table({"of": ROW, "run": RUN, "reduced": f"{RUN} protocol=standard_2k"}), tmp_path)
    assert caveat(line_for(built, **ROW))["fid"] == (
        "stands in for the paper's run; protocol standard_2k (the paper's: dpgan_revisited)"
    )
    assert "1 in another way" in built.count_reproductions()
    assert "| 260.0 (by standard_2k) ³<br>" in to_markdown(built)
    assert "10 → 9.5 |" in to_markdown(built)  # the run is the paper's
    assert set(long_frame(built)["stands_in"]) == {"", "by standard_2k"}


def test_another_run_that_stands_in_is_no_reproduction(tmp_path):
    """As the paper's but for its seed, by the paper's protocol, and within the tolerance."""
    measured(tmp_path, RUN, "dpgan_revisited", {"fid": {"fid": 251.8}}, 1)
    built = assemble("t", a_table({"of": ROW, "run": RUN, "reduced": f"{RUN} seed=1"}), tmp_path)
    cell = line_for(built, **ROW).cells["fid"]
    assert (cell.caveat, cell.is_near) == ("stands in for the paper's run (other seed)", True)
    assert not cell.is_comparable
    assert "| 251.8 (another run) ³<br>" in to_markdown(built)
    assert "| 10 → 9.5 (another run) |" in to_markdown(built)


def test_a_run_with_other_settings_that_is_measured_by_another_protocol_is_another_run(tmp_path):
    other = f"{RUN} method.steps=7"
    measured(tmp_path, other, "standard_2k", {"fid": {"fid": 251.8}})
    built = assemble("t", a_table({"of": ROW, "run": RUN, "reduced": f"{other} protocol=standard_2k"}), tmp_path)
    assert line_for(built, **ROW).stands_in == "another run"
    assert "(other steps); protocol standard_2k" in line_for(built, **ROW).cells["fid"].caveat


@pytest.mark.parametrize(
    ("reduced", "got"),
    [("experiment=demo/dpgan", "dpgan on digits"), (f"{RUN} dataset=digits dataset.name=other", "dp_merf on other")],
)
def test_runs_of_another_method_or_data_set_cannot_stand_in(tmp_path, reduced, got):
    with pytest.raises(ValueError, match=f"under `reduced` runs of dp_merf on digits, as under `run`, got {got}"):
        assemble("t", a_table({"of": ROW, "run": RUN, "reduced": reduced}), tmp_path)


def test_what_stands_in_does_not_describe_the_other_runs_of_a_table(tmp_path):
    """Of two measured rows one stands in, with two seeds; the sentence on the table's runs is about the other one."""
    other = {**ROW, "variant": "D_lr/G_lr=1; n_D=1; B=128; sigma=1"}
    for seed in (0, 1):
        measured(tmp_path, REDUCED, "standard_2k", VALUES, seed)
    measured(tmp_path, RUN, "dpgan_revisited", VALUES)
    reduced = f"{REDUCED} seed=0,1 protocol=standard_2k"
    rows = {"of": other, "run": f"{RUN} seed=5", "reduced": reduced}, {"of": ROW, "run": RUN}
    text = to_markdown(assemble("t", a_table(*rows), tmp_path))
    assert "Runs: scale paper; protocol dpgan_revisited; 1 seed;" in text


def test_caveats_of_the_yaml_are_shown(tmp_path):
    """A setting that the paper does not print, of a row; another way of measuring, of the whole table."""
    measured(tmp_path, RUN, "dpgan_revisited", VALUES)
    line = the_line(tmp_path, {"run": RUN, "caveat": "T is our choice"})
    assert caveat(line)["fid"] == "T is our choice"
    assert line.cells["fid"].distance == "+8.2"
    line = the_line(tmp_path, {"run": RUN, "caveat": "T is our choice"}, caveat="classifiers stop early there")
    assert caveat(line)["fid"] == "classifiers stop early there; T is our choice"


def test_a_caveat_may_name_one_metric(tmp_path):
    measured(tmp_path, RUN, "dpgan_revisited", VALUES)
    line = the_line(tmp_path, {"run": RUN}, caveat={"acc_cnn_pct": "another CNN"})
    assert caveat(line) == {"fid": "", "acc_cnn_pct": "another CNN"}


def test_a_caveat_of_a_metric_that_the_table_lacks_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected under `caveat` metrics of the table .*got 'fidd'"):
        the_line(tmp_path, {"run": RUN}, caveat={"fidd": "another"})


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ({"epsilon": {"proven": 12.5}}, "proven 12.5 is above 10"),
        ({"epsilon": {"proven": None}}, "nothing is proven"),
        ({"unproven": ["who knows"]}, "nothing is proven: who knows"),
        ({"budget": {"epsilon": 5.0}}, "its ledger has a budget of 5, not 10"),
        ({"epsilon": {"relation": "replace_one"}}, "its ledger counts by relation replace-one, not add/remove"),
        ({"unit": None}, "its ledger lacks the unit or the budget"),
    ],
)
def test_a_ledger_that_does_not_prove_the_budget_is_shown_and_does_not_count(tmp_path, edit, reason):
    line = RUN + " privacy.relation=add_remove"
    folder = Store(tmp_path).folder(measured(tmp_path, line, "dpgan_revisited", VALUES))
    content = folder.read_json("ledger.json")
    for key, value in edit.items():
        if isinstance(value, dict):
            content[key] |= value
        elif value is None:
            del content[key]
        else:
            content[key] = value
    folder.write_json("ledger.json", content)
    line_found = the_line(tmp_path, {"run": line})
    assert caveat(line_found)["fid"] == reason
    assert line_found.tail["status"] == f"measured; {reason}"


def test_an_uncertain_published_value_is_not_reproduced(tmp_path):
    """DP-Sinkhorn's Table 2: 80.8 is read from 208, as its note says."""
    table = load_table("dp_sinkhorn_table2")
    entry = [entry for entry in table.rows if "semi" not in entry.of["variant"]][-2]
    of, table = entry.of, replace(table, rows=(replace(entry, run=RUN, caveat=None),))
    measured(tmp_path, RUN, "dp_sinkhorn", {"mlp": {"acc_mlp_pct": 80.0}}, repeats=5)
    cell = line_for(assemble("t", table, tmp_path), **of).cells["acc_mlp_pct"]
    assert "what is printed is uncertain" in cell.caveat


def test_a_value_of_a_metric_that_the_protocol_lacks_does_not_count(tmp_path):
    measured(tmp_path, RUN, "dpgan_revisited", {"other": {"fid": 1.0}})
    assert caveat(the_line(tmp_path, {"run": RUN}))["fid"].startswith("protocol dpgan_revisited")


def test_a_failed_metric_has_no_value_and_an_unfinished_run_has_none_at_all(tmp_path):
    folder = Store(tmp_path).folder(measured(tmp_path, RUN, "dpgan_revisited", VALUES))
    (measurement,) = folder.measurements.all()
    measurement["repeats"][0]["metrics"]["fid"]["status"] = "failed"
    folder.measurements.write(measurement)
    line = the_line(tmp_path, {"run": RUN})
    assert (line.cells["fid"].measured, line.cells["acc_cnn_pct"].measured.mean) == (None, 40.0)
    (folder.path / "DONE").unlink()
    assert the_line(tmp_path, {"run": RUN}).row.measured == []


def test_a_stand_in_says_which_settings_are_others(tmp_path):
    stand_in = REDUCED + " method.steps=7 privacy.relation=replace_one"
    measured(tmp_path, stand_in, "dpgan_revisited", VALUES)
    table = a_table(
        {"of": ROW, "run": RUN, "quick": stand_in}, quick={"protocol": "dpgan_revisited"}, note="True of it."
    )
    built = assemble("t", table, tmp_path, scale="quick")
    cell = line_for(built, **ROW).cells["fid"]
    assert cell.caveat == "scale reduced (other relation, steps)"
    assert set(long_frame(built).query("mean == mean")["reproduction"]) == {"no"}
    assert built.note == "Of the paper's own runs, for which these stand in: True of it."


def test_another_accountant_or_data_set_of_a_stand_in_is_named(tmp_path):
    stand_in = REDUCED + " dataset=mnist privacy.accountant=rdp privacy.epsilon=3"
    one, other = (spec_of_job(line.split(), tmp_path) for line in (RUN, stand_in))
    assert differing_settings(one, one) == []
    assert differing_settings(one, other) == ["dataset", "accountant", "ε budget"]

"""Sweeps expand to runs, and tables are assembled from the runs of a results folder: seeds, repeats, failures."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.outcomes.overview import overview, row
from dpgen_bench.report.written import write_table
from dpgen_bench.store.folders import Store
from dpgen_bench.store.statistics import t_interval
from dpgen_bench.tables.assembly import assemble
from dpgen_bench.tables.expand import expand
from dpgen_bench.tables.formats import long_frame, to_markdown
from tests.table_toys import every_column, fake_run, table_of, write_demo


def test_expansion_is_hydras_own():
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    sweep = "experiment=demo/dp_merf privacy.epsilon=1,10,inf seed=0,1 method.lr=0.1"
    expected = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(sweep.split()), None)[0]
    assert sorted(map(sorted, expand(sweep))) == sorted(map(sorted, expected))
    assert len(expand(sweep)) == 6


def test_a_table_separates_repeats_from_seeds_and_leaves_out_other_protocols(tmp_path):
    """Seeds' means 90 and 94, within them deviations of 1 and 3 (n - 1: 2 and 18): pooled sqrt(10) = 3.2."""
    sweeps = ["experiment=demo/dp_merf privacy.epsilon=1,10 seed=0,1 protocol=quick protocol.repeats=2"]
    table = table_of(sweeps=sweeps, metrics=["acc_logreg_pct"])
    first = ["experiment=demo/dp_merf", "privacy.epsilon=10", "protocol=quick", "protocol.repeats=2"]
    fake_run(tmp_path, [*first, "seed=0"], [89.0, 91.0])
    fake_run(tmp_path, [*first, "seed=1"], [91.0, 97.0])
    other = build_spec(compose_config([*first, "protocol.num_samples=1000"])).protocol_record()
    fake_run(tmp_path, ["experiment=demo/dp_merf", "privacy.epsilon=1", "protocol=quick", "seed=0"], 99.0, other)
    one, ten, *_ = every_column(assemble("demo", table, tmp_path)).to_dict("records")
    assert ten["acc_logreg_pct"] == "92.0 ± 2.8 (repeats ± 3.2)"
    assert (one["acc_logreg_pct"], one["seeds"]) == ("–", "0")
    assert one["status"] == "0 measured, 1 finished but not measured by this protocol, 1 not run"


def test_a_run_that_two_sweeps_name_is_one_run(tmp_path):
    run = "experiment=demo/dp_merf privacy.epsilon=10"
    fake_run(tmp_path, [*run.split(), "protocol=quick", "seed=0"], 90.0)
    sweeps = [f"{run} seed=0", f"{run} seed=0,1", f"{run} seed=0 protocol=quick protocol.repeats=3"]
    table = table_of(sweeps=sweeps, metrics=["acc_logreg_pct"])
    once, thrice = every_column(assemble("demo", table, tmp_path)).to_dict("records")
    assert (once["acc_logreg_pct"], once["seeds"], once["status"]) == ("90.0", "1", "1 measured, 1 not run")
    assert (thrice["acc_logreg_pct"], thrice["seeds"]) == ("90.0 (1 of 3 repeats)", "1")  # the first of the three


def test_a_misspelt_metric_is_refused_once_runs_are_measured_and_a_new_one_is_not(tmp_path):
    run = "experiment=demo/dp_merf privacy.epsilon=10 seed=0"
    table = table_of(sweeps=[run], metrics=["acc_logreg_pct", "acc_logrge_pct", "brightness"])
    assemble("t", table, tmp_path)
    fake_run(tmp_path, [*run.split(), "protocol=quick"], 90.0)
    with pytest.raises(ValueError, match=r"got 'acc_logrge_pct', which no run .* \(did you mean 'acc_logreg_pct'\?\)"):
        assemble("t", table, tmp_path)
    assemble("t", replace(table, metrics=("acc_logreg_pct", "brightness")), tmp_path)


def test_a_cell_names_the_number_of_seeds_that_have_the_metric(tmp_path):
    first = ["experiment=demo/dp_merf", "privacy.epsilon=10", "protocol=quick"]
    fake_run(tmp_path, [*first, "seed=0"], 90.0)
    run = Store(tmp_path).folder(fake_run(tmp_path, [*first, "seed=1"], 94.0))
    (measurement,) = run.measurements.all()
    measurement["repeats"][0]["metrics"]["logreg"] |= {"status": "failed", "values": {}, "reason": "no"}
    run.measurements.write(measurement)
    table = table_of(sweeps=["experiment=demo/dp_merf privacy.epsilon=10 seed=0,1"], metrics=["acc_logreg_pct"])
    built = assemble("demo", table, tmp_path)
    (line,) = every_column(built).to_dict("records")
    assert line["acc_logreg_pct"] == "90.0 (1 of 2 seeds)"
    assert "logreg: failed: no" in built.rows[0].notes()
    assert "not measured: logreg" in "".join(row(overview(run)))


def test_a_cell_names_the_number_of_repeats_that_have_the_metric(tmp_path):
    """The first of three drawings, measured by another protocol, next to a metric that has all three."""
    line = ["experiment=demo/dp_merf", "privacy.epsilon=10", "protocol=quick"]
    once = build_spec(compose_config([*line, "seed=0", "~protocol.metrics.mlp"])).protocol_record()
    run = Store(tmp_path).folder(fake_run(tmp_path, [*line, "seed=0"], 90.0, {**once, "name": "once"}))
    whole = build_spec(compose_config([*line, "protocol.repeats=3"])).protocol_record()
    mlp = {"status": "measured", "values": {"acc_mlp_pct": 80.0}, "reason": None, "notes": []}
    repeats = [{"seed": repeat, "samples": {"notes": []}, "metrics": {"mlp": mlp}} for repeat in range(3)]
    thrice = {**whole, "metrics": {"mlp": whole["metrics"]["mlp"]}}
    run.measurements.write({"protocol": thrice, "repeats": repeats, "complete": True})
    metrics = ["acc_logreg_pct", "acc_mlp_pct"]
    built = assemble("t", table_of(sweeps=[f"{' '.join(line)} protocol.repeats=3 seed=0"], metrics=metrics), tmp_path)
    (shown,) = every_column(built).to_dict("records")
    assert [shown[metric] for metric in metrics] == ["90.0 (1 of 3 repeats)", "80.0 (repeats ± 0.0)"]
    assert "1 of 3 repeats measured." in to_markdown(built)


def test_a_table_shows_the_settings_its_rows_differ_in(tmp_path):
    sweeps = ["experiment=demo/dp_merf method.steps=100,200", "experiment=demo/dpgan"]
    table = table_of(sweeps=sweeps, settings=["steps", "n_d"], metrics=["acc_logreg_pct"])
    built = assemble("demo", table, tmp_path)
    frame = every_column(built)
    assert list(frame["steps"]) == ["100", "200", "900"]
    assert list(frame["n_d"]) == ["–", "–", "1"]
    assert list(long_frame(built)["steps"]) == ["100", "200", "900"]
    table = replace(table, settings=("stepz",))
    with pytest.raises(ValueError, match="settings of methods or keys of the config, got 'stepz'"):
        assemble("demo", table, tmp_path)


def test_a_row_may_name_another_protocol_and_says_so(tmp_path):
    table = table_of(
        sweeps=["experiment=demo/dp_merf", "experiment=demo/dp_merf protocol=standard_utility"],
        metrics=["acc_logreg_pct"],
    )
    frame = every_column(assemble("demo", table, tmp_path))
    assert list(frame["protocol"]) == ["quick", "standard_utility"]


def test_a_table_with_missing_failed_and_measured_runs(tmp_path, monkeypatch):
    table = write_demo(tmp_path, monkeypatch)
    first = ["experiment=demo/dp_merf", "privacy.epsilon=10", "protocol=quick"]
    fake_run(tmp_path, [*first, "seed=0"], 90.0)
    fake_run(tmp_path, [*first, "seed=1"], 94.0)
    fake_run(tmp_path, ["experiment=demo/dp_merf", "privacy.epsilon=1", "protocol=quick", "seed=0"], None)
    frame = every_column(assemble("demo", table, tmp_path))
    by = {(line["method"], line["ε budget"]): line for line in frame.to_dict("records")}
    assert list(by) == [
        ("dp_merf", "1"),
        *((method, epsilon) for method in ("dp_merf", "dpgan", "dp_sinkhorn", "gs_wgan") for epsilon in ("10", "inf")),
    ]
    ten = by["dp_merf", "10"]
    assert ten["acc_logreg_pct"] == "92.0 ± 2.8"  # mean and std (n - 1) of 90 and 94
    assert (ten["ε proven"], ten["ε claimed"], ten["seeds"], ten["status"]) == ("9.5", "–", "2", "measured in part")
    assert by["dp_merf", "1"]["status"] == "0 measured, 1 failed: train: RuntimeError: no, 1 not run"
    assert by["dpgan", "inf"]["status"] == "not run"
    assert by["dpgan", "inf"]["acc_logreg_pct"] == "–"
    write_table("demo", tmp_path, "paper", ["md", "csv"])
    assert "- DP-MERF, Digits, ε = 10: logreg: few" in (tmp_path / "tables" / "demo.md").read_text()
    csv = pd.read_csv(tmp_path / "tables" / "demo.csv")
    (line,) = csv[(csv.metric == "acc_logreg_pct") & (csv.seeds == 2)].to_dict("records")
    assert (line["mean"], line["ci95_over"], line["protocol"]) == (92.0, "seeds", "quick")
    assert (line["ci95_low"], line["ci95_high"]) == pytest.approx(t_interval([90.0, 94.0]))
    before = (tmp_path / "tables" / "demo.md").read_bytes()
    write_table("demo", tmp_path, "paper", ["md", "csv"])
    assert (tmp_path / "tables" / "demo.md").read_bytes() == before

"""Tables of papers: published and measured values, their difference, and whether it counts as a reproduction."""

from __future__ import annotations

import io
import shutil

import pandas as pd
import pytest
from omegaconf import OmegaConf

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.report.written import to_html, write_table
from dpgen_bench.store.folders import Store
from dpgen_bench.tables import formats
from dpgen_bench.tables.assembly import assemble
from dpgen_bench.tables.expand import jobs_of, lines_of, parent_ids
from dpgen_bench.tables.formats import long_frame, to_csv, to_markdown
from dpgen_bench.tables.latex import to_latex
from dpgen_bench.tables.layout import lay_out
from dpgen_bench.tables.load import load_table
from dpgen_bench.tables.names import table_names
from dpgen_bench.tables.rows import TableRow
from tests.table_toys import ROW, RUN, a_table, every_column, line_for, measured, paper_table, table_of


def test_a_published_value_a_measured_value_and_their_difference(tmp_path):
    """Measured 260 and 262, published 251.8: mean 261, difference +9.2; accuracy 40 against 45.0: -5."""
    for seed, fid in ((0, 260.0), (1, 262.0)):
        measured(tmp_path, RUN, "dpgan_revisited", {"fid": {"fid": fid}, "cnn": {"acc_cnn_pct": 40.0}}, seed)
    built = assemble("t", a_table({"of": ROW, "run": f"{RUN} seed=0,1"}), tmp_path)
    line = line_for(built, **ROW)
    fid = line.cells["fid"]
    assert (fid.published, fid.measured.mean, fid.difference, fid.is_reproduction) == (
        251.8,
        261.0,
        pytest.approx(9.2),
        True,
    )
    assert (fid.printed, fid.text, fid.distance) == ("251.8", "261.0 ± 1.4", "+9.2")
    assert line.cells["acc_cnn_pct"].printed == "45.0"  # as printed, not 45
    cnn = line.cells["acc_cnn_pct"]
    assert (cnn.distance, cnn.is_comparable, cnn.is_near, cnn.is_reproduction) == ("−5.0", True, False, False)
    assert cnn.why_no_reproduction == "the difference exceeds the tolerance, 1.5"
    assert (line.tail["status"], line.tail["seeds"]) == ("measured", "2")
    assert (line.head["ε proven"], line.head["ε claimed"], line.head["ε published"]) == ("9.5", "10", "10")
    others = [other for other in built.lines if other is not line]
    assert len(built.lines) == 4
    assert {other.tail["status"] for other in others} == {"not implemented"}
    assert built.count_reproductions() == (
        "Of 8 published values, 2 were measured at the paper's scale and by its protocol (1 within the tolerance), 0 "
        "in another way (0 within the tolerance; a note says how), and 6 were not measured. The tolerance is twice the "
        "printed spread or, where none or 0 is printed, 1.5 points of an accuracy and 10% of another value."
    )


def test_another_scale_or_protocol_is_marked_and_never_a_reproduction(tmp_path):
    measured_values = {"fid": {"fid": 260.0}, "cnn": {"acc_cnn_pct": 40.0}}
    reduced = RUN.replace("scale=paper", "scale=reduced")
    measured(tmp_path, reduced, "dpgan_revisited", measured_values)
    built = assemble("t", a_table({"of": ROW, "run": reduced}), tmp_path)
    cell = line_for(built, **ROW).cells["fid"]
    assert (cell.is_reproduction, cell.caveat, cell.distance) == (False, "scale reduced", "+8.2")
    assert lay_out(built).notes[-1] == "No reproduction: scale reduced."
    assert "0 were measured at the paper's scale" in built.count_reproductions()
    assert set(long_frame(built).query("mean == mean")["reproduction"]) == {"no"}


def test_another_protocol_is_named(tmp_path):
    measured(tmp_path, RUN, "standard_2k", {"fid": {"fid": 260.0}})
    built = assemble("t", a_table({"of": ROW, "run": f"{RUN} protocol=standard_2k"}), tmp_path)
    assert line_for(built, **ROW).cells["fid"].caveat == "protocol standard_2k (the paper's: dpgan_revisited)"


def test_what_a_part_of_the_papers_protocol_measured_counts(tmp_path):
    """dpgan_revisited_utility draws the same samples and has the same CNN: its value counts for the whole protocol."""
    measured(tmp_path, RUN, "dpgan_revisited_utility", {"cnn": {"acc_cnn_pct": 40.0}})
    table = a_table({"of": ROW, "run": RUN})
    line = line_for(assemble("t", table, tmp_path), **ROW)
    assert line.cells["acc_cnn_pct"].is_comparable
    assert line.cells["fid"].measured is None
    assert line.tail["protocol"] == "dpgan_revisited (values of dpgan_revisited_utility)"
    # A value of the whole protocol precedes that of a part.
    measured(tmp_path, RUN, "dpgan_revisited", {"fid": {"fid": 1.0}, "cnn": {"acc_cnn_pct": 50.0}})
    assert line_for(assemble("t", table, tmp_path), **ROW).cells["acc_cnn_pct"].measured.mean == 50.0


def test_what_others_reported_is_no_reproduction_under_this_papers_protocol(tmp_path):
    """Table 2 of "Private GANs, Revisited" prints DP-Sinkhorn's values as Cao et al. measured them."""
    measured(tmp_path, RUN, "dpgan_revisited", {"fid": {"fid": 48.4}})
    of = {"method": "DP-Sinkhorn", "dataset": "MNIST"}
    table = a_table({"of": of, "run": RUN}, published="2")
    line = line_for(assemble("t", table, tmp_path), **of)
    assert (line.cells["fid"].published, line.cells["fid"].is_reproduction) == (48.4, False)
    assert line.cells["fid"].caveat == ("the published value is as reported by Cao et al. 2021, by their own protocol")
    assert line.tail["status"] == "measured in part"


def test_a_part_that_draws_other_samples_does_not_count(tmp_path):
    run_id = measured(tmp_path, RUN, "dpgan_revisited_utility", {"cnn": {"acc_cnn_pct": 40.0}})
    measurements = Store(tmp_path).folder(run_id).measurements
    (measurement,) = measurements.all()
    measurements.file_of(measurement["protocol"]).unlink()
    measurements.write({**measurement, "protocol": {**measurement["protocol"], "num_samples": 59999}})
    assert line_for(assemble("t", a_table({"of": ROW, "run": RUN}), tmp_path), **ROW).row.measured == []


def test_fid_by_another_tool_is_not_shown_and_what_the_texts_share_is(tmp_path):
    """Measured by a changed protocol with another FID tool: its accuracy counts for the protocol, its FID does not."""
    run_id = measured(tmp_path, RUN, "dpgan_revisited", {"fid": {"fid": 260.0}, "cnn": {"acc_cnn_pct": 40.0}})
    measurements = Store(tmp_path).folder(run_id).measurements
    (measurement,) = measurements.all()
    measurements.file_of(measurement["protocol"]).unlink()
    metrics = measurement["protocol"]["metrics"]
    other = {**metrics, "fid": {**metrics["fid"], "tool": "tensorflow1"}}
    measurements.write({**measurement, "protocol": {**measurement["protocol"], "metrics": other}})
    line = line_for(assemble("t", a_table({"of": ROW, "run": RUN}), tmp_path), **ROW)
    assert line.cells["fid"].measured is None
    assert (line.cells["acc_cnn_pct"].measured.mean, line.cells["acc_cnn_pct"].is_comparable) == (40.0, True)
    assert line.tail["protocol"] == "dpgan_revisited (values of another text of it)"
    assert line.tail["status"] == "measured in part"


def test_missing_failed_damaged_and_duplicate_runs(tmp_path):
    measured_values = {"fid": {"fid": 260.0}, "cnn": {"acc_cnn_pct": 40.0}}
    first = measured(tmp_path, RUN, "dpgan_revisited", measured_values, 0)
    second = measured(tmp_path, RUN, "dpgan_revisited", measured_values, 1)
    third = measured(tmp_path, RUN, "dpgan_revisited", measured_values, 2)
    store = Store(tmp_path)
    shutil.copytree(store.folder(first).path, tmp_path / "runs" / f"{first} (copy)")  # a copy next to it is ignored
    shutil.rmtree(store.folder(second).path)
    shutil.copytree(store.folder(first).path, store.folder(second).path)  # another run's content under a run's name
    (store.folder(third).path / "ledger.json").write_text("{")
    failing = build_spec(compose_config([*RUN.split(), "seed=3", f"results={tmp_path}"]))
    folder = store.folder(failing.id)
    folder.path.mkdir()
    folder.mark("failed", "train", ValueError("cannot read /home/someone/data/x.bin\nand more"))
    built = assemble("t", a_table({"of": ROW, "run": f"{RUN} seed=0,1,2,3,4"}), tmp_path)
    line = line_for(built, **ROW)
    assert line.cells["fid"].text == "260.0"
    assert line.tail["status"] == (
        f"1 measured, 1 damaged: it holds run {first}, 1 damaged: ledger.json cannot be read, "
        "1 failed: train: ValueError: cannot read [path], 1 not run"
    )
    for text in (to_markdown(built), to_csv(built), to_html(built), to_latex(built)):
        assert "/home/someone" not in text


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("identity.json", None, "its identity.json is missing, so it is unknown which run it is"),
        ("identity.json", "[]", "identity.json is not a JSON object"),
        ("ledger.json", "null", "ledger.json is not a JSON object"),
        ("training.json", '"x"', "training.json is not a JSON object"),
    ],
)
def test_a_folder_with_unexpected_content_is_damaged_and_does_not_hide_others(tmp_path, name, content, problem):
    measured_values = {"fid": {"fid": 260.0}, "cnn": {"acc_cnn_pct": 40.0}}
    path = Store(tmp_path).folder(measured(tmp_path, RUN, "dpgan_revisited", measured_values, 0)).path / name
    measured(tmp_path, RUN, "dpgan_revisited", measured_values, 1)
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    line = line_for(assemble("t", a_table({"of": ROW, "run": f"{RUN} seed=0,1"}), tmp_path), **ROW)
    assert line.tail["status"] == f"1 measured, 1 damaged: {problem}"


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ([{"of": {**ROW, "method": "Our DPGAM"}, "run": RUN}], f"table t: .*name a printed row.*closest are {ROW}"),
        (
            [{"of": {"methods": "Our DPGAN"}, "run": RUN}],
            r"table t: .*of a printed row \(dataset, method, .*got \['methods'\] \(did you mean 'method'\?\); correct",
        ),
        ([{"of": {"cells": "Our DPGAN"}, "run": RUN}], r"of a printed row.*got \['cells'\]"),
        ([{"of": ROW, "run": RUN}, {"of": ROW, "why": "so"}], "to be named once"),
        ([{"of": ROW}], "`run` and `why`.*got neither"),
        ([{"of": ROW, "run": f"{RUN} privacy.delta=1e-5,1e-6"}], "differ in their seed alone"),
    ],
)
def test_a_yaml_that_contradicts_itself(entries, complaint, tmp_path):
    with pytest.raises(ValueError, match=complaint):
        assemble("t", a_table(*entries), tmp_path)


def test_paper_without_table(tmp_path):
    table = a_table(published=None)
    with pytest.raises(ValueError, match="`paper` and `published` both"):
        assemble("t", table, tmp_path)


def test_a_row_that_cannot_be_run_says_why_and_a_blank_is_illegible(tmp_path):
    """Final DP-Sinkhorn, Table 2: the row of the L2 cost is lost in the text at hand."""
    lost = {"variant": "perturb=image; loss=L2 (inferred); debias=none"}
    table = a_table(
        {"of": lost, "why": "its loss is unknown"}, paper="dp_sinkhorn_final", published="2", protocol="dp_sinkhorn"
    )
    built = assemble("t", table, tmp_path)
    line = line_for(built, **lost)
    assert line.tail["status"] == "not run: its loss is unknown"
    assert {cell.printed for cell in line.cells.values()} == {"not legible in the source"}
    assert r"\[illegible\]" in to_markdown(built)


def test_quick_takes_the_stand_in_or_the_run_at_scale_quick():
    table = a_table(
        {"of": ROW, "run": f"{RUN} seed=0", "quick": "experiment=demo/dpgan seed=0,1"},
        {"of": {"variant": "D_lr/G_lr=1; n_D=1; B=128; sigma=1"}, "run": RUN},
        {"of": {"variant": "D_lr/G_lr=10; n_D=1; B=128; sigma=1"}, "why": "no"},
        quick={"protocol": "quick"},
    )
    assert lines_of(table, "quick") == [
        "experiment=demo/dpgan seed=0,1 protocol=quick",
        f"{RUN} protocol=quick scale=quick",
    ]
    assert lines_of(table, "paper")[0] == f"{RUN} seed=0 protocol=dpgan_revisited"
    with pytest.raises(
        ValueError, match="expected scale=paper or scale=quick, or scale=reduced for a sweep, got 'full'"
    ):
        lines_of(table, "full")


def test_parents_stand_for_the_ids_of_runs_that_need_not_be_there(tmp_path):
    table = table_of(
        parents={"pretrain": "experiment=demo/dpgan privacy.epsilon=inf runtime.keep_steps=[100]"},
        sweeps=["experiment=demo/dpgan privacy.epsilon=inf restart={run:@pretrain,checkpoint:step-100} seed=0,1"],
        metrics=["acc_mlp_pct"],
    )
    parent = build_spec(compose_config(["experiment=demo/dpgan", "privacy.epsilon=inf", f"results={tmp_path}"])).id
    assert parent_ids(table, tmp_path) == {"pretrain": parent}
    built = assemble("t", table, tmp_path)
    (row,) = built.rows
    assert [spec.training["restart"] for spec in row.specs] == [{"run": parent, "checkpoint": "step-100"}] * 2
    assert row.status() == "not run"
    with pytest.raises(ValueError, match=r"after @ the name of a parent of the table \(pretrain\), got @other"):
        jobs_of("restart={run:@other}", {"pretrain": parent})


def test_the_four_formats(tmp_path):
    measured(tmp_path, RUN, "dpgan_revisited", {"fid": {"fid": 260.0}, "cnn": {"acc_cnn_pct": 40.0}})
    built = assemble("t", a_table({"of": ROW, "run": RUN}, note="50% & <b>more</b> of a|b_c"), tmp_path)
    markdown, latex, page = to_markdown(built), to_latex(built), to_html(built)
    header, _, *lines = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in [header, *lines]} == {header.count("|")}
    assert header == "| Method | ε claimed → proven | FID\u00a0↓ | Acc. CNN (%)\u00a0↑ |"
    assert r"| 260.0<br>\[251.8, +8.2\]" in markdown
    assert "D\\_lr/G\\_lr=5" in latex
    assert "50\\% \\& \\textless{}b\\textgreater{}more" in latex
    assert "&lt;b&gt;more&lt;/b&gt;" in page
    assert "<b>" not in page
    csv = pd.read_csv(io.StringIO(to_csv(built)))
    (line,) = csv.query("metric == 'fid' and seeds == 1").to_dict("records")
    assert (line["published"], line["mean"], line["reproduction"]) == (251.8, 260.0, "yes")
    assert line["difference"] == pytest.approx(8.2)
    assert len(csv) == 8


def test_lines_without_a_printed_row_precede_the_printed_ones(tmp_path):
    built = assemble("t", a_table({"of": ROW, "why": "no"}, sweeps=[f"{RUN} seed=0"], settings=["steps"]), tmp_path)
    frame = every_column(built)
    names = ["method", "variant", "steps", "dataset", "ε published", "δ published", "ε budget"]
    assert list(frame.iloc[0][names]) == ["dp_merf", "–", "200", "digits", "–", "–", "10"]
    assert list(frame.iloc[1][names])[1:] == ["D_lr/G_lr=1; n_D=1; B=128; sigma=1", "–", "MNIST", "10", "1e-05", "–"]


def test_files_are_the_same_again_and_of_the_formats_asked_for(tmp_path, monkeypatch):
    (tmp_path / "conf" / "table").mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(paper_table({"of": ROW, "run": RUN})), tmp_path / "conf" / "table" / "toy8.yaml")
    monkeypatch.setattr("dpgen_bench.tables.names.CONF", tmp_path / "conf")
    assert table_names() == ["toy8"]
    measured(tmp_path, RUN, "dpgan_revisited", {"fid": {"fid": 260.0}})
    wrote = write_table("toy8", tmp_path, "paper", formats.FORMATS, quiet=True)
    assert [path.suffix for path in wrote] == [".md", ".tex", ".csv", ".html"]
    before = [path.read_bytes() for path in wrote]
    for path in (tmp_path / "runs").rglob("*"):
        path.touch()
    write_table("toy8", tmp_path, "paper", formats.FORMATS, quiet=True)
    assert [path.read_bytes() for path in wrote] == before
    assert write_table("toy8", tmp_path, "quick", ["md", "csv"], quiet=True) == []
    with pytest.raises(ValueError, match="expected formats md,tex,csv,html, got pdf"):
        write_table("toy8", tmp_path, "paper", ["pdf"])


def test_names_come_with_numbers_as_numbers():
    names = table_names()
    assert names.index("dpgan_figure2") < names.index("dpgan_figure14")


def test_a_rows_epsilon_is_that_of_its_measured_runs(tmp_path):
    measured(tmp_path, RUN, "dpgan_revisited", {"fid": {"fid": 260.0}})
    (row,) = assemble("t", a_table({"of": ROW, "run": RUN}), tmp_path).rows
    assert isinstance(row, TableRow)
    assert (row.epsilon_value("proven"), row.epsilon_value("server")) == (9.5, None)


def test_an_unknown_table(tmp_path):
    for name in ("nothing", "../experiment/dpgan/gan", ""):
        with pytest.raises(ValueError, match=r"expected the name of a table in conf/table"):
            load_table(name)

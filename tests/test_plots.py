"""Plots of runs: each kind on synthetic run folders. The text of an SVG shows what was drawn."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from dpgen_bench.plots import draw as draw_module
from dpgen_bench.plots.draw import KINDS, draw, drawings
from dpgen_bench.plots.errorbars import half_width
from dpgen_bench.plots.parts import averaged, epsilon_text, label_of, order_of, value_of
from dpgen_bench.tables.plot_spec import PLOT_KINDS, NormsSpec
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.tables.spec import TableSpec
from tests.plot_cases import keep_step, make_run, row_of, write_log, write_samples
from tests.table_toys import table_of

DPGAN = "experiment=demo/dpgan"
DC = "http://purl.org/dc/elements/1.1/"


def table(plot: Any, **more: Any) -> TableSpec:
    return table_of(**{"title": "A made table", "plot": plot, **more})


def texts(path: Path) -> list[str]:
    """The texts of an SVG, each with its parts (mathtext has several) put together."""
    root = ElementTree.parse(path).getroot()
    words = ["".join(part.itertext()) for part in root.iter() if part.tag.endswith("}text")]
    return [" ".join(word.split()) for word in words]


def drawn(results: Path, plot: Any, rows: Sequence[TableRow], **more: Any) -> tuple[list[str], str]:
    """The texts in the one plot that is drawn, and its caption, which is not in it; both its files are checked."""
    (one,) = drawings("made", table(plot, **more), rows, results)
    pdf, svg = one.paths
    assert (pdf, svg) == (results / "plots" / "made.pdf", results / "plots" / "made.svg")
    content = pdf.read_bytes()
    assert content.startswith(b"%PDF")
    assert b"/FontFile2" in content  # TrueType: publishers refuse Type 3
    width = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+)", content)
    assert float(width[1]) in (244.8, 504.0)  # one or two columns, in points
    assert re.search(rb"Matplotlib|CreationDate", content) is None
    assert re.search(rb"Matplotlib v\d|<dc:date>", svg.read_bytes()) is None
    assert "A made table" not in texts(svg)
    assert not any(line in texts(svg) for line in one.caption)
    title, description = (
        ElementTree.parse(svg).getroot().find(f".//{{{DC}}}{key}") for key in ("title", "description")
    )
    assert (title.text, description.text) == ("A made table", " ".join(one.caption))
    return texts(svg), " ".join(one.caption)


def n_d_rows(results: Path, values: Sequence[Any] = (1, 10, "adaptive"), **more: Any) -> list[TableRow]:
    rows = []
    for i, value in enumerate(values):
        lines = [f"{DPGAN} method.n_d={value} privacy.epsilon=10 seed={seed}" for seed in (0, 1)]
        for seed, line in enumerate(lines):
            make_run(results, line, {"fid": 100.0 - 10 * i + seed, "acc_cnn_pct": 50.0 + i}, proven=9.5, claimed=12.3)
        rows.append(row_of(results, *lines))
    return rows


def test_a_curve_says_what_it_shows(tmp_path: Path) -> None:
    plot = {"kind": "curve", "x": "method.n_d", "y": ["fid", "acc_cnn_pct"], "log_x": True}
    found, together = drawn(tmp_path, plot, n_d_rows(tmp_path))
    assert found.count("adaptive") == 2  # a tick of each panel
    assert {"FID", "accuracy, CNN (%)", "1", "10"} <= set(found)
    for words in (
        "Scale demo; protocol quick; 2 seeds each",
        "ε proven 9.5 (add/remove, δ = 1e-05)",
        "counts 12.3",
        "Not a reproduction: no paper has this picture; scale demo.",
        "points of fewer than 3 seeds have no bar",
    ):
        assert words in together


def test_a_curve_over_a_cost_has_points_at_mean_costs_and_round_ticks(tmp_path: Path) -> None:
    """Seeds of 11 and 13, and of 111 and 113 seconds; runs without the cost are left out, and the caption says so."""
    rows = n_d_rows(tmp_path)
    for row, seconds in zip(rows[:2], (11.0, 111.0), strict=True):
        for seed, folder in enumerate(row.folders):
            folder.write_json("training.json", {"seconds": {"train": seconds + 2.0 * seed}})
    assert [value_of(row, "seconds_total") for row in rows] == [12.0, 112.0, None]
    plot = {"kind": "curve", "x": "seconds_total", "y": "fid", "series": "method.n_d", "log_x": True}
    found, together = drawn(tmp_path, plot, rows)
    assert {"training time (s)", "30", "100"} <= set(found)
    assert not {"12", "112"} & set(found)
    assert "Left out: 1 row without training time (s)." in together


def test_bars_are_intervals_over_three_seeds_or_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """t(0.975; 2) = 4.302653: half the width is t s / sqrt(n) with s = 1; two seeds have no bar."""
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / math.sqrt(3.0), rel=1e-6)
    assert math.isnan(half_width([1.0, 3.0]))
    pictures: list[Any] = []
    monkeypatch.setattr(draw_module, "_save", lambda picture, stem, title: pictures.append(picture) or [])
    rows = []
    for n_d, fids in ((1, (1.0, 2.0, 3.0)), (2, (5.0, 6.0))):
        lines = [f"{DPGAN} method.n_d={n_d} privacy.epsilon=10 seed={seed}" for seed in range(len(fids))]
        for line, fid in zip(lines, fids, strict=True):
            make_run(tmp_path, line, {"fid": fid}, proven=9.5)
        rows.append(row_of(tmp_path, *lines))
    draw("made", table({"kind": "curve", "x": "method.n_d", "y": "fid"}), rows, tmp_path)
    (bars,) = pictures[0].figure.axes[0].collections
    drawn_bars = [segment[:, 1] for segment in bars.get_segments() if len(segment) and np.isfinite(segment).all()]
    half = half_width([1.0, 2.0, 3.0])
    assert drawn_bars == [pytest.approx([2.0 - half, 2.0 + half])]


def test_lines_are_named_by_what_sets_them_apart_and_never_join_protocols(tmp_path: Path) -> None:
    rows = []
    for words in ("method.d_d=8", "method.d_d=16", "method.d_d=16 protocol=standard_utility"):
        for n_d in (1, 2):
            line = f"{DPGAN} method.n_d={n_d} {words}"
            if "protocol" in words:  # the same run, measured again
                rows.append(row_of(tmp_path, line))
                folder, spec = rows[-1].folders[0], rows[-1].specs[0]
                measurement = next(iter(folder.measurements.all()))
                folder.measurements.write({**measurement, "protocol": spec.protocol_record()})
                rows[-1] = row_of(tmp_path, line)
            else:
                make_run(tmp_path, line, {"fid": 9.0})
                rows.append(row_of(tmp_path, line))
    plot = {"kind": "curve", "x": "method.n_d", "y": "fid", "series": "method.d_d"}
    found, _ = drawn(tmp_path, plot, rows)
    assert sum("standard_utility" in word and "16" in word for word in found) == 1
    assert sum(word.endswith(", quick") for word in found) == 2


def test_two_rows_at_one_place_of_a_line_are_an_error(tmp_path: Path) -> None:
    rows = []
    for d_d in (8, 16):
        make_run(tmp_path, f"{DPGAN} method.d_d={d_d}", {"fid": 9.0})
        rows.append(row_of(tmp_path, f"{DPGAN} method.d_d={d_d}"))
    with pytest.raises(ValueError, match=r"one row for each value of method\.n_d"):
        draw("made", table({"kind": "curve", "x": "method.n_d", "y": "fid"}), rows, tmp_path)


def test_privacy_and_utility_has_infinity_at_the_right(tmp_path: Path) -> None:
    rows = []
    for method in ("dpgan", "dp_merf"):
        for budget in (1, 10, "inf"):
            line = f"experiment=demo/{method} privacy.epsilon={budget}"
            proven = budget if budget == "inf" else 0.99999 * budget
            make_run(tmp_path, line, {"acc_mlp_pct": 50.0}, proven=proven, claimed=None if method == "dp_merf" else 2.0)
            rows.append(row_of(tmp_path, line))
    found, together = drawn(tmp_path, {"kind": "privacy_utility", "y": "acc_mlp_pct"}, rows)
    assert {"1", "10", "∞", "DPGAN", "DP-MERF", "accuracy, MLP (%)"} <= set(found)
    assert "ε proven 1, 10, ∞" in together
    # DP-MERF's runs have no claim, and are left out of an axis of claims; the caption says so.
    claims = {"kind": "privacy_utility", "epsilon": "claimed", "y": "acc_mlp_pct", "series": "privacy.epsilon"}
    found, together = drawn(tmp_path, claims, rows)
    assert "Left out: 3 rows without ε claimed by the paper's count." in together
    assert "ε claimed by the paper's count" in found


def test_a_caption_warns_of_relations_that_are_not_comparable(tmp_path: Path) -> None:
    rows = []
    for relation in ("add_remove", "replace_one"):
        line = f"{DPGAN} privacy.epsilon=10 privacy.relation={relation}"
        make_run(tmp_path, line, {"fid": 9.0}, proven=10.0)
        rows.append(row_of(tmp_path, line))
    plot = {"kind": "privacy_utility", "y": "fid", "series": "privacy.relation"}
    _, together = drawn(tmp_path, plot, rows)
    assert "An ε under replace-one is not comparable" in together


def test_steps_have_a_second_axis_of_what_was_spent(tmp_path: Path) -> None:
    rows = n_d_rows(tmp_path, (1, 2))
    for row in rows:
        for folder, spec in zip(row.folders, row.specs, strict=True):
            line = f"{DPGAN} method.n_d={spec.config.method.n_d} privacy.epsilon=10 seed={spec.seed}"
            for step in (100, 200):
                keep_step(folder, line, step, 0.01 * step, {"fid": 300.0 - step})
    plot = {"kind": "steps", "y": "fid", "series": "method.n_d"}
    found, together = drawn(tmp_path, plot, rows)
    assert {"1", "2", "9.5"} <= set(found)  # at 100, at 200, and of the whole run
    assert "ε proven for the steps so far" in found
    assert "Scale demo" in together
    # Steps over n_D: 100 and 50 generator steps are at different epsilons, and no axis can say so.
    found, together = drawn(tmp_path, {**plot, "per": "method.n_d", "x_label": "generator steps"}, rows)
    assert "ε proven for the steps so far" not in found
    assert "generator steps" in found
    assert "Lines differ in the ε spent by a step" in together


def test_a_log_is_drawn_with_a_damaged_line_and_averaged(tmp_path: Path) -> None:
    rows = n_d_rows(tmp_path, (1, 2))
    for row in rows:
        for folder in row.folders:
            values = [{"step": i, "d_accuracy_on_fakes": 0.5, "n_d": 1} for i in range(30)]
            write_log(folder, [{"phase": "start"}, *values], end='{"step": 30, "d_accuracy_on')
    assert len(rows[0].folders[0].log_values("d_accuracy_on_fakes")) == 30
    plot = {"kind": "log", "y": "d_accuracy_on_fakes", "ema": 0.95, "series": "method.n_d", "x_max": 20}
    found, together = drawn(tmp_path, {**plot, "x_label": "generator steps"}, rows)
    assert "generator steps" in found
    assert {"accuracy of the", "discriminator on fakes"} <= set(found)
    assert "decay 0.95" in together
    with pytest.raises(ValueError, match=r"plot\.ema: expected a number in \[0, 1\), got 1\.0"):
        draw("made", table({**plot, "ema": 1.0}), rows, tmp_path)


def test_samples_stand_by_class_with_epsilon_above(tmp_path: Path) -> None:
    rows = n_d_rows(tmp_path, (1, 2))
    write_samples(rows[0].folders[1])  # the first seed has none: the second is shown
    (rows[1].folders[0].path / "samples.npz").write_bytes(b"no archive")
    found, together = drawn(tmp_path, {"kind": "samples", "per_class": 3}, rows, settings=["n_d"])
    assert "ε proven 9.5 (claimed 12.3), seed 1" in found
    assert "DPGAN, Digits, n_D = 1" in found
    assert f"The samples of run {rows[1].folders[0].id} cannot be read" in together


def test_norms_are_drawn_for_public_data_alone(tmp_path: Path) -> None:
    rows = []
    for noise in ("seeded", "os"):
        line = f"{DPGAN} privacy.diagnostics=unsafe privacy.noise={noise}"
        folder = make_run(tmp_path, line, {"fid": 9.0})
        (folder.path / "private").mkdir()
        lines = [{"mechanism": "query", "release": i, "norms_before_clipping": [0.5, 2.0]} for i in range(5)]
        content = "".join(json.dumps(one) + "\n" for one in lines) + '{"mechanism'
        (folder.path / "private" / "diagnostics.jsonl").write_text(content)
        rows.append(row_of(tmp_path, line))
    found, together = drawn(tmp_path, {"kind": "norms"}, rows)
    assert {"C = 1", "ε proven ∞"} <= set(found)
    assert any("10 rows; median 1.25, 50% clipped" in word for word in found)
    assert "Left out: 1 run with privacy.noise=os" in together
    assert draw("alone", table({"kind": "norms"}), rows[1:], tmp_path) == []


def test_bias_and_variance_need_no_run(tmp_path: Path) -> None:
    plot = {"kind": "bias_variance", "p": [0.0, 1.0], "pool": [1, None], "n": 4, "batches": 3}
    found, together = drawn(tmp_path, plot, [])
    assert {"1", "80"} <= set(found)  # images per class
    assert "No run: gradients over 3 batches of 4 real and 4 generated images of Digits" in together
    assert "Not a reproduction" in together


def test_the_same_runs_give_the_same_bytes_under_every_user_style(tmp_path: Path) -> None:
    import matplotlib

    rows = n_d_rows(tmp_path)
    for row in rows:
        write_samples(row.folders[0])
    plot = [{"kind": "curve", "x": "method.n_d", "y": "fid"}, {"kind": "samples", "per_class": 2}]
    files = draw("made", table(plot), rows, tmp_path)
    assert [path.name for path in files] == ["made-1.pdf", "made-1.svg", "made-2.pdf", "made-2.svg"]
    before = [path.read_bytes() for path in files]
    with matplotlib.rc_context({"font.size": 20.0, "svg.fonttype": "path", "lines.linewidth": 9.0}):
        draw("made", table(plot), rows, tmp_path)
        assert matplotlib.rcParams["font.size"] == 20.0
    assert [path.read_bytes() for path in files] == before


@pytest.mark.parametrize(
    "plot",
    [
        {"kind": "curve", "x": "method.n_d", "y": "fid"},
        {"kind": "privacy_utility", "y": "fid"},
        {"kind": "steps", "y": "fid"},
        {"kind": "log", "y": "d_accuracy_on_fakes"},
        {"kind": "samples"},
        {"kind": "norms"},
    ],
    ids=lambda plot: plot["kind"],
)
def test_nothing_to_draw_makes_no_file(tmp_path: Path, plot: dict[str, Any]) -> None:
    make_run(tmp_path, DPGAN, {"acc_mlp_pct": 9.0})  # measured, but nothing that is asked for
    rows = [row_of(tmp_path, DPGAN), row_of(tmp_path, f"{DPGAN} seed=7")]
    assert draw("made", table(plot), rows, tmp_path) == []
    assert draw("made", table(plot), [], tmp_path) == []
    assert not (tmp_path / "plots").exists()


def test_only_some_rows_of_a_table(tmp_path: Path) -> None:
    rows = n_d_rows(tmp_path)
    plot = {"kind": "curve", "x": "method.n_d", "y": "fid", "only": {"method.n_d": [1, "adaptive"]}}
    found, _ = drawn(tmp_path, plot, rows)
    assert {"1", "adaptive"} <= set(found)
    assert "10" not in found
    assert draw("none", table({**plot, "only": {"method.n_d": 3}}), rows, tmp_path) == []


@pytest.mark.parametrize(
    ("plot", "message"),
    [
        ({"kind": "pie"}, "table t, plot: expected an entry with a kind among curve, privacy_utility"),
        (
            {"kind": "curve", "x": "method.n_d", "y": "fid", "colour": 1},
            r"expected keys among .*got \['colour'\]",
        ),
        ({"kind": "curve", "y": "fid"}, r"plot of kind curve: expected the keys y, x, got none of \['x'\]; add them"),
        ({"kind": "log", "y": []}, r"plot\.y: expected one metric or more"),
        ({"kind": "curve", "x": "method.n_d", "y": "fid", "log_x": "yes"}, r"plot\.log_x: expected true or false, got"),
        (
            {"kind": "curve", "x": "method.n_d", "y": "fid", "panel": ["seed", "seed"]},
            r"plot\.panel: expected a string",
        ),
        ({"kind": "samples", "only": "seed"}, r"plot\.only: expected a mapping"),
        ({"kind": "curve", "x": "method.nd", "y": "fid"}, r"method\.nd"),
        ({"kind": "curve", "x": "method.n_d", "y": "fid", "series": "method.width"}, r"method\.width"),
        ({"kind": "curve", "x": "method.n_d", "y": "fid", "only": {"method.width": 1}}, r"method\.width"),
        (
            {"kind": "privacy_utility", "y": "fid", "epsilon": "server"},
            r"plot\.epsilon: expected 'proven' or 'claimed'",
        ),
        ({"kind": "steps", "y": "fid", "per": "method.nd"}, r"method\.nd"),
        ({"kind": "samples", "per_class": 0}, r"plot\.per_class: expected a number in \[1, inf\), got 0"),
    ],
)
def test_a_plot_that_cannot_be_is_refused(tmp_path: Path, plot: dict[str, Any], message: str) -> None:
    make_run(tmp_path, DPGAN, {"fid": 9.0})
    with pytest.raises(ValueError, match=message):
        draw("made", table(plot), [row_of(tmp_path, DPGAN)], tmp_path)


def test_a_key_may_be_that_of_a_row_that_is_not_measured_yet(tmp_path: Path) -> None:
    make_run(tmp_path, DPGAN, {"fid": 9.0})
    rows = [row_of(tmp_path, DPGAN), row_of(tmp_path, "experiment=demo/dp_merf")]
    plot = {"kind": "privacy_utility", "y": "fid", "series": ["method.name", "method.features"]}
    assert len(draw("made", table(plot), rows, tmp_path)) == 2


def test_plots_are_one_or_several() -> None:
    assert table(None).plot == ()
    assert table({"kind": "norms"}).plot == (NormsSpec(),)
    assert [entry.kind for entry in table([{"kind": "norms"}, {"kind": "samples"}]).plot] == ["norms", "samples"]


def test_every_kind_of_plot_is_drawn_by_a_function() -> None:
    assert set(KINDS) == set(PLOT_KINDS)


def test_values_of_a_row(tmp_path: Path) -> None:
    make_run(tmp_path, DPGAN, {"fid": 9.0}, proven=3.25, claimed=None)
    row = row_of(tmp_path, DPGAN)
    assert value_of(row, "epsilon_proven") == 3.25
    assert value_of(row, "epsilon_claimed") is None
    assert value_of(row, "dataset.name") == "digits"
    assert value_of(row, "method.nothing") is None


def test_order_average_and_words() -> None:
    assert order_of(["b", 10, 2.0, math.inf, None, 2, "a"]) == [2, 10, math.inf, "a", "b", None]
    assert averaged(np.array([1.0, 0.0, 0.0]), 0.5).tolist() == [1.0, 0.5, 0.25]
    assert averaged(np.array([0.3, 0.7]), 0.0).tolist() == [0.3, 0.7]
    assert averaged(np.array([1.0, math.inf, 0.0]), 0.5).tolist() == [1.0, math.inf, math.inf]
    assert [epsilon_text(value) for value in (0.99999, 9.9635, 610.3, 999.7, 1352.9, math.inf)] == [
        "1",
        "9.96",
        "610",
        "1,000",
        "1,353",
        "∞",
    ]
    labels = {"acc_cnn_pct": "accuracy, CNN (%)", "acc_calibrated_pct": "calibrated accuracy, average (%)"}
    labels |= {
        "acc_avg_pct": "accuracy, average (%)",
        "acc_linear_svc_calibrated_pct": "calibrated accuracy, linear SVC (%)",
    }
    assert {name: label_of(name) for name in labels} == labels
    assert (label_of("method.n_d"), label_of("method.n_d", plain=True)) == ("$n_{D}$", "n_D")

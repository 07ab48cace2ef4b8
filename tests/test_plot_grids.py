"""Sample grids, in which each row of the table has a place, and the level of chance in plots of accuracies."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpgen_bench.plots import draw as draw_module
from dpgen_bench.plots.chance import chance_levels
from dpgen_bench.plots.draw import draw
from dpgen_bench.plots.grids import samples
from dpgen_bench.store.pictures import montage
from dpgen_bench.tables.rows import TableRow
from tests.plot_cases import make_run, row_of, write_samples
from tests.test_plots import DPGAN, n_d_rows, table


def sample_panels(
    results: Path, monkeypatch: pytest.MonkeyPatch, rows: Sequence[TableRow], **more: Any
) -> list[list[tuple[str, str, bool]]]:
    """Of each panel of a sample grid, row by row: its title, the words in it, and whether images are drawn."""
    figures: list[Any] = []
    monkeypatch.setattr(draw_module, "_save", lambda picture, stem, title: figures.append(picture.figure) or [])
    draw("made", table({"kind": "samples", "per_class": 1}, **more), rows, results)
    panels: dict[int, list[tuple[str, str, bool]]] = {}
    for panel in figures[0].axes:
        words = " ".join(text.get_text() for text in panel.texts).replace("\n", " ")
        title = " ".join(panel.get_title().split())
        images = bool(panel.images) and panel.images[0].get_array().ndim == 2
        panels.setdefault(panel.get_subplotspec().rowspan.start, []).append((title, words, images))
    return [panels[row] for row in sorted(panels)]


def test_sample_grids_have_a_column_for_a_method_and_a_row_for_an_epsilon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Methods in the table's order, budgets increasing; steps that change with the budget do not split a column."""
    rows = []
    runs = (("dpgan", 10, 300), ("dpgan", "inf", 400), ("dp_merf", 10, 0), ("dp_merf", "inf", 0), ("dp_merf", 1, 0))
    for method, budget, steps in runs:
        line = f"experiment=demo/{method} privacy.epsilon={budget}" + (f" method.steps={steps}" if steps else "")
        if method == "dpgan" or budget == "inf":  # the others were not run
            write_samples(make_run(tmp_path, line, {"fid": 9.0}, proven=budget))
        rows.append(row_of(tmp_path, line))
    first, second = sample_panels(tmp_path, monkeypatch, rows, settings=["steps"])  # none of ε = 1 has samples
    assert [(title.split(",")[0], images) for title, _, images in first] == [("DPGAN", True), ("DP-MERF", False)]
    assert first[0][0] == "DPGAN, Digits, T = 300 ε proven 10, seed 0"
    assert first[1][:2] == ("DP-MERF, Digits, T = 200 no samples", "ε budget 10: not run")
    assert [(title.split(",")[0], images) for title, _, images in second] == [("DPGAN", True), ("DP-MERF", True)]


def test_methods_without_samples_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"experiment=demo/{method} privacy.epsilon=1" for method in ("dp_merf", "dpgan", "gs_wgan")]
    write_samples(make_run(tmp_path, lines[0], {"fid": 9.0}, proven=1))
    rows = [row_of(tmp_path, line) for line in lines]
    ((only,),) = sample_panels(tmp_path, monkeypatch, rows)
    assert only[0].startswith("DP-MERF")
    one = table({"kind": "samples", "per_class": 1})
    assert "Left out: 2 methods without samples." in " ".join(samples(one.plot[0], one, rows).caption)


def test_rows_of_one_epsilon_never_share_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = n_d_rows(tmp_path, (1, 2, 3))
    for row in rows:
        write_samples(row.folders[0])
    with_names = sample_panels(tmp_path, monkeypatch, rows, settings=["n_d"])
    assert [title.split(" ε")[0] for title, _, _ in with_names[0]] == [f"DPGAN, Digits, n_D = {n}" for n in (1, 2, 3)]
    (without,) = sample_panels(tmp_path, monkeypatch, rows)  # nothing tells them apart, and none is dropped
    assert [images for _, _, images in without] == [True] * 3


def test_a_first_stage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for init in ("none", "gauss", "central_images"):
        line = f"experiment=demo/dpgan privacy.epsilon=10 init={init}"
        write_samples(make_run(tmp_path, line, {"fid": 9.0}, proven=10))
        rows.append(row_of(tmp_path, line))
    (panels,) = sample_panels(tmp_path, monkeypatch, rows, settings=["init"])
    names = ["DPGAN, Digits", "DPGAN, Digits, init = gauss", "DPGAN, Digits, init = central_images"]
    assert [title.split(" ε")[0] for title, _, _ in panels] == names


def test_a_montage_has_a_column_for_each_class(tmp_path: Path) -> None:
    images = np.arange(6, dtype=np.float32)[:, None, None, None] * np.ones((6, 3, 4, 5), np.float32) * 10.4
    np.savez(tmp_path / "samples.npz", images=images, labels=np.array([2, 0, 2, 0, 2, 0]))
    picture = montage(tmp_path / "samples.npz", 2)
    assert picture.shape == (2 * 5 - 1, 3 * 6 - 1, 3)
    cells = [[int(picture[5 * i, 6 * j, 0]) for j in range(3)] for i in range(2)]
    assert cells == [[10, 128, 0], [31, 128, 21]]  # 10.4, 31.2; class 1 has none; 0, 20.8: rounded
    assert (picture[4] == 128).all()


def test_accuracies_start_at_zero_and_show_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits have ten classes; calibrated accuracies and FIDs have no common level of chance."""
    drawn_figures = []
    monkeypatch.setattr(draw_module, "_save", lambda picture, stem, title: drawn_figures.append(picture.figure) or [])
    line = f"{DPGAN} privacy.epsilon=10"
    make_run(tmp_path, line, {"acc_mlp_pct": 91.0, "acc_mlp_calibrated_pct": 95.0, "fid": 9.0}, proven=9.9)
    plot = {"kind": "privacy_utility", "y": ["acc_mlp_pct", "acc_mlp_calibrated_pct", "fid"]}
    draw("made", table(plot), [row_of(tmp_path, line)], tmp_path)
    plain, calibrated, fid = drawn_figures[0].axes
    assert [panel.get_ylim()[0] for panel in (plain, calibrated, fid)] == [0.0, 0.0, 0.0]
    assert plain.get_ylim()[1] > 91.0
    levels = [line.get_ydata()[0] for line in plain.lines if line.get_ydata()[0] == line.get_ydata()[-1] == 10.0]
    assert levels == [10.0]
    (chance,) = plain.texts
    assert chance.get_text() == "chance 10 %"
    drawn_figures[0].draw_without_rendering()
    assert chance.get_window_extent().x0 > plain.get_window_extent().x1  # where no marker can be
    assert chance.get_window_extent().x1 < calibrated.get_tightbbox().x0
    assert not calibrated.texts
    assert not fid.texts


def test_lines_without_a_place_in_a_leaderboard_have_hollow_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At ε = 1 one of two seeds is measured, at 5 more than 5 is proven; other tables have no places."""
    pictures: list[Any] = []
    monkeypatch.setattr(draw_module, "_save", lambda picture, stem, title: pictures.append(picture) or [])
    rows = []
    for budget, seeds, proven in ((1, (0, 1), 0.999), (5, (0,), 6.0), (10, (0,), 9.99)):
        lines = [f"{DPGAN} privacy.epsilon={budget} seed={seed}" for seed in seeds]
        make_run(tmp_path, lines[0], {"fid": 9.0 + budget}, proven=proven)
        rows.append(row_of(tmp_path, *lines))
    plot = {"kind": "privacy_utility", "y": "fid"}
    draw("made", table(plot), rows, tmp_path)
    draw("made", table(plot, leaderboard={"by": "fid"}), rows, tmp_path)
    hollow = [
        {x for line in one.figure.axes[0].lines if line.get_markerfacecolor() == "white" for x in line.get_xdata()}
        for one in pictures
    ]
    assert hollow == [set(), {0.999, 6.0}]
    captions = [" ".join(one.caption) for one in pictures]
    assert ["Hollow" in words for words in captions] == [False, True]
    assert "Hollow: 2 lines without a place; the table says why." in captions[1]


def test_a_long_legend_makes_the_figure_higher_and_names_what_lines_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line is named by its method and by the settings that its method has, a folder by its last part."""
    pictures: list[Any] = []
    monkeypatch.setattr(draw_module, "_save", lambda picture, stem, title: pictures.append(picture) or [])
    lines = [f"{DPGAN} privacy.epsilon=10 method.n_d={n_d}" for n_d in range(1, 10)]
    lines.append(f"method=public_fonts dataset=digits method.fonts={tmp_path}/faces")
    rows = [row_of(tmp_path, line) for line in lines]
    for line in lines:
        make_run(tmp_path, line, {"fid": 9.0}, proven=0 if "fonts" in line else 10)
    plot = {"kind": "privacy_utility", "y": "fid", "series": ["method.name", "method.n_d", "method.fonts"]}
    draw("few", table(plot), rows[-2:], tmp_path)
    draw("many", table(plot), rows, tmp_path)
    few, many = (one.figure for one in pictures)
    names = [text.get_text() for text in few.legends[0].get_texts()]
    assert [name.split(", ")[:2] for name in names] == [["DPGAN", "n_D = 9"], ["Public fonts", "fonts = faces"]]
    assert len(many.legends[0].get_texts()) == 10
    assert many.get_figheight() > few.get_figheight()


def test_levels_of_chance(tmp_path: Path) -> None:
    rows = [row_of(tmp_path, DPGAN), row_of(tmp_path, f"{DPGAN} dataset=celeba_gender")]
    assert chance_levels("acc_cnn_pct", rows[:1]) == [10.0]
    assert chance_levels("acc_avg_pct", rows) == [50.0, 10.0]
    assert chance_levels("d_accuracy_on_fakes", rows) == [0.5]
    assert chance_levels("acc_calibrated_pct", rows) == chance_levels("fid", rows) == []


def test_a_dataset_whose_files_are_missing_has_no_chance_level(tmp_path: Path) -> None:
    """The classes of a folder of images are its folders."""
    for name in ("train/one", "train/two", "train/three", "test/one", "test/two", "test/three"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / name / "0.png")
    overrides = f"dataset=image_folder dataset.path={tmp_path} dataset.image_size=8 dataset.channels=1"
    row = row_of(tmp_path, f"{DPGAN} {overrides}")
    assert chance_levels("acc_cnn_pct", [row]) == [pytest.approx(100 / 3)]
    shutil.rmtree(tmp_path / "train")
    assert chance_levels("acc_cnn_pct", [row]) == []

"""The caption of a plot: the runs in it, those left out, and why it is not a reproduction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpgen_bench.plots.captions import caption
from dpgen_bench.plots.draw import drawings
from dpgen_bench.tables.rows import TableRow
from tests.plot_cases import make_run, row_of, write_log, write_samples
from tests.test_plots import DPGAN, drawn, n_d_rows, table


def of_paper(results: Path, plot: Any, lines: Sequence[TableRow], **more: Any) -> str:
    """The caption of a paper's figure."""
    of_figure = table(plot, **{"title": "A paper, Figure 3, FID", "protocol": "quick", **more})
    (one,) = drawings("made", of_figure, lines, results)
    return " ".join(one.caption)


def test_only_a_paper_s_figure_at_its_scale_by_its_protocol_may_be_a_reproduction(tmp_path: Path) -> None:
    line, reduced = f"{DPGAN} scale=paper privacy.epsilon=inf", f"{DPGAN} method.n_d=2 privacy.epsilon=inf"
    folder = make_run(tmp_path, line, {"fid": 3.0})
    make_run(tmp_path, reduced, {"fid": 4.0})
    plot, rows = {"kind": "curve", "x": "method.n_d", "y": "fid"}, [row_of(tmp_path, line)]
    caption_text = of_paper(tmp_path, plot, rows)
    assert "Scale paper; protocol quick; 1 seed each; ε proven ∞" in caption_text
    assert "Not a reproduction" not in caption_text
    for more, why in (
        ({"title": "Leaderboard"}, "no paper has this picture."),
        ({"protocol": "standard_utility"}, "protocol quick (the paper's: standard_utility)."),
        ({"caveat": "its learning rate is not printed"}, "its learning rate is not printed."),
        ({"caveat": {"fid": "another network"}}, "another network."),
        ({"rows": [{"of": {}, "run": "x", "caveat": "a choice"}]}, "settings of some rows are not as printed"),
    ):
        assert f"Not a reproduction: {why}" in of_paper(tmp_path, plot, rows, **more)
    mixed = of_paper(tmp_path, {**plot, "series": "scale.name"}, [*rows, row_of(tmp_path, reduced)])
    assert "Scale paper, demo; protocol quick" in mixed
    assert "Not a reproduction: not all lines are of scale paper (1 demo of 2)." in mixed
    folder.write_json("ledger.json", {**folder.read_json("ledger.json"), "budget": {"epsilon": 5.0}})
    assert "Not a reproduction: a ledger does not prove what its run" in of_paper(
        tmp_path, plot, [row_of(tmp_path, line)]
    )


def test_a_log_leaves_out_damaged_runs(tmp_path: Path) -> None:
    rows = n_d_rows(tmp_path, (1, 2))
    for row in rows:
        for folder in row.folders:
            write_log(folder, [{"d_accuracy_on_fakes": 0.5}] * 9)
    (rows[0].folders[0].path / "ledger.json").write_text('{"unit": ')
    plot = {"kind": "log", "y": "d_accuracy_on_fakes", "series": "method.n_d"}
    _, together = drawn(tmp_path, plot, rows)
    assert "1 to 2 seeds each" in together
    assert "ε proven 9.5" in together


def test_a_caption_does_not_ask_damaged_runs(tmp_path: Path) -> None:
    (row,) = n_d_rows(tmp_path, (1,))
    (row.folders[0].path / "ledger.json").write_text('{"unit": ')
    assert "; 1 seed each; ε proven 9.5" in " ".join(caption(table(None), [row], {0: row.folders}, ""))
    assert caption(table(None), [row], {0: row.folders[:1]}, "how") == ("how",)


def test_a_drawing_counts_the_rows_that_are_in_it(tmp_path: Path) -> None:
    rows = [*n_d_rows(tmp_path, (1, 2)), row_of(tmp_path, f"{DPGAN} method.n_d=3 privacy.epsilon=10")]
    write_samples(rows[0].folders[0])
    plots = [{"kind": "curve", "x": "method.n_d", "y": "fid"}, {"kind": "samples"}]
    assert [each.lines for each in drawings("made", table(plots), rows, tmp_path)] == [2, 1]

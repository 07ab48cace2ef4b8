"""The report's curves of privacy and utility, and its counts of the papers' values."""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import replace
from pathlib import Path

from dpgen_bench.report.boards import boards_of
from dpgen_bench.report.curves import best_lines, curves_content
from dpgen_bench.report.papers import bar, count_values, summary
from dpgen_bench.report.runs import read_runs
from dpgen_bench.tables.lines import Line
from dpgen_bench.tables.published import PublishedRow
from tests.report_toys import DEMO, built, cell, make_run, write_report
from tests.table_toys import a_table


def test_curves_join_the_best_line_of_each_method_under_the_same_terms(tmp_path: Path) -> None:
    """At ε = 10 the second setting is better in FID; at ε = 5 alone the protocol differs, which no curve joins."""
    make_run(tmp_path, DEMO, "privacy.epsilon=1", fid=40.0, proven=0.99)
    assert curves_content(boards_of(read_runs(tmp_path))) == []  # a point is no curve
    make_run(tmp_path, DEMO, "privacy.epsilon=10", fid=30.0, proven=9.9)
    make_run(tmp_path, DEMO, "privacy.epsilon=10", "method.features=50", fid=20.0, proven=9.9)
    make_run(tmp_path, DEMO, "privacy.epsilon=inf", fid=10.0)
    other = make_run(tmp_path, DEMO, "privacy.epsilon=5", fid=1.0, proven=4.99)
    (measured,) = other.measurements.all()
    next((other.path / "metrics").glob("*.json")).unlink()
    write_report(other, {**measured["protocol"], "name": "another"}, {"fid": 1.0})
    boards = boards_of(read_runs(tmp_path))
    (content,) = curves_content(boards)
    assert content["dataset"] == "digits"
    assert content["caption"].startswith("Digits, protocol quick: ")
    assert [plot["name"] for plot in content["plots"]] == ["FID", "accuracy, MLP (%)"]
    for plot in content["plots"]:
        assert "DP-MERF" in base64.b64decode(plot["picture"].split(",", 1)[1]).decode()
    curves, protocols = best_lines(boards)
    assert curves["fid"] == {"dp_merf": {1.0: [[40.0]], 10.0: [[20.0]], float("inf"): [[10.0]]}}
    assert protocols == ["quick"]


def test_of_lines_that_share_the_first_place_the_one_with_the_best_mean_is_drawn(tmp_path: Path) -> None:
    """Three seeds cannot tell the two settings apart; each has the better mean at one budget."""
    means = {("1", "100"): 41.0, ("1", "50"): 40.0, ("10", "100"): 20.0, ("10", "50"): 21.0}
    for (epsilon, features), mean in means.items():
        for seed, value in enumerate([mean - 5.0, mean, mean + 5.0]):
            settings = (f"privacy.epsilon={epsilon}", f"method.features={features}", f"seed={seed}")
            make_run(tmp_path, DEMO, *settings, fid=value, proven=0.99 * float(epsilon))
    boards = boards_of(read_runs(tmp_path))
    assert [standing.place_text for board in boards for standing, _ in board.rankings["fid"]] == ["1="] * 4
    drawn = best_lines(boards)[0]["fid"]["dp_merf"]
    assert drawn == {1.0: [[35.0], [40.0], [45.0]], 10.0: [[15.0], [20.0], [25.0]]}


def test_a_printed_value_counts_as_the_best_that_was_measured_of_it_at_any_scale() -> None:
    def row(method: str) -> PublishedRow:
        return PublishedRow("dpgan_revisited", "1", "MNIST", method, "", "10", "1e-5", "this paper", {})

    def line(method: str, **cells) -> Line:
        return Line({"method": method}, cells, {}, printed=row(method))

    paper, quick = built("t", "paper"), built("t", "quick")
    nothing, reproduced = cell(1.0, None), cell(1.0, 1.1, tolerance=0.2)
    paper = replace(
        paper, lines=[line("a", x=reproduced, y=nothing), line("b", x=cell(1.0, 1.3, tolerance=0.2), y=nothing)]
    )
    caveat = cell(1.0, 9.0, "scale quick")
    quick = replace(quick, lines=[line("a", x=caveat, y=caveat), line("b", x=nothing, y=cell(None, 2.0))])
    counts = count_values([paper, quick])
    assert counts == {"full": 1, "far": 1, "some": 1, "none": 1}
    shown = bar(a_table(), "dpgan_table8", "paper", counts)
    assert shown["text"] == (
        "4 values: 1 reproduced, 1 measured as in the paper, outside the tolerance, 1 measured otherwise, 1 not run"
    )
    assert shown["parts"] == [["full", 0.0, 25.0], ["far", 25.0, 25.0], ["some", 50.0, 25.0], ["none", 75.0, 25.0]]
    assert (shown["name"], shown["table"]) == ("Table 8", "dpgan_table8-paper")
    other = bar(a_table(), "t", "quick", Counter(none=1))
    assert (other["name"], other["table"], other["text"]) == ("Table 8 (t)", "t-quick", "1 value: 1 not run")


def test_tables_of_which_nothing_is_measured_have_no_bar_and_are_named() -> None:
    run, unrun = (
        bar(a_table(), name, "paper", counts) for name, counts in (("t", Counter(some=1)), ("u", Counter(none=2)))
    )
    found = summary({"dpgan_revisited": [run, unrun], "gs_wgan": [unrun]})
    (paper,) = found["started"]
    assert (paper["text"], paper["tables"]) == ("3 values: 1 measured otherwise, 2 not run", [run])
    assert [(each["name"][:7], each["tables"]) for each in found["unrun"]] == [
        ("Private", [unrun]),
        ("GS-WGAN", [unrun]),
    ]
    assert found["unrun_count"] == 2

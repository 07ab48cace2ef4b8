"""The tables of the league's page are what `python docs/make_league.py` makes from the tables and the records."""

from __future__ import annotations

import copy
import math
import re
import statistics
from dataclasses import replace

import pandas as pd
import pytest

from docs import make_league as made
from dpgen_bench.config.display import method_name
from dpgen_bench.tables.load import load_table

LINES = {name: made.lines(name) for name in made.LEAGUES.values()}
SEARCHES = ("search_mnist", "search_fashion_mnist")


def test_the_page_is_made_from_the_tables_and_the_records() -> None:
    """After a new record: `make tables`."""
    assert made.PAGE.read_text() == made.page()


@pytest.mark.parametrize("name", LINES)
def test_values_are_those_of_the_table(name: str) -> None:
    """To the ten digits of the CSV."""
    checked = 0
    for line in LINES[name]:
        if line["metric"] in made.ACCURACIES and line["mean"]:
            assert made.accuracies(line)[line["metric"]].mean == pytest.approx(float(line["mean"]), rel=1e-9)
            checked += 1
    assert checked > 10


def test_a_record_measured_twice_by_a_protocol_is_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as `--without cnn` at first, and later with all metrics."""
    line = next(line for line in LINES["league_mnist"] if line["method"] == "dp_merf")
    expected = made.accuracies(line)
    records = made.records_of(line)

    def with_a_part(record: made.Record) -> made.Record:
        (whole,) = (each for each in record.measurements.all() if each["protocol"]["name"] == line["protocol"])
        part = copy.deepcopy(whole)
        for metrics in (part["protocol"]["metrics"], *(repeat["metrics"] for repeat in part["repeats"])):
            del metrics["cnn"]
        return replace(record, content={**record.content, "measurements": [part, *record.content["measurements"]]})

    monkeypatch.setattr(made, "records_of", lambda line: [with_a_part(record) for record in records])
    assert made.accuracies(line) == expected
    assert {summary.seeds for summary in expected.values()} == {len(records)}


@pytest.mark.parametrize("name", LINES)
def test_each_table_stands_between_real_data_and_what_uses_no_records(name: str) -> None:
    parts = made.league("Data", name).split("### ")[1:]
    assert len(parts) == 2  # one for each epsilon
    for text in parts:
        methods = [row.split("|")[2] for row in text.strip().splitlines() if row.startswith("| ")][2:]
        assert "real_data" in methods[0]
        assert "uniform_noise" in methods[-1]


def test_of_a_line_with_a_place_the_proven_epsilon_is_nearly_its_budget_and_never_more() -> None:
    for line in (line for lines in LINES.values() for line in lines):
        if line["place"] != "–" and made.end_of(line) is None:
            proven, budget = float(line["epsilon_proven"]), float(line["epsilon_budget"])
            assert 0.98 * budget <= proven <= budget
            assert 0.0 < float(line["epsilon_add_remove"]) <= proven * (1 + 1e-3)


@pytest.mark.parametrize("title", made.FIDELITIES)
def test_values_of_fidelity_are_those_of_the_table_between_real_data_and_what_uses_no_records(title: str) -> None:
    name = made.FIDELITIES[title]
    frame = pd.read_csv(made.ROOT / "results" / "tables" / f"{name}.csv").dropna(subset="mean")
    means = frame.set_index(["runs", "metric"])["mean"]
    known = {line["runs"]: made.fidelity_values(line) for line in made.lines(name)}
    assert set(known) == set(frame["runs"])
    for (run, metric), mean in means.items():
        assert known[run][metric] == pytest.approx(mean, rel=1e-9)
    rows = [row.strip("| ").split(" | ") for row in made.fidelity(title).splitlines() if row.startswith("| ")][2:]
    assert len({(epsilon, name) for epsilon, name, *_ in rows}) == len(rows) == len(known)
    order = [
        (
            0.0 if "real_data" in row[1] else math.inf if row[0] == made.NONE else float(row[0]),
            math.inf if row[2] == made.NONE else float(row[2]),
        )
        for row in rows
    ]
    assert order[0][0] == 0.0
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("title", "settings_that_differ"), [("MNIST", {"init", "texture", "p"}), ("Fashion-MNIST", {"texture"})]
)
def test_a_line_of_fidelity_is_named_by_the_settings_in_which_it_differs_from_the_leagues_preset(
    title: str, settings_that_differ: set[str]
) -> None:
    league, name = LINES[made.LEAGUES[title]], made.FIDELITIES[title]
    runs = {run for line in league for run in line["runs"].split()}
    settings = load_table(name).settings
    differing = {line["runs"]: made.differing(line, league, settings) for line in made.lines(name)}
    assert {run for run, names in differing.items() if not names} == runs & set(differing)
    assert {name for names in differing.values() for name in names} == settings_that_differ


def test_lines_above_the_limit_are_those_that_the_tables_show_above_it_with_the_seconds_of_each_seed() -> None:
    rows = [row.strip("| ").split(" | ") for row in made.above_the_limit().splitlines() if row.startswith("| ")][2:]
    spent = [[float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*\d", " ".join(row[3:]))] for row in rows]
    lines = [line for lines in LINES.values() for line in lines if made.end_of(line) is None]
    printed = [made.cells(line)[-1].replace(",", "") for line in lines]
    above = [float(text) for text in printed if text.isdecimal() and float(text) > 1200.0]
    assert len(above) > 5
    assert [statistics.fmean(each) for each in spent] == pytest.approx(above, abs=1.0)  # both are rounded


def test_two_seeds_have_no_interval() -> None:
    two, three = made.summarise([[94.0], [96.0]]), made.summarise([[94.0], [95.0], [96.0]])
    assert made.with_interval(two) == "95.0"
    half = 4.302652729911275 / math.sqrt(3.0)  # Student's t at 97.5 % with two degrees of freedom
    assert made.with_interval(three) == f"95.0 [{95.0 - half:.1f},\u00a0{95.0 + half:.1f}]"


def test_the_page_of_presets_counts_the_runs_of_the_searches() -> None:
    """The methods of each row of its table of searches, with the number of their runs in the tables of searches."""
    lines = pd.concat(pd.read_csv(made.ROOT / "results" / "tables" / f"{name}.csv", dtype=str) for name in SEARCHES)
    searches = lines.dropna(subset=["runs"]).drop_duplicates("runs")
    counts = searches["runs"].str.split().str.len().groupby(searches["method"]).sum()
    text = (made.ROOT / "docs" / "league_presets.md").read_text()
    _, rows = text.split("| method | runs | at ε | data |\n")
    stated: dict[str, int] = {}
    for row in rows.split("\n\n")[0].splitlines()[1:]:
        _, methods, number, *_ = (cell.strip() for cell in row.split("|"))
        in_tables = re.search(r"(\d+) in these tables", number) or re.match(r"(\d+)", number)
        assert in_tables is not None, row
        stated |= dict.fromkeys(methods.removesuffix(" (ours)").split(", "), int(in_tables[1]))
    assert stated == {method_name(method): count for method, count in counts.items()}

"""README is short, and its picture shows the committed league."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from docs import make_picture
from docs.make_league import accuracies, end_of, records_of
from dpgen_bench.config.display import method_name
from dpgen_bench.training.cost import cost_values

ROOT = Path(__file__).parent.parent


def test_the_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_picture_shows_the_committed_league():
    """If the table was made again, so must be the picture: `python docs/make_picture.py`."""
    shown = Image.open(make_picture.PICTURE).info["Description"]
    assert shown == make_picture.description(make_picture.lines())
    first = next(line for line in make_picture.lines() if line["place"] != "–" and end_of(line) is None)
    values = " ".join(accuracies(first)[metric].text() for metric in make_picture.METRICS)
    assert f"; {first['place']} {method_name(first['method'])} scale paper 10 – {values}; " in shown


def test_the_picture_stands_between_real_data_and_what_uses_no_records():
    methods = [line["method"] for line in make_picture.lines()]
    assert (methods[0], methods[-1]) == ("real_data", "uniform_noise")


def test_the_picture_prints_values_as_the_table_does():
    table = (ROOT / "results" / "tables" / "league_mnist.md").read_text().replace("*", "")
    shown = [make_picture.texts(line) for line in make_picture.lines()]
    values = [texts[title] for texts in shown for title in make_picture.METRICS.values()]
    assert not [value for value in values if f"| {value} |" not in table]


def test_the_readme_states_the_longest_and_the_shortest_fit_of_the_picture():
    seconds = {}
    for line in make_picture.lines():
        for record in records_of(line) if end_of(line) is None else ():
            cost = cost_values(record.cost)
            seconds[cost.get("cpu_seconds", cost["seconds_total"])] = line["method"]
    longest, shortest = max(seconds), min(seconds)
    text = (ROOT / "README.md").read_text()
    assert f"{longest:,.0f} processor-seconds ({method_name(seconds[longest])})" in text
    assert f"the shortest {shortest:,.0f} ({method_name(seconds[shortest])})" in text


def test_the_picture_is_in_the_readme_and_on_the_first_page():
    path = make_picture.PICTURE.relative_to(ROOT).as_posix()
    assert f"]({path})" in (ROOT / "README.md").read_text()
    assert f"](../{path})" in (ROOT / "docs" / "index.md").read_text()


def test_there_is_a_grid_of_samples_for_each_line_of_the_picture():
    grids = make_picture.grids()
    assert len(grids) == len(make_picture.lines()) >= 2
    assert {grid.shape[:2] for grid in grids} == {(2 * 28 + 1, 10 * 28 + 9)}

"""README is short, and its picture and the leaderboard of docs/tables.md show the committed table."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from docs import make_picture
from dpgen_bench.runs.display import method_name

ROOT = Path(__file__).parent.parent


def test_the_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_picture_shows_the_committed_leaderboard():
    """If the table was made again, so must be the picture: `python docs/make_picture.py`."""
    shown = Image.open(make_picture.PICTURE).info["Description"]
    assert shown == make_picture.description(make_picture.lines())
    assert "1 dp_merf 3000 paper" in shown


def test_the_picture_is_in_the_readme_and_on_the_first_page():
    path = make_picture.PICTURE.relative_to(ROOT).as_posix()
    assert f"]({path})" in (ROOT / "README.md").read_text()
    assert f"](../{path})" in (ROOT / "docs" / "index.md").read_text()


def test_there_is_a_grid_of_samples_for_each_line_of_the_picture():
    grids = make_picture.grids()
    assert len(grids) == len(make_picture.lines()) == 4
    assert {grid.shape[:2] for grid in grids} == {(2 * 28 + 1, 10 * 28 + 9)}


def test_the_leaderboard_of_the_page_on_tables_is_the_committed_one():
    """The page has the places, steps, epsilons and values of results/earlier/leaderboard.md, in the form of a table."""

    def cells(text: str) -> list[list[str]]:
        lines = [line for line in text.splitlines() if line.startswith("|")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]

    page = (ROOT / "docs" / "tables.md").read_text().split("## The leaderboard")[1].split("## The report")[0]
    _, *shown = cells(page)
    head, *whole = cells((ROOT / "results" / "earlier" / "leaderboard.md").read_text())
    expected = []
    for line in (dict(zip(head, cells, strict=True)) for cells in whole):
        epsilon = "∞" if line["ε proven"] == "inf" else f"{line['ε claimed']} → {line['ε proven']}"
        values = [line[name] for name in ("fid", "acc_logreg_pct", "acc_mlp_pct", "seconds_total")]
        expected.append([line["place"], method_name(line["method"]), line["steps"], epsilon, *values])
    assert shown == expected

"""Every method has a page in docs/methods, all pages have one form, and what they state agrees with its source."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from docs import make_results
from docs.make_results import ACCURACIES
from dpgen_bench.config.compose import compose_config

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "methods"
METHODS = sorted(path.stem for path in (ROOT / "conf" / "method").glob("*.yaml"))
HEADINGS = [
    "The paper",
    "Algorithm",
    "Bound",
    "Claimed and proven",
    "Printed and measured",
    "Cost",
    "Deviations from the authors' code",
    "Commands",
]
NO_SETTING = {"name", "_target_", "check", "pretraining"}


def sections(name: str) -> dict[str, str]:
    """The text of a method's page by the headings of its second level."""
    parts = re.split(r"^## (.*)$", (PAGES / f"{name}.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table in a text: the header, then the rows without the line of dashes."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    cells = [[[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()] for block in blocks]
    return [[header, *rows] for header, _, *rows in cells]


def test_every_method_has_a_page_and_a_line_in_the_overview() -> None:
    assert sorted(path.stem for path in PAGES.glob("*.md")) == sorted([*METHODS, "index"])
    linked = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.md\)", (PAGES / "index.md").read_text(), flags=re.MULTILINE)
    assert sorted(linked) == [(name, name) for name in METHODS]


@pytest.mark.parametrize("name", METHODS)
def test_pages_have_the_same_headings_in_the_same_order(name: str) -> None:
    assert list(sections(name)) == HEADINGS
    assert all(text.strip() for text in sections(name).values())


@pytest.mark.parametrize("name", METHODS)
def test_the_algorithm_has_numbered_steps_and_lists_every_setting_with_its_default(name: str) -> None:
    text = sections(name)["Algorithm"]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", text, flags=re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1)) != []
    listed = {row[0].strip("`"): row[2] for table in tables(text) for row in table[1:]}
    config = yaml.safe_load((ROOT / "conf" / "method" / f"{name}.yaml").read_text())
    assert {key: yaml.safe_load(value) for key, value in listed.items()} == {
        key: value for key, value in config.items() if key not in NO_SETTING
    }


@pytest.mark.parametrize("name", METHODS)
def test_the_commands_run_check_and_account_the_method_and_compose(name: str) -> None:
    lines = re.findall(r"^    (dpgen .*)$", sections(name)["Commands"], flags=re.MULTILINE)
    commands = [part.split("#")[0].split() for line in lines for part in line.split("&&")]
    assert {"run", "check", "account"} <= {command[1] for command in commands}
    for _, verb, *arguments in commands:
        if verb in ("tables", "sweep"):
            assert (ROOT / "conf" / "table" / f"{arguments[0]}.yaml").exists(), arguments[0]
        elif verb in ("run", "check", "account") and any("=" in argument for argument in arguments):
            overrides = [each for each in arguments if "=" in each and "," not in each]
            assert compose_config(overrides).method.name == name, arguments


# Values


@cache
def printed_values() -> frozenset[str]:
    """The numbers of results/published, and those that are shares of 1 as percentages."""
    text = "".join(path.read_text() for path in sorted((ROOT / "results" / "published").glob("*.csv")))
    return frozenset(re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", text)) | {
        f"{100 * float(share):.0f}" for share in re.findall(r"_frac,([\d.]+),", text)
    }


@cache
def measured_values() -> frozenset[str]:
    committed = [path for folder in ("tables", "earlier") for path in (ROOT / "results" / folder).glob("*.md")]
    text = "".join(path.read_text() for path in (*sorted(committed), make_results.PAGE))
    return frozenset(re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", text))


@pytest.mark.parametrize("name", METHODS)
def test_printed_values_are_published_and_measured_ones_are_in_a_committed_table(name: str) -> None:
    """Columns with "printed" in their heading hold published values, those with "measured" committed ones."""
    checked = 0
    for header, *rows in tables(sections(name)["Printed and measured"]):
        cells = [pair for row in rows for pair in zip(header, row, strict=True)]
        for column, cell in cells:
            known = printed_values() if "printed" in column else measured_values() if "measured" in column else None
            if known is not None:
                text = re.sub(r"\(Tables? [^)]*\)", "", cell)  # the number of the table
                values = re.findall(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?![\w.])", text)
                assert set(values) <= known, f"{column}: {cell}"
                checked += len(values)
    assert checked


@cache
def measured_by_league() -> list[tuple[str, str, str]]:
    """The method, the data set with ε, and an accuracy of each line of records by `league`: that of the CNN, if any."""
    lines = make_results.measured().items()
    return [
        (
            line[2],
            f"{line[0]}, ε = {line[1]:g}",
            next(make_results.shown(values[a]) for a in ACCURACIES if values.get(a)),
        )
        for line, values in lines
        if line[-1] == make_results.LEAGUE
    ]


@pytest.mark.parametrize("name", METHODS)
def test_a_page_states_the_accuracies_of_its_records(name: str) -> None:
    """After a new record, its value is stated in the section "Printed and measured"."""
    text = sections(name)["Printed and measured"]
    known = [(where, accuracy) for method, where, accuracy in measured_by_league() if method == name]
    assert not [each for each in known if not re.search(rf"(?<![\w.]){re.escape(each[1])}(?!\d|\.\d)", text)]


def test_there_are_records_by_league() -> None:
    assert len(measured_by_league()) > 30

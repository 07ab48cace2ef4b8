"""The pictures on the pages of methods are what `python docs/make_method_epsilons.py` makes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from docs import make_method_epsilons as made

METHODS = made.methods()


@pytest.mark.parametrize("method", METHODS)
def test_a_page_shows_the_values_of_the_records_and_of_the_csv(method: str) -> None:
    """After a new record: `python docs/make_method_epsilons.py`."""
    page = (made.ROOT / "docs" / "methods" / f"{method}.md").read_text()
    assert f"](../../results/pictures/epsilons_{method}.svg)" in page
    root = ElementTree.parse(made.picture(method)).getroot()
    (description,) = root.iter("{http://purl.org/dc/elements/1.1/}description")
    assert description.text == made.description(method)
    assert made.rows(method)
    shown = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert all({*row.texts()[2:]} <= shown for row in made.rows(method))


def test_every_entry_has_one_line_of_values() -> None:
    assert list(made.kept()) == [(entry["method"], entry["label"]) for entry in made.stated()]


@pytest.mark.parametrize("method", METHODS)
def test_no_two_lines_of_a_picture_have_the_same_name(method: str) -> None:
    """A setting of the yaml of which there is a record is shown once."""
    names = [row.texts()[:2] for row in made.rows(method)]
    assert len(names) == len(set(names))


def test_a_picture_has_other_colours_in_dark_mode() -> None:
    text = made.picture("dp_gauss").read_text()
    for light, dark in made.DARK.items():
        assert light in text
        assert f"fill:{dark}" in text
    assert "prefers-color-scheme: dark" in text


def test_certified_values_are_at_most_the_proven_ones_and_methods_with_nothing_to_audit_say_so() -> None:
    rows = [row for method in METHODS for row in made.rows(method)]
    assert not [row for row in rows if row.certified and float(row.certified) > float(row.proven)]
    assert {row.why for row in made.rows("public_fonts")} == {"it makes no release"}
    assert {row.why for row in made.rows("real_data")} == {"its releases have no noise"}


@pytest.mark.slow
@pytest.mark.parametrize("entry", made.stated(), ids=lambda entry: re.sub(r"\W+", "_", str(entry["run"])))
def test_values_are_computed_again(entry: dict[str, str], data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPGEN_DATA", str(data_root))
    computed, kept = made.account(entry), made.kept()[entry["method"], entry["label"]]
    for key in ("claimed", "proven"):
        found, expected = getattr(computed, key), getattr(kept, key)
        assert (found == "") == (expected == "")
        assert not found or float(found) == pytest.approx(float(expected), rel=2e-3), key
    assert not computed.certified or float(computed.certified) == pytest.approx(float(kept.certified), rel=1e-6)
    assert computed.why == kept.why

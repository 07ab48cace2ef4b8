"""Pages and docstrings name sections, files and tests that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("methods/*.md")])
SOURCES = sorted([*ROOT.glob("dpgen_bench/**/*.py"), *ROOT.glob("methods/*.py"), *ROOT.glob("tests/*.py")])


@cache
def headings(page: Path) -> list[str]:
    """The headings of a page, without those that stand in code blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#+ (.*)$", text, re.MULTILINE)


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@cache
def names_of_tests() -> frozenset[str]:
    return frozenset(name for path in SOURCES for name in re.findall(r"def (test_\w+)", path.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_files_and_tests_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        path, _, section = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link} leads nowhere"
        if section:
            assert section in map(anchor, headings(target)), f"{link} names no section"
    missing = set(re.findall(r"`(test_\w+)`", text)) - names_of_tests()
    assert not missing, "tests that do not exist"
    for path in re.findall(r"`((?:tests|dpgen_bench)/[\w/]+\.py)`", text):
        assert (ROOT / path).exists(), path


def test_docstrings_name_sections_that_exist() -> None:
    """They are written as the path of a page, a comma, and the heading in quotation marks."""
    named = set()
    for source in SOURCES:
        text = " ".join(line.strip().removeprefix("# ") for line in source.read_text().splitlines())
        named |= set(re.findall(r'(docs/\w+\.md), "([^"]+)"', text))
    assert len(named) > 5
    assert not [(page, section) for page, section in named if section not in headings(ROOT / page)]

"""Pages and docstrings name sections, files and tests that exist."""

from __future__ import annotations

import ast
import itertools
import pkgutil
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
def test_a_row_of_a_table_is_one_line(page: Path) -> None:
    """A row that is wrapped ends the table, and the rest of it is shown as text with bars."""
    lines = [line.strip() for line in page.read_text().splitlines()]
    for number, line in enumerate(lines):
        if re.fullmatch(r"\|( ?:?-+:? ?\|)+", line):
            table = [lines[number - 1], *itertools.takewhile(re.compile("(?!<!--).").match, lines[number:])]
            broken = [row for row in table if not (row.startswith("|") and row.endswith("|"))]
            assert not broken, f"{page.name}:{number}"


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


# Names of the code

FOLDERS = ("dpgen_bench", "methods", "tests", "conf", "docs", "results")
GENERATED = re.compile(r"results/(checks\b|runs\b|cache\b|plots\b|report\.html)")  # not committed, or only with records
PLACEHOLDER = re.compile(r"NAME|\*|\.\.\.|\{|<")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
NOT_OURS = {"--cfg", "submitit_slurm", "ONEDNN_MAX_CPU_ISA", "steps_per_s"}  # of Hydra and oneDNN; a made-up name


def in_backticks(text: str) -> set[str]:
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return {name for name in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text) if not PLACEHOLDER.search(name)}


def missing_places(names: set[str]) -> set[str]:
    """The paths and dotted names among `names` that do not exist."""
    paths = {name for name in names if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./-]+", name)}
    missing = {path for path in paths if not GENERATED.match(path) and not (ROOT / path).exists()}
    for name in names:
        if re.fullmatch(r"dpgen_bench(\.\w+)+", name):
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                missing.add(name)
    return missing


@cache
def words_of_the_code() -> frozenset[str]:
    """All words of the code and the configs, and the names of config files."""
    configs = [*ROOT.glob("conf/**/*.yaml"), *ROOT.glob("tests/*/*.py"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    texts = [path.read_text() for path in (*SOURCES, *configs)]
    return frozenset(word for text in texts for word in re.findall(r"--[a-z][\w-]*|\w+", text)).union(
        path.stem for path in configs
    )


@pytest.mark.parametrize(
    "page", sorted({*PAGES} - {ROOT / "CHANGELOG.md"}), ids=lambda page: str(page.relative_to(ROOT))
)
def test_names_of_the_code_on_a_page_exist(page: Path) -> None:
    """Names in backticks: paths, dotted names, options, constants, names with an underscore, and names of classes."""
    names = in_backticks(page.read_text())
    assert not missing_places(names)
    pattern = re.compile(r"(?<![\w-])--[a-z][\w-]*|\b(?:[A-Z]+_[A-Z_]+|[a-z]+_\w+|[A-Z][a-z]+[A-Z]\w*)\b")
    words = {word for name in names if "/" not in name for word in pattern.findall(name)}
    missing = words - words_of_the_code() - NOT_OURS
    assert not missing, "names that do not exist"


def test_paths_and_modules_that_docstrings_name_exist() -> None:
    missing = {}
    for source in SOURCES:
        nodes = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, DOCUMENTED)]
        names = set().union(*(in_backticks(ast.get_docstring(node) or "") for node in nodes))
        missing[str(source.relative_to(ROOT))] = missing_places(names)
    assert not {source: names for source, names in missing.items() if names}

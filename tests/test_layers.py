"""Modules import modules of lower layers only, also in functions and for type checking, and never in a circle."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# From the lowest to the highest. Parts of one layer do not import each other.
LAYERS = (
    ("utils",),
    ("nets", "training"),
    ("privacy",),
    ("federation",),
    ("data",),
    ("generator",),
    ("method",),
    ("testing", "evaluate"),
    ("runs",),
    ("audit",),
    ("tables", "api"),
    ("plots",),
    ("report",),
    ("cli",),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def name_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {name_of(path): path for path in (ROOT / "dpgen_bench").rglob("*.py")}


def nodes_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def modules_of(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Modules of the harness that an import statement loads by name."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & MODULES.keys()
    assert node.level == 0, "imports are absolute"
    names = {f"{node.module}.{alias.name}" for alias in node.names}
    return {name if name in MODULES else str(node.module) for name in names} & MODULES.keys()


@cache
def imported(module: str) -> frozenset[str]:
    return frozenset(name for node in nodes_of(MODULES[module]) for name in modules_of(node)) - {module}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_module_has_a_layer():
    assert {part_of(module) for module in MODULES} - {""} <= LEVEL.keys()


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"dpgen_bench"}))
def test_a_module_imports_lower_layers_only(module):
    own = part_of(module)
    wrong = {
        other for other in imported(module) if part_of(other) not in ("", own) and LEVEL[part_of(other)] >= LEVEL[own]
    }
    assert not wrong


def test_no_modules_import_each_other_in_a_circle():
    sorter = TopologicalSorter({module: imported(module) for module in MODULES})
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"dpgen_bench.cli"}))
def test_the_harness_is_imported_at_the_top_of_a_module(module):
    """Imports in functions are for slow packages of third parties, except in cli.py and __init__.py."""
    if MODULES[module].name == "__init__.py":
        return
    tree = ast.parse(MODULES[module].read_text())
    inner = [node for top in tree.body for node in ast.walk(top) if node is not top]
    imports = [node for node in inner if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [name for node in imports for name in modules_of(node)]


@pytest.mark.parametrize("path", sorted((ROOT / "methods").glob("*.py")), ids=lambda path: path.name)
def test_methods_import_the_harness_up_to_method(path):
    names = {name for node in nodes_of(path) for name in modules_of(node)}
    assert not [name for name in names if LEVEL[part_of(name)] > LEVEL["method"]]


@pytest.mark.parametrize("part", ["dpgen_bench", "methods", "tests"])
def test_files_have_at_most_400_lines(part):
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in (ROOT / part).rglob("*.py")}
    assert not {name: length for name, length in lengths.items() if length > 400}


PAGE = ROOT / "docs" / "architecture" / "README.md"


def test_the_diagram_of_the_layers_matches_the_code():
    """The arrows in docs/architecture are the imports between parts, without arrows that follow from others."""
    below: dict[str, set[str]] = {part: set() for part in LEVEL}
    for module in MODULES:
        parts = {part_of(other) for other in imported(module)} - {"", part_of(module)}
        if part_of(module):
            below[part_of(module)] |= parts

    @cache
    def reached(part: str) -> frozenset[str]:
        return frozenset(below[part]).union(*(reached(other) for other in below[part]))

    drawn = {tuple(line.split(" --> ")) for line in map(str.strip, PAGE.read_text().splitlines()) if " --> " in line}
    needed = {
        (part, other)
        for part, others in below.items()
        for other in others
        if not any(other in reached(between) for between in others - {other})
    }
    assert drawn == needed


def test_the_files_that_the_architecture_page_names_exist():
    named = set(re.findall(r"`((?:dpgen_bench|methods|tests|conf)/[\w/]+\.py)`", PAGE.read_text()))
    assert len(named) > 15
    assert not [path for path in named if not (ROOT / path).is_file()]

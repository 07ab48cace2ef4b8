"""Modules import modules of lower layers only, also in functions and for type checking, and never in a circle.

The harness is imported by statements, never by a text that names a module, because a text hides the import.
"""

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
    ("pretraining",),
    ("testing", "evaluate"),
    ("store",),
    ("config",),
    ("runs",),
    ("outcomes",),
    ("audit",),
    ("tables", "api"),
    ("plots",),
    ("report",),
    ("cli", "wheelhouse"),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def name_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {name_of(path): path for path in (ROOT / "dpgen_bench").rglob("*.py")}


def nodes_of(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def modules_of(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Modules of the harness that an import statement loads by name.

    The root package loads `dpgen_bench.api` for every name but `__version__`. A statement that binds the name
    `dpgen_bench` gives access to all these names, so it counts as an import of the functions.
    """
    if isinstance(node, ast.Import):
        names = {alias.name for alias in node.names}
        binds_root = any(
            alias.name == "dpgen_bench" or (alias.name.startswith("dpgen_bench.") and alias.asname is None)
            for alias in node.names
        )
        return (names - {"dpgen_bench"} | ({"dpgen_bench.api"} if binds_root else set())) & MODULES.keys()
    assert node.level == 0, "imports are absolute"
    names = {f"{node.module}.{alias.name}" for alias in node.names}
    names = {name if name in MODULES else str(node.module) for name in names - {"dpgen_bench.__version__"}}
    return {"dpgen_bench.api" if name == "dpgen_bench" else name for name in names} & MODULES.keys()


def imported_by(source: str) -> set[str]:
    """Modules of the harness that the import statements of a source load."""
    return {name for node in nodes_of(ast.parse(source)) for name in modules_of(node)}


# Functions that load a module, or something in a module, by the text of its name.
MODULE_IMPORTERS = {"__import__", "import_module", "resolve_name", "locate"}
IMPORTERS = MODULE_IMPORTERS | {"get_class", "get_method", "get_object"}


def named_by_text(source: str) -> set[str]:
    """Texts that name this repository's modules, in a source that can import by text.

    All texts of the source count, not only arguments of the import, because a name may come from a variable.
    """
    nodes = list(ast.walk(ast.parse(source)))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    if not used & IMPORTERS:
        return set()
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    # A package alone has no classes, so its name matters only to a function that loads modules.
    dots = "*" if used & MODULE_IMPORTERS else "+"
    return {text for text in texts if re.match(rf"(dpgen_bench|methods|tests)(\.\w*){dots}$", text)}


@cache
def imported(module: str) -> frozenset[str]:
    return frozenset(imported_by(MODULES[module].read_text())) - {module}


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


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {"dpgen_bench.cli.verbs"}))
def test_the_harness_is_imported_at_the_top_of_a_module(module):
    """Imports in functions are for slow packages of third parties, except in cli/verbs.py and __init__.py."""
    if MODULES[module].name == "__init__.py":
        return
    tree = ast.parse(MODULES[module].read_text())
    inner = [node for top in tree.body for node in ast.walk(top) if node is not top]
    imports = [node for node in inner if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [name for node in imports for name in modules_of(node)]


METHODS = sorted((ROOT / "methods").rglob("*.py"))


@pytest.mark.parametrize("path", METHODS, ids=lambda path: str(path.relative_to(ROOT)))
def test_methods_import_the_harness_up_to_pretraining(path):
    names = imported_by(path.read_text())
    assert not [name for name in names if LEVEL[part_of(name)] > LEVEL["pretraining"]]


@pytest.mark.parametrize("path", [*MODULES.values(), *METHODS], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_of_the_repository_is_imported_by_a_text(path):
    """The root package may do it: it loads the functions when they are first used."""
    allowed = {"dpgen_bench.api"} if path == MODULES["dpgen_bench"] else set()
    assert named_by_text(path.read_text()) == allowed


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from dpgen_bench.store.folders import Store", {"dpgen_bench.store.folders"}),
        ("from dpgen_bench.store import folders", {"dpgen_bench.store.folders"}),
        ("def f():\n    from dpgen_bench.store import folders", {"dpgen_bench.store.folders"}),
        ("import dpgen_bench.store.folders as s", {"dpgen_bench.store.folders"}),
        ("import dpgen_bench.store.folders", {"dpgen_bench.store.folders", "dpgen_bench.api"}),
        ("import dpgen_bench\ndpgen_bench.run", {"dpgen_bench.api"}),
        ("import dpgen_bench as bench", {"dpgen_bench.api"}),
        ("from dpgen_bench import results", {"dpgen_bench.api"}),
        ("from dpgen_bench import *", {"dpgen_bench.api"}),
        ("from dpgen_bench import __version__", set()),
        ("from dpgen_bench import __version__, run", {"dpgen_bench.api"}),
        ("from dpgen_bench import api", {"dpgen_bench.api"}),
        ("import torch", set()),
    ],
)
def test_the_check_finds_the_modules_that_a_source_imports(source, expected):
    assert imported_by(source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import importlib\nimportlib.import_module('dpgen_bench.store.folders')", {"dpgen_bench.store.folders"}),
        ("from importlib import import_module as load\nload('.store', 'dpgen_bench.runs')", {"dpgen_bench.runs"}),
        ("__import__('dpgen_bench')", {"dpgen_bench"}),
        ("name = 'dpgen_bench.runs'\n__import__(name)", {"dpgen_bench.runs"}),
        ("__import__(f'dpgen_bench.{part}')", {"dpgen_bench."}),
        ("from hydra.utils import get_class\nget_class('methods.dpgan.DPGAN')", {"methods.dpgan.DPGAN"}),
        ("__import__('tests.conftest')", {"tests.conftest"}),
        ("__import__('sklearn')", set()),
        ("from hydra.utils import get_class\nroot = 'dpgen_bench'", set()),
        ("suspect = 'dpgen_bench.data.datasets'", set()),
    ],
)
def test_the_check_finds_the_texts_that_name_modules(source, expected):
    assert named_by_text(source) == expected


@pytest.mark.parametrize("part", ["dpgen_bench", "methods", "tests"])
def test_files_have_at_most_400_lines(part):
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in (ROOT / part).rglob("*.py")}
    assert not {name: length for name, length in lengths.items() if length > 400}


PAGE = ROOT / "docs" / "architecture.md"


def test_the_diagram_of_the_layers_matches_the_code():
    """The arrows in docs/architecture.md are the imports between parts, without arrows that follow from others."""
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

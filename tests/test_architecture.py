"""The harness imports no methods, methods do not import each other, and every config builds the class that it names."""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

import pytest
from hydra.utils import get_class
from torch import nn

from dpgen_bench.config.building import build_dataset, build_method
from dpgen_bench.config.compose import compose_config
from dpgen_bench.utils.paths import CONF

ROOT = Path(__file__).resolve().parent.parent


def imported(path: Path) -> set[str]:
    """Top-level and dotted names of the modules that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "dpgen_bench").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_harness_imports_no_method(path):
    assert not {name for name in imported(path) if name.split(".")[0] in ("methods", "tests")}


@pytest.mark.parametrize("path", sorted((ROOT / "methods").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_methods_never_import_each_other(path):
    assert not {name for name in imported(path) if name.split(".")[0] in ("methods", "tests")}


@pytest.mark.parametrize("path", sorted((ROOT / "methods").glob("[!_]*.py")), ids=lambda p: p.name)
def test_a_method_file_and_its_yaml_share_their_name(path):
    config = compose_config([f"method={path.stem}"])
    assert config.method.name == path.stem
    assert config.method["_target_"].startswith(f"methods.{path.stem}.")
    assert type(build_method(config)).__module__ == f"methods.{path.stem}"


# Settings whose yaml has another default than the runs from before they existed.
BETTER_NOW: dict[str, dict[str, object]] = {"dp_gauss": {"shrinkage": False}}


@pytest.mark.parametrize("path", sorted((ROOT / "methods").glob("[!_]*.py")), ids=lambda p: p.name)
def test_a_default_is_in_the_yaml_alone(path):
    """The yaml names each setting with its value and its source; the class declares types and ranges."""
    config = compose_config([f"method={path.stem}"])
    cls = get_class(config.method["_target_"])
    declared = fields(cls) if is_dataclass(cls) else ()
    assert set(config.method) - {"name", "_target_", "check", "pretraining"} == {field.name for field in declared}
    # The class knows the default of a setting that was added later, which earlier runs have without naming it.
    added = getattr(cls, "added", ())
    with_default = [field for field in declared if (field.default, field.default_factory) != (MISSING, MISSING)]
    earlier = {field.name: field.default for field in with_default}
    assert earlier == {name: config.method[name] for name in added} | BETTER_NOW.get(path.stem, {})


@pytest.mark.parametrize("path", sorted((ROOT / "methods").glob("[!_]*.py")), ids=lambda p: p.name)
def test_a_method_is_short_and_holds_no_network(path):
    """A method reads like its paper's algorithm: networks are in dpgen_bench/nets, infrastructure in the harness."""
    module = importlib.import_module(f"methods.{path.stem}")
    own = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    assert own
    assert len(path.read_text().splitlines()) < 150
    assert not [each for each in own if issubclass(each, nn.Module)]


@pytest.mark.parametrize(
    "name", sorted(str(p.relative_to(CONF / "experiment"))[:-5] for p in (CONF / "experiment").rglob("*.yaml"))
)
def test_every_experiment_composes_and_builds(name):
    config = compose_config([f"experiment={name}"])
    build_method(config)
    build_dataset(config)


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONF / "dataset").glob("*.yaml")))
def test_every_dataset_builds_without_its_files(name):
    required = {
        "image_folder": ["dataset.path=somewhere", "dataset.image_size=28"],
        "npz": ["dataset.path=some.npz"],
        "torchvision": ["dataset.name=KMNIST"],
        "validation_image_folder": ["dataset.base.path=somewhere", "dataset.base.image_size=28"],
    }
    config = compose_config([f"dataset={name}", *required.get(name, [])])
    assert build_dataset(config).name == config.dataset.name


def long_functions_without_comment(source: str) -> list[str]:
    """Names of the functions with more than 40 lines of code and no comment; docstrings are neither of the two.

    Comments for tools, such as `# noqa`, explain nothing and do not count.
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    lines = [each.start[0] for each in comments if not re.match(r"#\s*(noqa|type:|pragma|fmt:)", each.string)]
    long = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = node.end_lineno - node.lineno + 1
        if ast.get_docstring(node) is not None:
            length -= node.body[0].end_lineno - node.body[0].lineno + 1
        if length > 40 and not any(node.lineno <= line <= node.end_lineno for line in lines):
            long.append(node.name)
    return long


@pytest.mark.parametrize("part", ["dpgen_bench", "methods"])
def test_a_function_above_40_lines_has_a_comment(part):
    found = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / part).rglob("*.py")}
    bare = {name: long_functions_without_comment(source) for name, source in found.items()}
    assert not {name: functions for name, functions in bare.items() if functions}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["    x = 1"] * 39, []),
        (["    x = 1"] * 40, ["f"]),
        (["    x = 1"] * 40 + ["    x = 2  # noqa: F841"], ["f"]),
        (["    x = 1"] * 40 + ["    x = 2  # the last value"], []),
        (['    """Text.', *["    Text."] * 40, '    """'], []),
        (['    """Text', "    # within a text.", '    """'] + ["    x = 1"] * 40, ["f"]),
    ],
)
def test_the_check_counts_lines_of_code_and_comments(lines, expected):
    assert long_functions_without_comment("\n".join(["def f():", *lines])) == expected


def test_the_version_is_the_packages():
    from importlib.metadata import version

    import dpgen_bench

    assert dpgen_bench.__version__ == version("dpgen-bench")

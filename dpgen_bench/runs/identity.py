"""What of a method enters a run's id: its resolved arguments, and the version of what it computes."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from dpgen_bench.method import Method

WITH_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NOT_ARGUMENTS = ("name", "check", "_target_")  # entries of a method's yaml that are not passed to its class


def resolved_arguments(method: Method, config: DictConfig) -> dict[str, Any]:
    """The method's class and all its arguments as they are in force, so that spelling out a default changes nothing.

    Args:
        method: what `config` builds. Arguments of a class that is no dataclass are taken as the config states them.
    """
    stated = OmegaConf.to_container(config)
    assert isinstance(stated, dict)
    arguments = {str(key): value for key, value in stated.items() if key not in NOT_ARGUMENTS}
    defaults: dict[str, Any] = {}
    declared: tuple[Field[Any], ...] = fields(method) if is_dataclass(method) else ()
    for field in declared:
        if field.init and field.default is not MISSING:
            defaults[field.name] = field.default
        elif field.init and field.default_factory is not MISSING:
            defaults[field.name] = field.default_factory()
    # As stated, not as the method holds them: its code may have made two different arguments the same.
    return {"_target_": config["_target_"], "name": config.get("name"), **defaults, **arguments}


def method_version(method: Method) -> int | str:
    """The `version` that the method's class states, or else a fingerprint of its source.

    Raises:
        ValueError: for a version that is not an integer >= 1.
    """
    version = vars(type(method)).get("version")  # a subclass computes something else than its base
    if version is None:
        return source_fingerprint(type(method))
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(f"expected {type(method).__name__}.version to be an integer >= 1, got {version!r}.")
    return version


def source_fingerprint(cls: type) -> str:
    """Hash of the file that defines the class, without comments, docstrings and layout.

    Raises:
        ValueError: if the source cannot be read.
    """
    try:
        path = inspect.getsourcefile(cls)
    except TypeError:
        path = None
    if path is None:
        raise ValueError(f"expected a method whose class is defined in a .py file, got {cls!r}.")
    tree = ast.parse(Path(path).read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and _has_docstring(
            node
        ):
            node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def _has_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    first = node.body[0] if node.body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def is_stale(config: DictConfig, identity: Mapping[str, Any]) -> bool:
    """Whether the method computes something else now than it did when a run with this config was made."""
    try:
        cls = get_class(config.method["_target_"])
        stated = vars(cls).get("version")
        return identity.get("version") != (source_fingerprint(cls) if stated is None else stated)
    except Exception:  # the method is gone or broken: no current code could make this run again
        return True

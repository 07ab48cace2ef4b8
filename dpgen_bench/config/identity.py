"""The part of a method in a run's identity: its resolved arguments, and the version of its computations."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dpgen_bench.utils.classes import find_class
from dpgen_bench.utils.source import own_modules

WITH_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
HARNESS = ("builtins", "dpgen_bench")  # packages whose classes are no part of a method's source
NOT_ARGUMENTS = ("name", "check", "pretraining")  # entries of a method's yaml that are not passed to its class


def resolved_arguments(cls: type, config: DictConfig) -> dict[str, Any]:
    """A method's class name and all its arguments, including defaults, so that stating a default changes nothing.

    Arguments are those of the config, not the attributes of an instance, because the method's code may map different
    arguments to the same attribute. Defaults are known only for dataclasses.

    Arguments that are keys of the class's `places` say where files are. They are left out if the argument that is their
    value states a digest of these files, or if no place is given. Those in `added` are options
    that the method got after runs existed; with their default value they are left out, so that ids do not change. Those
    in `speed` change results by rounding alone, like the device, and have the value that is given there.

    Args:
        cls: the class that `config` names.
        config: the config group `method`.
    """
    stated = OmegaConf.to_container(config)
    assert isinstance(stated, dict)
    arguments = {str(key): value for key, value in stated.items() if key not in (*NOT_ARGUMENTS, "_target_")}
    defaults: dict[str, Any] = {}
    for field in fields(cls) if is_dataclass(cls) else ():
        if field.init and field.default is not MISSING:
            defaults[field.name] = field.default
        elif field.init and field.default_factory is not MISSING:
            defaults[field.name] = field.default_factory()
    resolved = {**defaults, **arguments}
    for place, digest in getattr(cls, "places", {}).items():
        if resolved.get(place) is None or resolved.get(digest) is not None:
            resolved.pop(place, None)
    for option in getattr(cls, "added", ()):
        if resolved.get(option) == defaults[option]:
            del resolved[option]
    for setting, value in getattr(cls, "speed", ()):
        resolved[setting] = value
    return {"_target_": config["_target_"], "name": config.get("name"), **resolved}


def method_version(cls: type) -> int | str:
    """The `version` that a method's class defines, or else a fingerprint of its source.

    The version of a base class is ignored, because a subclass computes something else.

    Raises:
        ValueError: for a version that is not an integer >= 1.
    """
    version = vars(cls).get("version")
    if version is None:
        return source_fingerprint(cls)
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(f"expected {cls.__name__}.version to be an integer >= 1, got {version!r}.")
    return version


def source_fingerprint(cls: type) -> str:
    """Hash of the source that defines the class. Comments, docstrings, formatting and the Python version do not matter.

    It covers the class's module, what this imports that is neither the harness nor a library, and the modules of the
    base classes.

    Raises:
        ValueError: if the source cannot be read.
    """
    modules = own_modules(cls.__module__)
    if cls.__module__ not in modules:
        raise ValueError(f"expected a method whose class is defined in a .py file, got {cls!r}.")
    for base in cls.__mro__[1:]:
        if base.__module__.split(".")[0] not in HARNESS and base.__module__ not in modules:
            modules |= {
                name: module for name, module in own_modules(base.__module__).items() if name == base.__module__
            }
    digest = hashlib.sha256()
    for _, tree in (modules[name] for name in sorted(modules)):
        for node in ast.walk(tree):
            if isinstance(node, WITH_DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:]
        digest.update(_dumped(tree).encode())
    return digest.hexdigest()[:16]


def _dumped(value: Any) -> str:
    """A syntax tree as text that is the same in every version of Python.

    `ast.dump` is not: versions add fields, such as `type_params` in 3.12, and 3.13 omits empty ones. Fields without a
    value are left out here.
    """
    if isinstance(value, ast.AST):
        present = [(name, field) for name, field in ast.iter_fields(value) if field is not None and field != []]
        return f"{type(value).__name__}({', '.join(f'{name}={_dumped(field)}' for name, field in present)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_dumped, value))}]"
    return repr(value)


def is_stale(
    config: DictConfig, identity: Mapping[str, Any], version_of: Callable[[type], int | str] = method_version
) -> bool | None:
    """Whether the method's version or source has changed since the run with this config and identity was started.

    A caller that asks for many runs may give a `version_of` that remembers its results.

    None means unknown: the class cannot be imported here (a plugin is found from its own folder only), or is broken.
    """
    try:
        cls = find_class(config.method["_target_"])
        return None if cls is None else bool(identity.get("version") != version_of(cls))
    except Exception:
        return None

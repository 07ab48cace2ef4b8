"""The source files of a plugin: the module that defines it, and what that imports of code that belongs to the user."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import site
import sys
import sysconfig
from pathlib import Path

from dpgen_bench.utils.paths import METHODS

HARNESS = "dpgen_bench"
_LIBRARIES = (
    *(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
)


def own_modules(module: str) -> dict[str, tuple[Path, ast.Module]]:
    """The file and syntax tree of a module, and of the modules that it imports, by name.

    Imports are followed, also those within functions, but not into the harness, the standard library and installed
    libraries. The package of `module` is never a library, wherever it is installed. Modules without source are left
    out.
    """
    package = _top(module)
    names, modules = [module], dict[str, tuple[Path, ast.Module]]()
    seen = {module}
    while names:
        name = names.pop()
        try:
            path = _file_of(name)
            tree = ast.parse(path.read_bytes())
        except (OSError, ImportError, AttributeError, TypeError, SyntaxError, ValueError):
            continue  # a name that is no module, or one without readable source
        modules[name] = path, tree
        new = {other for other in _imports(tree, name) if _top(other) == package or _is_users(_top(other))} - seen
        seen |= new
        names += new
    return modules


def of_a_library(file: str) -> bool:
    """Whether a file belongs to the standard library or to an installed package.

    The bench's methods are no library, so that runs have the same ids with a wheel as in a checkout.
    """
    return file.startswith(_LIBRARIES) and not file.startswith(f"{METHODS}{os.sep}")


def _top(name: str) -> str:
    return name.split(".")[0]


def _is_users(package: str) -> bool:
    """Whether a package, or a module without package, is neither the harness nor a library. It is not imported."""
    if package == HARNESS or package in sys.builtin_module_names or package in sys.stdlib_module_names:
        return False
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError, AttributeError):
        return False
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return any(place and not of_a_library(place) and place not in ("built-in", "frozen") for place in places)


def _file_of(name: str) -> Path:
    if name in sys.modules:
        return Path(inspect.getsourcefile(sys.modules[name]) or "")
    spec = importlib.util.find_spec(name)
    return Path(spec.origin or "" if spec else "")


def _imports(tree: ast.Module, module: str) -> set[str]:
    """Names that `module` imports, and the modules or attributes that it imports from them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names - {""}

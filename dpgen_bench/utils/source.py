"""The source files of a plugin: the module that defines it, and what that imports from its own package."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from pathlib import Path


def own_modules(module: str) -> dict[str, tuple[Path, ast.Module]]:
    """The file and syntax tree of a module, and of the modules of its package that it imports, by name.

    Imports are followed through the whole package, whether or not they were executed yet: an import within a function
    counts. Modules without source are left out.
    """
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
        new = _own_imports(tree, name) - seen
        seen |= new
        names += new
    return modules


def _file_of(name: str) -> Path:
    if name in sys.modules:
        return Path(inspect.getsourcefile(sys.modules[name]) or "")
    spec = importlib.util.find_spec(name)
    return Path(spec.origin or "" if spec else "")


def _own_imports(tree: ast.Module, module: str) -> set[str]:
    """Names that `module` imports from its own package."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.split(".")[0] == module.split(".")[0]}

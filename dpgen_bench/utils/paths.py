"""Where the bench's own files are, in a checkout and in a wheel, and the order in which Python looks for modules.

The package `methods` is found in its own place, whatever else has its name. The working directory comes after the
libraries, so that a user's plugin is found there, and a user's random.py does not replace a module of a library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[1]
# The folder that has the packages `dpgen_bench` and `methods`: a checkout, or site-packages.
HOME = PACKAGE.parent
# A wheel has the other folders within the package; see [tool.hatch.build.targets.wheel] in pyproject.toml.
IS_CHECKOUT = not (PACKAGE / "conf").is_dir()
CONF = (HOME if IS_CHECKOUT else PACKAGE) / "conf"
PUBLISHED = HOME / "results" / "published" if IS_CHECKOUT else PACKAGE / "published"
RECORDS = HOME / "results" / "records" if IS_CHECKOUT else PACKAGE / "records"

METHODS = HOME / "methods"


class OwnMethods(MetaPathFinder):
    """Finds the bench's package `methods` before all others of this name.

    Modules of another package `methods` on the Python path, such as a user's methods/mine.py, are found after the
    bench's own.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = fullname.partition(".")
        if package != METHODS.name:
            return None
        if not module:
            return spec_from_file_location(fullname, METHODS / "__init__.py", submodule_search_locations=[str(METHODS)])
        if "." in module:  # a module of a user's package within `methods`
            return PathFinder.find_spec(fullname, path)
        return PathFinder.find_spec(fullname, [str(METHODS), *(str(Path(entry, METHODS.name)) for entry in sys.path)])


def prefer_own_methods() -> None:
    """Let `import methods` find the bench's package from now on, in this process.

    Raises:
        ImportError: if another module with the name of a method of the bench was imported before.
    """
    if not any(isinstance(finder, OwnMethods) for finder in sys.meta_path):
        sys.meta_path.insert(0, OwnMethods())
    before = sys.modules.get(METHODS.name)
    if before is None:
        return
    if not hasattr(before, "__path__"):  # a user's methods.py, which must not hide the package
        before.__path__ = []
    for name in [name for name in sys.modules if name.startswith(f"{METHODS.name}.")]:
        file = Path(getattr(sys.modules[name], "__file__", None) or "")
        own = METHODS / f"{name.partition('.')[2]}.py"
        if own.is_file() and file.resolve() != own:
            raise ImportError(
                f"expected the module {name} to be the bench's own, {own}, got {file}, which was imported before "
                "dpgen_bench; rename this file, because the bench finds its methods by their names."
            )


def add_working_directory() -> None:
    """Let Python find modules in the working directory, if it does not yet; those of libraries are found first."""
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())


def libraries_first() -> None:
    """Move the working directory to the end of the Python path, in this process and in those that it starts.

    For a program. The functions that can be imported from `dpgen_bench` leave the Python path as it is. The working
    directory stays where it is if the user has put it on PYTHONPATH, or if it is the bench's checkout.
    """
    os.environ.update(_environment())
    _move_working_directory()
    add_working_directory()


def environment_of_children() -> dict[str, str]:
    """The environment of a new Python process, which then imports this harness, and libraries before user files."""
    return {**os.environ, **_environment()}


def set_up() -> None:
    """Called when `dpgen_bench` is imported, in every process."""
    prefer_own_methods()
    # Ray puts the working directory of its driver first. If the driver is `dpgen`, it goes to the end again.
    if os.environ.get("DPGEN_LIBRARIES_FIRST"):
        _move_working_directory()


def _move_working_directory() -> None:
    here = os.getcwd()
    if here not in {str(HOME), *map(os.path.abspath, _python_path())}:
        sys.path[:] = [entry for entry in sys.path if entry not in ("", here)] + [here]


def _python_path() -> list[str]:
    """The folders that the user has put on the Python path. For Python, an empty one is the working directory."""
    return [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]


def _environment() -> dict[str, str]:
    places = _python_path()
    if IS_CHECKOUT:  # another version may be installed; site-packages is never named, as it would precede the stdlib
        places = [str(HOME), *(place for place in places if place != str(HOME))]
    return {
        "PYTHONPATH": os.pathsep.join(places),
        "PYTHONSAFEPATH": "1",  # `python -m` and `python -c` do not look into the working directory
        "DPGEN_LIBRARIES_FIRST": "1",
    }

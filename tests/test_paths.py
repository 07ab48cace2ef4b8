"""A user's own folders `methods`, `conf` and `results`, and files named like libraries, change nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpgen_bench.utils import paths
from dpgen_bench.utils.paths import CONF, HOME, METHODS, PUBLISHED, environment_of_children
from dpgen_bench.utils.source import of_a_library

# Modules whose names a user's files have; importing one of these files raises.
TAKEN = ("torch", "numpy", "hydra", "loky", "colorsys", "wave")
PROBE = """
import os, sys
from importlib.util import find_spec
NAMES = ("methods", "methods.dp_merf", "methods.mine", "probe", "torch", "numpy", "hydra", "loky", "colorsys", "wave")
def places():
    import dpgen_bench
    return {name: (spec := find_spec(name)) and spec.origin for name in NAMES}
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with a user's files that have the names of the bench's folders and of libraries, and a plugin."""
    error = "raise RuntimeError('the user file {name} was imported')"
    for name in ("methods", "conf", "results"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(error.format(name=name))
    for name in ("methods/dp_merf", *TAKEN):
        (tmp_path / f"{name}.py").write_text(error.format(name=name))
    (tmp_path / "conf" / "method").mkdir()
    (tmp_path / "conf" / "method" / "dp_merf.yaml").write_text("broken: [")
    (tmp_path / "methods" / "mine.py").write_text("X = 1")
    (tmp_path / "probe.py").write_text(PROBE)
    return tmp_path


def python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in a folder; dpgen_bench is found as an installed package is, behind the standard library."""
    before = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "DPGEN"))}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**before, **environment}, capture_output=True, text=True
    )


# Another checkout may be installed where the tests run.
INSTALLED = (
    "import os, sys; sys.path[:] = [p for p in sys.path if not os.path.isdir(p + '/dpgen_bench')]; "
    f"sys.path.append({str(HOME)!r}); "
)
PROGRAM = f"{INSTALLED}from dpgen_bench.utils.paths import libraries_first; libraries_first(); "
SAY = "import json, probe; print(json.dumps(probe.places()))"
IN_LOKY = "import json, loky, probe; print(json.dumps(loky.get_reusable_executor(1).submit(probe.places).result()))"
CHILD = f"import sys, os; sys.path.append(os.getcwd()); {SAY}"
IN_A_CHILD = f"import subprocess; print(subprocess.check_output([sys.executable, '-c', {CHILD!r}], text=True))"


@pytest.mark.parametrize("look", [SAY, IN_LOKY, IN_A_CHILD], ids=["itself", "in a worker", "in a child"])
def test_a_program_finds_the_methods_and_the_libraries_before_the_users_files(folder, look):
    """The script `dpgen` starts without the working directory on the path, as `-P` does."""
    done = python(folder, "-P", "-c", PROGRAM + look)
    found = json.loads(done.stdout) if done.stdout else pytest.fail(done.stderr)
    assert found["methods"] == str(METHODS / "__init__.py")
    assert found["methods.dp_merf"] == str(METHODS / "dp_merf.py")
    assert found["methods.mine"] == str(folder / "methods" / "mine.py")
    assert found["probe"] == str(folder / "probe.py")
    assert not [name for name in TAKEN if Path(found[name]).is_relative_to(folder)]


@pytest.mark.parametrize(
    ("before", "environment"),
    [("", {}), ("", {"PYTHONPATH": "."}), ("", {"PYTHONPATH": os.pathsep}), ("sys.path.insert(0, ''); ", {})],
    ids=["-c", "on PYTHONPATH", "an empty PYTHONPATH", "a notebook"],
)
def test_python_in_such_a_folder_finds_the_bench_s_methods(folder, before, environment):
    """Only the names of the bench are its own: in a user's Python, other files of the user are found as ever."""
    for name in TAKEN:
        (folder / f"{name}.py").unlink()
    done = python(folder, "-c", INSTALLED + before + SAY, **environment)
    found = json.loads(done.stdout) if done.stdout else pytest.fail(done.stderr)
    assert found["methods"] == str(METHODS / "__init__.py")
    assert found["methods.dp_merf"] == str(METHODS / "dp_merf.py")
    assert found["methods.mine"] == str(folder / "methods" / "mine.py")


def test_modules_that_a_user_imported_before_stay_and_do_not_hide_the_bench_s(folder):
    (folder / "methods" / "__init__.py").write_text("")
    done = python(folder, "-c", f"{INSTALLED}import methods.mine, dpgen_bench; {SAY}; print(methods.mine.X)")
    found, value = done.stdout.splitlines()
    assert (json.loads(found)["methods.dp_merf"], value) == (str(METHODS / "dp_merf.py"), "1")


def test_a_module_of_a_user_that_is_named_methods_does_not_hide_the_package(tmp_path):
    (tmp_path / "methods.py").write_text("X = 1")
    (tmp_path / "probe.py").write_text(PROBE)
    done = python(tmp_path, "-c", f"{INSTALLED}import methods, dpgen_bench; {SAY}; print(methods.X)")
    found, value = done.stdout.splitlines()
    assert (json.loads(found)["methods.dp_merf"], value) == (str(METHODS / "dp_merf.py"), "1")


def test_a_users_module_in_place_of_a_method_is_refused(folder):
    (folder / "methods" / "__init__.py").write_text("")
    (folder / "methods" / "dp_merf.py").write_text("")
    done = python(folder, "-c", f"{INSTALLED}import methods.dp_merf, dpgen_bench")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: expected the module methods.dp_merf to be the bench's")
    assert str(folder / "methods" / "dp_merf.py") in done.stderr


def test_a_folder_that_the_user_put_on_the_path_stays_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "lib"])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setenv("DPGEN_LIBRARIES_FIRST", "")
    paths.libraries_first()
    assert sys.path == [str(tmp_path), "lib"]
    monkeypatch.setenv("PYTHONPATH", "")
    paths.libraries_first()
    assert sys.path == ["lib", str(tmp_path)]


def test_the_working_directory_is_added_once_and_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["lib"])
    paths.add_working_directory()
    paths.add_working_directory()
    assert sys.path == ["lib", str(tmp_path)]


def test_new_processes_of_a_checkout_import_this_checkout(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/elsewhere", str(HOME)]))
    assert environment_of_children()["PYTHONPATH"] == os.pathsep.join([str(HOME), "/elsewhere"])
    monkeypatch.setattr(paths, "IS_CHECKOUT", False)  # site-packages must not come before the standard library
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert environment_of_children()["PYTHONPATH"] == "/elsewhere"


def test_the_files_of_a_checkout_are_where_they_are_said_to_be():
    assert (CONF / "config.yaml").is_file()
    assert (METHODS / "dp_merf.py").is_file()
    assert (PUBLISHED / "README.md").is_file()


def test_methods_are_no_library_wherever_they_are_installed(monkeypatch):
    """Otherwise a plugin that imports one of them would have another run id with a wheel than in a checkout."""
    monkeypatch.setattr("dpgen_bench.utils.source._LIBRARIES", (str(HOME),))
    assert of_a_library(str(HOME / "torch" / "__init__.py"))
    assert not of_a_library(str(METHODS / "dp_merf.py"))
    assert of_a_library(str(HOME / "methods_of_others" / "x.py"))

"""The wheel, installed into a new environment, has everything that the commands need."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.utils.paths import HOME

pytestmark = pytest.mark.slow

UV = shutil.which("uv") or next((str(path) for path in (HOME / ".uv/bin/uv",) if path.is_file()), None)
SMALL = ["method.features=50", "method.steps=4", "runtime.progress=false", "protocol.num_samples=50"]
SMALL += ["~protocol.metrics.mlp"]
ERROR = "raise RuntimeError('a file of the user was imported')"


def command(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without this checkout on the Python path."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "DPGEN", "VIRTUAL"))
    }
    return subprocess.run([*map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist."""
    if UV is None:
        pytest.skip("uv is not installed: make setup installs it")
    folder = tmp_path_factory.mktemp("dist")
    done = command(UV, "build", "--out-dir", folder, HOME, cwd=folder)
    if done.returncode:
        pytest.skip(f"the wheel cannot be built, perhaps because no package index is reachable: {done.stderr[-300:]}")
    return folder


@pytest.fixture(scope="module")
def dpgen(built, tmp_path_factory):
    """The command `dpgen` of a new environment, called in a folder in which the user's files have unlucky names."""
    assert UV is not None
    folder = tmp_path_factory.mktemp("installed")
    python = folder / "env" / "bin" / "python"
    command(UV, "venv", "--python", sys.executable, folder / "env", cwd=folder)
    (wheel,) = built.glob("*.whl")
    done = command(UV, "pip", "install", "--python", python, wheel, cwd=folder)
    if done.returncode:
        pytest.skip(f"the dependencies cannot be installed, perhaps for lack of an index: {done.stderr[-300:]}")
    work = folder / "work"
    for name in ("methods", "conf/method", "results"):
        (work / name).mkdir(parents=True)
    for name in ("methods/__init__", "methods/dp_merf", "results/__init__", "torch", "random", "hydra", "data"):
        (work / f"{name}.py").write_text(ERROR)
    (work / "conf" / "method" / "dp_merf.yaml").write_text("broken: [")
    (work / "mine.py").write_text("from methods.dp_merf import DPMERF\n\n\nclass Mine(DPMERF):\n    pass\n")
    (work / "own" / "method").mkdir(parents=True)
    yaml = (HOME / "conf/method/dp_merf.yaml").read_text()
    yaml = yaml.replace("name: dp_merf", "name: mine").replace("methods.dp_merf.DPMERF", "mine.Mine")
    (work / "own" / "method" / "mine.yaml").write_text(yaml)

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = command(python.parent / "dpgen", *arguments, cwd=work)
        assert done.returncode == 0, f"dpgen {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
        return done

    call.work, call.python = work, python  # type: ignore[attr-defined]
    return call


def test_runs_and_their_table(dpgen):
    dpgen("run", "-m", "hydra/launcher=joblib", "method=dp_merf", "seed=0,1", *SMALL)
    dpgen("run", "--config-dir", "own", "method=mine", *SMALL)
    runs = [path.parent for path in (dpgen.work / "results" / "runs").glob("*/DONE")]
    assert len(runs) == 3
    expected = build_spec(compose_config(["method=dp_merf", "seed=0", *SMALL])).id
    assert expected in {run.name for run in runs}  # the same id as in a checkout
    assert {json.loads((run / "environment.json").read_text())["commit"] for run in runs} == {None}
    assert expected in dpgen("runs").stdout


def test_the_id_of_a_plugin_that_extends_a_method_is_that_of_a_checkout(dpgen, monkeypatch):
    code = (
        "from dpgen_bench.config.compose import compose_config as c; from dpgen_bench.config.spec import build_spec; "
    )
    code += "print(build_spec(c(['--config-dir=own', 'method=mine'])).id)"
    for name in ("torch", "random", "hydra", "data"):  # in the user's own Python they would replace the libraries
        (dpgen.work / f"{name}.py").rename(dpgen.work / f"{name}.txt")
    try:
        done = command(dpgen.python, "-c", code, cwd=dpgen.work)
    finally:
        for name in ("torch", "random", "hydra", "data"):
            (dpgen.work / f"{name}.txt").rename(dpgen.work / f"{name}.py")
    monkeypatch.syspath_prepend(str(dpgen.work / "plugins"))
    (dpgen.work / "plugins").mkdir()
    shutil.copy(dpgen.work / "mine.py", dpgen.work / "plugins")
    here = build_spec(compose_config([f"--config-dir={dpgen.work / 'own'}", "method=mine"])).id
    assert done.stdout.split() == [here], done.stderr


def test_check_account_list_and_the_published_numbers(dpgen):
    assert "mine conforms" in dpgen("check", "--config-dir", "own", "method=mine").stdout
    assert "add/remove" in dpgen("account", "method=dp_merf").stdout
    assert "dp_sinkhorn_table1" in dpgen("list", "tables").stdout
    dpgen("tables", "dpgan_table2")
    dpgen("sweep", "demo", "--dry-run")
    assert not (dpgen.work / "conf" / "table").exists()


def test_the_table_of_a_paper_is_written_below_the_working_directory(dpgen):
    """A table without runs is only printed; one run of each preset would take hours."""
    printed = dpgen("tables", "dpgan_table2", "--format", "csv").stdout
    assert "Private GANs, Revisited, Table 2" in " ".join(printed.split())


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "conf/config.yaml",
        "methods/dp_merf.py",
        "results/published/README.md",
        "LICENSE",
        "tests/toys.py",
    } <= names
    assert not [name for name in names if name.startswith(("results/runs", "results/cache", ".venv", "shared"))]
    (source,) = tmp_path.iterdir()
    done = command(UV, "build", "--wheel", "--out-dir", tmp_path / "again", source, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (again,), (first,) = (tmp_path / "again").glob("*.whl"), built.glob("*.whl")
    assert again.read_bytes() == first.read_bytes()

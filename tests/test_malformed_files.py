"""Damaged runs, broken yamls, plugins and data of users: one message says what is wrong, and nothing is lost."""

from __future__ import annotations

import json
import re
import resource
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpgen_bench.runs import execute as execution
from dpgen_bench.runs.execute import execute
from dpgen_bench.store.folders import RunFailed, RunFolder, Store
from tests.malformed import Case, cases, contents, finished_run, keep_process_state, only_run, status_of
from tests.run_toys import config, in_child

SAMPLE = "sample {run} --benchmark --n 3 --out {tmp}/images.npz"
EVALUATE = "evaluate {run}"
EXPORT = "export {run} {tmp}/exported --benchmark"
OTHER_LEDGER = (
    '{"budget": {"epsilon": 10.0, "delta": 1e-5, "relation": "add_remove", "accountant": "pld"}, "epsilon": {}}'
)
OWN = "--config-dir {tmp}/conf method=own"
WEIGHTS = "generator.safetensors"
PLUGIN = "class Own:\n    def fit(self, data, ctx):\n        return None\n"


def truncated(name: str) -> Callable[[Path, RunFolder], object]:
    def prepare(tmp: Path, run: RunFolder) -> None:
        path = run.path / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return prepare


def replaced(name: str, text: str) -> Callable[[Path, RunFolder], object]:
    return lambda tmp, run: (run.path / name).write_text(text)


def missing(name: str) -> Callable[[Path, RunFolder], object]:
    return lambda tmp, run: (run.path / name).unlink()


def own(yaml: str, source: str = PLUGIN, module: str = "own") -> Callable[[Path, RunFolder], object]:
    """A user's method: a yaml in conf/method, and its module in the working directory."""

    def prepare(tmp: Path, run: RunFolder) -> None:
        (tmp / "conf" / "method").mkdir(parents=True)
        (tmp / "conf" / "method" / "own.yaml").write_text(yaml)
        (tmp / f"{module}.py").write_text(source)

    return prepare


def arrays(**content: np.ndarray) -> Callable[[Path, RunFolder], object]:
    return lambda tmp, run: np.savez(tmp / "x.npz", **content)


def folder(*classes: str, images: int = 6) -> Callable[[Path, RunFolder], object]:
    """A folder of class folders with images of 8x8 pixels."""

    def prepare(tmp: Path, run: RunFolder) -> None:
        (tmp / "images").mkdir()
        for name in classes:
            (tmp / "images" / name).mkdir()
            for number in range(images):
                Image.fromarray(np.full((8, 8), number, np.uint8)).save(tmp / "images" / name / f"{number}.png")

    return prepare


NPZ = "run dataset=npz dataset.path={tmp}/x.npz"
FOLDER = "run dataset=image_folder dataset.path={tmp}/images dataset.image_size=8"
PIXELS = np.zeros((8, 4, 4), np.uint8)
VARIED = np.arange(40 * 16, dtype=np.uint8).reshape(40, 4, 4)

RUNS = cases(
    Case("sample of a truncated generator", SAMPLE, "cannot be used", WEIGHTS, "Restore", prepare=truncated(WEIGHTS)),
    Case("evaluate a truncated generator", EVALUATE, "cannot be used", WEIGHTS, "delete", prepare=truncated(WEIGHTS)),
    Case("sample of an empty generator", SAMPLE, "cannot be used", WEIGHTS, "Restore", prepare=replaced(WEIGHTS, "")),
    Case("sample of garbage", SAMPLE, "cannot be used", WEIGHTS, "Restore", prepare=replaced(WEIGHTS, "x" * 999)),
    Case("sample of no generator", SAMPLE, "expected the generator", "no file", "restore", prepare=missing(WEIGHTS)),
    Case("evaluate no generator", EVALUATE, "expected the generator", "no file", "restore", prepare=missing(WEIGHTS)),
    Case("settings of a generator", SAMPLE, "cannot be used", "generator.json", "Restore",
         prepare=replaced("generator.json", "{")),
    Case("class of a generator", SAMPLE, "expected a generator", "no module 'no'", "restore",
         prepare=replaced("generator.json", '{"kind": "no.Such"}')),
    Case("sample without a ledger", SAMPLE, "cannot be used", "ledger.json is missing", "Restore",
         prepare=missing("ledger.json")),
    Case("evaluate without a ledger", EVALUATE, "cannot be used", "ledger.json is missing", "Restore",
         prepare=missing("ledger.json")),
    Case("broken ledger", SAMPLE, "cannot be used", "ledger.json", "Restore", prepare=replaced("ledger.json", "{")),
    Case("ledger that is a list", EVALUATE, "cannot be used", "ledger.json", "Restore",
         prepare=replaced("ledger.json", "[]")),
    *(
        Case(f"ledger of another version: {what}", command, "cannot be used", "ledger.json lacks 'entries'", "Restore",
             prepare=replaced("ledger.json", OTHER_LEDGER))
        for what, command in (("sample", SAMPLE), ("evaluate", EVALUATE), ("export", EXPORT))
    ),
    Case("broken training.json", EVALUATE, "cannot be used", "training.json", "Restore",
         prepare=truncated("training.json")),
    Case("missing identity", EVALUATE, "cannot be used", "identity.json is missing", "Restore",
         prepare=missing("identity.json")),
    Case("broken config of a run", EVALUATE, "cannot be used", "config.yaml", "Restore",
         prepare=replaced("config.yaml", "a: [\n")),
    Case("empty config of a run", SAMPLE, "cannot be used", "config.yaml lacks method", "Restore",
         prepare=replaced("config.yaml", "")),
    Case("missing config of a run", SAMPLE, "expected one run", "none", "`dpgen runs`", prepare=missing("config.yaml")),
)  # fmt: skip

PLUGINS = cases(
    Case("broken yaml", f"run {OWN}", "expected YAML in", "own.yaml, line", "correct that line",
         prepare=own("name: own\n_target_: [own.Own\n")),
    Case("yaml with a tab", f"check {OWN}", "expected YAML in", "own.yaml, line", "correct that line",
         prepare=own("name: own\nx:\n\t- 1\n")),
    Case("yaml without a class", f"run {OWN}", "method._target_: expected", "None", "write `_target_",
         prepare=own("name: own\n")),
    Case("module that is missing", f"run {OWN}", "expected MODULE.CLASS", "no module 'nowhere'", "PYTHONPATH",
         prepare=own("name: own\n_target_: nowhere.Own\n")),
    Case("class that is missing", f"run {OWN}", "expected MODULE.CLASS", "has no 'Ownn' (did you mean 'Own'?)",
         "correct the name", prepare=own("name: own\n_target_: own_a.Ownn\n", module="own_a")),
    Case("module that raises", f"check {OWN}", "that can be imported", "ZeroDivisionError", "correct the module",
         prepare=own("name: own\n_target_: own_b.Own\n", "1 / 0\n", "own_b")),
    Case("module with an error of syntax", f"account {OWN}", "that can be imported", "SyntaxError", "line 1",
         prepare=own("name: own\n_target_: own_c.Own\n", "class Own(:\n", "own_c")),
    Case("setting that the class lacks", f"run {OWN}", "a setting of the method 'own'", "'rate'", "correct the name",
         prepare=own("name: own\n_target_: own_d.Own\nrate: 3\n", module="own_d")),
)  # fmt: skip

DATA = cases(
    Case("npz that is missing", NPZ, "dataset 'npz'", "x.npz is no file", "dataset.path=FILE.npz"),
    Case("npz that is text", NPZ, "dataset 'npz'", "damaged", "numpy.savez",
         prepare=lambda tmp, run: (tmp / "x.npz").write_text("no")),
    Case("npz without arrays", NPZ, "expected", "none of these arrays", "images and labels", prepare=arrays()),
    Case("npz without labels", NPZ, "expected", "['images']", "images and labels", prepare=arrays(images=PIXELS)),
    Case("npz of floats", NPZ, "expected", "float64", "scale pixels",
         prepare=arrays(images=PIXELS / 255, labels=np.arange(8))),
    Case("npz with few labels", NPZ, "expected", "labels is int64 (3,)", "one integer for each of the 8 images",
         prepare=arrays(images=PIXELS, labels=np.arange(3))),
    Case("npz of labels with gaps", NPZ, "expected", "only 3 of these 2000001 classes", "return_inverse=True",
         prepare=arrays(images=VARIED, labels=np.arange(40) % 3 * 10**6)),
    Case("npz of objects", NPZ, "expected", "Python objects", "save numbers",
         prepare=arrays(images=np.array([None]), labels=np.arange(1))),
    Case("folder that is missing", FOLDER, "expected a folder at", "found none", "dataset.path=FOLDER"),
    Case("folder without classes", FOLDER, "one folder of images for each class", "no image", ".png", prepare=folder()),
    Case("folder with an empty class", FOLDER, "one folder of images for each class", "no image", "file types",
         prepare=folder("cats", images=0)),
    Case("MNIST that is missing", "check method=dp_merf dataset=mnist --data data_root={tmp}", "dataset 'mnist'",
         "does not exist", "dpgen fetch dataset=mnist"),
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return finished_run(tmp_path_factory.mktemp("finished"))


@pytest.mark.parametrize("case", [*RUNS, *PLUGINS, *DATA])
def test_a_malformed_file_is_refused(case, finished, tmp_path, monkeypatch, capsys):
    results, place = tmp_path / "results", tmp_path / "tmp"
    shutil.copytree(finished.path.parents[1], results)
    place.mkdir()
    monkeypatch.setenv("DPGEN_RESULTS", str(results))
    monkeypatch.chdir(place)
    case.prepare(place, only_run(results))
    before = contents(results)

    def refuse(*_: object) -> None:
        raise AssertionError("nothing may be trained")

    monkeypatch.setattr(execution, "_train", refuse)
    named = {"{tmp}": str(place), "{run}": finished.id}
    command = re.sub("|".join(map(re.escape, named)), lambda found: named[found[0]], case.command)
    keep_process_state(monkeypatch)
    status = status_of(shlex.split(command))
    shown = capsys.readouterr()
    assert (status, "Traceback" in shown.out + shown.err) == (case.status, False), shown.err
    for fragment in (case.expected, case.got, case.do):
        assert fragment in shown.err, shown.err
    assert contents(results) == before


@pytest.mark.parametrize("name", [WEIGHTS, "generator.json", "ledger.json", "config.yaml", "status.json"])
def test_runs_says_that_a_run_is_damaged(name, finished, tmp_path, capsys):
    shutil.copytree(finished.path.parents[1], tmp_path, dirs_exist_ok=True)
    truncated(name)(tmp_path, only_run(tmp_path))
    if name == "config.yaml":
        (only_run(tmp_path).path / name).write_text("a: [\n")
    assert status_of(["runs", "--results", str(tmp_path)]) == 0
    assert "damaged: " in (shown := capsys.readouterr().out)
    assert "finished" not in shown


def test_a_finished_run_without_its_ledger_is_damaged(finished, tmp_path, capsys):
    shutil.copytree(finished.path.parents[1], tmp_path, dirs_exist_ok=True)
    (only_run(tmp_path).path / "ledger.json").unlink()
    assert status_of(["runs", "--results", str(tmp_path)]) == 0
    assert "damaged: its ledger.json" in (shown := capsys.readouterr().out)
    assert "finished" not in shown


def test_a_ledger_of_another_version_is_damaged_in_the_list(finished, tmp_path, monkeypatch, capsys):
    shutil.copytree(finished.path.parents[1], tmp_path / "results")
    (only_run(tmp_path / "results").path / "ledger.json").write_text(OTHER_LEDGER)
    monkeypatch.setenv("DPGEN_RESULTS", str(tmp_path / "results"))
    assert status_of(["runs", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["status"] == "damaged"
    assert listed["error"].startswith("its ledger.json lacks 'entries', so its releases are unknown")


@pytest.mark.parametrize("verb", ["runs", "list", "run dataset=digits", "report"])
def test_a_deleted_working_directory_is_refused_in_one_sentence(verb, tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    keep_process_state(monkeypatch)
    assert status_of(verb.split()) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert "expected a working directory, got one that was deleted" in shown.err


@pytest.mark.parametrize("verb", ["runs", "report", "tables demo", "evaluate x", "sample x --n 1 --out x.npz",
                                  "run dataset=digits", "run -m seed=0,1"])  # fmt: skip
def test_results_that_are_a_file_are_refused(verb, tmp_path, monkeypatch, capsys):
    (tmp_path / "results").write_text("mine")
    monkeypatch.setenv("DPGEN_RESULTS", str(tmp_path / "results"))
    monkeypatch.chdir(tmp_path)
    keep_process_state(monkeypatch)
    assert status_of(verb.split()) in (1, 2)
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err
    assert "expected" in shown.err
    assert contents(tmp_path) == {"results": b"mine"}


def test_a_full_disk_marks_the_run_as_failed_and_truncates_nothing(tmp_path, one_thread_of_torch):
    """No file may grow beyond a limit, as on a disk that is full for large files; then there is space again."""

    def run_with_little_space() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        with pytest.raises(RunFailed, match="failed during training"):
            execute(config(tmp_path))

    assert in_child(run_with_little_space) == 0
    run = only_run(tmp_path)
    assert run.status() == "failed"
    for name in ("ledger.json", "status.json", "identity.json"):
        assert run.read_json(name)
    assert not list(tmp_path.rglob("*.tmp*"))
    assert not run.trained
    again = execute(config(tmp_path))
    assert (again.id, again.status()) == (run.id, "finished")
    assert Store(tmp_path).folder(run.id).done

"""The file cache: damaged files are computed again, one process computes at a time, and earlier files stay readable."""

from __future__ import annotations

import hashlib
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from dpgen_bench.utils.cache import add_values, cached_arrays, read_arrays, read_values, write_arrays

VALUE = {"a": np.arange(3, dtype=np.int64), "b": np.array([[1.5, -2.0]], dtype=np.float32)}


def fetch(folder: Path | None, key: str = "key", value: dict[str, np.ndarray] = VALUE) -> tuple[bool, bool]:
    """Whether the arrays had to be computed, and whether a warning was issued; what comes back is always right."""
    calls = []

    def compute() -> dict[str, np.ndarray]:
        calls.append(None)
        return dict(value)

    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        arrays = cached_arrays(folder, key, compute)
    assert arrays.keys() == value.keys()
    for name, array in value.items():
        assert arrays[name].dtype == array.dtype
        assert np.array_equal(arrays[name], array)
    return bool(calls), bool(issued)


def stored(folder: Path) -> Path:
    (path,) = folder.glob("*.npz")
    return path


def test_arrays_are_computed_once_for_each_key(tmp_path):
    assert fetch(tmp_path / "deep" / "folder") == (True, False)
    assert fetch(tmp_path / "deep" / "folder") == (False, False)
    assert fetch(tmp_path / "deep" / "folder", "another key") == (True, False)


def test_nothing_is_kept_without_a_folder():
    assert fetch(None) == fetch(None) == (True, False)


def test_every_changed_byte_is_harmless(tmp_path):
    """A file with one changed byte gives the same arrays: from the file, or computed again with a warning."""
    fetch(tmp_path)
    path = stored(tmp_path)
    content = path.read_bytes()
    repeated = 0
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x11]) + content[position + 1 :])
        computed, warned = fetch(tmp_path)
        assert computed == warned
        repeated += computed
        if computed:
            assert fetch(tmp_path) == (False, False)
    assert repeated > len(content) / 2


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_computed_again(tmp_path, share):
    fetch(tmp_path)
    path = stored(tmp_path)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert fetch(tmp_path) == (True, True)
    assert fetch(tmp_path) == (False, False)


def test_a_file_of_another_key_is_computed_again(tmp_path):
    fetch(tmp_path / "one")
    fetch(tmp_path / "two", "another key", {"a": np.zeros(1)})
    stored(tmp_path / "two").replace(stored(tmp_path / "one"))
    assert fetch(tmp_path / "one") == (True, True)


def test_arrays_that_do_not_fit_are_computed_again(tmp_path):
    cached_arrays(tmp_path, "key", lambda: {"a": np.zeros(2)})
    with pytest.warns(UserWarning, match="other arrays than its name says"):
        arrays = cached_arrays(tmp_path, "key", lambda: {"a": np.zeros(3)}, lambda kept: kept["a"].shape == (3,))
    assert arrays["a"].shape == (3,)


class Trap:
    """An object whose unpickling writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def test_pickled_objects_are_refused(tmp_path):
    fetch(tmp_path)
    path, sprung = stored(tmp_path), tmp_path / "sprung"
    path.write_bytes(pickle.dumps(Trap(str(sprung))))
    assert fetch(tmp_path) == (True, True)
    np.savez(path, a=np.array([Trap(str(sprung))], dtype=object), key=np.array("key"))
    assert fetch(tmp_path) == (True, True)
    assert not sprung.exists()
    pickle.loads(pickle.dumps(Trap(str(sprung))))
    assert sprung.exists()  # The trap works.


def test_a_full_disk_costs_no_arrays(tmp_path, monkeypatch):
    def full(path):
        raise OSError("no space left on device")

    monkeypatch.setattr("dpgen_bench.utils.cache.atomic", full)
    assert fetch(tmp_path) == fetch(tmp_path) == (True, True)
    monkeypatch.setattr("dpgen_bench.utils.cache.write_atomic", lambda path, content: full(path))
    with pytest.warns(UserWarning, match="cannot be written"):
        add_values(tmp_path / "values.json", {"a": 1})


def test_a_folder_that_cannot_be_written_costs_no_arrays(tmp_path):
    (tmp_path / "folder").write_text("a file in the folder's place")
    assert fetch(tmp_path / "folder") == (True, True)
    assert (tmp_path / "folder").read_text() == "a file in the folder's place"


def test_an_error_while_computing_leaves_no_file_and_no_lock(tmp_path):
    def stopped():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_arrays(tmp_path, "key", stopped)
    assert not list(tmp_path.glob("*.npz"))
    assert fetch(tmp_path) == (True, False)


PROCESS = """
import sys, time
from pathlib import Path
import numpy as np
from dpgen_bench.utils.cache import add_values, cached_arrays
folder, name = Path(sys.argv[1]), sys.argv[2]

def compute():
    time.sleep(0.3)
    (folder / f"computed by {name}").touch()
    return {"a": np.zeros(1)}

cached_arrays(folder, "key", compute)
for i in range(20):
    add_values(folder / "values.json", {f"{name}-{i}": i})
"""


def test_of_several_processes_one_computes_and_all_add_their_values(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path), str(i)]) for i in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(list(tmp_path.glob("computed by *"))) == 1
    assert read_values(tmp_path / "values.json") == {f"{name}-{i}": i for name in range(3) for i in range(20)}


def test_files_of_earlier_versions_are_read(tmp_path):
    digest = hashlib.sha256(b"key").hexdigest()
    np.savez_compressed(tmp_path / f"{digest[:32]}.npz", key=np.array(digest), **VALUE)
    assert fetch(tmp_path) == (False, False)
    (tmp_path / "values.json").write_text(json.dumps({"cell": {"epsilon": 1.5}}))
    add_values(tmp_path / "values.json", {"other": {"reason": "no"}})
    assert read_values(tmp_path / "values.json") == {"cell": {"epsilon": 1.5}, "other": {"reason": "no"}}


def test_every_changed_byte_of_values_is_noticed_or_changes_no_value(tmp_path):
    values = {"a": {"epsilon": 1.25}, "b": {"epsilon": float("inf")}, "c": {"over": 60.0}}
    path = tmp_path / "values.json"
    add_values(path, values)
    content = path.read_bytes()
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x11]) + content[position + 1 :])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            known = read_values(path)
        assert all(known[key] == value for key, value in values.items() if key in known)
    path.write_bytes(content[: len(content) // 2])
    with pytest.warns(UserWarning, match="values are computed again"):
        assert read_values(path) == {}


def test_arrays_of_a_file_without_a_key(tmp_path):
    assert read_arrays(tmp_path / "samples.npz") is None
    write_arrays(tmp_path / "samples.npz", VALUE, compress=True)
    arrays = read_arrays(tmp_path / "samples.npz")
    assert arrays is not None
    assert all(np.array_equal(arrays[name], array) for name, array in VALUE.items())

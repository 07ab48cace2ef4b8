"""A wheelhouse is split, checked and joined, and installs the bench where no index can be reached."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from dpgen_bench.wheelhouse import collect, install

HERE = ".".join(map(str, sys.version_info[:2]))


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A folder with the parts of an archive of two files, of which one is larger than a part; and its manifest."""
    files = {"wheels/small.whl": os.urandom(10), "data/large": os.urandom(3000)}
    entries = []
    for number, (name, content) in enumerate(files.items()):
        (tmp_path / str(number)).write_bytes(content)
        entries.append((tmp_path / str(number), name))
    folder = tmp_path / "parts"
    folder.mkdir()
    checksums = collect.write_parts(folder, iter(entries), size=1000)
    monkeypatch.setattr(install, "HERE", folder)
    return folder, {"parts": checksums}, files


def test_an_archive_is_split_into_parts_of_at_most_a_size_and_joined_again(parts, tmp_path):
    folder, manifest, files = parts
    sizes = [(folder / name).stat().st_size for name in manifest["parts"]]
    assert len(sizes) > 3
    assert set(sizes[:-1]) == {1000}
    assert 0 < sizes[-1] <= 1000
    install.unpack(install.checked_parts(manifest), tmp_path / "joined")
    assert {name: (tmp_path / "joined" / name).read_bytes() for name in files} == files


def test_all_missing_and_damaged_parts_are_named(parts):
    folder, manifest, _ = parts
    (folder / "archive.tar.gz.00").unlink()
    (folder / "archive.tar.gz.02").write_bytes(b"other")
    with pytest.raises(SystemExit, match=r"gz\.00 is missing, archive\.tar\.gz\.02 is damaged\. Copy them again"):
        install.checked_parts(manifest)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"python": "3.1", "needs": {}}, f"expected Python 3.1, for which the wheels are, got Python {HERE}"),
        ({"python": HERE, "needs": {"torch": "99.0"}}, "expected torch 99.0 or later"),
        (
            {"python": HERE, "needs": {"no-such-package": "1.0"}},
            "expected no-such-package 1.0 or later in .*, got none",
        ),
    ],
)
def test_a_python_without_what_is_needed_is_refused_before_anything_is_installed(manifest, message):
    with pytest.raises(SystemExit, match=message):
        install.expect_python(manifest)
    install.expect_python({"python": HERE, "needs": {"torch": "2.1"}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ('{"parts": {}}', "it lacks needs, python"),
        ("[]", "keys"),
    ],
)
def test_a_manifest_that_is_missing_or_damaged_is_refused(parts, content, message):
    folder, *_ = parts
    (folder / "manifest.json").unlink(missing_ok=True)
    if content is not None:
        (folder / "manifest.json").write_text(content)
    with pytest.raises(
        SystemExit, match=rf"expected the wheelhouse's manifest\.json .*{message}.*Copy the whole folder"
    ):
        install.read_manifest()


@pytest.mark.parametrize(
    ("wheels", "message"),
    [(["a-1-py3-none-any.whl"], "expected a wheel of pip"), (["pip-1-py3-none-any.whl"], r"pip ended with status \d+")],
)
def test_an_archive_without_pip_or_a_failing_pip_gives_a_message(tmp_path, monkeypatch, wheels, message):
    (tmp_path / "empty").write_bytes(b"")
    folder = tmp_path / "parts"
    folder.mkdir()
    checksums = collect.write_parts(
        folder, iter([(tmp_path / "empty", f"wheels/{name}") for name in wheels]), size=1000
    )
    manifest = {"parts": checksums, "python": HERE, "needs": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(install, "HERE", folder)
    monkeypatch.setattr(sys, "argv", ["install.py"])
    with pytest.raises(SystemExit, match=message):
        install.main()


def test_data_that_are_not_there_are_named(tmp_path):
    with pytest.raises(SystemExit, match=r"pt_inception.*, MNIST/raw in"):
        collect.data_files(tmp_path, ["mnist"], weights=True)


def test_packages_without_a_wheel_are_found_in_the_lock_file(tmp_path):
    lock = tmp_path / "uv.lock"
    lock.write_text(
        '[[package]]\nname = "here"\nsource = {editable = "."}\n'
        '[[package]]\nname = "source-only"\nsdist = {url = "x"}\n'
        '[[package]]\nname = "usual"\nsdist = {url = "x"}\nwheels = [{url = "y"}]\n'
    )
    assert collect.without_wheels(lock) == {"source-only"}


@pytest.mark.slow
def test_a_wheelhouse_installs_the_bench_with_the_index_switched_off(tmp_path):
    uv = shutil.which("uv") or str(collect.ROOT / ".uv" / "bin" / "uv")
    if not os.path.exists(uv):
        pytest.skip("needs uv, which collects the wheels")
    folder, site = tmp_path / "wheelhouse", tmp_path / "site"
    collect.main([str(folder), "--python", HERE])
    manifest = json.loads((folder / "manifest.json").read_text())
    assert all((folder / name).stat().st_size <= 60e6 for name in manifest["parts"])
    # No index: pip has no address to ask, and neither does Python.
    closed = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "https_proxy": "http://127.0.0.1:9"}
    subprocess.run([sys.executable, folder / "install.py", "--target", site], check=True, env=closed, cwd=tmp_path)
    program = (
        "import dpgen_bench, hydra, numpy; print(dpgen_bench.__file__, hydra.__file__, numpy.__file__, sep='\\n');"
        "from dpgen_bench.cli import main;"
        "raise SystemExit(main(['run', 'method=uniform_noise', 'dataset=digits', 'scale=quick', 'privacy.epsilon=0']))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**closed, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert all(line.startswith(str(site)) for line in run.stdout.splitlines()[:3]), run.stdout
    assert "finished" in run.stdout + run.stderr

"""A wheelhouse is split, checked and joined, and installs the bench where no index can be reached."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys

import pytest

from dpgen_bench.wheelhouse import collect, install

HERE = ".".join(map(str, sys.version_info[:2]))
MACHINE = f"{platform.system()} {platform.machine()}"


def manifest_with(**values):
    """The text of a manifest that is right except for these values."""
    right = {"platform": MACHINE, "python": HERE, "needs": {"torch": "2.11"}, "parts": {"archive.tar.gz.00": ""}}
    return json.dumps({**right, **values})


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


def test_parts_that_are_folders_or_missing_in_the_manifest_are_named(parts):
    folder, manifest, _ = parts
    (folder / "archive.tar.gz.01").unlink()
    (folder / "archive.tar.gz.01").mkdir()
    last = list(manifest["parts"])[-1]
    del manifest["parts"][last]
    message = rf"{last} is not in the manifest, archive\.tar\.gz\.01 cannot be read \(Is a directory\)\. Copy them"
    with pytest.raises(SystemExit, match=message):
        install.checked_parts(manifest)


@pytest.mark.parametrize("order", [slice(1, None), slice(-1), slice(None, None, -1), slice(0)])
def test_parts_that_are_no_archive_together_give_a_message(parts, tmp_path, order):
    folder, manifest, _ = parts
    chosen = [folder / name for name in manifest["parts"]][order]
    with pytest.raises(SystemExit, match=rf"expected an archive in the {len(chosen)} parts .*copy the whole folder"):
        install.unpack(chosen, tmp_path / "joined")


def test_folders_that_cannot_be_written_give_a_message(parts, tmp_path):
    folder, manifest, _ = parts
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"expected to unpack the archive into .*file.* set TMPDIR"):
        install.unpack([folder / name for name in manifest["parts"]], tmp_path / "file" / "folder")
    with pytest.raises(SystemExit, match=r"expected a folder for --data .*file.*run install.py again"):
        install.copy_data(folder, tmp_path / "file")


def test_all_missing_and_damaged_parts_are_named(parts):
    folder, manifest, _ = parts
    (folder / "archive.tar.gz.00").unlink()
    (folder / "archive.tar.gz.02").write_bytes(b"other")
    with pytest.raises(SystemExit, match=r"gz\.00 is missing, archive\.tar\.gz\.02 is damaged\. Copy them again"):
        install.checked_parts(manifest)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"python": "3.1"}, f"expected Python 3.1, for which the wheels are, got Python {HERE}"),
        ({"needs": {"torch": "99.0"}}, "expected torch 99.0 or later"),
        ({"needs": {"torch": "99.0rc1"}}, "expected torch 99.0rc1 or later"),
        ({"needs": {"no-such-package": "1.0"}}, "expected no-such-package 1.0 or later in .*, got none"),
        ({"platform": "Linux x86"}, "expected Linux x86, for which the wheels are, got "),
    ],
)
def test_a_machine_without_what_is_needed_is_refused_before_anything_is_installed(manifest, message):
    right = {"platform": MACHINE, "python": HERE, "needs": {"torch": "2.1"}}
    with pytest.raises(SystemExit, match=message):
        install.expect_machine({**right, **manifest})
    install.expect_machine(right)


def test_a_wheelhouse_is_for_linux(monkeypatch):
    assert all(collect.PLATFORM.split()[1] in name for name in collect.PLATFORMS)
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    with pytest.raises(SystemExit, match="expected Linux x86_64, for which the wheels are, got Darwin arm64; install"):
        install.expect_machine({"platform": collect.PLATFORM})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ('{"parts": {}}', "it lacks needs, platform, python"),
        ("[]", "it has no keys"),
        (b"\xff\xfe", "can't decode"),
        (manifest_with(parts=["archive.tar.gz.00"]), "its parts are .* in which names do not have checksums"),
        (manifest_with(parts={}), "its parts are none, not archive.tar.gz.00 and so on"),
        (manifest_with(parts={"../d": ""}), r"its parts are \.\./d, not"),
        (manifest_with(parts={"archive.tar.gz.01": "", "archive.tar.gz.00": ""}), "its parts are .*, in order"),
        (manifest_with(needs=["torch"]), "its needs are .*versions such as"),
        (manifest_with(needs={"torch": 2.11}), "its needs are .*versions such as"),
        (manifest_with(needs={"torch": "2.x"}), "it needs torch '2.x', which is no version"),
        (manifest_with(python=3.12), "its python is 3.12, which is no text"),
    ],
)
def test_a_manifest_that_is_missing_or_damaged_is_refused(parts, content, message):
    folder, *_ = parts
    (folder / "manifest.json").unlink(missing_ok=True)
    if content is not None:
        (folder / "manifest.json").write_bytes(content if isinstance(content, bytes) else content.encode())
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
    manifest = {"parts": checksums, "platform": MACHINE, "python": HERE, "needs": {}}
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

"""Installs dpgen_bench from the files next to this script, without network. It needs Python with torch, no more.

python install.py [--data FOLDER] [--target FOLDER]
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
PART = "archive.tar.gz."  # with a number


def checked_parts(manifest: dict) -> list[Path]:
    """The parts of the archive, in order, after a comparison with the checksums.

    Raises:
        SystemExit: If parts are missing or damaged; all of them are named.
    """
    wrong = [
        f"{path.name} is not in the manifest" for path in HERE.glob(f"{PART}*") if path.name not in manifest["parts"]
    ]
    for name, checksum in manifest["parts"].items():
        try:
            content = (HERE / name).read_bytes()
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
        except OSError as error:  # a folder, for example
            wrong.append(f"{name} cannot be read ({error.strerror})")
        else:
            if hashlib.sha256(content).hexdigest() != checksum:
                wrong.append(f"{name} is damaged")
    if wrong:
        raise SystemExit(
            f"expected all parts of the wheelhouse next to install.py: {', '.join(wrong)}. Copy them again."
        )
    return [HERE / name for name in manifest["parts"]]


def read_manifest() -> dict:
    """The manifest next to this script; SystemExit if there is none or it is damaged."""
    try:
        manifest = json.loads((HERE / "manifest.json").read_text(encoding="utf-8"))
        expect_valid(manifest)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"expected the wheelhouse's manifest.json next to install.py: {error}. Copy the whole folder again."
        ) from None
    return manifest


def expect_valid(manifest: object) -> None:
    """Check the types of a manifest, and the names of the parts.

    Raises:
        ValueError: If they are not those that `collect` writes.
    """
    if not isinstance(manifest, dict):
        raise ValueError(f"it has no keys, but is {manifest!r:.40}")
    if missing := {"parts", "platform", "python", "needs"} - manifest.keys():
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    for key in ("platform", "python"):
        if not isinstance(manifest[key], str):
            raise ValueError(f"its {key} is {manifest[key]!r:.40}, which is no text")
    for key, values in (("parts", "checksums"), ("needs", "versions such as 2.11")):
        content = manifest[key]
        if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):
            raise ValueError(f"its {key} are {content!r:.40}, in which names do not have {values}")
    names = [f"{PART}{number:02d}" for number in range(len(manifest["parts"]))]
    if not names or list(manifest["parts"]) != names:
        raise ValueError(f"its parts are {', '.join(manifest['parts']) or 'none'}, not {PART}00 and so on, in order")
    for name, least in manifest["needs"].items():
        if version_of(least) is None:
            raise ValueError(f"it needs {name} {least!r}, which is no version such as 2.11")


def version_of(text: str) -> tuple[int, int] | None:
    """The first two numbers of a version, such as (2, 11) of 2.11.0+cu130 and of 2.11rc1; None if it has none."""
    numbers = re.match(r"(\d+)\.(\d+)", text)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def expect_machine(manifest: dict) -> None:
    """Raise SystemExit unless the wheels are for this machine and Python, which has the packages not included."""
    here = f"{platform.system()} {platform.machine()}"
    if here != manifest["platform"]:
        raise SystemExit(
            f"expected {manifest['platform']}, for which the wheels are, got {here}; install from a package index."
        )
    version = ".".join(map(str, sys.version_info[:2]))
    if version != manifest["python"]:
        raise SystemExit(
            f"expected Python {manifest['python']}, for which the wheels are, got Python {version}; run install.py "
            f"with that one, or collect again with --python {version}."
        )
    for name, least in manifest["needs"].items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise SystemExit(
                f"expected {name} {least} or later in {sys.executable}, got none; install it first."
            ) from None
        if (version_of(installed) or (0, 0)) < (version_of(least) or (0, 0)):
            raise SystemExit(
                f"expected {name} {least} or later in {sys.executable}, got {installed}; install it first."
            )


def unpack(parts: list[Path], folder: Path) -> None:
    """Join the parts and unpack the archive into a folder.

    Raises:
        SystemExit: If the parts are no archive together, or cannot be written.
    """
    try:
        with tempfile.TemporaryFile() as joined:
            for part in parts:
                joined.write(part.read_bytes())
            joined.seek(0)
            with tarfile.open(fileobj=joined, mode="r:gz") as archive:
                archive.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SystemExit(
            f"expected an archive in the {len(parts)} parts of the manifest, got what cannot be unpacked ({error}); "
            "copy the whole folder again, or make the wheelhouse again."
        ) from None
    except OSError as error:
        raise SystemExit(
            f"expected to unpack the archive into {folder}, got an error ({error}); free space there, or set TMPDIR to "
            "another folder."
        ) from None


def copy_data(source: Path, target: Path) -> None:
    """Copy the data sets and weights of the archive; SystemExit if they cannot be written."""
    try:
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
    except OSError as error:
        raise SystemExit(
            f"expected a folder for --data that can be written, got {target} ({error}); the packages are installed, so "
            "run install.py again with another folder."
        ) from None


def main() -> None:
    """Check, join, unpack and install."""
    parser = argparse.ArgumentParser(description="Install dpgen_bench from this folder, without network.")
    parser.add_argument(
        "--data", type=Path, help="put data sets and weights into this folder, to be used as DPGEN_DATA"
    )
    parser.add_argument("--target", type=Path, help="install into this folder (pip's --target); default: this Python")
    arguments = parser.parse_args()
    manifest = read_manifest()
    expect_machine(manifest)
    with tempfile.TemporaryDirectory() as scratch:
        unpack(checked_parts(manifest), Path(scratch))
        wheels = sorted(map(str, Path(scratch).glob("wheels/*.whl")))
        installer = next((wheel for wheel in wheels if Path(wheel).name.startswith("pip-")), None)
        if installer is None:
            raise SystemExit("expected a wheel of pip in the archive, got none; make the wheelhouse again.")
        wheels.remove(installer)  # used from its wheel, because this Python may have none
        target = ["--target", str(arguments.target)] if arguments.target else []
        # The lock file has chosen the versions, so pip need not look at dependencies.
        options = ["--no-index", "--no-deps", "--upgrade", *target]
        command = [sys.executable, f"{installer}/pip", "install", *options, *wheels]
        if code := subprocess.run(command, check=False).returncode:
            raise SystemExit(f"pip ended with status {code}, and said why above; nothing of --data was copied.")
        if arguments.data:
            copy_data(Path(scratch, "data"), arguments.data)
    where = f"PYTHONPATH={arguments.target} " if arguments.target else ""
    data = f"DPGEN_DATA={arguments.data} TORCH_HOME={arguments.data / 'torch_home'} " if arguments.data else ""
    print(f"{len(wheels)} packages are installed. Try: {where}{data}{sys.executable} -m dpgen_bench.cli list methods")


if __name__ == "__main__":
    main()

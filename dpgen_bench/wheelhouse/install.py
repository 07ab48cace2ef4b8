"""Installs dpgen_bench from the files next to this script, without network. It needs Python with torch, no more.

python install.py [--data FOLDER] [--target FOLDER]
"""

import argparse
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def checked_parts(manifest: dict) -> list[Path]:
    """The parts of the archive, in order, after a comparison with the checksums.

    Raises:
        SystemExit: If parts are missing or damaged; all of them are named.
    """
    wrong = []
    for name, checksum in manifest["parts"].items():
        if not (HERE / name).exists():
            wrong.append(f"{name} is missing")
        elif hashlib.sha256((HERE / name).read_bytes()).hexdigest() != checksum:
            wrong.append(f"{name} is damaged")
    if wrong:
        raise SystemExit(
            f"expected all parts of the wheelhouse next to install.py: {', '.join(wrong)}. Copy them again."
        )
    return [HERE / name for name in manifest["parts"]]


def read_manifest() -> dict:
    """The manifest next to this script; SystemExit if there is none or it is damaged."""
    try:
        manifest = json.loads((HERE / "manifest.json").read_text())
        if missing := {"parts", "python", "needs"} - manifest.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except (OSError, ValueError, AttributeError) as error:
        raise SystemExit(
            f"expected the wheelhouse's manifest.json next to install.py: {error}. Copy the whole folder again."
        ) from None
    return manifest


def expect_python(manifest: dict) -> None:
    """Raise SystemExit unless this Python has the version of the wheels, and the packages that are not among them."""
    version = ".".join(map(str, sys.version_info[:2]))
    if version != manifest["python"]:
        raise SystemExit(f"expected Python {manifest['python']}, for which the wheels are, got Python {version}.")
    for name, least in manifest["needs"].items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise SystemExit(
                f"expected {name} {least} or later in {sys.executable}, got none; install it first."
            ) from None
        if [int(part) for part in found.split("+")[0].split(".")[:2]] < [int(part) for part in least.split(".")[:2]]:
            raise SystemExit(f"expected {name} {least} or later in {sys.executable}, got {found}; install it first.")


def unpack(parts: list[Path], folder: Path) -> None:
    """Join the parts and unpack the archive into a folder."""
    with tempfile.TemporaryFile() as joined:
        for part in parts:
            joined.write(part.read_bytes())
        joined.seek(0)
        with tarfile.open(fileobj=joined) as archive:
            archive.extractall(folder, filter="data")


def main() -> None:
    """Check, join, unpack and install."""
    parser = argparse.ArgumentParser(description="Install dpgen_bench from this folder, without network.")
    parser.add_argument(
        "--data", type=Path, help="put data sets and weights into this folder, to be used as DPGEN_DATA"
    )
    parser.add_argument("--target", type=Path, help="install into this folder (pip's --target); default: this Python")
    arguments = parser.parse_args()
    manifest = read_manifest()
    expect_python(manifest)
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
            for file in sorted(path for path in Path(scratch, "data").rglob("*") if path.is_file()):
                place = arguments.data / file.relative_to(Path(scratch, "data"))
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(file.read_bytes())
    where = f"PYTHONPATH={arguments.target} " if arguments.target else ""
    data = f"DPGEN_DATA={arguments.data} TORCH_HOME={arguments.data / 'torch_home'} " if arguments.data else ""
    print(f"{len(wheels)} packages are installed. Try: {where}{data}{sys.executable} -m dpgen_bench.cli list methods")


if __name__ == "__main__":
    main()

"""`make wheelhouse`: collects wheels, data sets and weights for a machine without network, in parts of at most 60 MB.

The machine runs Linux on x86_64.

    python -m dpgen_bench.wheelhouse.collect FOLDER [--python 3.12] [--data mnist] [--weights] [--with-xgboost]

torch and torchvision are not included, because they have to fit the machine's accelerator.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PART_BYTES = 60 * 10**6
PLATFORM = "Linux x86_64"  # with glibc 2.28 or newer
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LEFT_OUT = ("torch", "torchvision")  # with all that only they need
DATASETS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
WEIGHTS = Path("torch_home/hub/checkpoints/pt_inception-2015-12-05-6726825d.pth")


def requirements(uv: str, left_out: Sequence[str], python: str) -> list[str]:
    """The packages of the lock file for a version of Python, as name==version, without `left_out` and their own needs.

    Markers are evaluated here, because pip would evaluate them for the Python that it runs in.
    """
    pruned = [argument for name in left_out for argument in ("--prune", name)]
    command = [
        uv,
        "export",
        "--quiet",
        "--locked",
        "--no-default-groups",
        "--no-emit-project",
        "--no-hashes",
        "--no-header",
    ]
    listed = subprocess.run([*command, "--no-annotate", *pruned], cwd=ROOT, check=True, capture_output=True, text=True)
    lines = [Requirement(line) for line in listed.stdout.splitlines() if line.strip()]
    there = {"python_version": python, "python_full_version": f"{python}.0"}
    return [f"{line.name}{line.specifier}" for line in lines if line.marker is None or line.marker.evaluate(there)]


def without_wheels(lock: Path) -> set[str]:
    """The packages of a lock file that are published as source only. Their wheels are built here."""
    packages = tomllib.loads(lock.read_text())["package"]
    return {package["name"] for package in packages if "sdist" in package and not package.get("wheels")}


def collect_wheels(uv: str, folder: Path, python: str, lines: Sequence[str]) -> None:
    """Download, or build, a wheel for each line of a requirements file, and build that of this project."""
    folder.mkdir(parents=True)
    pip = [uv, "tool", "run", "--quiet", "pip"]
    source_only = without_wheels(ROOT / "uv.lock")
    built = [line for line in lines if line.split("==")[0] in source_only]
    # pip itself is included for a Python without it.
    (folder / "requirements.txt").write_text("\n".join(["pip", *(line for line in lines if line not in built)]))
    platforms = [argument for name in PLATFORMS for argument in ("--platform", name)]
    wanted = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:", *platforms]
    download = [*pip, "download", "--quiet", "--no-deps", *wanted, "--dest", str(folder)]
    subprocess.run([*download, "--requirement", str(folder / "requirements.txt")], check=True)
    if built:
        subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), *built], check=True)
    subprocess.run([uv, "build", "--quiet", "--wheel", "--out-dir", str(folder)], cwd=ROOT, check=True)
    for file in folder.iterdir():  # the list of requirements, and what `uv build` writes next to its wheel
        if file.suffix != ".whl":
            file.unlink()


def data_files(root: Path, names: Sequence[str], weights: bool) -> list[Path]:
    """The files of data sets and weights, relative to the folder of data.

    Raises:
        SystemExit: If there are none for one of them.
    """
    files = [] if not weights else [WEIGHTS]
    for name in names:
        found = sorted((root / DATASETS[name] / "raw").glob("*ubyte"))
        files += [path.relative_to(root) for path in found] or [Path(DATASETS[name], "raw")]
    missing = [str(file) for file in files if not (root / file).is_file()]
    if missing:
        raise SystemExit(
            f"expected {', '.join(missing)} in {root}, the folder of data (DPGEN_DATA), got no such files."
        )
    return files


class Parts:
    """A file object that writes what it gets into parts of at most `size` bytes: archive.tar.gz.00, .01 and so on."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.checksums: dict[str, str] = {}
        self._part: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        self._left = 0

    def write(self, data: bytes) -> int:
        written = len(data)
        while data:
            if self._left == 0:
                self._next()
            assert self._part is not None
            piece, data = data[: self._left], data[self._left :]
            self._part.write(piece)
            self._digest.update(piece)
            self._left -= len(piece)
        return written

    def close(self) -> None:
        if self._part is not None:
            self._part.close()
            self.checksums[Path(self._part.name).name] = self._digest.hexdigest()
            self._part = None

    def _next(self) -> None:
        self.close()
        self._part = open(self.folder / f"archive.tar.gz.{len(self.checksums):02d}", "wb")  # noqa: SIM115
        self._digest, self._left = hashlib.sha256(), self.size


def write_parts(folder: Path, files: Iterator[tuple[Path, str]], size: int = PART_BYTES) -> dict[str, str]:
    """Write files, given with their names in the archive, as parts of one archive; checksums by name of part."""
    parts = Parts(folder, size)
    with tarfile.open(fileobj=parts, mode="w|gz") as archive:  # type: ignore[call-overload]
        for path, name in files:
            archive.add(path, name)
    parts.close()
    return parts.checksums


def collect(folder: Path, python: str, data: Sequence[str], weights: bool, left_out: Sequence[str]) -> None:
    """Write the parts, their checksums and install.py into a new folder."""
    uv = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
    root = Path(os.environ.get("DPGEN_DATA", "data"))
    files = data_files(root, data, weights)
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"expected a new or an empty folder, got {folder} with files in it; remove it first.")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheels = Path(scratch, "wheels")
        collect_wheels(uv, wheels, python, requirements(uv, left_out, python))
        entries = [(path, f"wheels/{path.name}") for path in sorted(wheels.iterdir())]
        entries += [(root / file, f"data/{file}") for file in files]
        parts = write_parts(folder, iter(entries))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    least = dict(line.split(">=") for line in project if line.split(">=")[0] in LEFT_OUT)
    manifest = {"platform": PLATFORM, "python": python, "needs": least, "parts": parts}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    shutil.copy(Path(__file__).with_name("install.py"), folder / "install.py")
    print(f"{folder}: {len(entries) - len(files)} wheels and {len(files)} files of data in {len(parts)} parts.")
    print(f"Copy the folder to the other machine, and run there: python install.py{' --data data' if files else ''}")


def main(arguments: Sequence[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Collect all that an installation without network needs.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the other machine's Python")
    parser.add_argument("--data", nargs="*", choices=sorted(DATASETS), default=[], help="data sets of $DPGEN_DATA")
    parser.add_argument("--weights", action="store_true", help="weights for FID (96 MB), of $DPGEN_DATA")
    parser.add_argument("--with-xgboost", action="store_true", help="xgboost, whose GPU libraries have 300 MB")
    chosen = parser.parse_args(arguments)
    left_out = LEFT_OUT if chosen.with_xgboost else (*LEFT_OUT, "xgboost")
    collect(chosen.folder, chosen.python, chosen.data, chosen.weights, left_out)


if __name__ == "__main__":
    main(sys.argv[1:])

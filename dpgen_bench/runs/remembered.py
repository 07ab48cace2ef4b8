"""The folders of a user's own with which the runs of a folder of results were executed: RESULTS/runs/own_folders.txt.

`dpgen runs`, `dpgen report` and others use them when no `--config-dir` is given, so that a user's methods, protocols
and tables are found. A line is `config FOLDER` (yamls) or `modules FOLDER` (where the command was started). The file
has paths of one machine and names code that will be imported; it is not committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS = ("config", "modules")


@dataclass(frozen=True)
class Remembered:
    """Folders that still exist, and a note for each of those that do not."""

    config: tuple[Path, ...] = ()
    modules: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def file_of(results: Path) -> Path:
    """The file in a folder of results."""
    return results / "runs" / "own_folders.txt"


def remember(results: Path, config: Sequence[Path], working_directory: Path) -> None:
    """Add folders to those of a folder of results; nothing is written without a folder of yamls.

    Lines are appended, so that processes that write at the same time lose none. A line that is there twice is harmless.
    """
    if not config:
        return
    lines = [*(f"config {folder.resolve()}" for folder in config), f"modules {working_directory.resolve()}"]
    path = file_of(results)
    known = path.read_text().splitlines() if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as out:
        out.write("".join(f"{line}\n" for line in lines if line not in known))


def remembered(results: Path) -> Remembered:
    """The folders of a folder of results; those that do not exist any more are left out, with a note."""
    path = file_of(results)
    if not path.is_file():
        return Remembered()
    entries = dict.fromkeys(line.partition(" ")[::2] for line in path.read_text(errors="replace").splitlines())
    folders = {kind: [Path(folder) for found, folder in entries if found == kind] for kind in KINDS}
    gone = [folder for folder in folders["config"] if not folder.is_dir()]
    existing = {kind: tuple(folder for folder in folders[kind] if folder.is_dir()) for kind in KINDS}
    return Remembered(
        existing["config"],
        existing["modules"],
        tuple(
            f"{folder}, which has yamls of runs in {results}, does not exist any more: their methods and tables may "
            f"not be found; give its new place with --config-dir, or delete its line in {path}"
            for folder in gone
        ),
    )

"""Atomic writes and private files: a file is written under a temporary name and renamed when it is complete."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".*.tmp"  # pattern of the temporary names of `atomic`, before the suffix of the file


@contextmanager
def atomic(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Give a temporary path in the same folder, which is renamed to `path` if the block succeeds, and removed if not.

    The folder is made if it does not exist. The file and its name are on disk when the block ends. Its owner alone can
    read a private file; another has the permissions of all new files (umask).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp{path.suffix}")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666))
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """As `atomic`, for a folder: a new empty one is given, and becomes `path` if the block succeeds.

    An existing `path` is replaced, and kept until the new folder has its name.
    """
    temporary, earlier = (path.with_name(f".{path.name}.{kind}.tmp") for kind in ("new", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        shutil.rmtree(earlier, ignore_errors=True)
        if path.exists():
            path.rename(earlier)
        try:
            temporary.rename(path)
        except OSError:
            if earlier.exists():
                earlier.rename(path)
            raise
        shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Write the folder's entries to disk, so that a rename survives a power failure, if the system supports it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_private(folder: Path) -> None:
    """Make the folder and its parent, if they do not exist, with access for their owner only."""
    for path in (folder.parent, folder):
        if not path.exists():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)


def append_private(path: Path, text: str) -> None:
    """Append text to a file that only its owner can read, in a folder that only its owner can enter."""
    make_private(path.parent)
    path.parent.chmod(0o700)
    # The text of an error may contain a lone surrogate, which must not stop the run.
    with open(path, "a", errors="backslashreplace", opener=lambda name, flags: os.open(name, flags, 0o600)) as out:
        out.write(text)


def write_atomic(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write text or bytes to `path` such that a reader sees either the old file or the complete new one."""
    with atomic(path, private=private) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)

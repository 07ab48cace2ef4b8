"""Files that are either whole or absent: everything a run leaves is written beside its place and renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder; renamed to `path` if the block succeeds, removed if it raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=f".tmp{path.suffix}", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Push the folder's list of names to disk, so that a rename outlives a power cut; where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_private(folder: Path) -> None:
    """Make the folder, and its parent if need be, readable by their owner only."""
    for path in (folder.parent, folder):
        if not path.exists():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)


def append_private(path: Path, text: str) -> None:
    """Append text to a file that its owner alone can read, in a folder that its owner alone can enter."""
    make_private(path.parent)
    path.parent.chmod(0o700)
    # An error's text may hold half a character, which must not stop the run.
    with open(path, "a", errors="backslashreplace", opener=lambda name, flags: os.open(name, flags, 0o600)) as out:
        out.write(text)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write text or bytes to `path` so that a reader sees the old file or the new one, never half."""
    with atomic(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)

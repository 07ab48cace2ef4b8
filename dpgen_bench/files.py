"""Files that are either whole or absent: everything a run leaves is written beside its place and renamed."""

from __future__ import annotations

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
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write text or bytes to `path` so that a reader sees the old file or the new one, never half."""
    with atomic(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)

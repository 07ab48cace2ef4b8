"""Folders of a user's own: yamls next to those of the bench, and modules in them or where the command was started."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_FOLDERS: ContextVar[tuple[Path, ...]] = ContextVar("own folders", default=())


def own_folders() -> tuple[Path, ...]:
    """The folders with yamls of the user's own that are in use now, as absolute paths."""
    return _FOLDERS.get()


@contextmanager
def using(folders: Sequence[Path], modules: Sequence[Path] = ()) -> Iterator[None]:
    """Use these folders within the block, in which configs are composed and tables are read from them, too.

    Args:
        folders: folders with yamls, laid out as conf/ is. Of two files with one name the bench's own is used.
        modules: folders in which Python also finds modules, after all others.
    """
    token = _FOLDERS.set(tuple(folder.resolve() for folder in folders))
    added = [text for text in map(str, modules) if text not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        _FOLDERS.reset(token)
        for text in added:
            sys.path.remove(text)


def own_files(group: str) -> dict[str, Path]:
    """The user's yamls of a group, by their names, such as `mnist` or `demo/dpgan`."""
    return {
        path.relative_to(folder / group).with_suffix("").as_posix(): path
        for folder in own_folders()
        for path in sorted((folder / group).rglob("*.yaml"))
    }


def misnamed_methods(folders: Sequence[Path]) -> Iterator[str]:
    """A note for each yaml of a method whose `name`, which results have, is not that of the file, which is typed."""
    import yaml  # here, because only commands with folders of a user's own need it

    for path in (path for folder in folders for path in sorted((folder / "method").glob("*.yaml"))):
        try:
            content = yaml.safe_load(path.read_bytes())
        except yaml.YAMLError:  # reported where it is used
            continue
        name = content.get("name") if isinstance(content, dict) else None
        if name not in (None, path.stem):
            yield f"results of {path} have the name {name!r}, which is its entry `name`; give both the same name"


def unused_files(folders: Sequence[Path], conf: Path) -> Iterator[str]:
    """A note for each yaml in `folders` that has the name of one in `conf`, the folder of the bench."""
    for folder in folders:
        for group in sorted(path.name for path in conf.iterdir() if path.is_dir()):
            for path in sorted((folder / group).rglob("*.yaml")):
                own = conf / path.relative_to(folder)
                if own.exists() and not own.samefile(path):
                    yield f"{path} is not used, because the bench has a {group} of this name; rename it"

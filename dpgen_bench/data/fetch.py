"""`dpgen fetch`: download a dataset once, whole or not at all."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

from dpgen_bench.data.records import SPLITS, DatasetSpec, MissingData


class FetchFailed(RuntimeError):
    """A download did not come through; nothing of it was kept."""


def fetch(spec: DatasetSpec) -> Path:
    """Download `spec` to its place below `spec.root` and return that folder.

    The download goes to a temporary folder beside it, is read there in full, and takes its name only then: whatever
    happens on the way, no half-written dataset is left behind. Data that is already there and sound is kept;
    unsound data is put aside under the name FOLDER.damaged, not deleted.

    Raises:
        ValueError: if the dataset has nothing to download.
        FetchFailed: if the download fails, or what came cannot be read.
    """
    if spec.folder is None:
        raise ValueError(f"dataset {spec.name!r} has nothing to be downloaded by this command. {spec.how}".rstrip())
    target = Path(spec.root) / spec.folder
    if target.exists() and _readable(spec):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".fetch-{spec.name}-", dir=target.parent))
    try:
        try:
            spec.download(temporary)
            arrived = dataclasses.replace(cast(Any, spec), root=str(temporary))
            for split in SPLITS:
                arrived.load(split)
        except Exception as error:
            by_hand = f"\nOr get it {spec.how}." if spec.how else ""
            raise FetchFailed(
                f"dataset {spec.name!r} could not be downloaded: {type(error).__name__}: {error}\n"
                f"Nothing was written to {target.absolute()}. Check this machine's network and try again, or copy the "
                f"folder {spec.folder} there from another machine.{by_hand}"
            ) from error
        if target.exists():
            target.rename(_free_name(target))
        (temporary / spec.folder).rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _readable(spec: DatasetSpec) -> bool:
    try:
        for split in SPLITS:
            spec.load(split)
    except (MissingData, ValueError):
        return False
    return True


def _free_name(target: Path) -> Path:
    """A name beside `target` for what it held, that nothing has yet."""
    aside, number = target.with_name(f"{target.name}.damaged"), 2
    while aside.exists():
        aside, number = target.with_name(f"{target.name}.damaged-{number}"), number + 1
    return aside

"""`dpgen fetch`: download a dataset, completely or not at all; `dpgen fetch --check`: describe one that is there."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

from dpgen_bench.data.records import SPLITS, DatasetSpec


class FetchFailed(RuntimeError):
    """Raised when a download failed or cannot be read; nothing of it is kept."""


def fetch(spec: DatasetSpec) -> Path:
    """Download `spec` to its folder below `spec.root` and return that folder.

    The download is written to a temporary folder, and renamed when all its records could be read, so that an error
    leaves no incomplete dataset. A readable dataset is not downloaded again; an unreadable one is not deleted, but
    renamed to FOLDER.damaged.

    Raises:
        ValueError: If the dataset has nothing to download.
        FetchFailed: If the download fails, or cannot be read.
    """
    if spec.folder is None:
        raise ValueError(f"dataset {spec.name!r} cannot be downloaded by this command. {spec.how}".rstrip())
    target = Path(spec.root) / spec.folder
    if target.exists() and _readable(spec):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".fetch-{spec.name}-", dir=target.parent))
    try:
        try:
            spec.download(temporary)
            downloaded = dataclasses.replace(cast(Any, spec), root=str(temporary))
            for split in SPLITS:
                downloaded.load(split)
        except Exception as error:
            by_hand = f"\nOr get the data {spec.how}." if spec.how else ""
            raise FetchFailed(
                f"dataset {spec.name!r} could not be downloaded: {type(error).__name__}: {error}\n"
                f"Nothing was written to {target.absolute()}. Check this machine's network and try again, or copy the "
                f"folder {spec.folder} there from another machine.{by_hand}"
            ) from error
        if target.exists():
            target.rename(_unused_name(target))
        (temporary / spec.folder).rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def describe(spec: DatasetSpec) -> str:
    """One line about a dataset whose files can be read: its images, its classes, and the shape of a prepared image."""
    sizes = {split: len(spec.load(split)) for split in SPLITS}
    return (
        f"dataset {spec.name!r}: {sizes['train']:,} images for training and {sizes['test']:,} for testing, "
        f"{spec.num_classes} classes, prepared as {'x'.join(map(str, spec.image_shape))}; all files can be read"
    )


def _readable(spec: DatasetSpec) -> bool:
    """Whether all records can be read."""
    return not spec.problems()


def _unused_name(target: Path) -> Path:
    """A path FOLDER.damaged, FOLDER.damaged-2, ... in the same folder as `target` that does not exist yet."""
    path, number = target.with_name(f"{target.name}.damaged"), 2
    while path.exists():
        path, number = target.with_name(f"{target.name}.damaged-{number}"), number + 1
    return path

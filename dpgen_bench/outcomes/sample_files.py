"""Files of generated images: NumPy arrays, a folder for each class, a zip of these folders, or Parquet.

The ending of the path chooses the format. The same images give the same bytes, and a file or folder appears under its
name only when it is complete.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dpgen_bench.data.images import read_images
from dpgen_bench.data.records import Records
from dpgen_bench.utils.files import atomic, atomic_folder

FORMATS = "a name that ends in .npz, .zip or .parquet, or a folder's name without an ending"


@dataclass(frozen=True)
class Samples:
    """Generated images.

    Args:
        images: uint8 [n, c, h, w].
        labels: int64 [n].
        class_names: The name of each class; label k is `class_names[k]`.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]

    def png_files(self) -> Iterator[tuple[str, str, bytes]]:
        """(folder of the class, name of the file, content) of each image, in order; the names count the images."""
        folders = class_folders(self.class_names)
        for i, (image, label) in enumerate(zip(self.images, self.labels, strict=True)):
            buffer = io.BytesIO()
            Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).save(buffer, "PNG")
            yield folders[label], f"{i:06d}.png", buffer.getvalue()


def class_folders(class_names: Sequence[str]) -> list[str]:
    """The name of the folder of each class, such that sorting the names gives the order of the labels.

    Readers of such folders, this bench's included, number the classes in the order of their names. A folder therefore
    has its class's name only if this order is that of the labels, and every name can be a folder's on every system
    ("train" and "test" would be read as splits); otherwise the folders are "0_NAME", "1_NAME", ... Classes that are
    named by their numbers have these with leading zeros.
    """
    width = len(str(len(class_names) - 1))
    numbers = [f"{label:0{width}d}" for label in range(len(class_names))]
    if list(class_names) == [str(label) for label in range(len(class_names))]:
        return numbers
    safe = [re.sub(r"[^\w+ -]", "_", name).strip()[:100] for name in class_names]
    distinct = len({name.casefold() for name in safe}) == len(safe)
    if safe == sorted(class_names) == list(class_names) and distinct and not {"", "train", "test"} & set(safe):
        return safe
    return [f"{number}_{name}" for number, name in zip(numbers, safe, strict=True)]


def writer(out: Path, overwrite: bool) -> Callable[[Samples], None]:
    """A function that writes samples to `out`, which is checked before any image is drawn.

    Args:
        out: a name that ends in .npz, .zip or .parquet, or a folder.
        overwrite: whether an existing file, or a folder of samples, may be replaced.

    Raises:
        ValueError: for another ending, if `out` exists and must not be replaced, if its folder cannot be
            written to, or if pyarrow is needed and missing.
    """
    write = {".npz": _write_npz, ".zip": _write_zip, ".parquet": _write_parquet}.get(out.suffix.lower())
    if write is None and re.fullmatch(r"\.[A-Za-z]\w*", out.suffix):
        raise ValueError(f"expected --out to be {FORMATS}, got {out}, which ends in {out.suffix}; choose one of these.")
    if write is _write_parquet and importlib.util.find_spec("pyarrow") is None:
        raise ValueError(
            f"expected the package pyarrow for --out {out}, found none; install it with\n"
            "    pip install 'dpgen-bench[parquet]'\nor choose another format."
        )
    place = next(folder for folder in out.absolute().parents if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        why = "cannot be written to" if place.is_dir() else "is a file"
        raise ValueError(
            f"expected --out in a folder that can be written to, got {out}, but {place} {why}; choose another."
        )
    if out.exists():
        if not overwrite:
            raise ValueError(
                f"expected --out to name a new file or folder, got {out}, which exists; choose another name, or pass "
                "--overwrite to replace it."
            )
        if out.is_dir() != (write is None):
            is_now = "a folder" if out.is_dir() else "a file"
            raise ValueError(
                f"expected --out to name a {'folder' if write is None else 'file'} to be replaced, got {out}, which is "
                f"{is_now}; choose another name."
            )
        if out.is_dir() and (other := _other_file(out)):
            raise ValueError(
                f"expected --out to name a folder of samples to be replaced, got {out}, which also holds {other}; "
                "choose another name, or delete the folder yourself."
            )

    def write_or_refuse(samples: Samples) -> None:
        try:
            (write or _write_folder)(samples, out)
        except FileNotFoundError as error:  # such as of /proc, which says that it can be written to
            raise ValueError(
                f"expected --out in a folder that can be written to, got {out}, and no file could be made in {place}; "
                "choose another."
            ) from error

    return write_or_refuse


def _other_file(folder: Path) -> Path | None:
    """A file in the folder that `_write_folder` did not write, or None."""
    files = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if not path.is_dir() or path.is_symlink())
    return next((file for file in files if not re.fullmatch(r"[^/]+/\d{6,}\.png", file.as_posix())), None)


def _write_npz(samples: Samples, out: Path) -> None:
    with atomic(out) as temporary:
        names = np.array(samples.class_names)
        np.savez_compressed(temporary, images=samples.images, labels=samples.labels, class_names=names)


def _write_folder(samples: Samples, out: Path) -> None:
    with atomic_folder(out) as temporary:
        for folder, name, content in samples.png_files():
            (temporary / folder).mkdir(exist_ok=True)
            (temporary / folder / name).write_bytes(content)


def _write_zip(samples: Samples, out: Path) -> None:
    """The folders of the classes, not compressed again, and without dates."""
    with atomic(out) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as file:
        for folder, name, content in samples.png_files():
            entry = zipfile.ZipInfo(f"{folder}/{name}", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o644 << 16  # the same file on every system
            file.writestr(entry, content)


def _write_parquet(samples: Samples, out: Path) -> None:
    """Columns `image` and `label` as the library `datasets` of Hugging Face writes an Image and a ClassLabel."""
    import pyarrow as pa  # an optional package
    from pyarrow import parquet

    names = samples.class_names
    if len(set(names)) < len(names):  # a ClassLabel has distinct names
        names = tuple(class_folders(names))
    features = {"image": {"_type": "Image"}, "label": {"names": list(names), "_type": "ClassLabel"}}
    schema = pa.schema(
        [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64())],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    rows = [{"bytes": content, "path": name} for _, name, content in samples.png_files()]
    table = pa.Table.from_arrays([pa.array(rows, schema.field("image").type), pa.array(samples.labels)], schema=schema)
    with atomic(out) as temporary:
        parquet.write_table(table, temporary, row_group_size=1000)


def read_samples(path: Path, class_names: Sequence[str]) -> Records:
    """The samples of a .npz file or a folder that `dpgen sample` wrote, in the order in which they were drawn.

    Args:
        path: the file or folder.
        class_names: of the data set, whose class folders the folder may have; or it has numbers.

    Raises:
        ValueError: for another file or folder.
    """
    if path.is_file() and path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            if not {"images", "labels"} <= set(file.files):
                raise ValueError(f"expected {path} to contain images and labels, got {', '.join(file.files)}.")
            return Records(torch.from_numpy(file["images"]), torch.from_numpy(file["labels"]))
    numbered = class_folders([str(label) for label in range(len(class_names))])
    label_of = {name: label for names in (numbered, class_folders(class_names)) for label, name in enumerate(names)}
    files = sorted(path.glob("*/*.png"), key=lambda file: (file.name, file.parent.name))
    if not files or not {file.parent.name for file in files} <= label_of.keys():
        raise ValueError(
            f"expected {path} to be a run's folder, a .npz file, or a folder with class folders "
            f"{', '.join(class_folders(class_names))} of PNG files; write one with `dpgen sample`, or pass tensors."
        )
    with Image.open(files[0]) as first:
        (width, height), channels = first.size, 1 if first.mode == "L" else 3
    if width != height:
        raise ValueError(f"expected square images, got {width} x {height} pixels in {files[0]}; pass tensors instead.")
    labels = torch.tensor([label_of[file.parent.name] for file in files])
    return Records(read_images(files, width, channels, crop="none"), labels)

"""Pictures of samples: a montage of the first samples of each class, and the small file of it that a record keeps."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

MOST_BYTES = 40_000  # of a record's picture


def montage(path: Path, per_class: int) -> np.ndarray:
    """An image uint8 [H, W, c] of the first `per_class` samples of each class, a column each, with grey lines.

    Raises:
        ValueError: for an archive without images [n, c, h, w] and n labels.
    """
    with np.load(path, allow_pickle=False) as kept:
        images, labels = kept["images"], kept["labels"]
    if images.ndim != 4 or len(images) != len(labels) or len(labels) == 0:
        raise ValueError(f"expected images [n, c, h, w] and n labels in {path.name}, got {images.shape}.")
    channels, height, width = images.shape[1:]
    out = np.full((per_class * (height + 1) - 1, (labels.max() + 1) * (width + 1) - 1, channels), 128, np.uint8)
    for label in range(labels.max() + 1):
        for i, image in enumerate(images[labels == label][:per_class]):
            top, left = i * (height + 1), label * (width + 1)
            pixels = np.clip(np.rint(image), 0, 255).astype(np.uint8)
            out[top : top + height, left : left + width] = pixels.transpose(1, 2, 0)
    return out


def thumbnail(path: Path, most_rows: int = 8) -> tuple[bytes, int]:
    """The montage of a samples.npz as PNG, with as many rows as fit into `MOST_BYTES`.

    Returns:
        the file's content and its number of rows; pixels are those of the samples.

    Raises:
        ValueError: for an archive that `montage` refuses, or samples of which one row is too large.
    """
    for rows in range(most_rows, 0, -1):
        block = montage(path, rows)
        file = io.BytesIO()
        Image.fromarray(block[:, :, 0] if block.shape[2] == 1 else block).save(file, "PNG", optimize=True)
        if len(file.getvalue()) <= MOST_BYTES:
            return file.getvalue(), rows
    raise ValueError(
        f"expected samples of which one row of classes fits into {MOST_BYTES:,} bytes, got {len(file.getvalue()):,}."
    )

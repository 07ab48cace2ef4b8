"""The picture of a record: as many rows of samples as its size allows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpgen_bench.store.pictures import MOST_BYTES, montage, thumbnail


def test_a_thumbnail_has_as_many_rows_as_fit(tmp_path: Path) -> None:
    path = tmp_path / "samples.npz"
    images = np.random.default_rng(0).integers(256, size=(100, 1, 28, 28), dtype=np.uint8)
    np.savez(path, images=images, labels=np.arange(100) % 10)
    content, rows = thumbnail(path)
    assert rows == 4  # noise cannot be compressed: a row is 10 images of 784 bytes and the lines between them
    assert len(content) <= MOST_BYTES < len(content) / 4 * 5.2
    large = np.random.default_rng(0).integers(256, size=(10, 3, 64, 64), dtype=np.uint8)
    np.savez(path, images=large, labels=np.arange(10))
    assert montage(path, 1).shape == (64, 649, 3)
    with pytest.raises(ValueError, match="expected samples of which one row"):
        thumbnail(path)

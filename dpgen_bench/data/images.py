"""Decoding, cropping and resizing of image files to uint8 arrays, for all datasets that consist of image files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

Crop = Literal["none", "center"]
WIDE_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")


class BadImage(ValueError):
    """Raised for an image file that cannot be decoded to 8-bit pixels.

    Attributes:
        path: The file.
        problem: The reason, as a clause for a message.
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"cannot read the image {path.absolute()}: {problem}.")
        self.path, self.problem = path, problem


def check_crop(crop: str) -> None:
    """Raise ValueError unless `crop` is a value that `read_image` accepts."""
    if crop not in ("none", "center"):
        raise ValueError(f"expected crop 'none' or 'center', got {crop!r}.")


def read_image(path: Path, size: int, channels: int, crop: Crop) -> np.ndarray:
    """One image file as uint8 [channels, size, size].

    The image is rotated by its EXIF tag, converted to grey (ITU-R 601) or RGB, cropped to the central square
    (`crop="center"`) or not (`crop="none"`), and resized with Pillow's bilinear filter with antialiasing.

    Raises:
        BadImage: If the file is not an image, is incomplete, or has more than 8 bits per channel.
    """
    try:
        with Image.open(path) as file:
            if file.mode in WIDE_MODES:
                raise BadImage(path, f"its pixels are {file.mode}, not 8-bit; convert it to an 8-bit PNG or JPEG")
            image = ImageOps.exif_transpose(file).convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise BadImage(path, str(error) or type(error).__name__) from error
    if crop == "center":
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        # resize(box=...) would not do: its filter also reads the pixels around the box.
        image = image.crop((left, top, left + side, top + side))
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def read_images(paths: Sequence[Path], size: int, channels: int, crop: Crop) -> Tensor:
    """The images of `paths`, in order, as uint8 [n, channels, size, size]; one thread for each CPU decodes them.

    Raises:
        BadImage: For the first file, in order, that cannot be read.
    """
    images = np.empty((len(paths), channels, size, size), dtype=np.uint8)
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        decoded = pool.map(lambda path: read_image(path, size, channels, crop), paths)
        try:
            for row, image in zip(images, decoded, strict=True):
                row[...] = image
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return torch.from_numpy(images)

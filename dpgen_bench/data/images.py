"""Decoding, cropping and resizing of image files to uint8 arrays, for all datasets that consist of image files."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from dpgen_bench.utils.cores import usable_cores

Crop = Literal["none", "center"]
WIDE_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
GREY_MODES = ("1", "L", "LA", "La", *WIDE_MODES)
# What Pillow's readers of the various formats raise for corrupt files.
PILLOW_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


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


def check_channels(channels: int | None) -> None:
    """Raise ValueError unless `channels` is 1, 3, or None for the images to decide."""
    if channels not in (None, 1, 3):
        raise ValueError(
            f"expected dataset.channels 1 (grey), 3 (RGB) or null (decided by the images), got {channels!r}."
        )


def prepare(image: Image.Image, size: int | None, channels: int, crop: Crop) -> np.ndarray:
    """An 8-bit image as uint8 [channels, height, width], as all datasets of images prepare it.

    It is converted to grey (ITU-R 601) or RGB, cropped to the central square (`crop="center"`) or not (`crop="none"`),
    and resized to `size` x `size` with Pillow's bilinear filter with antialiasing. Without `size` it keeps its own.

    Raises:
        ValueError: If it has more than 8 bits per channel.
    """
    if image.mode in WIDE_MODES:
        raise ValueError(f"its pixels are {image.mode}, not 8-bit; convert it to an 8-bit PNG or JPEG")
    image = image.convert("L" if channels == 1 else "RGB")
    if size is not None:
        if crop == "center":
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            # resize(box=...) would not do: its filter also reads the pixels around the box.
            image = image.crop((left, top, left + side, top + side))
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def is_grey(image: Image.Image) -> bool:
    """Whether red, green and blue are equal in every pixel. An image of one channel is not decoded to find that out."""
    if image.mode in GREY_MODES:
        return True
    red, green, blue = image.convert("RGB").split()
    return red.tobytes() == green.tobytes() == blue.tobytes()


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """A context with an open image file, in which only the image is used: each error in it is one of the file.

    Raises:
        BadImage: If the file is not an image, or Pillow raises an error in the context.
    """
    try:
        with Image.open(path) as file:
            yield file
    except PILLOW_ERRORS as error:
        raise BadImage(path, str(error).rstrip(".") or type(error).__name__) from error


def read_image(path: Path, size: int, channels: int, crop: Crop) -> np.ndarray:
    """One image file as uint8 [channels, size, size]: rotated by its EXIF tag, then as `prepare` does it.

    Raises:
        BadImage: If the file is not an image, is incomplete, or has more than 8 bits per channel.
    """
    with _opened(path) as file:
        return prepare(ImageOps.exif_transpose(file), size, channels, crop)


def count_channels(paths: Sequence[Path]) -> int:
    """3 if one of the image files has a colour, else 1; one thread for each CPU decodes them.

    Raises:
        BadImage: For the first file, in order, that cannot be read, if no file before it has a colour.
    """

    def grey(path: Path) -> bool:
        with _opened(path) as file:
            return is_grey(file)

    with ThreadPoolExecutor(max_workers=usable_cores()) as pool:
        try:
            return 1 if all(pool.map(grey, paths)) else 3
        finally:
            pool.shutdown(cancel_futures=True)


def unreadable(paths: Sequence[Path]) -> list[BadImage]:
    """An error for each of the image files that cannot be read, in order."""

    def problem(path: Path) -> BadImage | None:
        try:
            read_image(path, size=1, channels=3, crop="none")
        except BadImage as error:
            return error
        return None

    with ThreadPoolExecutor(max_workers=usable_cores()) as pool:
        return [error for error in pool.map(problem, paths) if error is not None]


def read_images(paths: Sequence[Path], size: int, channels: int, crop: Crop) -> Tensor:
    """The images of `paths`, in order, as uint8 [n, channels, size, size]; one thread for each CPU decodes them.

    Raises:
        BadImage: For the first file, in order, that cannot be read.
    """
    images = np.empty((len(paths), channels, size, size), dtype=np.uint8)
    with ThreadPoolExecutor(max_workers=usable_cores()) as pool:
        decoded = pool.map(lambda path: read_image(path, size, channels, crop), paths)
        try:
            for row, image in zip(images, decoded, strict=True):
                row[...] = image
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return torch.from_numpy(images)

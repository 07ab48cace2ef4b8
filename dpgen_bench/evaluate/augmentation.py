"""Random changes of images, by which classifiers are trained on more than their samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CROP_PADDING = 4
SCALE, ROTATION = 0.2, 45.0  # of crop_scale_rotate: the largest change of a side, and degrees


@dataclass(frozen=True)
class Augmentation:
    """A random change of each image.

    Attributes:
        draw: (n, rng) -> the random moves of n images [n, k]; rng is a CPU generator.
        apply: (images [b, c, h, w], moves [b, k]) -> changed images, of the same type or float32, on the same scale.
    """

    draw: Callable[[int, torch.Generator], Tensor]
    apply: Callable[[Tensor, Tensor], Tensor]


def crop_flip(images: Tensor, moves: Tensor) -> Tensor:
    """Shift images [b, c, h, w] by up to `CROP_PADDING` pixels in each direction and mirror them; new pixels are black.

    Args:
        moves: int64 [b, 3]: the crop's first row and column within the padded image, 0..2·CROP_PADDING, and whether
            the image is mirrored, 0 or 1.
    """
    height, width = images.shape[2:]
    # Index arrays that pick, for each image, the rows and columns of its crop.
    padded = nn.functional.pad(images, (CROP_PADDING,) * 4)
    columns = torch.arange(width, device=images.device).expand(len(images), width)
    columns = torch.where(moves[:, 2:] == 1, columns.flip(1), columns) + moves[:, 1:2]
    rows = torch.arange(height, device=images.device) + moves[:, :1]
    image = torch.arange(len(images), device=images.device)
    channel = torch.arange(images.shape[1], device=images.device)
    return padded[
        image[:, None, None, None], channel[None, :, None, None], rows[:, None, :, None], columns[:, None, None]
    ]


def draw_crop_flip(n: int, rng: torch.Generator) -> Tensor:
    """Uniform moves int64 [n, 3] of `crop_flip`."""
    shifts = torch.randint(2 * CROP_PADDING + 1, (n, 2), generator=rng)
    return torch.cat([shifts, torch.randint(2, (n, 1), generator=rng)], dim=1)


def affine(images: Tensor, moves: Tensor) -> Tensor:
    """Shift, scale and rotate images [b, c, h, w] about their centre by bilinear interpolation; new pixels are black.

    Args:
        moves: float32 [b, 5]: the shift down and to the right in pixels, the factors of height and width, and the
            counterclockwise rotation in degrees.

    Returns:
        float32 images of the same shape.
    """
    height, width = images.shape[2:]
    down, right, tall, wide, degrees = moves.float().unbind(1)
    cos, sin = torch.cos(degrees * math.pi / 180.0), torch.sin(degrees * math.pi / 180.0)
    # In coordinates from -1 to 1, where the pixel (x, y) of the result comes from.
    from_x = torch.stack([cos / wide, -sin / wide * height / width, -2.0 * right / width], dim=1)
    from_y = torch.stack([sin / tall * width / height, cos / tall, -2.0 * down / height], dim=1)
    grid = nn.functional.affine_grid(torch.stack([from_x, from_y], dim=1), list(images.shape), align_corners=False)
    return nn.functional.grid_sample(images.float(), grid, padding_mode="zeros", align_corners=False)


def draw_crop_scale_rotate(n: int, rng: torch.Generator) -> Tensor:
    """Moves float32 [n, 5] of `affine`: for each image a crop, a scale or a rotation, with probability 1/3 each.

    A crop shifts by a whole number of up to `CROP_PADDING` pixels in each direction, a scale changes height and width
    independently by up to `SCALE`, and a rotation turns by a whole number of up to `ROTATION` degrees. This is the
    augmentation by which Zhao, Mopuri & Bilen (ICLR 2021) train on condensed sets, except that they interpolate to the
    nearest pixel when they scale, and fill with the image's mean.
    """
    crop = torch.randint(-CROP_PADDING, CROP_PADDING + 1, (n, 2), generator=rng).float()
    scale = 1.0 + SCALE * (2.0 * torch.rand(n, 2, generator=rng) - 1.0)
    rotation = torch.randint(-int(ROTATION), int(ROTATION) + 1, (n, 1), generator=rng).float()
    kind = torch.randint(3, (n, 1), generator=rng)
    return torch.cat(
        [
            torch.where(kind == 0, crop, torch.zeros(())),
            torch.where(kind == 1, scale, torch.ones(())),
            torch.where(kind == 2, rotation, torch.zeros(())),
        ],
        dim=1,
    )


AUGMENTATIONS = {
    "crop_flip": Augmentation(draw_crop_flip, crop_flip),
    "crop_scale_rotate": Augmentation(draw_crop_scale_rotate, affine),
}

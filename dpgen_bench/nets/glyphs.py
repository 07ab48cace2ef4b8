"""A program that draws characters: distance fields of fonts that are turned, stretched, bent and made thicker.

A drawing is described by a face and by the numbers of a style, each in [-1, 1]. `GlyphGenerator` has a number of
drawings for each class and draws slight variations of them. It has no trained parameters.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 48  # pixels of a distance field in each direction
FIELD = 512.0  # steps of a distance field in one side of an image; 128 is the edge of the character
_BENDS = 3  # control points in each direction of the displacement that bends a character
_RANGES = {
    "rotation": math.radians(30),
    "shear": 0.5,
    "log width": 0.45,
    "log height": 0.35,
    "right": 0.12,  # in image sides, as are the next values
    "down": 0.12,
    "thickness": 0.045,
    "log softness": 0.8,
}
_SOFTNESS = 0.06  # the width of the grey edge of a character
_BEND = 0.09
STYLE = len(_RANGES) + 2 * _BENDS**2  # the numbers that describe a style


def draw(fields: Tensor, styles: Tensor, height: int, width: int) -> Tensor:
    """Draw characters: bright on black, float32 [n, height, width] in [0, 1].

    Args:
        fields: distance fields uint8 [n, SIZE, SIZE].
        styles: [n, STYLE] in [-1, 1], in the order of _RANGES, then displacements.
    """
    scales = torch.tensor(list(_RANGES.values()), device=styles.device)
    angle, shear, wide, high, right, down, thick, soft = (styles[:, : len(_RANGES)] * scales).unbind(dim=1)
    cos, sin = angle.cos(), angle.sin()
    # From places of the image to places of the character, both in [-1, 1]: the inverse of stretch, shear and rotation.
    x, y = (-wide).exp(), (-high).exp()
    rows = [x * (cos + shear * sin), x * (shear * cos - sin), -2.0 * right, y * sin, y * cos, -2.0 * down]
    theta = torch.stack(rows, dim=1).reshape(-1, 2, 3)
    grid = F.affine_grid(theta, [len(styles), 1, height, width], align_corners=False)
    bends = styles[:, len(_RANGES) :].reshape(-1, 2, _BENDS, _BENDS) * (2.0 * _BEND)
    grid = grid + F.interpolate(bends, (height, width), mode="bicubic", align_corners=False).permute(0, 2, 3, 1)
    found = F.grid_sample(fields[:, None].float(), grid, padding_mode="border", align_corners=False).squeeze(1)
    distance = (found - 128.0) / FIELD
    softness = _SOFTNESS * soft.exp()
    return (0.5 + (distance + thick[:, None, None]) / softness[:, None, None]).clamp(0.0, 1.0)


class GlyphGenerator(nn.Module):
    """Draws variations of drawings, chosen with given probabilities: net(z uniform [b, 1 + STYLE], y) -> images.

    Attributes:
        faces: the number of each drawing's face, int64 [classes * drawings]; drawing does not use it.
        fields: distance fields uint8 [classes * drawings, SIZE, SIZE].
        styles: [classes * drawings, STYLE].
        chances: the cumulated probabilities of the drawings of each class [classes, drawings].

    Args:
        image_shape: (c, h, w); all channels are the same.
        num_classes: the number of classes.
        latent_dim: 1 + STYLE.
        drawings: the number of drawings of each class.
        degree: how far the style of an image is from that of its drawing.
    """

    def __init__(
        self, image_shape: tuple[int, int, int], num_classes: int, latent_dim: int, drawings: int, degree: float
    ) -> None:
        super().__init__()
        self.image_shape, self.degree, self.drawings = tuple(image_shape), degree, drawings
        rows = num_classes * drawings
        self.faces = nn.Parameter(torch.zeros(rows, dtype=torch.int64), requires_grad=False)
        self.fields = nn.Parameter(torch.zeros(rows, SIZE, SIZE, dtype=torch.uint8), requires_grad=False)
        self.styles = nn.Parameter(torch.zeros(rows, latent_dim - 1), requires_grad=False)
        self.chances = nn.Parameter(torch.zeros(num_classes, drawings), requires_grad=False)

    def fill(self, faces: Tensor, fields: Tensor, styles: Tensor, weights: Tensor) -> None:
        """Set the drawings, and the weights [classes, drawings] with which they are chosen."""
        self.faces.data.copy_(faces)
        self.fields.data.copy_(fields)
        self.styles.data.copy_(styles)
        self.chances.data.copy_(weights.double().cumsum(dim=1) / weights.double().sum(dim=1, keepdim=True))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        drawing = (
            torch.searchsorted(self.chances[y], z[:, :1].contiguous(), right=True)
            .squeeze(1)
            .clamp(max=self.drawings - 1)
        )
        chosen = y * self.drawings + drawing
        styles = varied(self.styles[chosen], 2.0 * z[:, 1:] - 1.0, self.degree)
        channels, height, width = self.image_shape
        return draw(self.fields[chosen], styles, height, width)[:, None].expand(-1, channels, -1, -1)


def varied(styles: Tensor, noise: Tensor, degree: float) -> Tensor:
    """Styles moved by `degree` times noise in [-1, 1], within [-1, 1]."""
    return (styles + degree * noise).clamp(-1.0, 1.0)


def embed(images: Tensor) -> Tensor:
    """Small blurred images as rows of whole numbers 0..127, [n, d]; d is 196 to 729 for square images.

    An embedding sums whole numbers below 2^24, so it is the same on every device. Squared distances exceed 2^24 for
    large d, so that float32 would round them; float64 has all of them exactly, in any order of summation.

    Args:
        images: [n, c, h, w] in [0, 1]; other values are set to the nearest of them, and NaN to 0.
    """
    pixels = (images.float().nan_to_num(0.0).clamp(0.0, 1.0) * 255.0).round().mean(dim=1, keepdim=True).round()
    size = max(1, min(images.shape[2:]) // 14)
    sums = F.pad((F.avg_pool2d(pixels, size) * size**2).round(), (1, 1, 1, 1))
    rows = sums[..., :-2, :] + 2.0 * sums[..., 1:-1, :] + sums[..., 2:, :]
    blurred = rows[..., :-2] + 2.0 * rows[..., 1:-1] + rows[..., 2:]
    return (blurred * (127.0 / (16.0 * 255.0 * size**2))).round().flatten(1)


class UniformPixels(nn.Module):
    """The latents as an image: net(z uniform [b, c h w], y) -> [b, c, h, w]. It has no trained parameters."""

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int, latent_dim: int) -> None:
        super().__init__()
        self.image_shape = tuple(image_shape)
        self.levels = nn.Parameter(torch.tensor(256.0), requires_grad=False)  # `NetGenerator` asks for the device

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        level = (z * self.levels).floor().clamp(max=255.0)  # each of 0..255 is equally likely
        return (level / 255.0).reshape(-1, *self.image_shape)

"""A small conditional U-Net of layers for which clipped gradients are fast: convolutions, linear maps and embeddings.

It has the structure of the networks of Ho, Jain & Abbeel (NeurIPS 2020) and Karras et al. (NeurIPS 2022): residual
blocks, which the noise level and the class scale and shift, and self-attention at the lowest resolution. Its group
normalisation has no parameters of its own, because the scale and the shift that follow it have them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FREQUENCIES = 16  # of the features of the noise level


class UNet(nn.Module):
    """F(x, t, y) for images x [b, c, h, w], numbers t [b] that describe the noise, and labels y int64 [b].

    The label `num_classes` stands for no class.

    Args:
        image_shape: (c, h, w); h and w are divisible by patch * 2^(resolutions - 1).
        num_classes: The labels are 0..num_classes.
        width: Number of channels at the highest resolution.
        multipliers: Of the number of channels at each resolution, each half of the one before.
        blocks: Number of residual blocks at each resolution on the way down; on the way up there is one more.
        patch: The input is cut into patches of patch x patch pixels, each of which is one position of the network.
        embedding: Dimension of the embedding of noise level and class.

    Raises:
        ValueError: For images whose sides cannot be halved as often as needed.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        width: int = 32,
        multipliers: Sequence[int] = (1, 2, 2),
        blocks: int = 2,
        patch: int = 1,
        embedding: int = 256,
    ) -> None:
        super().__init__()
        channels, *sides = image_shape
        factor = patch * 2 ** (len(multipliers) - 1)
        if any(side % factor for side in sides):
            raise ValueError(
                f"expected images whose sides are divisible by {factor} (patch={patch}, {len(multipliers)} "
                f"resolutions), got {sides[0]}x{sides[1]}; set other multipliers, another patch or the dataset's "
                "image_size."
            )
        self.patch = patch
        # The embedding of the noise level and the label.
        self.noise = nn.Linear(2 * _FREQUENCIES, embedding)
        self.label = nn.Embedding(num_classes + 1, embedding)
        self.embed = nn.Linear(embedding, embedding)

        # Down to the lowest resolution; the output of every block is kept for the way up.
        widths = [width * multiplier for multiplier in multipliers]
        self.enter = nn.Conv2d(channels * patch**2, width, 3, padding=1)
        skips, current = [width], width
        self.down = nn.ModuleList()
        for level, wide in enumerate(widths):
            for _ in range(blocks):
                self.down.append(Block(current, wide, embedding))
                current = wide
                skips.append(current)
            if level + 1 < len(widths):
                self.down.append(Halve())
                skips.append(current)
        self.middle = nn.ModuleList(
            [Block(current, current, embedding), Attention(current), Block(current, current, embedding)]
        )
        # And up again, where each block also gets what was kept.
        self.up = nn.ModuleList()
        for level, wide in reversed(list(enumerate(widths))):
            for _ in range(blocks + 1):
                self.up.append(Block(current + skips.pop(), wide, embedding))
                current = wide
            if level:
                self.up.append(Double())
        self.leave = nn.Conv2d(current, channels * patch**2, 3, padding=1)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        frequencies = torch.exp(torch.linspace(0.0, math.log(100.0), _FREQUENCIES, dtype=x.dtype, device=x.device))
        angles = t[:, None] * frequencies
        e = F.silu(self.noise(torch.cat([angles.cos(), angles.sin()], dim=1)) + self.label(y))
        e = F.silu(self.embed(e))
        h = self.enter(F.pixel_unshuffle(x, self.patch))
        skips = [h]
        for layer in self.down:
            h = layer(h, e)
            skips.append(h)
        for layer in self.middle:
            h = layer(h, e)
        for layer in self.up:
            h = layer(torch.cat([h, skips.pop()], dim=1) if isinstance(layer, Block) else h, e)
        return F.pixel_shuffle(self.leave(F.silu(normalised(h))), self.patch)


def normalised(h: Tensor) -> Tensor:
    """Group normalisation of h [b, c, height, width], with 4 channels or more in a group, without parameters."""
    groups = math.gcd(h.shape[1], 8) if h.shape[1] >= 32 else math.gcd(h.shape[1], max(1, h.shape[1] // 4))
    return F.group_norm(h, groups, eps=1e-5)


class Block(nn.Module):
    """A residual block of two convolutions; the embedding e [b, embedding] scales and shifts what is between."""

    def __init__(self, wide_in: int, wide_out: int, embedding: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(wide_in, wide_out, 3, padding=1)
        self.affine = nn.Linear(embedding, 2 * wide_out)
        self.second = nn.Conv2d(wide_out, wide_out, 3, padding=1)
        self.skip = nn.Conv2d(wide_in, wide_out, 1) if wide_in != wide_out else None

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        h = self.first(F.silu(normalised(x)))
        scale, shift = self.affine(e)[:, :, None, None].chunk(2, dim=1)
        h = self.second(F.silu(normalised(h) * (1.0 + scale) + shift))
        return ((x if self.skip is None else self.skip(x)) + h) * 0.5**0.5


class Attention(nn.Module):
    """Self-attention of one head between the positions of an image, added to its input."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(wide, 3 * wide)
        self.leave = nn.Linear(wide, wide)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        positions = normalised(x).flatten(2).transpose(1, 2)  # [b, positions, wide]
        q, k, v = self.qkv(positions).chunk(3, dim=2)
        weights = torch.softmax(q @ k.transpose(1, 2) * q.shape[2] ** -0.5, dim=2)
        return (x + self.leave(weights @ v).transpose(1, 2).view_as(x)) * 0.5**0.5


class Halve(nn.Module):
    """Half of the resolution, by means of 2 x 2 positions."""

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        return F.avg_pool2d(x, 2)


class Double(nn.Module):
    """Twice the resolution; each position is copied four times."""

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)

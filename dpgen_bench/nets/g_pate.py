"""G-PATE's generator and teacher for 28x28 images (Long et al., "G-PATE", NeurIPS 2021), with the sizes of its code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAME = (1, 2, 1, 2)  # padding with which a 5x5 convolution of stride 2 halves an even side, as TensorFlow's "SAME"


def _quarter(image_shape: Sequence[int]) -> int:
    """A quarter of the height and width.

    Raises:
        ValueError: For images that are not square, or whose side is no multiple of 4.
    """
    _, h, w = image_shape
    if h != w or h % 4:
        raise ValueError(f"expected square images whose side is a multiple of 4, got {h}x{w}; choose another dataset.")
    return h // 4


def _with_label(h: Tensor, onehot: Tensor) -> Tensor:
    """Features [b, c, ...] with the label [b, k] as k further features, constant over the image."""
    onehot = onehot.reshape(*onehot.shape, *[1] * (h.dim() - 2))
    return torch.cat([h, onehot.expand(-1, -1, *h.shape[2:])], dim=1)


def _convolve(conv: nn.Conv2d, h: Tensor, onehot: Tensor) -> Tensor:
    """What a convolution of stride 2 gives for `_with_label(h, onehot)` [b, c + k, s, s], padded to an output of s/2.

    The planes of a label are constant, so what they add to a pixel is a sum over the taps of the kernel that lie within
    the image, the same for all images of the label: a small product in place of k/(c + k) of the convolution.
    """
    features = F.conv2d(F.pad(h, SAME), conv.weight[:, : h.shape[1]], conv.bias, stride=2)
    image = torch.ones(1, 1, *h.shape[2:], dtype=h.dtype, device=h.device)
    within = F.unfold(F.pad(image, SAME), conv.kernel_size, stride=2)[0]  # [25, pixels] of 0 and 1
    of_label = conv.weight[:, h.shape[1] :].flatten(2) @ within
    return features + torch.einsum("bk,ckp->bcp", onehot, of_label).reshape(features.shape)


class PateGenerator(nn.Module):
    """G: two linear layers and two transposed 5x5 convolutions, each with the label and (but for the last) batch norm.

    Args:
        image_shape: (c, h, h), with h a multiple of 4.
        num_classes: The labels are 0..num_classes-1.
        latent_dim: Dimension of z.
        width: Channels of the convolutions' input; the first linear layer has 8 times as many units.
    """

    def __init__(self, image_shape: Sequence[int], num_classes: int, latent_dim: int = 100, width: int = 128) -> None:
        super().__init__()
        self.num_classes, self.grid = num_classes, (width, _quarter(image_shape), _quarter(image_shape))
        units, cells = 8 * width, width * self.grid[1] ** 2
        self.first, self.norm1 = nn.Linear(latent_dim + num_classes, units), nn.BatchNorm1d(units)
        self.second, self.norm2 = nn.Linear(units + num_classes, cells), nn.BatchNorm1d(cells)
        twice: dict[str, Any] = {"kernel_size": 5, "stride": 2, "padding": 2, "output_padding": 1}
        self.third, self.norm3 = nn.ConvTranspose2d(width + num_classes, width, **twice), nn.BatchNorm2d(width)
        self.image = nn.ConvTranspose2d(width + num_classes, image_shape[0], **twice)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Images in [0, 1] [b, c, h, h] of latents z [b, latent_dim] and labels y int64 [b]."""
        label = F.one_hot(y, self.num_classes).to(z.dtype)
        h = F.relu(self.norm1(self.first(_with_label(z, label))))
        h = F.relu(self.norm2(self.second(_with_label(h, label)))).reshape(-1, *self.grid)
        h = F.relu(self.norm3(self.third(_with_label(h, label))))
        return torch.sigmoid(self.image(_with_label(h, label)))


class ConvTeacher(nn.Module):
    """A teacher: two 5x5 convolutions of stride 2 and a linear layer, each of which also sees the label.

    At 1x28x28 with 10 classes it has the 555,059 parameters of the authors' code, which has no batch norm here.

    Args:
        image_shape: (c, h, h), with h a multiple of 4.
        num_classes: k; the labels are 0..k-1.
        width: Units of the linear layer.
        filters: Channels of the second convolution besides k; the first one has c + k.
    """

    def __init__(self, image_shape: Sequence[int], num_classes: int, width: int = 256, filters: int = 32) -> None:
        super().__init__()
        self.num_classes, first = num_classes, image_shape[0] + num_classes
        second, cells = filters + num_classes, _quarter(image_shape) ** 2
        self.conv1 = nn.Conv2d(image_shape[0] + num_classes, first, 5, stride=2)
        self.conv2 = nn.Conv2d(first + num_classes, second, 5, stride=2)
        self.linear = nn.Linear(second * cells + num_classes, width)
        self.logit = nn.Linear(width + num_classes, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Logits [b] that images x [b, c, h, h] in [0, 1] with labels y int64 [b] are real."""
        label = F.one_hot(y, self.num_classes).to(x.dtype)
        h = F.leaky_relu(_convolve(self.conv1, x, label), 0.2)
        h = F.leaky_relu(_convolve(self.conv2, h, label), 0.2).flatten(1)
        # As self.linear, in an order in which the gradient of its weight, most of the parameters, comes out contiguous.
        h = F.leaky_relu((self.linear.weight @ _with_label(h, label).mT).mT + self.linear.bias, 0.2)
        return self.logit(_with_label(h, label)).flatten()

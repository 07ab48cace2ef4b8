"""DP-Sinkhorn's generator based on DCGAN (Cao et al., NeurIPS 2021, appendix D.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

ACTIVATIONS = {"relu": lambda: nn.ReLU(), "leaky_relu": lambda: nn.LeakyReLU(0.2)}


def _side(image_shape: Sequence[int]) -> int:
    """Height and width of the images, 28 or 32.

    Raises:
        ValueError: For images of another size.
    """
    _, h, w = image_shape
    if h != w or h not in (28, 32):
        raise ValueError(
            f"the convolutional generator is made for 28x28 or 32x32 images, got {h}x{w}: choose a dataset of that "
            "size, or set the dataset's image_size to one of them."
        )
    return h


def _layers_28(latent: int, width: int, channels: int) -> list[nn.Module]:
    last = nn.ConvTranspose2d(width, channels, 3, stride=1, padding=1)
    # PyTorch scales the initial weights of a transposed convolution by its output channels. They would be 8 times as
    # large as those of the authors' Conv2d, and tanh would be saturated. This is the bound of Conv2d, 1/sqrt(fan in).
    bound = 1.0 / math.sqrt(9 * width)
    for parameter in last.parameters():
        nn.init.uniform_(parameter, -bound, bound)
    return [
        nn.ConvTranspose2d(latent, 4 * width, 7, bias=False),  # 1 -> 7
        nn.BatchNorm2d(4 * width),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, stride=2, padding=1, bias=False),  # 7 -> 14
        nn.BatchNorm2d(2 * width),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),  # 14 -> 28
        nn.BatchNorm2d(width),
        last,
    ]


def _layers_32(latent: int, width: int, channels: int) -> list[nn.Module]:
    return [
        nn.ConvTranspose2d(latent, 4 * width, 4),  # 1 -> 4
        nn.BatchNorm2d(4 * width, affine=False),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, stride=2, padding=1, bias=False),  # 4 -> 8
        nn.BatchNorm2d(2 * width),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),  # 8 -> 16
        nn.BatchNorm2d(width),
        nn.ConvTranspose2d(width, channels, 4, stride=2, padding=1, bias=False),  # 16 -> 32
    ]


class ConvGenerator(nn.Module):
    """Four transposed convolutions over a latent and a learned embedding of the label, with batch norm and tanh.

    28x28 (MNIST, Fashion-MNIST): 256@7x7 (kernel 7), 128@14x14, 64@28x28 (kernels 4, strides 2), c@28x28 (kernel 3).
    Only the last layer has a bias. At 1x28x28 with 10 classes there are 857,577 parameters with (latent_dim, label_dim)
    = (12, 4), as in the paper's text, and 957,969 with (16, 8), as in the released settings. The last layer is a
    transposed convolution in the text and Conv2d in the released code. At stride 1 and padding 1 they have the same
    functions and parameters, but PyTorch initialises them differently; here the layer is initialised like Conv2d.

    32x32 (CelebA; Table 6, row "DCGAN"): 256@4x4, 128@8x8, 64@16x16, c@32x32, all with kernel 4. The text has the 28x28
    layers only; these are those of `conv_cond_sq` in the released code, with 806,536 parameters at 3x32x32 with 2
    classes and (32, 4). The first layer has a bias and a batch norm without scale and shift, unlike the others. The
    bias gets no gradient in training mode, because the batch norm subtracts the mean.

    Args:
        image_shape: (c, 28, 28) or (c, 32, 32).
        num_classes: The labels are 0..num_classes-1.
        latent_dim, label_dim: Dimensions of z and of the label's embedding.
        activation: Activation of hidden layers: "relu" (text), or "leaky_relu" with slope 0.2 (released settings).
        width: Filters of the last hidden layer; the layers before it have 2 and 4 times as many.

    Raises:
        ValueError: For images of another size, or an unknown activation.
    """

    value_range: ClassVar[tuple[float, float]] = (-1.0, 1.0)

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        latent_dim: int = 12,
        label_dim: int = 4,
        activation: Literal["relu", "leaky_relu"] = "relu",
        width: int = 64,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"expected activation among {', '.join(ACTIVATIONS)}, got {activation!r}.")
        build = {28: _layers_28, 32: _layers_32}[_side(image_shape)]
        self.label = nn.Embedding(num_classes, label_dim)
        self.layers = nn.Sequential()
        for layer in build(latent_dim + label_dim, width, image_shape[0]):
            self.layers.append(layer)
            if isinstance(layer, nn.BatchNorm2d):
                self.layers.append(ACTIVATIONS[activation]())

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Images in [-1, 1] [b, c, h, w] of latents z [b, latent_dim] and labels y int64 [b].

        In training mode the images of a batch depend on each other, and the running statistics that evaluation mode
        uses are updated.
        """
        h = torch.cat([z, self.label(y)], dim=1)
        return torch.tanh(self.layers(h[:, :, None, None]))

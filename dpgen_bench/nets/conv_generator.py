"""DP-Sinkhorn's DCGAN-based generator (Cao et al., NeurIPS 2021, appendix D.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

ACTIVATIONS = {"relu": lambda: nn.ReLU(), "leaky_relu": lambda: nn.LeakyReLU(0.2)}


def _side(image_shape: Sequence[int]) -> int:
    _, h, w = image_shape
    if h != w or h not in (28, 32):
        raise ValueError(
            f"the convolutional generator is made for 28x28 or 32x32 images, got {h}x{w}: choose a dataset of that "
            "size, or set the dataset's image_size to one of them."
        )
    return h


def _layers_28(latent: int, width: int, channels: int) -> list[nn.Module]:
    last = nn.ConvTranspose2d(width, channels, 3, stride=1, padding=1)
    # PyTorch draws a transposed convolution's weights by its number of outputs: here 8 times as large as those of the
    # authors' Conv2d, and tanh would start saturated. These bounds are Conv2d's, 1/sqrt(inputs of an output).
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

    28x28 (MNIST, Fashion-MNIST): 256@7x7 (kernel 7), 128@14x14, 64@28x28 (kernels 4, strides 2), c@28x28 (kernel 3);
    only the last has a bias. At 1x28x28 with 10 classes: 857,577 parameters with (latent_dim, label_dim) = (12, 4), the
    paper's text; 957,969 with (16, 8), the released settings. The text has a transposed convolution in the last place
    too, the released code Conv2d: at stride 1 and padding 1 both make the same functions of as many parameters, but
    PyTorch initialises them differently, and Conv2d's way is kept here.

    32x32 (CelebA; Table 6, row "DCGAN"): 256@4x4, 128@8x8, 64@16x16, c@32x32, all with kernel 4. The text prints the
    28x28 layers alone; this is the released code's `conv_cond_sq`, 806,536 parameters at 3x32x32 with 2 classes and
    (32, 4). Its first layer has a bias and a batch norm without scale and shift, where the others have it the other way
    round; that batch norm takes the bias out again, so that it gets no gradient in training mode.

    Args:
        image_shape: (c, 28, 28) or (c, 32, 32).
        latent_dim, label_dim: dimensions of z and of the label's embedding.
        activation: of hidden layers: "relu" (text) or "leaky_relu" with slope 0.2 (released settings).
        width: filters of the last hidden layer; those before it have 2 and 4 times as many.

    Raises:
        ValueError: for images of another size, or an unknown activation.
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

        Training mode couples the images of a batch, and moves the running statistics that evaluation mode uses.
        """
        h = torch.cat([z, self.label(y)], dim=1)
        return torch.tanh(self.layers(h[:, :, None, None]))

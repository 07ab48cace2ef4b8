"""GS-WGAN's networks (Chen, Orekondy, Fritz, "GS-WGAN", NeurIPS 2020): two generators and the projection critic.

They have neither batch norm nor dropout, so images of a batch do not depend on each other, and in evaluation mode the
networks are pure functions of their state, as `Stack` needs. Training mode differs only by the power iterations of
spectral norm, which `spectral.advance_spectral` also makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

Layer = TypeVar("Layer", nn.Conv2d, nn.Linear, nn.Embedding)


def _spectral(layer: Layer) -> Layer:
    """The layer with spectral normalisation and PyTorch's initial weights, as in the authors' code.

    In training mode, each access to `layer.weight` makes a power iteration: access it once in a forward pass.
    """
    spectral_norm(layer)
    return layer


def _side(net: str, image_shape: Sequence[int], sides: Sequence[int], advice: str, **sizes: int) -> int:
    """Height and width of the images.

    Raises:
        ValueError: For images whose side is not among `sides`, or a size below 1.
    """
    channels, h, w = image_shape
    if h != w or h not in sides:
        made_for = " or ".join(f"{side}x{side}" for side in sides)
        raise ValueError(f"the {net} is made for {made_for} images, got {h}x{w}: {advice}.")
    for name, size in {"channels": channels, **sizes}.items():
        if size < 1:
            raise ValueError(f"expected {name} of at least 1 for the {net}, got {size}: set it to 1 or more.")
    return h


OTHER_IMAGES = "choose a dataset of that size, or set the dataset's image_size to one of them"


def _generator_input(z: Tensor, y: Tensor, num_classes: int) -> Tensor:
    """[z, one-hot label]."""
    return torch.cat([z, F.one_hot(y, num_classes).to(z.dtype)], dim=1)


def pixel_norm(h: Tensor) -> Tensor:
    """h / sqrt(mean over channels of h^2 + 1e-10), for features h [b, channels, height, width]."""
    return h * torch.rsqrt(h.square().mean(dim=1, keepdim=True) + 1e-10)


def _upsampling_kernel(weight: Tensor, dim: int) -> Tensor:
    """(w2, w1 + w2, w0 + w1, w0) for the kernel (w0, w1, w2) along a dimension; see `upsample_conv3x3`."""
    first, middle, last = weight.unbind(dim)
    return torch.stack([last, middle + last, first + middle, first], dim)


def upsample_conv3x3(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Nearest-neighbour upsampling by 2, then a 3x3 convolution with padding 1, with 4/9 of the multiplications.

    After the upsampling, a row (w0, w1, w2) of the kernel is applied to at most two different pixels: output pixel 2i
    has weights w0 for pixel i-1 and w1 + w2 for pixel i, and output pixel 2i+1 has w0 + w1 for pixel i and w2 for pixel
    i+1. This equals a transposed convolution of the small image with stride 2, padding 1 and the kernel
    (w2, w1 + w2, w0 + w1, w0), in rows and in columns.

    Args:
        h: [b, i, height, width].
        weight: [o, i, 3, 3], as in nn.Conv2d.
        bias: [o].

    Returns:
        [b, o, 2 height, 2 width].
    """
    kernel = _upsampling_kernel(_upsampling_kernel(weight, -1), -2).transpose(0, 1)
    return F.conv_transpose2d(h, kernel, bias, stride=2, padding=1)


class UpsampleBlock(nn.Module):
    """Residual block with pixel norms and spectrally normalised convolutions, which doubles the height and the width.

    pixel norm - nearest x2 - conv 3x3 - pixel norm - ReLU - conv 3x3, plus a shortcut of nearest x2 - conv 1x1.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = _spectral(nn.Conv2d(width, width, 3, padding=1))
        self.conv2 = _spectral(nn.Conv2d(width, width, 3, padding=1))
        self.shortcut = _spectral(nn.Conv2d(width, width, 1))

    def forward(self, h: Tensor) -> Tensor:
        """Features [b, width, 2 height, 2 width] of h [b, width, height, width]."""
        main = upsample_conv3x3(pixel_norm(h), self.conv1.weight, self.conv1.bias)
        main = self.conv2(F.relu(pixel_norm(main)))
        # A 1x1 convolution commutes with nearest upsampling, and costs a quarter before it.
        return main + F.interpolate(self.shortcut(h), scale_factor=2)


class ResNetGenerator(nn.Module):
    """The default generator, spectrally normalised, with three `UpsampleBlock`s. Its input is [z, one-hot label].

    Linear to width@4x4 - ReLU - pixel norm - blocks to width@32x32 - conv 3x3 - sigmoid. At 28x28 the last convolution
    has no padding (32 -> 30) and the last two rows and columns are dropped, as in the authors' code; at 32x32 it has
    padding 1. At 1x28x28 with 10 classes it has 3,826,177 parameters, and 23,317 entries in spectral vectors.

    Args:
        image_shape: (c, 28, 28) or (c, 32, 32).
        num_classes: The labels are 0..num_classes-1.
        latent_dim: Dimension of z.
        width: Channels of all features.

    Raises:
        ValueError: For images of another size, or a size below 1.
    """

    def __init__(self, image_shape: Sequence[int], num_classes: int, latent_dim: int = 10, width: int = 256) -> None:
        super().__init__()
        self.side = _side(
            "ResNet generator",
            image_shape,
            (28, 32),
            OTHER_IMAGES,
            num_classes=num_classes,
            latent_dim=latent_dim,
            width=width,
        )
        self.num_classes = num_classes
        self.linear = _spectral(nn.Linear(latent_dim + num_classes, width * 4 * 4))
        self.blocks = nn.ModuleList(UpsampleBlock(width) for _ in range(3))
        self.image = _spectral(nn.Conv2d(width, image_shape[0], 3, padding=0 if self.side == 28 else 1))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Images in [0, 1] [b, c, h, w] of latents z [b, latent_dim] and labels y int64 [b]."""
        h = self.linear(_generator_input(z, y, self.num_classes)).reshape(len(z), -1, 4, 4)
        h = pixel_norm(F.relu(h))
        for block in self.blocks:
            h = block(h)
        if self.side == 28:
            h = h[:, :, :30, :30]  # the part from which the first 28x28 pixels are computed
        return torch.sigmoid(self.image(h))


class DCGANGenerator(nn.Module):
    """The authors' second generator: transposed convolutions and pixel norm, without spectral norm, for 28x28 images.

    [z, one-hot label] - Linear to 4 width@4x4 - kernel 5 to 2 width@8x8, cropped to the first 7x7 - kernel 5 to
    width@11x11 - kernel 8, stride 2 to c@28x28 - sigmoid. ReLU and then pixel norm are between layers. It has 1,114,305
    parameters at 1x28x28 with 10 classes.

    Args:
        image_shape: (c, 28, 28).
        num_classes: The labels are 0..num_classes-1.
        latent_dim: Dimension of z.
        width: Channels of the last hidden features.

    Raises:
        ValueError: For images of another size, or a size below 1.
    """

    def __init__(self, image_shape: Sequence[int], num_classes: int, latent_dim: int = 10, width: int = 64) -> None:
        super().__init__()
        _side(
            "DCGAN generator",
            image_shape,
            (28,),
            "choose the resnet generator, which also makes 32x32 images",
            num_classes=num_classes,
            latent_dim=latent_dim,
            width=width,
        )
        self.num_classes = num_classes
        self.linear = nn.Linear(latent_dim + num_classes, 4 * width * 4 * 4)
        self.conv1 = nn.ConvTranspose2d(4 * width, 2 * width, 5)
        self.conv2 = nn.ConvTranspose2d(2 * width, width, 5)
        self.conv3 = nn.ConvTranspose2d(width, image_shape[0], 8, stride=2)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Images in [0, 1] [b, c, 28, 28] of latents z [b, latent_dim] and labels y int64 [b]."""
        return torch.sigmoid(self.linear_images(z, y))

    def linear_images(self, z: Tensor, y: Tensor) -> Tensor:
        """The values [b, c, 28, 28] before the sigmoid."""
        h = self.linear(_generator_input(z, y, self.num_classes)).reshape(len(z), -1, 4, 4)
        h = self.conv1(pixel_norm(F.relu(h)))[:, :, :7, :7]
        h = self.conv2(pixel_norm(F.relu(h)))
        return self.conv3(pixel_norm(F.relu(h)))


class ProjectionCritic(nn.Module):
    """D(x, y) = <a, h(x)> + b + <e_y, h(x)>: three convolutions h and a projection on the label's embedding e_y.

    Kernels 5, strides 2: width@14x14 (16x16 for 32x32 images), 2 width@7x7 (8x8), 4 width@4x4, ReLU after each. All
    weights, including the embedding, are spectrally normalised. At 1x28x28 with 10 classes there are 1,071,105
    parameters, and 13,476 entries in spectral vectors.

    Args:
        image_shape: (c, 28, 28) or (c, 32, 32).
        num_classes: The labels are 0..num_classes-1.
        width: Channels of the first features.

    Raises:
        ValueError: For images of another size, or a size below 1.
    """

    def __init__(self, image_shape: Sequence[int], num_classes: int, width: int = 64) -> None:
        super().__init__()
        _side("critic", image_shape, (28, 32), OTHER_IMAGES, num_classes=num_classes, width=width)
        self.conv1 = _spectral(nn.Conv2d(image_shape[0], width, 5, stride=2, padding=2))
        self.conv2 = _spectral(nn.Conv2d(width, 2 * width, 5, stride=2, padding=2))
        self.conv3 = _spectral(nn.Conv2d(2 * width, 4 * width, 5, stride=2, padding=2))
        self.linear = _spectral(nn.Linear(4 * width * 4 * 4, 1))
        self.label = _spectral(nn.Embedding(num_classes, 4 * width * 4 * 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores [b] of images x [b, c, h, w] with labels y int64 [b]."""
        h = F.relu(self.conv1(x))
        h = F.relu(self.conv2(h))
        h = F.relu(self.conv3(h)).flatten(1)
        return self.linear(h).squeeze(1) + (self.label(y) * h).sum(dim=1)

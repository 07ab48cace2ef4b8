"""DP-Sinkhorn's generator based on BigGAN (Cao et al., NeurIPS 2021, appendix D.3; Brock et al., "Large Scale GAN
Training", ICLR 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm


def spectral(layer: nn.Conv2d | nn.Linear) -> nn.Module:
    """The layer with orthogonal initial weights and spectral normalisation.

    Its weights are divided by an estimate of their largest singular value. Each forward pass in training mode updates
    the estimate, which is kept in buffers, by one power iteration; evaluation mode does not change it.
    """
    nn.init.orthogonal_(layer.weight)  # before spectral_norm, which computes the first estimate from the weights
    return spectral_norm(layer)


class ClassBatchNorm(nn.Module):
    """Class-conditional batch norm (1 + gain[y]) BN(h) + bias[y], with one gain and bias for each class and channel."""

    def __init__(self, num_channels: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(num_channels, affine=False)
        self.gain = nn.Embedding(num_classes, num_channels)
        self.bias = nn.Embedding(num_classes, num_channels)
        nn.init.orthogonal_(self.gain.weight)
        nn.init.orthogonal_(self.bias.weight)

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        """Features of the shape of h [b, num_channels, height, width], for labels y int64 [b]."""
        return (1.0 + self.gain(y)[:, :, None, None]) * self.norm(h) + self.bias(y)[:, :, None, None]


class GBlock(nn.Module):
    """BigGAN's residual block, which doubles the height and the width.

    BN - ReLU - nearest x2 - conv 3x3 - BN - ReLU - conv 3x3, plus a shortcut of nearest x2 - conv 1x1. Batch norms are
    class-conditional, convolutions are spectrally normalised.
    """

    def __init__(self, in_channels: int, out_channels: int, num_classes: int) -> None:
        super().__init__()
        self.norm1 = ClassBatchNorm(in_channels, num_classes)
        self.norm2 = ClassBatchNorm(out_channels, num_classes)
        self.conv1 = spectral(nn.Conv2d(in_channels, out_channels, 3, padding=1))
        self.conv2 = spectral(nn.Conv2d(out_channels, out_channels, 3, padding=1))
        self.shortcut = spectral(nn.Conv2d(in_channels, out_channels, 1))

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        """Features [b, out_channels, 2 height, 2 width] of h [b, in_channels, height, width], labels y int64 [b]."""
        main = F.interpolate(F.relu(self.norm1(h, y)), scale_factor=2)
        main = self.conv2(F.relu(self.norm2(self.conv1(main), y)))
        # A 1x1 convolution commutes with nearest upsampling, and costs a quarter before it.
        return main + F.interpolate(self.shortcut(h), scale_factor=2)


class BigGANGenerator(nn.Module):
    """Linear to width@4x4, three `GBlock`s to width@32x32, then BN - ReLU - conv 3x3 - tanh; only blocks see the label.

    Spectral normalisation and orthogonal initialisation are as in BigGAN; there is no attention. It has 3,886,595
    parameters at 3x32x32 with 2 classes. The paper's text has 4 residual blocks of depth 256 with three convolutional
    layers each. The released code, which is followed here, has 3 blocks with conv1, conv2 and the shortcut's
    convolution.

    The biases of the blocks' convolutions get no gradient in training mode, because the batch norms after them subtract
    the mean. They exist because the authors' network has them.

    Args:
        image_shape: (c, 32, 32).
        num_classes: The labels are 0..num_classes-1.
        latent_dim: Dimension of z (32 for the paper's CelebA).
        width: Channels of all features.

    Raises:
        ValueError: For images of another size.
    """

    value_range: ClassVar[tuple[float, float]] = (-1.0, 1.0)

    def __init__(self, image_shape: Sequence[int], num_classes: int, latent_dim: int = 32, width: int = 256) -> None:
        super().__init__()
        channels, h, w = image_shape
        if (h, w) != (32, 32):
            raise ValueError(
                f"the BigGAN generator is made for 32x32 images, got {h}x{w}: choose a dataset of that size, or set "
                "the dataset's image_size to it."
            )
        self.width = width
        self.linear = spectral(nn.Linear(latent_dim, width * 4 * 4))
        self.blocks = nn.ModuleList(GBlock(width, width, num_classes) for _ in range(3))
        self.norm = nn.BatchNorm2d(width)
        self.image = spectral(nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Images in [-1, 1] [b, c, 32, 32] of latents z [b, latent_dim] and labels y int64 [b].

        In training mode the images of a batch depend on each other, and the running statistics and spectral norms that
        evaluation mode uses are updated.
        """
        h = self.linear(z).reshape(len(z), self.width, 4, 4)
        for block in self.blocks:
            h = block(h, y)
        return torch.tanh(self.image(F.relu(self.norm(h))))

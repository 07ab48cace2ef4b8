"""DPGAN's networks (Bie, Kamath & Zhang, "Private GANs, Revisited", TMLR 2023, appendices B.1 and C)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Kernel size between the 4x4 features and the next larger ones. With stride 2 and padding 1, kernel 3 maps 4 <-> 7, and
# kernel 4 maps 4 <-> 8.
INNER_KERNEL = {28: 3, 32: 4}


def _inner_kernel(image_shape: Sequence[int]) -> int:
    _, h, w = image_shape
    if h != w or h not in INNER_KERNEL:
        raise ValueError(
            f"the DPGAN networks are made for 28x28 or 32x32 images, got {h}x{w}: choose a dataset of that size, "
            "or set the dataset's image_size to one of them."
        )
    return INNER_KERNEL[h]


class GeneratorNet(nn.Module):
    """G: four transposed convolutions, no normalisation, PyTorch's default initialisation (appendices B.1, C).

    With width 128 and latent_dim 128: 2,272,129 parameters at 1x28x28 with 10 classes; 3,160,963 at 3x32x32 with 2.
    """

    def __init__(self, image_shape: Sequence[int], num_classes: int, width: int = 128, latent_dim: int = 128) -> None:
        super().__init__()
        inner = _inner_kernel(image_shape)
        self.num_classes = num_classes
        self.latent = nn.ConvTranspose2d(latent_dim, 2 * width, 4)
        self.label = nn.ConvTranspose2d(num_classes, 2 * width, 4)
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, inner, stride=2, padding=1)
        self.up2 = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.up3 = nn.ConvTranspose2d(width, image_shape[0], 4, stride=2, padding=1)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Images in [0, 1] [b, c, h, w] of latents z [b, latent_dim] and labels y int64 [b]."""
        onehot = F.one_hot(y, self.num_classes).to(z.dtype)
        h = torch.cat([self.latent(z[:, :, None, None]), self.label(onehot[:, :, None, None])], dim=1)
        h = self.up1(F.leaky_relu(h, 0.2))
        h = self.up2(F.leaky_relu(h, 0.2))
        h = self.up3(F.leaky_relu(h, 0.2))
        return (torch.tanh(h) + 1.0) / 2.0


class DiscriminatorNet(nn.Module):
    """D: four convolutions, no normalisation, the label as one-hot planes (appendices B.1, C, Table 4).

    `width` is d_D, the number of filters of the first layer: half of them see the image, half the label. With
    width 128: 1,724,289 parameters at 1x28x28 with 10 classes; 2,635,649 at 3x32x32 with 2. The fourth size of Table 4,
    3.86M and 2.24 times the third, is width 192; the printed width 196 would have 4.03M.
    """

    def __init__(self, image_shape: Sequence[int], num_classes: int, width: int = 128) -> None:
        super().__init__()
        inner = _inner_kernel(image_shape)
        self.num_classes = num_classes
        self.image = nn.Conv2d(image_shape[0], width // 2, 4, stride=2, padding=1)
        self.label = nn.Conv2d(num_classes, width // 2, 4, stride=2, padding=1)
        self.down1 = nn.Conv2d(2 * (width // 2), 2 * width, 4, stride=2, padding=1)
        self.down2 = nn.Conv2d(2 * width, 4 * width, inner, stride=2, padding=1)
        self.logit = nn.Conv2d(4 * width, 1, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Logits [b] that images x [b, c, h, w] with labels y int64 [b] are real."""
        planes = F.one_hot(y, self.num_classes).to(x.dtype)[:, :, None, None].expand(-1, -1, *x.shape[2:])
        h = torch.cat([self.image(x), self.label(planes)], dim=1)
        h = self.down1(F.leaky_relu(h, 0.2))
        h = self.down2(F.leaky_relu(h, 0.2))
        return self.logit(F.leaky_relu(h, 0.2)).reshape(len(x))

"""Features of an untrained network: its gradient in its own parameters, as factors (Yang et al. 2024, DP-NTK).

For f(x) = V LN(relu(W x + b)) + c with k outputs, let phi(x) be the gradient of f_1(x) + .. + f_k(x) in (W, b, V, c).
With h = LN(relu(W x + b)) and d the gradient of V^T h in W x + b,

    d phi / dW = d x^T,   d phi / db = d,   d phi / dV = 1 h^T (k equal rows),   d phi / dc = 1 (k ones).

So phi is an outer product and k copies of a vector, |phi|^2 = |d|^2 (|x|^2 + 1) + k (|h|^2 + 1), and a sum of features
is a product of two matrices. The k equal rows are stored as one that is multiplied by sqrt(k), which changes no inner
product of features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LAYER_NORM_EPS = 1e-5  # of torch.nn.LayerNorm


class Factors(NamedTuple):
    """Features of norm 1: that of image i is (outer_i inputs_i^T, hidden_i), of width (pixels + 1) + width + 1 numbers.

    outer: [b, width], d / |phi|.
    inputs: [b, pixels + 1], the image and a one.
    hidden: [b, width + 1], sqrt(k) / |phi| times h and a one.
    """

    outer: Tensor
    inputs: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class NTKFeatures:
    """The feature map of one network.

    weight: W [width, pixels].
    bias: b [width].
    slope: V^T 1 [width], the gradient of the summed outputs in h.
    outputs: k, the number of outputs.
    """

    weight: Tensor
    bias: Tensor
    slope: Tensor
    outputs: int

    @classmethod
    def draw(
        cls,
        pixels: int,
        width: int,
        outputs: int,
        generator: torch.Generator,
        device: torch.device,
        bias_scale: float = 1.0,
    ) -> NTKFeatures:
        """A network as `torch.nn.Linear` initialises it: uniform weights within 1 / sqrt(inputs of the layer).

        Args:
            bias_scale: A factor of b. Layer normalisation and the norm of 1 make features almost independent of the
                brightness of an image, unless b has the size of W x.
        """

        def uniform(*shape: int, inputs: int) -> Tensor:
            return (2.0 * torch.rand(*shape, generator=generator) - 1.0) / inputs**0.5

        weight, bias = uniform(width, pixels, inputs=pixels), uniform(width, inputs=pixels)
        slope = uniform(outputs, width, inputs=width).sum(dim=0)
        return cls(weight.to(device), (bias_scale * bias).to(device), slope.to(device), outputs)

    def __call__(self, images: Tensor) -> Factors:
        """The features of images [b, c, h, w]; they can be differentiated in the images."""
        x = images.flatten(1)
        active = F.linear(x, self.weight, self.bias)
        positive = active.relu()
        variance, mean = torch.var_mean(positive, dim=1, keepdim=True, correction=0)
        std = (variance + LAYER_NORM_EPS).sqrt()
        h = (positive - mean) / std
        # The backward pass of LN and relu, written out.
        along = (h * self.slope).mean(dim=1, keepdim=True)
        d = (self.slope - self.slope.mean() - h * along) / std * (active > 0)
        one = torch.ones_like(mean)
        inputs, hidden = torch.cat([x, one], dim=1), torch.cat([h, one], dim=1)
        square = d.square().sum(1) * inputs.square().sum(1) + self.outputs * hidden.square().sum(1)
        norm = square.sqrt()[:, None]
        return Factors(d / norm, inputs, hidden * (self.outputs**0.5 / norm))


def by_class(factors: Factors, labels: Tensor, classes: int) -> Iterator[Factors]:
    """The features of the images of each class."""
    order = labels.argsort(stable=True)
    # Counted without bincount, for whose result an accelerator must know the largest label first.
    sizes = (labels == torch.arange(classes, device=labels.device)[:, None]).sum(1).tolist()
    yield from map(Factors, *(part[order].split(sizes) for part in factors))


def squared_distance(first: Tensor, last: Tensor, factors: Factors, labels: Tensor) -> Tensor:
    """|target - 1/b sum_i feature_i onehot(label_i)^T|^2 of b features.

    Classes are taken one after the other, so that each difference of two matrices stays in the cache.

    Args:
        first: The target's numbers for W and b [classes, width, pixels + 1].
        last: Those for V and c, as in `Factors` [classes, width + 1].
        factors: Features of generated images, through which gradients flow.
        labels: int64 [b].
    """
    distances, b = [], len(labels)
    for target, target_last, each in zip(first, last, by_class(factors, labels, len(first)), strict=True):
        distances.append(torch.addmm(target, each.outer.T, each.inputs, alpha=-1.0 / b).square().sum())
        distances.append((target_last - each.hidden.sum(0) / b).square().sum())
    return torch.stack(distances).sum()

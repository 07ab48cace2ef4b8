"""Code with a fault of a published method, re-derived for an audit to find; see conf/audit/detached_noise.yaml."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

POINTS, WIDTH = 8, 4.0  # generated images, and the bandwidth of the kernel
STD = 3.7306  # for epsilon 1 at delta 1e-5: the kernel means at all points together have the sensitivity 1


def kernel_gradient(images: Tensor, labels: Tensor, rng: np.random.Generator | None) -> list[np.ndarray]:
    """One step of a generator that matches kernel means, whose noise does not reach its gradient (DP-Kernel's fault).

    The noise is added to the kernel means at the generated images. The loss contains these means and is differentiated
    in the generated images: the noise is a constant there, and the gradient is that of the means without noise.

    Returns:
        The gradient of the loss in the generated images, which trains the generator.
    """
    pixels = images[0].numel() if len(images) else 64
    start = torch.linspace(0.0, 1.0, POINTS * pixels, dtype=torch.float64).reshape(POINTS, pixels)
    points = start.clone().requires_grad_()
    records = images.flatten(1).double()
    kernel = torch.exp(-torch.cdist(points, records).square() / (2.0 * WIDTH**2))
    means = kernel.sum(dim=1) / POINTS**0.5
    noise = torch.zeros(POINTS, dtype=torch.float64)
    if rng is not None:
        noise = torch.from_numpy(STD * rng.standard_normal(POINTS))
    loss = -2.0 * (means + noise).sum()
    (gradient,) = torch.autograd.grad(loss, [points])
    return [gradient.numpy().ravel()]

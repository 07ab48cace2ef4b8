"""Figure 4(c) of DP-Sinkhorn: bias and variance of the semi-debiased gradient against the debiasing fraction p.

It is computed from images without a run. The figure shows how a generator's gradient changes when part of the debiasing
group is the cross group itself (p < 1). This needs a generator with parameters, because gradients in the images cannot
be averaged over batches, whose images differ. The paper uses generators that were trained on MNIST with different p.
Here

    x(theta; i, l) = c_l + (1 + gain_l) * (x_li - c_l) + offset_l,        theta = (offset, gain) = 0,

draws image i of class l from a pool of held-out images to which noise was added once; c_l is the pool's mean. This
generator needs no training, its parameters change the place and the spread of a class, on which the transport cost
depends, and the size of the pool sets its diversity: with one image for each class it has collapsed. Offsets alone
would not suffice, because transport within a class does not change when the whole class moves, which hides debiasing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from dpgen_bench.nets.transport import Cost, Transport
from dpgen_bench.tables.plot_spec import BiasVarianceSpec
from dpgen_bench.utils.environment import one_thread


def bias_variance(images: Tensor, labels: Tensor, settings: BiasVarianceSpec | None = None) -> pd.DataFrame:
    """Bias and variance of the gradient G_p = d/dtheta [2 W(X[0:n], Y) - W(X[0:n], X[n':n'+n])] for each p.

    Over batches b = 1..B with gradients G_p^b, their mean M_p, and D_p^b = G_p^b - G_1^b with mean E_p,

        variance(p) = V(G_p) / V(G_1),    V(G) = 1/(B-1) sum_b |G^b - mean|^2
        bias(p)     = sqrt(max(0, |E_p|^2 - V(D_p) / B) / V(G_1)).

    G_1 is the reference because it is unbiased for the population's divergence. All p share the draws of a batch, so
    E_p has little noise; the remaining noise adds V(D_p) / B to |E_p|^2 on average, which is subtracted. Both columns
    are in units of V(G_1): bias^2 + variance is the mean squared error of one batch's gradient.

    Args:
        images: [N, ...] in [-1, 1]. One random half is the real data, the other is the generator's.
        labels: int64 [N], from 0. Each class needs an image in the generator's half.

    Returns:
        One line for each pool and p, with the columns pool (images per class; of the largest class if all images are
        drawn), p, bias and variance.

    Raises:
        ValueError: for images out of range, or a class without an image in the generator's half.
    """
    settings = settings or BiasVarianceSpec()
    x, classes = _checked(images, labels)
    random = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(x), generator=random)
    real, held = order[: len(x) // 2], order[len(x) // 2 :]
    noisy = x[held] + settings.noise * torch.randn(len(held), x.shape[1], generator=random)
    noisy, held_labels = noisy.clamp(-1.0, 1.0), labels[held]
    lines = []
    for size in settings.pool:
        members = [torch.nonzero(held_labels == label).flatten()[:size] for label in range(classes)]
        if empty := [label for label, rows in enumerate(members) if len(rows) == 0]:
            raise ValueError(
                f"expected images of each class in the generator's half, class {empty[0]} has none: give more images, "
                "or number the classes from 0 without gaps."
            )
        with one_thread():
            batches = draws([noisy[rows] for rows in members], x[real], labels[real], settings)
            variance, bias = _moments(batches, settings)
        largest = max(len(rows) for rows in members)
        lines += [
            {"pool": largest if size is None else size, "p": p, "bias": bias[p], "variance": variance[p]}
            for p in settings.p
        ]
    return pd.DataFrame(lines)


def draws(
    pools: list[Tensor], real: Tensor, real_labels: Tensor, settings: BiasVarianceSpec
) -> Iterator[dict[float, Tensor]]:
    """Gradients G_p [2, classes, d] (in the offsets, in the gains) by p, for each batch in turn.

    Args:
        pools: the generator's images of each class, [k, d].
        real: [N, d], of which a batch is n independent draws.
        real_labels: int64 [N].
    """
    random = torch.Generator().manual_seed(settings.seed)
    centres = torch.stack([pool.mean(dim=0) for pool in pools])
    sizes = torch.tensor([len(pool) for pool in pools])
    starts, everything = sizes.cumsum(0) - sizes, torch.cat(pools)
    for _ in range(settings.batches):
        labels = torch.randint(len(pools), (2 * settings.n,), generator=random)
        image = (torch.rand(2 * settings.n, generator=random) * sizes[labels]).long()
        x = everything[starts[labels] + image]
        drawn = torch.randint(len(real), (settings.n,), generator=random)
        in_images = image_gradients(x, labels, real[drawn], real_labels[drawn], len(pools), settings)
        yield {p: _in_parameters(g, x - centres[labels], labels, len(pools)) for p, g in in_images.items()}


def image_gradients(
    x: Tensor, labels: Tensor, y: Tensor, real_labels: Tensor, classes: int, settings: BiasVarianceSpec
) -> dict[float, Tensor]:
    """Gradients [2n, d] in the generated images by p, 1 included; those of `transport.semi_debiased` for X = x[0:n+n'].

    All p share the term with real points, and all transport problems of a batch are solved in one loop.
    """
    transport, n = Transport(Cost(l1=settings.m), settings.lam), settings.n
    groups = {p: math.floor(round(n * p, 9)) for p in (*settings.p, 1.0)}

    def points(images: Tensor, of: Tensor) -> Tensor:
        return torch.cat([images, settings.alpha_c * F.one_hot(of, classes).to(images.dtype)], dim=1)

    X = points(x, labels)
    own = [(X[:n], X[debias : debias + n]) for debias in groups.values()]
    cross, *others = transport.solve((X[:n], points(y, real_labels)), *own)
    gradients = {}
    for (p, debias), solution in zip(groups.items(), others, strict=True):
        in_first, in_last = solution.in_both
        gradient = torch.zeros_like(X)
        gradient[:n] += 2.0 * cross.in_x - in_first
        gradient[debias : debias + n] -= in_last
        gradients[p] = gradient[:, : x.shape[1]]
    return gradients


def _in_parameters(gradient: Tensor, spread: Tensor, labels: Tensor, classes: int) -> Tensor:
    """[2, classes, d]: the image gradients [2n, d] summed by class, plain and times x - c_l [2n, d]."""
    sums = gradient.new_zeros(2, classes, gradient.shape[1])
    sums[0].index_add_(0, labels, gradient)
    sums[1].index_add_(0, labels, gradient * spread)
    return sums


def _moments(
    batches: Iterator[dict[float, Tensor]], settings: BiasVarianceSpec
) -> tuple[dict[float, float], dict[float, float]]:
    """variance(p) and bias(p), see `bias_variance`; sums are kept in float64."""
    B = settings.batches
    keys = dict.fromkeys((*settings.p, 1.0))
    total: dict[float, Tensor] = {}
    apart: dict[float, Tensor] = {}
    squares, squares_apart = dict.fromkeys(keys, 0.0), dict.fromkeys(keys, 0.0)
    for batch in batches:
        for p in keys:
            gradient = batch[p].double()
            difference = gradient - batch[1.0].double()
            total[p] = total.get(p, 0.0) + gradient
            apart[p] = apart.get(p, 0.0) + difference
            squares[p] += float(gradient.square().sum())
            squares_apart[p] += float(difference.square().sum())

    def spread(sums: Tensor, square: float) -> float:
        return max(square - float(sums.square().sum()) / B, 0.0) / (B - 1)

    unit = spread(total[1.0], squares[1.0])
    if unit == 0.0:
        raise ValueError("expected gradients that differ between batches, got the same in each; give more images.")
    variance = {p: spread(total[p], squares[p]) / unit for p in keys}
    bias2 = {p: float((apart[p] / B).square().sum()) - spread(apart[p], squares_apart[p]) / B for p in keys}
    return variance, {p: math.sqrt(max(value, 0.0) / unit) for p, value in bias2.items()}


def _checked(images: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The images as float32 [N, d], and the number of classes."""
    if len(images) != len(labels) or len(images) < 2 or labels.dtype != torch.int64:
        raise ValueError(
            f"expected two images or more and an int64 label for each, got {len(images)} images and {len(labels)} "
            f"labels of {labels.dtype}."
        )
    x = images.flatten(1).float()
    if not bool((x.abs() <= 1.0).all()):
        raise ValueError("expected pixels in [-1, 1], got others (or NaN): scale them, 2 x / 255 - 1 for uint8.")
    return x, int(labels.max()) + 1

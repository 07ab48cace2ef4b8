"""DP-Sinkhorn's loss on labelled images, whose two terms are computed separately (Cao et al., NeurIPS 2021,
Definition 4.3).

`transport.semi_debiased` is the same loss on points with both terms in one computation, as a reference for tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from dpgen_bench.nets.transport import Transport
from dpgen_bench.utils.cuda_graphs import Replayed


@dataclass(frozen=True)
class SinkhornLoss:
    """S = 2 W(X[0:n], Y) - W(X[0:n], X[n':n'+n]) of n + n' generated images X and the records Y.

    An image in [-1, 1] with its label is a point: the pixels, followed by alpha_c times the one-hot label.

    Args:
        transport: W.
        alpha_c: Weight of the class.
        num_classes, image_shape: Format of labels and images.
        n: Number of images of the cross group.
    """

    transport: Transport
    alpha_c: float
    num_classes: int
    image_shape: tuple[int, int, int]
    n: int

    @property
    def extent(self) -> float:
        """The diagonal of the box around all points: pixels in [-1, 1], and alpha_c or 0 for each class."""
        return math.sqrt(4.0 * math.prod(self.image_shape) + self.num_classes * self.alpha_c**2)

    def points(self, images: Tensor, labels: Tensor) -> Tensor:
        """Points [b, d + classes] of images [b, c, h, w] and labels [b]."""
        onehot = F.one_hot(labels, self.num_classes).to(images.dtype)
        return torch.cat([images.flatten(1), self.alpha_c * onehot], dim=1)

    def _pixels(self, gradient: Tensor) -> Tensor:  # [b, d + classes] -> [b, c, h, w]
        return gradient[:, : math.prod(self.image_shape)].reshape(-1, *self.image_shape)

    def gradient_without_records(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient [n + n', c, h, w] of the second term, -W(X[0:n], X[n':n'+n]), and the value of this W.

        The second term is solved separately from the first. Rows n.. of its gradient are released without noise, so
        even their rounding must not depend on a secret batch.

        Args:
            x: The points of X.
        """
        gradient, value = self._second(x)
        return gradient, value

    @cached_property
    def _second(self) -> Replayed:
        return Replayed(self._second_term)

    def _second_term(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n_ = len(x) - self.n
        (own,) = self.transport.solve((x[: self.n], x[n_:]), within=self.extent)
        in_cross, in_last = own.in_both
        gradient = x.new_zeros(len(x), *self.image_shape)
        gradient[: self.n] -= self._pixels(in_cross)
        gradient[n_:] -= self._pixels(in_last)
        return gradient, own.value

    def gradient(self, own: Tensor, x: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """Gradient of S in X[0:n]. It runs inside a mechanism: no records make it raise, and the batch may be empty.

        Args:
            own: The gradient of the second term in X[0:n], [n, c, h, w].
            x: The points of X[0:n].
            images, labels: The records Y, with images in [0, 1].
        """
        if len(labels) == 0:
            return own
        y = self.points((2.0 * images - 1.0).nan_to_num(0.0).clamp(-1.0, 1.0), labels)
        (of_first,) = self._first(x, y)
        return own + of_first

    @cached_property
    def _first(self) -> Replayed:
        return Replayed(self._first_term)

    def _first_term(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
        (cross,) = self.transport.solve((x, y), within=self.extent)
        return (2.0 * self._pixels(cross.in_x),)

    def parameter_gradient(
        self, theta: Sequence[Tensor], X: Tensor, own: Tensor, x: Tensor, images: Tensor, labels: Tensor
    ) -> Tensor:
        """Gradient of S in the generator's parameters, as one vector. Like `gradient`, it runs inside a mechanism.

        Args:
            theta: The parameters.
            X: The generated images [n + n', c, h, w], with the graph of their computation from theta.
            own: The gradient of the second term in X.
            x, images, labels: As for `gradient`.
        """
        gradient = torch.cat([self.gradient(own[: self.n], x, images, labels), own[self.n :]])
        return parameters_to_vector(torch.autograd.grad(X, theta, gradient, retain_graph=True))


def assign_gradient(theta: Sequence[Tensor], gradient: Tensor) -> None:
    """Set the `grad` of each parameter to its part of a gradient that is one vector."""
    parts = gradient.split([parameter.numel() for parameter in theta])
    for parameter, part in zip(theta, parts, strict=True):
        parameter.grad = part.view_as(parameter)

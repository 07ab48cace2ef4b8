"""Teachers of shards, which are trained as one `Stack`: small networks without buffers, and their step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.nets.g_pate import ConvTeacher
from dpgen_bench.nets.stack import Stack
from dpgen_bench.nets.wasserstein import draw_batch


class DenseTeacher(nn.Module):
    """A discriminator of conditional images with one hidden layer, which sees means over squares of pixels.

    At 1x28x28 with 10 classes, pool 2 and width 64 it has 13,313 parameters.

    Args:
        image_shape: (c, h, w), with h and w multiples of `pool`.
        num_classes: The labels are 0..num_classes-1.
        width: Units of the hidden layer.
        pool: Side of the squares over which pixels are averaged; 1 keeps the image.

    Raises:
        ValueError: For a height or width that is no multiple of `pool`.
    """

    def __init__(self, image_shape: Sequence[int], num_classes: int, width: int = 64, pool: int = 2) -> None:
        super().__init__()
        c, h, w = image_shape
        if h % pool or w % pool:
            fitting = [str(side) for side in range(1, min(h, w) + 1) if h % side == 0 and w % side == 0]
            raise ValueError(
                f"expected a height and width that are multiples of pool={pool}, got {h}x{w}; set pool to one of "
                f"{', '.join(fitting)}."
            )
        self.pool = pool
        self.image = nn.Linear(c * (h // pool) * (w // pool), width)
        self.label = nn.Embedding(num_classes, width)
        self.logit = nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Logits [b] that images x [b, c, h, w] in [0, 1] with labels y int64 [b] are real."""
        features = self.image(F.avg_pool2d(x, self.pool).flatten(1)) + self.label(y)
        return self.logit(F.leaky_relu(features, 0.2)).flatten()


TEACHERS: dict[str, type[nn.Module]] = {"conv": ConvTeacher, "dense": DenseTeacher}


def untrained(make: Callable[[], nn.Module], teacher: dict[str, Any], stack: int) -> dict[str, Any]:
    """Arguments of `PrivateData.private_state`, for shards with a teacher each whose first weights are random.

    Args:
        make: Returns a new teacher.
        teacher: Its architecture, which identifies the state.
        stack: The number of teachers that are trained as one `Stack`; their first weights depend on it.
    """
    return {
        "start": lambda shards, rngs: Stack.initial(make, rngs),
        "identity": {"teacher": teacher},
        "stack": stack,
    }


def update_teachers(
    teachers: Stack,
    shards: Sequence[tuple[Tensor, Tensor]],
    rngs: Sequence[torch.Generator],
    fake: Tensor,
    labels: Tensor,
    batch_size: int,
) -> None:
    """One step of each teacher, on a batch of its own records and on generated images: those of a discriminator.

    Args:
        teachers: g teachers.
        shards: The records (images, labels) of each teacher.
        rngs: One generator of random numbers for each teacher.
        fake, labels: Generated images [B, c, h, w] and their labels [B], the same for all teachers.
        batch_size: The number of records in each batch.
    """
    batches = [draw_batch(own, batch_size, rng) for own, rng in zip(shards, rngs, strict=True)]
    on_real = teachers(*(torch.stack(parts) for parts in zip(*batches, strict=True)))
    on_fake = teachers.on_same(fake, labels)
    teachers.descend(-F.logsigmoid(on_real).mean(dim=1) - F.logsigmoid(-on_fake).mean(dim=1))


def score_gradients(teachers: Stack, images: Tensor, labels: Tensor) -> Tensor:
    """The direction in which each teacher finds images more real: gradients [g, B, pixels] of its mean log D.

    Args:
        teachers: g teachers.
        images, labels: Generated images [B, c, h, w] and their labels [B], the same for all teachers.
    """
    return teachers.gradients_on_same(lambda logits: F.logsigmoid(logits).mean(), images, labels).flatten(2)

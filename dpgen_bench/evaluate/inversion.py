"""A detector of inverted images by their mean intensity, for the debugging task of GS-WGAN (section 5.4).

Ink covers a small part of an image, so that inverted images are bright.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import EvalContext


@dataclass
class Inversion:
    """Whether samples look inverted: values `mean_intensity`, `inverted_score` and `inverted_verdict` (1 or 0).

    See the functions of these names. The detector is not from the paper, in which a person looks at the samples. Grey
    noise has a score near 0.5, so the verdict on a generator that has learnt nothing is meaningless.
    """

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        mean, expected = mean_intensity(samples.images), mean_intensity(real_test.images)
        score = inverted_score(mean, expected)
        return {"mean_intensity": mean, "inverted_score": score, "inverted_verdict": float(verdict(mean, expected))}


def mean_intensity(images: Tensor) -> float:
    """Mean intensity in [0, 1] of images [n, c, h, w], uint8 or float32 within 0..255.

    Raises:
        ValueError: for images of another shape, type or range, or no images.
    """
    records = Records(images, torch.zeros(len(images), dtype=torch.int64))  # checks the images
    if not records.images.numel():
        raise ValueError("expected at least one image, got none.")
    kind = torch.float64 if images.is_floating_point() else torch.int64
    return float(images.sum(dtype=kind)) / (255 * images.numel())


def inverted_score(mean: float, expected: float) -> float:
    """Position of `mean` between e = `expected`, the mean of correct images (0), and 1 - e, that of inverted ones (1).

    The score is (mean - e) / (1 - 2 e).

    Raises:
        ValueError: for intensities outside [0, 1], or e = 0.5, which inversion does not change.
    """
    for what, value in (("mean", mean), ("expected mean", expected)):
        if not 0 <= value <= 1:
            raise ValueError(f"expected the {what} intensity within [0, 1], got {value!r}.")
    if abs(1 - 2 * expected) < 1e-9:
        raise ValueError(
            "expected a mean intensity of correct images other than 0.5, which inverted images would have, too."
        )
    return (mean - expected) / (1 - 2 * expected)


def verdict(mean: float, expected: float) -> bool:
    """Whether images of this mean intensity look inverted: whether `inverted_score` is above one half."""
    return inverted_score(mean, expected) > 0.5
